"""What a kept answer takes, in process and over HTTP; and how many calls a thousand equal requests make.

The physics. A hit computes nothing. It digests the request (BLAKE3 over some kilobytes: microseconds, but the
request has first to become JSON in one form), reads one row of SQLite by its key (a few pages that are in
memory), checks it, and makes its pieces anew. What grows is the number of pieces: an answer of 200 tokens is
200 pieces. Over HTTP there come a loopback connection, an event loop and a thread that checks the body; ``GET
/health`` in turn with each request says what HTTP alone takes here.

How. The model is a tiny one, as a hit never gets there; the answer has 200 tokens, prompts are short (20
characters) and long (4,000). In process ``engine.chat`` is timed; over HTTP one kept-alive connection to a
server of its own, from sending the request to the last byte of the answer, whole. For the thousand equal
requests a thousand connections ask at once for what nobody asked before; the server's own counter says how
many calls that made.

The last line is JSON: medians in milliseconds of short prompts, and the calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import finish, spread
from serve import Client

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from doors.tiny import save_tiny_chat_model

SHORT = "What is an ostinato?"
LONG = SHORT * 200
ANSWER_TOKENS = 200
MAX_LEN = 8192
START_TIMEOUT_S = 300.0


def request(text: str, tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
    }


def milliseconds(work: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        times.append((time.perf_counter() - began_s) * 1e3)
    return times


def in_process(model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Hits through the library, and the parts of one."""
    import ostinato

    found: dict[str, Any] = {}
    answers = str(folder / "library.db")
    with ostinato.load(model, answers=answers, kv_cache="256MiB", max_model_len=MAX_LEN) as engine:
        assert engine.front is not None
        for name, text in (("short", SHORT), ("long", LONG)):
            asked = request(text)
            messages = asked.pop("messages")
            ask = partial(engine.chat, messages, **asked)
            computed_ms = milliseconds(ask, 1)[0]
            assert engine.front.exact.clerk.flush(60)
            reply = ask()
            assert reply.usage.served is not None, "the answer was not kept"
            assert len(reply.choices[0].token_ids) == ANSWER_TOKENS
            hits = {"hit_ms": spread(milliseconds(ask, rounds)), "computed_ms": round(computed_ms, 1)}
            found[name] = hits | parts(engine.front.exact, text, reply.usage.served.entry_id, rounds)
    return found


def parts(exact: Any, text: str, entry_id: str, rounds: int) -> dict[str, Any]:
    """What a hit is made of: naming the request, reading the row, making its pieces."""
    from ostinato.responses.chunks import ChunkForm
    from ostinato.responses.digest import request_key
    from ostinato.responses.exact import key_of
    from ostinato.types import Conversation, GenerationRequest, Message, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    generation = GenerationRequest(Conversation((Message("user", text),)), params)
    read = partial(exact.store.get, "exact", key_of(entry_id), int(time.time() * 1000))
    return {
        "digest_ms": spread(milliseconds(partial(request_key, {}, generation), rounds)),
        "store_ms": spread(milliseconds(read, rounds)),
        "decode_ms": spread(milliseconds(partial(ChunkForm().decode, read().value), rounds)),
    }


def over_http(url: str, rounds: int) -> dict[str, Any]:
    client = Client(url)
    model = json.loads(client.exchange("GET", "/v1/models")[1])["data"][0]["id"]
    found: dict[str, Any] = {}
    for name, text in (("short", SHORT), ("long", LONG)):
        body = json.dumps({"model": model, **request(text)}).encode()

        def ask(body: bytes = body) -> bytes:
            return client.exchange("POST", "/v1/chat/completions", body)[1]

        ask()
        while json.loads(ask())["ostinato"].get("cache", {}).get("layer") != "exact":
            time.sleep(0.05)
        hits, bare = [], []
        for _ in range(rounds):
            hits += milliseconds(ask, 1)
            bare += milliseconds(lambda: client.exchange("GET", "/health"), 1)
        found[name] = {"hit_ms": spread(hits), "health_ms": spread(bare)}
    return found


def num_calls(url: str) -> int:
    text = Client(url).exchange("GET", "/metrics")[1].decode()
    return sum(
        int(float(n)) for n in re.findall(r"^ostinato_requests_finished_total\{.*\} (.*)$", text, re.M)
    )


async def all_at_once(url: str, num: int, body: bytes) -> list[bytes]:
    """That many equal requests on connections of their own, sent when all are open."""
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    message = head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    open_connections = [await asyncio.open_connection(host, int(port)) for _ in range(num)]
    for _, writer in open_connections:
        writer.write(message)
    answers = await asyncio.gather(*(reader.read() for reader, _ in open_connections))
    for _, writer in open_connections:
        writer.close()
    return answers


def thousand(url: str, num: int, rounds: int) -> dict[str, Any]:
    model = json.loads(Client(url).exchange("GET", "/v1/models")[1])["data"][0]["id"]
    calls, seconds, outcomes = [], [], []
    for number in range(rounds):
        body = json.dumps({"model": model, **request(f"{SHORT} {number} {time.time()}", 50)}).encode()
        before = num_calls(url)
        began_s = time.perf_counter()
        answers = asyncio.run(all_at_once(url, num, body))
        seconds.append(time.perf_counter() - began_s)
        time.sleep(0.5)  # the counter is written after the last piece
        calls.append(num_calls(url) - before)
        texts = set()
        for answer in answers:
            head, _, rest = answer.partition(b"\r\n\r\n")
            assert b" 200 " in head.splitlines()[0], answer[:300]
            outcomes.append(re.search(rb"x-ostinato-cache: (\w+)", head)[1].decode())  # type: ignore[index]
            texts.add(json.loads(rest)["choices"][0]["message"]["content"])
        assert len(texts) == 1, "equal requests got different answers"
    return {
        "requests": num,
        "calls": calls,
        "seconds": spread(seconds),
        "outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500, help="hits to time")
    parser.add_argument("--at-once", type=int, default=1000, help="equal requests at once")
    parser.add_argument("--repeat", type=int, default=3, help="how often that")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = save_tiny_chat_model(folder / "tiny", max_len=MAX_LEN)
        library = in_process(model, folder, options.rounds)
        print(f"  in process: {json.dumps(library)}", flush=True)
        words = [
            "serve",
            str(model),
            "--port",
            "0",
            "--kv-cache",
            "256MiB",
            "--answers",
            str(folder / "http.db"),
        ]
        server = subprocess.Popen(
            [sys.executable, "-m", "ostinato", *words], stdout=subprocess.PIPE, text=True
        )
        try:
            url = address_of(server)
            http = over_http(url, options.rounds)
            print(f"  over HTTP: {json.dumps(http)}", flush=True)
            many = thousand(url, options.at_once, options.repeat)
            print(f"  at once: {json.dumps(many)}", flush=True)
        finally:
            server.terminate()
            server.wait(60)
    headline = {
        "exact_ms": library["short"]["hit_ms"]["median"],
        "exact_http_ms": http["short"]["hit_ms"]["median"],
        "calls_for_1000": statistics.median(many["calls"]) if options.at_once == 1000 else None,
    }
    finish("responses", headline, {"in_process": library, "http": http, "at_once": many})


def address_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        line = server.stdout.readline()
        if found := re.search(r"Serving .* at (http://\S+)", line):
            return found[1]
        if not line and server.poll() is not None:
            break
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
