"""Events to Prometheus. Series are named after vLLM's where they mean the same, with our own prefix.

Nothing of a user's text becomes a label, and every label's values are a fixed few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from .errors import StoreError
from .events import (
    AnswerFate,
    AnswerFiled,
    AnswerLookedUp,
    AnswerMiss,
    AnswerMissed,
    AnswerOutcome,
    BlocksEvicted,
    BlocksStored,
    Event,
    EvictionReason,
    Preempted,
    PrefixLookedUp,
    RequestFinished,
    StepFinished,
    TierLoaded,
)
from .kv.transfer import TierReport
from .responses.stores.base import Kind, Use

_P: Final = "ostinato:"
_TTFT_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_ITL_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0),
)
_REQUEST_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
_AGE_BUCKETS_S: Final = (1.0, 10.0, 60.0, 600.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0, 2_592_000.0)
_STEP_ROW_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def new_registry() -> CollectorRegistry:
    """A registry of its own for each server: two in one process do not mix."""
    return CollectorRegistry(auto_describe=True)


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The registry in Prometheus' text format, and its content type."""
    return generate_latest(_WithoutCreated(registry)), CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True, slots=True)
class _WithoutCreated(Collector):
    """Leaves out when each series was made: three lines in ten, of which Prometheus has no use."""

    registry: CollectorRegistry

    def collect(self) -> Iterator[Metric]:
        for family in self.registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class PrometheusObserver:
    """An observer (:data:`ostinato.events.Observer`) that counts. It neither raises nor waits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(_P + name, help_text, labels, registry=registry)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(_P + name, help_text, buckets=buckets, registry=registry)

        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._stored_tokens = counter("prefix_cache_stored_tokens", "Tokens that became findable.")
        self._stored_blocks = counter("prefix_cache_stored_blocks", "Blocks the index took for them.")
        self._evicted_tokens = counter("prefix_cache_evicted_tokens", "Tokens given up.", ("reason",))
        self._evicted_blocks = counter("prefix_cache_evicted_blocks", "Blocks given up.", ("reason",))
        for reason in get_args(EvictionReason):
            self._evicted_tokens.labels(reason)
            self._evicted_blocks.labels(reason)
        self._preemptions = counter(
            "num_preemptions", "Running sequences that had to give their blocks back."
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that ended, cached ones included.")
        self._generated = counter("generation_tokens", "Tokens generated for requests that ended.")
        self._finished = counter(
            "requests_finished", "Requests that ended, in whatever way.", ("finish_reason",)
        )
        self._trimmed = counter("trimmed_requests", "Requests whose conversation was trimmed.", ("strategy",))
        self._trimmed_tokens = counter(
            "trimmed_tokens", "Prompt tokens that trimming left out.", ("strategy",)
        )
        # The names are those of a registry, which takes a limited number of them.
        self._approximate = counter(
            "approximate_prompt_tokens", "Prompt tokens whose cached KV had been through a lossy codec."
        )
        self._kv_dropped = counter(
            "kv_budget_dropped_tokens", "Tokens whose KV was dropped within a request's budget.", ("method",)
        )
        self._named = counter("named_prompt_requests", "Requests by the named prompt they used.", ("prompt",))
        self._named_queries = counter(
            "named_prompt_tokens", "Prompt tokens of requests with a named prompt.", ("prompt",)
        )
        self._named_hits = counter(
            "named_prompt_cached_tokens", "Those of them that were found in the cache.", ("prompt",)
        )
        self._ttft = histogram(
            "time_to_first_token_seconds", "Arrival to first token, queueing included.", _TTFT_BUCKETS_S
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Arrival to the start of the prefill.", _TTFT_BUCKETS_S
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after its first.",
            _ITL_BUCKETS_S,
        )
        self._total = histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS_S)
        self._itl = histogram(
            "inter_token_latency_seconds",
            "Duration of a step, once for each sequence that waited for its next token meanwhile.",
            _ITL_BUCKETS_S,
        )
        self._answers = counter(
            "response_cache_requests", "Requests by what the response caches made of them.", ("outcome",)
        )
        self._answer_tokens = counter(
            "response_cache_served_tokens", "Tokens of answers that were kept, not generated.", ("outcome",)
        )
        self._answer_misses = counter(
            "response_cache_misses", "Look-ups in the store of answers that brought nothing.", ("reason",)
        )
        self._answers_filed = counter(
            "response_cache_filed", "Answers that were to be kept, by what became of them.", ("fate",)
        )
        for family, values in (
            (self._answers, AnswerOutcome),
            (self._answer_misses, AnswerMiss),
            (self._answers_filed, AnswerFate),
        ):
            for value in get_args(values):
                family.labels(value)
        self._answer_age = histogram(
            "response_cache_age_seconds", "How old the answers were that were given again.", _AGE_BUCKETS_S
        )
        self._rows = histogram("iteration_tokens", "Rows computed in a step.", _STEP_ROW_BUCKETS)
        self._load = histogram(
            "kv_tier_load_seconds", "Reading a request's blocks from the shared tier.", _TTFT_BUCKETS_S
        )

    def __call__(self, event: Event) -> None:
        match event:
            case StepFinished():
                self._rows.observe(event.num_rows)
                for _ in range(event.decode_rows):
                    self._itl.observe(event.duration_s)
            case PrefixLookedUp():
                self._queries.inc(event.num_tokens)
                self._hits.inc(event.hit_tokens)
            case BlocksStored():
                self._stored_tokens.inc(event.num_tokens)
                self._stored_blocks.inc(event.num_blocks)
            case BlocksEvicted():
                self._evicted_tokens.labels(event.reason).inc(event.num_tokens)
                self._evicted_blocks.labels(event.reason).inc(event.num_blocks)
            case Preempted():
                self._preemptions.inc()
            case TierLoaded():
                self._load.observe(event.duration_s)
            case RequestFinished():
                self._request_finished(event)
            case AnswerLookedUp():
                self._answers.labels(event.outcome).inc()
                if event.outcome in ("exact", "semantic"):
                    self._answer_age.observe(event.age_s)
                    self._answer_tokens.labels(event.outcome).inc(event.num_tokens)
            case AnswerMissed():
                self._answer_misses.labels(event.reason).inc()
            case AnswerFiled():
                self._answers_filed.labels(event.fate).inc()

    def _request_finished(self, event: RequestFinished) -> None:
        if event.request is not None and event.request.is_warming:
            return  # nobody waited for it
        usage = event.usage
        self._finished.labels(event.finish_reason).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._generated.inc(usage.completion_tokens)
        self._approximate.inc(usage.approximate_tokens)
        if (trim := usage.trimmed) is not None:
            self._trimmed.labels(trim.strategy).inc()
            self._trimmed_tokens.labels(trim.strategy).inc(trim.given_tokens - usage.prompt_tokens)
        if usage.retention:
            self._kv_dropped.labels(usage.retention).inc(usage.dropped_tokens)
        if usage.prompt_name:
            self._named.labels(usage.prompt_name).inc()
            self._named_queries.labels(usage.prompt_name).inc(usage.prompt_tokens)
            self._named_hits.labels(usage.prompt_name).inc(usage.cached_tokens)
        if usage.completion_tokens == 0:
            return  # it never had a first token: its times would be of something else
        self._ttft.observe(usage.ttft_s)
        self._queue.observe(usage.queue_s)
        self._total.observe(usage.total_s)
        if usage.completion_tokens > 1 and event.finish_reason in ("stop", "length", "tool_calls"):
            self._tpot.observe((usage.total_s - usage.ttft_s) / (usage.completion_tokens - 1))


class Load(Protocol):
    """How busy an engine is at this moment. Blocks are of KV: held by requests, evictable, or free."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_held_blocks(self) -> int: ...

    @property
    def num_evictable_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_pinned_blocks(self) -> int: ...

    @property
    def tier(self) -> TierReport | None:
        """Of the shared tier, where there is one."""


