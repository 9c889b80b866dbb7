"""What is drawn and watched of a server: panels in rows, and alerts, made of the series there are.

Every query is made of :mod:`ostinato.series`, so one that names a series that is not there cannot be written.
Ratios are formed here: of sums over a time, never of averages. What is shown as a ratio is nothing, and not a
fault, where nothing was asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from . import series as s
from .series import Series

WINDOW: Final = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """``expression`` has ``$__rate_interval`` for its window; ``legend`` names the lines of its result."""

    expression: str
    legend: str

    def at(self, window: str) -> str:
        """The expression over a window of one's own: ``5m``."""
        return self.expression.replace(WINDOW, window)


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. ``unit`` is Grafana's."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Alert:
    """Goes off when ``value`` has been over (``sign`` ``>``) or under ``limit`` for ``lasting``.

    ``only``: and as long as this has a value, too.
    """

    name: str
    value: str
    sign: str
    limit: str
    lasting: str
    severity: str
    summary: str
    text: str
    only: str = ""

    @property
    def expression(self) -> str:
        return f"({self.value}) {self.sign} ({self.limit})" + (f" and ({self.only})" if self.only else "")

    @property
    def sides(self) -> tuple[str, str]:
        """What is compared."""
        return self.value, self.limit


def _rate(series: Series, *, by: bool = False, window: str = WINDOW, suffix: str = "") -> str:
    of = f" by ({series.label})" if by else ""
    return f"sum{of} (rate({series.full_name}{suffix}[{window}]))"


def _only(series: Series, value: str, window: str = WINDOW) -> str:
    return f'sum (rate({series.full_name}{{{series.label}="{value}"}}[{window}]))'


