"""What planned breakpoints cost, beside none at all and beside a bound on what anybody could reach.

Simulated days of requests to one model, with random gaps, one after the other. The vendor is the strict
simulator: what it bills is what is compared, input only (output costs the same whatever is cached). The
planner begins knowing nothing, sees one request at a time and nothing of the future.

The bound knows all of it. For every conversation it chooses the best time to live of every turn (dynamic
programming over the entries that are alive); so it does for beginnings that conversations share, which a turn
may also read with its own conversation's entry, at no price of its own; it never lacks breakpoints. No plan
costs less: the planner is at least as near to the optimum as to this bound. To read again only to keep an
entry alive is not among the choices of either; what that saves on top (``keep_alive``, as the gateway does it
where it is allowed) is told apart, beside the same bound.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import cache

from common import finish
from ostinato.providers.keep_alive import keep_alive
from ostinato.providers.planner import History, plan, relative_cost
from ostinato.providers.rules import CacheRules, builtin_table
from ostinato.providers.shape import Block, Chain, Prompt, digest_of
from ostinato.providers.simulator import Asked, VendorCache, with_markers

DAY_S = 86_400.0
FIRST_TOKEN_S = 1.5
MAX_TIMES = 12  # the gateway's


@dataclass(frozen=True)
class Turn:
    at_s: float
    prompt: Prompt


@dataclass(frozen=True)
class Conversation:
    """``shared`` blocks at the beginning of every turn are other conversations', too."""

    turns: tuple[Turn, ...]
    shared: int


class Maker:
    """Conversations out of random numbers."""

    def __init__(self, chance: random.Random, model: str, vendor: str) -> None:
        self.chance, self.model, self.vendor = chance, model, vendor
        self.num_made = 0
        self._shared: dict[tuple[int, int], list[Block]] = {}

    def block(self, kind: str, tokens: float, role: str = "", level: str = "messages") -> Block:
        self.num_made += 1
        digest = digest_of(self.num_made.to_bytes(8, "little"))
        can_mark = role != "assistant" or self.vendor != "openai"
        size = max(1, int(tokens))
        return Block(level, kind, digest, size, can_mark=can_mark, role=role, ends_message=True)  # type: ignore[arg-type]

    def shared(self, tools: int, system: int) -> list[Block]:
        """The same every day: an application's own."""
        if (tools, system) not in self._shared:
            made = [self.block("tool", 220, level="tools") for _ in range(tools)]
            made += [self.block("text", system, level="system")] if system else []
            self._shared[tools, system] = made
        return self._shared[tools, system]

    def prompt(self, blocks: list[Block]) -> Prompt:
        return Prompt(self.vendor, self.model, tuple(blocks))

    def lognormal(self, median: float, sigma: float) -> float:
        return self.chance.lognormvariate(0.0, sigma) * median

    def chat(self, shared: list[Block], start_s: float, turns: int, gap: Callable[[], float]) -> Conversation:
        blocks, made, at_s = list(shared), [], start_s
        for _ in range(turns):
            blocks.append(self.block("text", self.lognormal(120, 0.9), "user"))
            made.append(Turn(at_s, self.prompt(blocks)))
            blocks.append(self.block("text", self.lognormal(350, 0.6), "assistant"))
            at_s += max(4.0, gap())
        return Conversation(tuple(made), len(shared))

    def agent(self, shared: list[Block], start_s: float, steps: int, *, parallel: int = 1) -> Conversation:
        blocks, made, at_s = list(shared), [], start_s
        blocks.append(self.block("text", self.lognormal(900, 0.5), "user"))
        for step in range(steps):
            made.append(Turn(at_s, self.prompt(blocks)))
            at_s += max(3.0, self.lognormal(9, 0.8))
            if step and step % 12 == 0:  # somebody looks at it and says how to go on
                blocks.append(self.block("text", 500, "assistant"))
                blocks.append(self.block("text", 150, "user"))
                at_s += self.lognormal(90, 0.8)
                continue
            many = parallel if self.chance.random() < 0.3 else 1
            for _ in range(many):  # text between calls: nothing collapses
                blocks.append(self.block("text", 40, "assistant"))
                blocks.append(self.block("tool_use", 90, "assistant"))
            for _ in range(many):
                blocks.append(self.block("tool_result", self.lognormal(500, 1.0), "user"))
        return Conversation(tuple(made), len(shared))


