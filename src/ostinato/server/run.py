"""Run the server in the foreground, and end it gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import uvicorn
from starlette.applications import Starlette

from .backend import Backend
from .protocol import HardenedProtocol
from .settings import ServerSettings

logger = logging.getLogger("ostinato.server")

_FLUSH_TIMEOUT_S: Final = 5  # after the drain: for clients to read the end of their answers
# How long the engine's thread may keep the interpreter while the loop waits for it with a first byte. The
# default of 5 ms is longer than all the rest of the way; with this the median is 0.1 to 0.4 ms less.
_SWITCH_INTERVAL_S: Final = 0.0005
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def serve(app: Starlette, settings: ServerSettings, ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return; a second signal ends running requests at once.

    ``app`` comes from :func:`create_app`. ``ready`` is called with the server's address
    (``http://127.0.0.1:8000``) once it listens. The runtime is drained but not closed: that is for whoever
    made it.

    Raises:
        OSError: the address cannot be had.
    """
    previous_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with _scanning_less():
            Server(app, settings, ready).run_until_stopped()
    finally:
        sys.setswitchinterval(previous_s)


@contextlib.contextmanager
def _scanning_less() -> Iterator[None]:
    """Let the collector of cycles pass over what stays: modules and the model now, histories later.

    With Python's own thresholds it scans everything whenever a quarter is new, 100 ms and more at a time, and
    all requests wait for it. What requests leave behind has no cycles but for those of errors, and is young.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class Server(uvicorn.Server):
    """A uvicorn server with our protocol, whose shutdown begins with the runtime's."""

    def __init__(
        self, app: Starlette, settings: ServerSettings, ready: Callable[[str], None] | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(HardenedProtocol, settings=settings)),
            loop="auto",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=cast(int, settings.keep_alive_s),
            timeout_graceful_shutdown=_FLUSH_TIMEOUT_S,
        )
        super().__init__(config)
        self._backend: Backend = app.state.backend
        self._settings = settings
        self._ready = ready
        self._address = ""

    def run_until_stopped(self) -> None:
        """Bind, serve, and return after the shutdown. Raises OSError where the address cannot be had."""
        with _listen(self._settings) as listener:
            self._address = _address(listener)
            self.run(sockets=[listener])

    def stop(self) -> None:
        """Begin the shutdown, from any thread; the second call hurries it."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._ready is not None:
            self._ready(self._address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """While requests drain we still listen: new ones are told 503, and /health says so to balancers."""
        logger.info("shutting down: waiting up to %g s for requests", self._settings.drain_timeout_s)
        drain = asyncio.create_task(self._backend.drain(self._settings.drain_timeout_s))
        while not drain.done() and not self.force_exit:
            await asyncio.wait([drain], timeout=0.05)
        if not drain.done():
            await self._backend.drain(0)
        await drain
        await super().shutdown(sockets=sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a graceful end is an ordinary return: the signal is not raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host, settings.port), family=family, backlog=2048)


def _address(listener: socket.socket) -> str:
    """As one would type it: of all interfaces, the loopback one."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
