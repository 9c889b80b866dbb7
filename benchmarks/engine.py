"""The engine under load: what a step costs with many sequences in it, on the default model.

The physics. A decode step reads all weights once, whatever the number of sequences, and each sequence's KV;
so eight short ones should cost little more than one, and long ones what their bytes say at the bandwidth
that the step of one shows. A prefix that sequences share is read once for all.

- ``batch8_step_ratio``: a decode step of 8 sequences of 256 tokens / of one.
- ``bytes_ratio``: a decode step of 8 sequences of 2,048 tokens / what its bytes (weights + KV) take at the
  bandwidth of the step of one short sequence.
- ``shared_prefix_ratio``: attention of 32 sequences over one prefix of 3,500 tokens / over prefixes of
  their own.
- ``sched_share``: of the time of decode steps of 32 sequences, what is not the runner's.
- ``itl_p99_over_p50``: of 8 streams, the 99th percentile of the pause between tokens while prompts of 2,000
  tokens are computed beside them / the median pause without; and for several targets, the same beside the
  rate at which prompts are computed.

The last line is JSON: medians.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common import finish, spread
from prefix import stored_model, words

BLOCK_SIZE = 16
ROUNDS = 15


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Steps:
    """Decode steps through the runner, over sequences whose KV is already there (whatever it is)."""

    def __init__(self, loaded: Any, num_tokens: int) -> None:
        from ostinato.engines.runners import PagedRunner
        from ostinato.types import SamplingParams

        self._num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.runner = PagedRunner(loaded, self._num_blocks * BLOCK_SIZE)
        for group in self.runner.arena.groups:
            group.normal_()
        for sequence in range(32):
            self.runner.open(sequence, np.ones(1, np.int32), SamplingParams(temperature=0.0))

    def plans(self, num_sequences: int, length: int, *, shared: int = 0) -> tuple[Any, ...]:
        """One row for each sequence, of which the first ``shared`` tokens are the same blocks."""
        from ostinato.types import SequencePlan

        common, own = shared // BLOCK_SIZE, -(-length // BLOCK_SIZE) - shared // BLOCK_SIZE
        plans = []
        for i in range(num_sequences):
            table = np.concatenate([np.arange(common), np.arange(common + i * own, common + (i + 1) * own)])
            at = length - 1
            slot = table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            position = np.array([at], np.int32)
            plans.append(
                SequencePlan(
                    i, np.array([i + 1000], np.int32), position, slot.reshape(1).astype(np.int32), table,
                    BLOCK_SIZE, True,
                )
            )  # fmt: skip
        return tuple(plans)

    def step(self, plans: tuple[Any, ...]) -> float:
        from ostinato.types import Plan

        return timed(lambda: self.runner.execute(Plan(plans)))

    def attention(self, plans: tuple[Any, ...]) -> float:
        """Only the attention of all layers."""
        import torch

        from ostinato.engines.attention import LayerRule
        from ostinato.engines.step import Step

        arena = self.runner.arena
        step = Step(arena, plans, arena.device)
        shape = arena.layers[0]
        query = torch.randn(1, 3 * shape.kv_heads, len(plans), shape.key_dim)
        key, value = torch.randn(2, 1, shape.kv_heads, len(plans), shape.key_dim)
        rule = LayerRule(shape.key_dim**-0.5)

        def all_layers() -> None:
            for layer in range(len(arena.layers)):
                step.attend(layer, rule, query, key, value)

        with torch.inference_mode():
            all_layers()
            return timed(all_layers)


def in_turn(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each once to warm up, then all in turn, forwards and backwards."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for i in range(rounds):
        for name in list(calls) if i % 2 else reversed(list(calls)):
            times[name].append(calls[name]())
    for name, values in times.items():
        print(f"  {name}: {statistics.median(values) * 1e3:.1f} ms", flush=True)
    return times


class Ticks:
    """A sink that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.done = threading.Event()

    def on_token(self, token_id: int, logprob: Any) -> bool:
        self.times.append(time.perf_counter())
        return False

    def on_finish(self, reason: Any, stop_token: Any, stats: Any, error: Any) -> Any:
        self.done.set()
        return reason


class Engine:
    """The whole engine, driven by tokens."""

    def __init__(self, loaded: Any, num_tokens: int, itl_target_s: float | None) -> None:
        from ostinato.engines.batching import Batcher, BatchingSettings
        from ostinato.engines.runners import PagedRunner
        from ostinato.events import StepFinished
        from ostinato.kv.manager import KVManager
        from ostinato.ports import SystemClock

        num_blocks = num_tokens // BLOCK_SIZE
        self.steps_s: list[float] = []
        self.runner_s: list[float] = []
        runner = PagedRunner(loaded, num_blocks * BLOCK_SIZE)
        plain = runner.execute

        def execute(plan: Any) -> Any:
            started = time.perf_counter()
            result = plain(plan)
            self.runner_s.append(time.perf_counter() - started)
            return result

        runner.execute = execute  # type: ignore[method-assign]

        def observe(event: Any) -> None:
            if isinstance(event, StepFinished):
                self.steps_s.append(time.perf_counter())

        self._batcher = Batcher(
            runner,
            KVManager(num_blocks, BLOCK_SIZE),
            SystemClock(),
            BatchingSettings(itl_target_s=itl_target_s),
            observer=observe,
        )

    def submit(self, length: int, max_new: int, seed: int) -> Ticks:
        from ostinato.engines.sequence import Sequence
        from ostinato.kv.hashing import Namespace
        from ostinato.types import SamplingParams

        sink = Ticks()
        namespace = Namespace("w", "t", "", kv_layout="l", kv_dtype="f", rotary="r")
        prompt = np.array(words(np.random.default_rng(seed), length), np.int32)
        params = SamplingParams(temperature=0.0)
        self._batcher.submit(
            [Sequence(prompt, params, namespace, sink, max_new_tokens=max_new, stop_token_ids=frozenset())]
        )
        return sink

    def close(self) -> None:
        self._batcher.close()


