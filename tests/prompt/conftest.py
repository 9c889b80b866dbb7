"""What the tests of this room share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato.prompt.tokens import HFTokenizer

from .jinja_sources import PAIRS, SETTINGS
from .vocabularies import KINDS, NONCE, write_folder


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HFTokenizer]:
    """Our tokenizer for a kind of :data:`KINDS`."""
    root = tmp_path_factory.mktemp("kinds")

    @functools.cache
    def make(kind: str) -> HFTokenizer:
        assert kind in KINDS, kind
        folder = write_folder(root / kind, kind, config=SETTINGS.get(kind))
        return HFTokenizer.from_folder(folder, nonce=NONCE)

    return make


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a pair of :data:`PAIRS`: tokenizer and chat template, as on the hub."""
    root = tmp_path_factory.mktemp("pairs")

    @functools.cache
    def make(pair: str) -> Path:
        kind, template = PAIRS[pair]
        return write_folder(root / pair, kind, config=SETTINGS.get(kind), template=template)

    return make


@pytest.fixture(scope="session")
def references(model_folders: Callable[[str], Path]) -> Callable[[str], Any]:
    """transformers' own tokenizer for a pair."""

    @functools.cache
    def make(pair: str) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_folders(pair))

    return make
