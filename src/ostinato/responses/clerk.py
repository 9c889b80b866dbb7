"""One thread for what nobody should wait for: writing to the store, and trying again."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

_MAX_PENDING: Final = 1024


class Clerk:
    """Does one piece of work after the other. The thread starts with the first, and ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._is_closing = False

    def do(self, work: Callable[[], None], *, must: bool = False) -> bool:
        """Soon. False where too much waits already (unless it ``must`` be done) or the clerk has gone."""
        with self._changed:
            if self._is_closing or (len(self._work) >= _MAX_PENDING and not must):
                return False
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything so far is done; false when the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._work and not self._is_busy, timeout_s)

    def close(self) -> None:
        """Does what waits, and nothing that comes later."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._work or self._is_closing)
                if not self._work:
                    return
                work = self._work.popleft()
                self._is_busy = True
            try:
                work()
            except Exception:  # noqa: BLE001 - the border of this thread: what waits behind has to be done
                _log.exception("answers: a piece of work failed, which is a bug")