def poisson(chance: random.Random, per_day: float, *, busy_s: float = DAY_S) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += chance.expovariate(per_day / busy_s)
        if at_s >= busy_s:
            return
        yield at_s


def later(conversations: list[Conversation], by_s: float) -> list[Conversation]:
    return [
        replace(one, turns=tuple(Turn(turn.at_s + by_s, turn.prompt) for turn in one.turns))
        for one in conversations
    ]


def support(make: Maker) -> list[Conversation]:
    """People ask an assistant with tools; a minute between turns, sometimes much more."""
    shared = make.shared(12, 1800)
    return [
        make.chat(shared, at, 1 + int(make.chance.expovariate(1 / 5)), lambda: make.lognormal(50, 0.8))
        for at in poisson(make.chance, 150)
    ]


def agents(make: Maker) -> list[Conversation]:
    """Long tool loops, one call at a time."""
    shared = make.shared(20, 3000)
    return [make.agent(shared, at, make.chance.randint(15, 60)) for at in poisson(make.chance, 25)]


def fan_outs(make: Maker) -> list[Conversation]:
    """Tool loops that call up to 15 tools at once: more than 20 positions in one turn."""
    shared = make.shared(20, 3000)
    return [
        make.agent(shared, at, make.chance.randint(15, 40), parallel=15) for at in poisson(make.chance, 15)
    ]


def documents(make: Maker) -> list[Conversation]:
    """One question each about one of a few long documents, in batches."""
    found = []
    system = make.shared(0, 1200)
    for _ in range(8):
        document = [
            *system,
            replace(make.block("text", make.lognormal(9000, 0.4), "user"), ends_message=False),
        ]
        start_s = make.chance.uniform(0, DAY_S * 0.9)
        for number in range(make.chance.randint(15, 50)):
            at_s = start_s + number * make.lognormal(20, 0.3)
            turn = Turn(at_s, make.prompt([*document, make.block("text", 80, "user")]))
            found.append(Conversation((turn,), len(document)))
    return found


def cadence(make: Maker) -> list[Conversation]:
    """A monitor with a long context looks every twelve minutes, give or take."""
    shared = make.shared(8, 6000)
    found = []
    at_s = 0.0
    while at_s < DAY_S:
        turn = Turn(at_s, make.prompt([*shared, make.block("text", 600, "user")]))
        found.append(Conversation((turn,), len(shared)))
        at_s += make.lognormal(720, 0.15)
    return found


def reviews(make: Maker) -> list[Conversation]:
    """Slow conversations: about a quarter of an hour between turns."""
    shared = make.shared(6, 2000)
    return [
        make.chat(shared, at, make.chance.randint(3, 14), lambda: make.lognormal(900, 0.45))
        for at in poisson(make.chance, 60)
    ]


def one_shots(make: Maker) -> list[Conversation]:
    """Nothing ever comes back."""
    return [
        Conversation((Turn(at, make.prompt([make.block("text", make.lognormal(3000, 0.5), "user")])),), 0)
        for at in poisson(make.chance, 400)
    ]


def mixed_gaps(make: Maker) -> list[Conversation]:
    """The hard one: three minutes between turns, give or take so much that a third come too late."""
    shared = make.shared(12, 1800)
    return [
        make.chat(shared, at, 1 + int(make.chance.expovariate(1 / 6)), lambda: make.lognormal(180, 1.0))
        for at in poisson(make.chance, 150)
    ]


TRAFFIC = (support, agents, fan_outs, documents, cadence, reviews, one_shots, mixed_gaps)


# ---------------------------------------------------------------- what it costs


