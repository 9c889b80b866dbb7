"""Malformed HTTP, slow and endless clients, readers that do not read: over raw sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from server.conftest import Running, Start
from server.wire import Connection, chat_body, wait_until

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"


@pytest.fixture(autouse=True)
def healthy_afterwards(running: Running) -> Iterator[None]:
    yield
    running.check_healthy()


# ---------------------------------------------------------------- malformed HTTP

MALFORMED = {
    "not HTTP": b"hello, is there anybody?\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"\0" * 60,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /health\r\nhost: t\r\n\r\n",
    "version 9": b"GET /health HTTP/9.9\r\nhost: t\r\n\r\n",
    "space in header name": b"GET /health HTTP/1.1\r\nho st: t\r\n\r\n",
    "header without colon": b"GET /health HTTP/1.1\r\nhost\r\n\r\n",
    "NUL in header": b"GET /health HTTP/1.1\r\nhost: a\0b\r\n\r\n",
    "bare CR": b"GET /health HTTP/1.1\rhost: t\r\r",
    "folded header": b"GET /health HTTP/1.1\r\nhost: t\r\n folded: x\r\n\r\n",
    "length not a number": b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: many\r\n\r\n",
    "length negative": b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: -1\r\n\r\n",
    "length beyond 64 bits": HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "length and chunked": HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk size not a number": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "chunk longer than said": HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "chunk size beyond 64 bits": HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "no path": b"GET  HTTP/1.1\r\nhost: t\r\n\r\n",
    "path not ASCII": "GET /ä HTTP/1.1\r\nhost: t\r\n\r\n".encode(),
    "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\nhost: t\r\n\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_http(running: Running, data: bytes) -> None:
    with running.connect() as connection:
        connection.send(data)
        reply = connection.read_reply()
        error = reply.error(400)
        assert error["code"] == "malformed_http"
        assert reply.headers["connection"] == "close"
        assert connection.is_closed_by_server()


def test_every_byte_of_a_good_request_may_come_alone(running: Running) -> None:
    body = chat_body("bytewise")
    with running.connect() as connection:
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in HEAD + b"content-length: %d\r\n\r\n" % len(body) + body:
            connection.send(bytes([byte]))
        assert connection.read_reply().json()["choices"][0]["message"]["content"] == "bytewise"


def test_random_bytes_never_hang_the_server(running: Running) -> None:
    import random

    source = random.Random(7)
    good = HEAD + b"content-length: 2\r\n\r\n{}"
    for _ in range(60):
        data = bytearray(good)
        for _ in range(source.randint(1, 6)):
            data[source.randrange(len(data))] = source.randrange(256)
        with running.connect() as connection:
            connection.send(bytes(data))
            connection.socket.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while connection.socket.recv(65536):
                    pass


def test_an_endless_head_is_refused(running: Running) -> None:
    with running.connect() as connection:
        connection.send(b"GET /health HTTP/1.1\r\nhost: t\r\n")
        for index in range(80):
            connection.send(b"x-%d: %b\r\n" % (index, b"y" * 1000))
        assert connection.read_reply().error(431)["code"] == "request_head_too_large"
        assert connection.is_closed_by_server()


def test_one_endless_header_is_refused(running: Running) -> None:
    with running.connect() as connection:
        connection.send(b"GET /health HTTP/1.1\r\nx-long: ")
        for _ in range(80):
            connection.send(b"y" * 1000)
        assert connection.read_reply().error(431)


def test_an_endless_trailer_is_refused(running: Running) -> None:
    with running.connect() as connection:
        connection.send(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        for index in range(500):
            connection.send(b"x-%d: %b\r\n" % (index, b"y" * 1000))
        assert connection.read_reply().error(431)


def test_a_short_trailer_and_chunk_extensions_are_fine(running: Running) -> None:
    body = chat_body("chunks")
    with running.connect() as connection:
        connection.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        connection.send(b"%x;ext=1\r\n%b\r\n" % (10, body[:10]))
        connection.send(b"%x\r\n%b\r\n0\r\nx-sum: 1\r\nhost: evil\r\n\r\n" % (len(body) - 10, body[10:]))
        assert connection.read_reply().status == 200
        assert connection.request("GET", "/health", b"").status == 200


def test_an_upgrade_is_declined_and_loses_no_body(running: Running) -> None:
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAABk"}
    with running.connect() as connection:
        for _ in range(2):
            assert connection.request("GET", "/health", b"", **offer).status == 200
            reply = connection.post(CHAT, chat_body("up"), **offer)
            assert reply.json()["choices"][0]["message"]["content"] == "up"
            assert (
                connection.post(CHAT, chat_body("x"), connection="Upgrade", upgrade="websocket").status == 200
            )
        body = chat_body("chunked")
        connection.send(HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: chunked\r\n\r\n")
        time.sleep(0.02)
        connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert connection.read_reply().json()["choices"][0]["message"]["content"] == "chunked"


def test_expect_100_continue(running: Running) -> None:
    body = chat_body("continue")
    head = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    with running.connect() as connection:
        connection.send(head % len(body))
        assert connection.read_head() == b"HTTP/1.1 100 Continue"
        connection.send(body)
        assert connection.read_reply().status == 200
    with running.connect() as connection:
        connection.send(head % 10**8)
        assert connection.read_reply().error(413)  # and no "100 Continue" before it


def test_keep_alive_serves_many_requests_on_one_connection(running: Running) -> None:
    with running.connect() as connection:
        for index in range(20):
            reply = connection.post(CHAT, chat_body(f"number {index}", stream=bool(index % 2)))
            assert reply.status == 200
            assert connection.post(CHAT, b"{").error(400)


def test_http_1_0(running: Running) -> None:
    with running.connect() as connection:
        connection.send(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.read_reply().status == 200
        assert connection.is_closed_by_server()


def test_a_pipelined_request_is_left_unanswered(running: Running) -> None:
    body = chat_body("first")
    one = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    for second in (one, b"garbage\r\n\r\n", b"\r\n\r\n\r\n" + one):
        with running.connect() as connection:
            connection.send(one + second)
            assert connection.read_reply().json()["choices"][0]["message"]["content"] == "first"
            assert connection.is_closed_by_server()


def test_what_follows_a_request_cannot_break_its_answer(start: Start) -> None:
    running = start(engine={"step_s": 0.01})
    with running.connect() as connection:
        connection.send_request(
            "POST", CHAT, chat_body("whole " * 5, stream=True), content_type="application/json"
        )
        assert running.engine.wait_running(1, 5)
        for _ in range(50):
            connection.send(b"GET /health HTTP/1.1\r\nx-long: " + b"y" * 10_000)
        assert connection.read_reply().events()[-1] == "[DONE]"


def test_a_pipelining_client_that_leaves_is_noticed(start: Start) -> None:
    running = start()
    with running.connect() as connection:
        connection.send_request("POST", CHAT, chat_body("!stall"), content_type="application/json")
        connection.send(b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n" * 3)
        wait_until(lambda: running.engine.health().num_running == 1)
    assert running.engine.wait_idle(2), "the request outlived its client"


# ---------------------------------------------------------------- slow clients


def drip(connection: Connection, data: bytes, seconds: float) -> float:
    """Send a byte every now and then, until an answer comes; how long that took."""
    began_s = time.monotonic()
    connection.socket.settimeout(0.03)
    for byte in data:
        try:
            connection.send(bytes([byte]))
            if connection.socket.recv(1, socket.MSG_PEEK):
                break
        except TimeoutError:
            pass
        assert time.monotonic() - began_s < seconds, "the server does not mind"
    connection.socket.settimeout(5)
    return time.monotonic() - began_s


def test_a_slow_head_gets_408(start: Start) -> None:
    running = start(header_timeout_s=0.3)
    with running.connect() as connection:
        took_s = drip(connection, b"GET /health HTTP/1.1\r\nx-slow: " + b"y" * 1000, 2)
        error = connection.read_reply().error(408)
        assert error["code"] == "request_timeout"
        assert 0.2 < took_s < 1.5
        assert connection.is_closed_by_server()
    running.check_healthy()


def test_a_client_that_says_nothing_gets_408(start: Start) -> None:
    running = start(header_timeout_s=0.3)
    with running.connect() as connection:
        assert connection.read_reply().error(408)
    running.check_healthy()


@pytest.mark.parametrize("dripped", [b"GET /health HTTP/1.1\r\nx: " + b"y" * 1000, b"\r\n" * 1000])
def test_a_slow_second_head_gets_408(start: Start, dripped: bytes) -> None:
    running = start(header_timeout_s=0.3)
    with running.connect() as connection:
        assert connection.request("GET", "/health", b"").status == 200
        time.sleep(0.5)  # idle is not slow
        assert connection.request("GET", "/health", b"").status == 200
        drip(connection, dripped, 2)
        assert connection.read_reply().error(408)


def test_a_slow_body_gets_408(start: Start) -> None:
    running = start(body_timeout_s=0.3)
    with running.connect() as connection:
        connection.send(HEAD + b"content-length: 1000\r\n\r\n")
        drip(connection, b" " * 1000, 2)
        reply = connection.read_reply()
        assert reply.error(408)["code"] == "request_timeout"
        assert reply.headers["connection"] == "close"
        assert connection.is_closed_by_server()
    running.check_healthy()


def test_a_body_that_nobody_asked_for_does_not_keep_a_connection(start: Start) -> None:
    running = start()
    with running.connect() as connection:
        connection.send(b"GET /health HTTP/1.1\r\nhost: t\r\ncontent-length: 1000\r\n\r\n")
        reply = connection.read_reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert connection.is_closed_by_server()


def test_an_idle_connection_is_closed(start: Start) -> None:
    running = start(keep_alive_s=0.2)
    with running.connect() as connection:
        assert connection.request("GET", "/health", b"").status == 200
        began_s = time.monotonic()
        assert connection.is_closed_by_server()
        assert time.monotonic() - began_s < 2


def test_many_slow_clients_do_not_keep_others_out(start: Start) -> None:
    running = start(header_timeout_s=3.0, max_connections=100)
    slow = [running.connect() for _ in range(80)]
    for connection in slow:
        connection.send(b"POST /v1/chat/completions HTTP/1.1\r\n")
    began_s = time.monotonic()
    running.check_healthy()
    assert time.monotonic() - began_s < 1
    for connection in slow:
        connection.close()


def test_connections_over_the_limit_are_told_so(start: Start) -> None:
    running = start(max_connections=4)
    held = [running.connect() for _ in range(4)]
    for connection in held:
        assert connection.request("GET", "/health", b"").status == 200
    with running.connect() as connection:
        assert connection.read_reply().error(503)["code"] == "too_many_connections"
        assert connection.is_closed_by_server()
    for connection in held:
        assert connection.request("GET", "/health", b"").status == 200
        connection.close()
    wait_until(lambda: len(running.server.server_state.connections) == 0)
    running.check_healthy()


def test_a_reader_that_does_not_read_is_cut_off(start: Start) -> None:
    """Meanwhile the engine goes on for the others, and the request ends in it."""
    running = start(write_timeout_s=0.5, engine={"max_model_len": 2_000_000})
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", running.port))
        body = chat_body("x" * 100, stream=True, max_tokens=1_000_000, ignore_eos=True)
        reader.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert running.engine.wait_running(1, 5)
        began_s = time.monotonic()
        reply = running.post(CHAT, chat_body("meanwhile"))
        assert reply.json()["choices"][0]["message"]["content"] == "meanwhile"
        assert running.engine.wait_idle(10), "the engine still works for someone who does not read"
        assert time.monotonic() - began_s < 8
    assert running.engine.num_cancelled == 1
    wait_until(lambda: len(running.server.server_state.connections) == 0)


@pytest.mark.parametrize("keep_alive", ["keep-alive", "close"])
def test_an_answer_that_is_never_read_does_not_hold_its_connection(start: Start, keep_alive: str) -> None:
    """Finished, but larger than what the kernel takes: closing would wait for the reader without end."""
    running = start(write_timeout_s=0.3, keep_alive_s=0.2, engine={"max_model_len": 20_000})
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", running.port))
        body = chat_body("y" * 8000, logprobs=True, top_logprobs=20)
        reader.sendall(HEAD + b"connection: %b\r\n" % keep_alive.encode())
        reader.sendall(b"content-length: %d\r\n\r\n" % len(body) + body)
        assert running.engine.wait_running(1, 5)
        wait_until(lambda: not running.server.server_state.connections)
        received = b"".join(iter(lambda: receive(reader), b""))
        assert len(received) < 8000 * 1000, "all of it fitted into the kernel: this test shows nothing"
    running.check_healthy()


def receive(reader: socket.socket) -> bytes:
    try:
        return reader.recv(65536)
    except ConnectionResetError:
        return b""
