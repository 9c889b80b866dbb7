"""What /metrics says: read back with Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from ostinato.events import (
    AnswerLookedUp,
    BlocksEvicted,
    BlocksStored,
    Preempted,
    PrefixLookedUp,
    RequestFinished,
    RequestServed,
    StepFinished,
    TierLoaded,
)
from ostinato.observe import PrometheusObserver, exposition, new_registry
from ostinato.types import Conversation, GenerationRequest, Message, Served, Trim, Usage
from server.conftest import Running, Start
from server.wire import chat_body

CHAT = "/v1/chat/completions"
USAGE = Usage(100, 60, 40, 11, ttft_s=0.3, queue_s=0.1, total_s=1.3, approximate_tokens=48)


def samples(text: str) -> dict[str, float]:
    """Every sample by name and labels, as written: ``name{label=value}``."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found
            found[name.removeprefix("ostinato_")] = sample.value
    return found


def scrape(running: Running) -> dict[str, float]:
    reply = running.get("/metrics", accept="application/openmetrics-text; version=nonsense")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(reply.body.decode())


def test_events_become_series() -> None:
    registry = new_registry()
    observer = PrometheusObserver(registry)
    for event in (
        PrefixLookedUp(100, 60),
        PrefixLookedUp(10, 0),
        BlocksStored(40, 3),
        BlocksEvicted(32, 2),
        Preempted(7),
        StepFinished(70, 3, 0.02),
        RequestFinished("stop", USAGE),
        RequestFinished("abort", Usage(10, 0, 0, 0)),
        RequestFinished("error", Usage(10, 0, 0, 0)),
        TierLoaded(48, 3000, 1, 0.03),
    ):
        observer(event)
    text, _ = exposition(registry)
    found = samples(text.decode())
    assert found["prefix_cache_queries_total"] == 110
    assert found["prefix_cache_hits_total"] == 60
    assert found["prefix_cache_stored_tokens_total"] == 40
    assert found["prefix_cache_evicted_blocks_total{reason=capacity}"] == 2
    assert found["num_preemptions_total"] == 1
    assert found["prompt_tokens_total"] == 120
    assert found["approximate_prompt_tokens_total"] == 48
    assert found["generation_tokens_total"] == 11
    assert found["requests_finished_total{finish_reason=stop}"] == 1
    assert found["requests_finished_total{finish_reason=abort}"] == 1
    assert found["inter_token_latency_seconds_count"] == 3
    name = "time_to_first_token_seconds"
    assert found[f"{name}_count{{start=warm}}"] == 1, "a request without a token has no time to it"
    assert found[f"{name}_count{{start=cold}}"] == 0
    assert found[f"{name}_sum{{start=warm}}"] == 0.3
    assert found["preempted_tokens_total"] == 7
    assert found["request_queue_time_seconds_sum"] == 0.1
    assert abs(found["request_time_per_output_token_seconds_sum"] - 0.1) < 1e-9
    assert found["iteration_tokens_sum"] == 70
    assert found["kv_tier_load_seconds_sum"] == 0.03
    assert "_created" not in text.decode()


def test_what_happened_on_the_server_is_counted(start: Start) -> None:
    running = start()
    for _ in range(2):
        assert running.post(CHAT, chat_body("metrics")).status == 200
    assert running.post(CHAT, chat_body("metrics", stream=True)).status == 200
    assert running.post(CHAT, b"{").status == 400
    assert running.post(CHAT, chat_body("!fail-late", stream=True)).status == 200
    assert running.get("/v1/models/nobody").status == 404
    running.engine.wait_idle(2)
    found = scrape(running)
    assert found["http_requests_total{route=/v1/chat/completions,status=200}"] == 3
    assert found["http_requests_total{route=/v1/chat/completions,status=400}"] == 1
    assert found["http_requests_total{route=/v1/chat/completions,status=500}"] == 1
    assert found["http_requests_total{route=/v1/models/{id},status=404}"] == 1
    assert found["http_request_duration_seconds_count{route=/v1/chat/completions}"] == 5
    assert found["prompt_tokens_total"] == 3 * 8 + 11
    assert found["prefix_cache_hits_total"] == 2 * 7 + 1
    assert found["requests_finished_total{finish_reason=stop}"] == 3
    assert found["requests_finished_total{finish_reason=error}"] == 1
    assert found["num_requests_running"] == 0
    assert found["kv_blocks{state=evictable}"] == 25


