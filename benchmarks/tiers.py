"""What the shared tier costs and brings.

``read_ratio`` and ``write_ratio``: bandwidth of ``SharedTier.load`` and ``.store_all`` (checksums, index and
all) over that of copying the same payloads once from memory to memory, in turn, in one thread. The payloads
are SmolLM2-135M's blocks of 16 tokens, 720 KiB each, stored as many at a time as the write-back does. A load
copies once, out of the page cache, and reads the copy again to check it; so does a store the other way round.
Memory bandwidth is the limit of all three.

``restart_speedup``: a 4,000-token prompt's time to first token on a fresh engine that has to compute it, over
that of a fresh engine that finds it in the tier, whose files were dropped from the page cache before. Both
are asked three seconds after their start.

``itl_cost``: how much longer a decoding request's tokens take with the tier than without, while another
request's 1,000-token prompt is computed beside it and written back.

``load_itl_ratio``: the 99th percentile of a decoding request's gaps between tokens while another request's
4,000 tokens are read from the tier, over that of the same decoding alone.

``--quick`` leaves out what needs the default model.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import ostinato
from common import finish, pairs, ratio, spread
from ostinato.config import tame_waiting_threads
from ostinato.kv.hashing import Namespace, block_keys
from ostinato.kv.tiers.base import Outcome
from ostinato.kv.tiers.shared import SharedTier
from ostinato.kv.transfer import STORE_BATCH
from ostinato.types import Chunk, GenerationRequest, SamplingParams

BLOCK_TOKENS = 16
PAYLOAD_BYTES = 46_080 * BLOCK_TOKENS
NUM_BLOCKS = 96
START_S = 3.0
NAMESPACE = Namespace("benchmark", "t", "t", "l", "float32", "r")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ostinato-tier-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def filled_buffer(rng: np.random.Generator) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, PAYLOAD_BYTES))
    buffer[:] = rng.bytes(PAYLOAD_BYTES)
    return buffer


def bandwidth(parent: Path | None, rounds: int) -> dict[str, dict[str, float]]:
    """Loads, stores and copies of the same bytes in turn."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 49_152, NUM_BLOCKS * BLOCK_TOKENS, dtype=np.int32)
    # Other names every time: in a store that is as good as full, so that what was used least has to go.
    chains = [block_keys(NAMESPACE.with_salt(str(i)), tokens, BLOCK_TOKENS) for i in range(rounds + 1)]
    unused = iter(chains)
    keys = chains[0]
    # The buffers that blocks really go through, for the copies as well: ordinary memory, begun at a page and
    # touched before anything is measured.
    sources = [filled_buffer(rng) for _ in keys]
    targets = [filled_buffer(rng) for _ in keys]

    def copy() -> float:
        started = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target[:] = source
        return time.perf_counter() - started

    with scratch(parent) as folder:
        tier = SharedTier.open(
            folder / "t", slot_bytes=PAYLOAD_BYTES, capacity_bytes=PAYLOAD_BYTES * NUM_BLOCKS
        )

        def store() -> float:
            nonlocal keys
            keys = next(unused)
            started = time.perf_counter()
            blocks = [(key, [source]) for key, source in zip(keys, sources, strict=True)]
            batches = [blocks[at : at + STORE_BATCH] for at in range(0, NUM_BLOCKS, STORE_BATCH)]
            outcomes = [outcome for batch in batches for outcome in tier.store_all(batch)]
            duration = time.perf_counter() - started
            assert set(outcomes) == {Outcome.STORED}, "a block was not stored"
            return duration

        def load() -> float:
            started = time.perf_counter()
            num_hits = tier.lookup(keys).num_hits
            loaded = [tier.load(key, target) for key, target in zip(keys, targets, strict=True)]
            duration = time.perf_counter() - started
            assert num_hits == len(keys) == sum(loaded), "a block was not loaded"
            return duration

        copies_w, stores = pairs(copy, store, rounds, "copy, store")
        copies_r, loads = pairs(copy, load, rounds, "copy, load")
        assert all(a == b for a, b in zip(sources, targets, strict=True)), "loads differ from what was stored"
        tier.close()
    total_gb = NUM_BLOCKS * PAYLOAD_BYTES / 1e9
    return {
        "write_ratio": ratio(copies_w, stores),
        "read_ratio": ratio(copies_r, loads),
        "store_gb_s": spread([total_gb / s for s in stores], 2),
        "load_gb_s": spread([total_gb / s for s in loads], 2),
        "memcpy_gb_s": spread([total_gb / s for s in copies_w + copies_r], 2),
    }


