"""Having prefixes computed or loaded, gently: piece by piece, in nobody's way, into room that is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .plan import Prefix

Stop = Literal["done", "full", "stopped"]


@dataclass(frozen=True, slots=True)
class Had:
    """What having a prefix took: tokens that were in the arena, came from a tier, and were computed."""

    found_tokens: int
    loaded_tokens: int
    computed_tokens: int


class Target(Protocol):
    """A cache to warm."""

    @property
    def piece_tokens(self) -> int:
        """How much to ask for at once: a request that comes meanwhile waits for no more than that."""

    @property
    def max_tokens(self) -> int:
        """The longest prefix there can be."""

    def wait_for_idle(self) -> bool:
        """Waits until nobody else wants anything; false to end the warming."""

    def num_cached(self, prefix: Prefix) -> int:
        """How much of a prefix is there already, at most all but one token."""

    def room_until(self, start: int) -> int:
        """How far a prefix that is there up to ``start`` may go without anything being given up for it."""

    def have(self, prefix: Prefix, num_tokens: int) -> Had:
        """Brings the first ``num_tokens`` of it there."""


@dataclass(slots=True)
class Warmed:
    """What became of a plan.

    ``tokens`` are the lengths that its prefixes were brought to, in order; ``end`` is why it ended: all
    done, no more room, or told to stop.
    """

    tokens: list[int] = field(default_factory=list)
    found_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    end: Stop = "done"


def warm(
    prefixes: Sequence[Prefix], target: Target, on_progress: Callable[[int], None] = lambda num_tokens: None
) -> Warmed:
    """Brings prefixes to ``target`` in order. ``on_progress`` is told of tokens as they come."""
    warmed = Warmed()
    for prefix in prefixes:
        length = min(len(prefix.tokens), target.max_tokens)
        before = target.num_cached(prefix)
        place = max(before, min(length, target.room_until(before)))
        if place < length:
            warmed.end = "full"
        reached = _bring(prefix, before, place, target, warmed, on_progress)
        warmed.tokens.append(reached)
        if reached < place:
            warmed.end = "stopped"
        if warmed.end != "done":
            break
    return warmed


def _bring(
    prefix: Prefix,
    start: int,
    end: int,
    target: Target,
    warmed: Warmed,
    on_progress: Callable[[int], None],
) -> int:
    """In pieces; returns how far it came."""
    reached = start
    while reached < end:
        if not target.wait_for_idle():
            return reached
        # At its multiples, which are those of blocks: a piece that begins amid one would have it copied.
        piece_end = min(end, (reached // target.piece_tokens + 1) * target.piece_tokens)
        had = target.have(prefix, piece_end)
        warmed.loaded_tokens += had.loaded_tokens
        warmed.computed_tokens += had.computed_tokens
        on_progress(piece_end - reached)
        reached = piece_end
    warmed.found_tokens += start
    return reached
