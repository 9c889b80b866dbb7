"""What uvicorn leaves open: slow and endless heads, malformed HTTP, unread answers, too many connections.

A connection is in one of three states::

    head ──(head complete)──► exchange ──(answer complete)──► head …
      └──────────(refused)──────┴──(answered before the body was read)──► deaf ──► closed

While it is *deaf*, what arrives is thrown away: closing at once would reset the connection, and a client
that is still sending would lose the very answer that tells it to stop.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .failures import Failure, refusal
from .settings import ServerSettings

_LINGER_S: Final = 10.0
_CLOSE: Final = (b"connection", b"close")


class HardenedProtocol(HttpToolsProtocol):
    """One HTTP/1.1 connection. A second request before the first is answered (pipelining) is not read."""

    def __init__(self, *args: Any, settings: ServerSettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._inner = self.app
        self.app = self._run_app
        self._is_in_head = True
        self._is_deaf = False
        self._is_resuming = False
        self._has_progressed = False
        self._num_idle_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_connections, limit = len(self.connections), self._settings.max_connections
        if num_connections <= limit:
            self._start_head_timer()
        elif num_connections <= 2 * limit:
            self._refuse(refusal(503, "Too many connections; try again later.", code="too_many_connections"))
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._is_answering():
            self._hang_up_after_answer()
            return
        if self._is_in_head and self._head_timer is None:
            self._start_head_timer()  # the first byte after a pause; the clock runs until the head is whole
        self._unset_keepalive_if_required()
        self._has_progressed = False
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("The request is not well-formed HTTP/1.1.")
        # Only heads, trailers and chunk extensions grow without a byte of body.
        self._num_idle_bytes = 0 if self._has_progressed else self._num_idle_bytes + len(data)
        if self._num_idle_bytes > self._settings.max_head_bytes and not self._is_deaf:
            text = f"The head of the request is over the limit of {self._settings.max_head_bytes} bytes."
            self._refuse(refusal(431, text, code="request_head_too_large"))

    def shutdown(self) -> None:
        if self._is_deaf and not self._is_answering():
            self.transport.close()
        else:
            super().shutdown()

    # ------------------------------------------------------------ parser

    def on_message_begin(self) -> None:
        if not self._is_resuming:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # otherwise it is a trailer, of which nobody has use
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_deaf or self._is_resuming:
            return
        if self._has_open_cycle():
            self._hang_up_after_answer()
            return
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self.send_400_response("This server speaks HTTP/1.1.")
            return
        super().on_headers_complete()
        self._is_in_head = False
        self._has_progressed = True
        self._stop_head_timer()

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf:
            self._has_progressed = True
            super().on_body(body)

    def on_message_complete(self) -> None:
        # A request to upgrade looks complete to the parser before its body; see `_resume`.
        if not self._is_deaf and not self.parser.should_upgrade():
            self._has_progressed = True
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._is_answering():
            self._hang_up_after_answer()  # the fault is in what follows a good request
        else:
            self._refuse(refusal(400, msg, code="malformed_http"))

    # ------------------------------------------------------------ answer

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self.cycle

        async def guarded_send(message: Message) -> None:
            if self.flow.write_paused:
                await self._wait_until_read()
            if message["type"] == "http.response.start" and cycle.more_body:
                # Answered before the body was read: say that we close, but do it after lingering.
                message = {**message, "headers": [*message.get("headers", []), _CLOSE]}
                await send(message)
                cycle.keep_alive = True
            else:
                await send(message)

        await self._inner(scope, receive, guarded_send)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_if_unread()
        elif self.cycle.more_body:
            self._linger()
        else:
            self._is_in_head = True
            self._num_idle_bytes = 0

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_if_unread()

    # ------------------------------------------------------------ our own

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._resume()
            else:
                return

    def _resume(self) -> None:
        """Read on in HTTP/1.1 after a request that offered something else (``Upgrade: h2c``).

        We decline by not mentioning it. But the parser takes whatever follows the head for another protocol
        and would lose the body, which some clients (Java's own, for one) send along: so a new parser gets
        what frames the body, and goes on from there.
        """
        framing = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        self._is_resuming = True
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._is_resuming = False

    def _is_answering(self) -> bool:
        return self._has_open_cycle() and not self.cycle.more_body

    def _has_open_cycle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn's type leaves out that it begins as None
        return cycle is not None and not cycle.response_complete

    def _hang_up_after_answer(self) -> None:
        """Not reading on would hide a disconnect, and the parser has no place for a second request."""
        self._is_deaf = True
        self.cycle.keep_alive = False

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.header_timeout_s, self._head_timed_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._head_timer = None
        text = f"The head of the request did not arrive within {self._settings.header_timeout_s:g} seconds."
        self._refuse(refusal(408, text, code="request_timeout"))

    def _refuse(self, failure: Failure) -> None:
        """Answer in the application's place, and close. An answer that has begun cannot be replaced."""
        if self.transport.is_closing():
            return
        if self._has_open_cycle():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        body = failure.body()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            _CLOSE,
        ]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[failure.status] + lines + b"\r\n" + body)
        self._linger()

    def _linger(self) -> None:
        """Close our half, throw away what still comes, close the rest when the client does or time is up."""
        self._is_deaf = True
        self._stop_head_timer()
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def _abort_if_unread(self) -> None:
        """A closing transport first sends what it still has, and would wait for the reader without end."""
        if self.transport.get_write_buffer_size() > 0:
            self.loop.call_later(self._settings.write_timeout_s, self.transport.abort)

    async def _wait_until_read(self) -> None:
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                await self.flow.drain()
        except TimeoutError:
            self.transport.abort()