def drop_from_page_cache(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def first_tokens(folder: Path, num_tokens: int, seed: int) -> tuple[float, float, int]:
    """Times to first token of one prompt: computed, and read by an engine that starts afterwards."""
    prompt = np.random.default_rng(seed).integers(1000, 40_000, num_tokens).tolist()
    options = {"kv_cache": 512 << 20, "shared_tier": folder}
    replies = []
    for head in (prompt[:40], prompt[20:60]):
        drop_from_page_cache(folder)
        with ostinato.load(**options) as engine:
            time.sleep(START_S)
            engine.complete(head[::-1], max_tokens=1, **GREEDY)  # warm the threads and the allocator
            replies.append(engine.complete(prompt, max_tokens=4, **GREEDY))
    cold, warm = replies
    assert cold.usage.cached_tokens == 0
    assert warm.choices[0].token_ids == cold.choices[0].token_ids, "the answers differ"
    print(
        f"  {num_tokens} tokens: {cold.usage.ttft_s:.2f} s computed, {warm.usage.ttft_s:.3f} s read",
        flush=True,
    )
    return cold.usage.ttft_s, warm.usage.ttft_s, warm.usage.cached_tokens


def restart(parent: Path | None, num_tokens: int, rounds: int) -> dict[str, object]:
    computed, restored = [], []
    num_cached = 0
    for seed in range(rounds):
        with scratch(parent) as folder:
            cold_s, warm_s, num_cached = first_tokens(folder, num_tokens, seed)
        computed.append(cold_s)
        restored.append(warm_s)
    return {
        "tokens": num_tokens,
        "cached_tokens": num_cached,
        "computed_ttft_s": spread(computed),
        "restored_ttft_s": spread(restored),
        "speedup": ratio(computed, restored),
    }


def decode_beside(engine: ostinato.Engine, seed: int, other: list[int] | None) -> list[float]:
    """Seconds between a stream's tokens, while ``other`` is answered beside it (or nobody)."""
    short = np.random.default_rng(seed).integers(1000, 40_000, 32).tolist()
    beside = threading.Thread(target=lambda: other and engine.complete(other, max_tokens=1, **GREEDY))
    times = []
    for chunk in tokens_of(engine, short):
        times += [time.perf_counter()] * bool(chunk.token_ids)
        if len(times) == 4 and beside.ident is None:
            beside.start()
    beside.join()
    return np.diff(times[3:]).tolist()


def loading(folder: Path, num_tokens: int, rounds: int) -> dict[str, object]:
    """Gaps between tokens while a prompt is read, and without it, in turn."""
    other = np.random.default_rng(5).integers(1000, 40_000, num_tokens).tolist()
    with_load: list[float] = []
    alone: list[float] = []
    with ostinato.load(kv_cache=512 << 20, shared_tier=folder) as engine:
        engine.complete(other, max_tokens=1, **GREEDY)
        while (report := engine.runtime.health().tier) and report.buffered_bytes:
            time.sleep(0.1)
        for seed in range(rounds):
            engine.runtime.cache().manager.clear()
            before = report.loads.loaded_tokens if (report := engine.runtime.health().tier) else 0
            with_load += decode_beside(engine, 1000 + seed, other)
            report = engine.runtime.health().tier
            assert report is not None
            assert report.loads.loaded_tokens - before == num_tokens - 1, "it was not read"
            alone += decode_beside(engine, 2000 + seed, None)
            print(
                f"  gaps {seed + 1}/{rounds}: longest so far {max(with_load):.3f} s, {max(alone):.3f} alone"
            )
    figures = {
        f"{name}_{p}_s": round(float(np.percentile(gaps, p)), 4)
        for name, gaps in (("with_load", with_load), ("alone", alone))
        for p in (50, 99)
    }
    return figures | {"ratio": round(figures["with_load_99_s"] / figures["alone_99_s"], 3)}


def tokens_of(engine: ostinato.Engine, prompt: list[int]) -> Iterator[Chunk]:
    """24 tokens, one after the other."""
    params = SamplingParams(max_tokens=24, **GREEDY)
    return engine.runtime.iterate(engine.runtime.prepare(GenerationRequest(tuple(prompt), params)))


def decode_beside_a_prompt(engine: ostinato.Engine, seed: int) -> float:
    """Mean seconds between a stream's tokens while a 1,000-token prompt nobody has seen is computed."""
    rng = np.random.default_rng(seed)
    short, long = rng.integers(1000, 40_000, 32).tolist(), rng.integers(1000, 40_000, 1000).tolist()
    started = threading.Event()
    other = threading.Thread(
        target=lambda: started.wait(60) and engine.complete(long, max_tokens=1, **GREEDY)
    )
    other.start()
    times = []
    for chunk in tokens_of(engine, short):
        times += [time.perf_counter()] * bool(chunk.token_ids)
        started.set()
    other.join()
    return (times[-1] - times[0]) / (len(times) - 1)


def inter_token(folder: Path, rounds: int) -> dict[str, float]:
    seeds = iter(range(100, 1000))
    with (
        ostinato.load(kv_cache=512 << 20) as plain,
        ostinato.load(kv_cache=512 << 20, shared_tier=folder) as tier,
    ):
        with_tier, without = pairs(
            lambda: decode_beside_a_prompt(tier, next(seeds)),
            lambda: decode_beside_a_prompt(plain, next(seeds)),
            rounds,
            "tokens with and without the tier",
        )
    return ratio(with_tier, without) | {"without_s": round(statistics.median(without), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where the bandwidth's tier lies; /dev/shm by default")
    parser.add_argument(
        "--disk", type=Path, help="where the restart's tier lies; the temporary folder by default"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--quick", action="store_true", help="leave out what needs the default model")
    options = parser.parse_args()
    tame_waiting_threads(os.environ)
    shm = Path("/dev/shm")
    details: dict[str, object] = bandwidth(options.folder or (shm if shm.is_dir() else None), options.rounds)
    headline = {name: details[name]["median"] for name in ("read_ratio", "write_ratio")}  # type: ignore[index]
    if not options.quick:
        details["restart"] = found = restart(options.disk, options.tokens, 3)
        headline["restart_speedup"] = found["speedup"]["median"]  # type: ignore[index]
        with scratch(options.disk) as folder:
            details["itl"] = cost = inter_token(folder, 13)
            headline["itl_cost"] = round(cost["median"] - 1, 4)
        with scratch(options.disk) as folder:
            details["loading"] = gaps = loading(folder, options.tokens, 5)
            headline["load_itl_ratio"] = gaps["ratio"]
    finish("tiers", headline, details)


if __name__ == "__main__":
    main()
