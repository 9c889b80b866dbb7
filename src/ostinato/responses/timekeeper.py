"""The time of day, as far as it can be trusted: it never goes back."""

from __future__ import annotations

import threading

from ..ports import Clock


class Timekeeper:
    """Milliseconds since the Unix epoch that go on where the machine's clock is put back.

    So nothing that had expired is valid again. Where a clock had run ahead and was put right, this process
    stays ahead; what it stores meanwhile seems to others to come from the future, and is a miss there.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._now_s = clock.now()
        self._monotonic_s = clock.monotonic()

    def now_ms(self) -> int:
        with self._lock:
            monotonic_s = self._clock.monotonic()
            on_s = self._now_s + max(0.0, monotonic_s - self._monotonic_s)
            self._now_s, self._monotonic_s = max(on_s, self._clock.now()), monotonic_s
            return int(self._now_s * 1000)

    def monotonic(self) -> float:
        """Seconds; only differences mean anything."""
        return self._clock.monotonic()
