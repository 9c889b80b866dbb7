"""What breaks reuse in a log: every request beside the one it shares most with, then the times and the
counters.

Requests are replayed through a prefix cache that has room for all. What it does not find although an earlier
request has it too is lost to what changed in the prompts; each loss is put down to the first difference
before it. What the cache would find and the log says was not found is lost to how the cache is run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import Final

from ..errors import ParameterError
from ..providers.rules import builtin_table, vendor_of_model
from ..types import Conversation
from .causes import Cause
from .diff import Diff, compare
from .digests import segment_losses
from .findings import NOTES, Finding, Group, Report
from .kin import Kin, alike, are_strangers, space_of
from .material import Asked
from .measured import (
    Measured,
    has_too_many_breakpoints,
    lost_to_breakpoints,
    measured_losses,
    measured_of,
    readable,
)
from .repair import MENDED, repaired
from .replaying import hits_of
from .writing import Writer, Written

MIN_LOST_TOKENS: Final = 32
"""A difference with less behind it that stays the same is not worth a word."""
_MIN_NEWEST_TOKENS: Final = 64
_MIN_SHARE: Final = 0.01
_SMALL_LOG: Final = 10
_VARIANTS: Final = frozenset({"system_text", "user_data", "content", "tools_changed"})
_MAX_REPLAY_TOKENS: Final = 1_500_000
_MAX_TRIED: Final = 8
_NO_GAIN: Final = frozenset({"key_without_identity", "too_many_breakpoints"})
_NOTHING_RATE: Final = 0.05


@dataclass(slots=True)
class _Loss:
    """What one kind of fault costs in one place."""

    lost_tokens: int = 0
    requests: dict[str, None] = field(default_factory=dict)
    examples: dict[str, None] = field(default_factory=dict)
    dollars: float = 0.0

    def add(self, asked: Asked, num_tokens: int, example: str = "") -> None:
        self.lost_tokens += num_tokens
        self.requests[asked.where] = None
        if example and len(self.examples) < 3:
            self.examples[example] = None


Losses = dict[tuple[str, str], _Loss]


def examine(
    requests: Sequence[Asked],
    writer: Writer | None,
    *,
    on: date,
    price: float | None = None,
    try_fixes: bool = True,
) -> Report:
    """Looks into a log, in the order in which its requests came.

    ``writer``: may be ``None`` where there are digests alone. ``on``: the day whose vendors' rules and prices
    hold. ``price``: dollars for a million prompt tokens, where the model's own is not known. ``try_fixes``:
    replay the repaired log.
    """
    assert requests, "a log without requests"
    if not any(asked.has_content for asked in requests):
        return _of_digests(requests, price)
    assert writer is not None, "texts and nothing to write them with"
    asked = [each for each in requests if each.has_content]
    written = [writer.write(each) for each in asked]
    spaces = [space_of(each) for each in asked]
    ideal = hits_of([each.tokens for each in written], spaces)
    losses: Losses = defaultdict(_Loss)
    groups = _look(written, ideal, losses, on)
    _look_at_salts(written, ideal, losses)
    _look_at_keys(written, losses)
    measured = [measured_of(each) for each in asked]
    for kind, number, num_tokens in measured_losses(asked, written, ideal, measured, on):
        losses[kind, ""].add(asked[number], num_tokens)
    prompt_tokens = sum(len(each.tokens) for each in written)
    is_measured = sum(item is not None for item in measured) * 2 > len(measured)
    found = readable(written, ideal, on)
    hits = _measured_hits(measured, written, found) if is_measured else sum(found)
    findings = _findings(losses, len(asked), prompt_tokens, _dollars_of(asked, on, price))
    possible = sum(found)
    if try_fixes and findings:
        findings, possible = _tried(findings, asked, writer, (sum(found), hits, sum(ideal)), on)
    return Report(
        len(asked),
        prompt_tokens,
        hits,
        max(possible, hits),
        is_measured,
        tuple(findings),
        _groups(groups, written, ideal),
        tuple(_notes(written, ideal, findings)),
        {"num_without_content": len(requests) - len(asked)} if len(asked) < len(requests) else {},
    )


# ---------------------------------------------------------------- what changed in the prompts


def _look(written: Sequence[Written], ideal: Sequence[int], losses: Losses, on: date) -> list[int]:
    """Puts down what is lost to differences; returns each request's group, that of the one it is like."""
    kin = Kin(written)
    groups: list[int] = []
    for number, each in enumerate(written):
        best: Diff | None = None
        relative = -1
        for candidate in kin.of(number):
            other = written[candidate]
            if are_strangers(other.asked, each.asked):
                continue
            diff = compare(other, each)
            if best is None or alike(diff) > alike(best):
                best, relative = diff, candidate
            if best.num_common == len(best.a.tokens):
                break
        kin.add(number)
        is_kin = best is not None and alike(best) * 4 >= min(len(each.tokens), len(best.a.tokens))
        groups.append(groups[relative] if is_kin else number)
        if best is None or not is_kin:
            continue
        if written[relative].asked.model != each.asked.model:
            losses["model", ""].add(each.asked, best.num_common)
        elif kind := _changed_parameter(written[relative].asked, each.asked):
            losses["parameter", kind].add(each.asked, best.num_common)
        if has_too_many_breakpoints(each.asked, on):
            losses["too_many_breakpoints", ""].add(each.asked, best.num_common)
        if lost := lost_to_breakpoints(best, on):
            kind, where = (
                ("no_breakpoint", "") if best.cause.is_harmless else (best.cause.kind, best.cause.where)
            )
            losses[kind, _place(where)].add(each.asked, lost)
        _put_down(best, ideal[number], losses, partial(kin.recurs, number))
    return groups


