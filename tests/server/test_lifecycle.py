"""Every accepted request ends exactly once: disconnects, overload, failures and shutdown under load."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from ostinato.server import ServerSettings, create_app, serve
from server.conftest import Running, Start
from server.echo_engine import EchoEngine
from server.wire import Connection, Reply, chat_body, wait_until

CHAT = "/v1/chat/completions"
JSON = {"content_type": "application/json"}
ECHO_SERVER = Path(__file__).with_name("echo_server.py")


def text_of(events: list[object]) -> str:
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events if isinstance(event, dict)]
    return "".join(pieces)


# ---------------------------------------------------------------- disconnects


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_at_once(start: Start, stream: bool) -> None:
    running = start(engine={"step_s": 0.01})
    with running.connect() as connection:
        body = chat_body("and so on " * 100, stream=stream, ignore_eos=True)
        connection.send_request("POST", CHAT, body, **JSON)
        assert running.engine.wait_running(1, 5)
        if stream:
            connection.read_head()
            assert b"assistant" in connection.read_chunk()
        began_s = time.monotonic()
    assert running.engine.wait_idle(2)
    assert time.monotonic() - began_s < 0.5
    assert running.engine.num_cancelled == 1
    running.check_healthy()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(start: Start, stream: bool) -> None:
    running = start()
    for _ in range(5):
        with running.connect() as connection:
            connection.send_request("POST", CHAT, chat_body("!stall", stream=stream), **JSON)
            wait_until(lambda: running.engine.health().num_running == 1)
        assert running.engine.wait_idle(2)
    assert running.engine.num_cancelled == 5
    assert 'http_requests_total{route="/v1/chat/completions",status="499"} 5.0' in metrics(running)
    running.check_healthy()


def test_a_client_that_leaves_while_it_still_waits(start: Start) -> None:
    running = start(engine={"max_running": 1})
    with running.connect() as first, running.connect() as second:
        first.send_request("POST", CHAT, chat_body("!stall"), **JSON)
        wait_until(lambda: running.engine.health().num_running == 1)
        second.send_request("POST", CHAT, chat_body("next", stream=True), **JSON)
        wait_until(lambda: running.engine.health().num_waiting == 1)
        second.close()
        first.close()
        assert running.engine.wait_idle(2)


def test_all_prompts_of_a_request_end_with_it(start: Start) -> None:
    running = start()
    body = b'{"model": "echo", "prompt": ["!stall", "!stall", "fine"], "n": 2}'
    with running.connect() as connection:
        connection.send_request("POST", "/v1/completions", body, **JSON)
        wait_until(lambda: running.engine.health().num_running == 2)
    assert running.engine.wait_idle(2)


def test_one_failed_prompt_ends_the_others(start: Start) -> None:
    running = start()
    body = b'{"model": "echo", "prompt": ["!stall", "!fail-late"]%b}'
    assert running.post("/v1/completions", body % b"").error(500)["code"] == "engine_error"
    assert running.engine.wait_idle(2)
    events = running.post("/v1/completions", body % b', "stream": true').events()
    assert events[-1]["error"]["code"] == "engine_error"
    assert running.engine.wait_idle(2)
    running.check_healthy()


def test_a_client_that_leaves_during_its_body(start: Start) -> None:
    running = start()
    with running.connect() as connection:
        connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n")
        connection.send(b"content-length: 100\r\n\r\n{")
    running.check_healthy()


def test_two_hundred_requests_cancelled_at_random_moments(start: Start) -> None:
    running = start(engine={"step_s": 0.001})
    source = random.Random(11)
    plans = [(source.random() * 0.03, source.random() < 0.5) for _ in range(200)]

    def one(plan: tuple[float, bool]) -> None:
        wait_s, stream = plan
        with running.connect() as connection:
            connection.send_request("POST", CHAT, chat_body("abc" * 400, stream=stream, n=2), **JSON)
            time.sleep(wait_s)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(one, plans))
    assert running.engine.wait_idle(5)
    running.check_healthy()


# ---------------------------------------------------------------- many at once


def test_sixty_four_streams_at_once_each_get_their_own(start: Start) -> None:
    running = start(engine={"step_s": 0.0005})

    def one(index: int) -> str:
        reply = running.post(CHAT, chat_body(f"{index}é " * 20, stream=True))
        events = reply.events()
        assert events[-1] == "[DONE]"
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "stop"
        return text_of(events)

    with ThreadPoolExecutor(64) as threads:
        texts = list(threads.map(one, range(64)))
    assert texts == [f"{index}é " * 20 for index in range(64)]
    running.check_healthy()


def test_a_full_queue_says_when_to_come_back(start: Start) -> None:
    running = start(engine={"max_running": 1, "max_waiting": 1})
    with running.connect() as first, running.connect() as second:
        first.send_request("POST", CHAT, chat_body("!stall"), **JSON)
        wait_until(lambda: running.engine.health().num_running == 1)
        second.send_request("POST", CHAT, chat_body("!stall"), **JSON)
        wait_until(lambda: running.engine.health().num_waiting == 1)
        for stream in (False, True):
            reply = running.post(CHAT, chat_body("x", stream=stream))
            assert reply.error(429)["code"] == "queue_full"
            assert reply.headers["retry-after"] == "2"
        # Of several prompts the first may fit: it must not stay behind when the second does not.
        second.close()
        wait_until(lambda: running.engine.health().num_waiting == 0)
        reply = running.post("/v1/completions", b'{"model": "echo", "prompt": ["a", "b"]}')
        assert reply.error(429)
        wait_until(lambda: running.engine.health().num_waiting == 0)
    running.check_healthy()


def test_a_silent_stream_has_a_heartbeat_and_fails_as_a_stream(start: Start) -> None:
    running = start(heartbeat_s=0.05, engine={"step_s": 0.2})
    reply = running.post(CHAT, chat_body("!fail-early", stream=True))
    assert reply.status == 200
    assert reply.body.startswith(b": waiting\n\n: waiting\n\n")
    assert [list(event) for event in reply.events()] == [["error"]]
    reply = running.post(CHAT, chat_body("ab", stream=True))
    assert reply.body.count(b": waiting") >= 2
    assert text_of(reply.events()) == "ab"


# ---------------------------------------------------------------- shutdown


class Process:
    """The echo server as a process of its own, to send signals to."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-W", "error", str(ECHO_SERVER), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2])

    def post(self, body: bytes) -> Reply:
        with Connection(self.port) as connection:
            return connection.post(CHAT, body)

    def health(self) -> Reply:
        with Connection(self.port) as connection:
            return connection.request("GET", "/health", b"")

    def wait(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@contextmanager
def process(*options: str) -> Iterator[Process]:
    started = Process(*options)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate()


def load(running: Process, said: str, count: int) -> list[Reply]:
    """``count`` requests, streams and whole ones in turn; SIGTERM when all of them run."""
    is_busy = threading.Event()

    def watch() -> None:
        wait_until(lambda: running.health().json()["num_running"] == count)
        is_busy.set()

    with ThreadPoolExecutor(count + 1) as threads:
        watching = threads.submit(watch)
        replies = [
            threads.submit(running.post, chat_body(said, stream=bool(index % 2))) for index in range(count)
        ]
        watching.result()
        assert is_busy.is_set()
        running.process.send_signal(signal.SIGTERM)
        return [reply.result() for reply in replies]


def test_sigterm_lets_running_requests_finish() -> None:
    said = "to the end " * 10
    with process("--step-s", "0.01") as running:
        replies = load(running, said, 12)
        for index, reply in enumerate(replies):
            assert reply.status == 200
            if index % 2:
                events = reply.events()
                assert events[-1] == "[DONE]"
                assert text_of(events) == said
            else:
                assert reply.json()["choices"][0]["message"]["content"] == said
        code, out, err = running.wait()
    assert (code, out) == (0, "drained\n"), err


def test_while_it_drains_new_requests_are_told_503() -> None:
    with process("--step-s", "0.01") as running, Connection(running.port) as kept:
        with Connection(running.port) as first:
            first.send_request("POST", CHAT, chat_body("slowly " * 20), **JSON)
            wait_until(lambda: running.health().json()["num_running"] == 1)
            assert kept.request("GET", "/health", b"").status == 200
            running.process.send_signal(signal.SIGTERM)
            wait_until(lambda: running.health().status == 503)
            for reply in (kept.post(CHAT, chat_body("new")), running.post(chat_body("new", stream=True))):
                assert reply.error(503)["code"] == "shutting_down"
                assert reply.headers["retry-after"]
            assert first.read_reply().status == 200
        assert running.wait()[0] == 0


def test_after_the_drain_timeout_each_request_gets_one_terminal_message() -> None:
    with process("--step-s", "0.01", "--drain-timeout-s", "0.3") as running:
        began_s = time.monotonic()
        replies = load(running, "never to the end " * 100, 12)
        for index, reply in enumerate(replies):
            if index % 2:
                *pieces, last = reply.events()
                assert last["error"]["code"] == "shutting_down"
                assert last["error"]["type"] == "server_error"
                assert all("error" not in piece for piece in pieces)
                assert "never to".startswith(text_of(pieces)[:8])
                assert b"[DONE]" not in reply.body
            else:
                assert reply.error(503)["code"] == "shutting_down"
        code, out, err = running.wait()
    assert (code, out) == (0, "drained\n"), err
    assert time.monotonic() - began_s < 8


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_hurries(second: signal.Signals) -> None:
    with process("--step-s", "0.01") as running, Connection(running.port) as connection:
        connection.send_request("POST", CHAT, chat_body("x" * 5000, stream=True), **JSON)
        assert b"200" in connection.read_head()
        running.process.send_signal(signal.SIGINT)
        wait_until(lambda: running.health().status == 503)
        began_s = time.monotonic()
        running.process.send_signal(second)
        code, out, err = running.wait()
    assert (code, out) == (0, "drained\n"), err
    assert time.monotonic() - began_s < 5


def test_an_idle_server_stops_at_once() -> None:
    with process() as running, Connection(running.port) as idle:
        assert idle.request("GET", "/health", b"").status == 200
        began_s = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert idle.is_closed_by_server()
        code, out, err = running.wait()
    assert (code, out) == (0, "drained\n"), err
    assert "Traceback" not in err
    assert time.monotonic() - began_s < 4


def test_an_address_in_use_is_an_error() -> None:
    engine = EchoEngine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServerSettings(port=taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            serve(create_app(engine, settings), settings)
    engine.close()


# ---------------------------------------------------------------- helpers


def metrics(running: Running) -> str:
    return running.get("/metrics").body.decode()
