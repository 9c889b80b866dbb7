"""Semantic answers through every door: library, server and gateway, with real models and real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import ostinato
from doors.tiny import save_tiny_chat_model
from gateway.gateways import gateway
from gateway.raw_upstream import RawUpstream, whole
from ostinato.config import Settings
from ostinato.errors import ParameterError
from ostinato.gateway import Upstream
from ostinato.ports import SystemClock
from ostinato.response_caches import kept_answers
from ostinato.server import Server, create_app, server_settings

pytestmark = pytest.mark.model

ASKED = "How do I turn on two-factor authentication?"
SAME = "How can I enable two-factor authentication?"
TRAP = "How can I disable two-factor authentication?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def loaded(model: Path, **settings: Any) -> Iterator[ostinato.Engine]:
    given = {"answers": "memory", "max_model_len": 512, "semantic": "asked"} | settings
    with ostinato.load(model, kv_cache="16MiB", **given) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(model: Path, embedder_path: Path) -> Iterator[ostinato.Engine]:
    with loaded(model) as engine:
        yield engine


@contextmanager
def served(engine: ostinato.Engine) -> Iterator[str]:
    """The address of a server in front of this engine."""
    assert engine.front is not None
    settings, is_ready, urls = server_settings(port=0, drain_timeout_s=1.0), threading.Event(), list[str]()

    def ready(url: str) -> None:
        urls.append(url)
        is_ready.set()

    front = engine.front
    server = Server(create_app(front, settings, engine.runtime, front.exact, front.rated), settings, ready)
    thread = threading.Thread(target=server.run_until_stopped, name="server")
    thread.start()
    try:
        assert is_ready.wait(20), "the server did not start"
        yield urls[0]
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def flush(engine: ostinato.Engine) -> None:
    assert engine.front is not None
    assert engine.front.exact.clerk.flush(10)
    assert engine.front.second is not None
    assert engine.front.second.semantic.clerk.flush(10)  # type: ignore[attr-defined]


def ask(engine: ostinato.Engine, text: str, **options: Any) -> ostinato.Reply:
    given: dict[str, Any] = GREEDY | {"cache_answer": "semantic"} | options
    reply = engine.chat([*given.pop("before", ()), {"role": "user", "content": text}], **given)
    flush(engine)
    return reply


def layer(reply: ostinato.Reply) -> str | None:
    return None if reply.usage.served is None else reply.usage.served.layer


def test_the_library_serves_what_means_the_same(engine: ostinato.Engine) -> None:
    engine.purge()
    first = ask(engine, ASKED)
    assert layer(first) is None
    again = ask(engine, SAME)
    assert layer(again) == "semantic"
    assert again.text == first.text
    assert again.usage.served is not None
    assert again.usage.served.details["matched"] == again.usage.served.entry_id
    assert layer(ask(engine, TRAP)) is None
    assert layer(ask(engine, ASKED)) == "exact"


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 5},
        {"salt": "bob"},
        {"cache_namespace": "other"},
        {"before": [{"role": "system", "content": "Be brief."}]},
        {"before": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"cache_answer": True},
        {"cache_answer": "exact"},
        {"cache_answer": False},
        {"cache_control": "no-cache"},
        {"n": 2},
    ],
)
def test_whatever_else_differs_is_another_namespace(engine: ostinato.Engine, change: dict[str, Any]) -> None:
    engine.purge()
    ask(engine, ASKED)
    assert layer(ask(engine, SAME, **change)) is None
    assert layer(ask(engine, SAME)) in ("semantic", "exact")


def test_forgetting_an_answer_takes_both_its_copies(engine: ostinato.Engine) -> None:
    engine.purge()
    ask(engine, ASKED)
    served = ask(engine, SAME)
    assert engine.forget(served)
    assert layer(ask(engine, SAME)) is None


def test_rating_an_answer_as_bad_keeps_it_back(engine: ostinato.Engine) -> None:
    engine.purge()
    ask(engine, ASKED)
    assert engine.rate(ask(engine, SAME), is_good=False)
    assert not engine.rate("answer-00", is_good=True)
    assert layer(ask(engine, "How can I enable two-factor authentication please?")) is None


def test_settings_that_make_no_sense_are_refused(model: Path) -> None:
    for wrong in (
        {"semantic": "maybe"},
        {"semantic": "all", "answers": None},
        {"semantic_budget": 0.5},
        {"semantic_history": "none"},
        {"semantic_checks": 2.0},
    ):
        with pytest.raises(ParameterError):
            Settings.from_environment({}, **{"answers": "memory"} | wrong)
    with pytest.raises(ParameterError, match="cache_answer"):
        Settings.from_environment({})
        with loaded(model, semantic="off") as engine:
            engine.chat("hi", cache_answer="perhaps")


def test_over_http_it_is_said_how_it_was_judged(engine: ostinato.Engine) -> None:
    engine.purge()
    with served(engine) as url:

        def post(text: str, **headers: str) -> httpx2.Response:
            body = {"model": engine.runtime.model_name, "messages": [{"role": "user", "content": text}]}
            given = {"x-ostinato-cache": "semantic"} | headers
            response = httpx2.post(
                f"{url}/v1/chat/completions", json=body | GREEDY, headers=given, timeout=60
            )
            flush(engine)
            return response

        assert post(ASKED).headers["x-ostinato-cache"] == "miss"
        hit = post(SAME)
        assert hit.headers["x-ostinato-cache"] == "semantic"
        assert 0.5 < float(hit.headers["x-ostinato-similarity"]) <= 1
        assert hit.headers["x-ostinato-guards"]
        assert int(hit.headers["age"]) >= 0
        answer_id = hit.headers["x-ostinato-answer"]
        assert hit.json()["ostinato"]["cache"]["matched"] == answer_id
        assert post(TRAP).headers["x-ostinato-cache"] == "miss"
        assert post(SAME, **{"x-ostinato-cache": "exact"}).headers["x-ostinato-cache"] == "miss"
        assert post("hi", **{"x-ostinato-cache": "perhaps"}).status_code == 400
        assert post("hi", **{"x-ostinato-cache-namespace": "x" * 300}).status_code == 400
        rated = httpx2.post(f"{url}/v1/feedback", json={"id": answer_id, "good": False}, timeout=60)
        assert rated.json() == {"id": answer_id, "good": False}
        for body in ({"id": "answer-1", "good": True}, {"id": answer_id}, {"good": True}):
            assert httpx2.post(f"{url}/v1/feedback", json=body, timeout=60).status_code in (400, 404)
        metrics = httpx2.get(f"{url}/metrics", timeout=60).text
        assert 'semantic_cache_requests_total{outcome="served"} ' in metrics
        assert 'semantic_cache_checks_total{result="wrong",source="feedback"} 1.0' in metrics


ANSWER = b'{"id": "x", "choices": [{"message": {"content": "In the settings."}}]}'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_the_gateway_serves_what_means_the_same(tmp_path: Path, embedder_path: Path, path: str) -> None:
    settings = Settings.from_environment(
        {}, answers=str(tmp_path / "a.db"), semantic="asked", store=embedder_path.parent
    )
    kept = kept_answers(settings, SystemClock())
    assert kept is not None
    assert kept.second is not None
    protocol = "anthropic" if path == "/v1/messages" else "openai"
    try:
        with (
            RawUpstream([whole(ANSWER)] * 5) as raw,
            gateway(
                Upstream("raw", raw.url, protocol, key="theirs", max_retries=0),
                answers=kept,
                rated=kept.second.semantic,
            ) as url,
        ):

            def post(text: str, *before: dict[str, Any], parts: tuple[Any, ...] = ()) -> httpx2.Response:
                body = {"model": "m", "temperature": 0, "max_tokens": 9}
                content = [{"type": "text", "text": text}, *parts]
                messages = [*before, {"role": "user", "content": content}]
                response = httpx2.post(
                    f"{url}{path}",
                    json=body | {"messages": messages},
                    headers={"x-ostinato-cache": "semantic"},
                    timeout=60,
                )
                assert kept.second is not None
                assert kept.exact.clerk.flush(10)
                assert kept.second.semantic.clerk.flush(10)
                return response

            assert post(ASKED).headers["x-ostinato-cache"] == "miss"
            hit = post(SAME)
            assert hit.headers["x-ostinato-cache"] == "semantic"
            assert hit.content == ANSWER
            assert float(hit.headers["x-ostinato-similarity"]) > 0.5
            earlier = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"})
            assert post(SAME, *earlier).headers["x-ostinato-cache"] == "miss"
            assert post(TRAP).headers["x-ostinato-cache"] == "miss"
            image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
            assert post(SAME, parts=(image,)).headers["x-ostinato-cache"] == "miss"
            assert len(raw.seen) == 4
            answer_id = hit.headers["x-ostinato-answer"]
            rated = httpx2.post(f"{url}/v1/feedback", json={"id": answer_id, "good": False}, timeout=60)
            assert rated.status_code == 200
            assert post(f"{SAME} please").headers["x-ostinato-cache"] == "miss"
    finally:
        kept.close()
