"""What the gateway adds to a request, beside LiteLLM's proxy in the same run.

The physics. A gateway reads a request, writes it to another socket, and the same with the answer: four
wake-ups of tens of microseconds, two HTTP parsers, and the interpreter. What it adds is work of one core, so
at a given rate it waits in a row behind itself: the tail is the length of that row, and of whatever else the
core does.

How. A fake upstream in a process of its own answers after 20 ms and writes into the answer how long it took;
the client, raw HTTP over kept connections, sends at random moments, 200 a second, whether or not answers have
come (an open loop: a slow gateway gets no fewer requests). For each request

    path = answer's last byte at the client - request handed to the kernel - what the upstream took
    added = path through the gateway - median path without any gateway, in the same round

Streams: the upstream writes the moment into each event, every 10 ms, in 8 streams at once; added is the time
to the client's hands, less the median without a gateway. Rounds go through direct, ours, theirs, in turn
forwards and backwards. Both gateways are compared at a rate at which neither queues (``--calm-rate``); what
becomes of theirs at the full rate is told, too.

Processor time is what the gateway's processes used for each request at the calm rate: the figure that a busy
machine changes least.

Memory: 100,000 different requests through one gateway that plans, diagnoses, and keeps histories and
earlier requests up to its bounds; its resident size on the way.

The last line is JSON. ``vs_litellm`` is ours / theirs, median of what is added at the calm rate; ``null``
where it could not be installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from against.environments import Unavailable
from against.gateways import litellm, ours, upstream
from against.servers import Launch, Peer, free_port, serving
from common import finish, spread

_TOOK = re.compile(rb"took (\d+);")
_MOMENT = re.compile(rb"@(\d+);")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
DONE = b"data: [DONE]"
PROMPT = "Tell me of the ostinato in the music of the baroque, and of its bass. " * 6
# Longer than this no request waits: a gateway that is behind by so much is counted as failed.
PATIENCE_S = 60.0


@dataclass
class Paths:
    """Milliseconds that were not the upstream's."""

    ms: list[float] = field(default_factory=list)
    num_failed: int = 0

    def quantiles(self) -> dict[str, float]:
        if len(self.ms) < 2:
            return {"p50": float("nan"), "p99": float("nan")}
        cuts = statistics.quantiles(self.ms, n=100, method="inclusive")
        return {"p50": cuts[49], "p99": cuts[98]}


class Connection(asyncio.Protocol):
    """One kept connection; one request at a time."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ended: asyncio.Future[bytes] | None = None
        self._is_stream = False
        self.moments: list[tuple[int, int]] = []
        self._scanned = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def exchange(self, message: bytes, *, is_stream: bool = False) -> bytes:
        self._data.clear()
        self._scanned, self.moments, self._is_stream = 0, [], is_stream
        self._ended = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        async with asyncio.timeout(PATIENCE_S):
            return await self._ended

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        self._data += data
        if self._ended is None or self._ended.done():
            return
        if self._is_stream:
            for found in _MOMENT.finditer(self._data, self._scanned):
                self.moments.append((int(found[1]), now_ns))
                self._scanned = found.end()
            if DONE in self._data[-200:] and self._data.endswith(b"0\r\n\r\n"):
                self._ended.set_result(bytes(self._data))
            return
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._data, 0, end + 2)
        if length is not None and len(self._data) >= end + 4 + int(length[1]):
            self._ended.set_result(bytes(self._data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError("closed"))


class Client:
    """Connections to one server, opened as they are needed."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._address = (address.hostname, address.port)
        self._idle: list[Connection] = []

    async def connection(self) -> Connection:
        while self._idle:
            if not (found := self._idle.pop()).transport.is_closing():
                return found
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, *self._address))[1]

    def message(self, number: int, *, is_stream: bool = False) -> bytes:
        body = json.dumps(
            {
                "model": "fake",
                "messages": [
                    {"role": "system", "content": PROMPT},
                    {"role": "user", "content": f"Question {number}: {PROMPT}"},
                ],
                "stream": is_stream,
            }
        ).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer none\r\ncontent-length: %d\r\n\r\n" % len(body)
        ) + body

    async def ask(self, number: int, paths: Paths) -> None:
        message = self.message(number)
        connection = await self.connection()
        began_ns = time.monotonic_ns()
        try:
            answer = await connection.exchange(message)
        except (TimeoutError, ConnectionError):
            connection.transport.abort()
            paths.num_failed += 1
            return
        took_ns = time.monotonic_ns() - began_ns
        self._idle.append(connection)
        said = _TOOK.search(answer)
        if said is None or not answer.startswith(b"HTTP/1.1 200"):
            paths.num_failed += 1
            return
        paths.ms.append((took_ns - int(said[1])) / 1e6)

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()


