"""The one thread that computes.

Loading a model and running it happen in the same thread, because of how OpenMP waits: every thread that opens
a parallel region gets its own team of helpers, and as soon as there are more of them than processors GNU
OpenMP puts waiting threads to sleep almost at once. A model loaded in one thread and run in another took 59
instead of 49 ms a decode step for that reason alone. (An executor of the standard library would do, but
keeps a program that forgets to close its engine from ending.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """A daemon thread that runs calls one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run ``call`` after those before it."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """End the thread after the calls so far, and wait for that (unless it is the caller's own)."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for it
                future.set_exception(error)
            del item, call, future  # or the last call's values would live as long as the thread waits
