"""From the engine's thread to one waiting coroutine, without either ever waiting for the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ..types import Chunk


class Mailbox:
    """Chunks of one HTTP request in order, each with the index of its prompt.

    A reader that is slower than the engine makes it grow, at most to the length of the answer; how long a
    reader may be that slow is for the sender to bound. Many chunks may come between two wake-ups.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._chunks: deque[tuple[int, Chunk]] = deque()
        self._is_ringing = False
        self._waiter: asyncio.Future[None] | None = None
        self.is_abandoned = False

    def sink(self, prompt_index: int) -> Callable[[Chunk], None]:
        """What the engine calls with each chunk of that prompt. Any thread; never waits."""

        def put(chunk: Chunk) -> None:
            self._chunks.append((prompt_index, chunk))
            # One bell for all chunks that arrive before it is heard. `_ring` clears the flag before the
            # reader looks, so a chunk that finds it set is always still to be looked for.
            if not self._is_ringing and not self.is_abandoned:
                self._is_ringing = True
                with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                    self._loop.call_soon_threadsafe(self._ring)

        return put

    def abandon(self) -> None:
        """The reader is gone: wake whoever waits, for nothing. Called in the loop."""
        self.is_abandoned = True
        self._wake()

    async def take(self, timeout_s: float) -> list[tuple[int, Chunk]]:
        """All that has come, or nothing when the time is up or the reader is gone."""
        assert self._waiter is None, "a mailbox has one reader"
        if not self._chunks and not self.is_abandoned:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        taken: list[tuple[int, Chunk]] = []
        while self._chunks:
            taken.append(self._chunks.popleft())
        return taken

    def _ring(self) -> None:
        self._is_ringing = False
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
