"""What all tests share: the default model, fetched once into the user's own store."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported anywhere, and for the processes that tests start: workers side by side, each with
# threads that wait for one another, keep each other from running.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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


@pytest.fixture(scope="session")
def embedder_path() -> Path:
    """The folder of the default embedder (fetched on first use)."""
    from ostinato.models.embedder import DEFAULT_EMBEDDER, fetch_embedder

    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    return fetch_embedder(DEFAULT_EMBEDDER, ModelStore(settings.store)).path
