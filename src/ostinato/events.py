"""What we say out loud. Observers are plain callables; none of them may raise or wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .types import FinishReason, GenerationRequest, TokenArray, Usage


@dataclass(frozen=True, slots=True)
class PrefixLookedUp:
    """A prompt was looked up in the prefix index: ``hit_tokens`` of ``num_tokens`` were there."""

    num_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """``num_tokens`` tokens became findable, for which the index took ``num_blocks`` blocks."""

    num_tokens: int
    num_blocks: int


EvictionReason: TypeAlias = Literal["capacity", "quota", "expired", "purged"]


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """The index gave up ``num_blocks`` blocks (``num_tokens`` tokens).

    To make room (``capacity``), because their tenant may keep no more (``quota``), because their time was up
    (``expired``) or because somebody said so (``purged``).
    """

    num_tokens: int
    num_blocks: int
    reason: EvictionReason = "capacity"


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running sequence gave its blocks back and waits again; ``num_tokens`` of it were computed."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One engine step: rows computed, of which ``decode_rows`` were single-token rows."""

    num_rows: int
    decode_rows: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request ended, in whatever way.

    ``request`` and ``tokens``, those of its prompt, are for observers that write down what was asked;
    ``namespace`` is the digest of the one it was asked in.
    """

    finish_reason: FinishReason
    usage: Usage
    request: GenerationRequest | None = None
    tokens: TokenArray | None = field(default=None, compare=False)
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class TierLoaded:
    """Blocks were read from a lower tier, which made ``num_tokens`` of a prompt findable.

    ``num_failed_blocks`` were there when they were looked up, and then could not be read.
    """

    num_tokens: int
    num_bytes: int
    num_failed_blocks: int
    duration_s: float


AnswerOutcome: TypeAlias = Literal["exact", "joined", "semantic", "miss", "bypass"]


@dataclass(frozen=True, slots=True)
class AnswerLookedUp:
    """A request came by the response caches. ``miss``: it was computed, and could have been kept before;
    ``bypass``: it is none that answers are kept for, or said so itself."""

    outcome: AnswerOutcome
    age_s: float = 0.0
    num_tokens: int = 0


AnswerFate: TypeAlias = Literal["stored", "unfit", "refused", "dropped", "failed"]


@dataclass(frozen=True, slots=True)
class AnswerFiled:
    """What became of an answer that was to be kept. ``unfit``: it is not whole, or not what computing it anew
    would have to give; ``refused``: it is larger than the limits, or was purged meanwhile; ``dropped``: too
    many waited to be written; ``failed``: the store cannot be used."""

    fate: AnswerFate


AnswerMiss: TypeAlias = Literal["absent", "expired", "future", "corrupt", "too_old", "failed"]


@dataclass(frozen=True, slots=True)
class AnswerMissed:
    """Nothing was found in the store, or nothing of use: ``reason`` says why."""

    reason: AnswerMiss


Event: TypeAlias = (
    PrefixLookedUp
    | BlocksStored
    | BlocksEvicted
    | Preempted
    | StepFinished
    | RequestFinished
    | TierLoaded
    | AnswerLookedUp
    | AnswerFiled
    | AnswerMissed
)
Observer: TypeAlias = Callable[[Event], None]
