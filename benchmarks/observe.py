"""What seeing costs: throughput with metrics and trace against without, and ``/metrics`` with 1,000 prompt
names.

How: one engine of the default model, which computes the same requests again and again from an empty cache:
prompts of 128 tokens of which half are shared, eight at a time, 8 tokens of answer each. Rounds come in
pairs, one with the metrics' observer and a request log to a file, one without either; who is first
alternates. What the log's thread still has to do is waited for, so that it is paid for where it belongs. The
ratio is of the times of a pair. A round is short, so that both of a pair find the machine in the same state,
and there are many: a single pair says nothing about one per cent. ``low`` and ``high`` are the interval that
holds the median of such pairs with 95 %, by drawing them again.

Physics: an observer runs in the engine's thread, between steps. A step of the default model takes some 60 ms
for eight sequences on two cores, and what is counted in it some tens of microseconds. The log's thread
digests the prompts, some microseconds a block, while the engine's thread waits for the matrix products, which
hold no lock.

``metrics_ms``: rendering everything once each of 1,000 named prompts was used, median of many.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import ostinato
from common import finish, pairs, spread
from ostinato.events import RequestFinished, StepFinished
from ostinato.observe import HttpMetrics, PrometheusObserver, exposition, new_registry
from ostinato.ports import SystemClock
from ostinato.records import log_key
from ostinato.request_log import RequestLog
from ostinato.types import GenerationRequest, Usage

NUM_REQUESTS = 8
PROMPT_TOKENS = 128
ANSWER_TOKENS = 8
NUM_DRAWS = 2_000
NUM_NAMES = 1_000


def throughput(rounds: int) -> tuple[dict[str, object], dict[str, float]]:
    with (
        ostinato.load(kv_cache=256 << 20) as engine,
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(NUM_REQUESTS) as clients,
    ):
        runtime = engine.runtime
        shared = [1000 + n for n in range(PROMPT_TOKENS // 2)]
        prompts = [
            [*shared, *(2000 + 200 * k + n for n in range(PROMPT_TOKENS // 2))] for k in range(NUM_REQUESTS)
        ]

        def answer(prompt: list[int]) -> None:
            engine.complete(prompt, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)

        def work(log: RequestLog | None = None) -> float:
            engine.purge()
            started_s = time.perf_counter()
            list(clients.map(answer, prompts))
            if log is not None:
                assert log.flush(60), "the log does not keep up"
            return time.perf_counter() - started_s

        log = RequestLog(
            Path(folder) / "log.jsonl",
            key=log_key("k"),
            block_tokens=16,
            clock=SystemClock(),
            marker_ids=runtime.tokenizer.special_tokens.values(),
        )
        observers = [PrometheusObserver(new_registry()), log]

        def seen() -> float:
            runtime.observers.extend(observers)
            try:
                return work(log)
            finally:
                del runtime.observers[-2:]

        ours, theirs = pairs(seen, work, rounds, "with and without")
        log.close()
        num_lines = len((Path(folder) / "log.jsonl").read_bytes().splitlines())
    tokens = NUM_REQUESTS * (PROMPT_TOKENS + ANSWER_TOKENS)
    found = interval(ours, theirs)
    return {
        "ratio": found,
        "seen_s": spread(ours),
        "unseen_s": spread(theirs),
        "tokens_per_s": round(tokens / statistics.median(theirs), 1),
        "num_pairs": rounds,
        "num_lines": num_lines,
    }, found


def interval(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """The median of the ratios pair by pair, and where it lies with 95 %."""
    ratios = np.array(ours) / np.array(theirs)
    drawn = np.random.default_rng(0).choice(ratios, (NUM_DRAWS, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    median = float(np.median(ratios))
    return {"median": round(median, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def metrics_ms(times: int) -> dict[str, float]:
    registry = new_registry()
    observer = PrometheusObserver(registry)
    HttpMetrics(registry).observe("/v1/chat/completions", 200, 0.1)
    request = GenerationRequest("x")
    observer(StepFinished(64, 3, 0.02))
    for number in range(NUM_NAMES):
        usage = Usage(100, 60, 40, 5, ttft_s=0.1, total_s=0.3, prompt_name=f"prompt-{number}")
        observer(RequestFinished("stop", usage, request))
    taken: list[float] = []
    for _ in range(times):
        started_s = time.perf_counter()
        body, _ = exposition(registry)
        taken.append((time.perf_counter() - started_s) * 1000)
    return {**spread(taken, 2), "size_bytes": len(body)}


def event_us(times: int) -> dict[str, float]:
    """What the observer takes for a step and for a request."""
    observer = PrometheusObserver(new_registry())
    step = StepFinished(8, 8, 0.06)
    end = RequestFinished("stop", Usage(256, 128, 128, 16, ttft_s=0.1, total_s=0.3), GenerationRequest("x"))
    found: dict[str, float] = {}
    for name, event in (("step_us", step), ("request_us", end)):
        started_s = time.perf_counter()
        for _ in range(times):
            observer(event)
        found[name] = round((time.perf_counter() - started_s) / times * 1e6, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=140)
    options = parser.parse_args()
    exposed = metrics_ms(50)
    each = event_us(2_000)
    result, overhead = throughput(options.rounds)
    finish(
        "observe",
        {"overhead_ratio": overhead, "metrics_ms": exposed["median"]},
        {"throughput": result, "metrics": exposed, "events": each},
    )


if __name__ == "__main__":
    main()
