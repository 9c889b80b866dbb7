"""What every engine is to the rest of the house: something that executes plans.

Nothing here imports tensors: the scheduler above a runner is plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ..types import FloatArray, Plan, SamplingParams, SequencePlan, TokenArray, TokenLogprob

AttentionMass: TypeAlias = tuple[FloatArray, ...]
"""What watched rows give to each place, for each layer ``[kv_heads, places]``: the softmax's weights (after
soft caps, sinks and windows), summed over the rows and over the query heads of a key head."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen after a sequence's last row. ``error`` is set instead where none could be.

    ``distribution``: where asked for, the natural-log probabilities of all tokens as the model has them.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    distribution: FloatArray | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step: tokens of the sequences that asked to sample, mass of those that were watched.

    Both are keyed by sequence id.
    """

    sampled: Mapping[int, Sampled] = field(default_factory=dict)
    mass: Mapping[int, AttentionMass] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deviations:
    """How KV computed anew differs from what lies in its slots, in one layer; each float32 ``[rows]``.

    Sums of squares over heads and dimensions: of the differences, and of the new keys and values themselves
    (to make the differences relative: by the row's own, or by the mean over rows).
    """

    key: FloatArray
    value: FloatArray
    key_norm: FloatArray
    value_norm: FloatArray


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner can do and what its KV is.

    ``reuse`` is false where the model's state cannot be cut at a token; ``reuse_reason`` then says why.
    ``chunked`` is false where a prompt must run in one piece. ``kv_layout``, ``kv_dtype`` and ``rotary``
    go into the namespace: KV is exchangeable only where they are equal. ``compaction_reason`` says why a
    sequence's places must be its positions, where they must. For a row, attending to ``keys_a_row`` keys is
    as much arithmetic as its way through the weights. ``kv_heads``: how many key
    heads each layer has. ``movement_reason`` says why KV cannot be given other positions, where it cannot.
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
    compaction_reason: str | None = None
    keys_a_row: float = math.inf
    kv_heads: tuple[int, ...] = ()
    movement_reason: str | None = None


class ModelRunner(Protocol):
    """Executes plans. Used by one thread."""

    @property
    def info(self) -> RunnerInfo: ...

    def open(self, sequence_id: int, prompt: TokenArray, params: SamplingParams) -> None:
        """Make ready to sample for a sequence; ``prompt`` is what penalties count as prompt."""

    def execute(self, plan: Plan) -> StepResult:
        """Do moves, copies and shifts, compute all rows, and sample for the sequences that asked."""

    def deviations(self, sequence: SequencePlan, layer: int) -> Deviations:
        """Run rows up to ``layer`` only, and compare their KV there with what lies in their slots.

        Layers before it are written as in any step. Only of runners that reuse.
        """

    def expect(self, sequence_id: int, slots: TokenArray, next_position: int) -> AttentionMass:
        """What rows from ``next_position`` on are expected to give to the KV in ``slots``.

        From how the sequence's queries were, as far as plans had them noted. Only of runners without a
        ``movement_reason``.
        """

    def release_state(self, sequence_id: int) -> None:
        """Forget what a sequence had computed (preemption); its sampling state stays."""

    def close(self, sequence_id: int) -> None:
        """Forget a sequence altogether. Unknown ids are fine."""
