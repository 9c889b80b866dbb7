"""An upstream that sends exactly the bytes it is told, over a socket, and remembers what it was sent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True)
class Seen:
    head: str
    body: bytes

    def header(self, name: str) -> str | None:
        for line in self.head.split("\r\n")[1:]:
            key, _, value = line.partition(": ")
            if key.lower() == name:
                return value
        return None


@dataclass
class RawUpstream:
    """``answers``: a reply for every request, the last again and again. ``None`` among bytes: silence."""

    answers: Sequence[Sequence[bytes | None]]
    seen: list[Seen] = field(default_factory=list)
    before: Callable[[int], None] = lambda _number: None

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._listener.close()
        self._thread.join(5)

    def _accept(self) -> None:
        self._listener.settimeout(0.1)
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(10)
            data = b""
            try:
                while b"\r\n\r\n" not in data:
                    if not (piece := connection.recv(65536)):
                        return
                    data += piece
                head, _, body = data.partition(b"\r\n\r\n")
                text = head.decode("latin-1")
                length = next(
                    int(line.partition(":")[2])
                    for line in text.split("\r\n")
                    if line.lower().startswith("content-length")
                )
                while len(body) < length:
                    body += connection.recv(65536)
                number = len(self.seen)
                self.seen.append(Seen(text, body))
                self.before(number)
                for piece in self.answers[min(number, len(self.answers) - 1)]:
                    if piece is None:
                        self._stopped.wait(5)
                        return
                    connection.sendall(piece)
            except OSError:
                return


def whole(body: bytes, status: str = "200 OK", *more: str) -> list[bytes | None]:
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *more]
    return ["\r\n".join([*lines, "connection: close", "", ""]).encode() + body]


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
