"""What operators do through every door: quotas, times to live, pins, purges, on a real engine and server."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.cli import main
from ostinato.errors import ParameterError, PinRefusedError
from ostinato.kv.terms import tenant_id
from ostinato.library import Engine
from ostinato.ports import SystemClock
from ostinato.server import Server, create_app, server_settings
from ostinato.tenants import key_salt, read_tenants

SYSTEM = "You are a guide in a museum of instruments and answer in at most three sentences."
TALK = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is a serpent?"}]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
ADMIN = "admin-secret"
BLOCK = 4
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * BLOCK  # keys and values, layers, heads, dimensions, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


class Hand:
    """The system's clock, moved on by hand."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._clock = SystemClock()

    def now(self) -> float:
        return self._clock.now() + self.ahead_s

    def monotonic(self) -> float:
        return self._clock.monotonic() + self.ahead_s


def load(folder: Path, **settings: Any) -> Engine:
    settings = {"kv_cache": 200 * BLOCK_BYTES, "block_size": BLOCK, "policy": "lru"} | settings
    return ostinato.load(folder, **settings)


def cached(engine: Engine, talk: Any = TALK, **options: Any) -> int:
    return engine.chat(talk, **(OPTIONS | options)).usage.cached_tokens


def flood(engine: Engine, num: int = 12) -> None:
    for number in range(num):
        engine.chat(f"{number} is a question that nobody has asked yet, {number}", **OPTIONS, salt="flood")


# ---------------------------------------------------------------- the library


def test_a_pinned_beginning_is_computed_and_survives_a_flood(folder: Path) -> None:
    with load(folder) as engine:
        pin = engine.pin([{"role": "system", "content": SYSTEM}])
        assert pin.num_tokens > len(SYSTEM)
        flood(engine)
        assert cached(engine) >= pin.num_tokens
        assert [kept.id for kept in engine.cache_summary().pins] == [pin.id]
        assert engine.runtime.health().num_pinned_blocks == pin.num_blocks
        assert engine.unpin(pin)
        assert not engine.unpin(pin.id)
        flood(engine)
        assert cached(engine) < pin.num_tokens
        ids = list(range(20))
        assert engine.pin(ids).num_tokens == 20
        with pytest.raises(ParameterError, match="less than a block of 4"):
            engine.pin([1, 2, 3])


def test_pins_leave_room_and_say_when_there_is_none(folder: Path) -> None:
    with load(folder, kv_cache=40 * BLOCK_BYTES, pinned_share=0.5) as engine:
        engine.pin("x" * 40)
        with pytest.raises(PinRefusedError, match="at most 20 of 40") as caught:
            engine.pin("y" * 60)
        assert caught.value.max_blocks == 20
        assert engine.runtime.max_model_len == 160 - engine.runtime.health().num_pinned_blocks * BLOCK
        reply = engine.complete(list(range(60)), temperature=0.0, ignore_eos=True)
        assert reply.finish_reason == "length"
        assert reply.usage.prompt_tokens + reply.usage.completion_tokens == engine.runtime.max_model_len


def test_a_purge_is_of_one_salt_or_one_prompt_or_all(folder: Path) -> None:
    with load(folder) as engine:
        for salt in ("anna", "ben", ""):
            cached(engine, salt=salt)
        report = engine.purge(salt="anna")
        assert report.arena.num_freed_blocks > 0
        assert report.freed_bytes == report.arena.num_freed_blocks * BLOCK_BYTES
        assert cached(engine, salt="anna") == 0
        assert cached(engine, salt="ben") > 0
        assert engine.purge(older_than_s=3600).arena.num_freed_blocks == 0
        assert engine.purge(prompt="menu").arena.num_freed_blocks == 0
        engine.purge()
        assert cached(engine, salt="ben") == cached(engine) == 0


