"""Prefix reuse against plain transformers, on the same weights, in one process, in turn.

The physics. Prefill is arithmetic: about 2 x parameters operations a token, and attention on top, which
grows with the square of the length; a processor's peak bounds it, so a cold prompt of 3,600 tokens costs
36 times its last 100 tokens and more. A hit leaves the last 100: what remains is their arithmetic, their
attention over 3,500 keys, and overhead, which this benchmark is after. Decode is bandwidth: every token
reads all weights and its sequence's KV once. transformers' DynamicCache also copies the KV, each step.

Against what: ``cold`` is transformers' forward call over the whole prompt; ``warm`` its forward call over
the new tokens with a ready cache (nothing looked up, nothing scheduled: the least that reuse can cost);
``decode`` its decode step with that cache. Ours goes the whole way, from arrival to first token.

Each runs in a process of its own while the other sleeps: two models in one process have two teams of OpenMP
threads, and with more threads than processors these wait badly, which costs either some 15 %.

The last line is JSON: ratios are ours / transformers, median over pairs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from common import finish, pairs, ratio, spread

MODEL = "smollm2-135m"
THROW_AWAY = -1


def words(rng: np.random.Generator, length: int) -> list[int]:
    """Random ordinary tokens: timing depends on their number, not on what they say."""
    return rng.integers(1000, 40000, length).tolist()


def stored_model() -> Path:
    """The folder of the default model."""
    from ostinato.config import Settings
    from ostinato.models.fetch import fetch
    from ostinato.models.store import ModelStore

    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    return fetch(MODEL, ModelStore(settings.store), progress=None).path


class Peer:
    """transformers as its users run it, SDPA attention and a DynamicCache, behind a pipe."""

    def __init__(self, path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_peer, args=(theirs, str(path)), daemon=True)
        self._process.start()

    def _ask(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._pipe.recv()

    def forward(self, tokens: list[int], cache: int) -> float:
        """Seconds of one forward call that extends the cache of that number (made when first named)."""
        seconds: float = self._ask("forward", tokens, cache)
        return seconds

    def crop(self, cache: int, num_tokens: int) -> None:
        self._ask("crop", num_tokens, cache)

    def decode(self, tokens: list[int], steps: int, cache: int) -> float:
        """Mean seconds of ``steps`` greedy steps after ``tokens``; the cache is put back as it was."""
        seconds: float = self._ask("decode", tokens, cache, steps)
        return seconds

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def serve_peer(pipe: Connection, path: str) -> None:
    """The peer's process: requests come in, seconds go out."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    caches: dict[int, Any] = {}

    def forward(tokens: list[int], cache: Any) -> tuple[float, int]:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            started = time.perf_counter()
            output = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
            token = int(output.logits[0, -1].argmax())
            return time.perf_counter() - started, token

    while (request := pipe.recv()) is not None:
        action, tokens, number, *more = request
        if number < 0:
            caches.pop(number, None)  # a throw-away cache
        cache = caches.setdefault(number, DynamicCache(config=model.config))
        if action == "forward":
            pipe.send(forward(tokens, cache)[0])
        elif action == "crop":
            pipe.send(cache.crop(-tokens))
        else:
            _, token = forward(tokens, cache)
            times = []
            for _ in range(more[0]):
                elapsed, token = forward([token], cache)
                times.append(elapsed)
            cache.crop(-(len(tokens) + more[0]))
            pipe.send(statistics.fmean(times))


