"""Whether to read a prefix of a vendor's cache once more before it expires, so that it lives on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .habits import GIVEN_UP_S, Gaps
from .planner import PRIOR_LATER, History
from .shape import Chain

# Who came back late before may do so less often than it seems: to be read again has to pay by so much.
KEEP_ALIVE_MARGIN: Final = 1.5


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """``at_s`` is the latest moment; ``pays``: that read costs less than it can be expected to save."""

    at_s: float
    pays: bool
    chance: float


def keep_alive(
    history: History, chain: Chain, place: int, now_s: float, *, ahead_s: float = 10.0
) -> KeepAlive | None:
    """For the entry at a place of the prompt that would read it. ``None``: there is none, or no help.

    What stands behind the place would be paid in full; what an entry before it will hold anyway is not saved.
    """
    digest = chain.digests[place]
    entry = history.cache.entry(digest, now_s)
    rules = history.rules
    if entry is None or not rules.refresh_on_read or rules.mechanism != "markers":
        return None
    lifetime = rules.lifetime(entry.ttl)
    ending, prefix = history.habits.ending(digest), history.habits.prefix(digest)
    idle_s = entry.expires_at_s - lifetime.seconds
    waited_s = max(0.0, entry.expires_at_s - (prefix.last_s if prefix else idle_s))
    horizon_s = waited_s + lifetime.seconds
    if ending is not None and horizon_s > GIVEN_UP_S:
        # Who is silent for so long: only what all of the kind do says anything, and the same at both times.
        def within(time_s: float) -> float:
            return history.habits.chance_to_go_on(ending.kind, Gaps(), time_s, PRIOR_LATER)
    elif ending is not None:

        def within(time_s: float) -> float:
            return history.habits.chance_to_go_on(ending.kind, ending.own, time_s, PRIOR_LATER)
    else:
        gaps = prefix.gaps if prefix is not None else Gaps()

        def within(time_s: float) -> float:
            return gaps.share(time_s, PRIOR_LATER, 1.0)

    missed = max(1e-9, 1 - within(waited_s))
    chance = max(0.0, within(horizon_s) - within(waited_s)) / missed
    read, write = float(rules.read), float(lifetime.write)
    cost = read * entry.num_tokens + chain.tokens[-1] - chain.tokens[place]
    saved = (write - read) * (
        entry.num_tokens - _kept_anyway(history, chain, place, entry.expires_at_s, now_s)
    )
    return KeepAlive(entry.expires_at_s - ahead_s, chance * saved > KEEP_ALIVE_MARGIN * cost, chance)


def _kept_anyway(history: History, chain: Chain, place: int, expires_at_s: float, now_s: float) -> int:
    """Tokens before the place that another entry will hold: one that lives longer, or others keep alive."""
    shortest_s = history.rules.ttl[0].seconds
    for before in reversed(range(place)):
        entry = history.cache.entry(chain.digests[before], now_s)
        prefix = history.habits.prefix(chain.digests[before])
        is_busy = prefix is not None and prefix.num_sent > 1 and prefix.gaps.share(shortest_s, 0.0, 1.0) > 0.8
        own_last_s = expires_at_s - shortest_s
        is_others = is_busy and prefix is not None and prefix.last_s > own_last_s
        if entry is not None and (entry.expires_at_s > expires_at_s + 1.0 or is_others):
            return chain.tokens[before]
    return 0
