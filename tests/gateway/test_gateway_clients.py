"""Both official clients through the gateway to the local server, over sockets."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
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
from gateway.raw_upstream import STREAM_HEAD, RawUpstream, whole
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


def test_of_requests_at_once_one_writes_and_the_others_read(claude: Anthropic) -> None:
    """They wait for the first token of the first: to the vendor none of them could have read before."""
    system: Any = [{"type": "text", "text": "shared " * 400, "cache_control": {"type": "ephemeral"}}]
    written: list[int] = []

    def one(number: int) -> None:
        usage = claude.messages.create(
            model="claude-opus-5",
            max_tokens=5,
            system=system,
            messages=[{"role": "user", "content": f"question {number}"}],
        ).usage
        written.append(usage.cache_creation_input_tokens or 0)
        assert (usage.cache_read_input_tokens or 0) + written[-1] >= 2800

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    assert sorted(count > 1000 for count in written) == [False] * 7 + [True]


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
        gpt.completions.create(model="claude-opus-5", prompt="x")
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
    assert 'ostinato_upstream_tokens_total{kind="output",vendor="anthropic"}' in metrics
    assert re.search(r'^ostinato_reuse_lookup_tokens_total\{layer="provider"\} [1-9]', metrics, re.MULTILINE)


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


def test_a_message_that_is_left_frees_the_upstream(upstream: Running, claude: Anthropic, url: str) -> None:
    with pytest.raises(anthropic.APITimeoutError):
        claude.messages.create(
            model="claude-opus-5",
            max_tokens=9,
            messages=[{"role": "user", "content": "!stall"}],
            timeout=0.5,
        )
    assert upstream.engine.wait_idle(10)


IMAGE: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
USED: Any = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x", "stop_reason": "tool_use",
    "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 7},
    "content": [{"type": "tool_use", "id": "t0", "name": "look", "input": {"at": "the tree"}}],
}  # fmt: skip


def test_images_and_tools_of_anthropics_client_pass_as_they_are() -> None:
    asked: Any = {
        "model": "claude-x",
        "max_tokens": 9,
        "tools": [
            {"name": "look", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
        ],
        "messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "what?"}]}],
    }
    with (
        RawUpstream([whole(json.dumps(USED).encode())]) as raw,
        gateway(Upstream("raw", raw.url, "anthropic")) as url,
        Anthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        reply = client.messages.create(**asked)
        assert reply.content[0].input == {"at": "the tree"}  # type: ignore[union-attr]
        assert json.loads(raw.seen[0].body) == asked
        assert client.beta.messages.create(**asked, betas=["x-1"]).stop_reason == "tool_use"
        assert raw.seen[1].header("anthropic-beta") == "x-1"


def test_images_and_tools_of_openais_client_pass_as_they_are() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}}
    call = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    reply = {
        "id": "x", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
    }  # fmt: skip
    asked: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    }
    with (
        RawUpstream([whole(json.dumps(reply).encode())]) as raw,
        gateway(Upstream("raw", raw.url)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.message.tool_calls[0].function.name == "look"  # type: ignore[index, union-attr]
        assert json.loads(raw.seen[0].body) == asked


def test_responses_pass_plain_and_streaming() -> None:
    part = {"type": "output_text", "text": "hi", "annotations": []}
    item = {"id": "m1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    response: Any = {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "gpt-6", "status": "completed",
        "output": [item], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "usage": {"input_tokens": 5, "output_tokens": 1, "total_tokens": 6,
                  "input_tokens_details": {"cached_tokens": 0},
                  "output_tokens_details": {"reasoning_tokens": 0}},
    }  # fmt: skip
    begun = {
        "type": "response.created",
        "sequence_number": 0,
        "response": response | {"output": [], "usage": None},
    }
    ended = {"type": "response.completed", "sequence_number": 1, "response": response}
    events = [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in (begun, ended)]
    with (
        RawUpstream([whole(json.dumps(response).encode()), [STREAM_HEAD, *events]]) as raw,
        gateway(Upstream("raw", raw.url)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        assert client.responses.create(model="gpt-6", input="hello").output_text == "hi"
        kinds = [event.type for event in client.responses.create(model="gpt-6", input="hello", stream=True)]
        assert kinds == ["response.created", "response.completed"]
        (row,) = httpx2.get(f"{url}/v1/ostinato/costs").json()["rows"]
        assert (row["requests"], row["uncached_tokens"], row["output_tokens"]) == (2, 10, 2)


def test_documented_examples_reconcile_to_the_cent() -> None:
    """Anthropic's price page: 50,000 tokens in, 40,000 of them read, 15,000 out, at $5 and $25: $0.445."""
    usage = {"input_tokens": 10_000, "cache_read_input_tokens": 40_000, "output_tokens": 15_000}
    reply = whole(json.dumps({**USED, "usage": usage}).encode())
    body = {"model": "claude-opus-4-6", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    with RawUpstream([reply]) as raw, gateway(Upstream("raw", raw.url, "anthropic")) as url:
        for name in ("support", "support", "search"):
            httpx2.post(f"{url}/v1/messages", json=body, headers={"x-ostinato-prompt": name})
        shown = CliRunner().invoke(main, ["costs", "--url", url, "--json"])
        rows = [json.loads(line) for line in shown.output.splitlines()]
        assert {row["prompt"]: (row["requests"], Decimal(row["dollars"])) for row in rows} == {
            "support": (2, Decimal("0.890")),
            "search": (1, Decimal("0.445")),
        }
        assert Decimal(rows[0]["dollars_without_cache"]) == Decimal("1.25")
        assert raw.seen[0].header("x-ostinato-prompt") is None


def test_repairs_are_made_and_told() -> None:
    tools = [{"name": name, "input_schema": {"type": "object", "a": 1}} for name in ("look", "ask")]
    body = {
        "model": "claude-opus-5", "max_tokens": 9, "tools": tools,
        "system": "Now: 2026-12-01T10:00:00Z\nBe kind.", "messages": [{"role": "user", "content": "x"}],
    }  # fmt: skip
    with RawUpstream([whole(json.dumps(USED).encode())]) as raw:
        repairing = Upstream(
            "raw", raw.url, "anthropic", plan="plan", repair=("tool_order", "key_order", "volatile")
        )
        with gateway(repairing) as url:
            told = httpx2.post(f"{url}/v1/messages", json=body).headers["x-ostinato-repairs"]
        assert "tools: by name" in told
        assert "1 lines" in told
        made = json.loads(raw.seen[0].body)
        assert [tool["name"] for tool in made["tools"]] == ["ask", "look"]
        assert made["system"] == "Be kind."
        assert made["messages"][0]["content"][-1]["text"] == "Now: 2026-12-01T10:00:00Z\n"


# ---------------------------------------------------------------- configuration


def test_addresses_are_known_by_their_host() -> None:
    environment = {"ANTHROPIC_API_KEY": "a-secret"}
    claude = parse_upstream("https://api.anthropic.com", environment)
    assert (claude.protocol, claude.key, claude.vendor) == ("anthropic", "a-secret", "anthropic")
    gpt = parse_upstream("https://api.openai.com", {})
    assert choose([gpt, claude], "openai", "claude-opus-5", is_translatable=True) is claude
    assert choose([gpt, claude], "openai", "claude-opus-5") is gpt  # it cannot be translated
    assert choose([gpt, claude], "anthropic", "gpt-6", is_translatable=True) is gpt
    twin = replace(gpt, protocol="anthropic")
    assert choose([twin, gpt], "openai", "gpt-6", is_translatable=True) is gpt
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