class Keeping:
    """What the gateway's keeper does: what would expire is read once more, where that is likely to pay."""

    def __init__(self, history: History, vendor: VendorCache) -> None:
        self._history, self._vendor = history, vendor
        self._due: list[tuple[float, int, bytes, int, Prompt]] = []
        self._latest: dict[bytes, int] = {}
        self._place: dict[bytes, tuple[Chain, int]] = {}
        self._number = 0

    def follow(self, asked: Asked, prompt: Prompt, now_s: float, num_times: int = 0) -> None:
        for digest in asked.chain.digests[:-1]:
            self._latest.pop(digest, None)
        places = [*asked.writes, *([] if asked.hit is None else [asked.hit])]
        if not places:
            return
        place = max(places)
        digest = asked.chain.digests[place]
        self._place[digest] = asked.chain, place
        advice = keep_alive(self._history, asked.chain, place, now_s)
        if advice is not None and num_times < MAX_TIMES:
            self._number += 1
            self._latest[digest] = self._number
            heapq.heappush(self._due, (advice.at_s, self._number, digest, num_times, prompt))

    def until(self, now_s: float) -> float:
        """Keep what is due; what that cost."""
        cost = 0.0
        while self._due and self._due[0][0] <= now_s:
            at_s, number, digest, num_times, prompt = heapq.heappop(self._due)
            if self._latest.get(digest) != number:
                continue
            advice = keep_alive(self._history, *self._place[digest], at_s)
            if advice is None:
                continue
            if advice.at_s > at_s:  # somebody else has read it
                heapq.heappush(self._due, (advice.at_s, number, digest, num_times, prompt))
            elif advice.pays:
                asked = self._vendor.ask(prompt, at_s)
                self._vendor.commit(asked, at_s)
                self._history.kept_alive(prompt, at_s)
                cost += relative_cost(asked.use, self._vendor.rules)
                self.follow(self._history.cache.ask(prompt, at_s, is_peek=True), prompt, at_s, num_times + 1)
        return cost


def planned_costs(
    days: list[list[Conversation]], rules: CacheRules, *, keeps_alive: bool = False
) -> list[float]:
    """All requests in the order of time through the planner and the strict vendor: the cost of every day."""
    history, vendor = History(rules), VendorCache(rules)
    turns = [(turn, day) for day, found in enumerate(days) for one in found for turn in one.turns]
    queue = [(turn.at_s, number, turn.prompt, day) for number, (turn, day) in enumerate(turns)]
    heapq.heapify(queue)
    begun: list[tuple[float, int, Asked, Asked, Prompt]] = []
    keeping = Keeping(history, vendor)
    costs, number = [0.0] * len(days), len(queue)
    while queue:
        now_s, _, prompt, day = heapq.heappop(queue)
        while begun and begun[0][0] <= now_s:
            at_s, _, ours, theirs, before = heapq.heappop(begun)
            history.begun(ours, at_s)
            vendor.commit(theirs, at_s)
            if keeps_alive:
                keeping.follow(ours, before, at_s)
        costs[day] += keeping.until(now_s)
        decided = plan(prompt, history, now_s)
        number += 1
        if decided.wait_for is not None:  # what the gateway does: a moment later
            heapq.heappush(queue, (now_s + 0.5, number, prompt, day))
            continue
        sent = replace(with_markers(prompt, decided.markers), is_explicit=decided.is_explicit)
        ours, theirs = history.sent(sent, now_s), vendor.ask(sent, now_s)
        costs[day] += relative_cost(theirs.use, rules)
        heapq.heappush(begun, (now_s + FIRST_TOKEN_S, number, ours, theirs, sent))
    return costs


def plain_cost(conversations: list[Conversation]) -> float:
    return float(sum(turn.prompt.num_tokens for one in conversations for turn in one.turns))


def bound(conversations: list[Conversation], rules: CacheRules) -> float:
    """Less than any plan can cost, by rather little."""
    total = 0.0
    longest_s = max(known.seconds for known in rules.ttl)
    shared: dict[bytes, tuple[int, list[tuple[float, bool]]]] = {}
    for one in conversations:
        blocks = one.turns[0].prompt.blocks[: one.shared]
        base = sum(block.num_tokens for block in blocks)
        if base:
            times = shared.setdefault(blocks[-1].digest, (base, []))[1]
            before_s = -math.inf
            for turn in one.turns:
                times.append((turn.at_s, turn.at_s - before_s <= longest_s))
                before_s = turn.at_s
        lengths = tuple(turn.prompt.num_tokens - base for turn in one.turns)
        total += _best(lengths, tuple(turn.at_s for turn in one.turns), rules)
    for base, times in shared.values():
        total += base * _shared_best(sorted(times), rules)
    return total


