"""What clients say of their conversations, and where it arrives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from ostinato.server import ApiKey
from ostinato.types import Session
from server.conftest import Start
from server.wire import chat_body

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("header", "field", "session"),
    [
        ({}, {}, None),
        ({"x_ostinato_session": "a7"}, {}, Session("a7")),
        (
            {"x_ostinato_session": "a7; state=closed; expires_in=2.5"},
            {},
            Session("a7", "closed", 2.5),
        ),
        ({"x_ostinato_session": "a7;state = idle"}, {}, Session("a7", "idle")),
        ({}, {"session": "b"}, Session("b")),
        ({}, {"session": {"id": "b", "expires_in": 60}}, Session("b", "open", 60.0)),
        ({"x_ostinato_session": "a7"}, {"session": {"id": "b", "state": "closed"}}, Session("b", "closed")),
        ({}, {"session": None}, None),
    ],
)
def test_header_and_field_reach_the_engine(
    start: Start, header: dict[str, str], field: dict[str, Any], session: Session | None
) -> None:
    running = start()
    assert running.post(CHAT, chat_body("x", **field), **header).status == 200
    body = json.dumps({"model": "echo", "prompt": "x"} | field).encode()
    assert running.post("/v1/completions", body, **header).status == 200
    assert [request.session for request in running.engine.requests] == [session, session]


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ({"x_ostinato_session": "; state=closed"}, {}),
        ({"x_ostinato_session": "x" * 257}, {}),
        ({"x_ostinato_session": "a; state=gone"}, {}),
        ({"x_ostinato_session": "a; expires_in=soon"}, {}),
        ({"x_ostinato_session": "a; expires_in=-1"}, {}),
        ({"x_ostinato_session": "a; colour=red"}, {}),
        ({}, {"session": ""}),
        ({}, {"session": {"id": "a", "state": "gone"}}),
        ({}, {"session": {"id": "a", "expires_in": 0}}),
        ({}, {"session": {"state": "closed"}}),
        ({}, {"session": 7}),
    ],
)
def test_what_has_another_form_is_refused_by_name(
    start: Start, header: dict[str, str], field: dict[str, Any]
) -> None:
    error = start().post(CHAT, chat_body("x", **field), **header).error(400)
    assert error["param"].startswith("session")


def test_several_prompts_are_not_one_session(start: Start) -> None:
    running = start()
    body = json.dumps({"model": "echo", "prompt": ["x", "y"], "session": "a"}).encode()
    assert running.post("/v1/completions", body).error(400)["param"] == "session"


def test_a_word_without_a_request_reaches_only_its_own_namespace(start: Start) -> None:
    running = start(api_keys=(ApiKey("anna", "sk-anna", "salt-a"), ApiKey("ben", "sk-ben", "salt-b")))
    anna, ben = {"authorization": "Bearer sk-anna"}, {"authorization": "Bearer sk-ben"}
    assert running.post(CHAT, chat_body("x", session="a/7"), **anna).status == 200

    def say(word: dict[str, Any], **who: str) -> Any:
        return running.post("/v1/sessions/a/7", json.dumps(word).encode(), **who)

    closed = say({"state": "closed"}, **anna)
    assert closed.status == 200
    assert closed.json() == {"id": "a/7", "object": "session", "state": "closed", "known": True}
    assert say({"state": "closed"}, **ben).json()["known"] is False
    assert say({"state": "closed", "cache_salt": "s"}, **anna).json()["known"] is False
    assert say({"state": "idle", "expires_in": 9}, **anna).status == 200
    assert running.engine.words[-1][0] == Session("a/7", "idle", 9.0)
    assert say({"state": "gone"}, **anna).error(400)["param"] == "state"
    assert say({}, **anna).error(400)["param"] == "state"
    assert say({"state": "closed"}).status == 401


def test_through_the_openai_client(start: Start) -> None:
    running = start()
    with OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": "x"}],
            extra_body={"session": "chat-7"},
        )
        said: Any = client.post("/sessions/chat-7", body={"state": "closed"}, cast_to=object)
    assert said["known"] is True
