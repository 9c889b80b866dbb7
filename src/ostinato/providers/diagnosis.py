"""Why a vendor's cache was not read: this prompt beside the one before it, and what the rules say of both.

Vendors that diagnose say which part changed. Here is where in it: which block, which byte, before and
after, or that nothing changed and the entry had expired, was out of sight, or never written. What is shown of
texts is their shape (``x`` for letters, ``0`` for digits) unless texts were asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import orjson

from .planner import History
from .rules import LEVELS, CacheRules, Level
from .shape import Chain, Path, Prompt
from .simulator import Asked, path_text

Reason: TypeAlias = Literal[
    "model_changed", "settings_changed", "tools_changed", "system_changed", "messages_changed",
    "under_minimum", "not_written", "being_written", "expired", "out_of_sight", "evicted",
]  # fmt: skip

SHOWN_CHARS: Final = 40
# Fewer tokens than this part of what went before are no miss: ends of messages move a little.
LEAST_SHARE: Final = 0.1
_SHAPES: Final = ((re.compile(r"\d"), "0"), (re.compile(r"[^\W\d_]"), "x"))


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A request that went before. ``body`` is what was sent, for showing what changed in it."""

    prompt: Prompt
    chain: Chain
    body: bytes
    at_s: float


@dataclass(frozen=True, slots=True)
class Miss:
    """Why less was read than went before.

    Attributes:
        reason: what it comes from; those that end in ``_changed`` are vendors' own words.
        lost_tokens: how many tokens of the earlier prompt were to be read and are not.
        where: the first block, or the setting, that differs; empty where nothing does.
        offset: the byte of the block's text at which it differs.
        before: around that byte, in the earlier prompt; a shape, or text where that was asked for.
        after: the same now.
        idle_s: how long ago the earlier prompt was sent.
    """

    reason: Reason
    lost_tokens: int
    where: str = ""
    offset: int | None = None
    before: str = ""
    after: str = ""
    idle_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"reason": self.reason, "lost_tokens": self.lost_tokens}
        if self.where:
            found |= {"where": self.where}
        if self.offset is not None:
            found |= {"offset": self.offset, "before": self.before, "after": self.after}
        return found | {"idle_s": round(self.idle_s, 1)}


def explain(
    before: SentPrompt,
    body: bytes,
    prompt: Prompt,
    asked: Asked,
    history: History,
    now_s: float,
    *,
    shows_text: bool = False,
) -> Miss | None:
    """Why ``asked`` reads less than was sent before; ``None``: it reads about all of that.

    Call it before ``history`` is told of the request. ``body`` is what ``prompt`` was read from.
    """
    rules = history.rules
    total = before.chain.tokens[-1] if len(before.chain) else 0
    lost = total - asked.use.read
    if lost <= LEAST_SHARE * total:
        return None
    idle_s = max(0.0, now_s - before.at_s)
    changed = _setting(before.prompt, prompt, rules)
    place = _first_difference(before.prompt, prompt)
    level = None if place is None else _level(before.prompt, prompt, place)
    if changed is not None and (level is None or LEVELS.index(changed[1]) <= LEVELS.index(level)):
        name = changed[0]
        return Miss("model_changed" if name == "model" else "settings_changed", lost, name, idle_s=idle_s)
    if place is not None and level is not None:
        reason = _CHANGED[level]
        where = _place_path(prompt, before.prompt, place)
        shown = _difference(before, prompt, body, place, _as_is if shows_text else shape_of)
        return Miss(reason, lost, where, *shown, idle_s=idle_s)
    return Miss(_unchanged(before, asked, history, now_s), lost, idle_s=idle_s)


_CHANGED: Final[Mapping[Level, Reason]] = {
    "tools": "tools_changed",
    "system": "system_changed",
    "messages": "messages_changed",
}


def shape_of(text: str) -> str:
    """What kind of text it is, and not which: ``2026-12-01`` is ``0000-00-00``."""
    for pattern, stands_for in _SHAPES:
        text = pattern.sub(stands_for, text)
    return text


def _as_is(text: str) -> str:
    return text


