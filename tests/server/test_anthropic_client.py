"""``/v1/messages`` with Anthropic's official client, over sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import Anthropic

from server.conftest import Running, Start

MARK: dict[str, Any] = {"type": "ephemeral"}
STRICT = "claude-opus-5"  # 512 tokens at least
WORDS = "every token is a byte here. " * 40


@pytest.fixture
def client(running: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=running.url, api_key="anything", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(running: Running) -> str:
    return running.engine.model_name


def ask(client: Anthropic, model: str, text: str = "hello", **more: Any) -> Any:
    content = more.pop("content", text)
    return client.messages.create(
        model=model,
        max_tokens=more.pop("max_tokens", 200),
        messages=[{"role": "user", "content": content}],
        **more,
    )


def test_a_plain_message(client: Anthropic, model: str) -> None:
    reply = ask(client, model, "hello there", extra_body={"temperature": 0})
    assert reply.type == "message"
    assert reply.role == "assistant"
    assert reply.content[0].text == "hello there"
    assert reply.stop_reason == "end_turn"
    usage = reply.usage
    assert usage.output_tokens == len("hello there")
    assert usage.cache_creation_input_tokens == 0
    assert usage.input_tokens > 0


def test_a_stream_is_the_same_message(client: Anthropic, model: str) -> None:
    with client.messages.stream(
        model=model, max_tokens=200, messages=[{"role": "user", "content": "héllo strëam"}]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "héllo strëam" == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len("héllo strëam".encode())
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) > 0


def test_limits_and_stops(client: Anthropic, model: str) -> None:
    cut = ask(client, model, "abcdefgh", max_tokens=3)
    assert (cut.content[0].text, cut.stop_reason) == ("abc", "max_tokens")
    stopped = ask(client, model, "abc STOP def", stop_sequences=["STOP"])
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == "STOP"


def test_what_was_read_is_told(client: Anthropic, model: str) -> None:
    content = [{"type": "text", "text": WORDS, "cache_control": MARK}]
    first = ask(client, model, content=content).usage
    second = ask(client, model, content=content).usage
    total = first.input_tokens + first.cache_creation_input_tokens + first.cache_read_input_tokens
    assert first.cache_creation_input_tokens == first.cache_creation.ephemeral_5m_input_tokens > 0
    assert second.cache_read_input_tokens > 0.9 * total
    again = second.input_tokens + second.cache_creation_input_tokens + second.cache_read_input_tokens
    assert again == total


def test_tool_results_and_system_blocks_reach_the_model(client: Anthropic, model: str) -> None:
    reply = client.messages.create(
        model=model,
        max_tokens=100,
        system=[
            {"type": "text", "text": "one"},
            {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}},
        ],
        tools=[{"name": "look", "description": "looks", "input_schema": {"type": "object"}}],
        messages=[
            {"role": "user", "content": "look!"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "a tree"}],
                    },
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
    )
    assert reply.content[0].text == "and now?"  # type: ignore[union-attr]


def test_tokens_are_counted_without_an_answer(running: Running, client: Anthropic, model: str) -> None:
    counted = client.messages.count_tokens(model=model, messages=[{"role": "user", "content": "hello"}])
    usage = ask(client, model, "hello").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_prewarming_says_nothing_and_is_read(client: Anthropic, model: str) -> None:
    content = [{"type": "text", "text": "prewarmed " + WORDS, "cache_control": MARK}]
    warm = ask(client, model, content=content, max_tokens=0)
    assert warm.content == []
    assert warm.usage.output_tokens == 0
    assert ask(client, model, content=content).usage.cache_read_input_tokens > 0


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"model": "claude-nobody"}, anthropic.NotFoundError, "this server has"),
        ({"content": [{"type": "image", "source": {}}]}, anthropic.BadRequestError, "image"),
        (
            {"content": [{"type": "text", "text": "", "cache_control": MARK}]},
            anthropic.BadRequestError,
            "cannot be set",
        ),
        (
            {"content": [{"type": "text", "text": "x", "cache_control": MARK} for _ in range(5)]},
            anthropic.BadRequestError,
            "maximum of 4",
        ),
        ({"content": [{"type": "text"}]}, anthropic.BadRequestError, "text"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, anthropic.BadRequestError, "thinking"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        ({"extra_body": {"temperature": 2}}, anthropic.BadRequestError, "temperature"),
        ({"extra_body": {"surprise": 1}}, anthropic.BadRequestError, "surprise"),
        ({"max_tokens": 20_000}, anthropic.BadRequestError, "max_tokens"),
    ],
)
def test_faults_have_anthropics_shape(
    running: Running, client: Anthropic, model: str, more: dict[str, Any], error: Any, says: str
) -> None:
    with pytest.raises(error) as caught:
        ask(client, more.pop("model", model), **more)
    body = caught.value.body
    assert body["type"] == "error"
    assert says in body["error"]["message"]
    assert body["request_id"] == caught.value.request_id or body["request_id"]
    running.check_healthy()


def test_an_engine_that_fails_ends_the_stream_with_one_error(
    running: Running, client: Anthropic, model: str
) -> None:
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(
            model=model, max_tokens=50, messages=[{"role": "user", "content": "!fail-late"}]
        ) as stream,
    ):
        for _ in stream:
            pass
    with pytest.raises(anthropic.InternalServerError) as caught:
        ask(client, model, "!fail-early")
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    running.check_healthy()


def test_a_client_that_leaves_frees_its_place(running: Running, client: Anthropic, model: str) -> None:
    with client.messages.stream(
        model=model, max_tokens=5000, messages=[{"role": "user", "content": "x" * 4000}]
    ) as stream:
        next(iter(stream))
    running.check_healthy()


def test_keys_are_taken_as_anthropics_clients_send_them(start: Start) -> None:
    from ostinato.server.settings import ApiKey

    running = start(api_keys=(ApiKey("one", "secret-1", "salt"),))
    body = {
        "model": running.engine.model_name,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hi"}],
    }
    with Anthropic(base_url=running.url, api_key="secret-1", max_retries=0) as client:
        assert client.messages.create(**body).content[0].text == "hi"  # type: ignore[call-overload]
    with Anthropic(base_url=running.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**body)  # type: ignore[call-overload]
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


# ---------------------------------------------------------------- strict mode


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    from server.conftest import start_server

    running = start_server({"anthropic_rules": STRICT}, {})
    yield running
    running.stop()


def conversation(client: Anthropic, name: str, *texts: str, ttl: str | None = None, **more: Any) -> Any:
    mark = MARK if ttl is None else {**MARK, "ttl": ttl}
    content: list[Any] = [{"type": "text", "text": f"{name} {text}"} for text in texts]
    content[-1] = {**content[-1], "cache_control": mark}
    return client.messages.create(
        model=STRICT, max_tokens=5, messages=[{"role": "user", "content": content}], **more
    ).usage


def test_strict_counts_are_the_vendors(strict: Running) -> None:
    with Anthropic(base_url=strict.url, api_key="x", max_retries=0) as client:
        long = "w" * 600
        first = conversation(client, "a", long, ttl="1h")
        assert first.cache_creation.ephemeral_1h_input_tokens == 602
        assert first.cache_read_input_tokens == 0
        second = conversation(client, "a", long, "more")
        assert second.cache_read_input_tokens == 602
        assert second.cache_creation.ephemeral_5m_input_tokens == len("a more")
        # Under the minimum nothing is cached, though our own KV would be there.
        for _ in range(2):
            small = conversation(client, "b", "w" * 509)
            assert (small.cache_creation_input_tokens, small.cache_read_input_tokens) == (0, 0)
        # tool_choice loses the messages.
        third = conversation(client, "a", long, tool_choice={"type": "none"})
        assert third.cache_read_input_tokens == 0


@pytest.mark.parametrize(("between", "is_found"), [(18, True), (19, False)])
def test_strict_looks_back_twenty_positions(strict: Running, between: int, is_found: bool) -> None:
    with Anthropic(base_url=strict.url, api_key="x", max_retries=0) as client:
        name, start = f"look {between}", "w" * 600
        conversation(client, name, start)
        usage = conversation(client, name, start, *(f"fill {n}" for n in range(between)), "end")
        assert (usage.cache_read_input_tokens > 0) is is_found


def test_strict_entries_are_readable_only_once_the_answer_has_begun(strict: Running) -> None:
    """Four at once, none of which has begun before all have asked, each pay; one after them reads."""
    with Anthropic(base_url=strict.url, api_key="x", max_retries=0) as client:
        created: list[int] = []

        def one() -> None:
            created.append(conversation(client, "race", "w" * 3000).cache_creation_input_tokens)

        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert created.count(3005) >= 1
        assert conversation(client, "race", "w" * 3000).cache_read_input_tokens == 3005


def test_strict_streams_say_it_at_the_start(strict: Running) -> None:
    with Anthropic(base_url=strict.url, api_key="x", max_retries=0) as client:
        content = [{"type": "text", "text": "stream " + "w" * 600, "cache_control": MARK}]
        events = client.messages.create(
            model=STRICT,
            max_tokens=5,
            messages=[{"role": "user", "content": content}],  # type: ignore[typeddict-item]
            stream=True,
        )
        first = next(iter(events))
        assert first.type == "message_start"
        assert first.message.usage.cache_creation_input_tokens == 607
        events.close()


def test_strict_times_are_billed_by_the_three_positions(strict: Running) -> None:
    """Up to the last hour's breakpoint for an hour, behind it for five minutes, behind that not at all."""
    with Anthropic(base_url=strict.url, api_key="x", max_retries=0) as client:
        blocks: list[Any] = [
            {"type": "text", "text": "mixed " + "a" * 594, "cache_control": {**MARK, "ttl": "1h"}},
            {"type": "text", "text": "b" * 100, "cache_control": MARK},
            {"type": "text", "text": "c" * 10},
        ]
        messages: Any = [{"role": "user", "content": blocks}]
        usage = client.messages.create(model=STRICT, max_tokens=5, messages=messages).usage
        assert usage.cache_creation is not None
        assert usage.cache_creation.ephemeral_1h_input_tokens == 600
        assert usage.cache_creation.ephemeral_5m_input_tokens == 100
        assert usage.input_tokens >= 10
        again = client.messages.create(model=STRICT, max_tokens=5, messages=messages).usage
        assert (again.cache_read_input_tokens, again.cache_creation_input_tokens) == (700, 0)


