"""Who is computed when: pace, turns, deadlines, the watermark."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.driver import GREEDY, NAMESPACE, Collected, harness
from engines.models import VOCAB, loaded
from ostinato.engines.line import Turns, prefixes_first
from ostinato.engines.pace import Pace
from ostinato.engines.sequence import Sequence
from ostinato.errors import DeadlineError
from ostinato.events import Event, Preempted, StepFinished


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def sequence(salt: str = "", length: int = 4) -> Sequence:
    return Sequence(
        np.zeros(length, np.int32),
        GREEDY,
        NAMESPACE.with_salt(salt),
        Collected(),
        max_new_tokens=1,
        stop_token_ids=frozenset(),
    )


# ---------------------------------------------------------------- pace


def test_nobody_decoding_means_as_much_as_may_be() -> None:
    pace = Pace(target_s=0.001)
    assert pace.limit(0, 512) == 512
    pace.note(0, 512, 1.0)
    assert pace.limit(0, 512) == 512


@given(
    decode_s=st.floats(0.001, 1.0),
    row_s=st.floats(1e-5, 0.01),
    times=st.floats(1.6, 10.0),
    most=st.integers(1, 4096),
)
def test_a_step_lasts_no_longer_than_the_target_once_costs_are_known(
    decode_s: float, row_s: float, times: float, most: int
) -> None:
    pace = Pace(times=times)
    for _ in range(20):
        pace.note(4, 0, decode_s)
        pace.note(4, 100, decode_s + 100 * row_s)
    rows = pace.limit(4, most)
    assert min(16, most) <= rows <= most
    if rows > 16:
        assert decode_s + rows * row_s <= times * decode_s
    fixed = Pace(target_s=times * decode_s)
    for _ in range(20):
        fixed.note(4, 0, decode_s)
        fixed.note(4, 100, decode_s + 100 * row_s)
    assert fixed.limit(4, most) == pytest.approx(rows, abs=1)


def test_it_follows_when_rows_become_dearer() -> None:
    pace = Pace()
    pace.note(1, 0, 0.05)
    pace.note(1, 50, 0.05 + 50 * 0.001)
    before = pace.limit(1, 512)
    for _ in range(12):
        pace.note(1, 50, 0.05 + 50 * 0.002)
    assert pace.limit(1, 512) == pytest.approx(before / 2, rel=0.1)


def test_a_long_prompt_is_cut_smaller_while_somebody_decodes() -> None:
    events: list[Event] = []
    with harness(
        loaded("llama"), max_batch_tokens=128, itl_target_s=1e-9, observer=events.append, num_blocks=512
    ) as engine:
        _, talker = engine.submit(tokens(1, 8), 120)
        assert talker.first.wait(30)
        engine.generate(tokens(2, 120), 2)
        engine.generate(tokens(3, 120), 2)
        talker.wait()
        engine.generate(tokens(4, 120), 1)
    steps = [e for e in events if isinstance(e, StepFinished)]
    mixed = [s.num_rows - s.decode_rows for s in steps if s.decode_rows and s.num_rows > s.decode_rows]
    assert mixed
    assert max(mixed[1:]) <= 16, "the first teaches what a row costs"
    assert max(s.num_rows for s in steps if not s.decode_rows) > 100


# ---------------------------------------------------------------- turns


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    line = [sequence() for _ in range(5)]
    assert Turns().order(line, []) == line


def test_tenants_take_turns_and_what_they_have_running_counts() -> None:
    a = [sequence("a") for _ in range(4)]
    b, c = [sequence("b") for _ in range(2)], [sequence("c")]
    turns = Turns()
    assert turns.order([*a, *b, *c], []) == [a[0], b[0], c[0], a[1], b[1], a[2], a[3]]
    busy = [sequence("a"), sequence("a")]
    assert turns.order([*a, *b, *c], busy) == [b[0], c[0], b[1], a[0], a[1], a[2], a[3]]
    turns.started(a[0])
    assert turns.order([*a[1:], *b, *c], []) == [b[0], c[0], a[1], b[1], a[2], a[3]]
    turns.order([], [])
    assert not turns._started, "nothing is kept of tenants that are gone"


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    with harness(loaded("llama"), max_sequences=1, num_blocks=512) as engine:
        _, first = engine.submit(tokens(0, 8), 240, namespace=NAMESPACE.with_salt("flood"))
        assert first.first.wait(30)
        sinks = [
            engine.submit(tokens(i, 8), 3, namespace=NAMESPACE.with_salt("flood"))[1] for i in range(1, 9)
        ]
        _, other = engine.submit(tokens(99, 8), 3, namespace=NAMESPACE.with_salt("other"))
        for sink in (other, *sinks):
            sink.wait()
    ends = [sink.stats.finished_s for sink in (other, *sinks) if sink.stats is not None]
    assert sum(end < ends[0] for end in ends) <= 1, "at most one of the flood came before"


def test_the_longest_prefix_goes_first_but_nobody_waits_for_ever() -> None:
    line = [sequence() for _ in range(12)]
    found = {id(s): place for place, s in enumerate(line)}
    first, *rest = prefixes_first(line, lambda s: found[id(s)])
    assert first is line[7], "of the first eight"
    assert rest == [s for s in line if s is not line[7]]
    line[0].num_overtaken = 4
    assert prefixes_first(line, lambda s: found[id(s)]) == line
    assert prefixes_first(line[:1], lambda s: 0) == line[:1]
    assert prefixes_first([], lambda s: 0) == []


# ---------------------------------------------------------------- deadlines


def test_too_late_before_the_first_token_is_an_error_and_after_it_an_end() -> None:
    with harness(loaded("llama"), max_sequences=1, num_blocks=512) as engine:
        _, talker = engine.submit(tokens(1, 8), 1000, deadline_s=0.5)
        _, waiting = engine.submit(tokens(2, 8), 5, deadline_s=0.05)
        assert waiting.done.wait(30)
        assert isinstance(waiting.error, DeadlineError)
        assert waiting.reason == "error"
        got = talker.wait()
        assert talker.reason == "length"
        assert 0 < len(got) < 1000
        assert engine.generate(tokens(2, 8), 5, deadline_s=60.0).reason == "length"


# ---------------------------------------------------------------- room


def test_a_full_arena_waits_instead_of_throwing_out_who_just_came_in() -> None:
    """Without a watermark the second would get the last block, and be preempted at the next step."""
    events: list[Event] = []
    with harness(loaded("llama"), num_blocks=12, block_size=4, observer=events.append) as engine:
        _, talker = engine.submit(tokens(1, 16), 13)
        assert talker.first.wait(30)
        late = engine.generate(tokens(2, 24), 12)
        talker.wait()
        assert late.reason == "length"
    assert not [e for e in events if isinstance(e, Preempted)]
