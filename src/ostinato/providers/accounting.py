"""What was used, in classes that mean the same for every vendor, and what it cost.

Anthropic's ``input_tokens`` are those that no cache was asked for, OpenAI's are all of them. Here
``uncached``, ``written``, ``read`` and ``output`` never overlap; together they are what went in and out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Final

from .rules import ONE, CacheRules, Price, RuleTable, UsageForm

MILLION: Final = Decimal(1_000_000)
CENT: Final = Decimal("0.01")
MAX_TOKENS: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Tokens of one request, or of many. ``written`` is by the name of the time to live.

    ``doubts`` says what in the vendor's report does not fit together.
    """

    uncached: int = 0
    written: Mapping[str, int] = field(default_factory=dict)
    read: int = 0
    output: int = 0
    doubts: tuple[str, ...] = ()

    @property
    def num_written(self) -> int:
        return sum(self.written.values())

    @property
    def input(self) -> int:
        return self.uncached + self.num_written + self.read

    def __add__(self, other: TokenUse) -> TokenUse:
        names = self.written.keys() | other.written.keys()
        return TokenUse(
            self.uncached + other.uncached,
            {name: self.written.get(name, 0) + other.written.get(name, 0) for name in sorted(names)},
            self.read + other.read,
            self.output + other.output,
            tuple(dict.fromkeys(self.doubts + other.doubts)),
        )


@dataclass(frozen=True, slots=True)
class Money:
    """Dollars, exactly. ``without_cache`` is what the same tokens would have cost had nothing been cached."""

    uncached: Decimal = Decimal(0)
    written: Decimal = Decimal(0)
    read: Decimal = Decimal(0)
    output: Decimal = Decimal(0)
    without_cache: Decimal = Decimal(0)

    @property
    def total(self) -> Decimal:
        return self.uncached + self.written + self.read + self.output

    @property
    def saved(self) -> Decimal:
        """May be negative: writes that nobody read."""
        return self.without_cache - self.total

    def __add__(self, other: Money) -> Money:
        return Money(
            self.uncached + other.uncached,
            self.written + other.written,
            self.read + other.read,
            self.output + other.output,
            self.without_cache + other.without_cache,
        )


def in_cents(amount: Decimal) -> Decimal:
    """Dollars to the cent, half a cent up, as bills are."""
    return amount.quantize(CENT, ROUND_HALF_UP)


# ---------------------------------------------------------------- vendors' reports


def read_usage(form: UsageForm, usage: Any) -> TokenUse | None:
    """What a vendor's ``usage`` object says. ``None`` where it is not one, or its numbers cannot be."""
    if not isinstance(usage, Mapping):
        return None
    reader = {
        "anthropic": _anthropic,
        "openai": _openai,
        "gemini": _gemini,
        "bedrock": _bedrock,
        "deepseek": _deepseek,
    }[form]
    try:
        return reader(usage)
    except _BadUsageError:
        return None


class _BadUsageError(ValueError):
    """A count that is missing, negative, too large or no whole number."""


def _count(usage: Mapping[str, Any], *names: str, default: int | None = 0) -> int:
    for name in names:
        value = usage.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
            raise _BadUsageError(name)
        return value
    if default is None:
        raise _BadUsageError(names[0])
    return default