async def open_loop(url: str, rate: float, seconds: float, seed: int) -> Paths:
    """Requests at random moments, whether or not the earlier ones were answered."""
    client, paths, chance = Client(url), Paths(), random.Random(seed)
    for number in range(20):  # connections, imports, first calls
        await client.ask(-number, Paths())
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    next_s, end_s, number = loop.time(), loop.time() + seconds, seed * 1_000_000
    while next_s < end_s:
        await asyncio.sleep(max(0.0, next_s - loop.time()))
        task = asyncio.ensure_future(client.ask(number, paths))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
        next_s += chance.expovariate(rate)
    if tasks:
        await asyncio.wait(tasks)
    client.close()
    return paths


async def streams(url: str, num_streams: int) -> Paths:
    """Every event's way, of streams that run at once."""
    client, paths = Client(url), Paths()

    async def one(number: int) -> None:
        await asyncio.sleep(number * 0.0013)  # so that their events do not come together
        connection = await client.connection()
        try:
            await connection.exchange(client.message(number, is_stream=True), is_stream=True)
        except (TimeoutError, ConnectionError):
            paths.num_failed += 1
            return
        paths.ms.extend((came_ns - sent_ns) / 1e6 for sent_ns, came_ns in connection.moments)
        connection.transport.close()

    await asyncio.gather(*(one(number) for number in range(num_streams)))
    return paths


async def closed_loop(
    url: str, num_requests: int, num_workers: int, process: psutil.Process
) -> dict[str, Any]:
    """Different requests as fast as they are answered; the gateway's resident size every tenth of them."""
    client, paths = Client(url), Paths()
    sizes: list[tuple[int, float]] = []
    numbers = iter(range(num_requests))
    step = num_requests // 10

    async def worker() -> None:
        for number in numbers:
            if number % step == 0:
                sizes.append((number, round(process.memory_info().rss / 2**20, 1)))
            await client.ask(number, paths)

    began_s = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(num_workers)))
    took_s = time.monotonic() - began_s
    sizes.append((num_requests, round(process.memory_info().rss / 2**20, 1)))
    client.close()
    return {
        "requests": num_requests,
        "failed": paths.num_failed,
        "requests_per_s": round(num_requests / took_s),
        "rss_mib": sizes,
    }


@contextmanager
def running(peer: Peer) -> Iterator[str]:
    launch = Launch(Path(), None, free_port(), 1)
    with serving(peer, peer.prepare(), launch, "gateway") as url:
        yield url