@dataclass(frozen=True, slots=True)
class LoadGauges(Collector):
    """Gauges that are asked for when someone looks, instead of being kept up to date."""

    load: Callable[[], Load]

    def collect(self) -> Iterator[Metric]:
        load = self.load()
        yield GaugeMetricFamily(_P + "num_requests_running", "Requests in the engine.", load.num_running)
        yield GaugeMetricFamily(_P + "num_requests_waiting", "Requests that wait.", load.num_waiting)
        usage = load.num_held_blocks / load.num_blocks if load.num_blocks else 0.0
        yield GaugeMetricFamily(
            _P + "kv_cache_usage_perc", "Share of blocks held by requests, 0 to 1.", usage
        )
        blocks = GaugeMetricFamily(
            _P + "kv_blocks", "Blocks of KV by what becomes of them.", labels=["state"]
        )
        blocks.add_metric(["held"], load.num_held_blocks)
        blocks.add_metric(["evictable"], load.num_evictable_blocks)
        blocks.add_metric(["free"], load.num_free_blocks)
        yield blocks
        yield GaugeMetricFamily(
            _P + "kv_pinned_blocks", "Of the blocks held: those that are pinned.", load.num_pinned_blocks
        )
        if load.tier is not None:
            yield from _tier_families(load.tier)


