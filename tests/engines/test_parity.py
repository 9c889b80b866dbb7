"""The crown test: greedy output with any cache state equals output without, token for token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.driver import Flips, Harness, harness, reference
from engines.models import PAGED, STATEFUL, VOCAB, build, loaded
from ostinato.errors import QueueFullError


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def expect(engine: Harness, own: Any, flips: Flips, prompt: list[int], max_new: int = 8) -> int:
    """Generate, compare with transformers, and give the number of cached tokens."""
    sink = engine.generate(prompt, max_new)
    flips.check(own, prompt, reference(own, prompt, max_new), sink.tokens)
    assert sink.stats is not None
    return sink.stats.cached_tokens


@pytest.mark.parametrize("name", PAGED)
def test_is_observed_as_reusable(name: str) -> None:
    assert loaded(name).reuse_reason is None


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", PAGED)
def test_cold_warm_and_mid_block(name: str, block_size: int, flips: Flips) -> None:
    own = build(name, own=True)
    head, tail = tokens(1, 37), tokens(2, 9)
    with harness(loaded(name), block_size=block_size) as engine:
        assert expect(engine, own, flips, head + tail) == 0
        assert expect(engine, own, flips, head + tail) == len(head + tail) - 1
        assert expect(engine, own, flips, head + tokens(3, 12)) == len(head)
        assert expect(engine, own, flips, [*head, *tail[:4], *tokens(4, 5)]) == len(head) + 4
        assert expect(engine, own, flips, head[:20]) == 19


@pytest.mark.parametrize("name", PAGED)
def test_a_conversation_pays_only_its_new_tokens(name: str, flips: Flips) -> None:
    own = build(name, own=True)
    prompt = tokens(5, 21)
    previous = 0
    with harness(loaded(name)) as engine:
        for turn in range(4):
            answer = engine.generate(prompt, 7)
            flips.check(own, prompt, reference(own, prompt, 7), answer.tokens)
            assert answer.stats is not None
            if turn:
                # The last generated token was never computed: it is the first new one of the next turn.
                assert answer.stats.cached_tokens == previous - 1
            previous = len(prompt) + len(answer.tokens)
            prompt = prompt + answer.tokens + tokens(6 + turn, 5)


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 7, 64])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mistral-sliding", "gpt-oss"])
def test_any_chunking(name: str, max_batch_tokens: int, flips: Flips) -> None:
    own = build(name, own=True)
    with harness(loaded(name), max_batch_tokens=max_batch_tokens) as engine:
        prompt = tokens(7, 45)
        expect(engine, own, flips, prompt)
        expect(engine, own, flips, prompt[:30] + tokens(8, 20))


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi", "gpt-oss"])
def test_concurrent_and_partly_evicted(name: str, flips: Flips) -> None:
    """More requests than fit: some wait, some are preempted, some find half of their prefix evicted."""
    own = build(name, own=True)
    head = tokens(9, 30)
    prompts = [head[: 10 + 3 * i] + tokens(20 + i, 6 + i) for i in range(8)]
    with harness(loaded(name), num_blocks=24, block_size=4, max_batch_tokens=16) as engine:
        for _ in range(3):
            sinks = [engine.submit(prompt, 12)[1] for prompt in prompts]
            for prompt, sink in zip(prompts, sinks, strict=True):
                flips.check(own, prompt, reference(own, prompt, 12), sink.wait())


def test_after_cancellation(flips: Flips) -> None:
    own = build("llama", own=True)
    head = tokens(10, 50)
    with harness(loaded("llama"), max_batch_tokens=8) as engine:
        for seed in range(10):
            sequence, sink = engine.submit(head + tokens(seed, 5), 40)
            if seed % 2:
                sink.first.wait(60)
            engine.batcher.cancel([sequence])
            assert sink.done.wait(60)
        expect(engine, own, flips, head + tokens(3, 5), 20)
        expect(engine, own, flips, head, 20)


@pytest.mark.parametrize("name", PAGED)
@torch.inference_mode()
def test_logits_are_the_same_within_rounding(name: str) -> None:
    own = build(name, own=True)
    prompt = tokens(11, 60)
    expected = torch.log_softmax(own(torch.tensor([prompt]), use_cache=False).logits[0, -1], -1)
    from dataclasses import replace

    from engines.driver import GREEDY

    params = replace(GREEDY, logprobs=20)
    with harness(loaded(name), max_batch_tokens=16) as engine:
        for _ in range(2):
            logprob = engine.generate(prompt, 1, params=params).logprobs[0]
            assert logprob is not None
            for token, value in logprob.top:
                assert value == pytest.approx(float(expected[token]), abs=1e-4)


@pytest.mark.parametrize("name", STATEFUL)
def test_models_whose_state_cannot_be_cut_run_without_reuse(name: str, flips: Flips) -> None:
    own = build(name, own=True)
    model = loaded(name)
    assert model.reuse_reason
    with harness(model) as engine:
        for _ in range(2):
            assert expect(engine, own, flips, tokens(12, 30)) == 0
        prompts = [tokens(13 + i, 10 + i) for i in range(4)]
        sinks = [engine.submit(prompt, 6)[1] for prompt in prompts]
        for prompt, sink in zip(prompts, sinks, strict=True):
            flips.check(own, prompt, reference(own, prompt, 6), sink.wait())


def test_salts_share_nothing() -> None:
    from engines.driver import NAMESPACE

    with harness(loaded("llama")) as engine:
        prompt = tokens(14, 40)
        engine.generate(prompt, 2, namespace=NAMESPACE.with_salt("a"))
        other = engine.generate(prompt, 2, namespace=NAMESPACE.with_salt("b"))
        same = engine.generate(prompt, 2, namespace=NAMESPACE.with_salt("a"))
        assert other.stats is not None
        assert same.stats is not None
        assert other.stats.cached_tokens == 0
        assert same.stats.cached_tokens == 39


requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # which head
        st.integers(1, 40),  # how much of it
        st.integers(0, 12),  # own tokens after it
        st.integers(1, 10),  # answer length
        st.one_of(st.none(), st.integers(1, 5)),  # cancelled after so many tokens
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@given(
    batches=st.lists(requests, min_size=1, max_size=3),
    num_blocks=st.integers(18, 60),
    block_size=st.sampled_from([1, 3, 4, 8]),
    max_batch_tokens=st.integers(1, 40),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mix(
    name: str,
    flips: Flips,
    batches: list[list[tuple[int, int, int, int, int | None]]],
    num_blocks: int,
    block_size: int,
    max_batch_tokens: int,
) -> None:
    """Random mixes of requests in tight room, some cancelled: every answer, or its beginning, is right."""
    own = build(name, own=True)
    num_blocks = max(num_blocks, 66 // block_size + 1)
    with harness(
        loaded(name), num_blocks=num_blocks, block_size=block_size, max_batch_tokens=max_batch_tokens
    ) as engine:
        for batch in batches:
            running = []
            for i, (head, length, extra, max_new, stop_after) in enumerate(batch):
                prompt = tokens(100 + head, 40)[:length] + tokens(200 + i, extra)
                running.append((prompt, max_new, engine.submit(prompt, max_new, stop_after=stop_after)[1]))
            for prompt, max_new, sink in running:
                got = sink.wait()
                flips.check(own, prompt, reference(own, prompt, max_new)[: len(got)], got)
            engine.manager.check_integrity()


def test_two_hundred_cancelled_at_random_leave_nothing_held() -> None:
    rng = random.Random(15)
    with harness(loaded("llama"), num_blocks=64, max_batch_tokens=16) as engine:
        running = []
        for i in range(200):
            prompt = tokens(300 + i % 7, 30)[: rng.randint(1, 30)] + tokens(i, rng.randint(0, 10))
            running.append(engine.submit(prompt, rng.randint(1, 30)))
            if rng.random() < 0.7:
                victim, _ = rng.choice(running)
                engine.batcher.cancel([victim])
        for sequence, sink in running:
            engine.batcher.cancel([sequence])
            assert sink.done.wait(60)
            assert sink.num_finishes == 1
        assert engine.manager.num_held_blocks == 0
        assert engine.manager.num_free_blocks + engine.manager.num_evictable_blocks == 64


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, flips: Flips, caplog: pytest.LogCaptureFixture
) -> None:
    own = build("llama", own=True)
    with harness(loaded("llama")) as engine:
        working = engine.runner.execute

        def broken(plan: Any) -> Any:
            raise RuntimeError("out of memory")

        engine.runner.execute = broken  # type: ignore[method-assign]
        _, sink = engine.submit(tokens(16, 20), 5)
        assert sink.done.wait(60)
        assert sink.reason == "error"
        assert "RuntimeError" in str(sink.error)
        engine.runner.execute = working  # type: ignore[method-assign]
        assert expect(engine, own, flips, tokens(16, 20)) == 0


def test_a_full_queue_refuses_and_accepts_again(flips: Flips) -> None:
    own = build("llama", own=True)
    with harness(loaded("llama"), max_waiting=2) as engine:
        accepted = []

        def submit_many() -> None:
            for seed in range(100):
                accepted.append(engine.submit(tokens(seed, 30), 30)[1])

        with pytest.raises(QueueFullError) as refused:
            submit_many()
        assert refused.value.retry_after_s > 0
        for sink in accepted:
            sink.wait()
        expect(engine, own, flips, tokens(17, 20))
