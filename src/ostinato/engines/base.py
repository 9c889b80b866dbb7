"""What every engine is to the rest of the house: something that executes plans.

Nothing here imports tensors: the scheduler above a runner is plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..types import Plan, SamplingParams, TokenArray, TokenLogprob


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen after a sequence's last row. ``error`` is set instead where none could be."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner can do and what its KV is.

    ``reuse`` is false where the model's state cannot be cut at a token; ``reuse_reason`` then says why.
    ``chunked`` is false where a prompt must run in one piece. ``kv_layout``, ``kv_dtype`` and ``rotary``
    go into the namespace: KV is exchangeable only where they are equal.
    """

    max_model_len: int
    vocab_size: int
    kv_bytes_per_token: int
    kv_layout: str
    kv_dtype: str
    rotary: str
    weight_bytes: int = 0
    reuse: bool = True
    reuse_reason: str | None = None
    chunked: bool = True


class ModelRunner(Protocol):
    """Executes plans. Used by one thread."""

    @property
    def info(self) -> RunnerInfo: ...

    def open(self, sequence_id: int, prompt: TokenArray, params: SamplingParams) -> None:
        """Make ready to sample for a sequence; ``prompt`` is what penalties count as prompt."""

    def execute(self, plan: Plan) -> Mapping[int, Sampled]:
        """Do the copies, compute all rows, and sample for the sequences that asked; keyed by id."""

    def release_state(self, sequence_id: int) -> None:
        """Forget what a sequence had computed (preemption); its sampling state stays."""

    def close(self, sequence_id: int) -> None:
        """Forget a sequence altogether. Unknown ids are fine."""
