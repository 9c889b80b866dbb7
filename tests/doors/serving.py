"""The server in this process, before a real engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import openai

import ostinato
from ostinato.server import Server, ServerSettings, create_app


@contextmanager
def serving(engine: ostinato.Engine) -> Iterator[openai.OpenAI]:
    """A client of a server of this engine."""
    settings = ServerSettings(port=0, drain_timeout_s=1.0)
    is_ready = threading.Event()
    urls: list[str] = []

    def ready(url: str) -> None:
        urls.append(url)
        is_ready.set()

    server = Server(create_app(engine.runtime, settings), settings, ready)
    thread = threading.Thread(target=server.run_until_stopped, name="server")
    thread.start()
    try:
        assert is_ready.wait(20), "the server did not start"
        with openai.OpenAI(base_url=f"{urls[0]}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
