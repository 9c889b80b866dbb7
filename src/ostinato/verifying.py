"""Moved KV put to the test: the same request both ways, and a switch that ends it where it is not good
enough.

``verify``: the request is computed with moved KV by a sequence that nobody hears, then exactly; the exact one
answers. Of requests that are answered with moved KV a sample is computed exactly afterwards, as far as the
first token's distribution. Everything here happens in the engine's thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .engines.sequence import Sequence, SequenceStats
from .errors import ParameterError, QueueFullError, ShuttingDownError
from .reuse.blend import Repair, parse_repair
from .types import REUSE_MODES, FinishReason, FloatArray, Reuse, Reused, TokenLogprob, Verified, num_common

if TYPE_CHECKING:
    from .engines.base import RunnerInfo
    from .prompt.detokenize import Detokenizer

_log = logging.getLogger(__name__)

Start: TypeAlias = Callable[[list[Sequence]], None]

_NUM_REMEMBERED = 20
_LEAST_VERIFIED = 5


def check_reuse(reuse: Reuse, info: RunnerInfo, model_name: str) -> Repair | None:
    """What is repaired of a request; ``None``: it is to be exact.

    Raises:
        ParameterError: a field that is out of its range or of the wrong type, or a model that has no KV to
        move.
    """
    if reuse.mode not in REUSE_MODES:
        raise ParameterError(f"reuse is one of {', '.join(REUSE_MODES)}", param="reuse")
    if not isinstance(reuse.repair, str):
        raise ParameterError("repair must be text", param="reuse.repair", code="invalid_type")
    bound: Any = reuse.max_deviation
    if bound is not None and (
        isinstance(bound, bool) or not isinstance(bound, int | float) or not bound >= 0
    ):
        raise ParameterError("max_deviation must be a number, 0 or more", param="reuse.max_deviation")
    repair = parse_repair(reuse.repair, bound)
    if reuse.mode == "exact":
        return None
    if not info.reuse:
        raise ParameterError(
            f"{model_name} has no KV that could be moved: {info.reuse_reason}",
            param="reuse",
            code="unsupported",
        )
    return repair


class Unheard:
    """A sink of a sequence that answers nobody. ``on_end`` is called once, when it has ended."""

    def __init__(self, detokenizer: Detokenizer, on_end: Callable[[FinishReason], None]) -> None:
        """``detokenizer``: sees stop strings, so that it ends where an answer would."""
        self._detokenizer = detokenizer
        self._on_end = on_end

    def on_token(self, token_id: int, logprob: TokenLogprob | None) -> bool:
        self._detokenizer.push(token_id)
        return self._detokenizer.stopped is not None

    def on_finish(
        self, reason: FinishReason, stop_token: int | None, stats: SequenceStats, error: Exception | None
    ) -> FinishReason:
        self._on_end(reason)
        return reason


def followed_by(sequences: list[Sequence], submit: Start) -> Callable[[FinishReason], None]:
    """What to do when the one before them has ended: start ``sequences``, or end them if that fails."""

    def start(reason: FinishReason) -> None:
        try:
            submit(sequences)
        except (QueueFullError, ShuttingDownError) as error:
            for sequence in sequences:
                is_over = isinstance(error, ShuttingDownError)
                stats = sequence.stats(sequence.arrived_s)
                sequence.sink.on_finish(
                    "abort" if is_over else "error", None, stats, None if is_over else error
                )

    return start


def divergence(exact: FloatArray, other: FloatArray) -> float:
    """Kullback-Leibler divergence of ``other`` from ``exact``, both natural-log probabilities; in nats."""
    weights = np.exp(exact.astype(np.float64))
    return max(float((weights * (exact.astype(np.float64) - other)).sum()), 0.0)


def compare(exact: Sequence, other: Sequence) -> Verified | None:
    """How the answer of ``other`` differs; ``None``: one of them had none."""
    if exact.distribution is None or other.distribution is None:
        return None
    ours, theirs = (sequence.tokens[sequence.num_prompt :] for sequence in (exact, other))
    common = num_common(ours, theirs)
    num_compared = min(len(ours), len(theirs))
    kl = divergence(exact.distribution, other.distribution)
    return Verified(kl, common if common < num_compared else None, num_compared)


def reused_of(stats: SequenceStats, mode: str, verified: Verified | None = None) -> Reused:
    """What usage says of a sequence that might be answered with moved KV."""
    computed = stats.prompt_tokens - stats.cached_tokens - stats.moved_tokens
    return Reused(
        mode="verify" if mode == "verify" else "moved",
        moved_tokens=stats.moved_tokens,
        repaired_tokens=stats.repaired_tokens,
        computed_tokens=computed,
        deviation=stats.deviation,
        is_refused=stats.is_move_refused,
        verified=verified,
    )


@dataclass(frozen=True, slots=True)
class WatchReport:
    """``num_verified`` answers were compared, of which ``num_same_token`` began with the same token;
    ``mean_kl`` of the latest."""

    num_verified: int
    num_same_token: int
    mean_kl: float
    is_off: bool


class Watch:
    """Verifies a sample of what is answered with moved KV, and switches that off when it is not good enough.

    Every ``1 / share``-th such request is verified. It is off once the latest few differ by more than
    ``max_kl`` nats on average, until ``reset``. Any thread may call anything.
    """

    def __init__(self, share: float = 0.0, max_kl: float = 0.05) -> None:
        self._share, self._max_kl = share, max_kl
        self._latest: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._lock = Lock()
        self._due = 0.0
        self._num_verified = self._num_same = 0
        self.is_off = False

    @property
    def is_on(self) -> bool:
        """Whether any is verified."""
        return self._share > 0

    def wants(self) -> bool:
        """Whether this one is of the sample."""
        with self._lock:
            self._due += self._share
            if self._due < 1:
                return False
            self._due -= 1
            return True

    def note(self, verified: Verified) -> None:
        """One was compared."""
        with self._lock:
            self._latest.append(verified.kl)
            self._num_verified += 1
            self._num_same += verified.first_difference != 0
            mean = sum(self._latest) / len(self._latest)
            if self.is_off or len(self._latest) < _LEAST_VERIFIED or mean <= self._max_kl:
                return
            self.is_off = True
        _log.error(
            "answers with moved KV differ by %.3g nats on average, more than %.3g: "
            "all requests are computed exactly from now on",
            mean,
            self._max_kl,
        )

    def reset(self) -> None:
        """Moved KV may be used again."""
        with self._lock:
            self._latest.clear()
            self.is_off = False

    def report(self) -> WatchReport:
        with self._lock:
            mean = sum(self._latest) / len(self._latest) if self._latest else 0.0
            return WatchReport(self._num_verified, self._num_same, mean, self.is_off)
