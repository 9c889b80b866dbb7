"""What must never happen in the engine: a request that takes others with it, waits for ever or is cut."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from engines.driver import GREEDY, NAMESPACE, Collected, Flips, harness, reference
from engines.models import PAGED, VOCAB, loaded
from ostinato.engines.attention import _lay_out
from ostinato.engines.base import RunnerInfo
from ostinato.engines.hf import observe_model
from ostinato.engines.packed import PackedLinear
from ostinato.engines.runners import LoadedModel
from ostinato.engines.sampling import Sampler
from ostinato.engines.sequence import Sequence
from ostinato.errors import EngineError, ParameterError
from ostinato.types import SamplingParams, SequencePlan, TokenArray


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


def test_a_fault_in_scheduling_ends_those_who_wait_and_not_the_engine(
    llama: LoadedModel, monkeypatch: Any
) -> None:
    """It would come again at every step: they would wait for ever."""
    with harness(llama, max_sequences=1) as engine:
        expected = engine.generate(tokens(3, 20), 6).tokens
        _, first = engine.submit(tokens(1, 8), 200)
        assert first.first.wait(60)

        def broken(*_: Any) -> int:
            raise ZeroDivisionError

        monkeypatch.setattr(engine.manager, "peek", broken)
        sinks = [first, *(engine.submit(tokens(4 + i, 20), 6)[1] for i in range(3))]
        for sink in sinks[1:]:
            assert sink.done.wait(60)
            assert (sink.reason, sink.num_finishes) == ("error", 1)
            assert "ZeroDivisionError" in str(sink.error)
        assert first.done.wait(60)
        monkeypatch.undo()
        assert engine.generate(tokens(3, 20), 6).tokens == expected


def test_more_answers_than_may_wait_are_not_told_to_come_back_later(llama: LoadedModel) -> None:
    with harness(llama, max_waiting=3) as engine:
        sequences = [
            Sequence(
                np.array([4, 5], np.int32), GREEDY, NAMESPACE, Collected(), max_new_tokens=1,
                stop_token_ids=frozenset(),
            )
            for _ in range(4)
        ]  # fmt: skip
        with pytest.raises(ParameterError, match="4 answers were asked for, but at most 3 may wait"):
            engine.batcher.submit(sequences)


def made(config: hf.PretrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return hf.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()


def variant(name: str, **changes: Any) -> hf.PretrainedConfig:
    config = copy.deepcopy(PAGED[name])
    for field, value in changes.items():
        setattr(config, field, value)
    return config


@pytest.mark.parametrize(
    "config",
    [
        variant("llama", tie_word_embeddings=True),
        variant("llama", attention_bias=True, mlp_bias=True),
        variant("gpt2", tie_word_embeddings=False),
        variant("qwen2", tie_word_embeddings=True),
    ],
    ids=["tied", "biases", "gpt2-untied", "qwen2-tied"],
)
def test_heads_and_biases_of_every_kind(config: hf.PretrainedConfig, flips: Flips) -> None:
    own, observed = made(config), observe_model(made(config))
    assert observed.reuse_reason is None
    prompt = tokens(4, 37)
    expected = reference(own, prompt, 8)
    with harness(observed) as engine:
        for cached in (0, 36):
            sink = engine.generate(prompt, 8)
            flips.check(own, prompt, expected, sink.tokens)
            assert sink.stats is not None
            assert sink.stats.cached_tokens == cached


def test_weights_of_half_width_are_reused_and_not_packed() -> None:
    observed = observe_model(made(PAGED["llama"], torch.bfloat16))
    assert (observed.reuse_reason, observed.dtype) == (None, torch.bfloat16)
    assert not any(isinstance(module, PackedLinear) for module in observed.model.modules())
    with harness(observed) as engine:
        cold, warm = (engine.generate(tokens(4, 37), 8) for _ in range(2))
        assert warm.stats is not None
        assert warm.stats.cached_tokens == 36
        assert warm.tokens == cold.tokens


def long_rope(original: int) -> hf.PretrainedConfig:
    """Trained for 256 tokens; from ``original`` on its frequencies are others."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    given = PAGED["phi3"].to_dict() | {
        "rope_parameters": rope | {"rope_theta": 10000.0},
        "original_max_position_embeddings": original,
    }
    return hf.Phi3Config(**given)


def test_frequencies_that_change_with_the_length_bound_it() -> None:
    short = observe_model(made(long_rope(64)))
    assert (short.max_model_len, short.reuse_reason) == (64, None)
    longer = observe_model(made(long_rope(64)), max_model_len=200)
    assert longer.max_model_len == 200
    assert longer.reuse_reason is not None
    beyond = observe_model(made(long_rope(4096)))  # no length that the model takes is there
    assert (beyond.max_model_len, beyond.reuse_reason) == (256, None)


def test_masks_go_where_the_model_computes() -> None:
    ids = np.arange(4, 8, dtype=np.int32)
    plan = SequencePlan(0, ids, ids, ids, np.zeros(1, np.intp), 8, True)
    rows = _lay_out(plan, 0, torch.float32, torch.device("meta"))
    assert rows.tail_mask is not None
    assert rows.tail_mask.device.type == "meta"
