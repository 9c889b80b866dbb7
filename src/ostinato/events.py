"""What we say out loud. Observers are plain callables; none of them may raise or wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
class RequestServed:
    """A request ended that a response cache answered, with an answer that was kept or under way for another.

    The engine had nothing to do with it: ``usage.served`` says who answered. All of its prompt counts as
    cached.
    """

    finish_reason: FinishReason
    usage: Usage
    request: GenerationRequest
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


ReuseLayer: TypeAlias = Literal["arena", "shared", "recalled", "non_prefix", "exact", "semantic", "provider"]
"""Where tokens of a prompt came from that were not computed: KV that was in memory, in the shared tier, in
what a budget had dropped, or stood elsewhere; a whole answer that was kept for an equal request (or was under
way for one) or for one that means the same; a vendor's prompt cache."""


# ---------------------------------------------------------------- whole answers


AnswerOutcome: TypeAlias = Literal["exact", "joined", "semantic", "miss", "bypass"]


@dataclass(frozen=True, slots=True)
class AnswerLookedUp:
    """A request came by the response caches. ``miss``: it was computed, and could have been kept before;
    ``bypass``: it is none that answers are kept for, or said so itself.

    ``num_tokens`` are the answer's, where it was kept. ``layers`` were asked for it, for
    ``num_prompt_tokens`` (0: not known yet).
    """

    outcome: AnswerOutcome
    age_s: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    layers: tuple[ReuseLayer, ...] = ()


AnswerFate: TypeAlias = Literal["stored", "unfit", "refused", "dropped", "failed"]


@dataclass(frozen=True, slots=True)
class AnswerFiled:
    """What became of an answer that was to be kept. ``unfit``: it is not whole, or not what computing it anew
    would have to give; ``refused``: it is larger than the limits, or was purged meanwhile; ``dropped``: too
    many waited to be written; ``failed``: the store cannot be used."""

    fate: AnswerFate


@dataclass(frozen=True, slots=True)
class MoveVerified:
    """The beginning of an answer with moved KV was compared with the exact one.

    ``kl``: divergence of the first token's distribution, nats. ``is_off``: moved KV is not used any more.
    """

    kl: float
    is_same_token: bool
    is_off: bool


AnswerMiss: TypeAlias = Literal["absent", "expired", "future", "corrupt", "too_old", "failed"]


@dataclass(frozen=True, slots=True)
class AnswerMissed:
    """Nothing was found in the store, or nothing of use: ``reason`` says why."""

    reason: AnswerMiss


@dataclass(frozen=True, slots=True)
class SemanticLookedUp:
    """A question came by the semantic cache. ``outcome``: ``served``, or in a word or two why not: the guard
    that refused, ``score``, ``nothing near``, ``high risk``, ``to be checked``, ``switched off`` …
    """

    outcome: str
    duration_s: float
    similarity: float = 0.0


@dataclass(frozen=True, slots=True)
class SemanticChecked:
    """What a semantic answer was worth, by a check (the model was asked as well) or by feedback."""

    source: Literal["check", "feedback"]
    is_right: bool


# ---------------------------------------------------------------- what is told of a request


StopReason: TypeAlias = Literal["whole", "end", "parts", "unseen", "gone", "pending", "unknown"]
"""Why a look-up went no further. ``whole``: there was no more to find. ``end``: nobody had asked for more,
the prompt goes on where another ended. ``parts``: others had this beginning and went on otherwise.
``unseen``: no prompt began like this. ``gone``: more had been computed and was given up since. ``pending``:
more was being computed for another request that had not ended. ``unknown``: it is not known what had been
asked before."""

RequestPattern: TypeAlias = Literal["one_shot", "chat", "agent", "rag", "completion"]


@dataclass(frozen=True, slots=True)
class MatchStop:
    """Where the look-up of a prompt stopped, and why.

    The first ``num_tokens`` were found; ``num_known_tokens`` (whole blocks) had been computed at some time.
    For ``gone`` and ``pending``: the longest of these prompts ended ``age_s`` before this one arrived (less
    than nothing: after).
    """

    num_tokens: int
    reason: StopReason
    num_known_tokens: int = 0
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """A part of a prompt from one marker of the template to the next. ``digest`` is of its own tokens alone,
    under the trace's key and the request's namespace: equal digests are equal parts, wherever they stand."""

    num_tokens: int
    digest: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as it is told to people: a line of the trace, a row of the dashboard.

    :class:`~ostinato.records.RecordMaker` makes it of a :class:`RequestFinished` or :class:`RequestServed`.

    Attributes:
        id: the id of the answer.
        arrived_s: since the Unix epoch.
        usage: tokens and seconds; :func:`reuse_of` says which layer saved what.
        namespace: digest of the one it was asked in.
        block_tokens: tokens of a block.
        block_ids: an id for the end of each block of the prompt, of the last one also where it is not full;
            equal ids are equal beginnings. Empty where an answer was kept: its prompt was not looked up.
        segments: the prompt's parts, in order; empty likewise.
        stop: where the look-up in the KV cache stopped.
        pattern: what kind of request it is.
        session: digest of its session's id, if it has one.
        evicted: tokens that the prefix cache gave up since the record before this one, by reason.
        num_unrecorded: requests before this one of which there is no record.
        request: what was asked, text included: for whoever is allowed to see it.
        tokens: of the prompt; likewise.
    """

    id: str
    arrived_s: float
    finish_reason: FinishReason
    usage: Usage
    namespace: str
    block_tokens: int
    block_ids: tuple[int, ...]
    segments: tuple[PromptSegment, ...]
    stop: MatchStop
    pattern: RequestPattern
    session: int | None = None
    evicted: Mapping[EvictionReason, int] = field(default_factory=dict)
    num_unrecorded: int = 0
    request: GenerationRequest | None = field(default=None, compare=False)
    tokens: TokenArray | None = field(default=None, compare=False)


def reuse_of(usage: Usage) -> dict[ReuseLayer, int]:
    """Prompt tokens that were not computed, by the layer they came from; layers that gave none are left
    out."""
    served = usage.served
    if served is not None:
        layer: ReuseLayer = "semantic" if served.layer == "semantic" else "exact"
        return {layer: usage.prompt_tokens} if usage.prompt_tokens else {}
    found: dict[ReuseLayer, int] = {
        "arena": usage.cached_tokens - usage.loaded_tokens,
        "shared": usage.loaded_tokens,
        "recalled": usage.recalled_tokens,
        "non_prefix": 0 if usage.reuse is None else usage.reuse.reused_tokens,
    }
    return {name: count for name, count in found.items() if count}


Event: TypeAlias = (
    PrefixLookedUp
    | BlocksStored
    | BlocksEvicted
    | Preempted
    | StepFinished
    | RequestFinished
    | RequestServed
    | TierLoaded
    | AnswerLookedUp
    | AnswerFiled
    | AnswerMissed
    | MoveVerified
    | SemanticLookedUp
    | SemanticChecked
)
Observer: TypeAlias = Callable[[Event], None]
