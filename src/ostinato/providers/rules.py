"""What vendors' prompt caches do, as a dated table, and what tokens cost.

The table lies beside this module (``rules.toml``, ``prices.toml``). A user's file of the same form comes
after it and wins, field by field. Which day it is comes in by argument.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

from ..errors import ParameterError

Mechanism: TypeAlias = Literal["markers", "endpoints", "automatic", "units"]
Level: TypeAlias = Literal["tools", "system", "messages"]
UsageForm: TypeAlias = Literal["anthropic", "openai", "gemini", "bedrock", "deepseek"]

LEVELS: Final[tuple[Level, ...]] = ("tools", "system", "messages")
SCHEMA: Final = 1
ONE: Final = Decimal(1)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a row was read, and when."""

    name: str
    title: str
    url: str
    read: date


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A time to live: ``write`` is what a written token costs, as a multiple of an uncached one."""

    name: str
    seconds: float
    write: Decimal


@dataclass(frozen=True, slots=True)
class CacheRules:
    """One model's prompt cache.

    Attributes:
        mechanism: ``markers``: entries where the caller says, found by looking back; ``endpoints``: at the
            end of the latest message and where the caller says; ``automatic``: any prefix of whole steps of
            ``granularity`` tokens; ``units``: whole earlier prompts, and beginnings that two had in common.
        min_tokens: a shorter prefix is not cached, and nothing says so.
        max_markers: breakpoints in a request at most.
        look_back: positions that a breakpoint looks at for an entry, itself included.
        collapsed: kinds of block of which a run is one position.
        unmarkable: kinds of block that cannot carry a breakpoint.
        ttl: the times to live on offer, shortest first.
        refresh_on_read: whether a read lets an entry's time begin anew.
        read: what a token that was read costs, as a multiple of an uncached one.
        strips_thinking: whether a user's own words take the thinking out of earlier turns.
        invalidates: what is changed → the first level that is then lost.
        conflicts: where the vendor's texts disagree; the values are the cautious ones.
        sources: field → the name of the row's source.
    """

    vendor: str
    model: str
    mechanism: Mechanism
    usage: UsageForm
    min_tokens: int
    ttl: tuple[Lifetime, ...]
    default_ttl: str
    read: Decimal
    refresh_on_read: bool = True
    max_markers: int = 0
    look_back: int = 0
    granularity: int = 1
    read_first_markers: int = 0
    read_latest_markers: int = 0
    collapsed: frozenset[str] = frozenset()
    unmarkable: frozenset[str] = frozenset()
    strips_thinking: bool = False
    invalidates: Mapping[str, Level] = field(default_factory=dict)
    conflicts: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def lifetime(self, name: str) -> Lifetime:
        """Raises :class:`ParameterError` where this model offers no such time."""
        for known in self.ttl:
            if known.name == name:
                return known
        offered = ", ".join(known.name for known in self.ttl)
        raise ParameterError(f"{self.model} has no time to live {name!r}; it has {offered}", param="ttl")

    @property
    def writes_cost(self) -> bool:
        return any(known.write > 1 for known in self.ttl)

    def break_even(self, ttl: str) -> Decimal:
        """Caching a prefix costs less once more requests than this have it: ``(w - r)/(1 - r)``."""
        return (self.lifetime(ttl).write - self.read) / (ONE - self.read)


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars for a million tokens. ``above_tokens`` of input, ``above`` replaces the whole price."""

    input: Decimal
    output: Decimal
    source: str
    above_tokens: int | None = None
    above: Price | None = None

    def of_request(self, num_input_tokens: int) -> Price:
        if self.above is not None and self.above_tokens is not None and num_input_tokens > self.above_tokens:
            return self.above
        return self


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in a file. ``origin`` is ``built in`` or the user's file."""

    kind: Literal["rule", "invalidates", "price"]
    vendor: str
    models: tuple[str, ...]
    values: Mapping[str, Any]
    source: str
    since: date | None
    conflict: str
    origin: str

    def fits(self, vendor: str, model: str, on: date) -> bool:
        if self.vendor != vendor or (self.since is not None and self.since > on):
            return False
        return any(fnmatchcase(model, pattern) for pattern in self.models)


