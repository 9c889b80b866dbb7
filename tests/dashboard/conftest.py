from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ostinato
from dashboard.stage import ADMIN, Stage, on_stage, play, save_prompts
from doors.tiny import save_tiny_chat_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"), max_len=4096)


@pytest.fixture(scope="session")
def guarded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server with keys, a tier, named prompts and an admin, after some traffic of two tenants."""
    folder = tmp_path_factory.mktemp("guarded")
    settings = {"kv_cache": "4MiB", "shared_tier": folder / "tier", "shared_tier_bytes": "8MiB"}
    with (
        ostinato.load(tiny, template="qwen2.5", prompts=save_prompts(folder), **settings) as engine,
        on_stage(engine, api_keys="sk-anna,sk-ben", admin_key=ADMIN) as stage,
    ):
        for key in ("sk-anna", "sk-ben", "sk-anna"):
            with stage.client(key) as client:
                stage.recorded(play(client, engine.runtime.model_name))
        yield stage


@pytest.fixture(scope="session")
def open_stage(tiny: Path) -> Iterator[Stage]:
    """A server as it starts by itself: no keys at all."""
    with ostinato.load(tiny, kv_cache="2MiB") as engine, on_stage(engine) as stage:
        yield stage