def sched_share(loaded: Any) -> float:
    """Of the time between the ends of decode steps of 32 sequences, the part that is not the runner's."""
    engine = Engine(loaded, 32 * 400, None)
    sinks = [engine.submit(200, 60, seed) for seed in range(32)]
    for sink in sinks:
        sink.done.wait()
    engine.close()
    ends, inner = np.array(engine.steps_s[-40:]), np.array(engine.runner_s[-39:])
    return float(1 - inner.sum() / (ends[-1] - ends[0]))


def pauses(loaded: Any, itl_target_s: float | None) -> dict[str, float]:
    """Eight streams; then prompts beside them, one after the other."""
    engine = Engine(loaded, 40_000, itl_target_s)
    sinks = [engine.submit(200, 2_000, seed) for seed in range(8)]
    while not all(len(sink.times) >= 25 for sink in sinks):
        time.sleep(0.05)
    began = time.perf_counter()
    for seed in range(3):
        engine.submit(2_000, 1, 100 + seed).done.wait()
    ended = time.perf_counter()
    engine.close()
    alone = [float(gap) for sink in sinks for gap in np.diff([t for t in sink.times if t < began])[8:]]
    beside = [float(gap) for sink in sinks for gap in np.diff([t for t in sink.times if began <= t <= ended])]
    result = {
        "undisturbed_p50_ms": statistics.median(alone) * 1e3,
        "p50_ms": statistics.median(beside) * 1e3,
        "p99_ms": float(np.quantile(beside, 0.99)) * 1e3,
        "prompt_tokens_per_s": 6_000 / (ended - began),
    }
    result["p99_over_undisturbed_p50"] = result["p99_ms"] / result["undisturbed_p50_ms"]
    print(f"  target {itl_target_s}: " + ", ".join(f"{k} {v:.1f}" for k, v in result.items()), flush=True)
    return {name: round(value, 2) for name, value in result.items()}


def main() -> None:
    import os

    from ostinato.config import tame_waiting_threads

    tame_waiting_threads(os.environ)
    from ostinato.engines.hf import load_model

    loaded = load_model(stored_model())
    steps = Steps(loaded, 32 * 3_600)
    one, eight = steps.plans(1, 256), steps.plans(8, 256)
    long, shared = steps.plans(8, 2_048), steps.plans(32, 3_520, shared=3_488)
    apart = steps.plans(32, 3_520)
    times = in_turn(
        {
            "step of 1, 256 tokens": lambda: steps.step(one),
            "step of 8, 256 tokens": lambda: steps.step(eight),
            "step of 8, 2,048 tokens": lambda: steps.step(long),
            "step of 32, prefix shared": lambda: steps.step(shared),
            "attention of 32, prefix shared": lambda: steps.attention(shared),
            "attention of 32, prefixes apart": lambda: steps.attention(apart),
        },
        ROUNDS,
    )
    first, second, third, _, together, alone = times.values()
    kv = loaded.kv_bytes_per_token
    bytes_one, bytes_long = loaded.weight_bytes + 256 * kv, loaded.weight_bytes + 8 * 2_048 * kv
    ratios = {
        "batch8_step": [b / a for a, b in zip(first, second, strict=True)],
        "bytes": [b / (a * bytes_long / bytes_one) for a, b in zip(first, third, strict=True)],
        "shared_prefix": [a / b for a, b in zip(together, alone, strict=True)],
    }
    shares = [sched_share(loaded) for _ in range(3)]
    print(f"  scheduling: {statistics.median(shares):.2%} of a step", flush=True)
    targets = {str(target): pauses(loaded, target) for target in (None, 0.1, 0.4, 10.0)}
    finish(
        "engine",
        {
            "batch8_step_ratio": round(statistics.median(ratios["batch8_step"]), 3),
            "bytes_ratio": round(statistics.median(ratios["bytes"]), 3),
            "shared_prefix_ratio": round(statistics.median(ratios["shared_prefix"]), 3),
            "sched_share": round(statistics.median(shares), 4),
            "itl_p99_over_p50": targets["None"]["p99_over_undisturbed_p50"],
        },
        {
            "milliseconds": {name: spread([t * 1e3 for t in values], 2) for name, values in times.items()},
            "ratios": {name: spread(values) for name, values in ratios.items()},
            "sched_share": spread(shares),
            "targets_s": targets,
        },
    )


if __name__ == "__main__":
    main()
