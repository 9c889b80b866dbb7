"""Kept answers before a real engine, through the library and over HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.errors import DeadlineError, EngineError
from ostinato.events import AnswerLookedUp, RequestFinished
from ostinato.responses.exact import Exact
from ostinato.server import Server, create_app, server_settings
from ostinato.types import CacheControl, Chunk

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def loaded(model: Path, **settings: Any) -> Iterator[ostinato.Engine]:
    with ostinato.load(
        model, kv_cache="16MiB", **{"answers": "memory", "max_model_len": 192} | settings
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def one_engine(model: Path) -> Iterator[ostinato.Engine]:
    with loaded(model) as engine:
        yield engine


@pytest.fixture
def engine(one_engine: ostinato.Engine) -> Iterator[ostinato.Engine]:
    """An engine that keeps no answer yet."""
    observers = list(one_engine.runtime.observers)
    one_engine.purge()
    yield one_engine
    one_engine.runtime.observers[:] = observers


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)


def cache_of(engine: ostinato.Engine) -> Exact[Chunk]:
    assert engine.front is not None
    return engine.front.exact


def ask(engine: ostinato.Engine, question: Any = QUESTION, **options: Any) -> ostinato.Reply:
    reply = engine.chat(question, **GREEDY | options)
    assert cache_of(engine).clerk.flush(10)
    return reply


def layer(reply: ostinato.Reply) -> str | None:
    return None if reply.usage.served is None else reply.usage.served.layer


def test_an_equal_request_gets_the_answer_again(engine: ostinato.Engine) -> None:
    first, second = ask(engine), ask(engine)
    assert (layer(first), layer(second)) == (None, "exact")
    assert second.choices == first.choices
    assert second.usage.completion_tokens == first.usage.completion_tokens
    assert second.usage.cached_tokens == second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.written_tokens == 0
    assert second.usage.served is not None
    assert 0 <= second.usage.served.age_s < 60
    for changed in ({"max_tokens": 11}, {"salt": "anna"}, {"seed": 1}, {"stop": "x"}, {"n": 2}):
        assert layer(ask(engine, **changed)) is None
    assert layer(ask(engine, [{"role": "user", "content": "What is it? "}])) is None


def test_pieces_come_again_as_they_came(engine: ostinato.Engine) -> None:
    options = GREEDY | {"logprobs": 3, "n": 2}
    first = list(engine.stream(QUESTION, **options))
    assert cache_of(engine).clerk.flush(10)
    second = list(engine.stream(QUESTION, **options))
    assert second[-1].usage is not None
    assert second[-1].usage.served is not None

    def plain(chunks: list[Chunk]) -> list[Chunk]:
        return [replace(chunk, usage=None) for chunk in chunks]

    assert plain(second) == plain(first)
    assert len(first) > 12


def test_whole_and_streamed_share_an_entry_also_for_asyncio(engine: ostinato.Engine) -> None:
    reply = ask(engine)
    texts = [chunk.text for chunk in engine.stream(QUESTION, **GREEDY)]
    assert "".join(texts) == reply.text

    async def twice() -> tuple[ostinato.Reply, list[Chunk]]:
        return await engine.achat(QUESTION, **GREEDY), [c async for c in engine.astream(QUESTION, **GREEDY)]

    whole, chunks = asyncio.run(twice())
    assert layer(whole) == "exact"
    assert whole.choices == reply.choices
    assert "".join(chunk.text for chunk in chunks) == reply.text
    completed = engine.complete("it is", **GREEDY)
    assert cache_of(engine).clerk.flush(10)
    assert engine.complete("it is", **GREEDY).choices == completed.choices
    assert layer(engine.complete([1, 2, 3], **GREEDY)) is None


def test_drawn_answers_are_kept_only_when_asked(engine: ostinato.Engine) -> None:
    ask(engine, temperature=1)
    assert layer(ask(engine, temperature=1)) is None
    drawn = ask(engine, temperature=1, cache_answer=True)
    assert layer(drawn) is None
    again = ask(engine, temperature=1, cache_answer=True)
    assert layer(again) == "exact"
    assert again.choices == drawn.choices
    assert layer(ask(engine, temperature=1)) is None


@pytest.mark.parametrize(
    ("answers_for", "greedy", "drawn", "asked"),
    [("asked", None, None, "exact"), ("greedy", "exact", None, "exact"), ("all", "exact", "exact", "exact")],
)
def test_whose_answers_the_operator_keeps(
    model: Path, answers_for: str, greedy: str | None, drawn: str | None, asked: str
) -> None:
    with loaded(model, answers_for=answers_for) as engine:
        for options, expected in (
            ({}, greedy),
            ({"temperature": 0.7}, drawn),
            ({"temperature": 0.9, "cache_answer": True}, asked),
            ({"cache_answer": False, "seed": 5}, None),
        ):
            ask(engine, **options)
            assert layer(ask(engine, **options)) == expected


def test_what_a_request_says_of_kept_answers(engine: ostinato.Engine) -> None:
    ask(engine, cache_control="no-store")
    assert cache_of(engine).uses() == []
    ask(engine)
    assert layer(ask(engine, cache_control="no-cache")) is None
    assert layer(ask(engine, cache_control="max-age=0")) is None
    assert layer(ask(engine, cache_control="max-age=60, something=else")) == "exact"
    assert layer(ask(engine, cache_control=CacheControl(read=False))) is None
    with pytest.raises(ostinato.ClientError):
        ask(engine, cache_control=5)
    with pytest.raises(ostinato.ClientError):
        ask(engine, cache_answer="yes")


def test_answers_cut_short_are_not_kept(engine: ostinato.Engine) -> None:
    stream = engine.stream(QUESTION, **GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert layer(ask(engine)) is None  # by the client
    long: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    with suppress(DeadlineError):  # a busy machine may not come to the first token
        cut = ask(engine, deadline=0.02, **long)
        assert cut.finish_reason == "length"
        assert len(cut.choices[0].token_ids) < 100
    whole = ask(engine, **long)  # by a deadline
    assert layer(whole) is None
    assert len(whole.choices[0].token_ids) == 100
    assert layer(ask(engine, **long, deadline=9.0)) == "exact"
    # For want of room: it depends on what is free.
    unbounded: dict[str, Any] = {"max_tokens": None, "ignore_eos": True}
    assert ask(engine, **unbounded).finish_reason == "length"
    assert layer(ask(engine, **unbounded)) is None


def test_answers_to_what_is_left_of_a_conversation_are_not_kept(engine: ostinato.Engine) -> None:
    long = [{"role": "user", "content": f"{turn} " * 20} for turn in range(12)]
    for _ in range(2):
        reply = ask(engine, long, trim={"strategy": "sticky", "budget_tokens": 100})
        assert reply.usage.trimmed is not None
        assert layer(reply) is None


def test_approximate_answers_are_never_filed(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"shared_tier": tmp_path / "tier", "tier_codec": "int8", "block_size": 4}
    long = [{"role": "user", "content": "What is it? " * 8}]
    with loaded(model, **options) as engine:
        ask(engine, long, cache_control="no-store")
    with loaded(model, **options) as engine:
        first = ask(engine, long)
        assert first.usage.approximate_tokens > 0
        assert cache_of(engine).uses() == []
        assert layer(ask(engine, long)) is None


def test_answers_from_memory_with_gaps_are_never_filed(engine: ostinato.Engine) -> None:
    long = [{"role": "user", "content": "What is it? " * 8}]
    for _ in range(2):
        reply = ask(engine, long, kv_budget=48, max_tokens=40)
        assert reply.usage.dropped_tokens > 0
        assert layer(reply) is None
    assert cache_of(engine).uses() == []


def test_answers_outlive_the_process_and_its_settings_do_not_mix(model: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.db"
    with loaded(model, answers=answers) as engine:
        first = ask(engine)
    with loaded(model, answers=answers, block_size=8, max_sequences=2) as engine:
        again = ask(engine)
        assert layer(again) == "exact"
        assert again.choices == first.choices
    for other in ({"keep_answers": True}, {"max_model_len": 128}, {"trim": "drop"}, {"template": "chatml"}):
        with loaded(model, answers=answers, **other) as engine:
            assert layer(ask(engine)) is None, other
    with loaded(model, answers=answers, answers_key="sesame") as engine:
        assert layer(ask(engine)) is None


def test_a_template_that_tells_the_time_is_asked_each_time(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%Y-%m-%d') }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )

    class Days:
        day = 0

        def now(self) -> float:
            return 86_400.0 * (self.day + 20_000.5)

        def monotonic(self) -> float:
            return self.now()

    days = Days()
    with ostinato.load(
        model, kv_cache="16MiB", answers="memory", template=str(template), clock=days
    ) as engine:
        ask(engine)
        assert layer(ask(engine)) == "exact"
        days.day += 1
        assert layer(ask(engine)) is None


def test_named_prompts_are_their_text(model: Path, tmp_path: Path) -> None:
    answers = str(tmp_path / "answers.db")
    for text in ("You are {{who}}.", "You were {{who}}."):
        with loaded(model, answers=answers) as engine:
            engine.prompts.register("guide", text)
            assert layer(ask(engine, prompt="guide", variables={"who": "Ada"})) is None
            assert layer(ask(engine, prompt="guide", variables={"who": "Ada"})) == "exact"
            assert layer(ask(engine, prompt="guide", variables={"who": "Bob"})) is None
            with pytest.raises(ostinato.ClientError):
                ask(engine, prompt="guide", variables={})


def test_wrong_requests_are_refused_as_ever(engine: ostinato.Engine) -> None:
    ask(engine)
    for wrong in ({"temperature": True}, {"temperature": float("nan")}, {"max_tokens": 0}, {"seed": 2**70}):
        with pytest.raises(ostinato.ClientError):
            ask(engine, **wrong)
    with pytest.raises(ostinato.ClientError):
        ask(engine, [{"role": "user", "content": "\ud800"}])


def test_purging_and_forgetting(engine: ostinato.Engine) -> None:
    for salt in ("anna", "bob"):
        ask(engine, salt=salt)
    assert engine.purge(salt="anna").num_answers == 1
    assert layer(ask(engine, salt="anna")) is None
    kept = ask(engine, salt="bob")
    assert layer(kept) == "exact"
    assert engine.forget(kept)
    assert not engine.forget(kept)
    assert layer(ask(engine, salt="bob")) is None
    assert engine.purge(older_than_s=3600).num_answers == 0
    assert engine.purge().num_answers == 2


def test_many_at_once_are_one_call(engine: ostinato.Engine) -> None:
    finished: list[RequestFinished] = []
    looked: list[AnswerLookedUp] = []
    engine.runtime.observers += [
        lambda event: finished.append(event) if isinstance(event, RequestFinished) else None,
        lambda event: looked.append(event) if isinstance(event, AnswerLookedUp) else None,
    ]
    alone = ask(engine, cache_control="no-store")
    wait_for(lambda: len(finished) == len(looked) == 1)
    finished.clear()
    looked.clear()

    async def all_at_once() -> list[ostinato.Reply]:
        return await asyncio.gather(*(engine.achat(QUESTION, **GREEDY) for _ in range(100)))

    replies = asyncio.run(all_at_once())
    wait_for(lambda: len(finished) > 0)
    assert len(finished) == 1
    assert all(reply.choices == alone.choices for reply in replies)
    outcomes = [event.outcome for event in looked]
    assert outcomes.count("miss") == 1
    assert set(outcomes) <= {"miss", "joined", "exact"}
    assert len(outcomes) == 100


def test_a_leader_that_hangs_up_cuts_nobody_off(engine: ostinato.Engine) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}
    leader = engine.stream(QUESTION, **options)
    next(leader)
    replies: list[ostinato.Reply] = []
    follower = threading.Thread(target=lambda: replies.append(engine.chat(QUESTION, **options)))
    follower.start()
    flights = cache_of(engine)._flights
    wait_for(lambda: any(len(flight._passengers) == 2 for flight in tuple(flights.values())))
    leader.close()  # type: ignore[attr-defined]
    follower.join(60)
    (reply,) = replies
    assert layer(reply) == "joined"
    assert len(reply.choices[0].token_ids) == 100
    assert cache_of(engine).clerk.flush(10)
    assert layer(engine.chat(QUESTION, **options)) == "exact"


def test_when_the_engine_fails_the_leader_another_takes_over(
    engine: ostinato.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(engine, cache_control="no-store")
    runner = engine.runtime._batcher._runner
    execute, failures = runner.execute, ["the first"]
    waiting = threading.Event()

    def failing(plan: Any) -> Any:
        if failures:
            assert waiting.wait(20)
            raise RuntimeError(f"{failures.pop()} step fails")
        return execute(plan)

    monkeypatch.setattr(runner, "execute", failing)
    results: list[Any] = []

    def one() -> None:
        try:
            results.append(engine.chat(QUESTION, **GREEDY))
        except EngineError as error:
            results.append(error)

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    flights = cache_of(engine)._flights
    wait_for(lambda: any(len(flight._passengers) == 6 for flight in tuple(flights.values())))
    waiting.set()
    for thread in threads:
        thread.join(60)
    errors = [result for result in results if isinstance(result, EngineError)]
    replies = [result for result in results if not isinstance(result, EngineError)]
    assert (len(errors), len(replies)) == (1, 5)
    assert all(reply.choices == expected.choices for reply in replies)


def test_one_of_several_choices_that_fails_ends_the_whole(
    engine: ostinato.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the failed one is not the last: nobody waits for the others."""
    chunks = list(engine.stream(QUESTION, n=2, cache_control="no-store", **GREEDY))
    first_end = next(chunk for chunk in chunks if chunk.finish_reason is not None)
    assert first_end.usage is None

    class Call:
        def cancel(self) -> None: ...

    def start(prepared: object, deliver: Callable[[Chunk], None]) -> Call:
        deliver(Chunk(0, "", finish_reason="error", error=EngineError("a choice failed")))
        return Call()

    monkeypatch.setattr(engine.runtime, "start", start)
    with pytest.raises(EngineError, match="a choice failed"):
        engine.chat(QUESTION, n=2, **GREEDY)
    (only,) = engine.stream(QUESTION, n=2, **GREEDY)
    assert isinstance(only.error, EngineError)


