"""Bad requests over a raw socket: each gets a 4xx in OpenAI's shape, and the server is well afterwards."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.conftest import Running
from server.wire import chat_body

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def healthy_afterwards(running: Running) -> Iterator[None]:
    yield
    running.check_healthy()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "echo", "messages": HELLO} | fields).encode()


BROKEN_JSON = {
    "empty": b"",
    "half": b'{"model": "echo"',
    "trailing comma": b'{"model": "echo",}',
    "single quotes": b"{'model': 'echo'}",
    "two objects": b"{}{}",
    "not an object": b'["model"]',
    "null": b"null",
    "NaN": b'{"model": "echo", "temperature": NaN}',
    "Infinity": b'{"model": "echo", "temperature": Infinity}',
    "over the double's range": b'{"model": "echo", "temperature": 1e999}',
    "lone surrogate": b'{"model": "echo", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "lone low surrogate": b'{"model": "echo", "messages": [{"role": "user", "content": "a\\udc00b"}]}',
    "surrogate as key": b'{"\\ud800": 1}',
    "surrogate in UTF-8": b'{"model": "\xed\xa0\x80"}',
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "raw control character": b'{"model": "a\nb"}',
    "UTF-16": '{"model": "echo"}'.encode("utf-16"),
    "deep arrays": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep in a field": b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
}


@pytest.mark.parametrize("body", BROKEN_JSON.values(), ids=BROKEN_JSON.keys())
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_broken_json(running: Running, path: str, body: bytes) -> None:
    error = running.post(path, body).error(400)
    assert error["code"] == "invalid_json"
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"properties": value}
    return value


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


# name → (fields, what `param` names, `code`)
BAD_CHATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no model": ({"model": None}, "model", "invalid_type"),
    "model a number": ({"model": 1}, "model", "invalid_type"),
    "messages a string": ({"messages": "hi"}, "messages", "invalid_type"),
    "messages null": ({"messages": None}, "messages", "invalid_type"),
    "no messages": ({"messages": []}, "messages", "empty_conversation"),
    "message a string": ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    "odd role": ({"messages": [*HELLO, {"role": "king", "content": "x"}]}, "messages[1]", "unknown_role"),
    "content a number": (
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content",
        "invalid_type",
    ),
    "content null": ({"messages": [{"role": "user", "content": None}]}, "messages[0]", "invalid_type"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_type"),
    "part a string": (
        {"messages": [{"role": "user", "content": ["x"]}]},
        "messages[0].content[0]",
        "invalid_type",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    "part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    "unknown field in a message": (
        {"messages": [{"role": "user", "content": "x", "colour": 1}]},
        "messages[0].colour",
        "unknown_parameter",
    ),
    "tool result without a call": (
        {"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "c1"}]},
        "messages[1]",
        "orphan_tool_result",
    ),
    "function_call in a message": (
        {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
        "unsupported_parameter",
    ),
    "temperature a string": ({"temperature": "1"}, "temperature", "invalid_type"),
    "temperature a boolean": ({"temperature": True}, "temperature", "invalid_type"),
    "temperature negative": ({"temperature": -0.1}, "temperature", "invalid_value"),
    "temperature too hot": ({"temperature": 2.1}, "temperature", "invalid_value"),
    "top_p over one": ({"top_p": 1.5}, "top_p", "invalid_value"),
    "min_p negative": ({"min_p": -1}, "min_p", "invalid_value"),
    "top_k a fraction": ({"top_k": 1.5}, "top_k", "invalid_type"),
    "top_k below -1": ({"top_k": -2}, "top_k", "invalid_value"),
    "repetition_penalty zero": ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    "presence_penalty": ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    "frequency_penalty": ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    "max_tokens a fraction": ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    "max_tokens a string": ({"max_tokens": "7"}, "max_tokens", "invalid_type"),
    "max_tokens huge": ({"max_tokens": 2**31}, "max_tokens", "invalid_value"),
    "max_tokens beyond 64 bits": ({"max_tokens": 10**40}, "max_tokens", "invalid_type"),
    "max_completion_tokens huge": (
        {"max_completion_tokens": 10**9},
        "max_completion_tokens",
        "invalid_value",
    ),
    "both kinds of max tokens": (
        {"max_tokens": 1, "max_completion_tokens": 1},
        "max_tokens",
        "invalid_value",
    ),
    "n zero": ({"n": 0}, "n", "invalid_value"),
    "n huge": ({"n": 100_000}, "n", "invalid_value"),
    "seed a string": ({"seed": "x"}, "seed", "invalid_type"),
    "seed too big": ({"seed": 2**63}, "seed", "invalid_value"),
    "stop a number": ({"stop": 5}, "stop", "invalid_type"),
    "stop a number in a list": ({"stop": ["a", 5]}, "stop[1]", "invalid_type"),
    "stop empty": ({"stop": ""}, "stop", "invalid_value"),
    "too many stops": ({"stop": [str(i) for i in range(17)]}, "stop", "invalid_value"),
    "stop_token_ids negative": ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    "stop_token_ids too big": ({"stop_token_ids": [2**31]}, "stop_token_ids[0]", "invalid_value"),
    "logit_bias a list": ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    "logit_bias of a word": ({"logit_bias": {"the": 1}}, "logit_bias", "invalid_value"),
    "logit_bias of a big number": ({"logit_bias": {"9" * 30: 1}}, "logit_bias", "invalid_value"),
    "logit_bias of an odd digit": ({"logit_bias": {"٣": 1}}, "logit_bias", "invalid_value"),
    "logit_bias too strong": ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    "logprobs a number": ({"logprobs": 3}, "logprobs", "invalid_type"),
    "top_logprobs alone": ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    "top_logprobs too many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "stream a string": ({"stream": "yes"}, "stream", "invalid_type"),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    "stream_options odd": (
        {"stream": True, "stream_options": {"colour": 1}},
        "stream_options.colour",
        "unknown_parameter",
    ),
    "obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
    ),
    "cache_salt empty": ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    "cache_salt a number": ({"cache_salt": 1}, "cache_salt", "invalid_type"),
    "response_format": (
        {"response_format": {"type": "json_object"}},
        "response_format",
        "unsupported_parameter",
    ),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    "audio": ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    "modalities": ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    "functions": ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    "web_search_options": ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    "reasoning_effort": ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    "store": ({"store": True}, "store", "unsupported_parameter"),
    "tools a string": ({"tools": "f"}, "tools", "invalid_type"),
    "a tool of another type": (
        {"tools": [{"type": "custom", "function": {"name": "f"}}]},
        "tools[0].type",
        "invalid_value",
    ),
    "a tool without name": (
        {"tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name",
        "missing_required_parameter",
    ),
    "a strict tool": ({"tools": [tool(strict=True)]}, "tools[0].function.strict", "unsupported_parameter"),
    "unknown field": ({"colour": "red"}, "colour", "unknown_parameter"),
    "unknown field of vLLM": ({"guided_json": {}}, "guided_json", "unknown_parameter"),
}


@pytest.mark.parametrize(("fields", "param", "code"), BAD_CHATS.values(), ids=BAD_CHATS.keys())
def test_bad_chat_field(running: Running, fields: dict[str, Any], param: str, code: str) -> None:
    error = running.post(CHAT, chat(**fields)).error(400)
    assert (error["param"], error["code"]) == (param, code), error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_tool_that_is_nested_too_deep(running: Running) -> None:
    error = running.post(CHAT, chat(tools=[tool(parameters=nested(900))])).error(400)
    assert error["param"].startswith("tools[0]")


BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "prompt null": ({"prompt": None}, "prompt", "invalid_type"),
    "prompt a number": ({"prompt": 5}, "prompt", "invalid_type"),
    "prompt empty": ({"prompt": []}, "prompt", "invalid_value"),
    "prompt of an empty prompt": ({"prompt": [[]]}, "prompt[0]", "invalid_value"),
    "prompt mixed": ({"prompt": ["a", 5]}, "prompt[1]", "invalid_type"),
    "prompt mixed the other way": ({"prompt": [5, "a"]}, "prompt[1]", "invalid_type"),
    "prompt of objects": ({"prompt": [{}]}, "prompt", "invalid_type"),
    "token id negative": ({"prompt": [-1]}, "prompt[0]", "invalid_value"),
    "token id beyond 32 bits": ({"prompt": [[1, 2**40]]}, "prompt[0][1]", "invalid_value"),
    "token id out of the vocabulary": ({"prompt": [1000], "echo": True}, "prompt", "invalid_value"),
    "token id a fraction": ({"prompt": [1, 1.5]}, "prompt[1]", "invalid_type"),
    "token id a boolean": ({"prompt": [1, True]}, "prompt[1]", "invalid_type"),
    "too many answers": ({"prompt": ["a"] * 65, "n": 2}, "prompt", "invalid_value"),
    "best_of less than n": ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
    "best_of 0": ({"best_of": 0}, "best_of", "invalid_value"),
    "best_of too many": ({"prompt": ["a", "b"], "best_of": 65}, "best_of", "invalid_value"),
    "best_of streamed": ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
    "suffix": ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    "echo with logprobs": ({"echo": True, "logprobs": 1}, "echo", "unsupported_parameter"),
    "logprobs true": ({"logprobs": True}, "logprobs", "invalid_type"),
    "logprobs too many": ({"logprobs": 21}, "logprobs", "invalid_value"),
    "messages": ({"messages": HELLO}, "messages", "unknown_parameter"),
}


@pytest.mark.parametrize(("fields", "param", "code"), BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS.keys())
def test_bad_completion_field(running: Running, fields: dict[str, Any], param: str, code: str) -> None:
    body = json.dumps({"model": "echo", "prompt": "hello"} | fields).encode()
    error = running.post(COMPLETIONS, body).error(400)
    assert (error["param"], error["code"]) == (param, code), error["message"]


def test_unknown_fields_are_named_as_openai_does(running: Running) -> None:
    error = running.post(CHAT, chat(colour="red")).error(400)
    assert error["message"] == "Unrecognized request argument supplied: colour"
    error = running.post(CHAT, chat(**{"x" * 5000: 1})).error(400)
    assert len(error["message"]) < 200


def test_fields_that_cannot_change_the_answer_are_accepted(running: Running) -> None:
    reply = running.post(
        CHAT,
        chat(
            user="u",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            prompt_cache_key="k",
            prompt_cache_retention="24h",
            safety_identifier="s",
            parallel_tool_calls=True,
            response_format={"type": "text"},
            modalities=["text"],
            tool_choice="auto",
            tools=[tool(parameters=nested(20), strict=False)],
            prediction={"type": "content", "content": "hello"},
            temperature=None,
            stop=None,
            logit_bias=None,
        ),
    )
    assert reply.status == 200, reply.body


def test_unknown_model(running: Running) -> None:
    for path, body in ((CHAT, chat(model="x" * 500)), (COMPLETIONS, b'{"model":"","prompt":"a"}')):
        error = running.post(path, body).error(404)
        assert error["code"] == "model_not_found"
        assert len(error["message"]) < 200


def test_nul_bytes_and_odd_characters_are_text(running: Running) -> None:
    said = "a\0b\ufffe\u2028\U0010ffff\x7f\u202e"
    reply = running.post(CHAT, chat_body(said))
    assert reply.json()["choices"][0]["message"]["content"] == said
    streamed = running.post(CHAT, chat_body(said, stream=True)).events()
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in streamed[:-1]) == said


def test_a_thousand_messages(running: Running) -> None:
    messages = [{"role": ("user", "assistant")[index % 2], "content": f"m{index}"} for index in range(1001)]
    reply = running.post(CHAT, chat(messages=messages))
    assert reply.json()["choices"][0]["message"]["content"] == "m1000"


def test_a_prompt_of_a_hundred_thousand_tokens(running: Running) -> None:
    error = running.post(CHAT, chat_body("x" * 100_000)).error(400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    body = json.dumps({"model": "echo", "prompt": [65] * 100_000}).encode()
    error = running.post(COMPLETIONS, body).error(400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("size", [8 * 2**20 + 1, 10 * 2**20, 30 * 2**20])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(running: Running, size: int) -> None:
    error = running.post(CHAT, b" " * size).error(413)
    assert error["code"] == "request_too_large"


def test_a_chunked_body_that_is_too_large(running: Running) -> None:
    with running.connect() as connection:
        connection.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        piece = b"%x\r\n%b\r\n" % (2**20, b" " * 2**20)
        for _ in range(10):
            connection.send(piece)
        assert connection.read_reply().error(413)["code"] == "request_too_large"
        assert connection.is_closed_by_server()


def test_a_body_of_just_the_limit_is_read(running: Running) -> None:
    body = chat_body("x" * 100_000)
    error = running.post(CHAT, body + b" " * (8 * 2**20 - len(body))).error(400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "headers",
    [
        {"content_type": "text/plain"},
        {"content_type": "application/x-www-form-urlencoded"},
        {"content_type": "multipart/form-data; boundary=x"},
        {"content_type": "application/json; charset=latin-1"},
        {"content_type": ""},
        {"content_encoding": "gzip"},
        {"content_encoding": "br"},
    ],
)
def test_other_kinds_of_body(running: Running, headers: dict[str, str]) -> None:
    assert running.post(CHAT, gzip.compress(chat_body("x")), **headers).error(415)
    assert running.post(CHAT, chat_body("x"), **headers).error(415)


def test_content_type_with_charset(running: Running) -> None:
    reply = running.post(CHAT, chat_body("x"), content_type='Application/JSON; charset="UTF-8"')
    assert reply.status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/dashboard", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/%00%ff%fe", 404),
        ("GET", CHAT, 405),
        ("DELETE", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("OPTIONS", "*", 404),
        ("GET", "http://elsewhere/v1/models/x", 404),
        ("BREW", CHAT, 400),
    ],
)
def test_other_routes_and_methods(running: Running, method: str, path: str, status: int) -> None:
    with running.connect() as connection:
        reply = connection.request(method, path, b"")
    error = reply.error(status)
    assert error["type"] == "invalid_request_error"
    if status == 405:
        assert reply.headers["allow"]


def test_a_hostile_request_id_is_replaced(running: Running) -> None:
    for given in ("a b", "x" * 129, "ä", "<script>"):
        reply = running.get("/health", x_request_id=given)
        assert reply.headers["x-request-id"].startswith("req-")
    assert running.get("/health", x_request_id="abc-1").headers["x-request-id"] == "abc-1"


def test_a_fault_of_ours_says_nothing_about_our_insides(running: Running) -> None:
    for said, code in (("!prepare-bug", "internal_error"), ("!fail-early", "engine_error")):
        for stream in (False, True):
            reply = running.post(CHAT, chat_body(said, stream=stream))
            error = reply.error(500)
            assert error["code"] == code
            assert error["type"] == "server_error"
            assert b"DEADBEEF" not in reply.body
            assert b"Traceback" not in reply.body


def test_a_fault_in_the_middle_of_a_stream_is_its_last_event(running: Running) -> None:
    reply = running.post(CHAT, chat_body("!fail-late", stream=True))
    assert reply.status == 200
    *pieces, last = reply.events()
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == "!fai"
    assert last["error"]["code"] == "engine_error"
    assert b"DEADBEEF" not in reply.body
    assert b"[DONE]" not in reply.body
    assert running.post(CHAT, chat_body("!fail-late")).error(500)["code"] == "engine_error"
