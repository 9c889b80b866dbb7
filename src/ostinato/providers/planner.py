"""Where breakpoints pay. Pure: a request, what was sent before, the rules, the time → a plan.

A vendor's cache is a bet: a written prefix costs ``w`` times its tokens now, and pays if it is read, at ``r``
times, before its time is up. The planner bets on what it has seen: how soon prompts of this conversation, and
of this kind, went on; how often this beginning came back. It never adds more breakpoints than may be, never
removes the caller's, and stops betting when bets have cost more than they brought.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, Literal, TypeAlias

from .accounting import TokenUse
from .habits import Gaps, Habits, fresh_places, kind_of
from .rules import CacheRules
from .shape import Chain, Path, Prompt, chain_of
from .simulator import Asked, VendorCache, can_mark, message_endpoints, with_automatic, with_markers

Mode: TypeAlias = Literal["off", "observe", "plan"]

# Before anything was seen: a prompt goes on as often as not, mostly soon.
PRIOR_SOON: Final = 0.5
PRIOR_LATER: Final = 0.6
# What bets may have lost, as a part of what everything would have cost without a cache, and as requests.
MAX_LOSS: Final = 0.01
FREE_BETS: Final = 2.0
# OpenAI sends requests with one key to one machine up to about so many a minute.
REQUESTS_PER_KEY_MINUTE: Final = 15


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a request.

    Attributes:
        markers: breakpoints to add: index of the block → time to live.
        is_explicit: whether the vendor shall place none by itself (newer OpenAI models).
        cache_key: ``prompt_cache_key`` to add; ``None``: none.
        wait_for: the prefix that another request is writing at this moment: this one reads it if it waits
            for that one's first token. ``None``: nothing to wait for.
        expected: what the vendor's cache will make of the request with these breakpoints.
        reasons: why, one sentence each.
    """

    markers: Mapping[int, str] = field(default_factory=dict)
    is_explicit: bool = False
    cache_key: str | None = None
    wait_for: bytes | None = None
    expected: TokenUse = field(default_factory=TokenUse)
    reasons: tuple[str, ...] = ()

    def paths(self, prompt: Prompt) -> dict[Path, str]:
        """The breakpoints by their places in the body."""
        return {prompt.blocks[index].path: ttl for index, ttl in self.markers.items()}


@dataclass(slots=True)
class Rate:
    """Requests with one beginning in this minute, and over how many keys they go: never fewer again."""

    minute_began_s: float
    num_requests: int = 0
    num_keys: int = 1


