"""Every series there is: its name, kind and meaning, and the labels it has with the values they can take.

What is counted (:mod:`ostinato.observe`), drawn and watched (:mod:`ostinato.monitoring`) is counted, drawn
and watched by these. Names are vLLM's where the meaning is the same, with our own prefix. Tokens, bytes and
seconds, never ratios: those are for whoever draws them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from .events import AnswerFate, AnswerMiss, AnswerOutcome, EvictionReason, RequestPattern, ReuseLayer

PREFIX: Final = "ostinato_"

SeriesKind: TypeAlias = Literal["counter", "gauge", "histogram"]

TTFT_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
ITL_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0),
)
REQUEST_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
AGE_BUCKETS_S: Final = (1.0, 10.0, 60.0, 600.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0, 2_592_000.0)
KL_BUCKETS: Final = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
STEP_ROW_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Series:
    """One family of series.

    Attributes:
        name: without the prefix, and a counter's without ``_total``.
        labels: those it has, mostly one; the last tells most, ``label``.
        values: all values that one can have; empty where they are bounded in number, but not known here.
        buckets: of a histogram.
    """

    name: str
    kind: SeriesKind
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        return self.labels[-1] if self.labels else ""

    @property
    def full_name(self) -> str:
        """As it is exposed; a histogram's without ``_bucket``, ``_sum`` and ``_count``."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


def _counter(name: str, text: str, label: str = "", values: tuple[str, ...] = ()) -> Series:
    return Series(name, "counter", text, (label,) if label else (), values)


def _gauge(name: str, text: str, label: str = "", values: tuple[str, ...] = ()) -> Series:
    return Series(name, "gauge", text, (label,) if label else (), values)


def _histogram(
    name: str, text: str, buckets: tuple[float, ...], label: str = "", values: tuple[str, ...] = ()
) -> Series:
    return Series(name, "histogram", text, (label,) if label else (), values, buckets)


_LAYERS: Final = get_args(ReuseLayer)
_REASONS: Final = get_args(EvictionReason)
_PATTERNS: Final = get_args(RequestPattern)
STARTS: Final = ("cold", "warm")

# ---------------------------------------------------------------- what requests reuse

REUSE_LOOKUP = _counter(
    "reuse_lookup_tokens",
    "Prompt tokens of requests that ended and that a layer was asked for.",
    "layer",
    _LAYERS,
)
REUSE_HIT = _counter(
    "reuse_hit_tokens", "Those of them that the layer had, and that were used.", "layer", _LAYERS
)
REUSE_RECOMPUTED = _counter(
    "reuse_recomputed_tokens", "Tokens that a layer had or had had, and that were computed all the same.",
    "layer", _LAYERS,
)  # fmt: skip
PATTERN_PROMPT = _counter(
    "pattern_prompt_tokens", "Prompt tokens by what kind of request they were of.", "pattern", _PATTERNS
)
PATTERN_CACHED = _counter(
    "pattern_cached_tokens", "Those of them that were not computed.", "pattern", _PATTERNS
)
NAMED = _counter("named_prompt_requests", "Requests by the named prompt they used.", "prompt")
NAMED_PROMPT = _counter("named_prompt_tokens", "Prompt tokens of requests with a named prompt.", "prompt")
NAMED_CACHED = _counter("named_prompt_cached_tokens", "Those of them that were found in the cache.", "prompt")
SAVED = _counter(
    "ttft_saved_seconds", "Time to first token that was saved, as what"
    " computing the tokens would have taken.",
    "layer", _LAYERS,
)  # fmt: skip

# ---------------------------------------------------------------- moved KV

REPAIRED = _counter("repaired_prompt_tokens", "Prompt tokens with moved KV that were computed again.")
MOVE_REFUSED = _counter(
    "move_refused_requests", "Requests computed exactly because too much of moved KV would have deviated."
)
MOVED_KL = _histogram(
    "moved_kl_nats", "Divergence of first tokens with moved KV from exact ones, where verified.", KL_BUCKETS
)
MOVE_VERIFIED = _counter(
    "move_verified_requests", "Answers with moved KV that were verified.", "first_token", ("same", "other")
)
MOVED_OFF = _gauge("moved_off", "1: moved KV differed too much and is not used any more.")

