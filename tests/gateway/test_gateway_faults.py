"""Upstreams that misbehave: one clear end for the client, nothing kept, nothing counted that was not said."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

import httpx2
import pytest

from gateway.gateways import gateway
from gateway.raw_upstream import STREAM_HEAD, RawUpstream, whole
from ostinato.gateway import Upstream
from ostinato.gateway.answers import PassedAnswer, PassedRequest

GOOD = {
    "id": "x",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
}
BODY = {"model": "gpt-5", "messages": [{"role": "user", "content": "hello"}]}
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
CLAUDE = [
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3}}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":5}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]


class Kept:
    """A cache that remembers everything it is told."""

    def __init__(self) -> None:
        self.answers: dict[bytes, PassedAnswer] = {}

    def ask(self, request: PassedRequest) -> Asked:
        return Asked(self, json.dumps(request.body).encode())


@dataclass
class Asked:
    kept: Kept
    body: bytes
    age_s: float = 0.0
    entry_id: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> PassedAnswer | None:
        return self.kept.answers.get(self.body)

    @property
    def outcome(self) -> str:
        return "miss" if self.known is None else "exact"

    def keep(self, answer: PassedAnswer) -> None:
        self.kept.answers[self.body] = answer


def up(raw: RawUpstream, protocol: Any = "openai", **more: Any) -> Upstream:
    return Upstream("raw", raw.url, protocol, **{"idle_timeout_s": 0.4, "connect_timeout_s": 1.0} | more)


def post(url: str, body: Any = None, path: str = "/v1/chat/completions", **headers: str) -> httpx2.Response:
    data = body if isinstance(body, bytes) else json.dumps(BODY if body is None else body).encode()
    return httpx2.post(
        url + path, content=data, headers={"content-type": "application/json", **headers}, timeout=20
    )


def rows(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx2.get(f"{url}/v1/ostinato/costs").json()["rows"]
    return found


def test_bytes_pass_as_they_are_in_both_directions() -> None:
    body = b'{ "model" :"gpt-5", "zebra": 1.50, "messages":[ ],"alpha":123456789012345678901234567890.0}'
    reply = b'{"usage":{"prompt_tokens":1},  "b": 1.0, "a": 2, "new_field":{"z":1,"y":[1e5]}}'
    with RawUpstream(
        [whole(reply, "200 OK", "x-vendor: yes", "set-cookie: no", "x-request-id: theirs")]
    ) as raw:
        with gateway(up(raw)) as url:
            answered = post(
                url, body, **{"x-custom": "kept", "authorization": "Bearer mine", "cookie": "secret"}
            )
            assert answered.content == reply
            assert answered.headers["x-vendor"] == "yes"
            assert answered.headers["x-upstream-request-id"] == "theirs"
            assert "set-cookie" not in answered.headers
        (seen,) = raw.seen
        assert seen.body == body
        assert seen.header("x-custom") == "kept"
        assert seen.header("authorization") == "Bearer mine"
        assert seen.header("cookie") is None


def test_the_upstreams_key_replaces_the_callers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with RawUpstream([whole(json.dumps(GOOD).encode())]) as raw:
        with gateway(up(raw, key="the-upstreams-secret", key_env="X")) as url:
            post(url, authorization="Bearer the-callers-secret")
        assert raw.seen[0].header("authorization") == "Bearer the-upstreams-secret"
        assert "the-callers-secret" not in raw.seen[0].head
    assert "secret" not in caplog.text


def test_usage_is_entered_once() -> None:
    with RawUpstream([whole(json.dumps(GOOD).encode())]) as raw, gateway(up(raw)) as url:
        assert post(url).status_code == 200
        (row,) = rows(url)
        assert (row["uncached_tokens"], row["read_tokens"], row["output_tokens"]) == (6, 4, 2)
        assert row["requests"] == 1


@pytest.mark.parametrize(
    ("refusal", "status"), [("429 Too Many", 429), ("529 Overloaded", 529), ("503 Unavailable", 503)]
)
def test_refused_requests_are_sent_again(refusal: str, status: int) -> None:
    answers = [whole(b"{}", refusal, "retry-after: 0"), whole(json.dumps(GOOD).encode())]
    with RawUpstream(answers) as raw, gateway(up(raw)) as url:
        assert post(url).status_code == 200
        assert len(raw.seen) == 2
    with RawUpstream([whole(b'{"error":"e"}', refusal, "retry-after: 3600")]) as raw, gateway(up(raw)) as url:
        answered = post(url)
        assert answered.status_code == status
        assert answered.headers["retry-after"] == "3600"
        assert answered.json() == {"error": "e"}
        assert len(raw.seen) == 1


@pytest.mark.parametrize("status", ["400 Bad", "401 No", "500 Broken", "502 Bad", "504 Slow"])
def test_other_errors_are_passed_on_and_never_sent_again(status: str) -> None:
    kept = Kept()
    with (
        RawUpstream([whole(b'{"error":{"message":"m"}}', status)]) as raw,
        gateway(up(raw), answers=kept) as url,
    ):
        answered = post(url)
        assert answered.status_code == int(status[:3])
        assert answered.json() == {"error": {"message": "m"}}
        assert len(raw.seen) == 1
        assert kept.answers == {}


def test_what_cannot_be_reached_is_502() -> None:
    with gateway(Upstream("gone", "http://127.0.0.1:9", max_retries=1, connect_timeout_s=0.5)) as url:
        answered = post(url)
        assert answered.status_code == 502
        assert answered.json()["error"]["code"] == "upstream_error"
        assert "gone" in answered.json()["error"]["message"]


FAULTY_WHOLE: list[tuple[str, list[bytes | None], int]] = [
    ("not JSON", whole(b"<html>"), 502),
    ("truncated", [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"], 502),
    ("silent", [None], 504),
    ("silent in the middle", [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", None], 504),
    ("not HTTP", [b"hello\r\n\r\n"], 502),
    ("closed", [b""], 502),
]


@pytest.mark.parametrize(
    ("what", "answer", "status"), FAULTY_WHOLE, ids=[what for what, _, _ in FAULTY_WHOLE]
)
@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
def test_whole_answers_that_are_none(
    what: str, answer: list[bytes | None], status: int, protocol: str
) -> None:
    kept = Kept()
    with RawUpstream([answer]) as raw, gateway(up(raw, protocol, plan="plan"), answers=kept) as url:
        path = "/v1/chat/completions" if protocol == "openai" else "/v1/messages"
        answered = post(url, path=path)
        assert answered.status_code == status
        error = answered.json()["error"]
        assert error["message"]
        assert answered.json().get("type", "error") == "error"
        assert kept.answers == {}
        assert rows(url) == []
        assert httpx2.get(f"{url}/health").json()["num_running"] == 0


FAULTY_STREAMS: list[tuple[str, list[bytes | None]]] = [
    ("ends early", [STREAM_HEAD, EVENT, EVENT]),
    ("in the middle of an event", [STREAM_HEAD, EVENT, EVENT[:20]]),
    ("silent", [STREAM_HEAD, EVENT, None]),
    ("malformed", [STREAM_HEAD, EVENT, b"data: {nonsense\n\n", EVENT, DONE]),
    ("not an object", [STREAM_HEAD, EVENT, b"data: 7\n\n", DONE]),
    ("a broken chunk", [
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        f"{len(EVENT):x}\r\n".encode() + EVENT + b"\r\n", b"zz\r\n",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("what", "answer"), FAULTY_STREAMS, ids=[what for what, _ in FAULTY_STREAMS])
def test_streams_that_break_end_in_one_error(what: str, answer: list[bytes | None]) -> None:
    kept = Kept()
    with RawUpstream([answer]) as raw, gateway(up(raw), answers=kept) as url:
        text = post(url, {**BODY, "stream": True}).text
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line]
        assert [event for event in events[:-1] if "error" in event] == []
        assert events[-1]["error"]["code"] in ("upstream_error", "upstream_timeout")
        assert "[DONE]" not in text
        assert len(events) >= 2
        assert kept.answers == {}
        assert rows(url) == []


def test_a_broken_message_ends_in_anthropics_error() -> None:
    with RawUpstream([[STREAM_HEAD, *CLAUDE[:2]]]) as raw, gateway(up(raw, "anthropic")) as url:
        text = post(url, {**BODY, "stream": True}, path="/v1/messages").text
        last = text.split("\n\n")[-2]
        assert last.startswith("event: error\n")
        assert json.loads(last.partition("data: ")[2])["error"]["type"] == "api_error"


def test_an_upstreams_own_error_in_a_stream_is_the_end() -> None:
    kept = Kept()
    error = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"m"}}\n\n'
    with (
        RawUpstream([[STREAM_HEAD, CLAUDE[0], error]]) as raw,
        gateway(up(raw, "anthropic"), answers=kept) as url,
    ):
        text = post(url, {**BODY, "stream": True}, path="/v1/messages").text
        assert text.count("event: error") == 1
        assert text.encode() == CLAUDE[0] + error
        assert kept.answers == {}


def test_streams_pass_byte_for_byte_however_they_are_cut() -> None:
    sent = b": hello\n\n" + b"".join(CLAUDE)
    chance = random.Random(1)
    cuts = sorted(chance.sample(range(1, len(sent)), 25))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    with RawUpstream([[STREAM_HEAD, *pieces]]) as raw, gateway(up(raw, "anthropic")) as url:
        assert post(url, {**BODY, "stream": True}, path="/v1/messages").content == sent
        (row,) = rows(url)
        assert (row["uncached_tokens"], row["output_tokens"]) == (3, 5)


@pytest.mark.parametrize("behind", [[None], [b"data: {nonsense\n\n"], [b"data: 7\n\n", None]])
def test_what_comes_behind_the_end_spoils_nothing(behind: list[bytes | None]) -> None:
    kept = Kept()
    with RawUpstream([[STREAM_HEAD, EVENT, DONE, *behind]]) as raw, gateway(up(raw), answers=kept) as url:
        began_s = time.monotonic()
        content = post(url, {**BODY, "stream": True}).content
        assert content.startswith(EVENT + DONE)
        assert b"upstream_" not in content
        assert time.monotonic() - began_s < 2
        wait_for(kept, 1)


def test_events_are_not_held_back() -> None:
    with RawUpstream([[STREAM_HEAD, EVENT, None]]) as raw, gateway(up(raw, idle_timeout_s=3.0)) as url:
        started_s = time.monotonic()
        with httpx2.stream(
            "POST", url + "/v1/chat/completions", json={**BODY, "stream": True}, timeout=10
        ) as response:
            first = next(iter(response.iter_raw()))
        assert EVENT in first
        assert time.monotonic() - started_s < 2.5  # long before the upstream's silence is noticed


@pytest.mark.parametrize("is_asked", [False, True])
def test_streams_are_counted_where_that_is_wanted(is_asked: bool) -> None:
    tells = b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":2}}\n\n'
    body = {**BODY, "stream": True}
    if is_asked:
        body["stream_options"] = {"include_usage": True}
    with RawUpstream([[STREAM_HEAD, EVENT, tells, DONE]]) as raw:
        with gateway(up(raw, count_streams=True)) as url:
            assert post(url, body).content == EVENT + (tells if is_asked else b"") + DONE
            assert rows(url)[0]["uncached_tokens"] == 10
        assert json.loads(raw.seen[0].body)["stream_options"] == {"include_usage": True}
    with RawUpstream([[STREAM_HEAD, EVENT, DONE]]) as raw, gateway(up(raw)) as url:
        post(url, {**BODY, "stream": True})
        assert "stream_options" not in json.loads(raw.seen[0].body)
        assert httpx2.get(f"{url}/v1/ostinato/costs").json()["untold_usages"] == 1


@pytest.mark.parametrize(
    "usage",
    [
        None,
        7,
        {},
        {"prompt_tokens": -5},
        {"prompt_tokens": "many"},
        {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}},
    ],
)
def test_usage_that_cannot_be_is_passed_on_and_not_counted(usage: Any) -> None:
    with RawUpstream([whole(json.dumps({**GOOD, "usage": usage}).encode())]) as raw, gateway(up(raw)) as url:
        assert post(url).json()["usage"] == usage
        assert rows(url) == []


@pytest.mark.parametrize("seed", range(12))
def test_random_damage_to_a_stream_never_hangs_or_lies(seed: int) -> None:
    chance = random.Random(seed)
    sent = bytearray(b"".join([EVENT] * 6) + DONE)
    for _ in range(chance.randint(1, 4)):
        kind = chance.choice(["cut", "flip", "insert"])
        at = chance.randrange(len(sent))
        if kind == "cut":
            del sent[at:]
        elif kind == "flip":
            sent[at] = chance.randrange(256)
        else:
            sent[at:at] = chance.randbytes(chance.randint(1, 9))
        if not sent:
            break
    kept = Kept()
    with RawUpstream([[STREAM_HEAD, bytes(sent)]]) as raw, gateway(up(raw), answers=kept) as url:
        answered = post(url, {**BODY, "stream": True})
        is_broken = answered.status_code != 200 or b'"upstream_' in answered.content
        assert is_broken is not bool(kept.answers)
        if not is_broken:
            assert answered.content == bytes(sent)[: len(answered.content)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b'{"model": 7}', 400),
        (b'{"model": ""}', 400),
        (b"\xff", 400),
    ],
)
def test_requests_without_a_model_are_refused_here(body: bytes, status: int) -> None:
    with RawUpstream([whole(b"{}")]) as raw, gateway(up(raw)) as url:
        assert post(url, body).status_code == status
        assert raw.seen == []


@pytest.mark.parametrize("messages", [7, ["x"], [{"role": "user", "content": 5}], None])
@pytest.mark.parametrize("plan", ["off", "observe", "plan"])
def test_what_cannot_be_planned_is_passed_on(messages: Any, plan: str) -> None:
    body = {"model": "claude-opus-5", "messages": messages}
    with (
        RawUpstream([whole(b'{"error":{}}', "400 Bad")]) as raw,
        gateway(up(raw, "anthropic", plan=plan)) as url,
    ):
        assert post(url, body, path="/v1/messages").status_code == 400
        assert json.loads(raw.seen[0].body) == body


def test_a_kept_answer_needs_no_upstream() -> None:
    kept = Kept()
    answers = [[STREAM_HEAD, EVENT, DONE], whole(json.dumps(GOOD).encode())]
    with RawUpstream(answers) as raw, gateway(up(raw), answers=kept) as url:
        stream = {**BODY, "stream": True}
        first = post(url, stream)
        wait_for(kept, 1)
        assert post(url, stream).content == first.content == EVENT + DONE
        assert len(raw.seen) == 1
        plain = post(url)
        wait_for(kept, 2)
        assert post(url).json() == plain.json() == GOOD
        assert len(raw.seen) == 2


def wait_for(kept: Kept, num_answers: int) -> None:
    """An answer is kept once it was sent."""
    deadline_s = time.monotonic() + 10
    while len(kept.answers) < num_answers and time.monotonic() < deadline_s:
        time.sleep(0.01)


# ---------------------------------------------------------------- what is odd, and legal


def streamed(*pieces: bytes, path: str = "/v1/chat/completions", **more: Any) -> bytes:
    body: dict[str, Any] = {"model": "gpt-5", "stream": True, "messages": []}
    if path == "/v1/responses":
        body = {"model": "gpt-5", "stream": True, "input": "x"}
    with RawUpstream([[STREAM_HEAD, *pieces]]) as raw, gateway(up(raw, **more)) as url:
        return post(url, body, path).content


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}\n\n',  # half of a pair
        b'data: {"choices":[{"index":0,"delta":{"content":"a"},"x":1e400}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"a"},"logprob":NaN}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"error":null}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\r\n',
        b"data:\ndata: {}\n\n",
    ],
)
def test_odd_events_are_events(event: bytes) -> None:
    assert streamed(event, EVENT, DONE) == event + EVENT + DONE


@pytest.mark.parametrize(
    "end", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n", b"data:[DONE] \n\n"]
)
def test_the_last_event_may_lack_its_empty_line(end: bytes) -> None:
    found = streamed(EVENT, end)
    assert found.startswith(EVENT + end)
    assert b"error" not in found


def test_an_event_that_breaks_off_is_not_the_last() -> None:
    assert b"before it was complete" in streamed(EVENT, b"data: [DO")
    assert b"before it was complete" in streamed(EVENT, EVENT.rstrip())


def test_a_broken_response_ends_in_an_event_of_its_api() -> None:
    began = b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n'
    found = streamed(began, path="/v1/responses")
    assert found.startswith(began + b"event: error\ndata: ")
    last = json.loads(found.removeprefix(began).split(b"data: ")[1])
    assert last["type"] == "error"
    assert last["code"] == "upstream_error"
    assert last["error"]["message"] == last["message"]


@pytest.mark.parametrize("odd", [b'"\\ud83d"', b"1e400", b"NaN", b"123456789012345678901234567890"])
def test_odd_values_of_requests_are_the_upstreams_to_judge(odd: bytes) -> None:
    body = b'{"model":"gpt-5","messages":[{"role":"user","content":"x"}],"odd": ' + odd + b"}"
    with RawUpstream([whole(json.dumps(GOOD).encode())]) as raw, gateway(up(raw, plan="plan")) as url:
        assert post(url, body).status_code == 200
        assert raw.seen[0].body.startswith(body[:-1])


def test_a_planned_request_differs_in_its_breakpoints_only() -> None:
    text = "A long text that comes again. " * 400
    body = (
        b'{ "model":"claude-opus-4-8", "max_tokens":5,"max_tokens": 7,"messages":[ {"role":"user","content":'
        b'[{"text":"' + text.encode() + b'\\u00e9\\/","type":"text"}]} ],'
        b'"metadata":{"n":123456789012345678901234567890,"f":0.10000000000000000000001,"z":1.50}}'
    )
    with RawUpstream([whole(b'{"usage":{"input_tokens":3,"output_tokens":1}}')]) as raw:
        with gateway(up(raw, "anthropic", plan="plan")) as url:
            post(url, body, "/v1/messages")
        sent = raw.seen[0].body
    before, marker, behind = sent.partition(b',"cache_control":{"type":"ephemeral"')
    assert marker
    assert before + behind[behind.index(b"}") + 1 :] == body


def test_a_redirection_is_not_the_clients_to_follow() -> None:
    head = b"HTTP/1.1 307 Elsewhere\r\nlocation: http://127.0.0.1:1/\r\nconnection: close\r\n\r\n"
    with RawUpstream([[head]]) as raw, gateway(up(raw)) as url:
        answered = post(url)
        assert answered.status_code == 502
        assert "location" not in answered.headers


@pytest.mark.parametrize("wait_s", [0, 3600])
def test_a_date_to_retry_after_is_obeyed(wait_s: int) -> None:
    refusal = f"retry-after: {formatdate(time.time() + wait_s, usegmt=True)}"
    good = whole(json.dumps(GOOD).encode())
    with RawUpstream([whole(b"{}", "429 Too Many Requests", refusal), good]) as raw, gateway(up(raw)) as url:
        assert post(url).status_code == (429 if wait_s else 200)
        assert len(raw.seen) == (1 if wait_s else 2)