def _tier_families(tier: TierReport) -> Iterator[Metric]:
    loads, write_back = tier.loads, tier.write_back
    # The first two are named after vLLM's, which count the same of a cache outside of the engine.
    for name, help_text, count in (
        ("external_prefix_cache_queries", "Tokens looked up in the shared tier.", loads.looked_up_tokens),
        ("external_prefix_cache_hits", "Tokens that were there when looked up.", loads.hit_tokens),
        ("kv_tier_loaded_tokens", "Tokens read from the shared tier.", loads.loaded_tokens),
        ("kv_tier_refused_tokens", "Tokens there that were quicker computed.", loads.refused_tokens),
        ("kv_tier_failed_blocks", "Blocks found and then not readable: computed.", loads.failed_blocks),
        ("kv_tier_read_bytes", "Bytes read from the shared tier.", loads.loaded_bytes),
        ("kv_tier_written_bytes", "Bytes written to the shared tier.", write_back.stored_bytes),
    ):
        yield CounterMetricFamily(_P + name, help_text, count)
    dropped = {"dropped": write_back.dropped, "unfit": write_back.unfit}
    for name, help_text, label, counts in (
        ("kv_tier_misses", "Blocks that could not be loaded, by reason.", "reason", tier.misses),
        ("kv_tier_evicted_blocks", "Blocks that went, by reason.", "reason", tier.evictions),
        (
            "kv_tier_write_back_blocks",
            "Blocks sent to the shared tier by what became of them; dropped: no buffer was free.",
            "outcome",
            {**tier.outcomes, **dropped},
        ),
    ):
        family = CounterMetricFamily(_P + name, help_text, labels=[label])
        for value, count in counts.items():
            family.add_metric([value], count)
        yield family
    for name, help_text, size in (
        ("kv_tier_capacity_bytes", "What the blocks in the shared tier may take.", tier.capacity_bytes),
        ("kv_tier_used_bytes", "What the blocks in the shared tier take.", tier.used_bytes),
        ("kv_tier_index_bytes", "What the shared tier's index takes.", tier.index_bytes),
        ("kv_tier_buffered_bytes", "Bytes on their way to the shared tier.", tier.buffered_bytes),
    ):
        yield GaugeMetricFamily(_P + name, help_text, size)


@dataclass(frozen=True, slots=True)
class AnswerGauges(Collector):
    """What is kept of whole answers, asked for when someone looks."""

    uses: Callable[[], Iterable[Use]]

    def collect(self) -> Iterator[Metric]:
        entries = GaugeMetricFamily(
            _P + "response_cache_entries", "Entries in the store of answers.", labels=["kind"]
        )
        sizes = GaugeMetricFamily(_P + "response_cache_bytes", "Bytes they take, about.", labels=["kind"])
        totals: dict[str, list[int]] = {kind: [0, 0] for kind in get_args(Kind)}
        try:
            for use in self.uses():
                totals[use.kind][0] += use.num_entries
                totals[use.kind][1] += use.num_bytes
        except StoreError:
            return  # no figures are better than wrong ones; look-ups count the failure
        for kind, (num_entries, num_bytes) in totals.items():
            entries.add_metric([kind], num_entries)
            sizes.add_metric([kind], num_bytes)
        yield entries
        yield sizes


class HttpMetrics:
    """What came in over HTTP. ``route`` must be one of a fixed few, never a path as it was sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            _P + "http_requests", "HTTP requests by route and status.", ("route", "status"), registry=registry
        )
        self._duration = Histogram(
            _P + "http_request_duration_seconds",
            "From a request's head to the end of its answer.",
            ("route",),
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )

    def observe(self, route: str, status: int, duration_s: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._duration.labels(route).observe(duration_s)
