"""Events to Prometheus: what :mod:`ostinato.series` names is counted here.

Nothing of a user's text becomes a label, and every label's values are a fixed few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from . import series as known
from .errors import StoreError
from .events import (
    AnswerFiled,
    AnswerLookedUp,
    AnswerMissed,
    BlocksEvicted,
    BlocksStored,
    Event,
    MoveVerified,
    Preempted,
    PrefixLookedUp,
    RequestFinished,
    RequestServed,
    ReuseLayer,
    SemanticChecked,
    SemanticLookedUp,
    StepFinished,
    TierLoaded,
    reuse_of,
)
from .kv.transfer import TierReport
from .records import pattern_of
from .responses.stores.base import Kind, Use
from .series import Series
from .types import GenerationRequest, Usage

_WARM_SHARE: Final = 0.5
_MIN_PREFILL_ROWS: Final = 16
_SMOOTHING: Final = 0.1


def new_registry() -> CollectorRegistry:
    """A registry of its own for each server: two in one process do not mix."""
    return CollectorRegistry(auto_describe=True)


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The registry in Prometheus' text format, and its content type."""
    families = list(registry.collect())
    text = generate_latest(_WithoutCreated([each for each in families if not isinstance(each, _Named)]))
    named = (each.lines() for each in families if isinstance(each, _Named))
    return b"".join((text, *named)), CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True, slots=True)
class _WithoutCreated(Collector):
    """Leaves out when each series was made: three lines in ten, of which Prometheus has no use."""

    families: Iterable[Metric]

    def collect(self) -> Iterator[Metric]:
        for family in self.families:
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class _Named(CounterMetricFamily):
    """A family with a value for each of a thousand names, which writes its lines itself: it is ten times as
    fast as by way of samples, of which it has none."""

    def __init__(self, series: Series, values: Sequence[tuple[str, float]]) -> None:
        super().__init__(known.PREFIX + series.name, series.text, labels=[series.label])
        self._series = series
        self._values = values

    def lines(self) -> bytes:
        name, label = self._series.full_name, self._series.label
        lines = [f"# HELP {name} {self._series.text}", f"# TYPE {name} counter"]
        lines += [f'{name}{{{label}="{value}"}} {count}' for value, count in self._values]
        return ("\n".join(lines) + "\n").encode()


