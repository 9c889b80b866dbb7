"""What the gateway does about vendors' prompt caches: plans, what to wait for, and what it all cost."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

import orjson

from ..errors import ParameterError
from ..providers import wire_anthropic, wire_openai
from ..providers.accounting import Account, Ledger, Money, TokenUse, read_usage
from ..providers.planner import History, Plan, plan
from ..providers.rules import CacheRules, RuleTable, vendor_of_model
from ..providers.shape import Prompt
from ..providers.simulator import Asked, with_markers
from ..providers.wire_anthropic import bytes_per_token
from .upstreams import Upstream

logger = logging.getLogger("ostinato.gateway")

MAX_HISTORIES: Final = 256
MAX_ACCOUNTS: Final = 2000
# The longest a request waits for another one's first token.
MAX_WAIT_S: Final = 15.0
_COUNT: Final = bytes_per_token(4.0)


@dataclass(slots=True)
class Sent:
    """A request on its way, and the history it is part of. ``asked`` ``None``: nothing is known of it."""

    history: History | None
    asked: Asked | None
    rules: CacheRules | None
    account: Account
    is_begun: bool = False


class Planning:
    """Histories of all upstreams and tenants, and one ledger. For one event loop."""

    def __init__(self, table: RuleTable) -> None:
        self._table = table
        self._histories: OrderedDict[tuple[str, str, str], History] = OrderedDict()
        self._begun = asyncio.Condition()
        self.ledger = Ledger(table)
        self._accounts: set[Account] = set()
        self.num_unread_usages = 0

    async def prepare(
        self,
        upstream: Upstream,
        body: bytes,
        parsed: Mapping[str, Any],
        *,
        tenant: str,
        betas: str,
        now_s: float,
        on: date,
        clock: Any,
    ) -> tuple[bytes, Sent]:
        """The body to send, and what to say of it afterwards. Never fails: then nothing is planned."""
        model = str(parsed.get("model", ""))
        vendor = upstream.vendor or (
            "anthropic" if upstream.protocol == "anthropic" else vendor_of_model(model)
        )
        account = self._account(Account(vendor, model, tenant))
        try:
            rules = self._table.rules(vendor, model, on)
        except ParameterError:
            return body, Sent(None, None, None, account)
        if upstream.plan == "off":
            return body, Sent(None, None, rules, account)
        try:
            prompt = self._read(upstream, parsed, vendor, tenant, betas)
            history = self._history(upstream.name, model, tenant, rules)
            if upstream.plan == "observe":
                return body, Sent(history, history.sent(prompt, now_s), rules, account)
            decided = plan(prompt, history, now_s)
            if decided.wait_for is not None:
                await self._wait(history, decided.wait_for)
                now_s = clock()
                decided = plan(prompt, history, now_s)
            changed = self._changed(upstream, body, parsed, prompt, decided)
            if changed is None:
                return body, Sent(history, history.sent(prompt, now_s), rules, account)
            marked = with_markers(prompt, decided.markers)
            return changed, Sent(history, history.sent(marked, now_s), rules, account)
        except ParameterError as error:  # the vendor will say so itself
            logger.debug("not planned: %s", error)
            return body, Sent(None, None, rules, account)

    async def begun(self, sent: Sent, now_s: float) -> None:
        """The first token has come."""
        if sent.is_begun or sent.history is None or sent.asked is None:
            return
        sent.is_begun = True
        sent.history.begun(sent.asked, now_s)
        async with self._begun:
            self._begun.notify_all()

    async def ended(
        self, sent: Sent, usage: Mapping[str, Any] | None, on: date
    ) -> tuple[TokenUse, Money | None] | None:
        """It is over. ``usage``: what the vendor reported, ``None`` where there was no whole answer."""
        if not sent.is_begun and sent.history is not None and sent.asked is not None:
            sent.history.failed(sent.asked)
            async with self._begun:
                self._begun.notify_all()
        if usage is None:
            return None
        form = sent.rules.usage if sent.rules is not None else "openai"
        use = read_usage(form, usage)
        if use is None:
            self.num_unread_usages += 1
            return None
        return use, self.ledger.add(sent.account, use, on)

    async def _wait(self, history: History, digest: bytes) -> None:
        try:
            async with asyncio.timeout(MAX_WAIT_S), self._begun:
                await self._begun.wait_for(lambda: digest not in history.writing)
        except TimeoutError:
            return

    def _read(
        self, upstream: Upstream, parsed: Mapping[str, Any], vendor: str, tenant: str, betas: str
    ) -> Prompt:
        if upstream.protocol == "anthropic":
            return wire_anthropic.read_request(parsed, _COUNT, vendor=vendor, scope=tenant, betas=betas)
        return wire_openai.read_request(parsed, _COUNT, vendor=vendor, scope=tenant)

    def _changed(
        self, upstream: Upstream, body: bytes, parsed: Mapping[str, Any], prompt: Prompt, decided: Plan
    ) -> bytes | None:
        """The body with breakpoints; ``None``: as it was. Keys keep their order, values their meaning."""
        if not decided.markers and decided.cache_key is None:
            return None
        made: dict[str, Any] = orjson.loads(body)  # a copy: the caller's stays
        if upstream.protocol == "anthropic":
            wire_anthropic.place_markers(made, decided.paths(prompt))
        else:
            wire_openai.place_markers(made, decided.paths(prompt), is_explicit=decided.is_explicit)
            if decided.cache_key is not None:
                made["prompt_cache_key"] = decided.cache_key
        return orjson.dumps(made)

    def _history(self, upstream: str, model: str, tenant: str, rules: CacheRules) -> History:
        key = (upstream, model, tenant)
        history = self._histories.pop(key, None)
        if history is None or history.rules != rules:
            history = History(rules)
        self._histories[key] = history
        if len(self._histories) > MAX_HISTORIES:
            self._histories.popitem(last=False)
        return history

    def _account(self, account: Account) -> Account:
        """Names come from clients: beyond a number of them all are one."""
        if account not in self._accounts:
            if len(self._accounts) >= MAX_ACCOUNTS:
                return Account(account.vendor, "(others)")
            self._accounts.add(account)
        return account
