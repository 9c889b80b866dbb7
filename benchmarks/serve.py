"""What the server adds to the engine: from a request's arrival to the first byte of its answer.

The physics. A request crosses two sockets' worth of kernel, an event loop, a thread that checks, renders
and tokenises it, the engine's thread, and the loop again. None of that is arithmetic worth naming; it is
wake-ups (tens of microseconds each, more on a busy machine) and the interpreter's lock, which the engine's
own Python shares with the server's. So the figure depends on the engine behind: measure it with the real one.

How. A client in its own process speaks HTTP over one kept-alive loopback connection and streams, so that the
first byte leaves when the first token exists. For each request

    overhead = (first byte at the client - request handed to the kernel) - ttft

where ``ttft`` is what the runtime itself reports of the same request (from when it was handed over to its
first token), so a slow or a fast model cancels out within each pair. Rendering and tokenising count as
overhead, queueing and prefill do not. In turn with each request goes a ``GET /health``: what HTTP alone costs
here. The long prompt shows what grows with its length (JSON, rendering, tokenising); its KV is warm, too.

The last line is JSON; ``overhead_ms_p50`` is for the short prompt.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from common import finish

ECHO_SERVER = Path(__file__).parents[1] / "tests" / "server" / "echo_server.py"
SHORT = "What is an ostinato?"
LONG_WORDS = 1500
START_TIMEOUT_S = 900.0


class Client:
    """As little client as possible: one connection, raw bytes, and the moment the first body byte came."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self._socket = socket.create_connection((address.hostname, address.port or 80), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, method: str, path: str, body: bytes = b"") -> tuple[float, bytes]:
        """Seconds from sending the request to the first byte of the answer's body; and the body."""
        head = f"{method} {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        message = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        # Before the call, not after it: by the time it returns the server may have answered.
        began_s = time.perf_counter()
        self._socket.sendall(message)
        data = rest = b""
        while not rest:
            data += self._receive()
            raw_head, _, rest = data.partition(b"\r\n\r\n")
        first_byte_s = time.perf_counter()
        if not raw_head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server refused: {data[:500]!r}")
        length = re.search(rb"content-length: (\d+)", raw_head)
        while len(rest) < int(length[1]) if length else not rest.endswith(b"0\r\n\r\n"):
            rest += self._receive()
        return first_byte_s - began_s, rest

    def _receive(self) -> bytes:
        data = self._socket.recv(1 << 20)
        if not data:
            raise SystemExit("the server closed the connection")
        return data


def chat(client: Client, model: str, content: str) -> tuple[float, float]:
    """Milliseconds to the first byte, and the runtime's own to the first token."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 2,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    ttfb_s, stream = client.exchange("POST", "/v1/chat/completions", json.dumps(body).encode())
    ttft = re.search(rb'"ttft_ms":([0-9.e-]+)', stream)
    if ttft is None:
        raise SystemExit(f"no ttft in the stream: {stream[-500:]!r}")
    return ttfb_s * 1e3, float(ttft[1])


def measure(client: Client, model: str, content: str, rounds: int) -> dict[str, Any]:
    """Percentiles over ``rounds`` requests; some before them warm the cache and the interpreter."""
    for _ in range(max(5, rounds // 20)):
        chat(client, model, content)
    overheads, ttfbs, ttfts, floors = [], [], [], []
    for _ in range(rounds):
        ttfb, ttft = chat(client, model, content)
        floors.append(client.exchange("GET", "/health")[0] * 1e3)
        overheads.append(ttfb - ttft)
        ttfbs.append(ttfb)
        ttfts.append(ttft)
    return {
        "rounds": rounds,
        "overhead_ms": percentiles(overheads),
        "ttfb_ms": percentiles(ttfbs),
        "ttft_ms": percentiles(ttfts),
        "health_ms": percentiles(floors),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 3), "p90": round(cuts[89], 3), "p99": round(cuts[98], 3)}


@contextmanager
def server(options: argparse.Namespace) -> Iterator[tuple[str, psutil.Process | None]]:
    """The address of a server: one that runs already, or one of our own that ends with us."""
    if options.url:
        yield options.url.rstrip("/"), None
        return
    command = [sys.executable, str(ECHO_SERVER)] if options.echo else None
    command = command or [sys.executable, "-m", "ostinato", "serve", options.model, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield _address(process), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    deadline_s = time.monotonic() + START_TIMEOUT_S
    for line in process.stdout:
        if found := re.search(r"https?://[\w.\[\]:-]+:\d+", line):
            return found[0]
        if time.monotonic() > deadline_s:
            break
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="a server that runs already (http://host:port, without keys)")
    parser.add_argument("--echo", action="store_true", help="the tests' echo engine instead of a model")
    parser.add_argument("--model", default="smollm2-135m", help="what to serve")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    with server(options) as (url, process):
        client = Client(url)
        model = json.loads(client.exchange("GET", "/v1/models")[1])["data"][0]["id"]
        print(f"{model} at {url}")
        short = measure(client, model, SHORT, options.rounds)
        print(f"  short prompt: {short}", flush=True)
        long = measure(client, model, "word " * LONG_WORDS, max(20, options.rounds // 4))
        print(f"  long prompt: {long}", flush=True)
        rss_mb = round(process.memory_info().rss / 1e6) if process is not None else None
    headline = {
        "overhead_ms_p50": short["overhead_ms"]["p50"],
        "overhead_ms_p99": short["overhead_ms"]["p99"],
        "overhead_long_ms_p50": long["overhead_ms"]["p50"],
        "health_ms_p50": short["health_ms"]["p50"],
        "rss_mb": rss_mb,
    }
    name = "serve-echo" if options.echo else "serve"
    finish(name, headline, {"model": model, "short": short, "long": long})


if __name__ == "__main__":
    main()
