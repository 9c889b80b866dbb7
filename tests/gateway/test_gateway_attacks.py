"""The gateway under hostile clients and upstreams: nothing leaks, nothing grows, others are served on."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from gateway.gateways import gateway
from gateway.raw_upstream import STREAM_HEAD, RawUpstream, whole
from ostinato.gateway import Upstream, app
from ostinato.gateway.answers import KeptAnswers, PassedForm
from ostinato.ports import SystemClock
from ostinato.responses.exact import Exact
from ostinato.responses.stores.base import Limits
from ostinato.responses.stores.sqlite import SqliteStore

GOOD = b'{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":9,"completion_tokens":1}}'
BODY: dict[str, Any] = {"model": "gpt-5", "messages": [{"role": "user", "content": "hello"}]}
KEY = "sk-upstreams-own-secret"


def up(raw: RawUpstream, **more: Any) -> Upstream:
    return Upstream("raw", raw.url, **{"idle_timeout_s": 1.0, "max_retries": 0} | more)


def post(url: str, body: Any = BODY, path: str = "/v1/chat/completions", **headers: str) -> httpx2.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(
        url + path, content=data, headers={"content-type": "application/json", **headers}, timeout=20
    )


def sent_raw(url: str, data: bytes, wait_s: float = 5.0) -> bytes:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=wait_s) as connection:
        connection.sendall(data)
        found = b""
        while piece := connection.recv(65536):
            found += piece
    return found


def request_bytes(*lines: str, body: bytes | None = None) -> bytes:
    data = json.dumps(BODY).encode() if body is None else body
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        "connection: close",
    ]
    return "\r\n".join([*head, f"content-length: {len(data)}", *lines, "", ""]).encode("latin-1") + data


# ---------------------------------------------------------------- headers


def test_headers_between_neighbours_and_of_places_are_not_passed_on() -> None:
    with RawUpstream([whole(GOOD)]) as raw, gateway(up(raw, key=KEY)) as url:
        sent_raw(url, request_bytes(
            "x-secret: 1", "Connection: x-secret, close", "forwarded: for=1", "via: 1.1 a", "x-real-ip: 1",
            "x-forwarded-for: 1", "x-ostinato-prompt: p", "x-api-key: mine", "authorization: Bearer mine",
            "keep-alive: 5", "te: trailers", "upgrade: h2c", "expect: 100-continue", "x-kept: yes",
        ))  # fmt: skip
        (seen,) = raw.seen
        for name in ("x-secret", "forwarded", "via", "x-real-ip", "x-forwarded-for", "x-ostinato-prompt",
                     "x-api-key", "keep-alive", "te", "upgrade", "expect"):  # fmt: skip
            assert seen.header(name) is None, name
        assert seen.header("x-kept") == "yes"
        assert seen.header("authorization") == f"Bearer {KEY}"
        assert "mine" not in seen.head


def test_headers_that_come_twice_and_bytes_outside_ascii_pass() -> None:
    with RawUpstream([whole(GOOD)]) as raw, gateway(up(raw)) as url:
        keys = ("authorization: Bearer 1", "authorization: Bearer 2")
        others = ("anthropic-beta: a", "anthropic-beta: b", "x-name: Jos\xe9")
        found = sent_raw(url, request_bytes(*others, *keys))
        assert found.startswith(b"HTTP/1.1 200")
        (seen,) = raw.seen
        assert seen.header("anthropic-beta") == "a, b"
        assert seen.header("x-name") == "Jos\xe9"
        assert seen.header("authorization") == "Bearer 1"


@pytest.mark.parametrize(
    "lines",
    [
        ["transfer-encoding: chunked"],
        ["content-length: 5"],
        ["transfer-encoding: xchunked"],
        ["content-length: +5"],
    ],
)
def test_smuggled_bodies_never_reach_an_upstream(lines: list[str]) -> None:
    with RawUpstream([whole(GOOD)]) as raw, gateway(up(raw)) as url:
        found = sent_raw(url, request_bytes(*lines))
        assert found.split(b" ")[1] in (b"400", b"501")
        assert raw.seen == []


def test_a_queries_reach_the_upstream_and_nothing_else_of_the_target() -> None:
    with RawUpstream([whole(GOOD)]) as raw, gateway(up(raw)) as url:
        post(url, path="/v1/chat/completions?beta=true&x=%2e%2e%2f")
        assert raw.seen[0].head.startswith("POST /v1/chat/completions?beta=true&x=%2e%2e%2f HTTP/1.1")
        for path in ("/v1/chat/../admin", "/v1/models/../../x", "//v1/messages", "/v1/files"):
            assert post(url, path=path).status_code in (404, 405)
        assert len(raw.seen) == 1


# ---------------------------------------------------------------- keys


def test_what_an_upstream_says_of_the_gateways_key_stays_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    told = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}"}}).encode()
    for status in ("401 Unauthorized", "403 Forbidden"):
        with RawUpstream([whole(told, status)]) as raw, gateway(up(raw, key=KEY)) as url:
            answered = post(url)
            assert answered.status_code == 502
            assert KEY not in answered.text + str(answered.headers)
    assert KEY not in caplog.text
    with RawUpstream([whole(told, "401 Unauthorized")]) as raw, gateway(up(raw)) as url:
        assert (
            post(url, authorization="Bearer own").status_code == 401
        )  # the caller's own: the caller's affair


def test_callers_with_keys_of_their_own_share_no_history() -> None:
    """Otherwise one could make another wait, or learn what it sends, by the vendor's cache."""
    long = [{"type": "text", "text": "w " * 4000}]
    body = {"model": "claude-opus-5", "max_tokens": 5, "messages": [{"role": "user", "content": long}]}
    reply = whole(b'{"type":"message","usage":{"input_tokens":9,"output_tokens":1}}')
    with RawUpstream([[None], reply]) as raw:
        with gateway(up(raw, protocol="anthropic", plan="plan", idle_timeout_s=4.0)) as url:
            first = threading.Thread(
                target=post, args=(url, body, "/v1/messages"), kwargs={"x-api-key": "one"}
            )
            first.start()
            while not raw.seen:
                time.sleep(0.01)
            began_s = time.monotonic()
            assert post(url, body, "/v1/messages", **{"x-api-key": "two"}).status_code == 200
            waited_s = time.monotonic() - began_s
            first.join()
        assert waited_s < 3.0  # not for the silent one's first token


