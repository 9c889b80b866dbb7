"""Seconds to the first token, for ``benchmarks/reuse.py``: the engine as users have it, pairs in turn."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from common import ratio, spread
from retention_tasks import CITIES, Prose
from reuse_cases import ROLES, Messages, _date, _talk

NUM_NOISE_TOKENS = 1 << 20


def _dates(prose: Prose, length: int) -> Iterator[Messages]:
    chance = random.Random("dates")
    talk, _ = _talk(prose, chance, length)
    while True:
        yield [{"role": "system", "content": f"Today is {_date(chance)}. {ROLES[0]}"}, *talk]


def _roles(prose: Prose, length: int) -> Iterator[Messages]:
    chance = random.Random("roles")
    talk, _ = _talk(prose, chance, length)
    while True:
        own = " ".join(prose.take(chance, chance.randrange(20, 80)))
        yield [{"role": "system", "content": f"{own} {ROLES[0]}"}, *talk]


def _heads(prose: Prose, length: int) -> Iterator[Messages]:
    chance = random.Random("heads")
    talk, _ = _talk(prose, chance, 7 * length // 8)
    while True:
        own = " ".join(prose.take(chance, 20))
        head, last = _talk(prose, chance, length // 8)
        start = [{"role": "system", "content": f"{own} {ROLES[0]}"}, *head]
        yield [*start, {"role": "assistant", "content": last}, *talk]


def _orders(prose: Prose, length: int) -> Iterator[Messages]:
    chance = random.Random("orders")
    documents = [
        f"Document {city}: {' '.join(prose.take(chance, length // 6))}" for city in chance.sample(CITIES, 6)
    ]
    system = {"role": "system", "content": "You answer questions about documents, briefly."}
    order = list(range(6))
    while True:
        text = "\n\n".join(documents[place] for place in order)
        question = f"What is the secret number of {chance.choice(CITIES)}?"
        yield [system, {"role": "user", "content": f"{text}\n\n{question}"}]
        before = order
        while order == before or order[0] == before[0]:
            order = chance.sample(before, 6)


KINDS = {"changed_date": _dates, "changed_role": _roles, "different_head": _heads, "shuffled_docs": _orders}


def first_token_s(engine: Any, messages: Messages, **options: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    reply = engine.chat(messages, temperature=0, max_tokens=1, **options)
    return time.perf_counter() - started, reply.usage


def ttft(engine: Any, prose: Prose, kind: str, length: int, rounds: int) -> dict[str, Any]:
    """With the prefix alone against with moved KV, after one such prompt was computed."""
    prompts = KINDS[kind](prose, length)
    first_token_s(engine, next(prompts))
    exact, moved, told = [], [], []
    for turn in range(rounds):
        for is_moved in (True, False) if turn % 2 else (False, True):
            seconds, usage = first_token_s(engine, next(prompts), reuse="moved" if is_moved else "exact")
            (moved if is_moved else exact).append(seconds)
            if is_moved:
                told.append(usage)
        print(f"  {kind} {turn + 1}/{rounds}: {moved[-1]:.2f} s moved, {exact[-1]:.2f} s exact", flush=True)
    return {
        "prefix_s": spread(exact),
        "moved_s": spread(moved),
        "speedup": ratio(exact, moved),
        "prompt_tokens": told[-1].prompt_tokens,
        "moved_tokens": [usage.reuse.moved_tokens for usage in told],
        "repaired_tokens": [usage.reuse.repaired_tokens for usage in told],
        "deviation": [usage.reuse.deviation for usage in told],
    }


def no_reuse_cost(engine: Any, prose: Prose, length: int, rounds: int) -> dict[str, Any]:
    """Prompts of which nothing is stored, with many tokens in the index; and the search alone."""
    blender = engine.runtime._batcher._blender
    noise = np.random.default_rng(0)
    space = engine.runtime.assembler.namespace.digest
    for _ in range(NUM_NOISE_TOKENS // 4096):
        with blender._lock:
            blender._index.add(space, noise.integers(3, engine.runtime.info.vocab_size, 4096, dtype=np.int32))
    searches = []
    for _ in range(20):
        prompt = noise.integers(3, engine.runtime.info.vocab_size, length, dtype=np.int32)
        started = time.perf_counter()
        with blender._lock:
            assert not blender._index.find(space, prompt)
        searches.append(time.perf_counter() - started)
    exact, moved = [], []
    for turn in range(rounds):
        for is_moved in (True, False) if turn % 2 else (False, True):
            prompt = noise.integers(3, engine.runtime.info.vocab_size, length).tolist()
            started = time.perf_counter()
            engine.complete(prompt, temperature=0, max_tokens=1, reuse="moved" if is_moved else "exact")
            (moved if is_moved else exact).append(time.perf_counter() - started)
        print(f"  nothing to reuse {turn + 1}/{rounds}: {moved[-1]:.2f} s, {exact[-1]:.2f} s", flush=True)
    return {
        "search_ms": spread([1e3 * value for value in searches]),
        "exact_s": spread(exact),
        "moved_s": spread(moved),
        "ratio": ratio(moved, exact),
        "search_share": round(float(np.median(searches) / np.median(exact)), 6),
        "tokens_in_index": blender.num_tokens,
    }