def common_tokens(before: Prompt, after: Prompt) -> int:
    """Tokens of messages that both have, wherever they stand: whether it is one conversation."""
    known = {block.digest for block in before.blocks if block.level == "messages"}
    return sum(
        block.num_tokens for block in after.blocks if block.level == "messages" and block.digest in known
    )


# ---------------------------------------------------------------- what changed


def _setting(before: Prompt, after: Prompt, rules: CacheRules) -> tuple[str, Level] | None:
    """The setting whose change loses most, and the first level that it loses."""
    old = {"model": before.model, **before.settings}
    new = {"model": after.model, **after.settings}
    changed = [(name, level) for name, level in rules.invalidates.items() if old.get(name) != new.get(name)]
    if before.model != after.model:
        return "model", "tools"
    return min(changed, key=lambda item: LEVELS.index(item[1]), default=None)


def _first_difference(before: Prompt, after: Prompt) -> int | None:
    """The first block of the earlier prompt that does not stand in the same place now; ``None``: all do."""
    for place, block in enumerate(before.blocks):
        if place >= len(after.blocks):
            return place
        now = after.blocks[place]
        if (now.digest, now.role, now.level) != (block.digest, block.role, block.level):
            return place
    return None


def _level(before: Prompt, after: Prompt, place: int) -> Level:
    """A tool in place of the system's text is a change of tools."""
    levels = [prompt.blocks[place].level for prompt in (before, after) if place < len(prompt.blocks)]
    return min(levels, key=LEVELS.index)


def _place_path(after: Prompt, before: Prompt, place: int) -> str:
    blocks = after.blocks if place < len(after.blocks) else before.blocks
    return path_text(blocks[place].path)


def _difference(
    before: SentPrompt, prompt: Prompt, body: bytes, place: int, show: Callable[[str], str]
) -> tuple[int | None, str, str]:
    old = _text_at(before.body, before.prompt.blocks[place].path)
    new = _text_at(body, prompt.blocks[place].path) if place < len(prompt.blocks) else ""
    if old is None or new is None:
        return None, "", ""
    at = _common_length(old, new)
    start = max(0, at - SHOWN_CHARS // 4)
    return (
        len(old[:at].encode("utf-8", "surrogatepass")),
        show(old[start : at + SHOWN_CHARS]),
        show(new[start : at + SHOWN_CHARS]),
    )


def _common_length(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _text_at(body: bytes, path: Path) -> str | None:
    """The text of a block, or its JSON; without a breakpoint, which is no part of it."""
    try:
        value = orjson.loads(body)
        for step in path:
            value = value[step]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return None
    if isinstance(value, dict):
        if isinstance(text := value.get("text"), str):
            return text
        value = {key: item for key, item in value.items() if key not in _MARKERS}
    return value if isinstance(value, str) else orjson.dumps(value).decode()


_MARKERS: Final = frozenset({"cache_control", "prompt_cache_breakpoint"})


# ---------------------------------------------------------------- nothing changed


def _unchanged(before: SentPrompt, asked: Asked, history: History, now_s: float) -> Reason:
    rules, chain = history.rules, before.chain
    if not len(chain) or chain.tokens[-1] < rules.min_tokens:
        return "under_minimum"
    hit_tokens = asked.use.read
    if any(
        digest in history.writing
        for digest, tokens in zip(chain.digests, chain.tokens, strict=True)
        if tokens > hit_tokens
    ):
        return "being_written"
    alive = [
        tokens
        for digest, tokens in zip(chain.digests, chain.tokens, strict=True)
        if history.cache.entry(digest, now_s) is not None
    ]
    if alive and max(alive) > hit_tokens:
        return "out_of_sight"
    if rules.mechanism == "markers" and not before.prompt.markers and before.prompt.automatic is None:
        return "not_written"
    longest_s = max((rules.lifetime(ttl).seconds for ttl in before.prompt.markers.values()), default=None)
    if longest_s is None:
        longest_s = rules.lifetime(before.prompt.automatic or rules.default_ttl).seconds
    return "expired" if now_s - before.at_s >= longest_s else "not_written"