# ---------------------------------------------------------------- sizes


def test_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_BODIES_BYTES", 300_000)
    large = {**BODY, "filling": "x" * 200_000}
    with RawUpstream([[None], whole(GOOD)]) as raw, gateway(up(raw, idle_timeout_s=2.0)) as url:
        first = threading.Thread(target=post, args=(url, large))
        first.start()
        while not raw.seen:
            time.sleep(0.01)
        refused = post(url, large)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert post(url).status_code == 200  # small ones pass on
        first.join()
        for _ in range(3):
            assert post(url, large).status_code == 200


def test_a_body_that_never_comes_is_given_up() -> None:
    with RawUpstream([whole(GOOD)]) as raw, gateway(up(raw), body_timeout_s=0.5) as url:
        head = request_bytes(body=b"x" * 1000).replace(b"x" * 1000, b"")
        assert b" 408 " in sent_raw(url, head).split(b"\r\n")[0]
        assert raw.seen == []


def test_a_client_that_reads_nothing_is_hung_up_on() -> None:
    event = b'data: {"choices":[{"delta":{"content":"' + b"a" * 60_000 + b'"}}]}\n\n'
    with (
        RawUpstream([[STREAM_HEAD, *[event] * 1500]]) as raw,
        gateway(up(raw, idle_timeout_s=20.0), write_timeout_s=0.5) as url,
    ):
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request_bytes(body=json.dumps({**BODY, "stream": True}).encode()))
            deadline_s = time.monotonic() + 10
            while not raw.seen or httpx2.get(f"{url}/health").json()["num_running"]:
                assert time.monotonic() < deadline_s, "it is still being written to"
                time.sleep(0.05)
        assert post(url.rstrip("/"), {**BODY, "model": ""}).status_code == 400


@pytest.mark.parametrize("plan", ["observe", "plan"])
def test_deep_and_odd_json_is_passed_on(plan: str) -> None:
    block = b'{"type":"text","text":"x","y":%b}'
    deep = b'{"model":"claude-opus-5","messages":[{"role":"user","content":[' + block + b"]}]}"
    bodies = [
        deep % (b"[" * 300 + b"]" * 300),
        deep % b'"\\u0000"',
        deep % b"1e400",
        deep % b"123456789012345678901234567890",
    ]
    with RawUpstream([whole(b"{}")]) as raw, gateway(up(raw, protocol="anthropic", plan=plan)) as url:
        statuses = [post(url, body, "/v1/messages").status_code for body in bodies]
        assert set(statuses) <= {200, 400}
        assert statuses[0] == 200


