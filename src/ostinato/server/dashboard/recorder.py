"""From the engine's events to what the pages show, in a thread of its own: nobody's request waits for it."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ...events import Event, RequestFinished, RequestServed
from ...kv.terms import Selection
from ...ports import Clock
from ...records import RecordMaker
from .history import History
from .recent import RecentRequests

MAX_PENDING: Final = 4096
MAX_PENDING_TOKENS: Final = 4 << 20
_SWEEP_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Pending:
    event: RequestFinished | RequestServed
    arrived_s: float
    num_tokens: int
    num_purges: int


class Recorder:
    """An observer (:data:`ostinato.events.Observer`) that neither raises nor waits.

    What ends while more than 4096 requests or 4 Mi tokens wait to be recorded is left out, and counted in
    ``num_dropped``.
    """

    def __init__(
        self,
        history: History,
        recent: RecentRequests,
        clock: Clock,
        *,
        block_tokens: int,
        marker_ids: Iterable[int],
    ) -> None:
        self.num_dropped = 0
        self._history = history
        self._recent = recent
        self._clock = clock
        self._maker = RecordMaker(secrets.token_bytes(32), block_tokens, marker_ids)
        self._queue: deque[_Pending] = deque()
        self._pending_tokens = 0
        self._num_purges = 0
        self._is_idle = True
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RequestFinished | RequestServed) or event.request is None:
            return
        num_tokens = 0
        if isinstance(event, RequestFinished):
            if event.request.is_warming or event.tokens is None:
                return
            num_tokens = len(event.tokens)
        arrived_s = self._clock.now() - event.usage.total_s
        with self._changed:
            is_full = len(self._queue) >= MAX_PENDING or self._pending_tokens > MAX_PENDING_TOKENS
            if is_full or self._is_closing:
                self.num_dropped += 1
                return
            self._queue.append(_Pending(event, arrived_s, num_tokens, self._num_purges))
            self._pending_tokens += num_tokens
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ostinato-dashboard", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def purged(self, selection: Selection) -> None:
        """Forget what was asked in these requests, those that wait to be recorded included."""
        with self._changed:
            self._num_purges += 1
            self._recent.purged(selection)

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that ended so far is recorded; ``False`` when the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and self._is_idle, timeout_s)

    def close(self) -> None:
        """Ends the thread; what is pending is left out."""
        with self._changed:
            self._is_closing = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_closing, _SWEEP_S)
                if self._is_closing:
                    return
                self._is_idle = False
                pending = list(self._queue)
                self._queue.clear()
                self._pending_tokens = 0
            for each in pending:
                self._record(each)
            self._recent.forget_expired()

    def _record(self, pending: _Pending) -> None:
        record = self._maker.make(pending.event, pending.arrived_s)
        assert record is not None, "an event of which nothing can be said was put into the queue"
        self._history.add(record)
        with self._changed:  # no purge comes between the question and the answer
            is_whole = pending.num_purges == self._num_purges
            self._recent.add(record, with_content=is_whole)
