"""Gateways in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ostinato.gateway import Fleet, Upstream, create_gateway
from ostinato.providers.rules import builtin_table
from ostinato.server import Server, ServerSettings


@contextmanager
def gateway(
    *upstreams: Upstream,
    answers: Any = None,
    rated: Any = None,
    fleet: Fleet | None = None,
    **settings: Any,
) -> Iterator[str]:
    """The address of a gateway in front of these."""
    chosen = ServerSettings(**{"port": 0, "drain_timeout_s": 0.2} | settings)
    is_ready, urls = threading.Event(), list[str]()

    def ready(url: str) -> None:
        urls.append(url)
        is_ready.set()

    app = create_gateway(upstreams, chosen, builtin_table(), answers=answers, rated=rated, fleet=fleet)
    server = Server(app, chosen, ready)
    thread = threading.Thread(target=server.run_until_stopped, name="gateway")
    thread.start()
    try:
        assert is_ready.wait(20), "the gateway did not start"
        yield urls[0]
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive(), "the gateway did not stop"
