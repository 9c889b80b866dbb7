"""A thread for what can wait: what policies put off, and sessions whose time is up."""

from __future__ import annotations

import threading

from .manager import KVManager
from .sessions import Sessions

_PAUSE_S = 0.0005  # between slices: whoever wants the books' lock in between gets it


class Tender:
    """Works while the engine computes, a slice at a time, and never holds the books' lock for longer."""

    def __init__(self, manager: KVManager, sessions: Sessions) -> None:
        self._manager = manager
        self._sessions = sessions
        self._news = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ostinato-tender", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something to do. Costs nothing, from any thread."""
        self._news.set()

    def close(self) -> None:
        """Ends the thread; what was put off stays undone."""
        self._is_closing.set()
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._is_closing.is_set():
            self._news.wait(min(max(wait_s, 0.0), threading.TIMEOUT_MAX))
            self._news.clear()
            while self._manager.tend() and not self._is_closing.wait(_PAUSE_S):
                pass
            wait_s = self._sessions.expire()
