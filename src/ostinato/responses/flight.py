"""One call that many wait for: equal requests that come while the first of them is being answered.

The call belongs to nobody who waits. Whoever leaves takes nothing from the others; when the last one leaves
the call is cancelled. If it fails, the one who leads is told so, and the call is made again on behalf of the
next: what comes then has to begin with what has come before, which is not delivered twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from ..errors import EngineError, OstinatoError

P = TypeVar("P")

MAX_TAKEOVERS: Final = 2
"""After so many calls that failed in a row everyone is told: what fails for three fails for a hundred."""


class Call(Protocol):
    """A call under way."""

    def cancel(self) -> None: ...


class Pieces(Protocol[P]):
    """What has to be known of the pieces that answers come in."""

    def ends(self, piece: P) -> bool:
        """Whether it is the last of an answer."""

    def fails(self, piece: P) -> bool:
        """Whether it says that the answer failed; whatever comes after it is of no use."""

    def last_of(self, piece: P) -> P:
        """A piece that fails, so that it ends the answer as well."""

    def failure(self, error: OstinatoError) -> P:
        """A last piece that says so."""

    def is_same(self, one: P, other: P) -> bool:
        """Whether they say the same to whoever reads them (times may differ)."""


class Passenger(Generic[P]):
    """One who waits. Pieces are delivered once there is somewhere to deliver them (:meth:`start`)."""

    def __init__(self, flight: Flight[P]) -> None:
        self._flight = flight
        self.sink: Callable[[P], None] | None = None
        self.failure: P | None = None

    def start(self, sink: Callable[[P], None]) -> None:
        """From now on ``sink`` gets the pieces, those that have come already at once. It must not wait."""
        self._flight.board(self, sink)

    def cancel(self) -> None:
        """No more pieces, please."""
        self._flight.leave(self)


class Flight(Generic[P]):
    """See above. Thread-safe.

    Args:
        make: makes the call; may raise what refuses it.
        form: what pieces are.
        landed: called once with all pieces when the answer is complete, in the thread that brought the last.
        crashed: called once when there will be no answer.
        defer: runs something soon, in a thread that may wait; false where it will not.
    """

    def __init__(
        self,
        make: Callable[[Callable[[P], None]], Call],
        form: Pieces[P],
        *,
        landed: Callable[[Sequence[P]], None],
        crashed: Callable[[], None],
        defer: Callable[[Callable[[], None]], bool],
    ) -> None:
        self._make = make
        self._form = form
        self._landed = landed
        self._crashed = crashed
        self._defer = defer
        self._lock = threading.RLock()  # a sink may cancel
        self._pieces: list[P] = []
        self._passengers: list[Passenger[P]] = []
        self._call: Call | None = None
        self._number = 0  # of the call that counts; 0: none does at present
        self._num_calls = 0
        self._num_repeated = 0
        self._is_over = False
        self._has_failed = False

    def join(self) -> Passenger[P] | None:
        """A place for one more; ``None`` when it is too late."""
        with self._lock:
            if self._has_failed:
                return None
            passenger = Passenger(self)
            self._passengers.append(passenger)
            return passenger

    def take_off(self) -> None:
        """Makes the call, on behalf of the first who joined. Raises what refuses it."""
        with self._lock:
            self._num_calls += 1
            self._num_repeated = 0
            number = self._number = self._num_calls
        try:
            call = self._make(lambda piece: self._piece(number, piece))
        except OstinatoError as error:
            self._failed(number, self._form.failure(error))
            raise
        with self._lock:
            if self._number == number and not self._has_failed:
                self._call = call
                return
        call.cancel()  # it had failed, or everyone had left, before we knew what to cancel

    # ------------------------------------------------------------ passengers

    def board(self, passenger: Passenger[P], sink: Callable[[P], None]) -> None:
        with self._lock:
            passenger.sink = sink
            for piece in self._pieces:
                sink(piece)
            if passenger.failure is not None:
                sink(passenger.failure)

    def leave(self, passenger: Passenger[P]) -> None:
        with self._lock:
            passenger.sink = None
            if passenger not in self._passengers:
                return
            self._passengers.remove(passenger)
            if self._passengers or self._is_over or self._has_failed:
                return
            self._has_failed = True
            call = self._call
        if call is not None:
            call.cancel()
        self._crashed()

    # ------------------------------------------------------------ the call

    def _piece(self, number: int, piece: P) -> None:
        with self._lock:
            if number != self._number or self._is_over or self._has_failed:
                return  # of a call that has been given up
            has_failed = self._form.fails(piece)
            goes_on = not has_failed and self._goes_on(piece)
            if goes_on and not self._form.ends(piece):
                return
            if goes_on:
                self._is_over = True
                self._passengers.clear()
            elif not has_failed:
                error = EngineError("the answer failed, and a second one was another")
                self._give_up(self._form.failure(error))
            call = self._call
        if goes_on:
            self._landed(self._pieces)
        elif has_failed:
            self._failed(number, piece)
        elif call is not None:
            call.cancel()

    def _goes_on(self, piece: P) -> bool:
        """Takes the next piece; false where it is not what had come before."""
        if self._num_repeated < len(self._pieces):
            self._num_repeated += 1
            return self._form.is_same(piece, self._pieces[self._num_repeated - 1])
        self._num_repeated += 1
        self._pieces.append(piece)
        for passenger in tuple(self._passengers):
            if passenger.sink is not None:
                passenger.sink(piece)
        return True

    def _failed(self, number: int, piece: P) -> None:
        """The call failed: its leader is told, and the next one takes over."""
        with self._lock:
            if number != self._number or self._is_over or self._has_failed:
                return
            self._number, call, self._call = 0, self._call, None
            if self._passengers:
                self._tell(self._passengers.pop(0), piece)
            may_retry = bool(self._passengers) and self._num_calls <= MAX_TAKEOVERS
            if not (may_retry and self._defer(self._take_over)):
                self._give_up(piece)
        if call is not None:
            call.cancel()

    def _take_over(self) -> None:
        with self._lock:
            if self._has_failed:
                return
        with suppress(OstinatoError):  # whoever waits is told
            self.take_off()

    def _give_up(self, piece: P) -> None:
        self._has_failed = True
        for passenger in self._passengers:
            self._tell(passenger, piece)
        self._passengers.clear()
        self._crashed()

    def _tell(self, passenger: Passenger[P], piece: P) -> None:
        passenger.failure = last = self._form.last_of(piece)
        if passenger.sink is not None:
            passenger.sink(last)
