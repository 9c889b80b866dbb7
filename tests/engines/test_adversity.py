"""What must never happen in the engine: a request that takes others with it, waits for ever or is cut."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from engines.driver import GREEDY, NAMESPACE, Collected, harness
from engines.models import VOCAB, loaded
from ostinato.engines.base import RunnerInfo
from ostinato.engines.runners import LoadedModel
from ostinato.engines.sampling import Sampler
from ostinato.errors import EngineError
from ostinato.types import SamplingParams, TokenArray


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return loaded("llama")


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-45, 1e-40, 1e-30, 1e-6])
def test_the_coldest_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 30
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1), np.zeros(1, np.int32), 50)
    assert sampler.sample(logits).token_id == int(logits.argmax())


def test_numbers_may_be_whole() -> None:
    params = SamplingParams(temperature=2, repetition_penalty=2, top_p=1, min_p=0, seed=1)
    assert Sampler(params, np.zeros(1, np.int32), 50).sample(torch.zeros(50)).error is None


def test_parameters_that_leave_nothing_to_draw_end_only_their_own_request(llama: LoadedModel) -> None:
    hopeless = SamplingParams(temperature=1.0, repetition_penalty=1e-300, seed=1)
    with harness(llama) as engine:
        expected = engine.generate(tokens(1, 12), 20).tokens
        _, innocent = engine.submit(tokens(1, 12), 20)
        assert innocent.first.wait(60)
        with pytest.raises(EngineError, match="probabilities"):
            engine.generate(tokens(2, 12), 20, params=hopeless)
        assert innocent.wait() == expected


class _RefusesToOpen:
    """A runner that fails before a sequence's first step, as a bug in a sampler would."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.fail = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info  # type: ignore[no-any-return]

    def open(self, sequence_id: int, prompt: TokenArray, params: SamplingParams) -> None:
        if self.fail:
            raise ValueError("no")
        self._runner.open(sequence_id, prompt, params)


def test_a_failure_while_a_request_is_admitted_ends_it(llama: LoadedModel) -> None:
    with harness(llama) as engine:
        runner = _RefusesToOpen(engine.batcher._runner)
        engine.batcher._runner = runner
        with pytest.raises(EngineError, match="ValueError"):
            engine.generate(tokens(1, 12), 4)
        assert engine.manager.num_held_blocks == 0
        runner.fail = False
        assert len(engine.generate(tokens(1, 12), 4).tokens) == 4


def test_a_sequence_waits_for_room_that_a_lease_outside_the_engine_holds(llama: LoadedModel) -> None:
    prompt, other = tokens(1, 8), tokens(2, 24)
    with harness(llama, num_blocks=10, block_size=4) as engine:
        expected = engine.generate(prompt, 20).tokens
        engine.generate(other, 1)
        outside = engine.manager.acquire(NAMESPACE, np.array([*other, 1], dtype=np.int32))
        assert outside.prefix_len == len(other)  # 6 of 10 blocks; the answer below needs 7
        sequence, sink = engine.submit(prompt, 20)
        assert sink.first.wait(60)
        deadline = time.monotonic() + 60
        while sequence.lease is not None:
            assert time.monotonic() < deadline, "it never ran out of room"
            time.sleep(0.01)
        assert not sink.done.is_set(), "it was ended for want of room that somebody else holds"
        outside.release()
        assert sink.wait() == expected
        assert sink.reason == "length"


def test_a_lease_that_holds_nothing_does_not_keep_a_request_waiting(llama: LoadedModel) -> None:
    whole = tokens(1, 16)
    with harness(llama, num_blocks=4, block_size=4) as engine:
        engine.generate(whole[:10], 1)  # a hit in the middle of a block, of a prompt that fills the arena
        outside = engine.manager.acquire(NAMESPACE, np.array(tokens(9, 5), dtype=np.int32))
        assert outside.prefix_len == 0
        _, sink = engine.submit(whole, 1)
        assert not sink.done.wait(0.2)
        outside.release()
        assert len(sink.wait()) == 1


def test_steps_that_fail_leave_the_engine_as_it_was(llama: LoadedModel, monkeypatch: Any) -> None:
    with harness(llama) as engine:
        expected = engine.generate(tokens(3, 20), 6).tokens
        sinks: list[Collected] = []
        real, calls = engine.batcher._runner.execute, iter(range(1000))

        def sometimes(plan: Any) -> Any:
            if next(calls) % 3 == 1:
                raise RuntimeError("no")
            return real(plan)

        monkeypatch.setattr(engine.batcher._runner, "execute", sometimes)
        for seed in range(12):
            sinks.append(engine.submit(tokens(3, 20) if seed % 2 else tokens(seed, 30), 6, params=GREEDY)[1])
            time.sleep(0.005)
        for sink in sinks:
            assert sink.done.wait(60)
            assert (sink.reason, sink.num_finishes) in {("error", 1), ("length", 1)}
        monkeypatch.undo()
        engine.manager.check_integrity()
        assert engine.manager.num_held_blocks == 0
        assert engine.generate(tokens(3, 20), 6).tokens == expected
