"""The table: dated, overridable, exact, and in agreement with what vendors publish."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from ostinato.errors import ParameterError
from ostinato.providers.rules import builtin_table, load_table, vendor_of_model
from providers.asked import DAY, rules_of

MINIMUMS = {
    512: "fable-5 mythos-5 fable-5-1 mythos-5-1 opus-5 opus-5-5 sonnet-5-5 haiku-5-5",
    1024: "opus-4-8 sonnet-5 sonnet-4-6 sonnet-4-5 sonnet-4 opus-4-1 opus-4",
    2048: "opus-4-7 mythos-preview haiku-3-5",
    4096: "opus-4-6 opus-4-5 haiku-4-5",
}


@pytest.mark.parametrize(
    ("minimum", "name"), [(minimum, name) for minimum, names in MINIMUMS.items() for name in names.split()]
)
def test_every_model_has_its_minimum(minimum: int, name: str) -> None:
    assert rules_of(f"claude-{name}").min_tokens == minimum
    assert rules_of(f"anthropic/claude-{name}-20260101").min_tokens == minimum


@pytest.mark.parametrize(
    ("model", "on", "read"),
    [
        ("claude-opus-5-5", date(2026, 10, 6), "0.1"),
        ("claude-opus-5-5", date(2026, 10, 7), "0.05"),
        ("claude-sonnet-5-5", DAY, "0.05"),
        ("claude-opus-5", DAY, "0.1"),
        ("claude-fable-5-1", DAY, "0.025"),
        ("claude-mythos-5", DAY, "0.1"),
    ],
)
def test_reads_cost_what_they_cost_on_the_day(model: str, on: date, read: str) -> None:
    assert rules_of(model, on=on).read == Decimal(read)


@pytest.mark.parametrize(
    ("model", "mechanism", "read"),
    [
        ("gpt-4o", "automatic", "0.5"),
        ("gpt-4.1-mini", "automatic", "0.25"),
        ("gpt-5", "automatic", "0.1"),
        ("gpt-5.5", "automatic", "0.1"),
        ("gpt-5.6-sol", "endpoints", "0.1"),
        ("gpt-6-sol", "endpoints", "0.1"),
        ("gpt-6.1-sol", "endpoints", "0.05"),
    ],
)
def test_openai_models_by_generation(model: str, mechanism: str, read: str) -> None:
    rules = rules_of(model, "openai")
    assert (rules.mechanism, rules.read) == (mechanism, Decimal(read))


# The vendor's own price page, dollars per million: input, 5m write, 1h write, read, output.
PRICE_PAGE = """
claude-fable-5-1 10 12.50 20 0.25 50
claude-mythos-5-1 10 12.50 20 0.25 50
claude-fable-5 10 12.50 20 1 50
claude-opus-5 5 6.25 10 0.50 25
claude-opus-4-8 5 6.25 10 0.50 25
claude-opus-4-6 5 6.25 10 0.50 25
claude-sonnet-4-5 3 3.75 6 0.30 15
claude-haiku-4-5 1 1.25 2 0.10 5
"""


@pytest.mark.parametrize("line", PRICE_PAGE.strip().splitlines())
def test_multipliers_give_the_published_prices(line: str) -> None:
    model, *published = line.split()
    rules, price = rules_of(model), builtin_table().price("anthropic", model, DAY)
    assert price is not None
    ours = [
        price.input,
        price.input * rules.lifetime("5m").write,
        price.input * rules.lifetime("1h").write,
        price.input * rules.read,
        price.output,
    ]
    assert ours == list(map(Decimal, published))


def test_break_even_is_the_second_and_the_third_request() -> None:
    rules = rules_of("claude-opus-5")
    assert 1 < rules.break_even("5m") < 2
    assert 2 < rules.break_even("1h") < 3


def test_every_row_has_a_source_with_a_day() -> None:
    table = builtin_table()
    assert table.rows
    for row in table.rows:
        assert table.sources[row.source].read <= table.version


def test_conflicts_are_told() -> None:
    assert any("512" in conflict for conflict in rules_of("claude-mythos-preview").conflicts)


def test_users_rows_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "schema = 1\n[sources]\nbill = { title = 'Our contract', read = 2026-11-30 }\n"
        "[[rule]]\nvendor = 'anthropic'\nmodels = ['claude-opus-5']\nread = '0.08'\nsource = 'bill'\n"
        "[[price]]\nvendor = 'anthropic'\nmodels = ['*']\ninput = '4.5'\noutput = '20'\nsource = 'bill'\n"
    )
    table = load_table([file])
    assert table.rules("anthropic", "claude-opus-5", DAY).read == Decimal("0.08")
    assert table.rules("anthropic", "claude-opus-5-5", DAY).read == Decimal("0.05")
    price = table.price("anthropic", "claude-opus-5", DAY)
    assert price is not None
    assert price.input == Decimal("4.5")
    assert table.rules("anthropic", "claude-opus-5", DAY).sources["read"] == "bill"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("[[rule]]\nvendor='x'\nread=0.1\nsource='s'", "exact"),
        ("[[rule]]\nvendor='x'\nread='-1'\nsource='s'", "0 or more"),
        ("[[rule]]\nvendor='x'\nread='1'\nsource='other'", "not in"),
        ("[[rule]]\nvendor='x'\nnonsense=1\nsource='s'", "nonsense"),
        ("[[rule]]\nvendor='x'\nmin_tokens='many'\nsource='s'", "whole number"),
        ("[[rule]]\nvendor='x'\nmechanism='magic'\nsource='s'", "one of"),
        ("[[invalidates]]\nvendor='x'\nchange='a'\nlevel='b'\nsource='s'", "level"),
        ("[[price]]\nvendor='x'\ninput='1'\nsource='s'", "output"),
        ("[surprise]", "surprise"),
    ],
)
def test_bad_rows_are_refused_by_name(tmp_path: Path, row: str, says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"schema = 1\n[sources]\ns = {{ title = 't', read = 2026-01-01 }}\n{row}\n")
    with pytest.raises(ParameterError) as caught:
        load_table([file])
    assert says in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_unknown_vendors_are_refused() -> None:
    with pytest.raises(ParameterError, match="no rules"):
        builtin_table().rules("nobody", "x", DAY)


@pytest.mark.parametrize(
    ("model", "vendor"),
    [
        ("claude-opus-5", "anthropic"),
        ("openrouter/anthropic/claude-opus-5", "anthropic"),
        ("us.anthropic.claude-opus-4-7-v1:0", "bedrock"),
        ("gpt-5.6", "openai"),
        ("deepseek-v4-flash", "deepseek"),
        ("gemini-3.5-flash", "gemini"),
    ],
)
def test_vendors_by_name(model: str, vendor: str) -> None:
    assert vendor_of_model(model) == vendor


def test_a_long_request_has_the_long_price() -> None:
    price = builtin_table().price("openai", "gpt-5.6", DAY)
    assert price is not None
    assert price.of_request(272_000).input == Decimal(4)
    assert price.of_request(272_001).input == Decimal(8)
