"""The exact cache: the answer of an equal request, kept or under way.

What an answer consists of is its form's affair (:class:`Form`): chunks of the embedded engine, events of an
upstream. Answers are kept in the pieces they came in, so a stream comes again as it was. Only whole answers
are kept.

A look-up asks first for a call that is under way, then the store: an answer is in the store before its call
is forgotten, so there is no moment between the two. The store is written by a thread of its own; no request
waits for that, and none fails because of the store.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, Generic, Protocol, TypeVar

from ..errors import StoreError
from ..events import AnswerFiled, AnswerMiss, AnswerMissed, Observer
from ..kv.terms import Selection
from ..ports import Clock
from ..types import CacheControl
from .clerk import Clerk
from .flight import Call, Flight, Passenger, Pieces
from .stores.base import KEY_BYTES, Absent, Entry, Kind, Removed, Store, Use
from .timekeeper import Timekeeper

_log = logging.getLogger(__name__)

P = TypeVar("P")

_KIND: Final[Kind] = "exact"
_ID_PREFIX: Final = "answer-"
_RETRY_S: Final = 5.0
"""For how long a store that failed is left alone."""

_NUM_RECENT: Final = 4096
_TIDY_ROWS: Final = 64
_SPACE: Final = bytes(KEY_BYTES)


def id_of(key: bytes) -> str:
    """By what people name an entry. It tells nothing of the request."""
    return _ID_PREFIX + key.hex()


def key_of(entry_id: str) -> bytes | None:
    """The way back; ``None`` where it is no such name."""
    digits = entry_id.removeprefix(_ID_PREFIX)
    is_key = len(digits) == 2 * KEY_BYTES and all(c in "0123456789abcdef" for c in digits)
    return bytes.fromhex(digits) if is_key and digits != entry_id else None


class Form(Pieces[P], Protocol[P]):
    """What an answer consists of."""

    def encode(self, pieces: Sequence[P]) -> bytes:
        """Raises :class:`ValueError` where they cannot be written down."""

    def decode(self, data: bytes) -> list[P]:
        """Raises :class:`ValueError` where it is not what ``encode`` wrote."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as this cache has to know it.

    ``key`` names everything that can change the answer. ``tenant``, ``model`` and ``prompt`` are ids, for
    quotas and purges. ``ttl_s`` is for how long its answer may be kept, if not for as long as others.
    ``may_join``: whether it may share a call with others.
    """

    key: bytes
    tenant: str = ""
    model: str = ""
    prompt: str = ""
    control: CacheControl = field(default_factory=CacheControl)
    ttl_s: float = inf
    may_join: bool = True


@dataclass(frozen=True, slots=True)
class Found(Generic[P]):
    """A kept answer."""

    pieces: list[P]
    age_s: float
    entry_id: str


@dataclass(frozen=True, slots=True)
class Joined(Generic[P]):
    """A place among those who wait for an answer that is under way."""

    passenger: Passenger[P]
    is_leader: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """Nothing: it has to be computed. ``epoch`` is the store's at this moment; ``None``: do not store it.

    ``num_stored``: how many answers had been stored before the look-up.
    """

    epoch: int | None = None
    num_stored: int = 0


class Exact(Generic[P]):
    """Thread-safe.

    Args:
        store: where answers are kept; closed with the cache.
        form: what they consist of.
        clock: of it expiry and age.
        ttl_s: for how long answers are kept at most.
        observer: hears what becomes of them.
    """

    def __init__(
        self,
        store: Store,
        form: Form[P],
        clock: Clock,
        *,
        ttl_s: float = inf,
        observer: Observer = lambda event: None,
    ) -> None:
        assert ttl_s > 0, f"answers are kept for {ttl_s} seconds"
        self.store = store
        self.time = Timekeeper(clock)
        self.clerk = Clerk("ostinato-answers")
        self._form = form
        self._ttl_s = ttl_s
        self._observe = observer
        self._lock = threading.Lock()
        self._flights: dict[bytes, Flight[P]] = {}
        self._num_stored = 0
        self._recent: OrderedDict[bytes, int] = OrderedDict()  # key → its number among those stored
        self._useful: set[int] = set()
        self._useless: set[int] = set()
        self._retry_at_s = -inf

    # ------------------------------------------------------------ look up

    def find(self, asked: Asked) -> Found[P] | Joined[P] | Missing:
        """The answer, or a place to wait for it. May wait for the store."""
        num_stored = self._num_stored
        if asked.control.read:
            if asked.may_join and (passenger := self._join(asked.key)) is not None:
                return Joined(passenger)
            if (found := self._kept(asked)) is not None:
                return found
        return Missing(self._epoch() if asked.control.store else None, num_stored)

    def lead(
        self,
        asked: Asked,
        missing: Missing,
        make: Callable[[Callable[[P], None]], Call],
        is_fit: Callable[[Sequence[P]], bool],
    ) -> Found[P] | Joined[P]:
        """Makes the call; or joins one that has begun since, or brings its answer if that is there by now.

        The place is the first one where the call was made for it (:attr:`Joined.is_leader`). ``is_fit``:
        whether a complete answer may be kept. Raises what refuses the call.
        """
        flight: Flight[P] = Flight(
            make,
            self._form,
            landed=lambda pieces: self._landed(asked, missing, flight, pieces, is_fit),
            crashed=lambda: self._remove_flight(asked.key, flight),
            defer=lambda work: self.clerk.do(work, must=True),
        )
        leader = flight.join()
        assert leader is not None, "a flight that failed before it began"
        num_stored = missing.num_stored
        while asked.may_join and asked.control.read:
            with self._lock:
                other, number = self._flights.get(asked.key), self._recent.get(asked.key, 0)
                if other is None and number <= num_stored:
                    self._flights[asked.key] = flight
                    break
            if other is None:  # it was stored since we looked
                if (found := self._kept(asked, is_first=False)) is not None:
                    return found
                num_stored = number
            elif (passenger := other.join()) is not None:
                return Joined(passenger)
            else:
                self._remove_flight(asked.key, other)
        flight.take_off()
        return Joined(leader, is_leader=True)

    def _join(self, key: bytes) -> Passenger[P] | None:
        with self._lock:
            flight = self._flights.get(key)
        return None if flight is None else flight.join()

    def _kept(self, asked: Asked, *, is_first: bool = True) -> Found[P] | None:
        """What is in the store; what was looked for before is not counted again."""
        found = self._look(asked)
        if isinstance(found, Found):
            return found
        if is_first:
            self._observe(AnswerMissed(found))
        return None

    def _look(self, asked: Asked) -> Found[P] | AnswerMiss:
        if not self._is_up():
            return "failed"
        now_ms = self.time.now_ms()
        try:
            entry = self.store.get(_KIND, asked.key, now_ms)
        except StoreError as error:
            self._went_down(error)
            return "failed"
        if isinstance(entry, Absent):
            if entry.seq is not None and entry.reason != "future":
                self._note(self._useless, entry.seq)
            return entry.reason
        age_s = max(0.0, (now_ms - entry.stored_ms) / 1000)
        max_age_s = asked.control.max_age_s
        if max_age_s is not None and age_s >= max_age_s:
            return "too_old"
        try:
            pieces = self._form.decode(entry.value)
        except ValueError:
            self._note(self._useless, entry.seq)
            return "corrupt"
        self._note(self._useful, entry.seq)
        return Found(pieces, age_s, id_of(asked.key))

    # ------------------------------------------------------------ keep

    def file(
        self, asked: Asked, missing: Missing, pieces: Sequence[P], is_fit: Callable[[Sequence[P]], bool]
    ) -> None:
        """Keeps the answer of a call that was made elsewhere, after :meth:`find` had nothing. Does not
        wait."""
        self._landed(asked, missing, None, pieces, is_fit)

    def _landed(
        self,
        asked: Asked,
        missing: Missing,
        flight: Flight[P] | None,
        pieces: Sequence[P],
        is_fit: Callable[[Sequence[P]], bool],
    ) -> None:
        """A call is complete: in the thread of whoever answers, so nothing here may wait."""
        if missing.epoch is None or not asked.control.store:
            self._remove_flight(asked.key, flight)
            return
        if not is_fit(pieces):
            self._observe(AnswerFiled("unfit"))
            self._remove_flight(asked.key, flight)
            return
        epoch = missing.epoch
        if not self.clerk.do(lambda: self._store(asked, epoch, flight, pieces)):
            self._observe(AnswerFiled("dropped"))
            self._remove_flight(asked.key, flight)

    def _store(self, asked: Asked, epoch: int, flight: Flight[P] | None, pieces: Sequence[P]) -> None:
        try:
            if not self._is_up():
                self._observe(AnswerFiled("failed"))
                return
            now_ms = self.time.now_ms()
            ttl_s = min(self._ttl_s, asked.ttl_s)
            entry = Entry(
                _KIND,
                asked.key,
                _SPACE,
                self._form.encode(pieces),
                now_ms,
                None if ttl_s == inf else now_ms + max(1, int(ttl_s * 1000)),
                asked.tenant,
                asked.model,
                asked.prompt,
            )
            self._tidy()
            num_stored = self.store.put([entry], now_ms, epoch)
            self._observe(AnswerFiled("stored" if num_stored else "refused"))
            if num_stored:
                with self._lock:
                    self._num_stored += 1
                    self._recent[asked.key] = self._num_stored
                    self._recent.move_to_end(asked.key)
                    while len(self._recent) > _NUM_RECENT:
                        self._recent.popitem(last=False)
        except ValueError:  # of the form: an answer that cannot be written down
            self._observe(AnswerFiled("unfit"))
        except StoreError as error:
            self._went_down(error)
            self._observe(AnswerFiled("failed"))
        finally:
            self._remove_flight(asked.key, flight)

    def _remove_flight(self, key: bytes, flight: Flight[P] | None) -> None:
        with self._lock:
            if flight is not None and self._flights.get(key) is flight:
                del self._flights[key]

    def _note(self, rows: set[int], seq: int) -> None:
        """What was seen of a row is written down with the next answer, or when there is enough of it."""
        with self._lock:
            rows.add(seq)
            is_much = len(self._useful) + len(self._useless) == _TIDY_ROWS
        if is_much:
            self.clerk.do(self._tidy_alone)

    def _tidy(self) -> None:
        with self._lock:
            useful, self._useful = self._useful, set()
            useless, self._useless = self._useless, set()
        if useful:
            self.store.touch(useful)
        if useless:
            self.store.drop(useless)

    def _tidy_alone(self) -> None:
        try:
            if self._is_up():
                self._tidy()
        except StoreError as error:
            self._went_down(error)

    # ------------------------------------------------------------ the store's health

    def _epoch(self) -> int | None:
        if not self._is_up():
            return None
        try:
            return self.store.epoch()
        except StoreError as error:
            self._went_down(error)
            return None

    def _is_up(self) -> bool:
        return self.time.monotonic() >= self._retry_at_s

    def _went_down(self, error: StoreError) -> None:
        _log.warning("answers are neither found nor kept for %g s: %s", _RETRY_S, error)
        self._retry_at_s = self.time.monotonic() + _RETRY_S

    # ------------------------------------------------------------ operators

    def purge(self, selection: Selection) -> Removed:
        """Removes what is selected; what is being computed now and would be meant is not kept either.

        Raises:
            StoreError: the store cannot be reached.
        """
        return self.store.purge(selection, self.time.now_ms())

    def forget(self, entry_id: str) -> bool:
        """Removes one answer by the id it was given out with; false where there is none.

        Raises:
            StoreError: the store cannot be reached.
        """
        key = key_of(entry_id)
        return key is not None and self.store.forget(key).num_entries > 0

    def uses(self) -> list[Use]:
        """What is kept, and for whom.

        Raises:
            StoreError: the store cannot be reached.
        """
        return self.store.uses()

    def close(self) -> None:
        """Writes what waits to be written, and closes the store."""
        self.clerk.do(self._tidy_alone, must=True)
        self.clerk.close()
        self.store.close()
