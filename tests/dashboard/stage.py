"""A server before a real engine, and traffic of every kind through the official client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

import ostinato
from ostinato.server import Server, create_app, server_settings
from ostinato.server.dashboard import Dashboard

ADMIN = "admin-secret"
ATTACK = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>{{ 123457 * 3 }}\"'&amp;"
SYSTEM = "You are the guide of a museum of instruments. Answer kindly and in at most three sentences."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look an instrument up in the catalogue.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
        },
    }
]
DOCUMENTS = [
    "The serpent is a bass wind instrument of leather-covered wood, played with a cup mouthpiece.",
    "The ophicleide replaced it in the orchestras of the nineteenth century, and the tuba replaced that.",
    "The glass harmonica is played with wet fingers on turning bowls; Franklin built it in 1761.",
]
QUESTIONS = ["What is a serpent?", "And who played it?", "Is it still built?", "Which one is the oldest?"]


@dataclass
class Stage:
    """A running server, its engine, its dashboard, and a client for each key."""

    url: str
    engine: ostinato.Engine
    dashboard: Dashboard
    _num_expected: int = 0

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def recorded(self, num_requests: int) -> None:
        """Waits until so many more requests are on the pages: a client hears first that one has ended."""
        self._num_expected += num_requests
        deadline_s = time.monotonic() + 10
        while self.dashboard.history.total().num_requests < self._num_expected:
            assert time.monotonic() < deadline_s, f"{self._num_expected} requests are not recorded"
            time.sleep(0.005)
        assert self.dashboard.recorder.flush(10)

    def remembered(self, name: str) -> None:
        """Waits until the request with this id is on the pages."""
        deadline_s = time.monotonic() + 10
        while self.dashboard.recent.get(name) is None:
            assert time.monotonic() < deadline_s, f"{name} is not recorded"
            time.sleep(0.005)
        self._num_expected += 1


@contextmanager
def on_stage(engine: ostinato.Engine, **settings: Any) -> Iterator[Stage]:
    """Serves ``engine``; whoever made it closes it."""
    wire = server_settings(**({"port": 0, "drain_timeout_s": 1.0} | settings))
    app = create_app(engine.runtime, wire, engine.runtime)
    is_ready, urls = threading.Event(), list[str]()

    def ready(url: str) -> None:
        urls.append(url)
        is_ready.set()

    server = Server(app, wire, ready)
    thread = threading.Thread(target=server.run_until_stopped, name="server")
    thread.start()
    try:
        assert is_ready.wait(20), "the server did not start"
        yield Stage(urls[0], engine, app.state.dashboard)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def save_prompts(folder: Path) -> Path:
    """A file with one named prompt, for the engine."""
    path = folder / "prompts.toml"
    text = f'[guide]\nmessages = [{{role = "system", content = "{SYSTEM}"}}]\n'
    path.write_text(text, encoding="utf-8")
    return path


def play(
    client: openai.OpenAI, model: str, *, max_tokens: int = 4, more: dict[str, Any] | None = None
) -> int:
    """One round of every kind of request; returns how many there were."""
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": max_tokens}
    extra = more or {}
    num = 0
    talk: list[Any] = []
    for question in QUESTIONS[:3]:  # a chat with a named prompt
        talk.append({"role": "user", "content": question})
        reply = client.chat.completions.create(
            messages=talk, extra_body={"prompt": {"name": "guide"}} | extra, **options
        )
        talk.append({"role": "assistant", "content": reply.choices[0].message.content or "…"})
        num += 1
    steps: list[Any] = [
        {"role": "system", "content": "You look instruments up before you answer."},
        {"role": "user", "content": "When was the glass harmonica built?"},
    ]
    for step in range(3):  # an agent
        client.chat.completions.create(messages=steps, tools=TOOLS, extra_body=extra, **options)
        call = {"id": f"call_{step}", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
        steps += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{step}", "content": DOCUMENTS[step]},
        ]
        num += 1
    for number, question in enumerate(QUESTIONS[:2]):  # documents in another order
        order = DOCUMENTS[number:] + DOCUMENTS[:number]
        text = "\n".join(f"<document>{document}</document>" for document in order)
        asked = [{"role": "user", "content": f"{text}\n\n{question}"}]
        client.chat.completions.create(messages=asked, extra_body=extra, **options)  # type: ignore[arg-type]
        num += 1
    for question in QUESTIONS[:2]:
        asked = [{"role": "user", "content": f"{question} In one word, please."}]
        client.chat.completions.create(messages=asked, extra_body=extra, **options)  # type: ignore[arg-type]
        num += 1
    client.completions.create(prompt="Once upon a time there was an instrument", extra_body=extra, **options)
    return num + 1