_TELLING: Final = ("tool_choice", "thinking", "reasoning_effort", "response_format", "chat_template_kwargs",
                   "output_config", "speed")  # fmt: skip


def _changed_parameter(one: Asked, other: Asked) -> str:
    """A parameter that vendors and templates write into prompts and that is not the same; else ``""``."""
    for name in _TELLING:
        if one.parameters.get(name) != other.parameters.get(name):
            return name
    return ""


def _put_down(diff: Diff, num_found: int, losses: Losses, recurs: Callable[[int], bool]) -> None:
    """The tokens behind every difference that was not found anyway, to its causes.

    Other content that more than one request begins with is meant, and paid for once: ``recurs`` tells.
    """
    before: list[Cause] = []
    for item in diff.differences:
        if item.is_harmless and item.num_same_after < _MIN_NEWEST_TOKENS:
            before.clear()
            continue
        causes = [cause for cause in item.causes if not cause.is_harmless] or [
            Cause("content", item.causes[0].where, item.causes[0].was, item.causes[0].now)
        ]
        lost = min(item.num_same_after, max(0, item.gap.b_end + item.num_same_after - num_found))
        if lost < MIN_LOST_TOKENS:
            before += causes if item.num_same_after < MIN_LOST_TOKENS else []
            continue
        # Each of those between two long runs breaks what follows, also without the others.
        named = {(cause.kind, _place(cause.where)): cause for cause in (*causes, *before)}
        before.clear()
        if all(kind in _VARIANTS for kind, _ in named) and recurs(item.gap.b_end):
            continue
        for (kind, place), cause in named.items():
            example = f"{cause.was.strip()[:60]!r} → {cause.now.strip()[:60]!r}"
            losses[kind, place].add(diff.b.asked, lost // len(named), example)


def _place(where: str) -> str:
    """The part without its number: faults in many turns are one fault."""
    return where.partition("(")[2].rstrip(")") or where if where.startswith("messages[") else where


def _look_at_salts(written: Sequence[Written], ideal: Sequence[int], losses: Losses) -> None:
    """Whether requests are kept apart one by one by their salts, instead of user by user."""
    salts = Counter(each.asked.salt for each in written)
    if len(salts) < 3 or len(salts) * 2 < len(written):
        return
    free = hits_of([each.tokens for each in written], [each.asked.model for each in written])
    for each, now, then in zip(written, ideal, free, strict=True):
        if then - now >= MIN_LOST_TOKENS:
            losses["salt", ""].add(each.asked, then - now, f"{each.asked.salt[:20]!r}")


def _look_at_keys(written: Sequence[Written], losses: Losses) -> None:
    """Whether a response cache gave answers to requests that nobody had asked, but for something that can
    change an answer: the model, a parameter, the tenant."""
    asked_by: dict[bytes, list[Asked]] = defaultdict(list)
    for each in written:
        asked = each.asked
        before = asked_by[each.tokens.tobytes()]
        is_served = asked.line.get("served") in ("exact", "joined")
        if is_served and before and not any(_identity(other) == _identity(asked) for other in before):
            pairs = zip(_IDENTITY, _identity(before[-1]), _identity(asked), strict=True)
            differs = ", ".join(name for name, one, other in pairs if one != other)
            losses["key_without_identity", ""].add(asked, len(each.tokens), differs)
        before.append(asked)


_IDENTITY: Final = ("model", "salt", "parameters", "sampling")


def _identity(asked: Asked) -> tuple[object, ...]:
    return asked.model, asked.salt, dict(asked.parameters), dict(asked.sampling)


# ---------------------------------------------------------------- what it comes to


def _measured_hits(
    measured: Sequence[Measured | None], written: Sequence[Written], ideal: Sequence[int]
) -> int:
    total = 0.0
    for item, each, found in zip(measured, written, ideal, strict=True):
        if item is None:
            total += found
        elif item.prompt_tokens:
            total += item.cached_tokens / item.prompt_tokens * len(each.tokens)
    return round(total)


def _dollars_of(asked: Sequence[Asked], on: date, price: float | None) -> Callable[[int], float | None]:
    """What so many tokens cost that were computed and need not have been."""
    if price is not None:
        return lambda num_tokens: num_tokens * price / 1e6
    model = Counter(each.model for each in asked if each.model).most_common(1)
    if model:
        name = model[0][0]
        vendor, table = vendor_of_model(name), builtin_table()
        known = table.price(vendor, name, on)
        try:
            rules = table.rules(vendor, name, on)
        except ParameterError:
            known = None
        if known is not None:
            saved = float(known.input) * (1 - float(rules.read))
            return lambda num_tokens: num_tokens * saved / 1e6
    return lambda num_tokens: None


def _findings(
    losses: Mapping[tuple[str, str], _Loss],
    num_requests: int,
    prompt_tokens: int,
    dollars: Callable[[int], float | None],
) -> list[Finding]:
    least = 1 if num_requests <= _SMALL_LOG else 2
    found = [
        Finding(
            kind,
            where,
            len(loss.requests),
            loss.lost_tokens,
            tuple(loss.requests)[:5],
            tuple(loss.examples),
            dollars(loss.lost_tokens),
        )
        for (kind, where), loss in losses.items()
        if len(loss.requests) >= least
        and loss.lost_tokens >= max(MIN_LOST_TOKENS, _MIN_SHARE * prompt_tokens)
    ]
    return sorted(found, key=lambda item: (-item.lost_tokens, item.kind, item.where))


def _tried(
    findings: Sequence[Finding],
    asked: Sequence[Asked],
    writer: Writer,
    tokens: tuple[int, int, int],
    on: date,
) -> tuple[list[Finding], int]:
    """The findings with what mending them one after the other gains, and what is found in the end.

    ``tokens``: what can be found as it is, what was, and what could be with breakpoints everywhere.
    """
    before, measured, ideal = tokens
    prompt_tokens = sum(item.lost_tokens for item in findings) + ideal
    tried: list[Finding] = []
    kinds: list[str] = []
    roles: set[str] = set()
    best = before
    mended = [item for item in findings if item.kind in MENDED]
    one_by_one = prompt_tokens * min(len(mended), _MAX_TRIED) <= 4 * _MAX_REPLAY_TOKENS
    for item in findings:
        if item.kind not in MENDED:
            # The log needs no repair: the replay with room for all is what it could have had.
            if item.kind in _NO_GAIN:  # what is wrong is not that something was computed
                tried.append(item)
                continue
            gain = min(item.lost_tokens, max(0, ideal - measured))
            best = max(best, measured + gain)
            tried.append(replace(item, gain_tokens=gain))
            continue
        kinds.append(item.kind)
        roles.add(item.where or "text")
        is_last = len(kinds) == len(mended)
        if not is_last and (not one_by_one or len(kinds) > _MAX_TRIED):
            tried.append(item)
            continue
        log = repaired(asked, kinds, roles)
        written = [writer.write(each) for each in log]
        common = hits_of([each.tokens for each in written], [space_of(each) for each in log])
        hits = sum(readable(written, common, on))
        tried.append(replace(item, gain_tokens=max(0, hits - best)))
        best = max(best, hits)
    return tried, best


def _groups(groups: Sequence[int], written: Sequence[Written], ideal: Sequence[int]) -> tuple[Group, ...]:
    tokens: Counter[int] = Counter()
    hits: Counter[int] = Counter()
    for group, each, found in zip(groups, written, ideal, strict=True):
        tokens[group] += len(each.tokens)
        hits[group] += found
    sizes = Counter(groups)
    return tuple(
        Group(_name(written[group]), sizes[group], tokens[group], hits[group])
        for group, _ in tokens.most_common(20)
    )


def _name(each: Written) -> str:
    talk = each.asked.conversation
    text = each.asked.text or (_first_text(talk) if talk is not None else "") or each.text(0, 16)
    return " ".join(text.split())[:60]


def _first_text(talk: Conversation) -> str:
    return next((message.content for message in talk.messages if message.content), "")


def _notes(
    written: Sequence[Written], ideal: Sequence[int], findings: Sequence[Finding]
) -> Iterator[Finding]:
    tokens = sum(len(each.tokens) for each in written)
    if len(written) > 1 and not findings and sum(ideal) < _NOTHING_RATE * tokens:
        yield Finding("nothing_to_share", "", len(written), 0)
        assert "nothing_to_share" in NOTES, "a note that is a fault"


def _of_digests(requests: Sequence[Asked], price: float | None) -> Report:
    """Of a trace without content: its own figures, and the parts of prompts by their digests."""
    losses: Losses = defaultdict(_Loss)
    measured = [measured_of(each) for each in requests]
    prompt_tokens = sum(item.prompt_tokens for item in measured if item is not None)
    hits = sum(item.cached_tokens for item in measured if item is not None)
    possible = hits
    for kind, where, number, num_tokens in segment_losses(requests):
        losses[kind, where].add(requests[number], num_tokens)
        if kind != "content":
            possible += num_tokens
    dollars = (lambda n: None) if price is None else (lambda n: n * price / 1e6)
    findings = _findings(losses, len(requests), prompt_tokens, dollars)
    return Report(len(requests), prompt_tokens, hits, min(possible, prompt_tokens), True, tuple(findings))
