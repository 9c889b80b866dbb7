"""What all tests share: the default model, fetched once into the user's own store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ostinato.config import Settings
from ostinato.models.fetch import fetch
from ostinato.models.store import ModelStore


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The folder of the default model (fetched on first use; two workers wait for each other)."""
    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    return fetch(settings.model, ModelStore(settings.store), progress=None).path
