"""What a log says was found, and why that is less than it could have been."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

import numpy as np
from blake3 import blake3

from ..errors import ParameterError
from ..providers.rules import CacheRules, builtin_table, vendor_of_model
from ..types import num_common
from .diff import Diff
from .material import Asked, marked_messages
from .writing import Written

MIN_SHORT_TOKENS: Final = 64
_SHORT_SHARE: Final = 0.1
_FAN_OUT_S: Final = 5.0
_EVICTED: Final = {"capacity": "capacity", "quota": "quota", "expired": "ttl_gap", "purged": "purged"}


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found of a request's prompt, and newly kept, by whoever answered it. ``why``: our own trace
    says so."""

    prompt_tokens: int
    cached_tokens: int
    why: str = ""
    written_tokens: int = 0


def measured_of(asked: Asked) -> Measured | None:
    """Out of our own trace, or of the usage that a vendor reported; ``None`` where the log has neither."""
    line = asked.line
    if isinstance(line.get("cached_tokens"), int) and isinstance(line.get("input_length"), int):
        stop = line.get("stop")
        why = str(stop.get("why", "")) if isinstance(stop, dict) else ""
        return Measured(line["input_length"], line["cached_tokens"], why)
    for holder in (line, line.get("response"), line.get("answer")):
        usage = holder.get("usage") if isinstance(holder, Mapping) else None
        if isinstance(usage, Mapping) and (found := _of_usage(usage)) is not None:
            return found
    return None


def _of_usage(usage: Mapping[str, Any]) -> Measured | None:
    def count(holder: Any, *names: str) -> int | None:
        for name in names:
            value = holder.get(name) if isinstance(holder, Mapping) else None
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    read = count(usage, "cache_read_input_tokens", "cache_read")
    if read is not None:
        rest = count(usage, "input_tokens") or 0
        written = count(usage, "cache_creation_input_tokens", "cache_write") or 0
        return Measured(rest + read + written, read, written_tokens=written)
    total = count(usage, "prompt_tokens", "input_tokens")
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    cached = count(details, "cached_tokens")
    if cached is None:
        cached = count(usage, "cached_tokens")
    return None if total is None or cached is None else Measured(total, cached)


def measured_losses(
    asked: Sequence[Asked],
    written: Sequence[Written],
    ideal: Sequence[int],
    measured: Sequence[Measured | None],
    on: date,
) -> Iterator[tuple[str, int, int]]:
    """Kind, request and tokens of everything that a cache with room for all finds, and this one did not.

    What lies behind a vendor's last breakpoint cannot be read by anybody: it is lost to that, which shows in
    the requests themselves.
    """
    short: list[tuple[int, int]] = []
    for number, item in enumerate(measured):
        if item is None or item.prompt_tokens == 0:
            continue
        cached = item.cached_tokens / item.prompt_tokens * len(written[number].tokens)
        lost = int(ideal[number] - cached)
        if lost >= MIN_SHORT_TOKENS and lost >= _SHORT_SHARE * len(written[number].tokens):
            short.append((number, lost))
    if not short:
        return
    never = all(item is None or item.cached_tokens == item.written_tokens == 0 for item in measured)
    found = readable(written, ideal, on)
    evictions = _Evictions(asked)
    for number, lost in short:
        item = measured[number]
        assert item is not None, "a shortfall of what was not measured"
        why = _why(number, asked, written, item, ideal[number], evictions, on, never=never)
        if why != "short_prefix":
            share = item.cached_tokens / item.prompt_tokens
            lost = min(lost, int(found[number] - share * len(written[number].tokens)))
        if why != "no_breakpoint" and lost >= MIN_SHORT_TOKENS:
            yield why, number, lost


def lost_to_breakpoints(diff: Diff, on: date) -> int:
    """Of a vendor that reads only up to breakpoints: how much of what two prompts begin with lies behind the
    last one of them. All of it where there are none."""
    rules = rules_of(diff.b.asked, on)
    if rules is None or rules.mechanism != "markers" or diff.num_common < rules.min_tokens:
        return 0
    one, other = diff.a.asked, diff.b.asked
    marks = marked_messages(other)
    same = [x == y for x, y in zip(_beginnings(one), _beginnings(other), strict=False)]
    ends = _message_ends(diff.b)
    read = [
        n
        for n in (*marks, *marked_messages(one))
        if n < len(same) and same[n] and n <= max(marks, default=-1)
    ]
    lost = diff.num_common - max((ends[n] for n in read if n in ends), default=0)
    return lost if lost >= MIN_SHORT_TOKENS else 0


def readable(written: Sequence[Written], hits: Sequence[int], on: date) -> list[int]:
    """Of what each request has in common with earlier ones: what can be read. Of vendors that read up to
    breakpoints that is what ends where an earlier one that begins alike has one, up to this one's last."""
    known: set[bytes] = set()
    found: list[int] = []
    for each, hit in zip(written, hits, strict=True):
        rules = rules_of(each.asked, on)
        if rules is None or rules.mechanism != "markers":
            found.append(hit)
            continue
        beginnings, ends = _beginnings(each.asked, each.asked.model + each.asked.salt), _message_ends(each)
        marks = [n for n in marked_messages(each.asked) if 0 <= n < len(beginnings)]
        readable = [n for n in range(max(marks, default=-1) + 1) if beginnings[n] in known and n in ends]
        end = max((min(ends[n], hit) for n in readable), default=0)
        found.append(end if end >= rules.min_tokens else 0)
        known.update(beginnings[n] for n in marks)
    return found