def _part(usage: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        if isinstance(value := usage.get(name), Mapping):
            return value
    return {}


def _anthropic(usage: Mapping[str, Any]) -> TokenUse:
    total = _count(usage, "cache_creation_input_tokens")
    split = _part(usage, "cache_creation")
    written = {
        "5m": _count(split, "ephemeral_5m_input_tokens"),
        "1h": _count(split, "ephemeral_1h_input_tokens"),
    }
    doubts: tuple[str, ...] = ()
    if not split:
        written = {"5m": total}
    elif sum(written.values()) != total:
        # The documentation says that they are equal (and has an example in which they are not).
        doubts = (f"cache_creation adds up to {sum(written.values())}, the total says {total}",)
    return TokenUse(
        _count(usage, "input_tokens", default=None),
        {name: count for name, count in written.items() if count},
        _count(usage, "cache_read_input_tokens"),
        _count(usage, "output_tokens"),
        doubts,
    )


def _openai(usage: Mapping[str, Any]) -> TokenUse:
    total = _count(usage, "prompt_tokens", "input_tokens", default=None)
    details = _part(usage, "prompt_tokens_details", "input_tokens_details")
    read = _count(details, "cached_tokens")
    written_total = _count(details, "cache_write_tokens")
    split = _part(details, "cache_write_tokens_details")
    long = _count(split, "ttl_12h_tokens")
    written = {"30m": written_total - long, "12h": long}
    if read + written_total > total or long > written_total:
        raise _BadUsageError("parts larger than the whole")
    return TokenUse(
        total - read - written_total,
        {name: count for name, count in written.items() if count},
        read,
        _count(usage, "completion_tokens", "output_tokens"),
    )


def _gemini(usage: Mapping[str, Any]) -> TokenUse:
    total = _count(usage, "prompt_token_count", "promptTokenCount", default=None)
    read = _count(usage, "cached_content_token_count", "cachedContentTokenCount")
    output = _count(usage, "candidates_token_count", "candidatesTokenCount")
    output += _count(usage, "thoughts_token_count", "thoughtsTokenCount")
    if read > total:
        raise _BadUsageError("more cached than there is")
    return TokenUse(total - read, {}, read, output)


def _bedrock(usage: Mapping[str, Any]) -> TokenUse:
    written = _count(usage, "cacheWriteInputTokens")
    return TokenUse(
        _count(usage, "inputTokens", default=None),
        {"5m": written} if written else {},
        _count(usage, "cacheReadInputTokens"),
        _count(usage, "outputTokens"),
    )


def _deepseek(usage: Mapping[str, Any]) -> TokenUse:
    if "prompt_cache_hit_tokens" not in usage:
        return _openai(usage)
    read = _count(usage, "prompt_cache_hit_tokens")
    return TokenUse(
        _count(usage, "prompt_cache_miss_tokens", default=None), {}, read, _count(usage, "completion_tokens")
    )


# ---------------------------------------------------------------- money


def money_of(use: TokenUse, rules: CacheRules, price: Price) -> Money:
    """What the tokens of one request cost. A time to live that the model has not is priced as its dearest.

    Batches, priority tiers, tools and data residency are priced apart by vendors, and not here.
    """
    price = price.of_request(use.input)
    each, out = price.input / MILLION, price.output / MILLION
    writes = {known.name: known.write for known in rules.ttl}
    dearest = max(writes.values(), default=ONE)
    written = sum(
        (count * each * writes.get(name, dearest) for name, count in use.written.items()), Decimal(0)
    )
    output = use.output * out
    read = use.read * each * rules.read
    return Money(use.uncached * each, written, read, output, use.input * each + output)


@dataclass(frozen=True, slots=True)
class Account:
    """Whose tokens: a line of the ledger."""

    vendor: str
    model: str
    tenant: str = ""
    prompt_name: str = ""


@dataclass(slots=True)
class Entry:
    num_requests: int = 0
    use: TokenUse = field(default_factory=TokenUse)
    money: Money = field(default_factory=Money)
    num_unpriced: int = 0


class Ledger:
    """Adds requests up by account. Each is priced by the rules of its own day."""

    def __init__(self, table: RuleTable) -> None:
        self._table = table
        self._entries: dict[Account, Entry] = {}

    def add(self, account: Account, use: TokenUse, on: date) -> Money | None:
        """Enter one request; what it cost, ``None`` where the price is not known."""
        entry = self._entries.setdefault(account, Entry())
        entry.num_requests += 1
        entry.use += use
        price = self._table.price(account.vendor, account.model, on)
        if price is None:
            entry.num_unpriced += 1
            return None
        money = money_of(use, self._table.rules(account.vendor, account.model, on), price)
        entry.money += money
        return money

    def __iter__(self) -> Iterator[tuple[Account, Entry]]:
        return iter(self._entries.items())

    @property
    def total(self) -> Money:
        return sum((entry.money for entry in self._entries.values()), Money())
