"""What is worth warming: against a search of all choices, and by the reasons that are given for it."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest

from ostinato.warming.logs import LoggedPrompt
from ostinato.warming.plan import Prefix, choose


def prompt(tokens: list[int], time_s: float = 0.0, salt: str = "") -> LoggedPrompt:
    return LoggedPrompt(time_s, np.array(tokens, np.int32), salt, salt)


def token_values(prompts: list[LoggedPrompt]) -> dict[tuple[str, tuple[int, ...]], float]:
    """What each token is expected to save, by all that stands before it: the definition, word for word."""
    last_s, first_s = max(p.time_s for p in prompts), min(p.time_s for p in prompts)
    half_s = (last_s - first_s) / 2 or 1.0
    count: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    weight: dict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
    for each in prompts:
        tokens = each.tokens.tolist()
        for end in range(1, len(tokens)):
            count[each.salt, tuple(tokens[:end])] += 1
            weight[each.salt, tuple(tokens[:end])] += 0.5 ** ((last_s - each.time_s) / half_s)
    once, twice = (sum(n == k for n in count.values()) for k in (1, 2))
    discount = once / (once + 2 * twice) if once else 0.0
    return {key: weight[key] * (count[key] - discount) / count[key] for key in count}


def worth(chosen: list[Prefix], values: dict[tuple[str, tuple[int, ...]], float]) -> float:
    covered = {
        (p.salt, tuple(p.tokens[:end].tolist())) for p in chosen for end in range(1, len(p.tokens) + 1)
    }
    return sum(values[key] for key in covered)


def random_log(seed: int) -> list[LoggedPrompt]:
    chance = random.Random(seed)
    heads = [[chance.randrange(3) for _ in range(6)] for _ in range(3)]
    return [
        prompt(
            heads[chance.randrange(3)][: 1 + chance.randrange(6)]
            + [chance.randrange(3) for _ in range(1 + chance.randrange(4))],
            chance.random() * 100,
            "ab"[chance.randrange(2)],
        )
        for _ in range(25)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_each_choice_adds_most(seed: int) -> None:
    prompts = random_log(seed)
    values = token_values(prompts)
    chosen = choose(prompts, 100)
    keys = [key for key, value in values.items() if value >= 1.0]
    assert chosen
    for place, prefix in enumerate(chosen):
        before = worth(chosen[:place], values)
        assert prefix.value == pytest.approx(worth(chosen[: place + 1], values) - before)
        for salt, tokens in keys:
            other = Prefix(np.array(tokens, np.int32), 0, 0.0, 0, 0.0, salt, salt)
            assert worth([*chosen[:place], other], values) - before <= prefix.value + 1e-9
    # All that is worth it is covered in the end, and nothing else.
    assert worth(chosen, values) == pytest.approx(sum(values[key] for key in keys))
    assert sum(prefix.new_tokens for prefix in chosen) == len(keys)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_near_the_best_of_all(seed: int) -> None:
    prompts = random_log(seed)
    values = token_values(prompts)
    everything = choose(prompts, 100)
    best = max(worth(list(some), values) for some in combinations(everything, min(3, len(everything))))
    assert worth(choose(prompts, 3), values) == pytest.approx(best)


def test_what_was_asked_once_is_not_worth_computing_ahead() -> None:
    assert choose([prompt([1, 2, 3, 4]), prompt([5, 6, 7, 8])], 10) == []


def test_nested_prefixes_count_once_and_the_last_token_never() -> None:
    system, tools = [1] * 10, [2] * 5
    prompts = [prompt([*system, *tools, user]) for user in range(3, 7)]
    prompts += [prompt([*system, user]) for user in range(7, 13)]
    first, *rest = choose(prompts, 10)
    assert first.tokens.tolist() == system + tools
    assert (first.num_requests, first.new_tokens, rest) == (4, 15, [])
    assert first.value == pytest.approx(10 * 10 + 5 * 4)


def test_old_requests_count_less_and_tenants_apart() -> None:
    old = [prompt([1, 1, 1, 9], 0.0) for _ in range(6)]
    new = [prompt([2, 2, 2, 9], 100.0) for _ in range(4)]
    mine = [prompt([2, 2, 2, 9], 100.0, "mine") for _ in range(3)]
    prefixes = choose(old + new + mine, 10)
    assert [(p.salt, int(p.tokens[0])) for p in prefixes] == [("", 2), ("mine", 2), ("", 1)]
    assert prefixes[2].expected_uses == pytest.approx(6 * 0.25)
    assert len(choose(old + new, 10, half_life_s=10.0)) == 1
    assert len(choose(old + new, 1)) == 1
    assert choose(new, 10, min_uses=5.0) == []