# ---------------------------------------------------------------- over HTTP


@contextmanager
def serving(engine: ostinato.Engine, **settings: Any) -> Iterator[str]:
    wire = server_settings(port=0, drain_timeout_s=1.0, **settings)
    is_ready = threading.Event()
    urls: list[str] = []

    def ready(url: str) -> None:
        urls.append(url)
        is_ready.set()

    assert engine.front is not None
    server = Server(create_app(engine.front, wire, engine.runtime, cache_of(engine)), wire, ready)
    thread = threading.Thread(target=server.run_until_stopped, name="server")
    thread.start()
    try:
        assert is_ready.wait(20)
        yield urls[0]
    finally:
        server.stop()
        thread.join(20)


@dataclass(frozen=True, slots=True)
class Served:
    engine: ostinato.Engine
    url: str
    keyed_url: str


@pytest.fixture(scope="module")
def one_served(model: Path) -> Iterator[Served]:
    """One engine behind two servers: an open one, and one with keys."""
    keys = {"api_keys": "key-of-anna,key-of-bob", "admin_key": "admin"}
    with loaded(model) as engine, serving(engine) as url, serving(engine, **keys) as keyed_url:
        yield Served(engine, url, keyed_url)


@pytest.fixture
def served(one_served: Served) -> Served:
    one_served.engine.purge()
    return one_served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(engine: ostinato.Engine, client: openai.OpenAI, **options: Any) -> tuple[Any, Any]:
    """The answer and its headers."""
    model = engine.runtime.model_name
    raw = client.chat.completions.with_raw_response.create(model=model, messages=QUESTION, **GREEDY | options)  # type: ignore[call-overload]
    assert cache_of(engine).clerk.flush(10)
    return raw.parse(), raw.headers


