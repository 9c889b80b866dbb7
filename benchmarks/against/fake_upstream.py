"""An upstream that answers at once or after a while, always the same, and says itself how long it took.

``content`` carries the figures, because gateways pass that on whatever else they rewrite: ``took N;`` are the
nanoseconds from a request's last byte to its answer, ``@N;`` is the moment, on the machine's monotonic clock,
at which one event of a stream was written. Chat Completions only, HTTP/1.1, no checks: it has to be cheap.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": ?true')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_WHOLE = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"fake","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"took %d;%s"},"finish_reason":"stop"}],"usage":{"prompt_tokens":120,'
    b'"completion_tokens":90,"total_tokens":210,"prompt_tokens_details":{"cached_tokens":0}}}'
)
_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"fake","choices":'
    b'[{"index":0,"delta":{"role":"assistant","content":"@%d;"},"finish_reason":null}]}\n\n'
)
_LAST = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"fake","choices":'
    b'[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
_FILLING = b" and so on" * 40


class FakeUpstream(asyncio.Protocol):
    def __init__(self, options: argparse.Namespace) -> None:
        self._delay_s, self._gap_s = options.delay_ms / 1e3, options.gap_ms / 1e3
        self._num_events = options.events
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end])
            found = _LENGTH.search(head)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._data) < size:
                return
            body = bytes(self._data[end + 4 : size])
            del self._data[:size]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        loop, began_ns = asyncio.get_running_loop(), time.monotonic_ns()
        if head.startswith(b"GET "):
            self._send_whole(b'{"object":"list","data":[{"id":"fake","object":"model"}]}')
        elif _STREAM.search(body):
            self._transport.write(_STREAM_HEAD)
            loop.call_later(self._delay_s, self._event, 0)
        elif self._delay_s:
            loop.call_later(self._delay_s, self._finish, began_ns)
        else:
            self._finish(began_ns)

    def _finish(self, began_ns: int) -> None:
        self._send_whole(_WHOLE % (time.monotonic_ns() - began_ns, _FILLING))

    def _send_whole(self, body: bytes) -> None:
        self._transport.write(_HEAD % len(body) + body)

    def _event(self, number: int) -> None:
        if self._transport.is_closing():
            return
        if number == self._num_events:
            self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(_LAST), _LAST))
            return
        event = _EVENT % time.monotonic_ns()
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        asyncio.get_running_loop().call_later(self._gap_s, self._event, number + 1)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--gap-ms", type=float, default=10.0, help="between the events of a stream")
    parser.add_argument("--events", type=int, default=50)
    options = parser.parse_args()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: FakeUpstream(options), "127.0.0.1", options.port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
