"""What finding and holding a cached prefix costs: `acquire()` and `release()` in a tree of a million tokens.

Physics. A look-up has to compare the prompt with the stored tokens (a 4,000-token prompt is 16 kB: about
one microsecond of `memcmp` once it is in cache, and one more to copy it out of the array), follow one dict
entry for every node on the way, and raise one counter for each of 250 blocks, which numpy does for all of
them in a few microseconds. Nothing in it depends on how much is cached, except that a bigger tree misses
the processor's caches more often. So the floor in Python is about 10 us and what is above it is interpreter
overhead; a prefill of the same prompt takes seconds.

The tree: 20 system texts of 1,000 tokens, each with 17 conversations of 3,000 own tokens that were
committed in three turns; of every second one, the last turn was asked again with another ending. The
prompts, 4,000 tokens each, come from all over the tree so that nothing is warm:

- hit: a stored conversation up to 3,904 tokens (a block boundary) and 96 new ones;
- mid-block: the same up to 3,900 tokens, where the hit ends inside a block;
- miss: nothing of it is stored;
- many nodes: a conversation from which others part at every block, so that the path has 240 nodes.

Also, because an engine calls them between any two steps: the whole life of a request (acquire, reserve with
eviction of as much, commit, release), and `slots()` of a 4,000-token table. The last line is one JSON object;
times are in milliseconds, `runs_us` in microseconds.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable

import numpy as np

from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.types import TokenArray

BLOCK_SIZE = 16
NUM_CACHED = 1_000_000
PROMPT_TOKENS = 4_000
NUM_SYSTEMS, SYSTEM_TOKENS = 20, 1_000
NUM_PER_SYSTEM, OWN_TOKENS = 17, 3_000
NAMESPACE = Namespace("weights", "tokenizer", "template", "layout", "float32", "rotary")


def store(manager: KVManager, tokens: TokenArray) -> None:
    """A whole request without an engine."""
    with manager.acquire(NAMESPACE, tokens) as lease:
        assert lease.reserve(len(tokens)), "the arena is too small for this benchmark"
        lease.take_copies()
        lease.commit(tokens)


def draw(chance: np.random.Generator, num_tokens: int) -> TokenArray:
    return chance.integers(0, 49_152, num_tokens, dtype=np.int32)


def build(manager: KVManager, chance: np.random.Generator) -> tuple[list[TokenArray], TokenArray]:
    """Fills the tree; returns its conversations and the one that others part from at every block."""
    conversations = []
    for _ in range(NUM_SYSTEMS):
        system = draw(chance, SYSTEM_TOKENS)
        for number in range(NUM_PER_SYSTEM):
            tokens = np.concatenate((system, draw(chance, OWN_TOKENS)))
            for end in (2_003, 3_001, len(tokens)):
                store(manager, tokens[:end])
            if number % 2:
                store(manager, np.concatenate((tokens[:3_333], draw(chance, 200))))
            conversations.append(tokens)
    trunk = draw(chance, PROMPT_TOKENS)
    for end in range(BLOCK_SIZE, PROMPT_TOKENS, BLOCK_SIZE):
        store(manager, np.append(trunk[:end], np.int32(50_000)))
    store(manager, trunk)
    return conversations, trunk


def measure(action: Callable[[TokenArray], object], prompts: Iterable[TokenArray]) -> tuple[float, float]:
    """Median and 99th percentile of one action, in milliseconds, each prompt once."""
    times = []
    for prompt in prompts:
        start = time.perf_counter()
        action(prompt)
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times)), float(np.percentile(times, 99))


def run() -> dict[str, float]:
    """Builds the tree, measures, prints what it measures, and returns it."""
    chance = np.random.default_rng(0)
    manager = KVManager(NUM_CACHED // BLOCK_SIZE + 12_000, BLOCK_SIZE)
    start = time.perf_counter()
    conversations, trunk = build(manager, chance)
    build_s = time.perf_counter() - start
    assert manager.num_cached_tokens >= NUM_CACHED, f"{manager.num_cached_tokens} tokens cached"
    print(f"{manager.num_cached_tokens:,} tokens cached in {build_s:.2f} s")
    gc.collect()

    def look_up(prompt: TokenArray) -> None:
        manager.acquire(NAMESPACE, prompt).release()

    def part_at(hit_tokens: int) -> list[TokenArray]:
        order = chance.permutation(len(conversations) * 3) % len(conversations)
        new = draw(chance, PROMPT_TOKENS - hit_tokens)
        return [np.concatenate((conversations[at][:hit_tokens], new)) for at in order]

    shapes = {
        "hit": part_at(3_904),
        "mid_block": part_at(3_900),
        "miss": [draw(chance, PROMPT_TOKENS) for _ in range(1_000)],
        "many_nodes": [trunk] * 200,
    }
    assert manager.peek(NAMESPACE, shapes["hit"][0]) == 3_904, "the hit is not the one that was planned"
    assert manager.peek(NAMESPACE, shapes["mid_block"][0]) == 3_900, "the hit is not the one that was planned"
    assert manager.peek(NAMESPACE, shapes["miss"][0]) == 0, "the miss is none"
    result: dict[str, float] = {}
    for name, prompts in shapes.items():
        median, p99 = measure(look_up, prompts)
        print(f"{name:>12}: {median * 1e3:7.1f} us, p99 {p99 * 1e3:7.1f} us")
        result[f"{name}_ms"], result[f"{name}_ms_p99"] = round(median, 4), round(p99, 4)

    with manager.acquire(NAMESPACE, conversations[0]) as lease:
        median, _ = measure(lambda prompt: lease.slots(0, len(prompt)), [conversations[0][:3_999]] * 1_000)
        result["slots_us"] = round(median * 1e3, 2)
        print(f"{'slots':>12}: {median * 1e3:7.1f} us of {len(conversations[0][:3_999])} tokens")

    fill = draw(chance, manager.num_free_blocks * BLOCK_SIZE)
    store(manager, fill)
    assert manager.num_free_blocks == 0, "the arena is not full"
    median, p99 = measure(lambda prompt: store(manager, prompt), shapes["miss"])
    result["request_ms"], result["request_ms_p99"] = round(median, 4), round(p99, 4)
    print(f"{'request':>12}: {median * 1e3:7.1f} us, p99 {p99 * 1e3:7.1f} us, evicting its own size")

    manager.check_integrity()
    lookup = {"lookup_ms": result["hit_ms"], "lookup_ms_p99": result["hit_ms_p99"]}
    return {**lookup, "cached_tokens": manager.num_cached_tokens, **result}


if __name__ == "__main__":
    print(json.dumps(run()))
