"""Minutes of mixed traffic through a real engine with a shared tier, and what becomes of its memory.

Clients hold some hundred conversations under a few system texts over and over, close streams in the middle,
ask for two choices, bring salts of their own, and ask a few fixed questions again and again. The arena is too
small for all of them and the tier for what they leave, so that everything is evicted, written back, read and
preempted all the time.

``rss_growth_mib``: mean resident memory of the last tenth of the time less that of the tenth before its
middle. ``rss_slope_mib_per_min``: a straight line through the second half. ``different``: answers to the
fixed questions that were not those of an engine without a tier; ``errors``: requests that failed. Both must
be 0, or the exit status is 1.

By default a random model of a few thousand weights: it brings a hundred times the traffic a real one would.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

import ostinato
from common import finish
from ostinato.config import tame_waiting_threads
from ostinato.errors import OstinatoError
from ostinato.events import Event

NUM_CLIENTS = 6
NUM_CONVERSATIONS = 300
WORDS = ("ground", "bass", "phrase", "returns", "variation", "chaconne", "below", "again", "lament", "line")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def talk(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


SYSTEMS = [talk(random.Random(seed), 12) for seed in range(8)]
QUESTIONS = [talk(random.Random(100 + seed), 10) for seed in range(5)]


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEMS[number]}, {"role": "user", "content": QUESTIONS[number]}]


class Client:
    """A thread that asks until it is told to stop."""

    def __init__(self, engine: ostinato.Engine, seed: int, expected: list[tuple[int, ...]]) -> None:
        self.counts: Counter[str] = Counter()
        self.is_stopping = False
        self._engine = engine
        self._rng = random.Random(seed)
        self._expected = expected
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        acts = (self._converse, self._converse, self._hang_up, self._choose, self._ask)
        while not self.is_stopping:
            try:
                self._rng.choice(acts)()
            except OstinatoError as error:
                self.counts["errors"] += 1
                print(f"  a request failed: {error}", flush=True)

    def _converse(self) -> None:
        rng = random.Random(self._rng.randrange(NUM_CONVERSATIONS))
        messages = [{"role": "system", "content": rng.choice(SYSTEMS)}]
        salt = rng.choice(("", "", "ada", "bob"))
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": talk(rng, rng.randint(2, 8))})
            reply = self._engine.chat(messages, salt=salt, max_tokens=rng.randint(1, 24), **GREEDY)
            # Words, not the answer: what a random model says differs with the last bit of a sum.
            messages.append({"role": "assistant", "content": talk(rng, 3)})
            self.counts["requests"] += 1
            self.counts["cached_tokens"] += reply.usage.cached_tokens
            self.counts["prompt_tokens"] += reply.usage.prompt_tokens

    def _hang_up(self) -> None:
        stream = self._engine.stream(question(self._rng.randrange(5)), max_tokens=60, **GREEDY)
        for _ in itertools.islice(stream, self._rng.randint(1, 20)):
            pass
        stream.close()  # type: ignore[attr-defined]
        self.counts["cancelled"] += 1

    def _choose(self) -> None:
        self._engine.chat(question(self._rng.randrange(5)), n=2, max_tokens=8, seed=self._rng.randrange(100))
        self.counts["requests"] += 1

    def _ask(self) -> None:
        number = self._rng.randrange(5)
        reply = self._engine.chat(question(number), max_tokens=16, **GREEDY)
        self.counts["requests"] += 1
        self.counts["asked_again"] += 1
        self.counts["different"] += reply.choices[0].token_ids != self._expected[number]


@contextmanager
def model_folder(model: str) -> Iterator[str]:
    if model != "tiny":
        yield model
        return
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from doors.tiny import save_tiny_chat_model

    with tempfile.TemporaryDirectory(prefix="ostinato-soak-") as folder:
        yield str(save_tiny_chat_model(Path(folder)))


def warm_up(engine: ostinato.Engine) -> None:
    """Steps of every size: code is compiled for each of them once, and stays."""
    rng = random.Random(1)
    for num_rows in (*range(1, 17), *range(20, 480, 8)):
        engine.complete([rng.randrange(250) for _ in range(num_rows)], max_tokens=1, **GREEDY)


def watch(seconds: float) -> list[tuple[float, float, int, int]]:
    """Every half second: seconds of traffic so far, MiB resident, threads, open files.

    A process that was stopped for a while has had no traffic then.
    """
    process = psutil.Process()
    samples: list[tuple[float, float, int, int]] = []
    now = 0.0
    before = time.perf_counter()
    while now < seconds:
        rss = process.memory_info().rss / 2**20
        samples.append((now, rss, process.num_threads(), process.num_fds()))
        if len(samples) % 60 == 1:
            print(
                f"  {now:5.0f} s: {rss:.1f} MiB, {samples[-1][2]} threads, {samples[-1][3]} files", flush=True
            )
        time.sleep(0.5)
        before, elapsed = time.perf_counter(), time.perf_counter() - before
        now += min(elapsed, 2.0)
    return samples


def soak(model: str, folder: Path, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, object]]:
    with ostinato.load(model) as plain:
        expected = [plain.chat(question(i), max_tokens=16, **GREEDY).choices[0].token_ids for i in range(5)]
    events: Counter[str] = Counter()

    def note(event: Event) -> None:
        events[type(event).__name__] += 1

    sizes = {"kv_cache": options.kv_cache, "shared_tier_bytes": options.tier}
    with ostinato.load(model, shared_tier=folder, **sizes) as engine:
        warm_up(engine)
        engine.runtime.observers.append(note)
        clients = [Client(engine, seed, expected) for seed in range(NUM_CLIENTS)]
        samples = watch(options.seconds)
        for client in clients:
            client.is_stopping = True
        for client in clients:
            client.join()
        report = engine.runtime.health().tier
        manager = engine.runtime.cache().manager
        manager.check_integrity()
        assert manager.num_held_blocks == 0, "blocks are held although nobody asks"
    assert report is not None
    counts = sum((client.counts for client in clients), Counter[str]())
    times, rss, threads, files = (np.array(column) for column in zip(*samples, strict=True))
    half = times > options.seconds / 2
    middle = (times > options.seconds * 0.4) & ~half
    last = times > options.seconds * 0.9
    headline = {
        "rss_growth_mib": round(float(rss[last].mean() - rss[middle].mean()), 2),
        "rss_slope_mib_per_min": round(float(np.polyfit(times[half] / 60, rss[half], 1)[0]), 3),
        "requests": counts["requests"],
        "cancelled": counts["cancelled"],
        "different": counts["different"],
        "errors": counts["errors"],
    }
    details: dict[str, object] = {
        "seconds": options.seconds,
        "model": options.model,
        "rss_mib": {
            "first": rss[0],
            "middle": rss[middle].mean(),
            "last": rss[last].mean(),
            "most": rss.max(),
        },
        "threads": {"middle": int(threads[middle].max()), "last": int(threads[last].max())},
        "files": {"middle": int(files[middle].max()), "last": int(files[last].max())},
        "counts": dict(counts),
        "events": dict(events),
        "tier": {
            "loaded_tokens": report.loads.loaded_tokens,
            "failed_blocks": report.loads.failed_blocks,
            "stored_bytes": report.write_back.stored_bytes,
            "dropped": report.write_back.dropped,
            "evictions": dict(report.evictions),
            "misses": dict(report.misses),
        },
    }
    return headline, details


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", default="tiny", help="any model instead, with sizes that suit it")
    parser.add_argument("--kv-cache", type=int, default=320 << 10, help="bytes")
    parser.add_argument("--tier", type=int, default=1 << 20, help="bytes")
    options = parser.parse_args()
    tame_waiting_threads(os.environ)
    with (
        model_folder(options.model) as model,
        tempfile.TemporaryDirectory(prefix="ostinato-soak-tier-") as folder,
    ):
        headline, details = soak(model, Path(folder), options)
    finish("soak", headline, details)
    sys.exit(1 if headline["different"] or headline["errors"] else 0)


if __name__ == "__main__":
    main()
