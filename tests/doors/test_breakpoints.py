"""``cache_control`` on a real engine: what is reported is what was read, and its KV is pinned."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.server import Server, ServerSettings, create_app

TEXT = "You are a guide in a museum of instruments and answer briefly."
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def ask(client: Anthropic, model: str, question: str, marked: dict[str, Any] | None) -> Any:
    first: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": TEXT}]}
    if marked is not None:
        first["content"][0]["cache_control"] = marked
    messages = [first, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": question}]
    return client.messages.create(
        model=model,
        max_tokens=4,
        messages=messages,
        extra_body={"temperature": 0},  # type: ignore[arg-type]
    )


def test_breakpoints_pin_real_kv_and_usage_is_what_was_read(folder: Path) -> None:
    with ostinato.load(folder, kv_cache=400 * BLOCK_BYTES, block_size=4, policy="lru") as engine:
        settings = ServerSettings(port=0, drain_timeout_s=1.0, pin_breakpoints=True)
        is_ready, urls = threading.Event(), list[str]()

        def ready(url: str) -> None:
            urls.append(url)
            is_ready.set()

        server = Server(create_app(engine.runtime, settings, engine.runtime), settings, ready)
        thread = threading.Thread(target=server.run_until_stopped)
        thread.start()
        try:
            assert is_ready.wait(20)
            with Anthropic(base_url=urls[0], api_key="none", max_retries=0) as client:
                model = engine.runtime.model_name
                plain = ask(client, model, "one", None)
                assert plain.usage.cache_creation_input_tokens == 0
                assert engine.cache_summary().pins == ()
                marked = ask(client, model, "two", {"type": "ephemeral", "ttl": "1h"})
                total = plain.usage.input_tokens
                assert 0 < marked.usage.cache_read_input_tokens < total
                deadline = time.monotonic() + 20
                while not (pins := engine.cache_summary().pins) and time.monotonic() < deadline:
                    time.sleep(0.02)
                assert len(pins) == 1
                assert pins[0].num_tokens >= len(TEXT)
                assert 3000 < pins[0].expires_in_s <= 3600
                for number in range(20):
                    engine.chat(
                        f"{number} is a question that nobody has asked yet {number}" * 3, max_tokens=2
                    )
                after = ask(client, model, "three", None)
                assert after.usage.cache_read_input_tokens >= pins[0].num_tokens
                assert after.content == ask(client, model, "three", None).content
        finally:
            server.stop()
            thread.join(20)
