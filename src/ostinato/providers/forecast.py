"""What plans would have made of recorded requests: tokens and money, by prefix."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date

from ..errors import ParameterError
from .accounting import Account, Ledger, TokenUse
from .habits import kind_of
from .logs import LoggedRequest
from .planner import History, Plan, plan
from .rules import RuleTable
from .shape import chain_of
from .simulator import Asked, VendorCache, with_markers


@dataclass(slots=True)
class Forecast:
    """One prefix: what its requests use as sent, and as planned. Refused are those answered with 400."""

    model: str
    prefix: str
    prefix_tokens: int
    num_requests: int = 0
    num_refused: int = 0
    as_sent: TokenUse = field(default_factory=TokenUse)
    planned: TokenUse = field(default_factory=TokenUse)


@dataclass(frozen=True, slots=True)
class Decision:
    """One request and its plan; ``fault``: why the vendor would refuse it as it is."""

    request: LoggedRequest
    plan: Plan
    fault: str = ""


class Planned:
    """Plays requests through the planner and, once planned and once as sent, through the strict vendor.

    Args:
        table: rules and prices.
        on: the day whose rules hold.
        first_token_s: how long a response takes to begin: what it writes can be read only then.
    """

    def __init__(self, table: RuleTable, on: date, *, first_token_s: float = 2.0) -> None:
        self._table, self._on, self._first_token_s = table, on, first_token_s
        self.forecasts: dict[tuple[str, str], Forecast] = {}
        self.as_sent, self.planned = Ledger(table), Ledger(table)
        self._histories: dict[tuple[str, str], tuple[History, VendorCache]] = {}
        self._begun: list[tuple[float, int, History, Asked, VendorCache, Asked | None]] = []
        self._number = 0

    def play(self, requests: Iterable[LoggedRequest]) -> Iterator[Decision]:
        """Decide for all of them, in order of time."""
        for request in sorted(requests, key=lambda item: item.at_s):
            yield self._one(request)

    def _one(self, request: LoggedRequest) -> Decision:
        prompt, now_s = request.prompt, request.at_s
        while self._begun and self._begun[0][0] <= now_s:
            at_s, _, history, ours, vendor, theirs = heapq.heappop(self._begun)
            history.begun(ours, at_s)
            if theirs is not None:
                vendor.commit(theirs, at_s)
        key = (prompt.vendor, prompt.model)
        if key not in self._histories:
            rules = self._table.rules(prompt.vendor, prompt.model, self._on)
            self._histories[key] = (History(rules), VendorCache(rules))
        history, vendor = self._histories[key]
        row = self._forecast(request, history)
        row.num_requests += 1
        account = Account(prompt.vendor, prompt.model)
        try:
            decided = plan(request.planned, history, now_s)
            theirs = vendor.ask(prompt, now_s)
        except ParameterError as error:
            row.num_refused += 1
            return Decision(request, Plan(), str(error))
        marked = with_markers(request.planned, decided.markers)
        marked = replace(marked, is_explicit=prompt.is_explicit or decided.is_explicit)
        ours = history.sent(marked, now_s)
        row.as_sent += theirs.use
        row.planned += ours.use
        self.as_sent.add(account, theirs.use, self._on)
        self.planned.add(account, ours.use, self._on)
        self._number += 1
        ready_s = now_s + self._first_token_s
        heapq.heappush(self._begun, (ready_s, self._number, history, ours, vendor, theirs))
        return Decision(request, decided)

    def _forecast(self, request: LoggedRequest, history: History) -> Forecast:
        prompt = request.prompt
        chain = chain_of(prompt, history.rules)
        digest = kind_of(prompt, chain, 1)[0] if len(chain) else b""
        place = chain.digests.index(digest) if digest else 0
        if not digest and len(chain):
            digest = chain.digests[0]
        tokens = chain.tokens[place] if len(chain) else 0
        key = (prompt.model, digest.hex()[:12])
        return self.forecasts.setdefault(key, Forecast(prompt.model, key[1], tokens))