def _share(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def _ratio(part: Series, whole: Series, *, by: bool = False, window: str = WINDOW) -> str:
    return _share(_rate(part, by=by, window=window), _rate(whole, by=by, window=window))


def _quantile(share: float, series: Series, where: str = "") -> str:
    inner = f"sum by (le) (rate({series.full_name}_bucket{where}[{WINDOW}]))"
    return f"histogram_quantile({share}, {inner})"


def _mean(series: Series) -> str:
    return _share(_rate(series, suffix="_sum"), _rate(series, suffix="_count"))


def _lines(*series: Series, legend: str = "") -> tuple[Query, ...]:
    return tuple(
        Query(
            _rate(each, by=bool(each.label)), f"{{{{{each.label}}}}}" if each.label else legend or each.name
        )
        for each in series
    )


def _values(*series: Series) -> tuple[Query, ...]:
    return tuple(
        Query(
            f"sum{f' by ({each.label})' if each.label else ''} ({each.full_name})",
            f"{{{{{each.label}}}}}" if each.label else each.name,
        )
        for each in series
    )


ROWS: Final[tuple[Row, ...]] = (
    Row(
        "What was saved",
        (
            Panel(
                "Hit rate",
                "Prompt tokens that were not computed, of those looked up.",
                "percentunit",
                (
                    Query(_ratio(s.HITS, s.QUERIES), "prefix cache"),
                    Query(_ratio(s.TIER_HITS, s.TIER_QUERIES), "shared tier"),
                ),
            ),
            Panel(
                "Hit rate by layer",
                "Of the tokens each layer was asked for.",
                "percentunit",
                (Query(_ratio(s.REUSE_HIT, s.REUSE_LOOKUP, by=True), "{{layer}}"),),
            ),
            Panel("Tokens reused by layer", "Prompt tokens a second.", "none", _lines(s.REUSE_HIT)),
            Panel(
                "Tokens asked and computed again",
                "Looked up, and computed although they had been there.",
                "none",
                (*_lines(s.REUSE_LOOKUP), Query(_rate(s.REUSE_RECOMPUTED, by=True), "again: {{layer}}")),
            ),
            Panel(
                "Seconds of first tokens saved",
                "Each second, as what computing would have taken.",
                "s",
                _lines(s.SAVED),
            ),
            Panel(
                "Benefit of the shared tier",
                "Seconds saved for each second of loading.",
                "none",
                (Query(_share(_only(s.SAVED, "shared"), _rate(s.TIER_LOAD, suffix="_sum")), "benefit"),),
            ),
            Panel(
                "Money saved",
                "Dollars an hour: seconds saved at the price of the machine.",
                "currencyUSD",
                (Query(f"{_rate(s.SAVED)} * $dollars_per_hour", "dollars an hour"),),
            ),
            Panel(
                "Vendors",
                "Dollars an hour that upstreams cost.",
                "currencyUSD",
                (Query(f"3600 * {_rate(s.UPSTREAM_DOLLARS, by=True)}", "{{vendor}}"),),
            ),
            Panel(
                "Saved at vendors",
                "Dollars an hour that their caches saved.",
                "currencyUSD",
                (
                    Query(
                        f"3600 * ({_rate(s.UPSTREAM_UNCACHED_DOLLARS)} - {_rate(s.UPSTREAM_DOLLARS)})",
                        "dollars an hour",
                    ),
                ),
            ),
            Panel(
                "Vendors' misses",
                "Requests a second that read less than went before, by why.",
                "reqps",
                _lines(s.UPSTREAM_MISSES),
            ),
            Panel(
                "Vendors' tokens",
                "Tokens a second, by what became of them.",
                "none",
                _lines(s.UPSTREAM_TOKENS),
            ),
            Panel(
                "Routed",
                "Requests a second, by what decided where they go: prefix and session are reuse.",
                "reqps",
                _lines(s.ROUTED),
            ),
            Panel(
                "Expected hits of workers",
                "Tokens a second that were expected to be where requests went.",
                "none",
                _lines(s.ROUTED_HIT),
            ),
            Panel(
                "Sent elsewhere",
                "Requests a second that a worker failed or refused before their first token.",
                "reqps",
                _lines(s.ROUTED_AGAIN),
            ),
            Panel(
                "Workers that get requests",
                "1: gets requests; 0: ill or drained.",
                "none",
                (Query(s.WORKER_OPEN.full_name, "{{worker}}"),),
            ),
        ),
    ),
    Row(
        "Who reuses",
        (
            Panel(
                "Hit rate by kind of request",
                "Averages over all requests hide this.",
                "percentunit",
                (Query(_ratio(s.PATTERN_CACHED, s.PATTERN_PROMPT, by=True), "{{pattern}}"),),
            ),
            Panel(
                "Hit rate by named prompt",
                "The twenty with the most tokens.",
                "percentunit",
                (
                    Query(
                        f"topk(20, {_ratio(s.NAMED_CACHED, s.NAMED_PROMPT, by=True)})",
                        "{{prompt}}",
                    ),
                ),
            ),
            Panel(
                "Requests by named prompt",
                "A second; the twenty most used.",
                "reqps",
                (Query(f"topk(20, {_rate(s.NAMED, by=True)})", "{{prompt}}"),),
            ),
        ),
    ),
    Row(
        "Times",
        (
            Panel(
                "Time to first token",
                "Half of them are faster: cold against warm.",
                "s",
                tuple(Query(_quantile(0.5, s.TTFT, f'{{start="{start}"}}'), start) for start in s.STARTS),
            ),
            Panel(
                "Time to first token, slowest",
                "One in a hundred is slower.",
                "s",
                tuple(Query(_quantile(0.99, s.TTFT, f'{{start="{start}"}}'), start) for start in s.STARTS),
            ),
            Panel(
                "Queue",
                "Arrival to the start of the prefill.",
                "s",
                (Query(_quantile(0.5, s.QUEUE), "half"), Query(_quantile(0.99, s.QUEUE), "99 %")),
            ),
            Panel(
                "Between tokens",
                "The pause that a reader sees.",
                "s",
                (
                    Query(_quantile(0.5, s.ITL), "half"),
                    Query(_quantile(0.99, s.ITL), "99 %"),
                    Query(_mean(s.TPOT), "mean of a request"),
                ),
            ),
            Panel(
                "Whole requests",
                "Arrival to last token.",
                "s",
                (Query(_quantile(0.5, s.E2E), "half"), Query(_quantile(0.99, s.E2E), "99 %")),
            ),
            Panel("Rows in a step", "The mean.", "none", (Query(_mean(s.ROWS), "rows"),)),
        ),
    ),
    Row(
        "Requests",
        (
            Panel("Under way", "Running and waiting.", "none", _values(s.RUNNING, s.WAITING)),
            Panel("Ended", "Requests a second.", "reqps", _lines(s.FINISHED)),
            Panel("Tokens", "A second.", "none", _lines(s.PROMPT, s.GENERATED)),
            Panel(
                "Thrown out",
                "Sequences a second that gave blocks back, and their tokens.",
                "none",
                _lines(s.PREEMPTIONS, s.PREEMPTED),
            ),
            Panel("Trimmed", "Requests a second, and tokens.", "none", _lines(s.TRIMMED, s.TRIMMED_TOKENS)),
            Panel(
                "HTTP",
                "Requests a second by status, and how long half of them take.",
                "none",
                (*_lines(s.HTTP), Query(_quantile(0.5, s.HTTP_SECONDS), "half, seconds")),
            ),
        ),
    ),
    Row(
        "Memory",
        (
            Panel("Blocks", "Held, evictable and free are the capacity.", "none", _values(s.BLOCKS)),
            Panel(
                "Held",
                "Part of the capacity, and pinned of it.",
                "percentunit",
                (
                    Query(f'sum ({s.BLOCKS.full_name}{{state="held"}}) / sum ({s.BLOCKS.full_name})', "held"),
                    Query(f"sum ({s.PINNED.full_name}) / sum ({s.BLOCKS.full_name})", "pinned"),
                ),
            ),
            Panel("Evicted", "Tokens a second, by reason.", "none", _lines(s.EVICTED_TOKENS)),
            Panel(
                "Stored and evicted blocks", "A second.", "none", _lines(s.STORED_BLOCKS, s.EVICTED_BLOCKS)
            ),
            Panel("Stored tokens", "A second.", "none", _lines(s.STORED_TOKENS)),
            Panel(
                "Approximate and dropped",
                "Tokens a second that lossy codecs and budgets touched.",
                "none",
                _lines(s.APPROXIMATE, s.KV_DROPPED),
            ),
        ),
    ),
    Row(
        "Shared tier",
        (
            Panel("Bytes moved", "A second.", "Bps", _lines(s.TIER_READ, s.TIER_WRITTEN)),
            Panel(
                "Loading",
                "Seconds for a request's blocks.",
                "s",
                (Query(_quantile(0.5, s.TIER_LOAD), "half"), Query(_quantile(0.99, s.TIER_LOAD), "99 %")),
            ),
            Panel(
                "Loaded and refused",
                "Tokens a second; refused: quicker computed.",
                "none",
                _lines(s.TIER_LOADED, s.TIER_REFUSED),
            ),
            Panel(
                "Misses",
                "Blocks a second that could not be loaded, by reason.",
                "none",
                (*_lines(s.TIER_MISSES), *_lines(s.TIER_FAILED, legend="failed")),
            ),
            Panel(
                "Write-back", "Blocks a second, by what became of them.", "none", _lines(s.TIER_WRITE_BACK)
            ),
            Panel(
                "Size",
                "Bytes.",
                "bytes",
                _values(s.TIER_CAPACITY, s.TIER_USED, s.TIER_INDEX, s.TIER_BUFFERED),
            ),
            Panel("Evicted", "Blocks a second, by reason.", "none", _lines(s.TIER_EVICTED)),
        ),
    ),
    Row(
        "Moved KV",
        (
            Panel(
                "Repaired and refused",
                "Tokens and requests a second that were computed after all.",
                "none",
                (*_lines(s.REPAIRED, legend="repaired"), *_lines(s.MOVE_REFUSED, legend="refused")),
            ),
            Panel(
                "Divergence where verified",
                "Nats, of first tokens.",
                "none",
                (Query(_quantile(0.5, s.MOVED_KL), "half"), Query(_quantile(0.99, s.MOVED_KL), "99 %")),
            ),
            Panel(
                "Verified",
                "Answers a second; and whether moved KV is off.",
                "none",
                (*_lines(s.MOVE_VERIFIED), *_values(s.MOVED_OFF)),
            ),
        ),
    ),
    Row(
        "Questions that mean the same",
        (
            Panel("Decisions", "Questions a second.", "reqps", _lines(s.SEMANTIC)),
            Panel(
                "Time of a decision",
                "Embedding, search and judgement.",
                "s",
                (
                    Query(_quantile(0.5, s.SEMANTIC_TIME), "half"),
                    Query(_quantile(0.99, s.SEMANTIC_TIME), "99 %"),
                ),
            ),
            Panel(
                "Error",
                "Of answers that were compared or rated: those that were wrong.",
                "percentunit",
                (Query(_share(_only(s.SEMANTIC_CHECKS, "wrong"), _rate(s.SEMANTIC_CHECKS)), "wrong"),),
            ),
        ),
    ),
    Row(
        "Whole answers",
        (
            Panel("Outcomes", "Requests a second.", "reqps", _lines(s.ANSWERS)),
            Panel("Served", "Tokens a second that were not generated.", "none", _lines(s.ANSWER_TOKENS)),
            Panel("Not found", "Look-ups a second, by reason.", "none", _lines(s.ANSWER_MISSES)),
            Panel("Filed", "Answers a second, by what became of them.", "none", _lines(s.ANSWERS_FILED)),
            Panel(
                "Age", "Half of the answers are younger.", "s", (Query(_quantile(0.5, s.ANSWER_AGE), "age"),)
            ),
            Panel("Kept", "Entries and bytes.", "none", _values(s.ANSWER_ENTRIES, s.ANSWER_BYTES)),
        ),
    ),
)

ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        "OstinatoHitRateFell",
        _ratio(s.HITS, s.QUERIES, window="10m"),
        "<",
        f"0.5 * {_ratio(s.HITS, s.QUERIES, window='6h')}",
        "10m",
        "warning",
        "Half of the usual hit rate, or less.",
        "Something changed in the prompts, or the cache was lost: ostinato doctor says which.",
        f"{_rate(s.QUERIES, window='10m')} > 10",
    ),
    Alert(
        "OstinatoEvictionsRose",
        _only(s.EVICTED_TOKENS, "capacity", "10m"),
        ">",
        f"2 * {_only(s.EVICTED_TOKENS, 'capacity', '6h')}",
        "15m",
        "warning",
        "Twice the usual evictions for want of room.",
        "More is in use than the cache holds: give it more room, or a shared tier below it.",
        f"{_only(s.EVICTED_TOKENS, 'capacity', '10m')} > 0.5 * {_rate(s.STORED_TOKENS, window='10m')}",
    ),
    Alert(
        "OstinatoTierLoadsFail",
        _rate(s.TIER_FAILED, window="10m"),
        ">",
        "0",
        "5m",
        "critical",
        "Blocks of the shared tier cannot be read.",
        "Answers are right and slower: what cannot be read is computed. Look at the disk.",
    ),
    Alert(
        "OstinatoTierCorrupt",
        _only(s.TIER_MISSES, "corrupt", "10m"),
        ">",
        "0",
        "0m",
        "critical",
        "Blocks of the shared tier have another checksum than when they were written.",
        "They are not used. The disk, or memory, loses bits.",
    ),
    Alert(
        "OstinatoWriteBackDrops",
        _share(_only(s.TIER_WRITE_BACK, "dropped", "10m"), _rate(s.TIER_WRITE_BACK, window="10m")),
        ">",
        "0.1",
        "15m",
        "warning",
        "One in ten blocks finds no buffer on its way to the shared tier.",
        "It is not stored, and computed again some day: take a faster disk.",
    ),
    Alert(
        "OstinatoPreemptions",
        _rate(s.PREEMPTIONS, window="10m"),
        ">",
        "0.1",
        "10m",
        "warning",
        "Sequences are thrown out for want of room.",
        "Give KV more room, or run fewer at once.",
    ),
    Alert(
        "OstinatoPinnedTooMuch",
        f"sum ({s.PINNED.full_name}) / sum ({s.BLOCKS.full_name})",
        ">",
        "0.8",
        "15m",
        "warning",
        "Four fifths of all KV are pinned.",
        "Little is left for requests: ostinato cache pins shows which.",
    ),
    Alert(
        "OstinatoRequestsFail",
        _share(_only(s.FINISHED, "error", "10m"), _rate(s.FINISHED, window="10m")),
        ">",
        "0.05",
        "5m",
        "critical",
        "One in twenty requests fails.",
        "The server's log says why.",
    ),
    Alert(
        "OstinatoSemanticErrors",
        _share(_only(s.SEMANTIC_CHECKS, "wrong", "6h"), _rate(s.SEMANTIC_CHECKS, window="6h")),
        ">",
        "0.01",
        "15m",
        "critical",
        "More than one in a hundred semantic answers that were checked was wrong.",
        "Raise the threshold, check more of them, or switch the semantic cache off.",
    ),
    Alert(
        "OstinatoLoadingDoesNotPay",
        _share(_only(s.SAVED, "shared", "30m"), _rate(s.TIER_LOAD, window="30m", suffix="_sum")),
        "<",
        "1",
        "30m",
        "info",
        "Loading from the shared tier takes longer than computing would.",
        "Whatever is quicker computed is refused, once both speeds are known: the disk may be slow of late.",
    ),
)