def measure(
    urls: dict[str, str], options: argparse.Namespace
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """``case → who → quantiles of every round``, less the median of the way without a gateway."""
    processes = {who: _listening(int(url.rpartition(":")[2])) for who, url in urls.items()}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    cases = {
        "full": lambda url, seed: open_loop(url, options.rate, options.seconds, seed),
        "calm": lambda url, seed: open_loop(url, options.calm_rate, options.seconds, seed),
        "stream": lambda url, seed: streams(url, options.streams),
    }
    for number in range(options.rounds):
        order = list(urls) if number % 2 == 0 else list(reversed(urls))
        for case, run in cases.items():
            round_: dict[str, dict[str, float]] = {}
            for who in order:
                used_s = _cpu_s(processes[who])
                paths = asyncio.run(run(urls[who], number + 1))
                cpu_ms = (_cpu_s(processes[who]) - used_s) * 1e3 / max(1, len(paths.ms))
                counts = {"failed": paths.num_failed, "answered": len(paths.ms), "cpu_ms": round(cpu_ms, 3)}
                round_[who] = paths.quantiles() | counts
            floor = round_["direct"]["p50"]
            for who, figures in round_.items():
                added = {key: round(figures[key] - floor, 3) for key in ("p50", "p99")}
                row = figures | {f"added_{key}": value for key, value in added.items()}
                found.setdefault(case, {}).setdefault(who, []).append(row)
            shown = {who: (row["p50"], row["p99"]) for who, row in round_.items()}
            print(f"  {number + 1}/{options.rounds} {case}: " + ", ".join(
                f"{who} {p50:.2f} / {p99:.2f} ms" for who, (p50, p99) in shown.items()
            ), flush=True)  # fmt: skip
    return found


def memory(options: argparse.Namespace) -> dict[str, Any]:
    everything = ("--plan", "plan", "--diagnose", "redacted")
    with running(upstream()) as fake, running(ours(fake, *everything)) as url:
        process = _listening(int(url.rpartition(":")[2]))
        print(f"  memory: {options.requests} requests", flush=True)
        return asyncio.run(closed_loop(url, options.requests, 16, process))


def _cpu_s(process: psutil.Process) -> float:
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def _listening(port: int) -> psutil.Process:
    for child in psutil.Process().children(recursive=True):
        if any(
            one.status == psutil.CONN_LISTEN and one.laddr.port == port
            for one in child.net_connections(kind="tcp")
        ):
            return child
    raise SystemExit("the gateway's process was not found")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--calm-rate", type=float, default=10.0, help="for the comparison with LiteLLM")
    parser.add_argument("--seconds", type=float, default=10.0, help="of every case and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=100_000, help="for memory; 0: leave it out")
    parser.add_argument("--no-litellm", action="store_true")
    options = parser.parse_args()
    details: dict[str, Any] = {}
    with ExitStack() as stack:
        fake = stack.enter_context(running(upstream(delay_ms=20)))
        urls = {"direct": fake, "ostinato": stack.enter_context(running(ours(fake)))}
        try:
            if not options.no_litellm:
                urls["litellm"] = stack.enter_context(running(litellm(fake)))
        except Unavailable as reason:
            details["litellm"] = f"took no part: {reason}"
            print(details["litellm"])
        details |= {"cases": measure(urls, options), "delay_ms": 20, "rate": options.rate}
    if options.requests:
        details["memory"] = memory(options)
        print(f"  {details['memory']}")
    finish("gateway", headline(details), details)


def headline(details: dict[str, Any]) -> dict[str, Any]:
    cases = details["cases"]

    def of(case: str, key: str, who: str = "ostinato") -> dict[str, float]:
        return spread([row[key] for row in cases[case][who]], 3)

    found: dict[str, Any] = {
        "added_ms_p50": of("full", "added_p50")["median"],
        "added_ms_p99": of("full", "added_p99")["median"],
        "added_ms_p99_spread": of("full", "added_p99"),
        "added_ms_per_event_p50": of("stream", "added_p50")["median"],
        "added_ms_per_event_p99": of("stream", "added_p99")["median"],
        "cpu_ms_per_request": of("calm", "cpu_ms")["median"],
        "failed": sum(row["failed"] for row in cases["full"]["ostinato"]),
        "vs_litellm": None,
    }
    if "litellm" in cases["calm"]:
        pairs = zip(cases["calm"]["ostinato"], cases["calm"]["litellm"], strict=True)
        ratios = [mine["added_p50"] / theirs["added_p50"] for mine, theirs in pairs]
        found["vs_litellm"] = spread(ratios)["median"]
        found["vs_litellm_spread"] = spread(ratios)
        found["litellm_cpu_ms_per_request"] = of("calm", "cpu_ms", "litellm")["median"]
        found["litellm_added_ms_p50_calm"] = of("calm", "added_p50", "litellm")["median"]
        found["litellm_added_ms_p50_full_rate"] = of("full", "added_p50", "litellm")["median"]
    if (told := details.get("memory")) is not None:
        sizes = dict(told["rss_mib"])
        found["rss_mib"] = sizes[told["requests"]]
        found["rss_growth_mib_last_half"] = round(sizes[told["requests"]] - sizes[told["requests"] // 2], 1)
        found["requests_per_s"] = told["requests_per_s"]
    return found


if __name__ == "__main__":
    main()
