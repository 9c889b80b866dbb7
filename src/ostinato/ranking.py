"""The best few of several answers to one request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .types import Chunk


@dataclass(slots=True)
class _Answer:
    chunks: list[Chunk] = field(default_factory=list)
    logprob: float = 0.0
    num_tokens: int = 0

    @property
    def rank(self) -> tuple[bool, float]:
        """Whole answers before failed ones, then by the mean log probability of a token."""
        is_whole = self.chunks[-1].finish_reason not in ("error", "abort")
        return is_whole, self.logprob / self.num_tokens if self.num_tokens else -math.inf


class BestOf:
    """Keeps all answers until the last has ended, then passes on the best of them, best first.

    What ranks them is the mean log probability of their tokens, as at OpenAI; it must be in the chunks
    (``logprobs`` of the sampling parameters).
    """

    def __init__(self, num_choices: int, deliver: Callable[[Chunk], None], *, with_logprobs: bool) -> None:
        """``with_logprobs``: whether they were asked for, or are only here to rank by."""
        self._num_choices = num_choices
        self._deliver = deliver
        self._with_logprobs = with_logprobs
        self._answers: dict[int, _Answer] = {}

    def take(self, chunk: Chunk) -> None:
        answer = self._answers.setdefault(chunk.choice_index, _Answer())
        answer.logprob += sum(entry.logprob for entry in chunk.logprobs)
        answer.num_tokens += len(chunk.logprobs)
        if not self._with_logprobs:
            chunk = replace(chunk, logprobs=())
        answer.chunks.append(replace(chunk, usage=None))
        if chunk.usage is None:
            return
        best = sorted(self._answers.values(), key=lambda answer: answer.rank, reverse=True)
        chosen = [
            replace(piece, choice_index=index)
            for index, answer in enumerate(best[: self._num_choices])
            for piece in answer.chunks
        ]
        for piece in chosen[:-1]:
            self._deliver(piece)
        self._deliver(replace(chosen[-1], usage=chunk.usage))
