"""Why the vendor's cache was not read: asked for, compared, merged, and told without the texts."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from gateway.gateways import gateway
from gateway.raw_upstream import STREAM_HEAD, RawUpstream, whole
from ostinato.cli import main
from ostinato.gateway import Upstream

SECRET = "Patient Anna has 7 complaints. "
MARK = {"type": "ephemeral"}


def turn(number: int, day: str = "2026-12-01", **more: Any) -> dict[str, Any]:
    messages: list[Any] = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": f"{n} " + SECRET * 100}
        for n in range(2 * number + 1)
    ]
    return {
        "model": "claude-opus-5",
        "max_tokens": 9,
        "system": [{"type": "text", "text": f"It is {day}. " + "Be kind. " * 300}],
        "messages": messages,
        "cache_control": MARK,
    } | more


def answer(number: int, read: int = 0, diagnostics: Any = None) -> bytes:
    usage = {"input_tokens": 9, "cache_read_input_tokens": read, "output_tokens": 3}
    body = {"id": f"msg_{number}", "type": "message", "content": [], "usage": usage}
    return json.dumps(body | {"diagnostics": diagnostics}).encode()


def stream_of(number: int, diagnostics: Any) -> list[bytes]:
    message = json.loads(answer(number, diagnostics=diagnostics))
    items = [{"type": "message_start", "message": message}, {"type": "message_stop"}]
    return [STREAM_HEAD, *(b"data: " + json.dumps(item).encode() + b"\n\n" for item in items)]


def up(raw: RawUpstream, protocol: Any = "anthropic", **more: Any) -> Upstream:
    return Upstream("raw", raw.url, protocol, **{"diagnose": "redacted", "idle_timeout_s": 2.0} | more)


def post(url: str, body: dict[str, Any], path: str = "/v1/messages") -> httpx2.Response:
    return httpx2.post(url + path, json=body, timeout=20)


def rows(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx2.get(f"{url}/v1/ostinato/misses").json()["rows"]
    return found


VENDORS = {"cache_miss_reason": {"type": "system_changed", "cache_missed_input_tokens": 2900}}


def test_both_comparisons_are_merged_and_the_vendors_is_passed_on() -> None:
    with (
        RawUpstream([whole(answer(1)), whole(answer(2, diagnostics=VENDORS))]) as raw,
        gateway(up(raw)) as url,
    ):
        first = post(url, turn(0))
        assert "x-ostinato-cache-miss" not in first.headers
        second = post(url, turn(1, "2026-12-02"))
        assert second.json()["diagnostics"] == VENDORS
        told = json.loads(second.headers["x-ostinato-cache-miss"])
        assert (told["reason"], told["where"]) == ("system_changed", "system.0")
        assert told["before"].startswith(" 0000-00-00. xx xxxx")
        sent = [json.loads(seen.body)["diagnostics"] for seen in raw.seen]
        assert sent == [{"previous_message_id": None}, {"previous_message_id": "msg_1"}]
        (row,) = rows(url)
        assert row["ours"] == told
        assert row["vendors"] == VENDORS
        assert (row["answer"], row["previous"]) == ("msg_2", "msg_1")
        assert row["verdict"] == "request_changed"
        assert "Anna" not in json.dumps(row) + second.headers["x-ostinato-cache-miss"]
        metrics = httpx2.get(f"{url}/metrics").text
        assert 'upstream_cache_misses_total{reason="system_changed",vendor="anthropic"} 1.0' in metrics
        shown = CliRunner().invoke(main, ["misses", "--url", url, "--json"])
        assert json.loads(shown.output) == row
        table = CliRunner().invoke(main, ["misses", "--url", url], env={"COLUMNS": "200"}).output
        assert "system_changed" in table


def test_texts_are_shown_where_that_is_asked_for() -> None:
    with RawUpstream([whole(answer(1))]) as raw, gateway(up(raw, diagnose="text")) as url:
        post(url, turn(0))
        told = json.loads(post(url, turn(1, "2026-12-02")).headers["x-ostinato-cache-miss"])
        assert told["before"].startswith(" 2026-12-01. Be kind")
        changed = turn(1, "2026-12-02")
        changed["messages"][0]["content"] = "é\r\nx-evil: 1" + changed["messages"][0]["content"]
        raw_header = post(url, changed).headers["x-ostinato-cache-miss"]
        assert json.loads(raw_header)["after"].startswith("é\r\nx-evil")
        assert raw_header.isascii()


def test_streams_are_diagnosed_too() -> None:
    with (
        RawUpstream([stream_of(1, None), stream_of(2, VENDORS)]) as raw,
        gateway(up(raw)) as url,
    ):
        post(url, turn(0, stream=True))
        second = post(url, turn(1, "2026-12-02", stream=True))
        assert json.loads(second.headers["x-ostinato-cache-miss"])["reason"] == "system_changed"
        assert b"system_changed" in second.content
        assert rows(url)[0]["vendors"] == VENDORS


def test_what_should_be_there_and_is_not_was_lost() -> None:
    with RawUpstream([whole(answer(1)), whole(answer(2, read=0))]) as raw, gateway(up(raw)) as url:
        post(url, turn(0))
        post(url, turn(1))
        (row,) = rows(url)
        assert (row["ours"]["reason"], row["verdict"]) == ("evicted", "cache_lost")


def test_what_is_read_is_no_miss_and_other_conversations_are_not_compared() -> None:
    other = turn(1)
    other["messages"] = [{"role": "user", "content": "something else " * 300}]
    with RawUpstream([whole(answer(1)), whole(answer(2, read=5000))]) as raw, gateway(up(raw)) as url:
        post(url, turn(0))
        assert "x-ostinato-cache-miss" not in post(url, turn(1)).headers
        assert "x-ostinato-cache-miss" not in post(url, other).headers
        assert rows(url) == []


def test_the_callers_own_question_is_left_as_it_is() -> None:
    asked = {"previous_message_id": "msg_from_elsewhere"}
    with RawUpstream([whole(answer(1))]) as raw, gateway(up(raw)) as url:
        post(url, turn(0, diagnostics=asked))
        assert json.loads(raw.seen[0].body)["diagnostics"] == asked


def test_openais_responses_are_compared_by_their_id() -> None:
    def reply(number: int, said: Any = None) -> list[bytes | None]:
        usage = {"input_tokens": 3000, "output_tokens": 1}
        body = {
            "id": f"resp_{number}",
            "object": "response",
            "usage": usage,
            "prompt_cache_diagnostics": said,
        }
        return whole(json.dumps(body).encode())

    said = {"type": "cache_miss", "reason": "input_changed", "cache_missed_tokens": 1000}
    message = {"role": "user", "content": SECRET * 200}
    body = {"model": "gpt-6", "instructions": "It is 10:01. " + "Be kind. " * 300, "input": [message]}
    later = body | {"instructions": "It is 10:02. " + "Be kind. " * 300, "input": [message, message]}
    with RawUpstream([reply(1), reply(2, said)]) as raw, gateway(up(raw, "openai")) as url:
        post(url, body, "/v1/responses")
        assert raw.seen[0].body == json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
        post(url, later, "/v1/responses")
        options = json.loads(raw.seen[1].body)["prompt_cache_options"]
        assert options == {"comparison_response_id": "resp_1"}
        (row,) = rows(url)
        assert row["vendors"] == said
        assert row["ours"]["reason"] == "system_changed"


@pytest.mark.parametrize("diagnose", ["off", "redacted"])
def test_nothing_is_asked_for_unless_it_is_wanted(diagnose: str) -> None:
    with RawUpstream([whole(answer(1))]) as raw, gateway(up(raw, diagnose=diagnose)) as url:
        body = json.dumps(turn(0)).encode()
        httpx2.post(f"{url}/v1/messages", content=body, headers={"content-type": "application/json"})
        assert (raw.seen[0].body == body) is (diagnose == "off")
