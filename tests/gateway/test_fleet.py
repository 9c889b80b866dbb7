"""A router before three real workers, each a process of its own: what clients see when one drains or dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from doors.tiny import save_tiny_chat_model
from gateway.gateways import gateway
from gateway.raw_upstream import STREAM_HEAD, RawUpstream
from ostinato.cli import main
from ostinato.gateway import Fleet, FleetOptions, Upstream
from ostinato.gateway.asking import ask_of, tells_nothing

OPENING = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


@dataclass
class Worker:
    process: subprocess.Popen[str]
    url: str
    model: str

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    if not os.environ.get("OSTINATO_FLEET_TESTS"):
        pytest.skip("three servers, and time that a busy machine does not have: make test-fleet")
    folder = save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))
    command = [sys.executable, "-m", "ostinato", "serve", str(folder), "--port", "0", "--kv-cache", "8M"]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(3)
    ]
    try:
        found = []
        for process in started:
            assert process.stdout is not None
            url = ""
            for line in process.stdout:
                if "http://" in line:
                    url = "http://" + line.split("http://")[1].split()[0].rstrip("/").removesuffix("/v1")
                    break
            assert url, "a worker did not start"
            with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
                model = json.load(reply)["data"][0]["id"]
            threading.Thread(target=process.stdout.read, daemon=True).start()
            found.append(Worker(process, url, model))
        yield found
    finally:
        for process in started:
            process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


def fleet_of(urls: list[str], **options: Any) -> Fleet:
    chosen = {"block_bytes": 32, "check_every_s": 0.1, "wait_s": 1.0} | options
    upstreams = [Upstream(url.removeprefix("http://"), url) for url in urls]
    return Fleet(upstreams, FleetOptions(**chosen))


@contextmanager
def routing(fleet: Fleet, **settings: Any) -> Iterator[tuple[str, openai.OpenAI]]:
    with (
        gateway(fleet=fleet, **settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield url, client


def turns(number: int) -> list[Any]:
    return [
        {"role": "system", "content": f"You are number {number}, and you answer as number {number} would."},
        {"role": "user", "content": f"What is {number} and {number}?"},
    ]


def ask(client: openai.OpenAI, model: str, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.with_raw_response.create(
        model=model, messages=messages, temperature=0, max_tokens=48, extra_body={"ignore_eos": True}, **more
    )


def test_a_conversation_stays_with_the_worker_that_has_it_and_says_the_same(workers: list[Worker]) -> None:
    model = workers[0].model
    fleet = fleet_of([worker.url for worker in workers])
    with (
        routing(fleet) as (url, client),
        openai.OpenAI(base_url=f"{workers[0].url}/v1", api_key="none", max_retries=0) as direct,
    ):
        homes = set()
        for number in range(6):
            messages = turns(number)
            first = ask(client, model, messages)
            answer = first.parse().choices[0].message.content
            assert answer == ask(direct, model, messages).parse().choices[0].message.content
            messages = [
                *messages,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "And?"},
            ]
            second = ask(client, model, messages)
            assert second.headers["x-ostinato-worker"] == first.headers["x-ostinato-worker"]
            assert second.parse().usage.prompt_tokens_details.cached_tokens > 32
            homes.add(first.headers["x-ostinato-worker"])
        assert len(homes) > 1
        assert [item.id for item in client.models.list()] == [model]
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
            shown = reply.read().decode()
        assert 'reason="prefix"' in shown
        assert f'ostinato_worker_open{{worker="{workers[0].name}"}} 1.0' in shown


def test_a_drained_worker_gets_nothing_and_comes_back(workers: list[Worker]) -> None:
    fleet = fleet_of([worker.url for worker in workers])
    with routing(fleet) as (url, client):
        name = ask(client, workers[0].model, turns(1)).headers["x-ostinato-worker"]
        told = CliRunner().invoke(main, ["workers", "--url", url, "--drain", name, "--json"])
        assert told.exit_code == 0, told.output
        states = {row["name"]: row["state"] for row in map(json.loads, told.output.splitlines())}
        assert states.pop(name) == "drained"
        assert set(states.values()) == {"well"}
        assert ask(client, workers[0].model, turns(1)).headers["x-ostinato-worker"] != name
        time.sleep(0.3)  # health checks do not bring it back
        assert ask(client, workers[0].model, turns(1)).headers["x-ostinato-worker"] != name
        assert "well" in CliRunner().invoke(main, ["workers", "--url", url, "--resume", name]).output
        assert fleet.relay.router.is_open(name)
        wrong = CliRunner().invoke(main, ["workers", "--url", url, "--drain", "nobody"])
        assert wrong.exit_code == 1
        assert "no worker" in wrong.output


def test_a_worker_killed_under_load_loses_no_request_before_its_first_byte(workers: list[Worker]) -> None:
    """Whole answers all arrive; streams end as they should or, where they had begun, in an error; and every
    byte that arrives is of the right answer."""
    model, fleet = workers[0].model, fleet_of([worker.url for worker in workers])
    with openai.OpenAI(base_url=f"{workers[2].url}/v1", api_key="none", max_retries=0) as direct:
        right = [ask(direct, model, turns(i)).parse().choices[0].message.content for i in range(16)]
    whole_answers: dict[int, str] = {}
    streams: dict[int, tuple[str, bool]] = {}
    faults: list[BaseException] = []

    def load(client: openai.OpenAI, number: int) -> None:
        try:
            for again in range(3):
                at = number * 3 + again
                if number % 2:
                    answer = ask(client, model, turns(at % 16)).parse()
                    whole_answers[at] = answer.choices[0].message.content
                    continue
                text, is_whole = "", True
                try:
                    for chunk in ask(client, model, turns(at % 16), stream=True).parse():
                        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                except openai.APIError:
                    is_whole = False
                streams[at] = text, is_whole
        except BaseException as error:  # noqa: BLE001  # shown below
            faults.append(error)

    with routing(fleet) as (_, client):
        threads = [threading.Thread(target=load, args=(client, number)) for number in range(16)]
        for thread in threads:
            thread.start()
        victim = fleet.relay.workers()[0]["name"]
        deadline = time.monotonic() + 20
        while len(whole_answers) + len(streams) < 6 or not fleet.relay.router.num_running(victim):
            assert time.monotonic() < deadline, "no load"
            time.sleep(0.002)
        next(worker for worker in workers if worker.name == victim).process.kill()
        for thread in threads:
            thread.join(60)
        assert not faults, faults
        assert len(whole_answers) == len(streams) == 24
        for at, text in whole_answers.items():
            assert text == right[at % 16]
        for at, (text, is_whole) in streams.items():
            assert text == right[at % 16] if is_whole else text and right[at % 16].startswith(text)
        assert [row["state"] for row in fleet.relay.workers()].count("ill") == 1
        assert all(row["load_tokens"] == row["num_running"] == 0 for row in fleet.relay.workers())


# ---------------------------------------------------------------- workers that fail in ways one can choose


def test_what_was_said_before_the_first_token_is_taken_back() -> None:
    """One worker opens its stream and dies; the client sees the other's stream, whole, and nothing twice."""
    dies = RawUpstream([[STREAM_HEAD, OPENING]])
    lives = RawUpstream([[STREAM_HEAD, OPENING, EVENT % b"yes", DONE]])
    with dies, lives:
        fleet = fleet_of([dies.url, lives.url], check_every_s=3600.0)
        with routing(fleet) as (_, client):
            for number in range(4):  # some of these go to the one that dies first
                chunks = list(ask(client, "m", turns(number), stream=True).parse())
                assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "yes"]