def test_names_are_bounded() -> None:
    with RawUpstream([whole(GOOD)]) as raw, gateway(up(raw)) as url:
        assert post(url, {**BODY, "model": "m" * 201}).status_code == 400
        post(url, **{"x-ostinato-prompt": "p" * 5000})
        (row,) = httpx2.get(f"{url}/v1/ostinato/costs").json()["rows"]
        assert len(row["prompt"]) == 200


# ---------------------------------------------------------------- answers


def test_a_compressed_answer_is_no_answer() -> None:
    bomb = gzip.compress(b"0" * 10_000_000)
    with (
        RawUpstream([whole(bomb, "200 OK", "content-encoding: gzip")]) as raw,
        gateway(up(raw)) as url,
    ):
        assert post(url).status_code == 502


def test_a_key_said_twice_is_never_answered_from_the_cache(tmp_path: Path) -> None:
    """To us the last counts; if to the upstream the first does, its answer is to another question."""
    kept = KeptAnswers(
        Exact(SqliteStore(tmp_path / "a.db", limits=Limits(), now_ms=1), PassedForm(), SystemClock()),
        answers_for="all",
    )
    twice = json.dumps(BODY).encode()[:-1] + b', "messages": [{"role": "user", "content": "other"}]}'
    with RawUpstream([whole(GOOD)]) as raw, gateway(up(raw), answers=kept) as url:
        assert post(url, twice).headers["x-ostinato-cache"] == "bypass"
        honest = post(url, {**BODY, "messages": [{"role": "user", "content": "other"}]})
        assert honest.headers["x-ostinato-cache"] == "miss"
    kept.exact.close()


# ---------------------------------------------------------------- many at once


def test_clients_that_leave_at_random_leave_nothing_behind() -> None:
    event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    with (
        RawUpstream([[STREAM_HEAD, *[event] * 20, b"data: [DONE]\n\n"], [STREAM_HEAD, event, None]]) as raw,
        gateway(up(raw, plan="plan", idle_timeout_s=10.0)) as url,
    ):
        address = urlsplit(url)

        def leave(number: int) -> None:
            with socket.create_connection((address.hostname, address.port)) as connection:
                data = request_bytes(body=json.dumps({**BODY, "stream": True}).encode())
                connection.sendall(data[: len(data) if number % 3 else number * 7 % len(data)])
                time.sleep(0.01 * (number % 5))

        threads = [threading.Thread(target=leave, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        deadline_s = time.monotonic() + 10
        while httpx2.get(f"{url}/health").json()["num_running"] and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert httpx2.get(f"{url}/health").json()["num_running"] == 0


@pytest.mark.parametrize("key", ["", KEY])
def test_keys_in_queries_and_in_other_vendors_headers(key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with RawUpstream([whole(GOOD)]) as raw, gateway(up(raw, key=key)) as url:
        data = request_bytes("api-key: sk-mine-1", "x-goog-api-key: sk-mine-2")
        sent_raw(url, data.replace(b"completions HTTP", b"completions?key=sk-mine-3 HTTP"))
        (seen,) = raw.seen
        assert ("sk-mine-1" in seen.head, "sk-mine-2" in seen.head) == (key == "", key == "")
    assert "sk-" not in caplog.text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("123456789012345678901", "123456789012345678902"),
        ("1e400", "2e400"),
        ("0.10000000000000000000001", "0.10000000000000000000002"),
    ],
)
def test_numbers_that_would_look_alike_share_no_answer(tmp_path: Path, one: str, other: str) -> None:
    body = json.dumps({**BODY, "temperature": 0, "n": "?"})
    replies = [whole(GOOD.replace(b"hi", b"first")), whole(GOOD.replace(b"hi", b"second"))]
    exact = Exact(SqliteStore(tmp_path / "a.db", limits=Limits(), now_ms=1), PassedForm(), SystemClock())
    answers = KeptAnswers(exact, answers_for="all")
    with RawUpstream(replies) as raw, gateway(up(raw), answers=answers) as url:
        found = [post(url, body.replace('"?"', number).encode()).content for number in (one, other)]
        assert b"first" in found[0]
        assert b"second" in found[1]
    exact.close()