class NamedCounts(Collector):
    """Requests, prompt tokens and cached tokens by named prompt. The names are those of a registry, which
    takes a limited number of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts: dict[str, list[int]] = {}
        self._lock = Lock()  # kept answers are counted by who asks, the others by the engine
        registry.register(self)

    def add(self, name: str, num_tokens: int, num_cached: int) -> None:
        with self._lock:
            counts = self._counts.setdefault(name, [0, 0, 0])
            counts[0] += 1
            counts[1] += num_tokens
            counts[2] += num_cached

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            rows = [(_escaped(name), tuple(counts)) for name, counts in self._counts.items()]
        for place, series in enumerate((known.NAMED, known.NAMED_PROMPT, known.NAMED_CACHED)):
            yield _Named(series, [(name, float(counts[place])) for name, counts in rows])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class PrometheusObserver:
    """An observer (:data:`ostinato.events.Observer`) that counts. It neither raises nor waits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(series: Series) -> Counter:
            return counter_of(series, registry)

        def histogram(series: Series) -> Histogram:
            return histogram_of(series, registry)

        self._queries = counter(known.QUERIES)
        self._hits = counter(known.HITS)
        self._stored_tokens = counter(known.STORED_TOKENS)
        self._stored_blocks = counter(known.STORED_BLOCKS)
        self._evicted_tokens = counter(known.EVICTED_TOKENS)
        self._evicted_blocks = counter(known.EVICTED_BLOCKS)
        self._preemptions = counter(known.PREEMPTIONS)
        self._preempted = counter(known.PREEMPTED)
        self._prompt = counter(known.PROMPT)
        self._generated = counter(known.GENERATED)
        self._finished = counter(known.FINISHED)
        self._trimmed = counter(known.TRIMMED)
        self._trimmed_tokens = counter(known.TRIMMED_TOKENS)
        self._approximate = counter(known.APPROXIMATE)
        self._kv_dropped = counter(known.KV_DROPPED)
        self._repaired = counter(known.REPAIRED)
        self._refused = counter(known.MOVE_REFUSED)
        self._moved_kl = histogram(known.MOVED_KL)
        self._verified = counter(known.MOVE_VERIFIED)
        self._moved_off = Gauge(known.PREFIX + known.MOVED_OFF.name, known.MOVED_OFF.text, registry=registry)
        self._looked_up = counter(known.REUSE_LOOKUP)
        self._reused = counter(known.REUSE_HIT)
        self._recomputed = counter(known.REUSE_RECOMPUTED)
        self._saved = counter(known.SAVED)
        self._of_pattern = counter(known.PATTERN_PROMPT)
        self._of_pattern_cached = counter(known.PATTERN_CACHED)
        self._named = NamedCounts(registry)
        self._ttft = histogram(known.TTFT)
        self._queue = histogram(known.QUEUE)
        self._tpot = histogram(known.TPOT)
        self._total = histogram(known.E2E)
        self._itl = histogram(known.ITL)
        self._rows = histogram(known.ROWS)
        self._load = histogram(known.TIER_LOAD)
        self._answers = counter(known.ANSWERS)
        self._answer_tokens = counter(known.ANSWER_TOKENS)
        self._answer_misses = counter(known.ANSWER_MISSES)
        self._answers_filed = counter(known.ANSWERS_FILED)
        self._answer_age = histogram(known.ANSWER_AGE)
        self._row_s = 0.0  # what a row of a prompt took of late
        self._semantic = counter(known.SEMANTIC)
        self._semantic_time = histogram(known.SEMANTIC_TIME)
        self._semantic_checks = counter(known.SEMANTIC_CHECKS)

    def __call__(self, event: Event) -> None:
        match event:
            case StepFinished():
                self._note_step(event)
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
                self._preempted.inc(event.num_tokens)
                self._recomputed.labels("arena").inc(event.num_tokens)
            case TierLoaded():
                self._load.observe(event.duration_s)
            case RequestFinished():
                self._request_finished(event)
            case RequestServed():
                was_joined = event.usage.served is not None and event.usage.served.layer == "joined"
                self._count_reuse(event.usage, event.request, ("exact",) if was_joined else ())
            case AnswerLookedUp():
                self._answers.labels(event.outcome).inc()
                for layer in event.layers:
                    self._looked_up.labels(layer).inc(event.num_prompt_tokens)
                if event.outcome in ("exact", "semantic"):
                    self._answer_age.observe(event.age_s)
                    self._answer_tokens.labels(event.outcome).inc(event.num_tokens)
            case AnswerMissed():
                self._answer_misses.labels(event.reason).inc()
            case MoveVerified():
                self._moved_kl.observe(event.kl)
                self._verified.labels("same" if event.is_same_token else "other").inc()
                self._moved_off.set(event.is_off)
            case AnswerFiled():
                self._answers_filed.labels(event.fate).inc()
            case SemanticLookedUp():
                self._semantic.labels(event.outcome).inc()
                self._semantic_time.observe(event.duration_s)
            case SemanticChecked():
                self._semantic_checks.labels(event.source, "right" if event.is_right else "wrong").inc()

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
        asked: tuple[ReuseLayer, ...] = ("arena",)
        if (reuse := usage.reuse) is not None:
            asked = ("arena", "non_prefix")
            self._repaired.inc(reuse.repaired_tokens)
            self._refused.inc(reuse.is_refused)
        self._count_reuse(usage, event.request, asked)
        if usage.completion_tokens == 0:
            return  # it never had a first token: its times would be of something else
        is_warm = usage.cached_tokens + usage.recalled_tokens >= _WARM_SHARE * usage.prompt_tokens
        self._ttft.labels("warm" if is_warm else "cold").observe(usage.ttft_s)
        self._queue.observe(usage.queue_s)
        self._total.observe(usage.total_s)
        if usage.completion_tokens > 1 and event.finish_reason in ("stop", "length", "tool_calls"):
            self._tpot.observe((usage.total_s - usage.ttft_s) / (usage.completion_tokens - 1))

    def _count_reuse(
        self, usage: Usage, request: GenerationRequest | None, asked: tuple[ReuseLayer, ...]
    ) -> None:
        """``asked``: the layers that were asked for all of the prompt. The shared tier counts for itself."""
        for layer in asked:
            self._looked_up.labels(layer).inc(usage.prompt_tokens)
        reuse = reuse_of(usage)
        for layer, num_tokens in reuse.items():
            self._reused.labels(layer).inc(num_tokens)
            self._saved.labels(layer).inc(num_tokens * self._row_s)
        num_reused = sum(reuse.values())
        if request is not None:
            pattern = pattern_of(request)
            self._of_pattern.labels(pattern).inc(usage.prompt_tokens)
            self._of_pattern_cached.labels(pattern).inc(num_reused)
        if usage.prompt_name:
            self._named.add(usage.prompt_name, usage.prompt_tokens, num_reused)

    def _note_step(self, event: StepFinished) -> None:
        self._rows.observe(event.num_rows)
        for _ in range(event.decode_rows):
            self._itl.observe(event.duration_s)
        num_prompt_rows = event.num_rows - event.decode_rows
        if num_prompt_rows >= max(_MIN_PREFILL_ROWS, event.decode_rows):
            row_s = event.duration_s / num_prompt_rows
            self._row_s += _SMOOTHING * (row_s - self._row_s) if self._row_s else row_s


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
        yield _gauge(known.RUNNING, load.num_running)
        yield _gauge(known.WAITING, load.num_waiting)
        states = {"held": load.num_held_blocks, "evictable": load.num_evictable_blocks}
        yield _gauges(known.BLOCKS, {**states, "free": load.num_free_blocks})
        yield _gauge(known.PINNED, load.num_pinned_blocks)
        if load.tier is not None:
            yield from _tier_families(load.tier)