def test_strict_automatic_goes_on_with_a_conversation(strict: Running) -> None:
    with Anthropic(base_url=strict.url, api_key="x", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "automatic " + "w" * 700}]
        first = client.messages.create(
            model=STRICT, max_tokens=5, messages=messages, cache_control={"type": "ephemeral"}
        ).usage
        assert first.cache_creation_input_tokens == 710
        messages += [{"role": "assistant", "content": "noted"}, {"role": "user", "content": "next"}]
        second = client.messages.create(
            model=STRICT, max_tokens=5, messages=messages, cache_control={"type": "ephemeral"}
        ).usage
        assert (second.cache_read_input_tokens, second.cache_creation_input_tokens) == (710, 9)


TEXT_BLOCK = {"type": "text", "text": "w" * 600}


@pytest.mark.parametrize(
    ("blocks", "more"),
    [
        ([{**TEXT_BLOCK, "cache_control": MARK}] * 5, {}),
        ([{**TEXT_BLOCK, "cache_control": MARK}] * 4 + [TEXT_BLOCK], {"cache_control": MARK}),
        ([{**TEXT_BLOCK, "cache_control": MARK}], {"cache_control": {**MARK, "ttl": "1h"}}),
        ([{**TEXT_BLOCK, "cache_control": MARK}, {**TEXT_BLOCK, "cache_control": {**MARK, "ttl": "1h"}}], {}),
        ([{"type": "text", "text": "", "cache_control": MARK}], {}),
        ([{"type": "thinking", "thinking": "hm", "signature": "s", "cache_control": MARK}], {}),
    ],
)
def test_strict_refuses_what_the_vendor_refuses(strict: Running, blocks: Any, more: Any) -> None:
    role = "assistant" if blocks[0]["type"] == "thinking" else "user"
    messages: Any = [{"role": role, "content": blocks}, {"role": "user", "content": "x"}]
    with (
        Anthropic(base_url=strict.url, api_key="x", max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError) as refused,
    ):
        client.messages.create(
            model=STRICT, max_tokens=5, messages=messages[: 1 + (role == "assistant")], **more
        )
    assert "cache_control" in str(refused.value) or "automatic" in str(refused.value).lower()


def test_strict_tenants_share_nothing(strict: Running) -> None:
    with Anthropic(base_url=strict.url, api_key="x", max_retries=0) as client:
        text = "w" * 700
        conversation(client, "t", text, extra_body={"cache_salt": "one"})
        assert conversation(client, "t", text, extra_body={"cache_salt": "two"}).cache_read_input_tokens == 0


def test_raw_bytes_of_a_stream(running: Running, model: str) -> None:
    reply = httpx2.post(
        f"{running.url}/v1/messages",
        json={
            "model": model,
            "max_tokens": 9,
            "stream": True,
            "messages": [{"role": "user", "content": "ab"}],
        },
        timeout=10,
    )
    names = [line.removeprefix("event: ") for line in reply.text.splitlines() if line.startswith("event: ")]
    assert names[0] == "message_start"
    assert names[1] == "content_block_start"
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "[DONE]" not in reply.text
