"""The exact cache over a real store, with answers in words: what is kept, for how long, and what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ostinato.errors import QueueFullError, StoreError
from ostinato.events import AnswerFiled, AnswerMissed, Event
from ostinato.kv.terms import Selection, tenant_id
from ostinato.responses.exact import Asked, Exact, Found, Joined, Missing, id_of, key_of
from ostinato.responses.stores.base import Absent, Entry, Limits, Store
from ostinato.responses.stores.sqlite import SqliteStore
from ostinato.types import CacheControl
from responses.test_flight import Call, Line, Words


class WordForm(Words):
    def encode(self, pieces: Sequence[str]) -> bytes:
        return " ".join(pieces).encode()

    def decode(self, data: bytes) -> list[str]:
        words = data.decode().split(" ")
        if words[-1] != ".":
            raise ValueError("no end")
        return words


class HandClock:
    """The wall clock and the other one, moved by hand."""

    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1_000_000.0, 50.0

    def now(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.monotonic_s

    def pass_time(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


class Desk:
    """A cache, and whoever asks it."""

    def __init__(
        self, path: Path | None, clock: HandClock, store: Store | None = None, **options: float
    ) -> None:
        self.events: list[Event] = []
        self.clock = clock
        self.store = store or SqliteStore(path, limits=Limits(), now_ms=int(clock.now() * 1000))
        self.cache = Exact(self.store, WordForm(), clock, observer=self.events.append, **options)
        self.line = Line()

    def ask(self, asked: Asked, answer: str | None = "a b .", *, is_fit: bool = True) -> str:
        """One request, answered by hand where it is not otherwise: who answered, and what."""
        found = self.cache.find(asked)
        if isinstance(found, Missing):
            found = self.cache.lead(asked, found, self.line.make, lambda pieces: is_fit)
        if isinstance(found, Found):
            return f"kept: {' '.join(found.pieces)}"
        got: list[str] = []
        found.passenger.start(got.append)
        if found.is_leader and answer is not None:
            self.line.say(*answer.split(" "))
            self.cache.clerk.flush(10)
        return f"{'made' if found.is_leader else 'joined'}: {' '.join(got)}"

    def missed(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, AnswerMissed)]

    def fates(self) -> list[str]:
        return [event.fate for event in self.events if isinstance(event, AnswerFiled)]


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def desk(tmp_path: Path, clock: HandClock) -> Iterator[Desk]:
    desk = Desk(tmp_path / "answers.db", clock)
    yield desk
    desk.cache.close()


KEY = bytes(range(32))
ONE = Asked(KEY)


def test_the_second_one_gets_what_the_first_one_got(desk: Desk) -> None:
    assert desk.ask(ONE) == "made: a b ."
    assert desk.ask(ONE) == "kept: a b ."
    assert desk.ask(Asked(bytes(32))) == "made: a b ."
    assert len(desk.line.sinks) == 2
    assert desk.fates() == ["stored", "stored"]


def test_those_who_come_meanwhile_join(desk: Desk) -> None:
    assert desk.ask(ONE, None) == "made: "
    desk.line.say("a")
    assert desk.ask(ONE) == "joined: a"
    assert desk.ask(Asked(KEY, may_join=False), None) == "made: "
    assert desk.ask(Asked(KEY, control=CacheControl(read=False)), None) == "made: "
    desk.line.say("b", ".", call=0)
    desk.cache.clerk.flush(10)
    assert desk.ask(ONE) == "kept: a b ."


def test_what_is_not_fit_is_not_kept(desk: Desk) -> None:
    assert desk.ask(ONE, is_fit=False) == "made: a b ."
    assert desk.ask(ONE) == "made: a b ."
    assert desk.fates() == ["unfit", "stored"]


def test_failures_are_not_kept(desk: Desk) -> None:
    assert desk.ask(ONE, "a !broken") == "made: a !broken"
    assert desk.ask(ONE, "!broken") == "made: !broken"
    desk.line.refusals = [QueueFullError("full", retry_after_s=1)]
    with pytest.raises(QueueFullError):
        desk.ask(ONE)
    assert desk.ask(ONE) == "made: a b ."
    assert desk.fates() == ["stored"]


def test_an_answer_that_nobody_waited_for_to_its_end_is_not_kept(desk: Desk) -> None:
    found = desk.cache.find(ONE)
    assert isinstance(found, Missing)
    joined = desk.cache.lead(ONE, found, desk.line.make, lambda pieces: True)
    assert isinstance(joined, Joined)
    desk.line.say("a")
    joined.passenger.cancel()
    desk.line.say("b", ".")
    assert desk.line.cancelled == [0]
    assert desk.ask(ONE, "c .") == "made: c ."


@pytest.mark.parametrize(
    ("control", "first", "second"),
    [
        (CacheControl(read=False), "made", "kept"),
        (CacheControl(store=False), "kept", "kept"),
        (CacheControl(read=False, store=False), "made", "kept"),
        (CacheControl(max_age_s=0), "made", "kept"),
        (CacheControl(max_age_s=5), "made", "kept"),
        (CacheControl(max_age_s=11), "kept", "kept"),
    ],
)
def test_what_a_request_says(desk: Desk, control: CacheControl, first: str, second: str) -> None:
    desk.ask(ONE, "old .")
    desk.clock.pass_time(10)
    assert desk.ask(Asked(KEY, control=control), "new .").startswith(first)
    expected = "new ." if first == "made" and control.store else "old ."
    assert desk.ask(ONE) == f"{second}: {expected}"


def test_no_store_leaves_nothing(desk: Desk) -> None:
    desk.ask(Asked(KEY, control=CacheControl(read=False, store=False)))
    assert desk.store.uses() == []
    assert desk.ask(ONE) == "made: a b ."


def test_answers_expire_by_the_shortest_time_said(tmp_path: Path, clock: HandClock) -> None:
    desk = Desk(tmp_path / "answers.db", clock, ttl_s=100.0)
    desk.ask(ONE)
    desk.ask(Asked(bytes(32), ttl_s=20))
    clock.pass_time(19)
    assert desk.ask(Asked(bytes(32)), "new .") == "kept: a b ."
    clock.pass_time(1)
    assert desk.ask(Asked(bytes(32)), "new .") == "made: new ."
    clock.pass_time(79)
    assert desk.ask(ONE) == "kept: a b ."
    clock.pass_time(1)
    assert desk.ask(ONE, "new .") == "made: new ."
    assert desk.missed().count("expired") == 2
    desk.cache.close()


def test_clocks_that_jump_bring_nothing_back(tmp_path: Path, clock: HandClock) -> None:
    desk = Desk(tmp_path / "answers.db", clock, ttl_s=100.0)
    desk.ask(ONE)
    clock.pass_time(99)
    clock.wall_s -= 90  # put back: the answer would seem nine seconds old
    clock.pass_time(1)
    assert desk.ask(ONE, None) == "made: "
    desk.line.say("!end")
    # Run ahead by mistake, and put right: what was stored meanwhile is from the future for everybody else.
    clock.wall_s += 1e6
    desk.ask(Asked(bytes(32)))
    clock.wall_s -= 1e6
    assert desk.ask(Asked(bytes(32))).startswith("kept")
    other = Desk(tmp_path / "answers.db", clock, ttl_s=100.0)
    assert other.ask(Asked(bytes(32)), "fresh .") == "made: fresh ."
    assert other.missed()[0] == "future"
    clock.pass_time(101)
    assert desk.ask(Asked(bytes(32)), "new .").startswith("made")
    desk.cache.close()
    other.cache.close()


def test_purges_take_what_is_being_made_too(desk: Desk) -> None:
    anna = Asked(KEY, tenant=tenant_id("anna"))
    bob = Asked(bytes(32), tenant=tenant_id("bob"))
    desk.ask(anna, None)
    desk.ask(bob, None)
    desk.cache.purge(Selection(tenant=tenant_id("anna")))
    for call in (0, 1):
        desk.line.say("a", ".", call=call)
    desk.cache.clerk.flush(10)
    assert sorted(desk.fates()) == ["refused", "stored"]
    assert desk.ask(bob) == "kept: a ."
    assert desk.ask(anna, "new .") == "made: new ."
    assert desk.ask(anna) == "kept: new ."
    desk.cache.purge(Selection())
    assert desk.ask(bob, "newer .") == "made: newer ."


def test_one_answer_is_forgotten_by_its_id(desk: Desk) -> None:
    desk.ask(ONE)
    desk.ask(Asked(bytes(32)))
    assert desk.cache.forget(id_of(KEY))
    assert not desk.cache.forget(id_of(KEY))
    assert not desk.cache.forget("answer-xyz")
    assert not desk.cache.forget(KEY.hex())
    assert key_of(id_of(KEY)) == KEY
    assert desk.ask(ONE, "new .") == "made: new ."
    assert desk.ask(Asked(bytes(32))) == "kept: a b ."


def test_what_cannot_be_read_is_a_miss_and_goes(desk: Desk) -> None:
    now_ms = int(desk.clock.now() * 1000)
    desk.store.put([Entry("exact", KEY, bytes(32), b"no end", now_ms)], now_ms)
    assert desk.ask(ONE) == "made: a b ."
    assert desk.missed() == ["corrupt"]
    assert desk.ask(ONE) == "kept: a b ."


class BrokenStore(SqliteStore):
    """A store that fails when it is told to."""

    is_broken = False

    def get(self, kind: object, key: bytes, now_ms: int) -> Entry | Absent:  # type: ignore[override]
        self._fail()
        return super().get("exact", key, now_ms)

    def put(self, entries: Sequence[Entry], now_ms: int, epoch: int | None = None) -> int:
        self._fail()
        return super().put(entries, now_ms, epoch)

    def _fail(self) -> None:
        if self.is_broken:
            raise StoreError("unplugged")


def test_no_request_fails_with_the_store(clock: HandClock) -> None:
    store = BrokenStore(None, limits=Limits(), now_ms=0)
    desk = Desk(None, clock, store)
    desk.ask(ONE)
    store.is_broken = True
    assert desk.ask(ONE, "new .") == "made: new ."
    store.is_broken = False
    assert desk.ask(ONE, "new .") == "made: new ."  # left alone for a while
    assert set(desk.missed()) == {"absent", "failed"}
    clock.pass_time(6)
    assert desk.ask(ONE) == "kept: a b ."
    store.is_broken = True
    desk.ask(Asked(bytes(32)))
    assert desk.fates()[-1] == "failed" or desk.fates() == ["stored"]
    assert desk.ask(Asked(b"x" * 32)) == "made: a b ."
    store.is_broken = False
    desk.cache.close()


def test_a_thousand_at_once_make_one_call(tmp_path: Path, clock: HandClock) -> None:
    """From many threads, with answers that are there at once or a little later: never a second call."""
    desk = Desk(tmp_path / "answers.db", clock)
    calls: list[int] = []

    def make(sink: Callable[[str], None]) -> Call:
        calls.append(1)

        def answer() -> None:
            for piece in ("a", "b", "."):
                sink(piece)

        timer = threading.Timer(0.01 * (len(calls) % 2), answer)
        timer.start()
        return Call(desk.line, 0)

    for number in range(20):
        asked = Asked(number.to_bytes(32, "big"))
        results: list[str] = []
        calls.clear()

        def one(asked: Asked = asked, results: list[str] = results) -> None:
            for _ in range(25):
                found = desk.cache.find(asked)
                if isinstance(found, Missing):
                    found = desk.cache.lead(asked, found, make, lambda pieces: True)
                if isinstance(found, Found):
                    results.append(" ".join(found.pieces))
                    continue
                done = threading.Event()
                got: list[str] = []

                def sink(piece: str, got: list[str] = got, done: threading.Event = done) -> None:
                    got.append(piece)
                    if piece == ".":
                        done.set()

                found.passenger.start(sink)
                assert done.wait(20)
                results.append(" ".join(got))

        threads = [threading.Thread(target=one) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == ["a b ."] * 200
        assert len(calls) == 1
    desk.cache.close()


def test_what_was_used_stays(clock: HandClock) -> None:
    size = Entry("exact", KEY, bytes(32), b"a b .", 1).size_bytes
    store = SqliteStore(None, limits=Limits(max_bytes=2 * size), now_ms=0)
    desk = Desk(None, clock, store)
    first, second, third = (Asked(bytes([number]) * 32) for number in range(3))
    desk.ask(first)
    desk.ask(second)
    assert desk.ask(first).startswith("kept")
    desk.ask(third)
    assert desk.ask(first).startswith("kept")
    assert desk.ask(second).startswith("made")
    desk.cache.close()
