"""The doctor on what it is given: real traces, digests alone, a server's counters, recorded sessions."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from click.testing import CliRunner

import ostinato
from dashboard.stage import ADMIN, on_stage
from diagnose.conftest import DAY
from diagnose.planted import DOCUMENTS, QUESTIONS, SYSTEM, one_shots
from doors.tiny import save_tiny_chat_model
from ostinato.cli import main
from ostinato.diagnose.doctor import examine
from ostinato.diagnose.live import examine_server, read_exposition
from ostinato.diagnose.material import read_requests
from ostinato.diagnose.writing import Writer
from ostinato.events import BlocksEvicted, BlocksStored, Preempted, PrefixLookedUp, RequestFinished
from ostinato.observe import LoadGauges, PrometheusObserver, exposition, new_registry
from ostinato.ports import SystemClock
from ostinato.prompt.template import named_template, template_for
from ostinato.prompt.tokens import HFTokenizer
from ostinato.records import RecordMaker, log_key
from ostinato.request_log import line_of
from ostinato.runtime import Health
from ostinato.server import server_settings
from ostinato.types import Conversation, GenerationRequest, Message, Usage

pytestmark = pytest.mark.model
SESSIONS = Path(__file__).parents[3] / "shared" / "data" / "traces" / "agent"


def test_the_commands_status_is_for_ci(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = one_shots(lambda n: f"Current time: 2026-09-11T08:{n:02}:00Z\n{SYSTEM}", model="gpt-5")
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(main, ["doctor", str(log), "--fail-under", "0.6", "--json"])
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["findings"][0]["kind"] == "timestamp"
    assert told["findings"][0]["lost_dollars"] > 0
    assert told["findings"][0]["gain_tokens"] > 0
    assert told["possible_rate"] > 0.6 > told["hit_rate"]
    result = CliRunner().invoke(main, ["doctor", str(log), "--fail-under", "0.01"])
    assert result.exit_code == 0, result.output
    assert "Move the time to the end" in result.output
    assert "tokens more" in result.output
    log.write_text("".join(json.dumps(row) + "\n" for row in one_shots()))
    result = CliRunner().invoke(main, ["doctor", str(tmp_path), "--fail-under", "0.6"])
    assert result.exit_code == 0
    assert "Nothing breaks reuse" in result.output
    assert CliRunner().invoke(main, ["doctor", str(tmp_path / "none")]).exit_code == 2
    (tmp_path / "log.jsonl").write_text('{"nothing": 1}\n')
    assert "no request" in CliRunner().invoke(main, ["doctor", str(tmp_path)]).output


def test_a_trace_of_our_own_engine_is_read_with_what_it_measured(writer: Writer, tmp_path: Path) -> None:
    folder, trace = save_tiny_chat_model(tmp_path / "tiny"), tmp_path / "trace.jsonl"
    with ostinato.load(folder, kv_cache=1 << 20, block_size=4, trace=trace, trace_content=True) as engine:
        for number in range(4):
            talk = [{"role": "system", "content": f"Now: 0{number}:15 PM\n{SYSTEM[:200]}"},
                    {"role": "user", "content": QUESTIONS[number]}]  # fmt: skip
            engine.chat(talk, max_tokens=2, temperature=0)
    report = examine(read_requests(trace), writer, on=DAY)
    assert report.is_measured
    assert report.num_requests == 4
    assert report.findings[0].kind == "timestamp"


def digests(
    prompts: list[np.ndarray[Any, Any]], cached: list[int], tokenizer: HFTokenizer, **more: Any
) -> list[Any]:
    maker = RecordMaker(log_key("k"), 16, tokenizer.special_tokens.values())
    rows = []
    for number, (tokens, found) in enumerate(zip(prompts, cached, strict=True)):
        usage = Usage(len(tokens), found, len(tokens) - found, 3, ttft_s=0.1, total_s=0.2)
        event = RequestFinished("stop", usage, GenerationRequest("x", request_id=f"r{number}"), tokens, "s")
        record = maker.make(event, 1.7e9 + 10 * number, **more)
        assert record is not None
        rows.append(line_of(record, maker.key_name, with_content=False))
    return rows


def of_rows(rows: list[Any], folder: Path) -> Any:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return examine(read_requests(path), None, on=DAY)


def test_digests_alone_tell_that_a_part_changed_and_what_went(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    template = named_template("chatml")

    def written(*texts: str) -> Any:
        roles = ("system", "system", "user", "assistant", "user")
        messages = tuple(Message(role, text) for role, text in zip(roles, texts, strict=False))
        return tokenizer.encode_rendered(template.render(Conversation(messages)))

    changing = [written(f"It is 0{n}:30 at this moment.", SYSTEM, QUESTIONS[n]) for n in range(6)]
    report = of_rows(digests(changing, [0, 8, 8, 8, 8, 8], tokenizer), tmp_path)
    assert [(item.kind, item.where) for item in report.findings] == [("content", "segment 0")]
    assert report.findings[0].num_requests == 5
    trace = tmp_path / "trace.jsonl"
    shown = CliRunner().invoke(main, ["diff", f"{trace}#r1", f"{trace}#r2"])
    assert shown.exit_code == 0, shown.output
    assert "segment 0" in shown.output
    told = json.loads(CliRunner().invoke(main, ["diff", f"{trace}:2", f"{trace}:3", "--json"]).output)
    assert [kind for _, kind in told["segments"]] == ["new", "same", "new", "same"]
    assert told["num_common"] == 0
    assert told["num_lost"] > 100
    steady = [written("Be kind.", SYSTEM, QUESTIONS[n]) for n in range(6)]
    length = len(written("Be kind.", SYSTEM, ""))
    found = [0, *[length - 8] * 5]
    assert not of_rows(digests(steady, found, tokenizer), tmp_path).findings
    rows = digests(steady, [0, *[16] * 5], tokenizer, evicted={"capacity": 500})
    assert [item.kind for item in of_rows(rows, tmp_path).findings] == ["capacity"]
    talk = [
        written("Be kind.", SYSTEM, QUESTIONS[0]),
        written("Be kind.", SYSTEM, QUESTIONS[0], "Yes.", QUESTIONS[1]),
    ]
    assert not of_rows(digests(talk, [0, len(talk[0]) - 3], tokenizer), tmp_path).findings


def counters(*events: Any) -> str:
    registry = new_registry()
    registry.register(LoadGauges(lambda: Health(True, "", 0, 0, 1, 0, 0, 1)))
    observer = PrometheusObserver(registry)
    for event in events:
        observer(event)
    return exposition(registry)[0].decode()


def test_a_servers_counters_say_how_its_cache_is_run() -> None:
    usage = Usage(9_000, 1_000, 8_000, 5)
    done = RequestFinished("stop", usage, GenerationRequest("x"))
    stored = BlocksStored(8_000, 500)
    asked = PrefixLookedUp(9_000, 1_000)
    for event, kind in (
        (BlocksEvicted(6_000, 400), "capacity"),
        (BlocksEvicted(6_000, 400, "quota"), "quota"),
        (BlocksEvicted(6_000, 400, "expired"), "ttl_gap"),
        (Preempted(3_000), "preemption"),
    ):
        report = examine_server(read_exposition(counters(asked, stored, event, done)))
        assert [item.kind for item in report.findings] == [kind]
        assert (report.prompt_tokens, report.hit_tokens, report.num_requests) == (9_000, 1_000, 1)
    off = examine_server(read_exposition(counters(PrefixLookedUp(9_000, 0), done)))
    assert [item.kind for item in off.findings] == ["cache_off"]
    well = examine_server(
        read_exposition(counters(PrefixLookedUp(9_000, 8_000), BlocksStored(1_000, 60), done))
    )
    assert not well.findings
    assert well.hit_rate == pytest.approx(8 / 9)


def test_a_server_is_asked_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    text = counters(
        PrefixLookedUp(9_000, 0), RequestFinished("stop", Usage(9_000, 0, 0, 1), GenerationRequest("x"))
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode() if self.path == "/metrics" else b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.delenv("OSTINATO_ADMIN_KEY", raising=False)
        result = CliRunner().invoke(main, ["doctor", url, "--fail-under", "0.5"])
        assert result.exit_code == 1
        assert "cache off" in result.output
        assert CliRunner().invoke(main, ["doctor", f"{url}/elsewhere"]).exit_code == 1
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert CliRunner().invoke(main, ["doctor", url]).exit_code == 1


def test_the_holder_of_the_admin_key_has_a_servers_requests_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    with (
        ostinato.load(folder, kv_cache=1 << 20, block_size=4) as engine,
        on_stage(engine, api_keys="sk-anna", admin_key=ADMIN) as stage,
    ):
        with stage.client("sk-anna") as client:
            for number in range(4):
                talk: list[Any] = [
                    {
                        "role": "system",
                        "content": f"Current time: 2026-09-11T08:0{number}:00Z\n{SYSTEM[:300]}",
                    },
                    {"role": "user", "content": QUESTIONS[number]},
                ]
                client.chat.completions.create(
                    model=engine.runtime.model_name, messages=talk, max_tokens=2, temperature=0
                )
        stage.recorded(4)
        monkeypatch.delenv("OSTINATO_ADMIN_KEY", raising=False)
        monkeypatch.setenv("OSTINATO_API_KEY", "sk-anna")
        counted = CliRunner().invoke(main, ["doctor", stage.url, "--json"])
        assert json.loads(counted.stdout)["num_requests"] == 4
        assert "OSTINATO_ADMIN_KEY" in counted.stderr
        monkeypatch.setenv("OSTINATO_ADMIN_KEY", ADMIN)
        told = CliRunner().invoke(main, ["doctor", stage.url, "--json"])
        assert told.exit_code == 0, told.output
        report = json.loads(told.stdout)
        assert report["findings"][0]["kind"] == "timestamp"
        assert report["findings"][0]["gain_tokens"] > 0
        assert report["is_measured"]
        assert "sk-anna" not in told.stdout
        asked = httpx2.get(f"{stage.url}/v1/ostinato/requests", headers={"authorization": f"Bearer {ADMIN}"})
        lines = [json.loads(line) for line in asked.text.splitlines()]
        assert len(lines) == 4
        secret = server_settings(api_keys="sk-anna").api_keys[0].salt
        assert all(line["salt"] not in ("", secret) for line in lines), "a salt is the tenant's secret"
        monkeypatch.setenv("OSTINATO_ADMIN_KEY", "wrong")
        assert CliRunner().invoke(main, ["doctor", stage.url]).exit_code == 1


@pytest.mark.skipif(not SESSIONS.is_dir(), reason="the recorded agent sessions are not here")
def test_recorded_agent_sessions(writer: Writer) -> None:
    report = examine(read_requests(SESSIONS / "taubench"), writer, on=DAY)
    assert report.num_requests == 194
    assert 0.80 < report.hit_rate < 0.95
    assert len(report.groups) > 3


def ids_of(prompts: list[Any], folder: Path, writer: Writer) -> Any:
    path = folder / "ids.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": [int(token) for token in prompt]}) + "\n" for prompt in prompts)
    )
    return examine(read_requests(path), writer, on=DAY)


def test_answers_in_other_tokens_and_a_second_bos(
    tokenizer: HFTokenizer, writer: Writer, tmp_path: Path
) -> None:
    answer = "understanding internationalisation"
    parts = [f"{SYSTEM}\nassistant: {answer[:5]}", f"{answer[5:]}\n{SYSTEM}\nuser: "]
    own = np.concatenate([tokenizer.encode(part) for part in parts])
    again = tokenizer.encode("".join(parts))
    prompts = [np.concatenate([(own, again)[n % 2], tokenizer.encode(QUESTIONS[n])]) for n in range(4)]
    report = ids_of(prompts, tmp_path, writer)
    assert [item.kind for item in report.findings] == ["retokenised"], report.findings
    bos = tokenizer.special_tokens[tokenizer.bos_token or ""]
    prompts = [[*([bos] if n % 2 else []), *again, *tokenizer.encode(QUESTIONS[n])] for n in range(4)]
    report = ids_of(prompts, tmp_path, writer)
    assert [item.kind for item in report.findings] == ["bos"], report.findings


def test_a_system_text_that_only_some_requests_bring(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    template = template_for(tokenizer, clock=SystemClock(), nonce="7" * 20)
    history = "\n".join(DOCUMENTS[:3])
    rows = [
        {"messages": [*([{"role": "system", "content": SYSTEM}] if n % 2 else []),
                      {"role": "user", "content": f"{history}\n{QUESTIONS[n]}"}]}
        for n in range(6)
    ]  # fmt: skip
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = examine(read_requests(log), Writer(tokenizer, template), on=DAY)
    assert report.findings[0].kind == "default_system", report.findings
    assert report.findings[0].gain_tokens
