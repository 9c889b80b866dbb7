"""The router's books against naive ones, and its bounds, under any order of events."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from ostinato.routing import STRATEGIES, Ask, PrefixMap, Ring, Router, RoutingRule, Ticket

NAMES = ["a", "b", "c", "d"]
# Prefixes of a few trees: two of them share their first block.
CHAINS = [tuple(range(base, base + length)) for base in (0, 100, 200) for length in (1, 2, 4, 7)]
CHAINS += [(0, 1, 300, 301), (0, 400), ()]


class NaiveMap:
    """The same by looking at everything."""

    def __init__(self) -> None:
        self.held: dict[int, OrderedDict[int, None]] = {}
        self.capacity: dict[int, int] = {}

    def stored(self, worker: int, names: tuple[int, ...]) -> None:
        order = self.held[worker]
        for name in names[::-1]:
            order.pop(name, None)
            order[name] = None
        while len(order) > self.capacity[worker]:
            order.popitem(last=False)

    def depth(self, worker: int, names: tuple[int, ...]) -> int:
        for depth, name in enumerate(names):
            if name not in self.held[worker]:
                return depth
        return len(names)


class MapMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.naive = PrefixMap(), NaiveMap()

    @rule(worker=st.integers(0, 3), capacity=st.integers(1, 9))
    def add_or_drop(self, worker: int, capacity: int) -> None:
        if worker in self.naive.held:
            self.map.drop(worker)
            del self.naive.held[worker]
        else:
            self.map.add(worker, capacity)
            self.naive.held[worker], self.naive.capacity[worker] = OrderedDict(), capacity

    @precondition(lambda self: self.naive.held)
    @rule(data=st.data(), names=st.sampled_from(CHAINS))
    def stored(self, data: st.DataObject, names: tuple[int, ...]) -> None:
        worker = data.draw(st.sampled_from(sorted(self.naive.held)))
        self.map.stored(worker, names)
        self.naive.stored(worker, names)

    @precondition(lambda self: self.naive.held)
    @rule(data=st.data(), names=st.lists(st.sampled_from([0, 1, 2, 101, 301, 400, 999]), max_size=4))
    def removed(self, data: st.DataObject, names: list[int]) -> None:
        worker = data.draw(st.sampled_from(sorted(self.naive.held)))
        self.map.removed(worker, names)
        for name in names:
            self.naive.held[worker].pop(name, None)

    @precondition(lambda self: self.naive.held)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.naive.held)))
        self.map.clear(worker)
        self.naive.held[worker].clear()

    @invariant()
    def says_the_same(self) -> None:
        self.map.check_integrity()
        for names in CHAINS:
            found = list(self.map.depths(names))
            assert [depth for depth, _ in found] == sorted({depth for depth, _ in found})
            said = {worker: depth for depth, mask in found for worker in range(4) if mask >> worker & 1}
            wanted = {worker: self.naive.depth(worker, names) for worker in self.naive.held}
            assert said == {worker: depth for worker, depth in wanted.items() if depth}


TestMap = MapMachine.TestCase
TestMap.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class RouterMachine(RuleBasedStateMachine):
    """Loads are what is under way; whoever is chosen is open, and not loaded above the bound."""

    tickets: Bundle[tuple[str, int, Ticket, int]] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.rule = RoutingRule(slack_tokens=500, evenness=0.5, decode_tokens=10, max_sessions=3)
        self.router = Router(self.rule, block_tokens=100, now_s=lambda: self.now_s)
        self.open: dict[str, bool] = {}
        self.waiting: Counter[tuple[str, int]] = Counter()
        self.decoding: Counter[tuple[str, int]] = Counter()
        self.life: Counter[str] = Counter()

    @rule(name=st.sampled_from(NAMES), is_open=st.booleans())
    def join_or_set(self, name: str, is_open: bool) -> None:
        if name not in self.open:
            self.router.add(name, num_blocks=8)
            self.life[name] += 1
            is_open = True
        self.router.set_open(name, is_open)
        self.open[name] = is_open

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.router.remove(name)
        del self.open[name]

    @rule(seconds=st.sampled_from([1.0, 5000.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        target=tickets,
        names=st.sampled_from(CHAINS),
        session=st.sampled_from(["", "s", "t", "u", "v"]),
        but=st.sets(st.sampled_from(NAMES), max_size=2),
    )
    def ask(self, names: tuple[int, ...], session: str, but: set[str]) -> object:
        ask = Ask(names, 100 * len(names) + 50, session)
        choice = self.router.choose(ask, but=but)
        able = {name for name, is_open in self.open.items() if is_open} - but
        if not able:
            assert choice is None
            return multiple()
        assert choice is not None
        assert choice.worker in able
        assert 0 <= choice.hit_tokens < ask.num_tokens
        lowest = min(self.router.load_of(name) for name in able)
        load = self.router.load_of(choice.worker)
        assert load <= max(lowest, self.router.bound(ask.num_tokens))
        ticket = self.router.begin(ask, choice)
        left = ask.num_tokens - choice.hit_tokens
        self.waiting[choice.worker, self.life[choice.worker]] += left
        return choice.worker, self.life[choice.worker], ticket, left

    @rule(held=consumes(tickets), with_token=st.booleans())
    def end(self, held: tuple[str, int, Ticket, int], with_token: bool) -> None:
        name, life, ticket, left = held
        if with_token:
            ticket.first_token()
            ticket.first_token()
            self.waiting[name, life] -= left
            self.decoding[name, life] += 1
            self.loads_add_up()
            self.decoding[name, life] -= 1
        else:
            self.waiting[name, life] -= left
        ticket.end()
        ticket.end()

    @invariant()
    def loads_add_up(self) -> None:
        self.router.prefixes.check_integrity()
        assert set(self.router.workers) == set(self.open)
        for name in self.open:
            now = name, self.life[name]
            assert self.router.load_of(name) == self.waiting[now] + 10 * self.decoding[now]


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def router(*, strategy: str = "prefix", workers: int = 4, **values: float) -> Router:
    made = Router(RoutingRule(strategy, **values), block_tokens=100, now_s=lambda: 0.0)  # type: ignore[arg-type]
    for number in range(workers):
        made.add(f"w{number}", num_blocks=1000)
    return made


def test_a_prefix_goes_where_it_is_until_that_costs_more_than_it_gains() -> None:
    made = router(hit_weight=1.0, slack_tokens=10**9)
    first = Ask((1, 2, 3, 4), 450)
    home = made.choose(first)
    assert home is not None
    made.begin(first, home).end()
    again = made.choose(Ask((1, 2, 3, 4, 5), 550))
    assert again is not None
    assert (again.worker, again.hit_tokens, again.reason) == (home.worker, 400, "prefix")
    made.begin(Ask((9,), 401), again.__class__(home.worker, 0, "prefix"))
    away = made.choose(Ask((1, 2, 3, 4, 5), 550))
    assert away is not None
    assert away.worker != home.worker
    assert away.reason == "load"


def test_nobody_becomes_a_hot_spot() -> None:
    """All the world asks for one long prefix, and nothing ends: no worker gets more than its share and the
    slack, whatever a hit is worth."""
    made = router(hit_weight=1000.0, slack_tokens=2000, evenness=0.25)
    for number in range(400):
        ask = Ask((*range(20), 1000 + number), 2100)
        choice = made.choose(ask)
        assert choice is not None
        made.begin(ask, choice)
    loads = [made.load_of(name) for name in made.workers]
    assert max(loads) <= 1.25 * sum(loads) / 4 + 2000 + 2100


def test_a_session_stays_where_it_was_though_the_map_forgot() -> None:
    made = router()
    ask = Ask((1, 2, 3), 350, "talk")
    home = made.choose(ask)
    assert home is not None
    made.begin(ask, home).end()
    made.forget(home.worker)
    again = made.choose(Ask((1, 2, 3, 4), 450, "talk"))
    assert again is not None
    assert (again.worker, again.reason) == (home.worker, "session")


def test_two_routers_that_never_met_agree_and_keep_agreeing_when_one_worker_leaves() -> None:
    one, other = router(workers=8), router(workers=8)
    asks = [Ask((i, i + 1, i + 2), 350) for i in range(0, 3000, 3)]
    before = [one.choose(ask) for ask in asks]
    assert before == [other.choose(ask) for ask in asks]
    shares = Counter(choice.worker for choice in before if choice is not None)
    assert max(shares.values()) < 1.6 * len(asks) / 8
    other.remove("w3")
    for was, now in zip(before, [other.choose(ask) for ask in asks], strict=True):
        assert was is not None
        assert now is not None
        assert now.worker == was.worker or was.worker == "w3"


@given(st.sets(st.text(max_size=4), min_size=1, max_size=6), st.integers(0, 2**64 - 1))
def test_a_ring_names_everybody_once(names: set[str], key: int) -> None:
    ring = Ring()
    for name in names:
        ring.add(name)
    assert sorted(ring.walk(key)) == sorted(names)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_passes_over_the_closed_and_the_excluded(strategy: str) -> None:
    made, chance = router(strategy=strategy), random.Random(1)
    made.set_open("w1", False)
    for _ in range(50):
        ask = Ask((chance.randrange(9),), 120, chance.choice(["", "x"]))
        choice = made.choose(ask, but={"w2"})
        assert choice is not None
        assert choice.worker in {"w0", "w3"}
        made.begin(ask, choice)
    assert made.choose(Ask((1,), 120), but={"w0", "w2", "w3"}) is None