def test_over_http_the_answer_says_where_it_comes_from(served: Served, client: openai.OpenAI) -> None:
    engine = served.engine
    first, headers = post(engine, client)
    assert headers["x-ostinato-cache"] == "miss"
    assert "age" not in headers
    second, headers = post(engine, client)
    assert headers["x-ostinato-cache"] == "exact"
    assert int(headers["age"]) >= 0
    assert headers["x-ostinato-answer"].startswith("answer-")
    assert second.choices == first.choices
    assert second.id != first.id
    assert second.usage.completion_tokens == first.usage.completion_tokens
    assert second.ostinato["cache"]["layer"] == "exact"
    assert second.ostinato["cache"]["id"] == headers["x-ostinato-answer"]
    stream = client.chat.completions.create(
        model=engine.runtime.model_name,
        messages=QUESTION,
        stream=True,
        **GREEDY,  # type: ignore[call-overload]
    )
    chunks = list(stream)
    assert stream.response.headers["x-ostinato-cache"] == "exact"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == first.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == first.choices[0].finish_reason
    assert chunks[-1].ostinato["cache"]["layer"] == "exact"  # type: ignore[attr-defined]
    assert len(chunks) > 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"extra_headers": {"Cache-Control": "no-cache"}}, "miss"),
        ({"extra_headers": {"Cache-Control": "max-age=0"}}, "miss"),
        ({"extra_headers": {"Cache-Control": "no-store"}}, "bypass"),
        ({"extra_headers": {"X-Ostinato-Cache": "off"}}, "bypass"),
        ({"extra_body": {"cache_answer": False}}, "bypass"),
        ({"extra_body": {"cache_salt": "mine"}}, "miss"),
        ({"temperature": 1}, "bypass"),
        ({"temperature": 1, "extra_headers": {"X-Ostinato-Cache": "on"}}, "miss"),
        ({"temperature": 1, "extra_body": {"cache_answer": True}}, "miss"),
        ({"user": "anna", "metadata": {"a": "b"}}, "exact"),
    ],
)
def test_what_requests_say_over_http(
    served: Served, client: openai.OpenAI, options: dict[str, Any], expected: str
) -> None:
    engine = served.engine
    post(engine, client)
    assert post(engine, client, **options)[1]["x-ostinato-cache"] == expected
    with pytest.raises(openai.BadRequestError, match="'on', 'off', 'exact' or 'semantic'"):
        post(engine, client, extra_headers={"X-Ostinato-Cache": "maybe"})
    with pytest.raises(openai.BadRequestError, match="unheard_of"):
        post(engine, client, extra_body={"unheard_of": 1})


