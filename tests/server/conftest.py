from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ostinato.server import Server, ServerSettings, create_app
from server.echo_engine import EchoEngine
from server.wire import Connection, Reply, chat_body


@dataclass(slots=True)
class Running:
    """A server in a thread of this process, with its engine at hand."""

    url: str
    engine: EchoEngine
    server: Server
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def connect(self) -> Connection:
        return Connection(self.port)

    def post(self, path: str, body: bytes, **headers: str) -> Reply:
        """One request on a connection of its own."""
        with self.connect() as connection:
            return connection.post(path, body, **headers)

    def get(self, path: str, **headers: str) -> Reply:
        with self.connect() as connection:
            return connection.request("GET", path, b"", **headers)

    def check_healthy(self) -> None:
        """A well-behaved request is answered, and nothing else is left running."""
        reply = self.post("/v1/chat/completions", chat_body("still here"))
        assert reply.status == 200
        assert reply.json()["choices"][0]["message"]["content"] == "still here"
        assert self.engine.wait_idle(5), "a request was left behind in the engine"
        assert self.get("/health").status == 200

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(20)
        assert not self.thread.is_alive(), "the server did not stop"
        self.engine.close()


Start = Callable[..., Running]


def start_server(settings: dict[str, Any], engine: dict[str, Any]) -> Running:
    echo = EchoEngine(**engine)
    chosen = ServerSettings(**{"port": 0, "drain_timeout_s": 0.2} | settings)
    is_ready = threading.Event()
    urls: list[str] = []

    def ready(url: str) -> None:
        urls.append(url)
        is_ready.set()

    server = Server(create_app(echo, chosen), chosen, ready)
    thread = threading.Thread(target=server.run_until_stopped, name="server")
    thread.start()
    assert is_ready.wait(10), "the server did not start"
    return Running(urls[0], echo, server, thread)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers with settings and an engine of one's own; all are stopped at the end."""
    started: list[Running] = []

    def start(*, engine: dict[str, Any] | None = None, **settings: Any) -> Running:
        started.append(start_server(settings, engine or {}))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """One server for a module: whatever a test does to it, the next one must find it healthy."""
    running = start_server({}, {})
    yield running
    running.stop()


@pytest.fixture(scope="module")
def server_url(request: pytest.FixtureRequest) -> str:
    """Where the tests with the official client find a server; any that serves one model will do.

    ``OSTINATO_TEST_URL`` names one that runs already (``http://host:port``, without keys).
    """
    url = os.environ.get("OSTINATO_TEST_URL")
    if url is None:
        running: Running = request.getfixturevalue("running")
        url = running.url
    return url
