"""Spans as an OTLP collector gets them, over HTTP from a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import ostinato
from doors.tiny import save_tiny_chat_model


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The spans that came in."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            sent = ExportTraceServiceRequest.FromString(body)
            for resource in sent.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    yield spans
    server.shutdown()
    thread.join()
    server.server_close()


def values(span: Any) -> dict[str, Any]:
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_with_what_was_read_from_the_cache(collector: list[Any], tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    talk = [{"role": "user", "content": "the password is swordfish, tell nobody"}]
    with ostinato.load(folder, kv_cache=1 << 20, block_size=4, otel=True) as engine:
        engine.chat(talk, max_tokens=4, temperature=0)
        again = engine.chat(talk, max_tokens=4, temperature=0)
    roots = [span for span in collector if not span.parent_span_id]
    assert len(roots) == 2
    told = values(roots[1])
    assert roots[1].name.startswith("chat ")
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.usage.input_tokens"] == again.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == again.usage.completion_tokens
    assert told["gen_ai.usage.cache_read.input_tokens"] == again.usage.cached_tokens > 0
    assert told["gen_ai.response.finish_reasons"] == [again.finish_reason]
    assert told["gen_ai.request.max_tokens"] == 4
    parts = [span for span in collector if span.parent_span_id == roots[1].span_id]
    assert [span.name for span in parts] == ["wait", "prefill", "decode"]
    assert parts[0].start_time_unix_nano == roots[1].start_time_unix_nano
    assert parts[2].end_time_unix_nano == roots[1].end_time_unix_nano
    assert "swordfish" not in repr(collector)
