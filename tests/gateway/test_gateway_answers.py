"""Kept answers before real sockets: what comes again is what came, and for whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.gateways import gateway
from gateway.raw_upstream import STREAM_HEAD, RawUpstream, whole
from ostinato.gateway import Upstream
from ostinato.gateway.answers import KeptAnswers, PassedForm
from ostinato.ports import SystemClock
from ostinato.responses.exact import Exact
from ostinato.responses.stores.base import Limits
from ostinato.responses.stores.sqlite import SqliteStore
from ostinato.server.settings import ApiKey

BODY: dict[str, Any] = {
    "model": "m",
    "temperature": 0,
    "messages": [{"role": "user", "content": "hi"}],
    "unheard_of": {"b": 1, "a": [2]},
}
GOOD = b'{"id": "x",  "choices": [{"message": {"content": "h\\u00e9"}}], "odd": 1.50}'
EVENTS = [b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', b": ping\n\n", b"data: [DONE]\n\n"]


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[KeptAnswers]:
    store = SqliteStore(tmp_path / "answers.db", limits=Limits(), now_ms=1)
    kept = KeptAnswers(Exact(store, PassedForm(), SystemClock()), answers_for="greedy")
    yield kept
    kept.exact.close()


def upstream(raw: RawUpstream, **more: Any) -> Upstream:
    return Upstream("raw", raw.url, "openai", **{"key": "theirs", "max_retries": 0} | more)


def post(url: str, kept: KeptAnswers, body: dict[str, Any] = BODY, **headers: str) -> httpx2.Response:
    response = httpx2.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30)
    assert kept.exact.clerk.flush(10)
    return response


def test_whole_answers_come_again_to_the_byte(answers: KeptAnswers) -> None:
    with RawUpstream([whole(GOOD)]) as raw, gateway(upstream(raw), answers=answers) as url:
        first, second = post(url, answers), post(url, answers)
        assert (first.headers["x-ostinato-cache"], second.headers["x-ostinato-cache"]) == ("miss", "exact")
        assert first.content == second.content == GOOD
        assert int(second.headers["age"]) >= 0
        assert len(raw.seen) == 1
        reordered = {name: BODY[name] for name in reversed(BODY)} | {"user": "anna"}
        assert post(url, answers, reordered).headers["x-ostinato-cache"] == "exact"
        for changed, expected in (
            ({"unheard_of": {"b": 2}}, "miss"),
            ({"seed": 5}, "miss"),
            ({"temperature": 0.5}, "bypass"),
        ):
            assert post(url, answers, BODY | changed).headers["x-ostinato-cache"] == expected
        drawn = BODY | {"temperature": 1}
        assert post(url, answers, drawn, **{"x-ostinato-cache": "on"}).headers["x-ostinato-cache"] == "miss"
        assert post(url, answers, drawn, **{"x-ostinato-cache": "on"}).headers["x-ostinato-cache"] == "exact"
        assert raw.seen[-1].header("x-ostinato-cache") is None
        assert post(url, answers, **{"cache-control": "no-store"}).headers["x-ostinato-cache"] == "bypass"
        assert post(url, answers, **{"openai-organization": "o"}).headers["x-ostinato-cache"] == "miss"
        assert post(url, answers, **{"x-stainless-lang": "js"}).headers["x-ostinato-cache"] == "exact"


def test_streams_come_again_to_the_byte(answers: KeptAnswers) -> None:
    with RawUpstream([[STREAM_HEAD, *EVENTS]]) as raw, gateway(upstream(raw), answers=answers) as url:
        streamed = BODY | {"stream": True}
        first, second = post(url, answers, streamed), post(url, answers, streamed)
        assert second.headers["x-ostinato-cache"] == "exact"
        assert second.headers["content-type"].startswith("text/event-stream")
        assert first.content == second.content == b"".join(EVENTS)
        assert len(raw.seen) == 1
        with_usage = streamed | {"stream_options": {"include_usage": True}}
        assert post(url, answers, with_usage).headers["x-ostinato-cache"] == "miss"


@pytest.mark.parametrize(
    "reply",
    [
        whole(b'{"error": {"message": "no"}}'),
        whole(b'{"status": "queued"}'),
        whole(b'{"error": {}}', "500 Internal Server Error"),
        whole(GOOD[:-5]),
        [STREAM_HEAD, EVENTS[0]],
        [STREAM_HEAD, b'data: {"error": {"message": "no"}}\n\n', EVENTS[-1]],
    ],
)
def test_what_failed_is_not_kept(answers: KeptAnswers, reply: list[bytes | None]) -> None:
    is_stream = reply[0] == STREAM_HEAD
    body = BODY | {"stream": True} if is_stream else BODY
    good = [STREAM_HEAD, *EVENTS] if is_stream else whole(GOOD)
    with RawUpstream([reply, good]) as raw, gateway(upstream(raw), answers=answers) as url:
        post(url, answers, body)
        assert answers.exact.uses() == []
        assert post(url, answers, body).headers["x-ostinato-cache"] == "miss"
        assert post(url, answers, body).headers["x-ostinato-cache"] == "exact"


def test_callers_do_not_share(answers: KeptAnswers) -> None:
    """Neither tenants of the gateway, nor holders of keys that it passes on; nor two upstreams."""
    anna, bob = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
    keys = (ApiKey("anna", "key-a", "salt-a"), ApiKey("bob", "key-b", "salt-b"))
    with RawUpstream([whole(GOOD)]) as raw:
        with gateway(upstream(raw), answers=answers, api_keys=keys) as url:
            outcomes = [post(url, answers, **who).headers["x-ostinato-cache"] for who in (anna, bob, anna)]
            assert outcomes == ["miss", "miss", "exact"]
        with gateway(upstream(raw, key=""), answers=answers) as url:
            outcomes = [post(url, answers, **who).headers["x-ostinato-cache"] for who in (anna, bob, bob)]
            assert outcomes == ["miss", "miss", "exact"]
        with RawUpstream([whole(GOOD)]) as other, gateway(upstream(other, key=""), answers=answers) as url:
            assert post(url, answers, **bob).headers["x-ostinato-cache"] == "miss"
        assert b"key-a" not in json.dumps([str(use) for use in answers.exact.uses()]).encode()
