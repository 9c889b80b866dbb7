"""Can one tenant tell by the clock what another has asked? And what do quotas and purges cost?

Two figures about time to first token, both of a tenant that probes prompts. *Cross*: prompts that another
tenant has cached, against prompts nobody has. *Own*: prompts the prober itself has cached, against new ones.
A leak would show as a cross ratio that differs from 1; that the own ratio does shows that the measure could
see one. Probes of both kinds are interleaved at random. ``p`` is that of a permutation test of the difference
of means: small means that the two kinds differ by more than relabelling them by chance would explain.

Then the books alone, without a model: a request of a tenant that is at its quota has to choose among all of
its leaves, and a request's look-up asks a shared tier whether anything was purged.

The model is random and small: a prompt's time is its shape's, not its content's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import ostinato
from common import finish, spread
from ostinato.config import tame_waiting_threads
from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.terms import Allowance, Allowances
from ostinato.kv.tiers.shared import SharedTier

NUM_PERMUTATIONS = 20_000
BLOCK = 16


def ttft(engine: ostinato.Engine, prompt: list[int], salt: str) -> float:
    return engine.complete(prompt, salt=salt, temperature=0.0, max_tokens=1, ignore_eos=True).usage.ttft_s


def p_value(first: list[float], second: list[float]) -> float:
    chance = np.random.default_rng(0)
    pooled = np.array([*first, *second])
    found = abs(np.mean(first) - np.mean(second))
    num = sum(
        abs(shuffled[: len(first)].mean() - shuffled[len(first) :].mean()) >= found
        for shuffled in (chance.permutation(pooled) for _ in range(NUM_PERMUTATIONS))
    )
    return (num + 1) / (NUM_PERMUTATIONS + 1)


def probe(engine: ostinato.Engine, num_probes: int, num_tokens: int, *, owner: str) -> dict[str, object]:
    """The prober's times on prompts that ``owner`` has cached, and on prompts that nobody has."""
    chance = random.Random(owner)
    vocabulary = engine.runtime.info.vocab_size
    prompts = [[chance.randrange(vocabulary) for _ in range(num_tokens)] for _ in range(2 * num_probes)]
    for prompt in prompts[:num_probes]:
        ttft(engine, prompt, owner)
    times: dict[bool, list[float]] = {True: [], False: []}
    order = list(range(2 * num_probes))
    chance.shuffle(order)
    for place in order:
        times[place < num_probes].append(ttft(engine, prompts[place], "prober"))
    cached_ms, new_ms = ([1e3 * t for t in times[kind]] for kind in (True, False))
    return {
        "cached_ms": spread(cached_ms),
        "new_ms": spread(new_ms),
        "ratio_of_medians": round(statistics.median(cached_ms) / statistics.median(new_ms), 4),
        "p": round(p_value(cached_ms, new_ms), 5),
    }


def over_quota_ms(num_blocks: int) -> dict[str, float]:
    """A one-block request of a tenant with a quota full of one-block prompts: mean and longest of 1,000."""
    space = Namespace("w", "t", "c", "l", "d", "r", salt="anna")
    limits = Allowances(by_tenant={space.tenant: Allowance(num_blocks)})
    manager = KVManager(2 * num_blocks, BLOCK, allowances=limits)
    durations = []
    for number in range(num_blocks + 1000):
        tokens = np.arange(number * BLOCK, (number + 1) * BLOCK, dtype=np.int32)
        started_s = time.perf_counter()
        with manager.acquire(space, tokens) as lease:
            assert lease.reserve(BLOCK)
            lease.commit(tokens)
        if number >= num_blocks:
            durations.append(1e3 * (time.perf_counter() - started_s))
    return {"mean": round(statistics.mean(durations), 4), "longest": round(max(durations), 4)}


def hearing_us(folder: Path) -> dict[str, float]:
    """What asking for news of purges adds to a look-up."""
    store = SharedTier.open(folder, slot_bytes=4096, capacity_bytes=4096 * 64)
    durations = []
    for _ in range(2000):
        started_s = time.perf_counter()
        assert not list(store.news())
        durations.append(1e6 * (time.perf_counter() - started_s))
    store.close()
    return spread(durations, 1)


def save_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=1000, num_key_value_heads=2, max_position_embeddings=2048, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{number}": number for number in range(1000)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1", unk_token="w0").save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probes", type=int, default=60, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="in a prompt")
    given = parser.parse_args()
    tame_waiting_threads(os.environ)  # as the server does; before torch is imported
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        with ostinato.load(folder, kv_cache="1GiB", block_size=BLOCK, policy="lru") as engine:
            for warm_up in range(10):
                ttft(engine, [warm_up + 2] * given.tokens, "warm-up")
            cross = probe(engine, given.probes, given.tokens, owner="victim")
            own = probe(engine, given.probes, given.tokens, owner="prober")
        print(f"another's prompts against new ones: {cross}\none's own against new ones: {own}")
        quota = {str(size): over_quota_ms(size) for size in (100, 1000, 10_000)}
        print(f"request at a quota of N one-block prompts, ms: {quota}")
        news = hearing_us(Path(folder) / "tier")
        print(f"asking for news, µs: {news}")
    headline = {
        "cross_ratio": cross["ratio_of_medians"],
        "cross_p": cross["p"],
        "own_ratio": own["ratio_of_medians"],
        "own_p": own["p"],
        "over_quota_10000_ms": quota["10000"]["mean"],
    }
    details = {"cross": cross, "own": own, "over_quota_ms": quota, "news_us": news}
    settings = {"probes": given.probes, "tokens": given.tokens}
    finish("tenants", headline, details | settings)


if __name__ == "__main__":
    main()
