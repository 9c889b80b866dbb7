"""What the gateway does about vendors' prompt caches: plans, what to wait for, and what it all cost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, Final

from ..errors import ParameterError
from ..providers import wire_anthropic, wire_openai
from ..providers.accounting import Account, Ledger, Money, TokenUse, read_usage
from ..providers.planner import History, Plan, plan
from ..providers.repair import Repaired, RepairRules, append_suffix, repair
from ..providers.rules import CacheRules, RuleTable, vendor_of_model
from ..providers.shape import Prompt
from ..providers.simulator import Asked, with_automatic, with_markers
from ..providers.wire_anthropic import bytes_per_token
from .misses import Diagnosis, Misses, add_request_fields, given_previous
from .spelling import loads, rewritten
from .upstreams import Upstream

logger = logging.getLogger("ostinato.gateway")

MAX_HISTORIES: Final = 256
# Prefixes in one history, and in all of them; one takes about a kilobyte.
MAX_PREFIXES: Final = 60_000
MAX_ALL_PREFIXES: Final = 240_000
MAX_ACCOUNTS: Final = 2000
# The longest a request waits for another one's first token.
MAX_WAIT_S: Final = 15.0
# Reading a body as a prompt takes about 10 ms a megabyte: from here on the others do not wait for it.
THREAD_BYTES: Final = 128 << 10
_COUNT: Final = bytes_per_token(4.0)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request in the upstream's own API. ``scope`` is whose cache it is, ``tenant`` whose bill."""

    path: str
    body: bytes
    parsed: Mapping[str, Any]
    tenant: str = ""
    prompt_name: str = ""
    scope: str = ""
    betas: str = ""


@dataclass(slots=True)
class Sent:
    """A request on its way, and the history it is part of. ``asked`` ``None``: nothing is known of it."""

    history: History | None
    asked: Asked | None
    rules: CacheRules | None
    account: Account
    prompt: Prompt | None = None
    repairs: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None
    hides_usage: bool = False
    is_begun: bool = False


@dataclass(frozen=True, slots=True)
class Booked:
    """What an answer used, and what it cost; ``miss`` is why the cache was not read."""

    use: TokenUse | None = None
    money: Money | None = None
    miss: str | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    """A body as a prompt, after what may be repaired."""

    body: bytes
    repaired: Repaired
    prompt: Prompt