def test_paths_and_text_do_not_become_labels(start: Start) -> None:
    running = start()
    before = None
    for index in range(20):
        running.get(f"/secret-path-{index}")
        running.get(f"/v1/models/secret-model-{index}")
        running.post(CHAT, chat_body(f"secret text {index}"), x_request_id=f"secret-id-{index}")
        found = scrape(running)
        if index:  # the first scrape is in the second
            assert before is None or found.keys() == before.keys()
            before = found
    assert "secret" not in running.get("/metrics").body.decode()


def test_two_servers_in_one_process_count_apart(start: Start) -> None:
    one, two = start(), start()
    assert one.post(CHAT, chat_body("x")).status == 200
    assert scrape(one)["prompt_tokens_total"] == 2
    assert scrape(two)["prompt_tokens_total"] == 0


def test_trimming_and_named_prompts_are_counted() -> None:
    registry = new_registry()
    observer = PrometheusObserver(registry)
    trim = Trim("sticky", 100, 400, (1, 2), ())
    observer(RequestFinished("stop", Usage(90, 60, 30, 1, trimmed=trim, prompt_name="guide")))
    observer(RequestFinished("tool_calls", Usage(50, 10, 40, 1, prompt_name="guide")))
    observer(RequestFinished("stop", Usage(10, 0, 10, 1)))
    found = samples(exposition(registry)[0].decode())
    assert found["trimmed_requests_total{strategy=sticky}"] == 1
    assert found["trimmed_tokens_total{strategy=sticky}"] == 310
    assert found["named_prompt_requests_total{prompt=guide}"] == 2
    assert found["named_prompt_tokens_total{prompt=guide}"] == 140
    assert found["named_prompt_cached_tokens_total{prompt=guide}"] == 70
    assert found["requests_finished_total{finish_reason=tool_calls}"] == 1


def test_reuse_is_counted_by_layer_and_by_kind_of_request() -> None:
    registry = new_registry()
    observer = PrometheusObserver(registry)
    chat = GenerationRequest(
        Conversation((Message("user", "a"), Message("assistant", "b"), Message("user", "c")))
    )
    usage = Usage(100, 60, 40, 2, ttft_s=0.2, loaded_tokens=20, load_s=0.01)
    kept = Usage(50, 50, 0, 9, served=Served("semantic", 3.0, "e"))
    for event in (
        StepFinished(100, 0, 0.5),
        RequestFinished("stop", usage, chat),
        AnswerLookedUp("miss", num_prompt_tokens=100, layers=("exact",)),
        AnswerLookedUp("semantic", 3.0, 9, 50, ("exact", "semantic")),
        RequestServed("stop", kept, chat),
        RequestServed("stop", Usage(10, 10, 0, 3, served=Served("joined")), chat),
        Preempted(7),
    ):
        observer(event)
    found = samples(exposition(registry)[0].decode())
    layers = {
        "arena": (100, 40),
        "shared": (0, 20),
        "exact": (160, 10),
        "semantic": (50, 50),
        "provider": (0, 0),
    }
    for layer, (looked_up, hit) in layers.items():
        assert found[f"reuse_lookup_tokens_total{{layer={layer}}}"] == looked_up, layer
        assert found[f"reuse_hit_tokens_total{{layer={layer}}}"] == hit, layer
    assert found["reuse_recomputed_tokens_total{layer=arena}"] == 7
    # A row took 5 ms: what was not computed saved as much for each token.
    assert abs(found["ttft_saved_seconds_total{layer=shared}"] - 0.1) < 1e-9
    assert abs(found["ttft_saved_seconds_total{layer=semantic}"] - 0.25) < 1e-9
    assert found["pattern_prompt_tokens_total{pattern=chat}"] == 160
    assert found["pattern_cached_tokens_total{pattern=chat}"] == 120
    assert found["pattern_prompt_tokens_total{pattern=rag}"] == 0
