"""What the dashboard costs whoever is served, and how large and how soon its picture of the tree is.

Physics. When a request ends, the engine's thread puts one reference into a queue: a lock, an append, a
wake-up, some microseconds. A thread of the dashboard's digests the prompt (BLAKE3, one call for each block of
16 tokens, about a microsecond each) and adds it up; that takes the interpreter from the engine for as long.
Looking at the tree reads every node under the books' lock, 256 at a time, about a microsecond each: what a
request can wait for is one such slice. Sums and JSON come after it, without the lock.

How. *Observer*: 2,000 events of prompts of 2,000 tokens into the recorder, and without it into nothing, in
turn; then the time until all are recorded. *Tree*: indexes of 10,000 and 100,000 nodes; how long a survey and
the picture take, how many bytes it has, and how long others wait for the lock meanwhile, measured by a thread
that takes it all the time.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from common import finish, pairs, spread
from ostinato.events import RequestFinished
from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.ports import SystemClock
from ostinato.server.dashboard.history import History
from ostinato.server.dashboard.recent import RecentRequests
from ostinato.server.dashboard.recorder import Recorder
from ostinato.server.dashboard.tree import tree_data
from ostinato.types import Conversation, GenerationRequest, Message, Usage

NUM_EVENTS = 2_000
ROUNDS = 7
PROMPT_TOKENS = 2_000
SPACE = Namespace("weights", "tokenizer", "template", "layout", "float32", "rotary")


def events() -> list[RequestFinished]:
    chance = np.random.default_rng(0)
    request = GenerationRequest(Conversation((Message("system", "s" * 4_000), Message("user", "What?"))))
    usage = Usage(
        prompt_tokens=PROMPT_TOKENS, cached_tokens=1_500, completion_tokens=50, ttft_s=0.2, total_s=2.0
    )
    return [
        RequestFinished(
            "stop", usage, request, chance.integers(0, 49_152, PROMPT_TOKENS, dtype=np.int32), SPACE.digest
        )
        for _ in range(NUM_EVENTS)
    ]


def observer() -> dict[str, Any]:
    """Microseconds that one event takes in the engine's thread, and in the dashboard's."""
    given = events()
    clock = SystemClock()
    per_record: list[float] = []

    def ours() -> float:
        recorder = Recorder(
            History(clock),
            RecentRequests(clock, lambda request: 3600.0),
            clock,
            block_tokens=16,
            marker_ids=[1, 2],
        )
        start = time.perf_counter()
        for event in given:
            recorder(event)
        passed_s = time.perf_counter() - start
        assert recorder.flush(60)
        per_record.append((time.perf_counter() - start) / NUM_EVENTS * 1e6)
        assert recorder.num_dropped == 0
        recorder.close()
        return passed_s

    def nothing(event: RequestFinished) -> None:
        return

    def theirs() -> float:
        start = time.perf_counter()
        for event in given:
            nothing(event)
        return time.perf_counter() - start

    with_it, without = pairs(ours, theirs, ROUNDS, "observer")
    added = [(a - b) / NUM_EVENTS * 1e6 for a, b in zip(with_it, without, strict=True)]
    return {"engine_us": spread(added, 2), "record_us": spread(per_record, 1), "prompt_tokens": PROMPT_TOKENS}


def grown(num_nodes: int) -> KVManager:
    manager = KVManager(1 << 19, 4)
    chance = np.random.default_rng(1)
    heads = [chance.integers(0, 49_152, 40) for _ in range(50)]
    while manager._index.num_nodes < num_nodes:
        parts = [
            heads[chance.integers(50)],
            chance.integers(0, 6, chance.integers(1, 20)),
            chance.integers(0, 49_152, 12),
        ]
        tokens = np.concatenate(parts).astype(np.int32)
        with manager.acquire(SPACE, tokens) as lease:
            assert lease.reserve(len(tokens)), "the arena is too small for this benchmark"
            lease.take_copies()
            lease.commit(tokens)
    return manager


def tree(num_nodes: int) -> dict[str, Any]:
    manager = grown(num_nodes)
    waits: list[float] = []
    is_over = threading.Event()
    prompt = np.arange(64, dtype=np.int32)

    def ask() -> None:
        while not is_over.is_set():
            start = time.perf_counter()
            manager.peek(SPACE, prompt)
            waits.append(time.perf_counter() - start)
            time.sleep(0.0002)

    surveys, pictures, sizes = [], [], []
    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(ROUNDS):
        start = time.perf_counter()
        survey = manager.surveyor.survey()
        middle = time.perf_counter()
        made = tree_data(survey, tenant_name=str, prompt_name={}, text_of=lambda tokens: "x" * 60)
        pictures.append((time.perf_counter() - middle) * 1e3)
        surveys.append((middle - start) * 1e3)
        assert made is not None
        sizes.append(len(made))
    is_over.set()
    thread.join()
    ordered = sorted(waits)
    return {
        "nodes": manager._index.num_nodes,
        "survey_ms": spread(surveys, 2),
        "picture_ms": spread(pictures, 2),
        "bytes": max(sizes),
        "waited_ms": {
            "median": round(ordered[len(ordered) // 2] * 1e3, 4),
            "p99": round(ordered[int(len(ordered) * 0.99)] * 1e3, 3),
            "worst": round(ordered[-1] * 1e3, 3),
        },
    }


def main() -> None:
    recorded = observer()
    trees = [tree(10_000), tree(100_000)]
    headline = {
        "observer_us": recorded["engine_us"]["median"],
        "record_us": recorded["record_us"]["median"],
        "tree_bytes": trees[1]["bytes"],
        "tree_ms": round(trees[1]["survey_ms"]["median"] + trees[1]["picture_ms"]["median"], 1),
    }
    finish("dashboard", headline, {"observer": recorded, "trees": trees})


if __name__ == "__main__":
    main()