def _shared_best(times: list[tuple[float, bool]], rules: CacheRules) -> float:
    """What one token of a shared beginning costs at least, over all requests that have it.

    A turn whose conversation was here within the longest time (``True``) may read it with its own entry; all
    others need an entry that somebody wrote, of which every request is taken to renew the time.
    """
    read, lives = float(rules.read), [(known.seconds, float(known.write)) for known in rules.ttl]
    costs: dict[tuple[bool, ...], float] = {(False,) * len(lives): 0.0}
    before_s = -math.inf
    for at_s, is_own in times:
        after: dict[tuple[bool, ...], float] = {}
        for kept, cost in costs.items():
            alive = tuple(is_kept and at_s - before_s <= lives[at][0] for at, is_kept in enumerate(kept))
            choices = [(alive, read if is_own or any(alive) else 1.0)]
            choices += [
                (tuple(is_kept or at == written for at, is_kept in enumerate(alive)), lives[written][1])
                for written in range(len(lives))
            ]
            for then, price in choices:
                after[then] = min(after.get(then, math.inf), cost + price)
        costs, before_s = after, at_s
    return min(costs.values())


def _best(lengths: tuple[int, ...], times: tuple[float, ...], rules: CacheRules) -> float:
    read = float(rules.read)
    lives = [(known.seconds, float(known.write)) for known in rules.ttl]

    @cache
    def cost(turn: int, kept: tuple[int, ...]) -> float:
        """The rest of the conversation. ``kept``: up to where each lifetime's longest entry goes, now."""
        if turn == len(lengths):
            return 0.0
        length, cached = lengths[turn], max(kept)
        gap_s = times[turn + 1] - times[turn] if turn + 1 < len(times) else 0.0
        best = None
        for choice in (None, *range(len(lives))):
            after = list(kept)
            now = cached * read + (length - cached) * (1.0 if choice is None else lives[choice][1])
            if choice is not None:
                after[choice] = length
            alive = tuple(end if lives[at][0] > gap_s else 0 for at, end in enumerate(after))
            whole = now + cost(turn + 1, alive)
            best = whole if best is None else min(best, whole)
        assert best is not None
        return best

    found = cost(0, (0,) * len(lives))
    cost.cache_clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=5, help="days of every kind of traffic")
    parser.add_argument("--model", default="claude-opus-4-8")
    options = parser.parse_args()
    rules = builtin_table().rules("anthropic", options.model, date(2026, 12, 1))
    details = []
    for traffic in TRAFFIC:
        make = Maker(random.Random(traffic.__name__), options.model, "anthropic")
        days = [later(traffic(make), day * DAY_S) for day in range(options.days)]
        ours, none = planned_costs(days, rules), [plain_cost(day) for day in days]
        kept = planned_costs(days, rules, keeps_alive=True)
        optimum = bound([one for day in days for one in day], rules)
        row = {
            "traffic": traffic.__name__,
            "requests_per_day": sum(len(one.turns) for day in days for one in day) // len(days),
            "cost_vs_none": round(sum(ours) / sum(none), 4),
            "worst_day_vs_none": round(max(a / b for a, b in zip(ours, none, strict=True)), 4),
            "cost_vs_optimum": round(sum(ours) / optimum, 4),
            "keep_alive_vs_none": round(sum(kept) / sum(none), 4),
            "keep_alive_vs_optimum": round(sum(kept) / optimum, 4),
        }
        details.append(row)
        print(
            f"{row['traffic']:12}{row['requests_per_day']:6} requests a day: {row['cost_vs_none']:.3f} of no "
            f"caching, worst day {row['worst_day_vs_none']:.3f}; {row['cost_vs_optimum']:.3f} of the bound, "
            f"{row['keep_alive_vs_optimum']:.3f} kept alive",
            flush=True,
        )
    headline = {
        "cost_vs_none": round(statistics.mean(row["cost_vs_none"] for row in details), 4),
        "worst_vs_none": max(row["worst_day_vs_none"] for row in details),
        "cost_vs_optimum": round(statistics.mean(row["cost_vs_optimum"] for row in details), 4),
        "keep_alive_vs_optimum": round(statistics.mean(row["keep_alive_vs_optimum"] for row in details), 4),
        "days": options.days,
    }
    finish("planner", headline, {"rows": details, "model": options.model})


if __name__ == "__main__":
    main()
