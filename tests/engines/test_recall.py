"""A conversation goes on within a budget: nothing of its past is computed again, all of it can be chosen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from engines.driver import NAMESPACE, Collected, Harness, harness
from engines.models import loaded
from engines.test_retention import BLOCK, MODEL, Recorded, keeping_of, logprobs_of, prompt_of, run
from ostinato.kv.terms import Selection
from ostinato.retention.keeping import Keeping, StepRows

BUDGET = 64


def _keeping(num_prompt: int, method: str = "summary", setting: str = "64") -> Recorded:
    keeping = keeping_of(BUDGET, method, num_prompt)
    return Recorded(replace(keeping.keep, setting=(setting,)), keeping.num_layers, keeping.num_heads)


@pytest.mark.parametrize("method", ["summary", "snapkv"])
def test_the_next_turn_chooses_from_everything_that_was_dropped(method: str) -> None:
    prompt = prompt_of(150)
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK, recall_bytes=1 << 24) as engine:
        first = _keeping(150, method)
        answer = run(engine, prompt, 20, first).tokens
        longer = [*prompt, *answer, *prompt_of(30, 5)]
        second = _keeping(len(longer), method)
        sink = run(engine, longer, 30, second)
        engine.manager.check_integrity()
    assert sink.stats is not None
    computed = 150 + 19  # the answer's last token never was
    assert sink.stats.recalled_tokens + sink.stats.cached_tokens == computed
    # What was computed in the first turn saw what was there then; only the rest sees what was chosen anew.
    second.seen = {p: seen for p, seen in second.seen.items() if p >= computed} | {
        p: seen for p, seen in first.seen.items() if p < computed
    }
    expected, values = logprobs_of([*longer, *sink.tokens], len(longer), second)
    assert sink.tokens == expected
    np.testing.assert_allclose([item.logprob for item in sink.logprobs if item], values, atol=2e-4)
    # Tokens that the first turn had dropped everywhere are among those that the second kept.
    left = set(first.positions.ravel().tolist())
    assert any(p not in left for p in second.positions.ravel().tolist() if p < computed)


@dataclass(slots=True)
class Anew(Recorded):
    """Leaves what rows saw as it was where these were brought back, not computed."""

    starts: list[int] = field(default_factory=list)
    left: set[int] = field(default_factory=set)

    def start_anew(self, num_computed: int) -> int | None:
        self.left = set(self.positions.ravel().tolist())
        num_first = Keeping.start_anew(self, num_computed)
        if num_first is not None:
            self.starts.append(num_computed)
        return num_first

    def note_rows(self, start: int, rows: StepRows, mass: Any) -> None:
        is_offered = self.starts and start + rows.num_rows <= self.starts[-1] - self.keep.num_probe
        before = dict(self.seen) if is_offered else {}
        Recorded.note_rows(self, start, rows, mass)
        self.seen |= before


def test_a_long_answer_chooses_anew_from_everything_it_had_dropped() -> None:
    prompt = prompt_of(150)
    keep = _keeping(150).keep
    with harness(
        loaded(MODEL), num_blocks=64, block_size=BLOCK, recall_bytes=1 << 24, recall_every=24
    ) as engine:
        keeping = Anew(keep, *keeping_of(BUDGET, "summary", 150).positions.shape[:2])
        sink = run(engine, prompt, 70, keeping)
        engine.manager.check_integrity()
    assert keeping.starts == [150 + 24 - 1, 150 + 48 - 1]
    assert sink.stats is not None
    assert sink.stats.recalled_tokens > 150
    assert sink.stats.dropped_tokens == 150 + 69 - keeping.num_places
    # Rows that were computed again stand for what they were at last; what they said before is past.
    expected, values = logprobs_of([*prompt, *sink.tokens], 150, keeping)
    since = keeping.starts[-1] - 150 + 1
    assert sink.tokens[since:] == expected[since:]
    got = [item.logprob for item in sink.logprobs if item]
    np.testing.assert_allclose(got[since:], values[since:], atol=2e-4)
    # Something that was gone everywhere is back.
    assert any(p not in keeping.left for p in keeping.positions.ravel().tolist() if p < keeping.starts[-1])


def _turns(engine: Harness, second: Recorded, **options: object) -> Collected:
    """Two turns; the second one's sink."""
    prompt = prompt_of(150)
    answer = run(engine, prompt, 4, _keeping(150)).tokens
    longer = [*prompt, *answer, *prompt_of(30, 5)]
    assert len(second.keep.protected) == len(longer)
    _, sink = engine.submit(longer, 4, keeping=second, **options)  # type: ignore[arg-type]
    sink.wait()
    return sink


def test_nobody_else_gets_it() -> None:
    for second, options in (
        (_keeping(184, setting="50%"), {}),
        (_keeping(184), {"namespace": replace(NAMESPACE, salt="anna")}),
    ):
        with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK, recall_bytes=1 << 24) as engine:
            sink = _turns(engine, second, **options)
            assert sink.stats is not None
            assert sink.stats.recalled_tokens == 0


def test_a_purge_takes_it_also_from_those_who_run() -> None:
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK, recall_bytes=1 << 24) as engine:
        assert engine.archives is not None
        run(engine, prompt_of(150), 4, _keeping(150))
        assert engine.archives.size_bytes > 0
        engine.manager.purge(Selection())
        assert engine.archives.size_bytes == 0
        _, sink = engine.submit(prompt_of(150), 40, keeping=_keeping(150))
        assert sink.first.wait(60)
        engine.manager.purge(Selection())
        sink.wait()
        assert engine.archives.size_bytes == 0


def test_memory_is_bounded_and_the_oldest_go() -> None:
    each = loaded(MODEL).kv_bytes_per_token * 153
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK, recall_bytes=2 * each) as engine:
        assert engine.archives is not None
        for seed in range(3):
            run(engine, prompt_of(150, seed), 4, _keeping(150))
            assert engine.archives.size_bytes <= 2 * each
        for seed, is_there in ((0, False), (1, True), (2, True)):
            tokens = np.array(prompt_of(150, seed), np.int32)
            found = engine.archives.find((NAMESPACE.digest, "64"), tokens)
            assert (found is not None and found[1] == 150) == is_there
        assert run(engine, prompt_of(400), 4, _keeping(400)).stats is not None  # too long to be kept
        assert engine.archives.size_bytes <= 2 * each


def test_cancelled_while_it_gets_back_what_it_had() -> None:
    prompt = prompt_of(600)
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK, recall_bytes=1 << 24) as engine:
        run(engine, prompt, 4, _keeping(600))
        for _ in range(3):
            sequence, sink = engine.submit([*prompt, 7, 8, 9], 4, keeping=_keeping(603))
            engine.batcher.cancel([sequence])
            assert sink.done.wait(60)
        again = run(engine, [*prompt, 7, 8, 9], 4, _keeping(603))
        assert again.stats is not None
        assert again.stats.recalled_tokens > 500