def measure(shared_len: int, new_len: int, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    import ostinato

    engine = ostinato.load(MODEL)
    peer = Peer(stored_model())
    rng = np.random.default_rng(0)
    shared = words(rng, shared_len)
    salts = iter(range(10**6))
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}

    def our_cold() -> float:
        prompt = shared + words(rng, new_len)
        reply = engine.complete(prompt, max_tokens=1, salt=f"cold-{next(salts)}", **greedy)
        assert reply.usage.cached_tokens == 0
        return reply.usage.ttft_s

    def their_cold() -> float:
        return peer.forward(shared + words(rng, new_len), THROW_AWAY)

    print("cold", flush=True)
    cold = pairs(our_cold, their_cold, rounds, "cold")

    engine.complete(shared, max_tokens=1, **greedy)
    ready = 1
    peer.forward(shared, ready)

    def our_warm() -> float:
        reply = engine.complete(shared + words(rng, new_len), max_tokens=1, **greedy)
        assert reply.usage.cached_tokens == shared_len
        return reply.usage.ttft_s

    def their_warm() -> float:
        elapsed = peer.forward(words(rng, new_len), ready)
        peer.crop(ready, new_len)
        return elapsed

    print("warm", flush=True)
    warm = pairs(our_warm, their_warm, 4 * rounds, "warm")

    steps = 32

    def our_decode() -> float:
        reply = engine.complete(shared + words(rng, 8), max_tokens=steps + 1, **greedy)
        return (reply.usage.total_s - reply.usage.ttft_s) / steps

    def their_decode() -> float:
        return peer.decode(words(rng, 8), steps, ready)

    print("decode", flush=True)
    decode = pairs(our_decode, their_decode, 2 * rounds, "decode")
    turns = conversation(engine, peer, greedy)
    engine.close()
    peer.close()

    headline = {
        "cold_ratio": ratio(*cold)["median"],
        "warm_ratio": ratio(*warm)["median"],
        "warm_speedup": round(statistics.median(cold[0]) / statistics.median(warm[0]), 2),
        "decode_ratio": ratio(*decode)["median"],
    }
    details = {
        "shared_tokens": shared_len,
        "new_tokens": new_len,
        "cold": {"ratio": ratio(*cold), "ours_s": spread(cold[0]), "transformers_s": spread(cold[1])},
        "warm": {"ratio": ratio(*warm), "ours_s": spread(warm[0]), "transformers_s": spread(warm[1])},
        "decode": {"ratio": ratio(*decode), "ours_s": spread(decode[0]), "transformers_s": spread(decode[1])},
        "conversation": turns,
    }
    return headline, details


def conversation(engine: Any, peer: Peer, greedy: dict[str, Any], num_turns: int = 8) -> list[dict[str, Any]]:
    """Eight turns of 60 new tokens and 40 answered: ours, and transformers with and without a kept cache."""
    rng = np.random.default_rng(1)
    history = words(rng, 200)
    kept = 2
    seen = 0
    rows = []
    for turn in range(num_turns):
        history = history + words(rng, 60)
        reply = engine.complete(history, max_tokens=40, **greedy)
        kept_s = peer.forward(history[seen:], kept)
        without_s = peer.forward(history, THROW_AWAY)
        seen = len(history)
        rows.append(
            {
                "turn": turn + 1,
                "prompt_tokens": reply.usage.prompt_tokens,
                "cached_tokens": reply.usage.cached_tokens,
                "ttft_s": round(reply.usage.ttft_s, 4),
                "transformers_kept_cache_s": round(kept_s, 4),
                "transformers_without_s": round(without_s, 4),
            }
        )
        print(f"  turn {rows[-1]}", flush=True)
        history = history + list(reply.choices[0].token_ids)
    return rows


def memory() -> dict[str, Any]:
    """RSS of a process that only serves, after its arena has been filled."""
    import psutil

    import ostinato

    arena = 256 << 20
    engine = ostinato.load(MODEL, kv_cache=arena)
    libraries = psutil.Process().memory_info()
    rng = np.random.default_rng(2)
    for _ in range(4):
        engine.complete(words(rng, 2000), max_tokens=4, temperature=0.0)
    rss = psutil.Process().memory_info().rss
    weights = sum(file.stat().st_size for file in stored_model().glob("*.safetensors"))
    engine.close()
    return {
        "rss_mb": round(rss / 1e6),
        "rss_at_load_mb": round(libraries.rss / 1e6),
        "weights_mb": round(weights / 1e6),
        "arena_mb": round(arena / 1e6),
        "rest_mb": round((rss - weights - arena) / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shared", type=int, default=3500)
    parser.add_argument("--new", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-only", action="store_true", help="only the RSS of a fresh process")
    args = parser.parse_args()
    if args.memory_only:
        print(json.dumps(memory()))
        return
    # Memory and look-up in processes of their own, so that neither measures the other's leftovers.
    # The first process on a machine compiles the attention kernel, and the compiler's memory (some 200 MB)
    # stays with it; what an ordinary start takes is the second's.
    _child("prefix.py", "--memory-only")
    rss = _child("prefix.py", "--memory-only")
    lookup = _child("lookup.py")
    headline, details = measure(args.shared, args.new, args.rounds)
    headline |= {"lookup_ms": lookup["lookup_ms"], "rss_mb": rss["rss_mb"], "rss_rest_mb": rss["rest_mb"]}
    finish("prefix", headline, details | {"memory": rss, "lookup": lookup})


def _child(script: str, *arguments: str) -> dict[str, Any]:
    path = Path(__file__).parent / script
    done = subprocess.run([sys.executable, str(path), *arguments], check=True, capture_output=True, text=True)
    record: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return record


if __name__ == "__main__":
    main()