def test_two_keys_never_share_and_the_operator_looks_after_both(served: Served) -> None:
    engine = served.engine
    base = f"{served.keyed_url}/v1"
    with (
        openai.OpenAI(base_url=base, api_key="key-of-anna", max_retries=0) as anna,
        openai.OpenAI(base_url=base, api_key="key-of-bob", max_retries=0) as bob,
        openai.OpenAI(base_url=f"{base}/ostinato", api_key="admin", max_retries=0) as admin,
    ):
        assert post(engine, anna)[1]["x-ostinato-cache"] == "miss"
        assert post(engine, bob)[1]["x-ostinato-cache"] == "miss"
        assert post(engine, anna)[1]["x-ostinato-cache"] == "exact"
        found: Any = admin.get("/cache", cast_to=object)
        assert {(entry["name"], entry["entries"]) for entry in found["answers"]} == {
            ("key-1", 1),
            ("key-2", 1),
        }
        report: Any = admin.post("/cache/purge", body={"tenant": "key-1"}, cast_to=object)
        assert report["answers"]["entries"] == 1
        assert post(engine, anna)[1]["x-ostinato-cache"] == "miss"
        kept = post(engine, bob)[1]
        assert kept["x-ostinato-cache"] == "exact"
        admin.post("/cache/forget", body={"id": kept["x-ostinato-answer"]}, cast_to=object)
        assert post(engine, bob)[1]["x-ostinato-cache"] == "miss"
        with pytest.raises(openai.NotFoundError):
            admin.post("/cache/forget", body={"id": "answer-none"}, cast_to=object)
        metrics = anna._client.get(f"{served.keyed_url}/metrics").text
        assert 'ostinato_response_cache_requests_total{outcome="exact"} ' in metrics
        assert 'ostinato_response_cache_entries{kind="exact"}' in metrics


def test_a_hundred_over_http_are_one_call(served: Served) -> None:
    engine = served.engine
    finished: list[object] = []
    engine.runtime.observers.append(
        lambda event: finished.append(event) if isinstance(event, RequestFinished) else None
    )

    async def all_at_once(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=engine.runtime.model_name,
                        messages=QUESTION,
                        **GREEDY,  # type: ignore[call-overload]
                    )
                    for _ in range(100)
                )
            )

    answers = asyncio.run(all_at_once(served.url))
    wait_for(lambda: len(finished) > 0)
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert len(finished) == 1
