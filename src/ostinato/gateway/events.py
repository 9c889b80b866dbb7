"""Server-sent events of upstreams: cut where they end, looked into, passed on byte for byte."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

from ..errors import UpstreamError
from .spelling import loads

Route: TypeAlias = Literal["chat", "responses", "messages"]

MAX_EVENT_BYTES: Final = 32 << 20
DONE: Final = b"[DONE]"
_DIAGNOSES: Final = ("diagnostics", "prompt_cache_diagnostics")
_END: Final = re.compile(rb"\r\n\r\n|\n\r?\n|\r\r")
_LINES: Final = re.compile(rb"\r\n|\n|\r")
_LAST_TYPES: Final[Mapping[Route, frozenset[str]]] = {
    "chat": frozenset(),
    "responses": frozenset({"response.completed", "response.failed", "response.incomplete", "error"}),
    "messages": frozenset({"message_stop", "error"}),
}


class EventReader:
    """Cuts a stream into whole events, and knows whether it has ended as it should.

    ``usage`` is the vendor's last word on what was used, its parts merged; ``diagnosis`` what it says of its
    cache; ``is_failed``: the upstream itself said that it failed. With ``hides_usage`` the event that tells
    nothing but usage is not passed on: the client has not asked for it.
    """

    def __init__(self, route: Route, *, hides_usage: bool = False) -> None:
        self._route: Route = route
        self._hides_usage = hides_usage
        self._rest = bytearray()
        self._num_searched = 0
        self.is_complete = False
        self.is_failed = False
        self.usage: dict[str, Any] = {}
        self.answer_id: str | None = None
        self.diagnosis: Any = None
        self.has_content = False

    def _push(self, data: bytes) -> Iterator[bytes]:
        self._rest += data
        start = 0
        while (end := _END.search(self._rest, max(start, self._num_searched))) is not None:
            event = bytes(self._rest[start : end.end()])
            start = end.end()
            is_usage_alone = self._look(event)
            if not (is_usage_alone and self._hides_usage):
                yield event
            if self.is_complete:  # whatever stands behind the end is none of the answer
                self._rest.clear()
                return
        del self._rest[:start]
        self._num_searched = max(0, len(self._rest) - 3)  # where the end of an event may have begun
        if len(self._rest) > MAX_EVENT_BYTES:
            raise UpstreamError("The upstream sent an event that does not end.")

    def whole_events(self, data: bytes) -> tuple[bytes, UpstreamError | None]:
        """What may be passed on of ``data`` and what was left before it, and what is wrong behind that."""
        events: list[bytes] = []
        try:
            for event in self._push(data):
                events.append(event)
        except UpstreamError as error:
            return b"".join(events), error
        return b"".join(events), None

    @property
    def is_event_left(self) -> bool:
        """Whether the stream stands behind a whole event that only lacks its empty line."""
        if self.is_complete or not (data := _data(bytes(self._rest))):
            return False
        try:
            return data == DONE or isinstance(loads(data), dict)
        except ValueError:
            return False

    def finish(self) -> None:
        """The upstream has closed. Raises :class:`UpstreamError` if it had more to say."""
        if not self.is_complete:
            raise UpstreamError("The upstream ended its answer before it was complete.")

    def _look(self, event: bytes) -> bool:
        """Take in what it says; whether that is usage and nothing else."""
        item = _item(event)
        if item is None:
            self.is_complete |= _data(event) == DONE
            return False
        self.has_content = True
        kind = item.get("type")
        if kind in _LAST_TYPES[self._route]:
            self.is_complete = True
        if kind in ("error", "response.failed") or (self._route == "chat" and item.get("error")):
            self.is_failed = self.is_complete = True
        for holder in (item, item.get("message"), item.get("response")):
            if not isinstance(holder, dict):
                continue
            if isinstance(holder.get("usage"), dict):
                self.usage |= {key: value for key, value in holder["usage"].items() if value is not None}
            if isinstance(holder.get("id"), str):
                self.answer_id = self.answer_id or holder["id"]
            for name in _DIAGNOSES:
                self.diagnosis = holder.get(name) or self.diagnosis
        return item.get("choices") == [] and isinstance(item.get("usage"), dict)


def items(events: bytes) -> Iterator[Mapping[str, Any]]:
    """What whole events say, without those that say nothing."""
    start = 0
    while (end := _END.search(events, start)) is not None:
        item = _item(events[start : end.end()])
        start = end.end()
        if item is not None:
            yield item


def _data(event: bytes) -> bytes:
    lines = (line[5:].removeprefix(b" ") for line in _LINES.split(event) if line.startswith(b"data:"))
    return b"\n".join(lines).strip()


def _item(event: bytes) -> Mapping[str, Any] | None:
    """An event's object; ``None`` for a comment, or the end. Raises :class:`UpstreamError`."""
    data = _data(event)
    if not data or data == DONE:
        return None
    try:
        item = loads(data)
    except ValueError:
        raise UpstreamError("The upstream sent an event that is not JSON.") from None
    if not isinstance(item, dict):
        raise UpstreamError("The upstream sent an event that is not a JSON object.")
    return item