def _beginnings(asked: Asked, space: str = "") -> list[bytes]:
    """A digest of all up to each message of a conversation: where its tokens end depends on what follows."""
    talk = asked.conversation
    digest = blake3(repr((space, () if talk is None else talk.tools)).encode("utf-8", "surrogatepass"))
    found: list[bytes] = []
    for message in () if talk is None else talk.messages:
        digest.update(repr(message).encode("utf-8", "surrogatepass"))
        found.append(digest.digest())
    return found


def _message_ends(written: Written) -> dict[int, int]:
    """The token behind each message that has any."""
    changes = [*(np.flatnonzero(np.diff(written.owners)) + 1).tolist(), len(written.owners)]
    ends = {written.message_at(end - 1): end for end in changes if end}
    return {number: end for number, end in ends.items() if number is not None}


def _why(
    number: int,
    asked: Sequence[Asked],
    written: Sequence[Written],
    item: Measured,
    ideal: int,
    evictions: _Evictions,
    on: date,
    *,
    never: bool,
) -> str:
    each = asked[number]
    if item.why == "gone":
        return evictions.reason(number)
    if item.why == "pending":
        return "fan_out"
    if item.why in ("unseen", "unknown") and not never and each.line.get("v"):
        return "restart"
    before = _provider(number, written)
    rules = rules_of(each, on)
    if rules is not None:
        if len(written[number].tokens) < rules.min_tokens or ideal < rules.min_tokens:
            return "short_prefix"
        if rules.mechanism == "markers" and "cache_control" not in str(each.body):
            return "no_breakpoint"
    gap_s = None
    if before is not None and each.at_s is not None and asked[before].at_s is not None:
        gap_s = each.at_s - (asked[before].at_s or 0.0)
    if gap_s is not None and gap_s < _taken_s(asked[before or 0]) and not _goes_on(asked[before or 0], each):
        return "fan_out"
    if rules is not None:
        if gap_s is not None and gap_s > _ttl_s(rules, asked[before or 0]):
            return "ttl_gap"
        if rules.look_back and before is not None and _num_new_blocks(asked[before], each) > rules.look_back:
            return "look_back"
    return "cache_off" if never else "unexplained"


def _provider(number: int, written: Sequence[Written]) -> int | None:
    """The latest earlier request that has most of the beginning of this one."""
    best, most = None, 0
    for other in range(number - 1, max(-1, number - 200), -1):
        common = num_common(written[other].tokens, written[number].tokens)
        if common > most:
            best, most = other, common
    return best


def _goes_on(before: Asked, after: Asked) -> bool:
    """Whether a request has the answer to an earlier one in it: they were not under way at once."""
    one, other = before.conversation, after.conversation
    if one is None or other is None or len(other.messages) <= len(one.messages):
        return False
    return other.messages[len(one.messages)].role == "assistant"


def _taken_s(asked: Asked) -> float:
    """How long a request computed its prompt, or was thought to."""
    for name in ("ttft_s", "total_s", "duration_s", "latency_s"):
        value = asked.line.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return _FAN_OUT_S if asked.at_s is not None and asked.line.get("output") is None else 0.0


def has_too_many_breakpoints(asked: Asked, on: date) -> bool:
    """Whether its vendor refuses a request for the number of its breakpoints."""
    rules = rules_of(asked, on)
    if rules is None or rules.mechanism != "markers" or not rules.max_markers:
        return False
    return _num_marks(asked.body) > rules.max_markers


def _ttl_s(rules: CacheRules, asked: Asked) -> float:
    """How long what a request wrote is kept: the longest that one of its breakpoints says."""
    named = [
        name for name in (life.name for life in rules.ttl) if f'"ttl": "{name}"' in json.dumps(asked.body)
    ]
    return float(max(rules.lifetime(name).seconds for name in named or (rules.default_ttl,)))


def _num_marks(value: Any) -> int:
    if isinstance(value, Mapping):
        own = isinstance(value.get("cache_control"), Mapping)
        return own + sum(_num_marks(each) for name, each in value.items() if name != "cache_control")
    return sum(_num_marks(each) for each in value) if isinstance(value, list) else 0


def _num_new_blocks(before: Asked, after: Asked) -> int:
    def count(asked: Asked) -> int:
        total = 0
        for message in asked.body.get("messages") or ():
            content = message.get("content") if isinstance(message, dict) else None
            total += len(content) if isinstance(content, list) else 1
        return total

    return count(after) - count(before)


def rules_of(asked: Asked, on: date) -> CacheRules | None:
    """Of the vendor that a request was sent to; ``None`` for our own traces and for models of nobody's."""
    name = asked.model
    if not name or asked.line.get("v"):
        return None
    vendor = vendor_of_model(name)
    is_named = any(part in name for part in ("claude", "gpt", "gemini", "deepseek", "o3", "o4", "qwen"))
    try:
        return builtin_table().rules(vendor, name, on) if is_named else None
    except ParameterError:
        return None


class _Evictions:
    """Why blocks went, as the lines up to each one say."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._totals: list[dict[str, int]] = []
        total: dict[str, int] = {}
        for each in asked:
            given = each.line.get("evicted")
            for reason, count in given.items() if isinstance(given, dict) else ():
                total[reason] = total.get(reason, 0) + (count if type(count) is int else 0)
            self._totals.append(dict(total))

    def reason(self, number: int) -> str:
        """What most blocks went for, up to that line."""
        total = self._totals[number]
        if not total:
            return "restart"
        return _EVICTED.get(max(total, key=lambda reason: total[reason]), "capacity")
