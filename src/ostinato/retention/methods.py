"""The methods: what makes a token worth keeping. One small class each, over the same evidence.

A method gives every place a score; the lowest go first. ``watches`` says which rows' attention it wants,
and so what it costs: none, the last of a step, a window at the prompt's end (which is computed along with
every chunk of the prompt, so that the choice knows the question before the rest of the text is there), all,
or instead of attention how all rows' queries are distributed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from ..errors import ParameterError
from .choice import highest_of, smooth
from .evidence import Evidence, Mass

Watch = Literal["none", "last", "window", "all", "queries"]


class Method(Protocol):
    """One way to score what is kept."""

    @property
    def name(self) -> str: ...
    @property
    def watches(self) -> Watch: ...
    @property
    def num_sinks(self) -> int:
        """So many first tokens always stay."""

    @property
    def prefers_entities(self) -> bool:
        """Whether entity-like tokens stay before others, where the request does not say."""

    def num_newest(self, budget_tokens: int) -> int:
        """So many of the newest tokens always stay."""

    def scores(self, evidence: Evidence) -> Mass:
        """``[layers, heads, places]``, finite; higher stays."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The newest tokens, nothing else: the control. Without its first tokens a model soon talks nonsense."""

    name: str = "window"
    watches: Watch = "none"
    num_sinks: int = 0
    prefers_entities: bool = False

    def num_newest(self, budget_tokens: int) -> int:
        return 1

    def scores(self, evidence: Evidence) -> Mass:
        return evidence.positions.astype(np.float32)


@dataclass(frozen=True, slots=True)
class SinksWindow:
    """The first few tokens, where attention rests when it wants nothing, and the newest.

    StreamingLLM (Xiao et al., arXiv 2309.17453). Positions stay what they were.
    """

    name: str = "sinks"
    watches: Watch = "none"
    num_sinks: int = 4
    prefers_entities: bool = False

    def num_newest(self, budget_tokens: int) -> int:
        return 1

    def scores(self, evidence: Evidence) -> Mass:
        return evidence.positions.astype(np.float32)


@dataclass(frozen=True, slots=True)
class HeavyHitters:
    """What all rows so far attended to most, head by head, beside the newest half of the budget.

    H2O (Zhang et al., arXiv 2306.14048).
    """

    name: str = "h2o"
    watches: Watch = "all"
    num_sinks: int = 0
    prefers_entities: bool = False

    def num_newest(self, budget_tokens: int) -> int:
        return max(1, budget_tokens // 2)

    def scores(self, evidence: Evidence) -> Mass:
        return evidence.total


@dataclass(frozen=True, slots=True)
class ObservationWindow:
    """What the last rows of the prompt attend to, head by head, clusters kept whole.

    SnapKV (Li et al., arXiv 2404.14469): a window of 32 rows, the highest of 7 neighbours.
    """

    name: str = "snapkv"
    watches: Watch = "window"
    num_sinks: int = 0
    prefers_entities: bool = False
    width: int = 7

    def num_newest(self, budget_tokens: int) -> int:
        return max(1, min(32, budget_tokens // 4))

    def scores(self, evidence: Evidence) -> Mass:
        summaries = evidence.summaries
        if not summaries:
            return evidence.positions.astype(np.float32)
        return highest_of(np.nan_to_num(summaries[-1]), self.width)


@dataclass(frozen=True, slots=True)
class ExpectedAttention:
    """What rows that are still to come will attend to, expected from how all queries were, head by head.

    Devoto, Jeblick and Jégou, arXiv 2510.00636; the runner computes it (:mod:`ostinato.engines.expected`).
    """

    name: str = "expected"
    watches: Watch = "queries"
    num_sinks: int = 4
    prefers_entities: bool = False

    def num_newest(self, budget_tokens: int) -> int:
        return 1

    def scores(self, evidence: Evidence) -> Mass:
        return evidence.latest


@dataclass(frozen=True, slots=True)
class LastRow:
    """What the newest row attends to, layer by layer over all heads; no token is protected.

    TOVA (Oren et al., arXiv 2401.06104).
    """

    name: str = "tova"
    watches: Watch = "last"
    num_sinks: int = 0
    prefers_entities: bool = False

    def num_newest(self, budget_tokens: int) -> int:
        return 1

    def scores(self, evidence: Evidence) -> Mass:
        return _over_heads(evidence.latest)


@dataclass(frozen=True, slots=True)
class Summaries:
    """Ours: neighbourhoods whose attention has faded go first, those that mattered lately are safe.

    The mass of a stretch (a window at the prompt's end; 64 generated tokens) is averaged over ``width``
    neighbours, head by head, and made relative to the head's mean. What is below ``candidate_below`` in the
    newest of the last three summaries is a candidate. Candidates go first, lowest first; what is in the top
    ``safe_share`` of any of the three goes last. How low a neighbourhood of neither kind goes is decided by
    the best of the three, so that what was quiet for one stretch is not lost for it.
    """

    name: str = "summary"
    watches: Watch = "window"
    num_sinks: int = 4
    prefers_entities: bool = True
    width: int = 15
    candidate_below: float = 0.3
    safe_share: float = 0.05

    def num_newest(self, budget_tokens: int) -> int:
        return max(1, min(8, budget_tokens // 8))

    def scores(self, evidence: Evidence) -> Mass:
        relative = [self._relative(summary) for summary in evidence.summaries]
        if not relative:
            return evidence.positions.astype(np.float32)
        best, newest = np.maximum.reduce(relative), relative[-1]
        is_safe = np.logical_or.reduce([self._is_top(one) for one in relative])
        is_candidate = (newest < self.candidate_below) & ~is_safe
        # Three classes, one above the other: no relative mass is as high as the number of places.
        step = np.float32(evidence.size + 1)
        return np.where(is_candidate, newest, step + best) + np.where(is_safe, step, np.float32(0))

    def _relative(self, summary: Mass) -> Mass:
        """How a neighbourhood compares with its head's mean; places newer than the summary are average."""
        mass = smooth(np.nan_to_num(summary), self.width)
        known = ~np.isnan(summary)
        mean = mass.sum(axis=2, keepdims=True, where=known) / np.maximum(known.sum(axis=2, keepdims=True), 1)
        relative: Mass = np.where(known, mass / np.maximum(mean, 1e-30), 1.0).astype(np.float32)
        return relative

    def _is_top(self, relative: Mass) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        return relative >= np.quantile(relative, 1 - self.safe_share, axis=2, keepdims=True)


def _over_heads(mass: Mass) -> Mass:
    mean: Mass = np.broadcast_to(mass.mean(axis=1, keepdims=True), mass.shape)
    return mean


_METHODS: tuple[Method, ...] = (
    SlidingWindow(), SinksWindow(), HeavyHitters(), ObservationWindow(), LastRow(), ExpectedAttention(),
    Summaries(),
)  # fmt: skip
METHOD_NAMES = tuple(method.name for method in _METHODS)
DEFAULT_METHOD = "summary"


def method_by_name(name: str) -> Method:
    """
    Raises:
        ParameterError: there is none of this name.
    """
    for method in _METHODS:
        if method.name == name:
            return method
    raise ParameterError(
        f"there is no retention method {name!r}; there are {', '.join(METHOD_NAMES)}", param="retention"
    )
