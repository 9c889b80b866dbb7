"""Warming real engines and servers: what the report says the first request finds is what it finds."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

import ostinato
from doors.test_serve import Served, start, stop
from doors.tiny import save_tiny_chat_model
from ostinato.cli import main
from ostinato.library import Engine
from ostinato.warming.background import encode_for
from ostinato.warming.documents import read_documents
from ostinato.warming.engine import EngineTarget
from ostinato.warming.logs import read_log
from ostinato.warming.plan import choose
from ostinato.warming.report import Cache, expect
from ostinato.warming.run import warm

OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
SETTINGS: dict[str, Any] = {"kv_cache": 1 << 20, "block_size": 4}
SYSTEMS = (
    "You answer questions about the instruments of this museum, briefly and truly.",
    "You translate what is said to you into French, and say nothing else at all.",
)
QUESTIONS = ("What is a serpent?", "Who played it?", "What is an ophicleide?", "And when?")


def talk(system: int, question: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEMS[system]},
        {"role": "user", "content": QUESTIONS[question]},
    ]


BODIES = [
    {"model": "m", "messages": talk(system, question), "temperature": 0}
    for question in range(len(QUESTIONS))
    for system in range(len(SYSTEMS))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, BODIES)))
    return path


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with ostinato.load(folder, **SETTINGS) as loaded:
        yield loaded


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["warm", *map(str, arguments)])


def test_the_first_request_finds_what_the_report_says_and_answers_as_ever(engine: Engine, log: Path) -> None:
    expected_text = engine.chat(talk(0, 0), salt="elsewhere", **OPTIONS).text
    runtime = engine.runtime
    read = read_log(log, encode_for(runtime))
    prefixes = choose(read.prompts, 10)
    assert len(prefixes) == 2
    manager = runtime.cache().manager
    manager.clear()
    warmed = warm(prefixes, EngineTarget(runtime, piece_tokens=40, share=0.5))
    assert warmed.end == "done"
    cache = Cache(manager.num_blocks, manager.block_size, "workload", 0.5)
    expected = expect(read.prompts, prefixes, cache)
    assert warmed.tokens == expected.warmed.tokens
    reply = engine.chat(talk(0, 0), **OPTIONS)
    assert reply.usage.cached_tokens == expected.first_hits > 70
    assert reply.text == expected_text


def test_it_takes_its_share_and_gives_nothing_up(engine: Engine, log: Path) -> None:
    runtime = engine.runtime
    engine.chat("Something that is asked for again and again.", **OPTIONS)
    manager = runtime.cache().manager
    num_before, cached_before = manager.num_free_blocks, manager.num_cached_tokens
    share = 25 / manager.num_blocks
    prefixes = choose(read_log(log, encode_for(runtime)).prompts, 10)
    warmed = warm(prefixes, EngineTarget(runtime, piece_tokens=40, share=share))
    assert warmed.end == "full"
    assert 60 <= warmed.computed_tokens <= 100
    assert num_before - manager.num_free_blocks <= 25
    assert manager.num_cached_tokens == cached_before + warmed.computed_tokens
    again = engine.chat("Something that is asked for again and again.", **OPTIONS)
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1


def test_it_waits_while_others_ask_and_stops_when_told(engine: Engine, log: Path) -> None:
    runtime = engine.runtime
    prefixes = choose(read_log(log, encode_for(runtime)).prompts, 10)
    target = EngineTarget(runtime, piece_tokens=40, share=0.5)
    stream = engine.stream("Go on for a while.", **(OPTIONS | {"max_tokens": 400}))
    next(stream)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(warm(prefixes, target)))
    thread.start()
    num_seen = sum(1 for _ in zip(stream, range(50), strict=False))
    assert num_seen == 50
    assert runtime.cache().manager.peek(runtime.cache().namespace, prefixes[0].tokens) < 40, "it did not wait"
    target.stop.set()
    thread.join(30)
    stream.close()  # type: ignore[attr-defined]
    assert results[0].end == "stopped"
    assert results[0].computed_tokens == 0


def test_warming_is_in_no_statistics(folder: Path, log: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with ostinato.load(folder, trace=trace, trace_content=True, **SETTINGS) as engine:
        for body in BODIES:
            engine.chat(body["messages"], **OPTIONS)  # type: ignore[arg-type]
        read = read_log(log, encode_for(engine.runtime))
        engine.runtime.cache().manager.clear()
        warm(choose(read.prompts, 10), EngineTarget(engine.runtime, piece_tokens=40, share=0.5))
    assert len(trace.read_bytes().splitlines()) == len(BODIES)
    # And the log that this wrote says the same prompts.
    with ostinato.load(folder, **SETTINGS) as engine:
        own = read_log(trace, encode_for(engine.runtime))
    assert [p.tokens.tolist() for p in own.prompts] == [p.tokens.tolist() for p in read.prompts]


def test_the_command_says_what_it_would_do(folder: Path, log: Path) -> None:
    result = run(log, folder, "--json", "--block-size", 4)
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert [each["requests"] >= 3 for each in record["prefixes"]] == [True, True]
    assert record["expected"]["hit_rate_after"] > record["expected"]["hit_rate_before"]
    assert record["requests"] == len(BODIES)
    assert "museum" not in result.output
    shown = run(log, folder, "--top", 1, "--block-size", 4)
    assert "8 requests, 1 prefixes worth warming" in shown.output
    small = json.loads(run(log, folder, "--json", "--block-size", 4, "--capacity", 100).output)
    assert small["end"] == "full"


def test_a_tier_is_warmed_for_whoever_opens_it(folder: Path, log: Path, tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    sizes = {"shared_tier": tier, "shared_tier_bytes": "1MiB"}
    result = run(log, folder, "--tier", tier, "--tier-bytes", "1MiB", "--block-size", 4, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert record["end"] == "done"
    assert record["computed_tokens"] > 100
    with ostinato.load(folder, **SETTINGS) as engine:
        cold = engine.chat(talk(0, 0), **OPTIONS)
    with ostinato.load(folder, **SETTINGS, **sizes) as engine:
        reply = engine.chat(talk(0, 0), **OPTIONS)
    assert reply.usage.cached_tokens == record["expected"]["first_request_hit_tokens"] > 70
    assert reply.text == cold.text
    again = json.loads(
        run(log, folder, "--tier", tier, "--tier-bytes", "1MiB", "--block-size", 4, "--json").output
    )
    assert again["loaded_tokens"] > 100 > again["computed_tokens"]
    little = run(log, folder, "--tier", tmp_path / "x", "--tier-bytes", "64K", "--block-size", 4, "--json")
    assert json.loads(little.output)["end"] == "full"


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    running = start(folder, "--block-size", "4")
    yield running
    assert stop(running) == 0


def ask_first(served: Served) -> int:
    details = served.ask(talk(0, 0)).usage.prompt_tokens_details
    return int(details.cached_tokens)


def test_a_running_server_is_warmed(served: Served, folder: Path, log: Path) -> None:
    result = run(log, folder, "--url", f"{served.url}/v1", "--block-size", 4, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert record["end"] == "done"
    assert ask_first(served) == record["expected"]["first_request_hit_tokens"] > 70
    refused = run(log, folder, "--url", served.url, "--block-size", 4, "--share", 0.01)
    assert "until its share of the cache was full" in refused.output


def test_a_server_answers_at_once_and_warms_meanwhile(folder: Path, log: Path) -> None:
    planned = json.loads(run(log, folder, "--json", "--block-size", 4).output)
    served = start(folder, "--block-size", "4", "--warm", str(log), "--warm-top", "4")
    try:
        with urllib.request.urlopen(f"{served.url}/health", timeout=30) as reply:
            assert reply.status == 200
        deadline = time.monotonic() + 60
        wanted = sum(each["new_tokens"] for each in planned["prefixes"])
        while stored_tokens(served) < wanted:
            assert time.monotonic() < deadline, "it does not warm"
            time.sleep(0.1)
        assert ask_first(served) == planned["expected"]["first_request_hit_tokens"] > 70
    finally:
        assert stop(served) == 0


def stored_tokens(served: Served) -> int:
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found = re.search(r"^ostinato_prefix_cache_stored_tokens_total (\S+)", text, re.MULTILINE)
    assert found
    return int(float(found.group(1)))


def test_what_cannot_be_is_said_in_one_line(folder: Path, log: Path, tmp_path: Path) -> None:
    nobody = run(log, folder, "--url", "http://127.0.0.1:9")
    assert nobody.exit_code == 1
    assert "does not say what model it has" in nobody.output
    assert run(log, folder, "--url", "http://127.0.0.1:9", "--tier", tmp_path).exit_code == 2
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n")
    nothing = run(empty, folder)
    assert nothing.exit_code == 2
    assert "no request with a prompt" in nothing.output


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_is_warmed_from_bodies_as_openai_has_them(
    default_model_path: Path, tmp_path: Path
) -> None:
    """With a real tokenizer, whose tokens do not end where texts part."""
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"\n".join(map(orjson.dumps, BODIES)))
    with ostinato.load(default_model_path, kv_cache="256MiB") as engine:
        cold = engine.chat(talk(0, 0), salt="elsewhere", temperature=0, max_tokens=8)
        runtime = engine.runtime
        read = read_log(log, encode_for(runtime))
        prefixes = choose(read.prompts, 10)
        manager = runtime.cache().manager
        manager.clear()
        warm(prefixes, EngineTarget(runtime, piece_tokens=512, share=0.5))
        cache = Cache(manager.num_blocks, manager.block_size, "workload", 0.5)
        expected = expect(read.prompts, prefixes, cache)
        reply = engine.chat(talk(0, 0), temperature=0, max_tokens=8)
    assert reply.usage.cached_tokens == expected.first_hits >= 20
    assert reply.text == cold.text


DOCUMENTS = {
    "a.txt": "The serpent is a long horn, bent like a snake, with holes for six fingers. " * 2,
    "b.md": "The ophicleide has keys, and was played in orchestras of the 1840s. " * 2,
    "empty.txt": "\n",
    "picture.png": "not a document",
}


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for name, text in DOCUMENTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def about(documents: list[str], system: str = SYSTEMS[0]) -> list[dict[str, str]]:
    text = "\n\n".join(documents)
    return [{"role": "system", "content": system}, {"role": "user", "content": f"{text}\n\nWhat has keys?"}]


def test_documents_are_found_in_any_order(folder: Path, documents: Path) -> None:
    with ostinato.load(folder, kv_cache=1 << 21, block_size=4) as engine:
        prefixes = read_documents(documents, encode_for(engine.runtime), system=SYSTEMS[0])
        assert len(prefixes) == 2
        seen: list[int] = []
        warmed = warm(prefixes, EngineTarget(engine.runtime, piece_tokens=40, share=0.9), seen.append)
        assert warmed.end == "done"
        assert sum(seen) == sum(prefix.new_tokens for prefix in prefixes) == warmed.computed_tokens
        texts = [DOCUMENTS["b.md"].strip(), DOCUMENTS["a.txt"].strip()]
        usage = engine.chat(about(texts), **OPTIONS, reuse={"mode": "moved", "repair": "none"}).usage
        assert usage.reuse is not None
        # One of them begins where it was computed: that is a prefix.
        assert usage.cached_tokens > len(texts[0])
        assert usage.reuse.moved_tokens > len(texts[1]) - 8
        assert usage.reuse.computed_tokens < 80


def test_the_command_warms_a_server_with_documents(served: Served, folder: Path, documents: Path) -> None:
    system = documents.parent / "system.txt"
    system.write_text(SYSTEMS[0], encoding="utf-8")
    options = ("--documents", documents, "--system", system, "--share", "0.9", "--block-size", "4")
    result = run(*options, folder, "--url", served.url, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["documents"], said["end"]) == (2, "done")
    assert said["computed_tokens"] > sum(map(len, DOCUMENTS.values())) - 40
    again = run(*options, folder, "--url", served.url)
    assert "2 of 2 documents all of it" in again.output


def test_the_command_says_what_is_missing(documents: Path, log: Path) -> None:
    for arguments, what in (
        ((), "LOG"),
        (("--documents", documents), "--url or --tier"),
        (("--documents", documents, "a", "b", "--url", "http://127.0.0.1:1"), "unexpected"),
        ((log, "model", "more"), "unexpected"),
        ((log, "--system", log), "--documents"),
        ((documents / "none",), "does not exist"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert what in result.output