def test_a_named_prompt_can_be_purged(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.toml").write_text(f'[guide]\ntext = "{SYSTEM}"\n', encoding="utf-8")
    with load(folder, prompts=tmp_path / "prompts.toml") as engine:
        named = {"prompt": "guide"}
        cached(engine, "What is a serpent?", **named)
        assert cached(engine, "What is a serpent?", **named) > 0
        assert engine.purge(prompt="guide").arena.num_freed_blocks > 0
        assert cached(engine, "What is a serpent?", **named) == 0


def test_times_to_live_of_server_and_request(folder: Path, tmp_path: Path) -> None:
    clock = Hand()
    settings = {"cache_ttl": 100.0, "shared_tier": tmp_path, "shared_tier_bytes": "4MiB"}
    engine = ostinato.load(folder, clock=clock, kv_cache=200 * BLOCK_BYTES, block_size=BLOCK, **settings)
    with engine:
        cached(engine, salt="short", cache_ttl=10)
        cached(engine, salt="long")
        link = engine.runtime._tier_link
        assert link is not None
        assert link.write_back.flush(10)
        clock.ahead_s += 11
        assert cached(engine, salt="short", cache_ttl=10) == 0
        assert cached(engine, salt="long") > 0
        clock.ahead_s += 101
        assert cached(engine, salt="long") == 0
        with pytest.raises(ParameterError, match="at least 1 second"):
            cached(engine, cache_ttl=0)


def test_a_quota_holds_in_arena_and_tier(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(
        f'[anna]\nsalt = "anna"\nkv_cache = "{20 * BLOCK_BYTES}"\nshared_tier = "{10 * BLOCK_BYTES}"\n'
    )
    settings = {"tenants": tmp_path / "tenants.toml", "shared_tier": tmp_path / "tier"}
    with load(folder, shared_tier_bytes="4MiB", **settings) as engine:
        for number in range(6):
            for salt in ("anna", "ben"):
                engine.chat(f"{number} is a question for {salt} and for nobody else", **OPTIONS, salt=salt)
        link = engine.runtime._tier_link
        assert link is not None
        assert link.write_back.flush(10)
        summary = engine.cache_summary()
        used = {use.tenant: use for use in summary.tenants}
        assert used[tenant_id("anna")].num_blocks <= 20 == used[tenant_id("anna")].max_blocks
        assert used[tenant_id("ben")].num_blocks > 60
        assert summary.tier is not None
        stored = {content.tenant: content.num_blocks for content in summary.tier}
        assert stored[tenant_id("anna")] == 10
        assert stored[tenant_id("ben")] > 60
        assert link.report().evictions["quota"] > 0  # type: ignore[union-attr]


# ---------------------------------------------------------------- a file of tenants


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[anna\n", "is not TOML"),
        ("anna = 3\n", "anna is not a table"),
        ('[anna]\napi_key = "secret"\nquota = 3\n', "has quota, which is not known"),
        ("[anna]\nttl = 3\n", "needs an api_key or a salt"),
        ('[anna]\napi_key = "secret"\nsalt = "secret"\n', "needs an api_key or a salt"),
        ('[anna]\napi_key = "secret,"\n', "has an api_key with a comma"),
        ('[anna]\napi_key = "secret"\nkv_cache = "much"\n', "is not a size"),
        ('[anna]\napi_key = "secret"\nttl = 0\n', "at least 1"),
        ('[anna]\napi_key = "secret"\n[ben]\napi_key = "secret"\n', "the same key"),
    ],
)
def test_what_is_wrong_with_a_file_of_tenants_is_said_without_a_key(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(ParameterError, match=said) as caught:
        read_tenants(path, int)
    assert "secret" not in str(caught.value)


def test_a_key_keeps_its_cache_whether_it_stands_in_the_list_or_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text('[anna]\napi_key = "secret"\nttl = 60\n')
    (anna,) = read_tenants(path, int)
    assert anna.salt == key_salt("secret") == server_settings(api_keys="secret").api_keys[0].salt
    assert server_settings(tenants=[anna]).api_keys[0].name == "anna"
    assert "secret" not in repr(anna)


# ---------------------------------------------------------------- the server, and the command line


@dataclass
class Served:
    url: str
    engine: Engine

    def call(self, path: str, body: Any = None, key: str = ADMIN) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers)) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def cached(self, key: str, **more: Any) -> int:
        body = {"model": self.engine.runtime.model_name, "messages": TALK, "temperature": 0, "max_tokens": 4}
        status, reply = self.call("/v1/chat/completions", body | {"ignore_eos": True} | more, key)
        assert status == 200, reply
        tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"ostinato_{name} "))

    def run(self, *words: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, ["cache", *words, "--url", self.url, "--admin-key", ADMIN])
        assert result.exit_code == code, result.output
        return result.output


def serve(engine: Engine, **settings: Any) -> Iterator[Served]:
    wire = server_settings(port=0, api_keys="sk-anna,sk-ben", drain_timeout_s=1.0, **settings)
    ready, urls = threading.Event(), []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    server = Server(create_app(engine.runtime, wire, engine.runtime), wire, on_ready)
    thread = threading.Thread(target=server.run_until_stopped)
    thread.start()
    try:
        assert ready.wait(20), "the server did not start"
        yield Served(urls[0], engine)
    finally:
        server.stop()
        thread.join(20)
        engine.close()
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    yield from serve(load(folder), admin_key=ADMIN)


