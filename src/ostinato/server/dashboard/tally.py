"""Sums over requests, that can be added up: what a stretch of time, a prompt or a pattern brought."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import log2
from typing import Final

from ...events import RequestRecord, ReuseLayer, reuse_of

_SHORTEST_S: Final = 0.0005
_PER_DOUBLING: Final = 6
_NUM_BINS: Final = 130  # up to half an hour
_MIN_PREFILL_TOKENS: Final = 16  # fewer say nothing of how long a token takes

WARM_SHARE: Final = 0.5
"""A request is warm where at least this part of its prompt was not computed, else cold."""


@dataclass(slots=True)
class Durations:
    """How long things took, in bins that each are an eighth longer than the one before."""

    bins: Counter[int] = field(default_factory=Counter)

    def add(self, duration_s: float) -> None:
        place = 0 if duration_s <= _SHORTEST_S else int(_PER_DOUBLING * log2(duration_s / _SHORTEST_S))
        self.bins[min(place, _NUM_BINS - 1)] += 1

    @property
    def count(self) -> int:
        return self.bins.total()

    def quantile(self, share: float) -> float | None:
        """Seconds that ``share`` of them did not exceed, within a sixteenth; ``None`` of none."""
        wanted, seen = share * self.count, 0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= wanted:
                return _SHORTEST_S * float(2.0 ** ((place + 0.5) / _PER_DOUBLING))
        return None


@dataclass(slots=True)
class Tally:
    """Requests that ended, and the tokens of their prompts by where those came from.

    ``reuse`` has tokens that were not computed, by layer; the rest of ``prompt_tokens`` was. ``prefill_s`` is
    what the ``prefilled_tokens`` of requests took from their start to their first token. ``num_served``
    requests got an answer that was kept; ``cold`` and ``warm`` are times to a first token.
    """

    num_requests: int = 0
    num_failed: int = 0
    num_served: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    prefill_s: float = 0.0
    reuse: Counter[ReuseLayer] = field(default_factory=Counter)
    cold: Durations = field(default_factory=Durations)
    warm: Durations = field(default_factory=Durations)

    def add(self, record: RequestRecord) -> None:
        """One more request."""
        usage = record.usage
        reused = reuse_of(usage)
        num_reused = sum(reused.values())
        self.num_requests += 1
        self.num_failed += record.finish_reason == "error"
        self.num_served += usage.served is not None
        self.prompt_tokens += usage.prompt_tokens
        self.generated_tokens += usage.completion_tokens
        self.reuse.update(reused)
        if not usage.completion_tokens or not usage.prompt_tokens:
            return  # it had no first token
        is_warm = num_reused >= WARM_SHARE * usage.prompt_tokens
        (self.warm if is_warm else self.cold).add(usage.ttft_s)
        computed = usage.prompt_tokens - num_reused
        if computed >= _MIN_PREFILL_TOKENS:
            self.prefilled_tokens += computed
            self.prefill_s += max(0.0, usage.ttft_s - usage.queue_s - usage.load_s)

    def merge(self, other: Tally) -> None:
        """Add another one to this."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reuse.update(other.reuse)
        self.cold.bins.update(other.cold.bins)
        self.warm.bins.update(other.warm.bins)

    @property
    def reused_tokens(self) -> int:
        return self.reuse.total()

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens

    @property
    def hit_rate(self) -> float | None:
        """Reused tokens by prompt tokens; ``None`` before the first."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def s_per_token(self) -> float | None:
        """Seconds that a prompt's token took to compute here, queues aside; ``None``: not known yet."""
        return self.prefill_s / self.prefilled_tokens if self.prefilled_tokens else None


_SUMS: Final = (
    *("num_requests", "num_failed", "num_served", "prompt_tokens", "generated_tokens"),
    *("prefilled_tokens", "prefill_s"),
)
