"""HTTP by hand, over a real socket: for what no client library would send."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

TIMEOUT_S = 10.0


def chat_body(content: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "echo", "messages": messages} | more).encode()


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Look again and again until ``condition`` holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """A stream's events; the last one of a good stream is the string ``[DONE]``."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert all(line.startswith(("data: ", ":")) for line in lines), lines
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    def error(self, status: int) -> dict[str, Any]:
        """The error, after checking that it has OpenAI's shape."""
        assert self.status == status, (self.status, self.body)
        assert self.headers["content-type"] == "application/json"
        document = self.json()
        assert set(document) == {"error"}
        error: dict[str, Any] = document["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error


class Connection:
    """A socket that speaks as much HTTP as a test needs."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _t: type[BaseException] | None, _v: BaseException | None, _b: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(self, path: str, body: bytes, **headers: str) -> Reply:
        return self.request("POST", path, body, **{"content_type": "application/json"} | headers)

    def request(self, method: str, path: str, body: bytes, **headers: str) -> Reply:
        self.send_request(method, path, body, **headers)
        return self.read_reply()

    def send_request(self, method: str, path: str, body: bytes, **headers: str) -> None:
        lines = [f"{method} {path} HTTP/1.1", "host: test", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.send("\r\n".join([*lines, "", ""]).encode() + body)

    def read_reply(self) -> Reply:
        head = self._read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        pairs = [line.partition(":") for line in head[1:] if line]
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        assert len(headers) == len(pairs), f"a header twice: {head}"
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(iter(self.read_chunk, b""))
        else:
            body = self._read_exactly(int(headers.get("content-length", "0")))
        return Reply(status, headers, body)

    def read_head(self) -> bytes:
        return self._read_until(b"\r\n\r\n")

    def read_chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(self._read_until(b"\r\n"), 16)
        return self._read_exactly(size + 2)[:-2]

    def is_closed_by_server(self) -> bool:
        """Wait for the end of the connection; what still comes is an error."""
        try:
            rest = self._buffer + self.socket.recv(65536)
        except ConnectionResetError:
            return True
        assert rest == b"", rest
        return True

    def _read_until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            self._receive()
        data, _, self._buffer = self._buffer.partition(end)
        return data

    def _read_exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._receive()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise EOFError(f"the connection ended after {self._buffer!r}")
        self._buffer += data
