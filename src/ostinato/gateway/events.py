"""Server-sent events of upstreams: cut where they end, looked into, passed on byte for byte."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

import orjson

from ..errors import UpstreamError

Route: TypeAlias = Literal["chat", "responses", "messages"]

MAX_EVENT_BYTES: Final = 32 << 20
_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINES: Final = re.compile(rb"\r\n|\n|\r")
_LAST_TYPES: Final[Mapping[Route, frozenset[str]]] = {
    "chat": frozenset(),
    "responses": frozenset({"response.completed", "response.failed", "response.incomplete", "error"}),
    "messages": frozenset({"message_stop", "error"}),
}


class EventReader:
    """Cuts a stream into whole events, and knows whether it has ended as it should.

    ``usage`` is the vendor's last word on what was used, its parts merged; ``is_failed``: the upstream itself
    said that it failed.
    """

    def __init__(self, route: Route) -> None:
        self._route: Route = route
        self._rest = bytearray()
        self.is_complete = False
        self.is_failed = False
        self.usage: dict[str, Any] = {}
        self.has_content = False

    def _push(self, data: bytes) -> Iterator[bytes]:
        self._rest += data
        start = 0
        while (end := _END.search(self._rest, start)) is not None:
            event = bytes(self._rest[start : end.end()])
            start = end.end()
            self._look(event)
            yield event
        del self._rest[:start]
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

    def finish(self) -> None:
        """The upstream has closed. Raises :class:`UpstreamError` if it had more to say."""
        if not self.is_complete:
            raise UpstreamError("The upstream ended its answer before it was complete.")

    def _look(self, event: bytes) -> None:
        data = b"\n".join(
            line[5:].removeprefix(b" ") for line in _LINES.split(event) if line.startswith(b"data:")
        )
        if not data:
            return  # a comment, or an event without data
        if data == b"[DONE]":
            self.is_complete = True
            return
        try:
            item = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise UpstreamError("The upstream sent an event that is not JSON.") from None
        if not isinstance(item, dict):
            raise UpstreamError("The upstream sent an event that is not a JSON object.")
        self.has_content = True
        kind = item.get("type")
        if kind in _LAST_TYPES[self._route]:
            self.is_complete = True
        if kind in ("error", "response.failed") or (self._route == "chat" and "error" in item):
            self.is_failed = self.is_complete = True
        for holder in (item, item.get("message"), item.get("response")):
            if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
                self.usage |= {key: value for key, value in holder["usage"].items() if value is not None}