def test_after_its_first_token_a_stream_ends_in_one_error() -> None:
    dies = RawUpstream([[STREAM_HEAD, OPENING, EVENT % b"ye"]])
    with dies, routing(fleet_of([dies.url], check_every_s=3600.0)) as (_, client):
        texts = []
        with pytest.raises(openai.APIError):
            for chunk in ask(client, "m", turns(1), stream=True).parse():
                texts.append(chunk.choices[0].delta.content)
        assert texts == ["", "ye"]


def test_a_request_that_kills_workers_does_not_go_through_all() -> None:
    doomed = [RawUpstream([[]]) for _ in range(4)]
    for one in doomed:
        one.__enter__()
    try:
        fleet = fleet_of([one.url for one in doomed], check_every_s=3600.0, max_tries=2)
        with routing(fleet) as (_, client), pytest.raises(openai.APIStatusError) as caught:
            ask(client, "m", turns(1))
        assert caught.value.status_code == 502
        posts = sum(seen.head.startswith("POST") for one in doomed for seen in one.seen)
        assert posts == 2
    finally:
        for one in doomed:
            one.__exit__()


def test_nobody_there_is_said_after_waiting() -> None:
    fleet = fleet_of(["http://127.0.0.1:9"], wait_s=0.3)
    with routing(fleet) as (_, client):
        for _ in range(2):
            with pytest.raises(openai.APIStatusError) as caught:
                ask(client, "m", turns(1))
            assert caught.value.status_code in (502, 503)


# ---------------------------------------------------------------- names


def test_a_longer_conversation_begins_with_the_names_of_the_shorter() -> None:
    def names(messages: list[Any], key: str = "", **more: Any) -> list[int]:
        body = json.dumps({"model": "m", "messages": messages} | more).encode()
        return list(ask_of(body, {"authorization": key} if key else {}, block_bytes=32).names)

    short, longer = turns(1), [*turns(1), {"role": "user", "content": "more " * 30}]
    assert names(longer)[: len(names(short))] == names(short)
    assert len(names(longer)) > len(names(short)) > 1
    for other in (
        names(short, key="Bearer other"),
        names(short, cache_salt="s"),
        names(short, model="n"),
        names(turns(2)),
        names(short, tools=[{"type": "function", "function": {"name": "f"}}]),
    ):
        assert not set(other) & set(names(short))
    assert ask_of(b"[]", {}, block_bytes=32).names == ()
    talk = ask_of(b'{"model":"m","session":{"id":"s"},"messages":[]}', {}, block_bytes=32)
    assert talk.session == "s"


@pytest.mark.parametrize(
    ("event", "is_opening"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": "", "refusal": None}}]}, True),
        ({"choices": [{"delta": {"content": "a"}}]}, False),
        ({"choices": [{"delta": {"reasoning_content": "a"}}]}, False),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, False),
        ({"choices": [{"text": ""}]}, True),
        ({"choices": [{"text": "a"}]}, False),
        ({"error": {"message": "no"}}, False),
        ({"type": "message_start", "message": {}}, True),
        ({"type": "content_block_delta", "delta": {"text": "a"}}, False),
        ({"type": "response.created"}, True),
    ],
)
def test_what_tells_nothing_yet(event: dict[str, Any], is_opening: bool) -> None:
    assert tells_nothing(event) is is_opening
