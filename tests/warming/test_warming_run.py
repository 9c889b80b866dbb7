"""Warming stays in its room, gives nothing up, stops when told, and is reported as it was."""

from __future__ import annotations

import numpy as np
import pytest

from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.types import TokenArray
from ostinato.warming.logs import LoggedPrompt
from ostinato.warming.plan import choose
from ostinato.warming.report import Books, Cache, expect
from ostinato.warming.run import warm

BLOCK = 4


def log(num_systems: int = 3, uses: int = 4, length: int = 40) -> list[LoggedPrompt]:
    prompts = []
    for system in range(num_systems):
        for user in range(uses - (system > 0)):
            tokens = np.full(length + 10, 1000 * system + user + 1, np.int32)
            tokens[:length] = system + 1
            prompts.append(LoggedPrompt(0.0, tokens, "", ""))
    return prompts


def test_what_is_warmed_is_found_to_the_token() -> None:
    prompts = log()
    prefixes = choose(prompts, 10)
    manager = KVManager(100, BLOCK)
    warmed = warm(prefixes, Books(manager, 1.0))
    assert warmed.tokens == [40, 40, 40]
    assert (warmed.computed_tokens, warmed.found_tokens, warmed.end) == (120, 0, "done")
    space = Namespace("log", "", "", "", "", "")
    assert [manager.peek(space, each.tokens) for each in prompts] == [40] * len(prompts)
    again = warm(prefixes, Books(manager, 1.0))
    assert again.computed_tokens <= len(prefixes)  # the last token of what is wholly there
    manager.check_integrity()


@pytest.mark.parametrize(("num_blocks", "share"), [(100, 0.15), (16, 1.0), (12, 1.0), (2, 1.0), (100, 0.0)])
def test_it_takes_free_room_of_its_share_alone(num_blocks: int, share: float) -> None:
    manager = KVManager(num_blocks, BLOCK)
    space = Namespace("log", "", "", "", "", "")
    mine: TokenArray = np.arange(5000, 5004, dtype=np.int32)
    with manager.acquire(space, mine) as lease:
        assert lease.reserve(4)
        lease.commit(mine)
    warmed = warm(choose(log(), 10), Books(manager, share))
    assert warmed.end == "full"
    used = manager.num_blocks - manager.num_free_blocks - 1
    assert used <= max(num_blocks * share, 0)
    assert manager.peek(space, np.append(mine, np.int32(7))) == 4, "something was given up for it"
    if used:
        assert used >= min(num_blocks * share, num_blocks - 1) - 2, "room was left"


def test_it_stops_when_told_between_pieces() -> None:
    class Told(Books):
        piece_tokens = 16
        waits = 0

        def wait_for_idle(self) -> bool:
            self.waits += 1
            return self.waits <= 4

    seen: list[int] = []
    manager = KVManager(100, BLOCK)
    warmed = warm(choose(log(), 10), Told(manager, 1.0), seen.append)
    assert warmed.end == "stopped"
    assert seen == [16, 16, 8, 16]
    assert warmed.tokens == [40, 16]
    assert manager.num_cached_tokens == 56


def test_the_report_is_of_the_log_with_and_without() -> None:
    prompts = log()
    prefixes = choose(prompts, 10)
    expected = expect(prompts, prefixes, Cache(100, BLOCK, "lru", 1.0))
    # Cold, the first of each system text computes it; warmed, nobody does.
    assert expected.prompt_tokens == 50 * len(prompts)
    assert expected.warm_hits - expected.cold_hits == 3 * 40
    assert expected.first_hits == 40
    assert expected.warm_rate > expected.cold_rate > 0
    assert expected.warmed.tokens == [40, 40, 40]
    nothing = expect(prompts, prefixes, Cache(100, BLOCK, "workload", 0.0))
    assert nothing.cold_hits == nothing.warm_hits
    below = expect(prompts, prefixes, Cache(100, 16, "lru", 1.0, tier_blocks=100))
    assert below.first_hits == 32  # whole blocks of 16
