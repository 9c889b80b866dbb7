"""``ostinato serve`` in a process of its own, with the official client, on a tiny model."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from doors.tiny import save_tiny_chat_model

TALK: list[Any] = [
    {"role": "system", "content": "Be brief, and say only what is true."},
    {"role": "user", "content": "Hello there, how are you?"},
]


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    model: str

    def __post_init__(self) -> None:
        self.own = self.client()

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | options)

    def ask(self, messages: list[Any] = TALK, **options: Any) -> Any:
        options = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}} | options
        return self.own.chat.completions.create(model=self.model, messages=messages, **options)

    def held_blocks(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        found = re.search(r'^ostinato_kv_blocks\{state="held"\} (\S+)', text, re.MULTILINE)
        assert found
        return int(float(found.group(1)))

    def wait_for_nothing_held(self) -> None:
        deadline = time.monotonic() + 30
        while self.held_blocks():
            assert time.monotonic() < deadline, "blocks are still held"
            time.sleep(0.05)


def start(folder: Path, *arguments: str) -> Served:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ostinato",
            "serve",
            str(folder),
            "--port",
            "0",
            "--kv-cache",
            "2M",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        found = re.search(r"Serving (\S+) at (http://\S+)", line)
        if found:
            return Served(process, found.group(2), found.group(1))
    raise AssertionError(f"the server did not start: {''.join(said)}")


def stop(served: Served) -> int:
    served.own.close()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.stdout is not None
    code = served.process.wait(60)
    served.process.stdout.close()
    return code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("served") / "tiny", max_len=4096)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    running = start(folder)
    yield running
    assert stop(running) == 0


def test_the_second_turn_costs_only_its_new_tokens(served: Served) -> None:
    first = served.ask()
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    answer = first.choices[0].message.content
    more = [*TALK, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    second = served.ask(more)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    fresh = served.ask(more, extra_body={"ignore_eos": True, "cache_salt": "nobody else's"})
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    assert fresh.choices[0].message.content == second.choices[0].message.content


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6])
def test_no_temperature_harms_another_request(served: Served, temperature: float) -> None:
    expected = served.ask(max_tokens=40).choices[0].message.content
    stream = served.ask(max_tokens=40, stream=True)
    pieces = [next(stream)]
    cold = served.ask(temperature=temperature, seed=1).choices[0].message.content
    assert cold == served.ask().choices[0].message.content
    pieces += stream
    assert "".join(e.choices[0].delta.content or "" for e in pieces) == expected


def test_a_stream_is_the_plain_answer_in_pieces(served: Served) -> None:
    plain = served.ask()
    pieces = list(served.ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(e.choices[0].delta.content or "" for e in pieces if e.choices)
    assert text == plain.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == plain.usage.completion_tokens


async def test_many_at_once_and_some_abandoned(served: Served) -> None:
    expected = served.ask(max_tokens=24).choices[0].message.content

    async def one(number: int) -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model=served.model,
                messages=TALK,
                temperature=0,
                max_tokens=24,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            text = ""
            async for event in stream:
                text += event.choices[0].delta.content or ""
                if number % 3 == 0 and len(text) > 3:
                    await stream.close()
                    return
            assert text == expected

    await asyncio.gather(*(one(number) for number in range(24)))
    served.wait_for_nothing_held()


def test_errors_have_openais_shape(served: Served) -> None:
    tool_result = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    for messages, options, code in (
        ([{"role": "user", "content": "x" * 100_000}], {}, "context_length_exceeded"),
        ([*TALK, tool_result], {}, "orphan_tool_result"),
        (TALK, {"temperature": 3}, "invalid_value"),
        (TALK, {"max_tokens": 10_000}, "invalid_value"),
        (TALK, {"max_tokens": 4090}, "context_length_exceeded"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            served.ask(messages, **options)
        assert refused.value.code == code
    with pytest.raises(openai.NotFoundError) as unknown:
        served.own.chat.completions.create(model="another", messages=TALK)
    assert unknown.value.code == "model_not_found"
    assert served.ask().choices[0].finish_reason == "length"


def test_keys_have_salts_of_their_own(folder: Path) -> None:
    running = start(folder, "--api-keys", "ada,bob")
    try:

        def cached(key: str) -> int:
            with running.client(api_key=key) as client:
                reply = client.chat.completions.create(model=running.model, messages=TALK, max_tokens=1)
            assert reply.usage is not None
            assert reply.usage.prompt_tokens_details is not None
            return reply.usage.prompt_tokens_details.cached_tokens or 0

        assert cached("ada") == 0
        assert cached("ada") > 0
        assert cached("bob") == 0
        with pytest.raises(openai.AuthenticationError):
            cached("eve")
    finally:
        assert stop(running) == 0


def test_sigterm_lets_running_requests_finish(folder: Path) -> None:
    running = start(folder)
    with running.client() as client:
        stream = client.chat.completions.create(
            model=running.model,
            messages=TALK,
            max_tokens=300,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        events = iter(stream)
        next(events)
        running.process.send_signal(signal.SIGTERM)
        reasons = [event.choices[0].finish_reason for event in events]
    assert reasons[-1] == "length"
    assert stop(running) == 0


def test_what_an_operator_sets_for_all_prompts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.toml").write_text('[ask]\ntext = "Of {{topic}}, in one word?"\n')
    (tmp_path / "rules.toml").write_text('[roles.note]\nas_role = "system"\npattern = "Note: {content}"\n')
    (tmp_path / "canonical.toml").write_text("line_ends = true\n")
    files = [
        part
        for name in ("prompts", "rules", "canonical")
        for part in (f"--{name}", tmp_path / f"{name}.toml")
    ]
    files[2] = "--message-rules"
    running = start(folder, *map(str, files), "--trim", "sticky", "--trim-budget", "400")
    try:
        long = [{"role": "user", "content": f"{n}\r\n" + "why " * 40} for n in range(4)]
        reply = running.ask([{"role": "note", "content": "It rains."}, *long])
        assert reply.ostinato["trim"]["dropped_messages"] >= 2
        assert {item["rule"] for item in reply.ostinato["canonical"]} == {"line_ends"}
        assert reply.usage.prompt_tokens <= 400
        named = running.ask([], extra_body={"prompt": {"name": "ask", "variables": {"topic": "organs"}}})
        assert named.ostinato["prompt"] == "ask"
    finally:
        assert stop(running) == 0
    refused = subprocess.run(
        [sys.executable, "-m", "ostinato", "serve", str(folder), "--prompts", str(tmp_path / "rules.toml")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "rules.toml: [roles] must have text or messages" in refused.stderr
