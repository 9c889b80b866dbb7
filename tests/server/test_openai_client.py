"""The official client against the server over a real socket. Nothing here depends on what the model says."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

SAID: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Name a colour."},
]


@pytest.fixture
def client(server_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(server_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(client: OpenAI) -> str:
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id) == card
    return card.id


def test_chat_answers_whole(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(model=model, messages=SAID, max_tokens=8)
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert reply.model == model
    assert abs(reply.created - time.time()) < 60
    assert reply.system_fingerprint
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = reply.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 1 <= usage.completion_tokens <= 8
    assert usage.prompt_tokens_details is not None


def test_the_second_time_the_prompt_comes_from_the_cache(client: OpenAI, model: str) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"Reuse {time.time()} " * 8}]
    cached = []
    for _ in range(2):
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=2)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached.append(reply.usage.prompt_tokens_details.cached_tokens or 0)
        assert cached[-1] < reply.usage.prompt_tokens
    assert cached[1] > cached[0]
    assert cached[1] > 0


def test_a_cache_salt_keeps_caches_apart(client: OpenAI, model: str) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"Salted {time.time()} " * 8}]

    def cached(salt: str) -> int:
        reply = client.chat.completions.create(
            model=model, messages=messages, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("a") > 0


def test_chat_streams_what_it_answers_whole(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=SAID, max_tokens=12, temperature=0)
    with client.chat.completions.create(
        model=model,
        messages=SAID,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *pieces, usage_chunk = chunks
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    reasons = [piece.choices[0].finish_reason for piece in pieces]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert all(piece.usage is None for piece in pieces)
    assert usage_chunk.choices == []
    assert usage_chunk.usage is not None
    assert whole.usage is not None
    assert usage_chunk.usage.completion_tokens == whole.usage.completion_tokens


def test_the_streaming_helper_understands_the_stream(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=SAID, max_tokens=6) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content
    assert final.choices[0].finish_reason


def test_several_choices(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(model=model, messages=SAID, max_tokens=4, n=3, seed=7)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage is not None
    assert reply.usage.completion_tokens > 3
    with client.chat.completions.create(
        model=model, messages=SAID, max_tokens=4, n=3, seed=7, stream=True
    ) as stream:
        texts = {0: "", 1: "", 2: ""}
        finished: list[int] = []
        for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finished.append(choice.index)
    assert texts == {choice.index: choice.message.content for choice in reply.choices}
    assert sorted(finished) == [0, 1, 2]


def test_chat_logprobs(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=SAID, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    (choice,) = reply.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert reply.usage is not None
    assert len(choice.logprobs.content) == reply.usage.completion_tokens
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert math.isclose(entry.top_logprobs[0].logprob, entry.logprob, abs_tol=1e-6)


def test_completions_with_logprobs_and_echo(client: OpenAI, model: str) -> None:
    reply = client.completions.create(
        model=model, prompt="One, two,", max_tokens=5, temperature=0, logprobs=2
    )
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    (choice,) = reply.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    echoed = client.completions.create(
        model=model, prompt="One, two,", max_tokens=5, temperature=0, echo=True
    )
    assert echoed.choices[0].text == "One, two," + choice.text


def test_completions_of_several_prompts(client: OpenAI, model: str) -> None:
    prompts = ["Alpha beta", "Gamma delta epsilon"]
    alone = [
        client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0).choices[0].text
        for prompt in prompts
    ]
    together = client.completions.create(model=model, prompt=prompts, max_tokens=4, temperature=0, n=2)
    assert [choice.text for choice in together.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    texts = ["", "", "", ""]
    with client.completions.create(
        model=model, prompt=prompts, max_tokens=4, temperature=0, n=2, stream=True
    ) as stream:
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in together.choices]


def test_completions_of_token_ids(client: OpenAI, model: str) -> None:
    reply = client.completions.create(model=model, prompt=[[72, 105], [72, 111, 33]], max_tokens=2)
    assert len(reply.choices) == 2
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 5


def test_a_stop_string_is_not_part_of_the_answer(client: OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="Say it again", max_tokens=12, temperature=0)
    stop = whole.choices[0].text[3:5]
    assert stop
    cut = client.completions.create(
        model=model, prompt="Say it again", max_tokens=12, temperature=0, stop=[stop]
    )
    assert cut.choices[0].finish_reason == "stop"
    assert stop not in cut.choices[0].text
    assert whole.choices[0].text.startswith(cut.choices[0].text)


def test_errors_become_the_clients_own_exceptions(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=SAID)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/at-all")
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model=model, messages=SAID, temperature=3)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model=model, messages=[])
    assert empty.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as odd:
        client.chat.completions.create(model=model, messages=SAID, extra_body={"colour": "red"})
    assert "Unrecognized request argument supplied: colour" in odd.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 100_000}])
    assert long.value.code == "context_length_exceeded"


def test_the_clients_request_id_comes_back(client: OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=SAID, max_tokens=1, extra_headers={"x-request-id": "my-own.id:1"}
    )
    assert raw.headers["x-request-id"] == "my-own.id:1"
    assert float(raw.headers["x-ostinato-ttft-ms"]) >= float(raw.headers["x-ostinato-queue-ms"]) >= 0
    assert raw.parse()._request_id == "my-own.id:1"


def test_an_answer_can_be_sent_back_as_it_came(client: OpenAI, model: str) -> None:
    first = client.chat.completions.create(model=model, messages=SAID, max_tokens=4)
    history = [*SAID, first.choices[0].message.model_dump(), {"role": "user", "content": "And another."}]
    second = client.chat.completions.create(model=model, messages=history, max_tokens=4)  # type: ignore[arg-type]
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def test_many_async_streams_at_once(async_client: AsyncOpenAI) -> None:
    model = (await async_client.models.list()).data[0].id

    async def one(index: int) -> tuple[str, str | None]:
        text, reason = "", None
        stream = await async_client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"Stream number {index}."}],
            max_tokens=8,
            temperature=0,
            stream=True,
        )
        async with stream:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
        return text, reason

    alone = [await one(index) for index in range(4)]
    together = await asyncio.gather(*(one(index) for index in range(4)))
    assert together == alone
    assert all(reason in ("stop", "length") for _, reason in together)


async def test_a_stream_abandoned_in_the_middle_frees_the_engine(async_client: AsyncOpenAI) -> None:
    model = (await async_client.models.list()).data[0].id
    for _ in range(3):
        stream = await async_client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Count for a very long time."}],
            max_tokens=1000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async with stream:
            async for _ in stream:
                break
    reply = await async_client.chat.completions.create(model=model, messages=SAID, max_tokens=2)
    assert reply.choices[0].message.content


def test_a_sync_stream_abandoned_in_the_middle(client: OpenAI, model: str) -> None:
    for _ in range(3):
        with client.chat.completions.create(
            model=model, messages=SAID, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
    assert client.chat.completions.create(model=model, messages=SAID, max_tokens=1).choices
