"""One call for many: who gets what, whoever leaves and whatever fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from ostinato.errors import EngineError, OstinatoError, QueueFullError
from ostinato.responses.flight import MAX_TAKEOVERS, Flight

Sink = Callable[[str], None]


class Words:
    """Answers in words; ``.`` ends one, ``!`` fails one."""

    def ends(self, piece: str) -> bool:
        return piece == "."

    def fails(self, piece: str) -> bool:
        return piece.startswith("!")

    def last_of(self, piece: str) -> str:
        return piece

    def failure(self, error: OstinatoError) -> str:
        return f"!{error}"

    def is_same(self, one: str, other: str) -> bool:
        return one.lower() == other.lower()


@dataclass
class Line:
    """Calls as they are made, to be answered by hand; work that was put off is done by hand as well."""

    sinks: list[Sink] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    refusals: list[OstinatoError] = field(default_factory=list)
    deferred: list[Callable[[], None]] = field(default_factory=list)
    landed: list[list[str]] = field(default_factory=list)
    num_crashed: int = 0
    takes_work: bool = True

    def make(self, sink: Sink) -> Call:
        if self.refusals:
            raise self.refusals.pop(0)
        self.sinks.append(sink)
        return Call(self, len(self.sinks) - 1)

    def flight(self) -> Flight[str]:
        return Flight(self.make, Words(), landed=self._land, crashed=self._crash, defer=self._defer)

    def say(self, *pieces: str, call: int = -1) -> None:
        for piece in pieces:
            self.sinks[call](piece)

    def work(self) -> None:
        while self.deferred:
            self.deferred.pop(0)()

    def _land(self, pieces: Sequence[str]) -> None:
        self.landed.append(list(pieces))

    def _crash(self) -> None:
        self.num_crashed += 1

    def _defer(self, work: Callable[[], None]) -> bool:
        if self.takes_work:
            self.deferred.append(work)
        return self.takes_work


@dataclass
class Call:
    line: Line
    number: int

    def cancel(self) -> None:
        self.line.cancelled.append(self.number)


class Reader:
    """One who waits."""

    def __init__(self, flight: Flight[str], *, starts: bool = True) -> None:
        self.got: list[str] = []
        passenger = flight.join()
        assert passenger is not None
        self.passenger = passenger
        if starts:
            self.passenger.start(self.got.append)


def test_everyone_gets_everything_whenever_they_come() -> None:
    line = Line()
    flight = line.flight()
    first, waiting = Reader(flight), Reader(flight, starts=False)
    flight.take_off()
    line.say("a")
    second = Reader(flight)
    line.say("b", ".")
    late = Reader(flight)
    waiting.passenger.start(waiting.got.append)
    assert first.got == second.got == late.got == waiting.got == ["a", "b", "."]
    assert line.landed == [["a", "b", "."]]
    assert (len(line.sinks), line.cancelled, line.num_crashed) == (1, [], 0)
    line.say("c", call=0)
    assert first.got == ["a", "b", "."]


def test_who_leaves_takes_nothing_from_the_others() -> None:
    line = Line()
    flight = line.flight()
    leader, follower = Reader(flight), Reader(flight)
    flight.take_off()
    line.say("a")
    leader.passenger.cancel()
    leader.passenger.cancel()
    line.say("b", ".")
    assert (leader.got, follower.got) == (["a"], ["a", "b", "."])
    assert line.cancelled == []
    assert line.landed


def test_the_call_ends_when_the_last_one_leaves() -> None:
    line = Line()
    flight = line.flight()
    readers = [Reader(flight) for _ in range(3)]
    flight.take_off()
    for reader in readers:
        assert line.cancelled == []
        reader.passenger.cancel()
    assert (line.cancelled, line.num_crashed) == ([0], 1)
    assert flight.join() is None
    line.say("a", ".")
    assert line.landed == []


def test_a_follower_takes_over_when_the_leader_fails() -> None:
    line = Line()
    flight = line.flight()
    leader, second, third = Reader(flight), Reader(flight), Reader(flight)
    flight.take_off()
    line.say("a", "!broken")
    assert leader.got == ["a", "!broken"]
    assert line.cancelled == [0]
    line.say("of the old call", call=0)
    line.work()
    fourth = Reader(flight)
    line.say("of the old call", ".", call=0)
    assert second.got == third.got == fourth.got == ["a"]
    line.say("A", "b", ".")
    assert second.got == third.got == fourth.got == ["a", "b", "."]
    assert leader.got == ["a", "!broken"]
    assert line.landed == [["a", "b", "."]]


def test_what_comes_again_has_to_be_what_came_before() -> None:
    line = Line()
    flight = line.flight()
    leader, second = Reader(flight), Reader(flight)
    flight.take_off()
    line.say("a", "b", "!broken")
    line.work()
    line.say("a", "x")
    assert leader.got == ["a", "b", "!broken"]
    assert second.got[:2] == ["a", "b"]
    assert second.got[2].startswith("!")
    assert len(second.got) == 3
    assert (line.cancelled, line.num_crashed, line.landed) == ([0, 1], 1, [])
    assert flight.join() is None


def test_a_shorter_second_answer_is_another_one() -> None:
    line = Line()
    flight = line.flight()
    Reader(flight)
    second = Reader(flight)
    flight.take_off()
    line.say("a", "b", "!broken")
    line.work()
    line.say("a", ".")
    assert second.got[-1].startswith("!")
    assert line.landed == []


def test_what_fails_again_and_again_fails_for_all() -> None:
    line = Line()
    flight = line.flight()
    readers = [Reader(flight) for _ in range(MAX_TAKEOVERS + 3)]
    flight.take_off()
    for attempt in range(MAX_TAKEOVERS + 1):
        line.say(f"!{attempt}")
        line.work()
    assert [reader.got for reader in readers] == [["!0"], ["!1"], ["!2"], ["!2"], ["!2"]]
    assert (len(line.sinks), line.num_crashed) == (MAX_TAKEOVERS + 1, 1)
    assert flight.join() is None


def test_a_refused_leader_is_told_and_another_one_tries() -> None:
    line = Line(refusals=[QueueFullError("full", retry_after_s=1)])
    flight = line.flight()
    Reader(flight, starts=False)
    second = Reader(flight)
    with pytest.raises(QueueFullError):
        flight.take_off()
    line.work()
    line.say("a", ".")
    assert second.got == ["a", "."]


def test_a_refused_takeover_is_told_to_who_waits() -> None:
    line = Line()
    flight = line.flight()
    readers = [Reader(flight) for _ in range(3)]
    flight.take_off()
    line.refusals = [EngineError("gone"), EngineError("gone")]
    line.say("!broken")
    line.work()
    assert [reader.got for reader in readers] == [["!broken"], ["!gone"], ["!gone"]]
    assert line.num_crashed == 1


def test_where_nobody_can_try_again_everyone_is_told() -> None:
    line = Line(takes_work=False)
    flight = line.flight()
    readers = [Reader(flight) for _ in range(3)]
    flight.take_off()
    line.say("!broken")
    assert [reader.got for reader in readers] == [["!broken"]] * 3
    assert line.num_crashed == 1


def test_a_place_that_is_never_taken_keeps_nobody() -> None:
    line = Line()
    flight = line.flight()
    leader, absent = Reader(flight), Reader(flight, starts=False)
    flight.take_off()
    line.say("a", "!broken")
    line.work()
    assert leader.got == ["a", "!broken"]
    absent.passenger.start(absent.got.append)
    line.say("a", "b", "!again")
    assert absent.got == ["a", "b", "!again"]
    assert line.num_crashed == 1


def test_a_takeover_that_nobody_needs_any_more_is_not_made() -> None:
    line = Line()
    flight = line.flight()
    Reader(flight)
    second = Reader(flight)
    flight.take_off()
    line.say("!broken")
    second.passenger.cancel()
    line.work()
    assert (len(line.sinks), line.num_crashed) == (1, 1)


def test_a_sink_may_leave() -> None:
    line = Line()
    flight = line.flight()
    reader = Reader(flight, starts=False)
    other = Reader(flight)
    got: list[str] = []

    def sink(piece: str) -> None:
        got.append(piece)
        reader.passenger.cancel()

    reader.passenger.start(sink)
    flight.take_off()
    line.say("a", "b", ".")
    assert got == ["a"]
    assert other.got == ["a", "b", "."]


def test_a_call_that_answers_at_once() -> None:
    landed: list[list[str]] = []

    def make(sink: Sink) -> Call:
        for piece in ("a", "."):
            sink(piece)
        return Call(line, 0)

    line = Line()
    flight = Flight(
        make, Words(), landed=lambda p: landed.append(list(p)), crashed=lambda: None, defer=lambda w: True
    )
    reader = Reader(flight)
    flight.take_off()
    assert reader.got == ["a", "."]
    assert landed == [["a", "."]]