_Key: TypeAlias = tuple[str, str, date]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RuleTable:
    """All rows, the built-in ones first."""

    version: date
    sources: Mapping[str, Source]
    rows: tuple[Row, ...]
    # What was found before: the rows are many, and every request asks.
    _rules: dict[_Key, CacheRules] = field(default_factory=dict, compare=False, repr=False)
    _prices: dict[_Key, Price | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def vendors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.vendor for row in self.rows if row.kind == "rule"))

    def rules(self, vendor: str, model: str, on: date) -> CacheRules:
        """What holds for a model on a day.

        Raises:
            ParameterError: nothing is known of the vendor.
        """
        key = (vendor, model, on)
        if (known := self._rules.get(key)) is None:
            known = self._found_rules(vendor, model, on)
            _keep(self._rules, key, known)
        return known

    def _found_rules(self, vendor: str, model: str, on: date) -> CacheRules:
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        conflicts: list[str] = []
        invalidates: dict[str, Level] = {}
        name = plain_model_name(model)
        for row in self.rows:
            if not row.fits(vendor, name, on):
                continue
            if row.kind == "rule":
                values |= row.values
                sources |= dict.fromkeys(row.values, row.source)
            elif row.kind == "invalidates":
                invalidates[row.values["change"]] = row.values["level"]
                sources[row.values["change"]] = row.source
            if row.conflict and row.kind != "price":
                conflicts.append(row.conflict)
        missing = {"mechanism", "usage", "min_tokens", "ttl", "default_ttl", "read"} - values.keys()
        if missing:
            vendors = ", ".join(self.vendors)
            raise ParameterError(
                f"no rules are known for {vendor!r}, model {model!r} ({min(missing)} is missing); "
                f"there are some for {vendors}",
                param="vendor",
            )
        return CacheRules(
            vendor=vendor,
            model=model,
            invalidates=invalidates,
            conflicts=tuple(conflicts),
            sources=sources,
            **values,
        )

    def price(self, vendor: str, model: str, on: date) -> Price | None:
        """What a model's tokens cost on a day; ``None`` where that is not known."""
        key = (vendor, model, on)
        if key in self._prices:
            return self._prices[key]
        price = self._found_price(vendor, model, on)
        _keep(self._prices, key, price)
        return price

    def _found_price(self, vendor: str, model: str, on: date) -> Price | None:
        name = plain_model_name(model)
        # The user's prices come last and win; within a file a later date wins, then the earlier row.
        fitting = [row for row in self.rows if row.kind == "price" and row.fits(vendor, name, on)]
        if not fitting:
            return None
        newest = max(fitting, key=lambda row: (row.origin != BUILT_IN, row.since or date.min))
        return cast(Price, newest.values["price"])


BUILT_IN: Final = "built in"
_MOST_KEPT: Final = 1000


def _keep(found: dict[_Key, _T], key: _Key, value: _T) -> None:
    if len(found) >= _MOST_KEPT:  # names of models are clients' to choose
        found.clear()
    found[key] = value


def plain_model_name(model: str) -> str:
    """Without a router's ``vendor/`` before it."""
    return model.rpartition("/")[2]


def vendor_of_model(model: str) -> str:
    """The vendor that a model's name speaks of; ``openai`` where it speaks of none."""
    name = plain_model_name(model)
    if "anthropic." in name:
        return "bedrock"
    for prefix in ("claude", "gemini", "deepseek", "qwen"):
        if name.startswith(prefix):
            return "anthropic" if prefix == "claude" else prefix
    return "openai"


@cache
def builtin_table() -> RuleTable:
    """The table of this version of Ostinato."""
    folder = files("ostinato.providers")
    rules = tomllib.loads(folder.joinpath("rules.toml").read_text(encoding="utf-8"))
    prices = tomllib.loads(folder.joinpath("prices.toml").read_text(encoding="utf-8"))
    return _table(rules | {"price": prices["price"]}, BUILT_IN, None)


def load_table(overrides: Iterable[Path] = ()) -> RuleTable:
    """The built-in table, with the rows of users' files after it.

    Raises:
        ParameterError: a file cannot be read, or a row makes no sense; the message names both.
    """
    table = builtin_table()
    for file in overrides:
        try:
            given = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ParameterError(f"{file} cannot be read: {error}", param="provider_rules") from error
        table = _table(given, str(file), table)
    return table


# ---------------------------------------------------------------- reading


