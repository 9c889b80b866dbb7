"""API keys, salts and other origins: who may ask, and whose cache they can meet."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from ostinato.server import ApiKey, server_settings
from ostinato.server.sampling import namespace_salt
from server.conftest import Running, Start
from server.wire import chat_body

CHAT = "/v1/chat/completions"
KEYS = (
    ApiKey("anna", "sk-anna", "salt-a"),
    ApiKey("ben", "sk-ben", "salt-b"),
    ApiKey("bill", "sk-bill", "salt-b"),
)


def cached(running: Running, key: str, said: str, **more: str) -> int:
    reply = running.post(CHAT, chat_body(said, **more), authorization=f"Bearer {key}")
    assert reply.status == 200, reply.body
    tokens: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_without_a_key_nobody_gets_in(start: Start) -> None:
    running = start(api_keys=KEYS)
    body = chat_body("x")
    for headers in (
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer sk-ann"},
        {"authorization": "Bearer sk-annaa"},
        {"authorization": "Bearer sk-anna sk-ben"},
        {"authorization": "Basic sk-anna"},
        {"authorization": "sk-anna"},
        {"authorization": "Bearer \u00ff\u00fe"},
        {"api_key": "sk-anna"},
    ):
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/nothing")):
            with running.connect() as connection:
                reply = connection.request(method, path, body, content_type="application/json", **headers)
            error = reply.error(401)
            assert error["code"] == "invalid_api_key"
            assert "sk-" not in error["message"]
    assert running.post(CHAT, body, authorization="bearer  sk-anna ").status == 200
    assert running.get("/health").status == 200
    assert running.get("/metrics").status == 200


def test_an_unknown_caller_cannot_make_us_read_a_body(start: Start) -> None:
    running = start(api_keys=KEYS)
    with running.connect() as connection:
        connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 1000000\r\n\r\n")
        reply = connection.read_reply()
        assert reply.error(401)
        assert reply.headers["connection"] == "close"
        assert connection.is_closed_by_server()


def test_a_trailer_is_no_header(start: Start) -> None:
    """Proxies that strip a client's headers may pass its trailers on."""
    running = start(api_keys=KEYS)
    body = chat_body("x")
    with running.connect() as connection:
        connection.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nauthorization: Bearer sk-anna\r\n\r\n"
            % (len(body), body)
        )
        assert connection.read_reply().error(401)


def test_tenants_do_not_meet_in_the_cache(start: Start) -> None:
    running = start(api_keys=KEYS)
    said = "a long and private question"
    assert cached(running, "sk-anna", said) == 0
    assert cached(running, "sk-anna", said) > 0
    assert cached(running, "sk-ben", said) == 0
    assert cached(running, "sk-bill", said) > 0, "the same salt is the same cache"
    for guess in ("salt-a", "", "\0", "salt-b"):
        more = {"cache_salt": guess} if guess else {}
        if more:
            assert cached(running, "sk-ben", said, **more) == 0, "a chosen salt reached another's cache"
    assert cached(running, "sk-anna", said, cache_salt="own") == 0
    assert cached(running, "sk-anna", said, cache_salt="own") > 0


def test_keys_from_a_list_have_salts_of_their_own() -> None:
    first = server_settings(api_keys=" sk-1st, two ,,", port=1)
    second = server_settings(api_keys="two,three", port=1)
    assert [key.key for key in first.api_keys] == ["sk-1st", "two"]
    salts = {key.key: key.salt for key in (*first.api_keys, *second.api_keys)}
    assert len(set(salts.values())) == 3
    assert first.api_keys[1].salt == second.api_keys[0].salt
    assert "sk-1st" not in repr(first)
    assert server_settings().api_keys == ()


@given(st.text(), st.text(), st.text(), st.text())
def test_salts_are_equal_only_where_both_parts_are(a: str, b: str, c: str, d: str) -> None:
    assert (namespace_salt(a, b) == namespace_salt(c, d)) == ((a, b) == (c, d))
    assert (namespace_salt(a + b, c) == namespace_salt(a, b + c)) == (b == "")


def test_no_salt_at_all_is_the_namespace_of_the_library() -> None:
    assert namespace_salt("", None) == ""


def test_other_origins_only_when_asked_for(start: Start) -> None:
    closed, opened = start(), start(cors_origins=("https://chat.example",), api_keys=KEYS)
    asked = {"origin": "https://chat.example", "access_control_request_method": "POST"}
    with closed.connect() as connection:
        reply = connection.request("OPTIONS", CHAT, b"", **asked)
        assert reply.error(405)
        assert "access-control-allow-origin" not in reply.headers
    with opened.connect() as connection:
        reply = connection.request(
            "OPTIONS", CHAT, b"", access_control_request_headers="authorization,content-type", **asked
        )
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    reply = opened.post(CHAT, chat_body("x"), origin="https://chat.example")
    assert reply.error(401)
    assert reply.headers["access-control-allow-origin"] == "https://chat.example"
    reply = opened.post(CHAT, chat_body("x"), origin="https://other.example")
    assert "access-control-allow-origin" not in reply.headers


def test_the_model_card(start: Start) -> None:
    running = start(engine={"max_model_len": 123})
    card = running.get("/v1/models/echo").json()
    assert card["max_model_len"] == 123
    assert running.get("/v1/models").json() == {"object": "list", "data": [card]}
    assert json.loads(running.get("/health").body)["model"] == "echo"