@dataclass(slots=True)
class Planning:
    """Histories of all upstreams and tenants, and one ledger. For one event loop."""

    table: RuleTable
    clock: Callable[[], float]
    ledger: Ledger = field(init=False)
    misses: Misses = field(default_factory=Misses)
    num_unread_usages: int = 0
    num_untold_usages: int = 0
    _histories: OrderedDict[tuple[str, str, str], History] = field(default_factory=OrderedDict)
    _accounts: set[Account] = field(default_factory=set)
    _begun: asyncio.Condition = field(default_factory=asyncio.Condition)
    _num_prepared: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.table)

    async def prepare(self, upstream: Upstream, incoming: Incoming, on: date) -> tuple[bytes, Sent]:
        """The body to send, and what to say of it afterwards. Never fails: then nothing is planned."""
        body, sent = await self._prepare(upstream, incoming, on)
        if upstream.count_streams and _hides_usage(incoming):
            sent.hides_usage = True
            body = _with_usage(body)
        return body, sent

    async def _prepare(self, upstream: Upstream, incoming: Incoming, on: date) -> tuple[bytes, Sent]:
        model = str(incoming.parsed.get("model", ""))
        vendor = upstream.vendor or (
            "anthropic" if upstream.protocol == "anthropic" else vendor_of_model(model)
        )
        account = self._account(Account(vendor, model, incoming.tenant, incoming.prompt_name))
        try:
            rules = self.table.rules(vendor, model, on)
        except ParameterError:
            return incoming.body, Sent(None, None, None, account)
        if upstream.plan == "off":
            return incoming.body, Sent(None, None, rules, account)
        try:
            read = await self._read(upstream, incoming, vendor)
            return await self._planned(upstream, incoming, read, rules, account)
        except (ParameterError, TypeError, ValueError, RecursionError) as error:
            # The vendor will say so itself.
            logger.debug("not planned: %s", type(error).__name__)
            return incoming.body, Sent(None, None, rules, account)

    async def _planned(
        self, upstream: Upstream, incoming: Incoming, read: _Read, rules: CacheRules, account: Account
    ) -> tuple[bytes, Sent]:
        history = self._history((upstream.name, account.model, incoming.scope), rules)
        decided, prompt = Plan(), read.prompt
        if upstream.plan == "plan":
            decided = await self._decide(prompt, history)
            prompt = replace(
                with_markers(prompt, decided.markers), is_explicit=prompt.is_explicit or decided.is_explicit
            )
        now_s = self.clock()
        diagnosis = self._look(upstream, incoming, read, prompt, history, now_s)
        sent = Sent(history, history.sent(prompt, now_s), rules, account, prompt, diagnosis=diagnosis)
        if len(incoming.body) < THREAD_BYTES:
            made = self._written(upstream, incoming, read, decided, diagnosis)
        else:
            made = await asyncio.to_thread(self._written, upstream, incoming, read, decided, diagnosis)
        if made is None:
            return read.body, sent
        sent.repairs = read.repaired.repairs
        return made, sent

    async def begun(self, sent: Sent, now_s: float) -> None:
        """The first token has come."""
        if sent.is_begun or sent.history is None or sent.asked is None:
            return
        sent.is_begun = True
        sent.history.begun(sent.asked, now_s)
        async with self._begun:
            self._begun.notify_all()

    async def ended(self, sent: Sent, usage: Mapping[str, Any] | None, on: date) -> Booked:
        """It is over. ``usage``: what the vendor reported, ``None`` where there was no whole answer."""
        if not sent.is_begun and sent.history is not None and sent.asked is not None:
            sent.history.failed(sent.asked)
            async with self._begun:
                self._begun.notify_all()
        if usage is None:
            return Booked()
        form = sent.rules.usage if sent.rules is not None else "openai"
        use = read_usage(form, usage)
        miss = self.misses.ended(sent.diagnosis, use) if sent.diagnosis is not None else None
        if use is None:
            self.num_unread_usages += 1
            return Booked(miss=miss)
        return Booked(use, self.ledger.add(sent.account, use, on), miss)

    def entered(self, account: Account, usage: Any, rules: CacheRules, on: date) -> Booked:
        """Enter a request of our own."""
        use = read_usage(rules.usage, usage)
        return Booked() if use is None else Booked(use, self.ledger.add(account, use, on))

    async def _decide(self, prompt: Prompt, history: History) -> Plan:
        """The plan; first whoever writes what this request would read is waited for.

        When that one fails its place is taken by one of those that wait, and the others wait for that.
        """
        decided = plan(prompt, history, self.clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_WAIT_S), self._begun:
                while (digest := decided.wait_for) is not None:
                    while digest in history.writing:
                        await self._begun.wait()
                    decided = plan(prompt, history, self.clock())
        return decided

    async def _read(self, upstream: Upstream, incoming: Incoming, vendor: str) -> _Read:
        if len(incoming.body) < THREAD_BYTES:
            return _read(upstream, incoming, vendor)
        return await asyncio.to_thread(_read, upstream, incoming, vendor)

    def _look(
        self,
        upstream: Upstream,
        incoming: Incoming,
        read: _Read,
        prompt: Prompt,
        history: History,
        now_s: float,
    ) -> Diagnosis | None:
        if upstream.diagnose == "off":
            return None
        return self.misses.look(
            (upstream.name, incoming.scope),
            read.body,
            with_automatic(prompt, history.rules),
            history.cache.ask(prompt, now_s, is_peek=True),
            history,
            now_s,
            given_id=given_previous(incoming.parsed),
            shows_text=upstream.diagnose == "text",
        )

    def _written(
        self,
        upstream: Upstream,
        incoming: Incoming,
        read: _Read,
        decided: Plan,
        diagnosis: Diagnosis | None,
    ) -> bytes | None:
        """The body with all that is added, byte for byte as it was in all else; ``None``: nothing is."""
        before = loads(read.body) if read.repaired.repairs else read.repaired.body
        made: dict[str, Any] = loads(read.body) if decided.markers else dict(before)
        asked = made
        if upstream.protocol == "anthropic":
            wire_anthropic.place_markers(made, decided.paths(read.prompt))
        else:
            wire_openai.place_markers(made, decided.paths(read.prompt), is_explicit=decided.is_explicit)
            if decided.cache_key is not None:
                made["prompt_cache_key"] = decided.cache_key
        append_suffix(made, read.repaired.suffix)
        if diagnosis is not None:
            asked = add_request_fields(made, upstream.protocol, incoming.path, diagnosis.previous_id)
        is_planned = bool(decided.markers or decided.cache_key or decided.is_explicit)
        if is_planned or read.repaired.suffix or asked is not made:
            return rewritten(read.body, before, asked)
        return read.body if read.repaired.repairs else None

    def _history(self, key: tuple[str, str, str], rules: CacheRules) -> History:
        history = self._histories.pop(key, None)
        if history is None or history.rules != rules:
            history = History(rules, MAX_PREFIXES)
        self._histories[key] = history
        self._num_prepared += 1
        if len(self._histories) > MAX_HISTORIES:
            self._histories.popitem(last=False)
        if self._num_prepared % 256 == 0:
            self._make_room()
        return history

    def _make_room(self) -> None:
        """Names of models are the clients' to choose: all histories together are bounded, too."""
        size = sum(history.size for history in self._histories.values())
        while size > MAX_ALL_PREFIXES and len(self._histories) > 1:
            size -= self._histories.popitem(last=False)[1].size

    def _account(self, account: Account) -> Account:
        """Names come from clients: beyond a number of them all are one."""
        if account not in self._accounts:
            if len(self._accounts) >= MAX_ACCOUNTS:
                return Account(account.vendor, "(others)")
            self._accounts.add(account)
        return account