# ---------------------------------------------------------------- the prefix cache

QUERIES = _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
HITS = _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
STORED_TOKENS = _counter("prefix_cache_stored_tokens", "Tokens that became findable.")
STORED_BLOCKS = _counter("prefix_cache_stored_blocks", "Blocks the index took for them.")
EVICTED_TOKENS = _counter("prefix_cache_evicted_tokens", "Tokens given up.", "reason", _REASONS)
EVICTED_BLOCKS = _counter("prefix_cache_evicted_blocks", "Blocks given up.", "reason", _REASONS)
BLOCKS = _gauge("kv_blocks", "Blocks of KV by what becomes of them; together they are the capacity.", "state",
                ("held", "evictable", "free"))  # fmt: skip
PINNED = _gauge("kv_pinned_blocks", "Of the blocks held: those that are pinned.")

# ---------------------------------------------------------------- requests

PROMPT = _counter("prompt_tokens", "Prompt tokens of requests that ended, cached ones included.")
GENERATED = _counter("generation_tokens", "Tokens generated for requests that ended.")
FINISHED = _counter(
    "requests_finished", "Requests that ended, in whatever way.", "finish_reason",
    ("stop", "length", "tool_calls", "abort", "error"),
)  # fmt: skip
TTFT = _histogram(
    "time_to_first_token_seconds",
    "Arrival to first token, queueing included; warm: half of the prompt or more was not computed.",
    TTFT_BUCKETS_S, "start", STARTS,
)  # fmt: skip
QUEUE = _histogram("request_queue_time_seconds", "Arrival to the start of the prefill.", TTFT_BUCKETS_S)
TPOT = _histogram(
    "request_time_per_output_token_seconds", "A request's mean time per token after its first.", ITL_BUCKETS_S
)
E2E = _histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S)
ITL = _histogram(
    "inter_token_latency_seconds",
    "Duration of a step, once for each sequence that waited for its next token meanwhile.",
    ITL_BUCKETS_S,
)
ROWS = _histogram("iteration_tokens", "Rows computed in a step.", tuple(map(float, STEP_ROW_BUCKETS)))
PREEMPTIONS = _counter("num_preemptions", "Running sequences that had to give their blocks back.")
PREEMPTED = _counter("preempted_tokens", "Tokens of theirs that had been computed.")
RUNNING = _gauge("num_requests_running", "Requests in the engine.")
WAITING = _gauge("num_requests_waiting", "Requests that wait.")
TRIMMED = _counter("trimmed_requests", "Requests whose conversation was trimmed.", "strategy",
                   ("drop", "shorten", "sticky"))  # fmt: skip
TRIMMED_TOKENS = _counter("trimmed_tokens", "Prompt tokens that trimming left out.", "strategy",
                          ("drop", "shorten", "sticky"))  # fmt: skip
APPROXIMATE = _counter(
    "approximate_prompt_tokens", "Prompt tokens whose cached KV had been through a lossy codec."
)
KV_DROPPED = _counter(
    "kv_budget_dropped_tokens", "Tokens whose KV was dropped within a request's budget.", "method"
)

# ---------------------------------------------------------------- the shared tier

# The first two are named after vLLM's, which count the same of a cache outside of the engine.
TIER_QUERIES = _counter("external_prefix_cache_queries", "Tokens looked up in the shared tier.")
TIER_HITS = _counter("external_prefix_cache_hits", "Tokens that were there when looked up.")
TIER_LOADED = _counter("kv_tier_loaded_tokens", "Tokens read from the shared tier.")
TIER_REFUSED = _counter("kv_tier_refused_tokens", "Tokens there that were quicker computed.")
TIER_FAILED = _counter("kv_tier_failed_blocks", "Blocks found and then not readable: computed.")
TIER_READ = _counter("kv_tier_read_bytes", "Bytes read from the shared tier.")
TIER_WRITTEN = _counter("kv_tier_written_bytes", "Bytes written to the shared tier.")
TIER_LOAD = _histogram(
    "kv_tier_load_seconds", "Reading a request's blocks from the shared tier.", TTFT_BUCKETS_S
)
TIER_MISSES = _counter(
    "kv_tier_misses",
    "Blocks that could not be loaded, by reason; corrupt: the checksum is another.",
    "reason",
)
TIER_EVICTED = _counter("kv_tier_evicted_blocks", "Blocks that went, by reason.", "reason")
TIER_WRITE_BACK = _counter(
    "kv_tier_write_back_blocks",
    "Blocks sent to the shared tier by what became of them; dropped: no buffer was free.",
    "outcome",
)
TIER_CAPACITY = _gauge("kv_tier_capacity_bytes", "What the blocks in the shared tier may take.")
TIER_USED = _gauge("kv_tier_used_bytes", "What the blocks in the shared tier take.")
TIER_INDEX = _gauge("kv_tier_index_bytes", "What the shared tier's index takes.")
TIER_BUFFERED = _gauge("kv_tier_buffered_bytes", "Bytes on their way to the shared tier.")

