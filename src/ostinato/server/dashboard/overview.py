"""The first page: what the cache brings, live."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import orjson

from ...events import ReuseLayer
from ...observe import Load
from .history import History, Kind
from .tally import Tally

WINDOWS: Final[dict[str, tuple[str, int | None]]] = {
    "300": ("5 minutes", 300),
    "900": ("15 minutes", 900),
    "3600": ("hour", 3600),
    "all": ("since the start", None),
}
DEFAULT_WINDOW: Final = "900"
_CHARTS: Final = {300: 5, 900: 10, 3600: 60}

PATTERN_NAMES: Final = {
    "chat": "Chat",
    "one_shot": "One-shot",
    "agent": "Agent",
    "rag": "RAG",
    "completion": "Completion",
}
PATTERN_HINTS: Final = {
    "chat": "several turns of a conversation",
    "one_shot": "one question, nothing before it",
    "agent": "tools are offered, called or answered",
    "rag": "documents stand in what is asked",
    "completion": "a raw prompt",
}


@dataclass(frozen=True, slots=True)
class Saved:
    """What was not done twice. ``time_s`` is what computing the reused tokens would have taken at the pace at
    which others were computed here; ``money`` what the machine costs in that time, where that is known."""

    tokens: int
    time_s: float | None
    money: Decimal | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A row of a table: requests of one pattern, or with one named prompt."""

    name: str
    hint: str
    key: str
    tally: Tally


def saved_by(tally: Tally, s_per_token: float | None, dollars_per_hour: float | None = None) -> Saved:
    time_s = None if s_per_token is None else tally.reused_tokens * s_per_token
    is_priced = time_s is not None and dollars_per_hour is not None
    return Saved(
        tally.reused_tokens,
        time_s,
        Decimal((time_s or 0.0) / 3600 * (dollars_per_hour or 0.0)) if is_priced else None,
    )


def window_of(given: str | None) -> tuple[str, str, int | None]:
    """The key, name and seconds of a window; of one that is not known, the default's."""
    key = given if given in WINDOWS else DEFAULT_WINDOW
    return (key, *WINDOWS[key])


def figures(
    history: History, load: Load, given_window: str | None, dollars_per_hour: float | None = None
) -> dict[str, Any]:
    """All numbers of the live part."""
    key, name, last_s = window_of(given_window)
    tally, ever = history.total(last_s), history.total()
    # A pace needs cold requests: where this window has none, those of before tell.
    pace = tally.s_per_token or ever.s_per_token
    cold, warm = tally.cold.quantile(0.5), tally.warm.quantile(0.5)
    return {
        "window": key,
        "window_name": name,
        "windows": WINDOWS,
        "tally": tally,
        "saved": saved_by(tally, pace, dollars_per_hour),
        "pace": pace,
        "cold": cold,
        "warm": warm,
        "cold_p95": tally.cold.quantile(0.95),
        "warm_p95": tally.warm.quantile(0.95),
        "sooner": cold / warm if cold and warm else None,
        "patterns": groups(history, "pattern", last_s),
        "prompts": groups(history, "prompt", last_s),
        "load": load,
    }


def groups(history: History, kind: Kind, last_s: int | None) -> list[Group]:
    found = history.groups(kind, last_s)
    if kind == "pattern":
        return [Group(PATTERN_NAMES[name], PATTERN_HINTS[name], name, tally) for name, tally in found.items()]
    return [Group(name, "", name, tally) for name, tally in found.items()]


_LAYERS: Final[tuple[ReuseLayer, ...]] = ("arena", "shared", "recalled", "non_prefix", "exact", "semantic")


def series(history: History, given_window: str | None) -> bytes:
    """JSON for the charts: seconds since the epoch, shares by layer, medians of times to a first token.

    Steps without requests have ``null``; a layer that never gave anything is left out.
    """
    _, _, last_s = window_of(given_window)
    span_s = 3600 if last_s is None else last_s
    pieces = history.pieces(span_s, _CHARTS[span_s])
    tallies = [piece.tally for piece in pieces]
    layers = [layer for layer in _LAYERS if any(tally.reuse[layer] for tally in tallies)]
    picture = {
        "t": [piece.start_s for piece in pieces],
        "step_s": _CHARTS[span_s],
        "layers": {
            layer: [
                round(tally.reuse[layer] / tally.prompt_tokens, 4) if tally.prompt_tokens else None
                for tally in tallies
            ]
            for layer in layers or ["arena"]
        },
        "cold": [tally.cold.quantile(0.5) for tally in tallies],
        "warm": [tally.warm.quantile(0.5) for tally in tallies],
        "requests": [tally.num_requests for tally in tallies],
    }
    return orjson.dumps(picture)
