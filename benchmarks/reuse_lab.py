"""Methods of reuse side by side, for ``benchmarks/reuse.py``: the engine's own parts, without its schedule.

A sequence is computed at the lower half of an arena; another one, computed with what is moved from there, at
the upper half. What is measured there is told by logits that a sampler does not give.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ostinato.config import Settings
from ostinato.engines.blending import MIN_RUN_TOKENS
from ostinato.engines.hf import load_model
from ostinato.engines.rotations import observe_movement
from ostinato.engines.runners import PagedRunner, forward
from ostinato.models.fetch import fetch
from ostinato.models.store import ModelStore
from ostinato.ports import SystemClock
from ostinato.prompt.conversation import conversation_from_dicts
from ostinato.prompt.template import template_for
from ostinato.prompt.tokens import HFTokenizer
from ostinato.reuse.blend import PROBED_LAYER, choose_repairs, parse_repair, relative_deviations
from ostinato.reuse.match import RunIndex
from ostinato.reuse.shifts import shifts_of
from ostinato.types import Plan, SequencePlan, SlotCopy, num_common

BLOCK = 16
CHUNK = 512
FORCED = 64


@dataclass
class Told:
    """What a way of computing a prompt says: log-probabilities ``[rows, vocabulary]`` behind the prompt and
    each forced token of its own greedy answer, and of the text that truly follows."""

    answer: torch.Tensor
    follows: torch.Tensor | None


class Lab:
    """A model, and room for two sequences of ``max_tokens`` each."""

    def __init__(self, model: str, max_tokens: int = 6144) -> None:
        settings = Settings.from_environment(os.environ, model=model)
        assert settings.store is not None
        local = fetch(settings.model, ModelStore(settings.store), progress=None, offline=False, token=None)
        self.tokenizer = HFTokenizer.from_folder(local.path, nonce="1" * 19)
        self.template = template_for(self.tokenizer, "auto", clock=SystemClock(), nonce="1" * 19)
        self.loaded = load_model(local.path)
        self.loaded.movement = observe_movement(self.loaded)
        self.half = max_tokens // BLOCK * BLOCK
        self.runner = PagedRunner(self.loaded, 2 * self.half)

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def tokens(self, messages: list[dict[str, Any]]) -> np.ndarray:
        conversation = conversation_from_dicts(messages)
        rendered = self.template.render(conversation, add_generation_prompt=True)
        return self.tokenizer.encode_rendered(rendered, scope="")

    # ------------------------------------------------------------ rows

    def plan(
        self, half: int, tokens: np.ndarray, positions: np.ndarray, *, sample: bool, key: int = 0
    ) -> SequencePlan:
        return SequencePlan(
            sequence_id=key,
            tokens=tokens,
            positions=positions,
            slots=(half * self.half + positions).astype(np.int32),
            block_ids=half * self.half // BLOCK + np.arange(self.half // BLOCK),
            block_size=BLOCK,
            sample=sample,
            places=positions,
        )

    @torch.inference_mode()
    def rows(self, half: int, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Computes rows of a sequence; the last one's log-probabilities."""
        logits = torch.empty(0)
        for start in range(0, len(positions), CHUNK):
            at = positions[start : start + CHUNK].astype(np.int32)
            plan = self.plan(half, tokens[at], at, sample=start + CHUNK >= len(positions))
            logits = forward(self.loaded, self.runner.arena, (plan,))
        return torch.log_softmax(logits[0].float(), -1)

    @torch.inference_mode()
    def forced(self, half: int, length: int, tokens: np.ndarray) -> torch.Tensor:
        """Log-probabilities behind each of ``tokens``, which stand behind a prompt of ``length``."""
        plans = tuple(
            self.plan(half, tokens[i : i + 1], np.array([length + i], np.int32), sample=True, key=i)
            for i in range(len(tokens))
        )
        return torch.log_softmax(forward(self.loaded, self.runner.arena, plans).float(), -1)

    def greedy(self, half: int, length: int, first: torch.Tensor, count: int) -> np.ndarray:
        answer = [int(first.argmax())]
        while len(answer) < count:
            at = np.array([length + len(answer) - 1], np.int32)
            plan = self.plan(half, np.array(answer[-1:], np.int32), at, sample=True)
            with torch.inference_mode():
                answer.append(int(forward(self.loaded, self.runner.arena, (plan,))[0].argmax()))
        return np.array(answer, np.int32)

    # ------------------------------------------------------------ ways to compute a prompt

    def full(self, half: int, tokens: np.ndarray) -> torch.Tensor:
        return self.rows(half, tokens, np.arange(len(tokens), dtype=np.int32))

    def runs(self, before: np.ndarray, after: np.ndarray) -> list[tuple[int, int, int]]:
        """``(source, target, length)`` of what is moved."""
        index = RunIndex(1 << 16)
        index.add("", before)
        start = num_common(before, after)
        found = index.find("", after, start=start, end=len(after) - 1, min_tokens=MIN_RUN_TOKENS)
        return [(run.source_start, run.target_start, run.length) for run in found]

    def moved(
        self, before: np.ndarray, after: np.ndarray, method: str
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``after`` with what is moved of ``before``, which lies at half 0; its prefix lies at half 1.

        ``method``: ``naive`` (not turned), or a repair.
        """
        runs, prefix = self.runs(before, after), num_common(before, after)
        started = time.perf_counter()
        arena, half = self.runner.arena, self.half
        for source, target, length in runs:
            if method == "naive":
                arena.copy(SlotCopy(source, half + target, length))
                continue
            at = np.arange(length, dtype=np.int32)
            shifts = shifts_of(source + at, np.int32(half + target) + at, target - source)
            self.runner.execute(Plan((), shifts=shifts))
        repair = parse_repair("none" if method == "naive" else method)
        spans = [(target, target + length) for _, target, length in runs]
        is_moved = np.zeros(len(after) - prefix, np.bool_)
        for first, last in spans:
            is_moved[first - prefix : last - prefix] = True
        deviations = None
        if repair.is_measured and spans:
            positions = np.arange(prefix, spans[-1][1], dtype=np.int32)
            found = self.runner.deviations(
                self.plan(1, after[positions], positions, sample=False), PROBED_LAYER
            )
            deviations = relative_deviations(found.key, found.value, found.key_norm, found.value_norm)
            deviations = deviations[is_moved[: len(positions)]]
        chosen = choose_repairs(spans, deviations, repair)
        is_row = ~is_moved
        is_row[chosen.positions - prefix] = True
        rows = prefix + np.flatnonzero(is_row)
        last = self.rows(1, after, rows)
        return last, {
            "seconds": round(time.perf_counter() - started, 3),
            "moved": int(is_moved.sum()),
            "repaired": len(chosen.positions),
            "rows": len(rows),
            "prefix": prefix,
            "tokens": len(after),
            "deviation": chosen.deviation,
            "probed": None if deviations is None else float(np.sqrt(deviations.mean())),
        }

    def told(
        self, after: np.ndarray, last: torch.Tensor, answer: np.ndarray, follows: np.ndarray | None
    ) -> Told:
        """What the sequence at half 1 says behind its prompt."""
        length = len(after)
        behind = self.forced(1, length, answer[:-1])
        said = torch.cat([last.unsqueeze(0), behind])
        if follows is None:
            return Told(said, None)
        behind = self.forced(1, length, follows[:-1])
        return Told(said, torch.cat([last.unsqueeze(0), behind]))


def numbers_in(text: str) -> set[str]:
    return set(re.findall(r"\d+", text))


def compared(exact: Told, other: Told, answer: np.ndarray, follows: np.ndarray | None) -> dict[str, float]:
    """KL of the first token and on average over the answer, in nats; share of its tokens that are still the
    likeliest; perplexity of what follows, relative."""
    weights = exact.answer.exp()
    kl = (weights * (exact.answer - other.answer)).sum(-1).clamp(min=0)
    same = other.answer.argmax(-1).numpy() == answer
    told = {
        "kl": float(kl[0]),
        "kl_mean": float(kl.mean()),
        "agreement": float(same.mean()),
        "same": int(len(same) if same.all() else same.argmin()),
    }
    if follows is not None and exact.follows is not None and other.follows is not None:
        at = torch.arange(len(follows)), torch.from_numpy(follows.astype(np.int64))
        told["perplexity_ratio"] = float((exact.follows[at].mean() - other.follows[at].mean()).exp())
    return told
