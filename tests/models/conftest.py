from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_folder import save_model
from tiny_gguf import write_gguf
from zygote import Zygote

from ostinato.models.store import ModelStore


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file that nobody changes."""
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama-tied", quantisation="Q4_1", layers=6
    )


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("saved") / "tiny-llama")


@pytest.fixture
def model_folder(saved_model: Path, tmp_path: Path) -> Path:
    """A model folder to break."""
    return Path(shutil.copytree(saved_model, tmp_path / "tiny-llama"))


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process
