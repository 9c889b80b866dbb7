"""Both official clients through the gateway to the local server, over sockets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic import Anthropic
from click.testing import CliRunner
from openai import OpenAI

from gateway.gateways import gateway
from ostinato.cli import main
from ostinato.errors import ParameterError
from ostinato.gateway import Upstream, parse_upstream, read_upstreams
from ostinato.gateway.upstreams import choose
from ostinato.server.settings import ApiKey
from server.conftest import Running, start_server


@pytest.fixture(scope="module")
def upstream() -> Iterator[Running]:
    running = start_server({"anthropic_rules": "claude-opus-5"}, {})
    yield running
    running.stop()


@pytest.fixture(scope="module")
def url(upstream: Running) -> Iterator[str]:
    with gateway(
        Upstream("claude", upstream.url, "anthropic", ("claude-*",), plan="plan"),
        Upstream("echo", upstream.url, "openai", ("echo",)),
    ) as made:
        yield made


@pytest.fixture
def claude(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="k", max_retries=0) as made:
        yield made


@pytest.fixture
def gpt(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as made:
        yield made


def test_openai_plain_and_streaming(gpt: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello thére"}]
    reply = gpt.chat.completions.create(model="echo", messages=messages)
    assert reply.choices[0].message.content == "hello thére"
    parts = list(
        gpt.chat.completions.create(
            model="echo", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == "hello thére"
    assert parts[-1].usage is not None
    assert gpt.completions.create(model="echo", prompt="abc").choices[0].text == "abc"


def test_anthropic_plain_and_streaming(claude: Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "hello thére"}]
    reply = claude.messages.create(model="claude-opus-5", max_tokens=50, messages=messages)
    assert reply.content[0].text == "hello thére"  # type: ignore[union-attr]
    with claude.messages.stream(model="claude-opus-5", max_tokens=50, messages=messages) as stream:
        assert "".join(stream.text_stream) == "hello thére"
    assert claude.messages.count_tokens(model="claude-opus-5", messages=messages).input_tokens > 5


def test_planned_breakpoints_make_the_vendor_read(claude: Anthropic) -> None:
    """The upstream counts by Anthropic's rules; the application sets no breakpoint at all."""
    blocks = []
    read = 0
    for turn in range(6):
        blocks.append({"role": "user", "content": f"turn {turn} " + "words " * 200})
        usage = claude.messages.create(model="claude-opus-5", max_tokens=5, messages=blocks).usage  # type: ignore[arg-type]
        read = usage.cache_read_input_tokens or 0
        blocks.append({"role": "assistant", "content": "noted"})
    assert read > 5 * 1200


def test_an_upstreams_errors_are_the_clients(gpt: OpenAI, claude: Anthropic) -> None:
    with pytest.raises(openai.BadRequestError, match="surprise"):
        gpt.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "x"}], extra_body={"surprise": 1}
        )
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(
            model="claude-opus-5",
            max_tokens=5,
            messages=[{"role": "user", "content": [{"type": "image"}]}],  # type: ignore[typeddict-item, list-item]
        )
    with pytest.raises(openai.NotFoundError, match="No upstream"):
        gpt.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="anthropic's API"):
        gpt.chat.completions.create(model="claude-opus-5", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.APIError):
        list(gpt.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "!fail-late"}], stream=True
        ))  # fmt: skip


def test_a_client_that_leaves_frees_the_upstream(upstream: Running, gpt: OpenAI, url: str) -> None:
    with pytest.raises(openai.APITimeoutError):
        gpt.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "!stall"}], stream=True, timeout=0.5
        )
    assert upstream.engine.wait_idle(10)
    deadline = time.monotonic() + 10
    while httpx2.get(f"{url}/health").json()["num_running"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert httpx2.get(f"{url}/health").json()["num_running"] == 0


def test_costs_are_counted_and_shown(claude: Anthropic, url: str) -> None:
    claude.messages.create(model="claude-opus-5", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    shown = CliRunner().invoke(main, ["costs", "--url", url, "--json"])
    assert shown.exit_code == 0, shown.output
    rows = [json.loads(line) for line in shown.output.splitlines()]
    (row,) = [row for row in rows if row["model"] == "claude-opus-5"]
    assert row["vendor"] == "anthropic"
    assert row["output_tokens"] > 0
    assert float(row["dollars"]) > 0
    table = CliRunner().invoke(main, ["costs", "--url", url], env={"COLUMNS": "200"}).output
    assert "claude-opus-5" in table
    metrics = httpx2.get(f"{url}/metrics").text
    assert 'ostinato:upstream_tokens_total{kind="output",vendor="anthropic"}' in metrics


def test_keys_of_the_gateway_never_reach_an_upstream(upstream: Running) -> None:
    with gateway(
        Upstream("echo", upstream.url), api_keys=(ApiKey("one", "secret-1"),), admin_key="admin"
    ) as url:
        with (
            OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "x"}])
        with OpenAI(base_url=f"{url}/v1", api_key="secret-1", max_retries=0) as client:
            client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "x"}])
        assert CliRunner().invoke(main, ["costs", "--url", url]).exit_code != 0
        assert CliRunner().invoke(main, ["costs", "--url", url, "--admin-key", "admin"]).exit_code == 0


# ---------------------------------------------------------------- configuration


def test_addresses_are_known_by_their_host() -> None:
    environment = {"ANTHROPIC_API_KEY": "a-secret"}
    claude = parse_upstream("https://api.anthropic.com", environment)
    assert (claude.protocol, claude.key, claude.vendor) == ("anthropic", "a-secret", "anthropic")
    assert "a-secret" not in repr(claude)
    local = parse_upstream("anthropic+http://127.0.0.1:9/v1", {})
    assert (local.protocol, local.url, local.key) == ("anthropic", "http://127.0.0.1:9", "")
    for bad in ("ftp://x", "nonsense", "https://user:key@host"):
        with pytest.raises(ParameterError):
            parse_upstream(bad, {})


def test_a_file_of_upstreams(tmp_path: Path) -> None:
    file = tmp_path / "upstreams.toml"
    file.write_text(
        '[[upstream]]\nurl = "https://api.anthropic.com/v1"\nprotocol = "anthropic"\nmodels = ["claude-*"]\n'
        'key_env = "KEY"\nplan = "plan"\n[[upstream]]\nurl = "http://127.0.0.1:8001"\n'
    )
    first, second = read_upstreams(file, {"KEY": "k"})
    assert (first.key, first.plan, first.url) == ("k", "plan", "https://api.anthropic.com")
    assert choose([first, second], "openai", "llama") is second
    assert choose([first, second], "anthropic", "claude-opus-5") is first
    with pytest.raises(ParameterError, match="KEY is not set"):
        read_upstreams(file, {})
    for text, says in (
        ("[[upstream]]\n", "url"),
        ('[[upstream]]\nurl = "http://x"\nkey = "k"\n', "key"),
        ('[[upstream]]\nurl = "http://x"\nplan = "always"\n', "plan"),
        ('[[upstream]]\nurl = "http://x"\nidle_timeout_s = "long"\n', "idle_timeout_s"),
        ("x = 1\n", "upstream"),
        ("nonsense", "read"),
    ):
        file.write_text(text)
        with pytest.raises(ParameterError, match=says):
            read_upstreams(file, {})
