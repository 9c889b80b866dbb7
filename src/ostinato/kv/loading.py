"""Blocks on their way up, in a thread of their own: engine steps go on meanwhile.

A load fills slots that its owner has reserved and nobody reads yet. Whoever gives up on one hands over what
is to be released: that happens when nothing is written any more, at once or after the block at hand.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ostinato.ports import Clock

from .hashing import BlockKey
from .tiers.base import Tier

_AHEAD_BLOCKS = 16
"""A disk is told of a block while this many before it are read."""


class BlockCodec(Protocol):
    """Turns the block at a slot of the arena into ``payload_bytes`` bytes and back.

    Decodes in another thread than the engine's: code that brings threads of its own slows the engine.
    """

    @property
    def name(self) -> str:
        """Says how; goes into the namespace of what is stored."""

    @property
    def is_exact(self) -> bool:
        """Whether ``decode`` brings back every bit."""

    @property
    def window_tokens(self) -> int:
        """The last so many tokens of a prompt are better computed than read."""

    @property
    def payload_bytes(self) -> int: ...

    def encode(self, slot: int, into: memoryview) -> bool:
        """``False``: this block cannot be stored that way."""

    def decode(self, payload: memoryview, slot: int) -> None: ...


class Load:
    """Some consecutive blocks of a chain on their way to their slots.

    Attributes:
        num_loaded: the first so many blocks are in place. Read it when ``is_done``.
        duration_s: what the reading took, without waiting for its turn.
        error: our own fault, that ended it.
    """

    def __init__(self, keys: Sequence[BlockKey], slots: Sequence[int], on_done: Callable[[], None]) -> None:
        assert len(keys) == len(slots) > 0, f"{len(keys)} blocks for {len(slots)} slots"
        self.keys = keys
        self.slots = slots
        self.num_loaded = 0
        self.duration_s = 0.0
        self.error: BaseException | None = None
        self._on_done = on_done
        self._lock = threading.Lock()
        self._is_done = False
        self._is_stopped = False
        self._release: Callable[[], None] | None = None

    @property
    def is_done(self) -> bool:
        """Nothing is written to its slots any more."""
        return self._is_done

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        """Ends it early: after the block at hand."""
        self._is_stopped = True

    def abandon(self, release: Callable[[], None]) -> None:
        """Ends it early and calls ``release`` as soon as it is done, in whatever thread that is."""
        with self._lock:
            self._is_stopped = True
            if not self._is_done:
                self._release = release
                return
        release()

    def end(self) -> None:
        """For the loader: says that it is done."""
        with self._lock:
            self._is_done = True
            release = self._release
        if release is not None:
            release()
        self._on_done()


class Loader:
    """A thread that loads, one chain after the other, in the order in which they were asked for."""

    def __init__(
        self, tier: Tier, codec: BlockCodec, clock: Clock, staging: memoryview, idle: Iterator[object]
    ) -> None:
        """``staging``: ``payload_bytes`` long. ``idle`` is advanced while there is nothing to do."""
        self._tier = tier
        self._codec = codec
        self._clock = clock
        self._staging = staging
        self._idle: Iterator[object] | None = idle
        self._queue: deque[Load] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="ostinato-load", daemon=True)
        self._thread.start()

    def start(self, load: Load) -> None:
        """Takes a load on; its ``on_done`` is called in the loader's thread."""
        with self._changed:
            assert not self._is_closing, "a load was started after the end"
            self._queue.append(load)
            self._changed.notify()

    def close(self) -> None:
        """Stops what is on its way, and ends the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (load := self._next()) is not None:
            started_s = self._clock.monotonic()
            try:
                self._fill(load)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for it
                load.error = error
            load.duration_s = self._clock.monotonic() - started_s
            load.end()
            del load  # or its slots and keys would live as long as the thread waits

    def _next(self) -> Load | None:
        while True:
            with self._changed:
                while not (self._queue or self._is_closing or self._idle):
                    self._changed.wait()
                if self._queue:
                    return self._queue.popleft()
                if self._is_closing:
                    return None
                idle = self._idle
            if idle is not None and next(idle, self) is self:
                self._idle = None

    def _fill(self, load: Load) -> None:
        for place, (key, slot) in enumerate(zip(load.keys, load.slots, strict=True)):
            if load.is_stopped or self._is_closing:
                return
            if place % _AHEAD_BLOCKS == 0:
                self._tier.expect(load.keys[place : place + 2 * _AHEAD_BLOCKS])
            if not self._tier.load(key, self._staging):
                return
            self._codec.decode(self._staging, slot)
            load.num_loaded += 1