def test_only_the_admin_key_opens_the_operators_door_and_no_other(served: Served) -> None:
    for key in ("sk-anna", "wrong", ""):
        assert served.call("/v1/ostinato/cache", key=key)[0] == 401
        assert served.call("/v1/ostinato/cache/purge", {"all": True}, key=key)[0] == 401
    assert served.call("/v1/models", key=ADMIN)[0] == 401
    status, summary = served.call("/v1/ostinato/cache")
    assert (status, summary["block_bytes"], summary["shared_tier"]) == (200, BLOCK_BYTES, None)


def test_without_an_admin_key_there_is_no_door(folder: Path) -> None:
    for served in serve(load(folder)):
        assert served.call("/v1/ostinato/cache", key="sk-anna")[0] == 404
        assert served.call("/v1/ostinato/cache/purge", {"all": True}, key="sk-anna")[0] == 404
        assert served.call("/v1/ostinato/cache", key=ADMIN)[0] == 401


def test_pin_and_unpin_over_http(served: Served) -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    status, pin = served.call("/v1/ostinato/cache/pin", {"messages": messages, "tenant": "key-1"})
    assert status == 200, pin
    assert served.cached("sk-anna") >= pin["tokens"]
    assert served.cached("sk-ben") == 0
    assert served.metric("kv_pinned_blocks") == pin["blocks"]
    assert served.call("/health")[1]["num_pinned_blocks"] == pin["blocks"]
    summary = served.call("/v1/ostinato/cache")[1]
    assert [item["id"] for item in summary["pins"]] == [pin["id"]]
    assert {use["name"] for use in summary["tenants"]} == {"key-1", "key-2"}
    status, refusal = served.call("/v1/ostinato/cache/pin", {"prompt": "x" * 400, "ttl_s": 60})
    assert (status, refusal["error"]["code"]) == (409, "pin_refused")
    assert served.call("/v1/ostinato/cache/unpin", {"id": pin["id"]})[0] == 200
    assert served.call("/v1/ostinato/cache/unpin", {"id": pin["id"]})[0] == 404
    assert served.metric("kv_pinned_blocks") == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("purge", {}, "all"),
        ("purge", {"all": True, "tenant": "key-1"}, "all"),
        ("purge", {"tenant": "nobody"}, "tenant"),
        ("purge", {"tenant": "key-1", "cache_salt": "x"}, "cache_salt"),
        ("purge", {"model": "another"}, "model"),
        ("purge", {"older_than_s": -1}, "older_than_s"),
        ("purge", {"user": "x"}, "user"),
        ("pin", {}, "messages"),
        ("pin", {"prompt": "x"}, "prompt"),
        ("pin", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]"),
        ("pin", {"prompt": "x" * 50, "ttl_s": 0}, "ttl_s"),
        ("unpin", {}, "id"),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, body: Any, param: str) -> None:
    status, reply = served.call(f"/v1/ostinato/cache/{path}", body)
    assert (status, reply["error"]["param"]) == (400, param), reply


def test_the_command_line_does_the_same(served: Served, tmp_path: Path) -> None:
    served.cached("sk-anna")
    served.cached("sk-ben", cache_salt="own")
    assert "key-1" in served.run("ls")
    pinned = json.loads(served.run("pin", "--system", SYSTEM, "--tenant", "key-2", "--ttl", "60", "--json"))
    assert f"{pinned['tokens']} tokens" in served.run("ls")
    assert "no longer pinned" in served.run("unpin", pinned["id"])
    assert "There is no pin" in served.run("unpin", pinned["id"], code=1)
    report = json.loads(served.run("purge", "--tenant", "key-2", "--json"))
    assert report["arena"]["freed_blocks"] > 0
    assert (served.cached("sk-ben", cache_salt="own"), served.cached("sk-anna") > 0) == (0, True)
    assert "0 blocks freed" in served.run("purge", "--older-than", "3600")
    assert "say what to purge" in served.run("purge", code=2)
    served.run("purge", "--all")
    assert served.cached("sk-anna") == 0
    messages = tmp_path / "talk.json"
    messages.write_text(json.dumps(TALK))
    assert "keeps" in served.run("pin", "--messages", str(messages))
    assert "give --system or --messages" in served.run("pin", code=2)


def test_the_command_line_says_what_is_missing(folder: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(main, ["cache", *words], env={"OSTINATO_ADMIN_KEY": ""})
        assert result.exit_code != 0
        return result.output

    assert "give --url" in run("ls")
    assert "OSTINATO_ADMIN_KEY" in run("ls", "--url", "http://127.0.0.1:1")
    assert "cannot be reached" in run("ls", "--url", "http://127.0.0.1:1", "--admin-key", "x")
    assert "give one of" in run("ls", "--url", "http://127.0.0.1:1", "--tier", str(tmp_path))
    assert "no shared tier" in run("ls", "--tier", str(tmp_path))
    for served in serve(load(folder)):
        assert "cannot be looked after" in run("ls", "--url", served.url, "--admin-key", "sk-anna")
