"""Recorded requests for ``ostinato plan``: bodies, logs of them, and agent sessions.

A file is one request's body (JSON), or JSON lines: bodies; objects with a body under ``body`` or ``request``
and a time under ``timestamp``, ``time`` or ``at``; or sessions with ``timestamp`` (µs), ``input`` and
``output`` text and ``session_id``. A session's text is cut into blocks where its earlier requests ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import orjson

from ..errors import OstinatoError, TraceError
from . import wire_anthropic, wire_openai
from .repair import RepairRules, repair
from .rules import vendor_of_model
from .shape import Block, Prompt, digest_of
from .wire_anthropic import CountTokens

# Between requests that carry no time.
UNTIMED_GAP_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """``planned`` is what a plan would begin with: the prompt itself, or what it is once repaired."""

    at_s: float
    prompt: Prompt
    where: str
    is_timed: bool
    planned: Prompt
    repairs: tuple[str, ...] = ()


def read_requests(
    path: Path, count: CountTokens, *, model: str, vendor: str | None, repairs: RepairRules | None = None
) -> list[LoggedRequest]:
    """All requests of a file, in order of time.

    ``model`` is for requests that name none; sessions' text cannot be repaired. Raises :class:`TraceError`,
    naming the line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    rows = list(_rows(path, data))
    session: dict[str, list[str]] = {}
    found: list[LoggedRequest] = []
    rows.sort(key=lambda row: _time_s(row[1]) or 0.0)
    for order, (where, row) in enumerate(rows):
        time_s = _time_s(row)
        try:
            if isinstance(row.get("input"), str) and "session_id" in row:
                planned = prompt = _session_prompt(row, session, count, model, vendor)
                done: tuple[str, ...] = ()
            else:
                body = _body_of(row, model)
                planned = prompt = _body_prompt(body, count, vendor)
                done = ()
                if repairs is not None:
                    repaired = repair(body, repairs)
                    planned, done = _body_prompt(repaired.body, count, vendor), repaired.repairs
        except (OstinatoError, ValueError, TypeError, AttributeError) as error:
            raise TraceError(f"{where}: {error}") from error
        at_s = order * UNTIMED_GAP_S if time_s is None else time_s
        found.append(LoggedRequest(at_s, prompt, where, time_s is not None, planned, done))
    return found


def _rows(path: Path, data: bytes) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        whole = orjson.loads(data)
        rows: list[tuple[str, Any]] = [(str(path), whole)]
    except orjson.JSONDecodeError:
        rows = []
        for number, line in enumerate(data.splitlines(), 1):
            if line.strip():
                try:
                    rows.append((f"{path}, line {number}", orjson.loads(line)))
                except orjson.JSONDecodeError as error:
                    raise TraceError(f"{path}, line {number}: not JSON ({error})") from error
    for where, row in rows:
        if not isinstance(row, dict):
            raise TraceError(f"{where}: not a JSON object")
        yield where, row


def _time_s(row: Mapping[str, Any]) -> float | None:
    for name in ("timestamp", "time", "at"):
        value = row.get(name)
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            # Seconds, milliseconds or microseconds since 1970: only one of them is in this century.
            return float(value) / (1e6 if value > 1e14 else 1e3 if value > 1e11 else 1)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return None


def _body_of(row: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    body = next((row[name] for name in ("body", "request") if isinstance(row.get(name), dict)), row)
    if not any(name in body for name in ("messages", "input")):
        raise ValueError("a request needs messages (or input)")
    return body if isinstance(body.get("model"), str) else {**body, "model": model}


def _body_prompt(body: Mapping[str, Any], count: CountTokens, vendor: str | None) -> Prompt:
    name = vendor or vendor_of_model(body["model"])
    if name in ("anthropic", "bedrock"):
        return wire_anthropic.read_request(body, count, vendor=name)
    return wire_openai.read_request(body, count, vendor=name)


def _session_prompt(
    row: Mapping[str, Any],
    session: dict[str, list[str]],
    count: CountTokens,
    model: str,
    vendor: str | None,
) -> Prompt:
    """Text of which nobody says where messages end: blocks end where earlier requests of the session did."""
    text = str(row["input"])
    earlier = session.setdefault(str(row["session_id"]), [])
    cuts = sorted({len(before) for before in earlier if text.startswith(before)} - {0, len(text)})
    earlier.append(text)
    pieces = [
        text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if end > start
    ]
    blocks = tuple(
        Block(
            "messages",
            "text",
            digest_of(piece.encode("utf-8", "surrogatepass")),
            count(piece.encode("utf-8", "surrogatepass")),
            ("messages", number),
            role="user",
            ends_message=True,
        )
        for number, piece in enumerate(pieces)
    )
    return Prompt(vendor or vendor_of_model(model), model, blocks)