def _table(given: Mapping[str, Any], origin: str, under: RuleTable | None) -> RuleTable:
    if given.get("schema") != SCHEMA:
        raise _fault(origin, f"schema must be {SCHEMA}")
    sources = dict(under.sources) if under else {}
    for name, about in _tables(given, "sources", origin).items():
        try:
            sources[name] = Source(name, str(about["title"]), str(about.get("url", "")), _day(about["read"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _fault(origin, f"source {name!r} needs a title and the day it was read") from error
    rows = under.rows if under else ()
    for kind in ("rule", "invalidates", "price"):
        for number, row in enumerate(given.get(kind, []), 1):
            try:
                rows += (_row(kind, row, origin, sources),)
            except (KeyError, TypeError, ValueError, InvalidOperation) as error:
                raise _fault(origin, f"{kind} {number}: {error}") from error
    if unknown := given.keys() - {"schema", "table", "sources", "rule", "invalidates", "price"}:
        raise _fault(origin, f"there is no table {min(unknown)!r}")
    version = given.get("table", under.version if under else None)
    return RuleTable(_day(version), sources, rows)


def _row(kind: str, given: Mapping[str, Any], origin: str, sources: Mapping[str, Source]) -> Row:
    values = dict(given)
    source = values.pop("source", "")
    if source not in sources:
        raise ValueError(f"source {source!r} is not in [sources]")
    since = values.pop("from", None)
    vendor, models = str(values.pop("vendor")), values.pop("models", ["*"])
    conflict = str(values.pop("conflict", ""))
    if kind == "price":
        values = {"price": _price(values, source)}
    elif kind == "invalidates":
        if values.keys() != {"change", "level"} or values["level"] not in LEVELS:
            raise ValueError(f"needs a change, and a level out of {', '.join(LEVELS)}")
    else:
        values = {name: _value(name, value) for name, value in values.items()}
        if "ttl" in values:
            values["ttl"] = tuple(sorted(values["ttl"], key=lambda item: item.seconds))
    return Row(
        cast(Literal["rule"], kind),
        vendor,
        tuple(map(str, models)),
        values,
        source,
        None if since is None else _day(since),
        conflict,
        origin,
    )


_WHOLE: Final = frozenset(
    {"min_tokens", "max_markers", "look_back", "granularity", "read_first_markers", "read_latest_markers"}
)
_KNOWN: Final = frozenset(item.name for item in fields(CacheRules)) - {
    "vendor", "model", "invalidates", "conflicts", "sources",
}  # fmt: skip
_CHOICES: Final[Mapping[str, Sequence[str]]] = {
    "mechanism": ("markers", "endpoints", "automatic", "units"),
    "usage": ("anthropic", "openai", "gemini", "bedrock", "deepseek"),
}


def _value(name: str, value: Any) -> Any:
    if name not in _KNOWN:
        raise ValueError(f"there is no rule {name!r}")
    if name in _WHOLE:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a whole number")
        return max(1, value) if name == "granularity" else value
    if name in ("collapsed", "unmarkable"):
        return frozenset(map(str, value))
    if name == "read":
        return _multiple(name, value)
    if name == "ttl":
        return tuple(
            Lifetime(key, float(about["seconds"]), _multiple("write", about["write"]))
            for key, about in dict(value).items()
        )
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ValueError(f"{name} must be one of {', '.join(_CHOICES[name])}")
    if name in ("refresh_on_read", "strips_thinking") and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false")
    return value


def _multiple(name: str, value: Any) -> Decimal:
    if not isinstance(value, str):
        raise ValueError(f'{name} must be text such as "0.1", so that it is exact')
    number = Decimal(value)
    if not number.is_finite() or number < 0:
        raise ValueError(f"{name} must be 0 or more")
    return number


def _price(values: Mapping[str, Any], source: str) -> Price:
    price = Price(_multiple("input", values["input"]), _multiple("output", values["output"]), source)
    if unknown := values.keys() - {"input", "output", "above"}:
        raise ValueError(f"a price has no {min(unknown)!r}")
    if (above := values.get("above")) is not None:
        dearer = Price(_multiple("input", above["input"]), _multiple("output", above["output"]), source)
        price = replace(price, above_tokens=int(above["tokens"]), above=dearer)
    return price


def _tables(given: Mapping[str, Any], name: str, origin: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise _fault(origin, f"{name} must be a table")
    return value


def _day(value: Any) -> date:
    if not isinstance(value, date):
        raise ValueError(f"{value!r} is not a day")
    return value


def _fault(origin: str, text: str) -> ParameterError:
    return ParameterError(f"{origin}: {text}", param="provider_rules")


def rows_of(table: RuleTable, vendor: str | None = None) -> Iterator[Row]:
    """The rows, those of one vendor where it is named."""
    return (row for row in table.rows if vendor is None or row.vendor == vendor)