@dataclass(slots=True)
class History:
    """What was sent before: habits, what the vendor's cache should hold, and what that has cost so far.

    One history is for one model, its rules, and one scope (workspace, API key). ``capacity``: prefixes that
    are remembered at most.
    """

    rules: CacheRules
    capacity: int = 100_000
    habits: Habits = field(init=False)
    cache: VendorCache = field(init=False)
    writing: dict[bytes, int] = field(default_factory=dict)
    without: float = 0.0
    saved: float = 0.0
    largest: float = 0.0
    rates: dict[bytes, Rate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.habits = Habits(capacity=self.capacity)
        self.cache = VendorCache(self.rules, capacity=2 * self.capacity)

    def sent(self, prompt: Prompt, now_s: float) -> Asked:
        """A request is sent, with the breakpoints it has. Raises :class:`ParameterError` as ``ask`` does."""
        asked = self.cache.ask(prompt, now_s)
        self._divide(prompt, asked.chain, now_s)
        self.habits.observe(prompt, asked.chain, now_s)
        self.without += asked.use.input
        self.saved += asked.use.input - relative_cost(asked.use, self.rules)
        self.largest = max(self.largest, asked.use.input)
        for place in asked.writes:
            digest = asked.chain.digests[place]
            self.writing[digest] = self.writing.get(digest, 0) + 1
        return asked

    def _divide(self, prompt: Prompt, chain: Chain, now_s: float) -> None:
        if self.rules.mechanism != "automatic" or not len(chain):
            return
        first = kind_of(prompt, chain, 1)[0] or chain.digests[0]
        rate = self.rates.setdefault(first, Rate(now_s))
        if now_s - rate.minute_began_s > 60:
            rate.minute_began_s, rate.num_requests = now_s, 0
        rate.num_requests += 1
        while rate.num_requests > REQUESTS_PER_KEY_MINUTE * rate.num_keys and rate.num_keys < 64:
            rate.num_keys *= 2
        if len(self.rates) > 10_000:
            del self.rates[next(iter(self.rates))]

    @property
    def size(self) -> int:
        """Prefixes that are remembered: what its memory goes with."""
        return self.habits.size + len(self.cache)

    def kept_alive(self, prompt: Prompt, now_s: float) -> TokenUse:
        """It was sent once more only to be read: nobody's habit, but it has its price."""
        asked = self.cache.ask(prompt, now_s)
        self.saved -= relative_cost(asked.use, self.rules)
        self.cache.commit(asked, now_s)
        return asked.use

    def begun(self, asked: Asked, now_s: float) -> None:
        """Its first token has come: what it wrote can be read."""
        self._forget(asked)
        self.cache.commit(asked, now_s)

    def failed(self, asked: Asked) -> None:
        """It ended without one: nothing was written."""
        self._forget(asked)

    def _forget(self, asked: Asked) -> None:
        for place in asked.writes:
            digest = asked.chain.digests[place]
            left = self.writing.get(digest, 0) - 1
            if left > 0:
                self.writing[digest] = left
            else:
                self.writing.pop(digest, None)


def relative_cost(use: TokenUse, rules: CacheRules) -> float:
    """What the input cost, in uncached tokens."""
    writes = {known.name: float(known.write) for known in rules.ttl}
    written = sum(count * writes[name] for name, count in use.written.items())
    return use.uncached + written + use.read * float(rules.read)


def plan(prompt: Prompt, history: History, now_s: float) -> Plan:
    """Decide for one request. Changes nothing: tell ``history`` what was sent in the end.

    Raises:
        ParameterError: the request as it came is one that the vendor refuses.
    """
    rules = history.rules
    prompt = with_automatic(prompt, rules)
    chain = chain_of(prompt, rules)
    if not len(chain):
        return Plan()
    if rules.mechanism in ("automatic", "units"):
        return Plan(
            cache_key=_cache_key(prompt, chain, history),
            expected=_expected(history, prompt, now_s),
            reasons=("the vendor caches by itself",),
        )
    view = _View(prompt, chain, history, now_s)
    wanted, reasons = _wanted(view)
    markers = _fit(view, wanted)
    is_explicit = False
    if rules.mechanism == "endpoints":
        is_explicit, markers = _for_endpoints(view, wanted, markers)
    marked = replace(with_markers(prompt, markers), is_explicit=prompt.is_explicit or is_explicit)
    return Plan(
        markers=markers,
        is_explicit=is_explicit,
        wait_for=_to_wait_for(view),
        expected=_expected(history, marked, now_s),
        reasons=reasons,
    )


def _expected(history: History, prompt: Prompt, now_s: float) -> TokenUse:
    return history.cache.ask(prompt, now_s, is_peek=True).use


class _View:
    """One request against the history: where its prefixes stand."""

    def __init__(self, prompt: Prompt, chain: Chain, history: History, now_s: float) -> None:
        self.prompt, self.chain, self.history, self.now_s = prompt, chain, history, now_s
        self.rules = rules = history.rules
        self.markable = [place for place, index in enumerate(chain.indices) if can_mark(prompt, index, rules)]
        # Entries that are there, from the longest down, of ever longer times to live.
        self.kept: dict[int, float] = {}
        for place in reversed(range(len(chain))):
            entry = history.cache.entry(chain.digests[place], now_s)
            if entry is None:
                continue
            refreshed_s = rules.lifetime(entry.ttl).seconds
            left_s = refreshed_s if rules.refresh_on_read else entry.expires_at_s - now_s
            if left_s > max(self.kept.values(), default=0.0):
                self.kept[place] = left_s
        self.alive = next(iter(self.kept), None)
        self.end = self.markable[-1] if self.markable else None
        self.known = self._markable_before(history.habits.deepest_known(chain))
        beginning = [
            place for place in self.markable if prompt.blocks[chain.indices[place]].level != "messages"
        ]
        self.beginning = beginning[-1] if beginning else None

    def _markable_before(self, place: int | None) -> int | None:
        if place is None:
            return None
        return next((known for known in reversed(self.markable) if known <= place), None)

    def tokens(self, place: int | None) -> int:
        return 0 if place is None else self.chain.tokens[place]

    def is_long_enough(self, place: int) -> bool:
        return self.chain.tokens[place] >= self.rules.min_tokens

    def return_chance(self, place: int, time_s: float, prior: float) -> float:
        """The chance that this prefix is sent again in ``time_s``."""
        prefix = self.history.habits.prefix(self.chain.digests[place])
        gaps = Gaps() if prefix is None else prefix.gaps
        if prefix is not None:  # it came back just now
            gaps = Gaps(list(gaps.counts))
            gaps.add(self.now_s - prefix.last_s)
        return gaps.share(time_s, prior, 1.0)

    def go_on_chance(self, time_s: float) -> float:
        """The chance that this whole prompt goes on in ``time_s``."""
        habits = self.history.habits
        earlier = habits.continued(self.chain)
        own, num_turns = Gaps(), 1
        if earlier is not None:
            ending = earlier[1]
            own = Gaps(list(ending.own.counts))
            own.add(self.now_s - ending.sent_s)
            num_turns = ending.num_turns + 1
        kind = kind_of(self.prompt, self.chain, num_turns)
        shortest = self.rules.ttl[0].seconds
        prior = PRIOR_SOON if time_s <= shortest else PRIOR_LATER
        again = habits.ending(self.chain.digests[-1])
        chance = habits.chance_to_go_on(kind, own, time_s, prior)
        if again is not None:  # the same prompt as before: it may come a third time
            chance = max(chance, self.return_chance(len(self.chain) - 1, time_s, prior))
        return chance


# ---------------------------------------------------------------- what is worth writing


def _wanted(view: _View) -> tuple[dict[int, str], tuple[str, ...]]:
    """Breakpoints that would pay, most important first: place → time to live."""
    wanted: dict[int, str] = {}
    reasons: list[str] = []
    end = view.end
    if end is None:
        return {}, ("no block can carry a breakpoint",)
    if not view.is_long_enough(end):
        return {}, (f"{view.tokens(end)} tokens are under the minimum of {view.rules.min_tokens}",)
    tail = _tail_ttl(view)
    if tail is not None and not _may_bet(view, view.tokens(end), tail):
        reasons.append("writes have not paid so far: nothing new is written")
        tail = None
    alive = view.alive
    if tail is not None:
        wanted[end] = tail
        reasons.append(f"the prompt is likely to go on: written for {tail}")
    shared = _shared(view, tail)
    if alive is not None and not _sees(view, end if tail is not None else None, alive):
        # Out of sight of the last breakpoint, or nothing new is written: one where the entry stands.
        place = _marker_for(view, alive)
        if place is not None:
            entry = view.history.cache.entry(view.chain.digests[alive], view.now_s)
            assert entry is not None, "an entry that was just seen"
            wanted.setdefault(place, tail or entry.ttl)
            reasons.append(f"{view.tokens(alive)} tokens are there to be read")
    for place in list(view.kept)[1:]:  # to be found, should the longer one expire first; reading it is free
        if place in view.markable and tail is not None:
            entry = view.history.cache.entry(view.chain.digests[place], view.now_s)
            assert entry is not None, "an entry that was just seen"
            wanted.setdefault(place, entry.ttl)
    for place, ttl in shared.items():
        wanted.setdefault(place, ttl)
        reasons.append(f"a beginning of {view.tokens(place)} tokens comes back: kept for {ttl}")
    if tail is not None and alive is None:
        for place in _steps_back(view, end):
            wanted.setdefault(place, tail)
    return wanted, tuple(reasons)


def _tail_ttl(view: _View) -> str | None:
    """For how long the whole prompt is worth writing; ``None``: not at all.

    The costs of now and of the next turn are compared, in uncached tokens: what is written is dearer now, and
    spares reading all of it again if the next turn comes in time.
    """
    rules, end = view.rules, view.end
    assert end is not None
    total, read = view.tokens(end), float(rules.read)
    cached = view.tokens(view.alive)
    rest = total - cached
    offered = [
        known for known in rules.ttl if rules.mechanism == "markers" or known.name == rules.default_ttl
    ]
    edges = [0.0, *(known.seconds for known in offered)]
    chances = [0.0, *(view.go_on_chance(known.seconds) for known in offered)]
    # What is not there next time is written then, for as long as most turns need, or read again every time.
    ever = chances[-1]
    fitting = (known for known, chance in zip(offered, chances[1:], strict=True) if chance >= ever / 2)
    again = float(next(fitting, offered[-1]).write)
    if ever < 1:
        again = min(again, max(1.0, read + (1 - read) * ever / (1 - ever)))
    base = max(view.tokens(place) for place in (view.beginning, view.known, None) if _is_busy(view, place))

    def next_turn(written_s: float) -> float:
        """What the next turn pays more than if all were cached, if this one is written for so long."""
        cost = 0.0
        for at in range(1, len(edges)):
            chance = max(0.0, chances[at] - chances[at - 1])
            kept = max(
                (view.tokens(place) for place, left_s in view.kept.items() if left_s >= edges[at]), default=0
            )
            left = total if written_s >= edges[at] else max(kept, base)
            cost += chance * (again - read) * (total - left)
        return cost

    best_ttl, best = None, rest + next_turn(0.0)
    for known in offered:
        cost = rest * float(known.write) + next_turn(known.seconds)
        if cost < best:
            best_ttl, best = known.name, cost
    return best_ttl


def _is_busy(view: _View, place: int | None) -> bool:
    """Whether others keep this beginning alive anyway. No beginning always is."""
    if place is None:
        return True
    return view.return_chance(place, view.rules.ttl[0].seconds, 0.0) > 0.8


def _shared(view: _View, tail: str | None) -> dict[int, str]:
    """Beginnings that other prompts have, too: the tools and system text, and as far as was sent before."""
    found: dict[int, str] = {}
    for place in dict.fromkeys((view.beginning, view.known, *_fresh(view))):
        if place is None or place == view.end or not view.is_long_enough(place):
            continue
        is_free = tail is not None or view.tokens(place) <= view.tokens(view.alive)
        ttl = _steady_ttl(view, place)
        if ttl is None and is_free:
            ttl = view.rules.default_ttl
        if ttl is not None and (is_free or _may_bet(view, view.tokens(place), ttl)):
            found[place] = ttl
    return found


def _fresh(view: _View) -> list[int]:
    """Beginnings that nobody has sent before, though others like them have come back."""
    prompt, chain, habits = view.prompt, view.chain, view.history.habits
    ttl = view.rules.lifetime(view.rules.default_ttl)
    needed = (float(ttl.write) - 1) / (1 - float(view.rules.read))
    return [
        place
        for place, kind in fresh_places(prompt, chain, habits.deepest_known(chain))
        if place in view.markable and habits.chance_to_go_on(kind, Gaps(), ttl.seconds, 0.05) > needed
    ][-1:]


def _steady_ttl(view: _View, place: int) -> str | None:
    """For how long a beginning is worth keeping if requests go on as they did.

    Per request it costs ``r``, and ``w - r`` more whenever it came too late; without a cache it costs 1.
    """
    rules, read = view.rules, float(view.rules.read)
    if view.history.habits.prefix(view.chain.digests[place]) is None:
        return rules.default_ttl if place in _fresh(view) else None
    best_ttl, best = None, 1.0
    for known in rules.ttl:
        if rules.mechanism != "markers" and known.name != rules.default_ttl:
            continue
        chance = view.return_chance(place, known.seconds, 0.3)
        cost = read + (float(known.write) - read) * (1 - chance)
        if cost < best:
            best_ttl, best = known.name, cost
    return best_ttl


def _may_bet(view: _View, up_to: int, ttl: str) -> bool:
    """Whether bets may go on: they have not lost more than is allowed, this one included."""
    history = view.history
    surcharge = (float(view.rules.lifetime(ttl).write) - 1) * (up_to - view.tokens(view.alive))
    allowed = max(
        MAX_LOSS * history.without, FREE_BETS * 0.25 * history.largest, surcharge * (not history.without)
    )
    return history.saved + allowed >= surcharge


# ---------------------------------------------------------------- where breakpoints can stand


def _sees(view: _View, place: int | None, entry: int) -> bool:
    """Whether a breakpoint at ``place``, or one of the caller's, finds an entry at ``entry``."""
    callers = [at for at, index in enumerate(view.chain.indices) if view.prompt.blocks[index].ttl is not None]
    first = view.chain.positions[entry]
    return any(
        at >= entry and view.chain.positions[at] - first < view.rules.look_back
        for at in (*callers, *([] if place is None else [place]))
    )


def _marker_for(view: _View, entry: int) -> int | None:
    """The first block from ``entry`` on that can carry a breakpoint and finds it."""
    return next(
        (
            place
            for place in view.markable
            if place >= entry
            and view.chain.positions[place] - view.chain.positions[entry] < view.rules.look_back
        ),
        None,
    )


def _steps_back(view: _View, end: int) -> list[int]:
    """Breakpoints before the last one so that no window of positions is without one, nearest first.

    What an earlier run of this program wrote is unknown, and may stand out of sight of the last breakpoint.
    """
    places: list[int] = []
    at = view.chain.positions[end]
    for place in reversed(view.markable):
        if view.chain.positions[place] <= at - (view.rules.look_back - 1):
            places.append(place)
            at = view.chain.positions[place]
    return places


def _fit(view: _View, wanted: Mapping[int, str]) -> dict[int, str]:
    """As many of the wanted breakpoints as there is room for, with times that may stand in this order."""
    rules, prompt = view.rules, view.prompt
    callers = {
        view.chain.indices.index(index): ttl
        for index, ttl in prompt.markers.items()
        if index in view.chain.indices
    }
    room = max(0, rules.max_markers - len(prompt.markers))
    if rules.mechanism == "endpoints" and not prompt.is_explicit:
        room = max(0, room - 1)
    chosen = {place: ttl for place, ttl in wanted.items() if place not in callers}
    chosen = dict(list(chosen.items())[:room])
    seconds = {known.name: known.seconds for known in rules.ttl}
    names = {known.seconds: known.name for known in rules.ttl}
    fitted: dict[int, str] = {}
    longest_behind = 0.0
    for place in sorted({*chosen, *callers}, reverse=True):
        if place in callers:
            longest_behind = max(longest_behind, seconds.get(callers[place], 0.0))
            continue
        allowed = min((seconds.get(ttl, 0.0) for at, ttl in callers.items() if at < place), default=inf)
        time_s = max(seconds[chosen[place]], longest_behind)
        if time_s > allowed:
            time_s = allowed
        if time_s >= longest_behind and time_s in names:
            fitted[place] = names[time_s]
            longest_behind = time_s
    return {view.chain.indices[place]: ttl for place, ttl in sorted(fitted.items())}


def _for_endpoints(
    view: _View, wanted: Mapping[int, str], markers: Mapping[int, str]
) -> tuple[bool, dict[int, str]]:
    """For models that write the end of the latest message unless told otherwise.

    Where the end is not worth it, only what is shared is marked, and the vendor is told to write only that;
    or nothing.
    """
    endpoints = message_endpoints(view.prompt)
    if not endpoints or view.prompt.is_explicit:
        return False, dict(markers)
    tail = endpoints[-1]
    others = {index: ttl for index, ttl in markers.items() if index != tail}
    is_tail_worth_it = any(view.chain.indices[place] >= tail for place in wanted) or not view.is_long_enough(
        tail
    )
    if is_tail_worth_it or view.prompt.markers:
        return False, others
    # Without any breakpoint there is no write to pay for, and no read either: only once writes have lost.
    is_losing = view.alive is None and view.history.saved < 0
    return bool(others) or is_losing, others


# ---------------------------------------------------------------- waiting, keys


def _to_wait_for(view: _View) -> bytes | None:
    """The longest prefix that somebody writes at this moment, if it is more than can be read already."""
    least = view.tokens(view.alive) + view.rules.min_tokens / 2
    for place in reversed(range(len(view.chain))):
        if view.chain.tokens[place] < least:
            return None
        if view.chain.digests[place] in view.history.writing:
            return view.chain.digests[place]
    return None


def _cache_key(prompt: Prompt, chain: Chain, history: History) -> str | None:
    """A key under which requests with the same beginning reach the same machine, and not too many of them."""
    if history.rules.vendor != "openai" or "prompt_cache_key" in prompt.settings.get("settings", ""):
        return None
    first = kind_of(prompt, chain, 1)[0] or chain.digests[0]
    opening = next(
        (
            chain.digests[place]
            for place, index in enumerate(chain.indices)
            if prompt.blocks[index].level == "messages"
        ),
        first,
    )
    rate = history.rates.get(first)
    shard = int.from_bytes(opening[:4], "little") % (1 if rate is None else rate.num_keys)
    return f"{first.hex()[:16]}-{shard}"
