"""Recorded requests, as the replay wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ostinato.errors import TraceError
from ostinato.kv.policy import Outlook
from ostinato.types import TokenArray

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    ``units`` are what the cache is asked for, int32: real tokens, or one id for each block of tokens (then
    equal ids mean equal prefixes). ``has_part_block`` says that the last unit stands for a block that is not
    full. ``session`` is the conversation it belongs to, where the trace knows it; ``outlook`` is what the end
    of its answer says, where the trace has answers.
    """

    time_s: float
    units: TokenArray
    input_tokens: int
    output_tokens: int
    has_part_block: bool = False
    session: str = ""
    outlook: Outlook = Outlook.UNKNOWN


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time; a unit stands for up to ``unit_tokens`` tokens."""

    name: str
    unit_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def num_units(self) -> int:
        return sum(len(request.units) for request in self.requests)


def read_mooncake(path: Path) -> Trace:
    """Reads Mooncake's JSON lines (``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids``).

    Our own request logs are such lines, with ``block_tokens`` where Mooncake means 512; lines of theirs that
    a crash cut short are passed over, and those of requests that a kept answer served. Raises ``TraceError``
    naming the line that does not have this form.
    """
    requests: list[TraceRequest] = []
    numbers: dict[int, int] = {}
    block_tokens: int | None = None
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or is_torn(line):
            continue
        try:
            row = orjson.loads(line)
            if row.get("served"):
                continue  # a kept answer: the KV cache had no part in it
            size = int(row.get("block_tokens", MOONCAKE_BLOCK_TOKENS))
            if size != (block_tokens or size):
                raise ValueError(f"blocks of {size} tokens after blocks of {block_tokens}")
            block_tokens = size
            requests.append(_mooncake_request(row, size, numbers))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise TraceError(f"{path}, line {number}: not a Mooncake request ({error})") from error
    if not requests:
        raise TraceError(f"{path} has no requests")
    requests.sort(key=lambda request: request.time_s)
    return Trace(path.stem, block_tokens or MOONCAKE_BLOCK_TOKENS, tuple(requests))


def is_torn(line: bytes) -> bool:
    """Whether this is a line of a request log whose end a crash took."""
    if not line.startswith(b'{"v":') or line.rstrip().endswith(b"}"):
        return False
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return True
    return False


def _mooncake_request(row: dict[str, Any], block_tokens: int, numbers: dict[int, int]) -> TraceRequest:
    """One line; ``numbers`` makes the ids of a trace consecutive, so that they fit into tokens."""
    num_input = int(row["input_length"])
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise TypeError("hash_ids have to be whole numbers")
    if block_tokens < 1 or not 0 <= len(ids) * block_tokens - num_input < block_tokens or num_input < 1:
        raise ValueError("hash_ids do not cover input_length")
    return TraceRequest(
        float(row["timestamp"]) / 1000,
        np.fromiter((numbers.setdefault(each, len(numbers)) for each in ids), np.int32, len(ids)),
        num_input,
        int(row["output_length"]),
        num_input % block_tokens != 0,
        str(row.get("session", "")),
    )


class Blocks:
    """Numbers prefixes of whole blocks, and the tail that is not one: equal ids where equal prefixes end."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._ids: dict[tuple[int, bytes], int] = {}

    def of(self, trace: Trace) -> Trace:
        """A trace of tokens as one of blocks; traces through the same numbering can be merged."""
        assert trace.unit_tokens == 1, "only tokens can be put into blocks"
        return Trace(trace.name, self.block_tokens, tuple(self._request(each) for each in trace.requests))

    def _request(self, request: TraceRequest) -> TraceRequest:
        above, units = -1, []
        for start in range(0, len(request.units), self.block_tokens):
            key = (above, request.units[start : start + self.block_tokens].tobytes())
            above = self._ids.setdefault(key, len(self._ids))
            units.append(above)
        is_part = request.input_tokens % self.block_tokens != 0
        return replace(request, units=np.asarray(units, np.int32), has_part_block=is_part)


def merge_sessions(sessions: Sequence[Trace], starts_s: Sequence[float], name: str) -> Trace:
    """Plays several traces at once, the first request of each at its start; in order of time."""
    assert sessions, "merged no sessions"
    requests: list[TraceRequest] = []
    for session, start_s in zip(sessions, starts_s, strict=True):
        first_s = session.requests[0].time_s
        requests += [
            replace(
                request,
                time_s=start_s + request.time_s - first_s,
                session=request.session or session.name,
            )
            for request in session.requests
        ]
    requests.sort(key=lambda request: request.time_s)
    return Trace(name, sessions[0].unit_tokens, tuple(requests))
