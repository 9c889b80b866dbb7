"""Tokens in classes that never overlap, and money to the cent."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.providers.accounting import (
    Account,
    Ledger,
    TokenUse,
    in_cents,
    money_of,
    read_usage,
)
from ostinato.providers.rules import builtin_table
from providers.asked import DAY, rules_of

CASES: list[tuple[str, dict[str, Any], TokenUse]] = [
    # Documentation, "Tracking cache performance": first a write, then a read.
    (
        "anthropic",
        {
            "input_tokens": 21,
            "cache_creation_input_tokens": 188086,
            "cache_read_input_tokens": 0,
            "output_tokens": 393,
        },
        TokenUse(21, {"5m": 188086}, 0, 393),
    ),
    (
        "anthropic",
        {
            "input_tokens": 50,
            "cache_read_input_tokens": 100000,
            "cache_creation_input_tokens": 248,
            "output_tokens": 503,
            "cache_creation": {"ephemeral_5m_input_tokens": 148, "ephemeral_1h_input_tokens": 100},
        },
        TokenUse(50, {"5m": 148, "1h": 100}, 100000, 503),
    ),
    # OpenAI's guide: cached tokens are a part of the prompt's.
    (
        "openai",
        {
            "prompt_tokens": 2006,
            "completion_tokens": 300,
            "total_tokens": 2306,
            "prompt_tokens_details": {"cached_tokens": 1920},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        TokenUse(86, {}, 1920, 300),
    ),
    (
        "openai",
        {
            "input_tokens": 5000,
            "output_tokens": 10,
            "input_tokens_details": {
                "cached_tokens": 1000,
                "cache_write_tokens": 3000,
                "cache_write_tokens_details": {"ttl_30m_tokens": 1000, "ttl_12h_tokens": 2000},
            },
        },
        TokenUse(1000, {"30m": 1000, "12h": 2000}, 1000, 10),
    ),
    (
        "gemini",
        {"promptTokenCount": 5000, "cachedContentTokenCount": 4096, "candidatesTokenCount": 7},
        TokenUse(904, {}, 4096, 7),
    ),
    (
        "bedrock",
        {"inputTokens": 10, "outputTokens": 3, "cacheReadInputTokens": 200, "cacheWriteInputTokens": 30},
        TokenUse(10, {"5m": 30}, 200, 3),
    ),
    (
        "deepseek",
        {
            "prompt_tokens": 100,
            "completion_tokens": 9,
            "prompt_cache_hit_tokens": 64,
            "prompt_cache_miss_tokens": 36,
        },
        TokenUse(36, {}, 64, 9),
    ),
]


@pytest.mark.parametrize(("form", "usage", "expected"), CASES)
def test_reports_become_the_same_classes(form: Any, usage: dict[str, Any], expected: TokenUse) -> None:
    assert read_usage(form, usage) == expected


def test_a_split_that_does_not_add_up_is_told_and_the_split_counts() -> None:
    """The documentation's own example of the split."""
    use = read_usage(
        "anthropic",
        {
            "input_tokens": 2048,
            "cache_read_input_tokens": 1800,
            "cache_creation_input_tokens": 248,
            "output_tokens": 503,
            "cache_creation": {"ephemeral_5m_input_tokens": 456, "ephemeral_1h_input_tokens": 100},
        },
    )
    assert use is not None
    assert use.written == {"5m": 456, "1h": 100}
    assert "248" in use.doubts[0]


@pytest.mark.parametrize(
    ("form", "usage"),
    [
        ("anthropic", None),
        ("anthropic", {}),
        ("anthropic", {"input_tokens": -1}),
        ("anthropic", {"input_tokens": True}),
        ("anthropic", {"input_tokens": "7"}),
        ("openai", {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 11}}),
        ("openai", {"prompt_tokens": 10, "prompt_tokens_details": {"cache_write_tokens": 11}}),
        ("openai", {"prompt_tokens": 1 << 50}),
        ("gemini", {"promptTokenCount": 1, "cachedContentTokenCount": 2}),
    ],
)
def test_reports_that_cannot_be_are_none(form: Any, usage: Any) -> None:
    assert read_usage(form, usage) is None


def test_the_documented_session_to_the_cent() -> None:
    """Anthropic's price page: 50,000 tokens in, of them 40,000 read, and 15,000 out, at $5 and $25."""
    table, rules = builtin_table(), rules_of("claude-opus-4-6")
    price = table.price("anthropic", "claude-opus-4-6", DAY)
    assert price is not None
    plain = money_of(TokenUse(50_000, output=15_000), rules, price)
    assert (plain.uncached, plain.output) == (Decimal("0.25"), Decimal("0.375"))
    cached = money_of(TokenUse(10_000, {}, 40_000, 15_000), rules, price)
    assert (cached.uncached, cached.read, cached.output) == map_decimals("0.05 0.02 0.375")
    assert cached.saved == plain.total - cached.total == Decimal("0.18")


def map_decimals(text: str) -> tuple[Decimal, ...]:
    return tuple(map(Decimal, text.split()))


def test_a_read_book_to_the_cent() -> None:
    """188,086 tokens written once and read nine times at $3: 0.705… and nine times 0.056…"""
    rules, price = rules_of("claude-sonnet-4-5"), builtin_table().price("anthropic", "claude-sonnet-4-5", DAY)
    assert price is not None
    written = money_of(TokenUse(21, {"5m": 188_086}, 0, 393), rules, price)
    assert written.total == Decimal("0.7112805")
    assert in_cents(written.total) == Decimal("0.71")
    assert in_cents(Decimal("0.005")) == Decimal("0.01")


def test_the_ledger_adds_up_by_account_and_day() -> None:
    ledger = Ledger(builtin_table())
    account = Account("anthropic", "claude-opus-5-5", "tenant", "support")
    before, after = DAY.replace(month=10, day=1), DAY
    use = TokenUse(read=1_000_000)
    assert ledger.add(account, use, before) is not None
    assert ledger.add(account, use, after) is not None
    (found,) = [entry for known, entry in ledger if known == account]
    assert found.num_requests == 2
    assert found.money.read == Decimal("0.4") + Decimal("0.2")
    assert ledger.add(Account("openai", "nobody-knows"), use, DAY) is None
    assert ledger.total.read == Decimal("0.6")


@given(
    st.integers(0, 10**7),
    st.integers(0, 10**7),
    st.integers(0, 10**7),
    st.integers(0, 10**7),
    st.integers(0, 10**5),
)
def test_classes_add_up_to_the_whole(uncached: int, short: int, long: int, read: int, output: int) -> None:
    anthropic = read_usage(
        "anthropic",
        {
            "input_tokens": uncached,
            "cache_creation_input_tokens": short + long,
            "cache_creation": {"ephemeral_5m_input_tokens": short, "ephemeral_1h_input_tokens": long},
            "cache_read_input_tokens": read,
            "output_tokens": output,
        },
    )
    openai = read_usage(
        "openai",
        {
            "prompt_tokens": uncached + short + long + read,
            "completion_tokens": output,
            "prompt_tokens_details": {
                "cached_tokens": read,
                "cache_write_tokens": short + long,
                "cache_write_tokens_details": {"ttl_30m_tokens": short, "ttl_12h_tokens": long},
            },
        },
    )
    assert anthropic is not None
    assert openai is not None
    assert anthropic.input == openai.input == uncached + short + long + read
    assert (anthropic.uncached, anthropic.num_written) == (openai.uncached, openai.num_written)
