"""Two tenants, one prompt: what one pays says nothing of what the other has asked.

Compared is work (tokens found, rows computed, steps run, blocks taken), exactly and by a permutation test;
what a clock says of it is measured in ``benchmarks/tenants.py``, where noise is part of the figures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.events import BlocksStored, Event, PrefixLookedUp, StepFinished
from ostinato.library import Engine

NUM_PROMPTS = 10
NUM_PERMUTATIONS = 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


MARK = [1, 2, 3]  # a prompt that says where the work of the one before it ends


class Meter:
    """Work of one request: hit tokens, rows, steps, blocks stored; from its look-up to that of the mark."""

    def __init__(self) -> None:
        self.is_counting = False
        self.work = [0, 0, 0, 0]

    def __call__(self, event: Event) -> None:
        if isinstance(event, PrefixLookedUp):
            self.is_counting = event.num_tokens > len(MARK)
        if not self.is_counting:
            return
        match event:
            case PrefixLookedUp():
                self.work[0] += event.hit_tokens
            case StepFinished():
                self.work[1] += event.num_rows
                self.work[2] += 1
            case BlocksStored():
                self.work[3] += event.num_blocks

    def read(self) -> tuple[int, ...]:
        work, self.work = tuple(self.work), [0, 0, 0, 0]
        return work


def ask(engine: Engine, meter: Meter, prompt: str, salt: str) -> tuple[int, ...]:
    reply = engine.complete(prompt, salt=salt, temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.complete(MARK, salt="mark", temperature=0.0, max_tokens=1, ignore_eos=True)
    return (reply.usage.cached_tokens, reply.usage.written_tokens, *meter.read())


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Of the difference of means under random relabelling."""
    chance = np.random.default_rng(0)
    pooled = np.array([*first, *second], float)
    found = abs(np.mean(first) - np.mean(second))
    shuffled = (chance.permutation(pooled) for _ in range(NUM_PERMUTATIONS))
    as_far = sum(abs(s[: len(first)].mean() - s[len(first) :].mean()) >= found - 1e-12 for s in shuffled)
    return (as_far + 1) / (NUM_PERMUTATIONS + 1)


@pytest.mark.parametrize("with_tier", [False, True], ids=["arena", "arena and tier"])
def test_another_tenant_cannot_tell_what_was_asked(folder: Path, tmp_path: Path, with_tier: bool) -> None:
    settings = {"shared_tier": tmp_path, "shared_tier_bytes": "4MiB"} if with_tier else {}
    chance = random.Random(1)
    # Each begins with a token of its own: no tenant finds anything of its own others.
    prompts = [chr(48 + i) + "".join(chance.choices("abcdefgh ", k=60)) for i in range(2 * NUM_PROMPTS)]
    asked, new = set(prompts[:NUM_PROMPTS]), set(prompts[NUM_PROMPTS:])
    with ostinato.load(folder, kv_cache=16 << 20, block_size=4, policy="lru", **settings) as engine:
        meter = Meter()
        engine.runtime.observers.append(meter)
        victims = [ask(engine, meter, prompt, "victim") for prompt in sorted(asked)]
        assert {work[0] for work in victims} == {0}
        chance.shuffle(prompts)  # probes of both kinds, interleaved
        probes = {prompt: ask(engine, meter, prompt, "prober") for prompt in prompts}
        again = [ask(engine, meter, prompt, "victim") for prompt in sorted(asked)]
    of_asked = [probes[prompt] for prompt in sorted(asked)]
    of_new = [probes[prompt] for prompt in sorted(new)]
    assert sorted(of_asked) == sorted(of_new), "the same work, to the token"
    for at in range(len(of_new[0])):
        assert p_value([w[at] for w in of_asked], [w[at] for w in of_new]) > 0.05
    # The same measure does see a hit, where there is one: it would have seen a leak.
    assert min(work[0] for work in again) > 0
    assert p_value([w[3] for w in again], [w[3] for w in of_new]) < 0.01


def test_the_salt_of_a_tenant_cannot_be_continued_into_anothers(folder: Path) -> None:
    with ostinato.load(folder, kv_cache=1 << 20, block_size=4) as engine:
        prompt = "a secret that only one of them knows"
        engine.complete(prompt, salt="ab", max_tokens=1)
        for salt in ("a", "abc", "ab ", "AB", "ab\0", ""):
            assert engine.complete(prompt, salt=salt, max_tokens=1).usage.cached_tokens == 0
        assert engine.complete(prompt, salt="ab", max_tokens=1).usage.cached_tokens > 0
