"""Who is computed when: pace, turns, deadlines, the watermark."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

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


KEYS_A_ROW = 1000.0


def learned(pace: Pace, *, read_s: float, row_s: float, decoding: float = 4.0) -> Pace:
    """Has seen what steps take on a machine where they take ``read_s``, and ``row_s`` for each row's work."""
    for _ in range(30):
        pace.note(decoding, 0, read_s + decoding * row_s)
        pace.note(decoding, 100, read_s + (decoding + 100) * row_s)
    return pace


def test_nobody_read_to_means_as_much_as_may_be() -> None:
    pace = learned(Pace(times=1.0), read_s=0.05, row_s=0.001)
    assert pace.room(0, 0, 512).take(0, 1000) == 512
    assert pace.room(4, 0, 512).take(0, 1000) == 512, "all of them have only just begun"
    assert pace.room(4, 1, 512).take(0, 1000) == 16
    told = learned(Pace(target_s=0.001), read_s=0.05, row_s=0.001)
    assert told.room(4, 0, 512).take(0, 1000) == 16, "the operator's word holds for everybody"
    assert told.room(0, 0, 512).take(0, 1000) == 512


@given(
    read_s=st.floats(0.01, 1.0),
    row_s=st.floats(1e-4, 0.01),
    times=st.floats(1.6, 10.0),
    most=st.integers(1, 4096),
    starts=st.lists(st.integers(0, 8000), min_size=1, max_size=5),
    decoding=st.floats(1, 64),
)
def test_a_step_lasts_no_longer_than_the_target_once_costs_are_known(
    read_s: float, row_s: float, times: float, most: int, starts: list[int], decoding: float
) -> None:
    """However many decode now, and wherever in their prompts the others are."""
    alone_s = read_s + decoding * row_s
    by_itself = Pace(times=times, keys_a_row=KEYS_A_ROW)
    told = Pace(times * alone_s, keys_a_row=KEYS_A_ROW)
    taken = []
    for pace in (by_itself, told):
        room = learned(pace, read_s=read_s, row_s=row_s).room(decoding, 4, most)
        rows, duration_s = 0, alone_s
        for start in starts:
            num_rows = room.take(start, 100)
            rows += num_rows
            duration_s += row_s * pace.work(start, num_rows)
        assert min(16, most) <= rows <= most
        if rows > 16:
            assert duration_s <= times * alone_s
            # No more is left than a row takes, unless there are no more rows to be had.
            is_full = duration_s + 2 * row_s * pace.work(starts[-1], 2) > 0.7 * times * alone_s
            assert is_full or rows in (most, 100 * len(starts))
        taken.append(rows)
    assert taken[0] == pytest.approx(taken[1], abs=1 + len(starts))


def test_rows_far_into_a_prompt_are_fewer() -> None:
    pace = learned(Pace(keys_a_row=KEYS_A_ROW), read_s=0.05, row_s=0.001)
    near, far = (pace.room(4, 4, 4096).take(start, 4096) for start in (0, 3000))
    assert far < near / 3


def test_it_follows_when_rows_become_dearer() -> None:
    pace = learned(Pace(0.5), read_s=0.05, row_s=0.001)
    before = pace.room(4, 4, 4096).take(0, 4096)
    for _ in range(20):
        pace.note(4, 50, 0.05 + 54 * 0.002)
    assert pace.room(4, 4, 4096).take(0, 4096) == pytest.approx(before / 2, rel=0.1)


def test_under_load_a_step_now_and_then_shows_what_one_takes_without_prompts() -> None:
    pace = learned(Pace(), read_s=0.05, row_s=0.001)
    num_beside = 1  # the last that it has seen
    while (room := pace.room(4, 4, 512)).is_open:
        pace.note(4, room.take(0, 512), 0.2)
        num_beside += 1
    assert num_beside == 50
    pace.note(4, 0, 0.05)
    assert pace.room(4, 4, 512).is_open
    assert not Pace().room(4, 4, 512).is_open, "nothing is known yet"


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
    assert max(mixed) <= 16
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


# ---------------------------------------------------------------- what is shared is computed once


def test_who_needs_what_another_computes_waits_for_it() -> None:
    """Eight come at once with one long beginning: it is computed once, whoever of them is first."""
    events: list[Event] = []
    head = tokens(1, 100)
    with harness(loaded("llama"), max_batch_tokens=16, num_blocks=512, observer=events.append) as engine:
        sinks = [engine.submit(head + tokens(10 + i, 4), 4)[1] for i in range(8)]
        for sink in sinks:
            sink.wait()
        cached = sorted(sink.stats.cached_tokens for sink in sinks if sink.stats is not None)
    assert cached == [0] + [100] * 7
    num_rows = sum(e.num_rows for e in events if isinstance(e, StepFinished))
    assert num_rows == 104 + 7 * 4 + 8 * 3


# ---------------------------------------------------------------- cancelling


STATES: dict[str, Callable[[Sequence], bool]] = {
    "waiting": lambda victim: victim.lease is None,
    "prefill": lambda victim: victim.is_prefilling and victim.num_computed > 20,
    "decode": lambda victim: victim.num_output > 3,
}


@pytest.mark.parametrize("when", STATES)
def test_a_cancelled_sequence_is_in_no_step_after_the_one_under_way(when: str) -> None:
    """Also of what it holds nothing is left when the next step begins."""
    steps: list[list[int]] = []
    held: list[bool] = []
    cancelled_at: list[int] = []
    victims: list[Sequence] = []
    with harness(loaded("llama"), max_batch_tokens=8, max_sequences=2, num_blocks=256) as engine:
        execute = engine.runner.execute

        def watch(plan: Any) -> Any:
            steps.append([s.sequence_id for s in plan.sequences])
            held.append(any(victim.lease is not None for victim in victims))
            if not cancelled_at and victims and STATES[when](victims[0]):
                engine.batcher.cancel(victims)  # amid a step, as another thread would
                cancelled_at.append(len(steps))
            return execute(plan)

        engine.runner.execute = watch  # type: ignore[method-assign]
        talkers = [engine.submit(tokens(i, 8), 200)[1] for i in range(2 if when == "waiting" else 1)]
        victim, sink = engine.submit(tokens(3, 200 if when == "prefill" else 8), 50)
        victims.append(victim)
        for talker in talkers:
            talker.wait()
        assert sink.done.is_set()
        assert sink.reason == "abort"
        (at,) = cancelled_at
        assert (when == "waiting") != any(victim.id in step for step in steps[:at])
        assert len(steps) > at
        assert not any(victim.id in step for step in steps[at:])
        assert not any(held[at:])