# ---------------------------------------------------------------- whole answers

ANSWERS = _counter(
    "response_cache_requests", "Requests by what the response caches made of them.", "outcome",
    get_args(AnswerOutcome),
)  # fmt: skip
ANSWER_TOKENS = _counter(
    "response_cache_served_tokens", "Tokens of answers that were kept, not generated.", "outcome",
    ("exact", "semantic"),
)  # fmt: skip
ANSWER_MISSES = _counter(
    "response_cache_misses", "Look-ups in the store of answers that brought nothing.", "reason",
    get_args(AnswerMiss),
)  # fmt: skip
ANSWERS_FILED = _counter(
    "response_cache_filed",
    "Answers that were to be kept, by what became of them.",
    "fate",
    get_args(AnswerFate),
)
ANSWER_AGE = _histogram(
    "response_cache_age_seconds", "How old the answers were that were given again.", AGE_BUCKETS_S
)
SEMANTIC = _counter(
    "semantic_cache_requests", "Questions by what the semantic cache said to them.", "outcome"
)
SEMANTIC_TIME = _histogram(
    "semantic_cache_decision_seconds", "Embedding, search and judgement of a question.", ITL_BUCKETS_S
)
SEMANTIC_CHECKS = Series(
    "semantic_cache_checks",
    "counter",
    "Semantic answers that were compared with the model's, or rated.",
    ("source", "result"),
)
ANSWER_ENTRIES = _gauge("response_cache_entries", "Entries in the store of answers.", "kind")
ANSWER_BYTES = _gauge("response_cache_bytes", "Bytes they take, about.", "kind")

# ---------------------------------------------------------------- the gateway

UPSTREAM_TOKENS = Series(
    "upstream_tokens",
    "counter",
    "Tokens that upstreams reported, by what became of them.",
    ("vendor", "kind"),
)
UPSTREAM_DOLLARS = _counter("upstream_dollars", "What they cost at list price.", "vendor")
UPSTREAM_UNCACHED_DOLLARS = _counter(
    "upstream_uncached_dollars", "What they would have cost without a cache.", "vendor"
)
UPSTREAM_MISSES = Series(
    "upstream_cache_misses",
    "counter",
    "Requests that read less of an upstream's cache than went before, by why.",
    ("vendor", "reason"),
)

ROUTED = Series(
    "routed_requests", "counter", "Requests sent to a worker, by what decided.", ("worker", "reason")
)
ROUTED_HIT = _counter("routed_hit_tokens", "Tokens of them that were expected to be there.", "worker")
ROUTED_AGAIN = Series(
    "routed_again",
    "counter",
    "Requests sent elsewhere before their first token, by why.",
    ("worker", "reason"),
)
WORKER_OPEN = Series("worker_open", "gauge", "Whether a worker gets requests.", ("worker",))

# ---------------------------------------------------------------- HTTP

HTTP = Series("http_requests", "counter", "HTTP requests by route and status.", ("route", "status"))
HTTP_SECONDS = _histogram(
    "http_request_duration_seconds",
    "From a request's head to the end of its answer.",
    REQUEST_BUCKETS_S,
    "route",
)

ALL: Final[tuple[Series, ...]] = tuple(
    sorted((value for value in list(globals().values()) if isinstance(value, Series)), key=lambda s: s.name)
)