def _tier_families(tier: TierReport) -> Iterator[Metric]:
    loads, write_back = tier.loads, tier.write_back
    for series, count in (
        (known.TIER_QUERIES, loads.looked_up_tokens),
        (known.TIER_HITS, loads.hit_tokens),
        (known.TIER_LOADED, loads.loaded_tokens),
        (known.TIER_REFUSED, loads.refused_tokens),
        (known.TIER_FAILED, loads.failed_blocks),
        (known.TIER_READ, loads.loaded_bytes),
        (known.TIER_WRITTEN, write_back.stored_bytes),
    ):
        yield CounterMetricFamily(known.PREFIX + series.name, series.text, count)
    dropped = {"dropped": write_back.dropped, "unfit": write_back.unfit}
    yield _counts(known.TIER_MISSES, tier.misses)
    yield _counts(known.TIER_EVICTED, tier.evictions)
    yield _counts(known.TIER_WRITE_BACK, {**tier.outcomes, **dropped})
    for series, size in (
        (known.TIER_CAPACITY, tier.capacity_bytes),
        (known.TIER_USED, tier.used_bytes),
        (known.TIER_INDEX, tier.index_bytes),
        (known.TIER_BUFFERED, tier.buffered_bytes),
    ):
        yield _gauge(series, size)


def _gauge(series: Series, value: float) -> Metric:
    return GaugeMetricFamily(known.PREFIX + series.name, series.text, value)


def _gauges(series: Series, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(known.PREFIX + series.name, series.text, labels=[series.label])
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _counts(series: Series, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(known.PREFIX + series.name, series.text, labels=[series.label])
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def counter_of(series: Series, registry: CollectorRegistry | None) -> Counter:
    """The family of a series; with every value of its label from the start, where these are known."""
    family = Counter(known.PREFIX + series.name, series.text, series.labels, registry=registry)
    for value in series.values:
        family.labels(value)
    return family


def gauge_of(series: Series, registry: CollectorRegistry | None) -> Gauge:
    """Likewise."""
    return Gauge(known.PREFIX + series.name, series.text, series.labels, registry=registry)


def histogram_of(series: Series, registry: CollectorRegistry | None) -> Histogram:
    """Likewise."""
    family = Histogram(
        known.PREFIX + series.name, series.text, series.labels, buckets=series.buckets, registry=registry
    )
    for value in series.values:
        family.labels(value)
    return family


@dataclass(frozen=True, slots=True)
class AnswerGauges(Collector):
    """What is kept of whole answers, asked for when someone looks."""

    uses: Callable[[], Iterable[Use]]

    def collect(self) -> Iterator[Metric]:
        totals: dict[str, list[int]] = {kind: [0, 0] for kind in get_args(Kind)}
        try:
            for use in self.uses():
                totals[use.kind][0] += use.num_entries
                totals[use.kind][1] += use.num_bytes
        except StoreError:
            return  # no figures are better than wrong ones; look-ups count the failure
        yield _gauges(known.ANSWER_ENTRIES, {kind: num_entries for kind, (num_entries, _) in totals.items()})
        yield _gauges(known.ANSWER_BYTES, {kind: num_bytes for kind, (_, num_bytes) in totals.items()})


class HttpMetrics:
    """What came in over HTTP. ``route`` must be one of a fixed few, never a path as it was sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = counter_of(known.HTTP, registry)
        self._duration = histogram_of(known.HTTP_SECONDS, registry)

    def observe(self, route: str, status: int, duration_s: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._duration.labels(route).observe(duration_s)