def _read(upstream: Upstream, incoming: Incoming, vendor: str) -> _Read:
    repaired = Repaired(dict(incoming.parsed), "", ())
    body = incoming.body
    if upstream.repair:
        # The slower reader: it keeps integers whole.
        repaired = repair(json.loads(body), RepairRules(**dict.fromkeys(upstream.repair, True)))
        if repaired.repairs:
            written = json.dumps(repaired.body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            body = written.encode()
    if upstream.protocol == "anthropic":
        prompt = wire_anthropic.read_request(
            repaired.body, _COUNT, vendor=vendor, scope=incoming.scope, betas=incoming.betas
        )
    else:
        prompt = wire_openai.read_request(repaired.body, _COUNT, vendor=vendor, scope=incoming.scope)
    return _Read(body, repaired, prompt)


def _hides_usage(incoming: Incoming) -> bool:
    """Whether it is a stream that tells no usage unless asked, and is not asked."""
    parsed = incoming.parsed
    options = parsed.get("stream_options")
    is_asked = isinstance(options, Mapping) and options.get("include_usage") is not None
    return incoming.path in _TELL_WHEN_ASKED and parsed.get("stream") is True and not is_asked


_TELL_WHEN_ASKED: Final = ("/v1/chat/completions", "/v1/completions")


def _with_usage(body: bytes) -> bytes:
    before: dict[str, Any] = loads(body)
    options = before.get("stream_options")
    asked = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return rewritten(body, before, {**before, "stream_options": asked})
