"""A chat service whose head changes every turn, for ``benchmarks/reuse.py``.

Every conversation has a fixed system text, then what the service knows at the moment (other words at every
turn), then its history. Answers are given, so that both ways have the same conversation. When it is longer
than the window, ``prefix`` drops the oldest turns that do not fit (a fixed window); ``moved`` trims to half
the window at once, and not again for a while. Smaller than the published account (32 conversations up to 8k
tokens), which a processor would take days for; what is compared are ratios.

``share``: prompt tokens whose KV was there and used. ``between``: turns for each one of which less than half
was. ``peak``: tokens of all conversations' prompts together, at most, which is what it takes to have all of
them at hand; conversations begin one after the other, so that they are not all as long at once.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from retention_tasks import Prose

FIXED_TOKENS, STATE_TOKENS, TURN_TOKENS = 300, 80, 70
STAGGER = 5


def _text(prose: Prose, chance: random.Random, num_tokens: int) -> str:
    return " ".join(prose.take(chance, num_tokens))


def account(
    engine: Any, prose: Prose, *, is_moved: bool, conversations: int, turns: int, window: int
) -> dict[str, float]:
    """The whole account one way, in a namespace of its own."""
    fixed = _text(prose, random.Random("fixed"), FIXED_TOKENS)
    talks: list[list[dict[str, str]]] = [[] for _ in range(conversations)]
    lengths = [0] * conversations
    seconds: list[float] = []
    total = used = num_full = num_turns = peak = 0
    options: dict[str, Any] = {
        "salt": "moved" if is_moved else "prefix",
        "reuse": "moved" if is_moved else "exact",
        "trim": {
            "strategy": "sticky" if is_moved else "drop",
            "budget_tokens": window,
            "low_water": 0.5 if is_moved else 1.0,
        },
    }
    for turn in range(turns + STAGGER * (conversations - 1)):
        for number, talk in enumerate(talks):
            if not 0 <= turn - STAGGER * number < turns:
                continue
            chance = random.Random(f"{number} {turn}")
            state = _text(prose, chance, STATE_TOKENS)
            head = {"role": "system", "content": f"{fixed}\n\nNow: {state}"}
            talk.append({"role": "user", "content": _text(prose, chance, TURN_TOKENS)})
            started = time.perf_counter()
            usage = engine.chat([head, *talk], temperature=0, max_tokens=1, **options).usage
            seconds.append(time.perf_counter() - started)
            talk.append({"role": "assistant", "content": _text(prose, chance, TURN_TOKENS)})
            there = usage.cached_tokens
            if usage.reuse is not None:
                there += usage.reuse.moved_tokens - usage.reuse.repaired_tokens
            total, used, num_turns = total + usage.prompt_tokens, used + there, num_turns + 1
            num_full += there < usage.prompt_tokens / 2
            lengths[number] = usage.prompt_tokens
            peak = max(peak, sum(lengths))
        print(f"  account {options['salt']} {turn + 1}: {seconds[-1]:.2f} s", flush=True)
    return {
        "share": round(used / total, 4),
        "ttft_s": round(statistics.median(seconds), 4),
        "ttft_mean_s": round(statistics.fmean(seconds), 4),
        "between": round(num_turns / max(1, num_full), 2),
        "peak_tokens": peak,
        "turns": num_turns,
    }


def ratios(prefix: dict[str, float], moved: dict[str, float]) -> dict[str, float]:
    """How many times better, each."""
    return {
        "share": round(moved["share"] / prefix["share"], 3),
        "ttft": round(prefix["ttft_s"] / moved["ttft_s"], 3),
        "between": round(moved["between"] / prefix["between"], 3),
        "peak": round(prefix["peak_tokens"] / moved["peak_tokens"], 3),
    }
