from __future__ import annotations

from datetime import date

import pytest

from ostinato.cli_model import tokenizer_of
from ostinato.diagnose.writing import Writer
from ostinato.prompt.tokens import HFTokenizer

DAY = date(2026, 11, 1)


@pytest.fixture(scope="session")
def tokenizer() -> HFTokenizer:
    """The default model's."""
    return tokenizer_of(None, None, None)[0]


@pytest.fixture(scope="session")
def writer(tokenizer: HFTokenizer) -> Writer:
    return Writer(tokenizer)
