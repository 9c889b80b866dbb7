"""What a trace without content tells: which parts of prompts changed before parts that stayed, and what
went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import Any

from ..errors import ParameterError
from .material import Asked
from .measured import MIN_SHORT_TOKENS, _Evictions


@dataclass(frozen=True, slots=True)
class SegmentDiff:
    """Two prompts of which only the digests of their parts are known.

    ``segments`` are those of the second: tokens, and whether the first has it ``same`` (in order), ``moved``
    (elsewhere) or not (``new``). ``num_common`` tokens stand in whole parts before the first that is not the
    same; ``num_lost`` are the same behind it.
    """

    segments: tuple[tuple[int, str], ...]
    num_common: int
    num_lost: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_segments(a: Asked, b: Asked) -> SegmentDiff:
    """``b`` as it was asked after ``a``.

    Raises:
        ParameterError: they are not of one trace, or say nothing of their parts.
    """
    before, after = _parts(a.line), _parts(b.line)
    if not before or not after or a.line.get("key") != b.line.get("key"):
        raise ParameterError(
            "there are digests alone, not of one trace or not of parts: log with --trace-content",
            param="request",
        )
    matcher = SequenceMatcher(None, [d for _, d in before], [d for _, d in after], autojunk=False)
    same = {
        place for block in matcher.get_matching_blocks() for place in range(block.b, block.b + block.size)
    }
    known = {digest for _, digest in before}
    kinds = tuple(
        (length, "same" if place in same else "moved" if digest in known else "new")
        for place, (length, digest) in enumerate(after)
    )
    head = next((place for place, (_, kind) in enumerate(kinds) if kind != "same"), len(kinds))
    lengths = [length for length, _ in kinds]
    behind = sum(length for length, kind in kinds[head:] if kind != "new")
    # Where the first prompt ends there, nothing is lost: the second goes on.
    return SegmentDiff(kinds, sum(lengths[:head]), 0 if head >= len(before) - 1 else behind)


def segment_losses(requests: Sequence[Asked]) -> Iterator[tuple[str, str, int, int]]:
    """Kind, place, request and tokens of every loss that the digests show."""
    evictions = _Evictions(requests)
    never = all(asked.line.get("cached_tokens") == 0 for asked in requests)
    last: dict[str, int] = {}
    seen: dict[int, int] = {}
    for number, asked in enumerate(requests):
        line = asked.line
        if line.get("served"):
            continue
        stop = line.get("stop") if isinstance(line.get("stop"), dict) else {}
        assert isinstance(stop, dict), "a stop that is none"
        short = _count(stop.get("known")) - _count(line.get("cached_tokens"))
        if short >= MIN_SHORT_TOKENS:
            why = stop.get("why")
            kind = "fan_out" if why == "pending" else "cache_off" if never else evictions.reason(number)
            yield kind, "", number, short
        parts = _parts(line)
        relatives = [last[key] for key in (asked.session, "") if key in last]
        relatives += [seen[digest] for digest in (d for _, d in parts) if digest in seen][:1]
        found = max((_changed(_parts(requests[r].line), parts, _count(line.get("cached_tokens")))
                     for r in dict.fromkeys(relatives)), default=None)  # fmt: skip
        if found is not None and found[0] >= MIN_SHORT_TOKENS:
            yield "content", f"segment {found[1]}", number, found[0]
        last[asked.session] = last[""] = number
        for _, digest in parts:
            seen[digest] = number


def _parts(line: Any) -> list[tuple[int, int]]:
    given = line.get("segments")
    pairs = given if isinstance(given, list) else ()
    return [(pair[0], pair[1]) for pair in pairs if _is_pair(pair)]


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(type(item) is int and item >= 0 for item in value)
    )


def _count(value: Any) -> int:
    return value if type(value) is int else 0


def _changed(
    before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]], num_found: int
) -> tuple[int, int]:
    """Tokens of the parts that stayed behind the first that did not, and which one that is."""
    matcher = SequenceMatcher(None, [d for _, d in before], [d for _, d in after], autojunk=False)
    blocks = [block for block in matcher.get_matching_blocks() if block.size]
    head = blocks[0].size if blocks and blocks[0].a == blocks[0].b == 0 else 0
    if head >= len(before):
        return 0, head
    lengths = [length for length, _ in after]
    lost = 0
    for block in blocks:
        if block.b < head or (block.a == 0 and block.b == 0):
            continue
        start, end = sum(lengths[: block.b]), sum(lengths[: block.b + block.size])
        lost += max(0, end - max(start, num_found))
    return lost, head
