"""One sequence on its way through the engine, and where its tokens go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..kv.hashing import Namespace
from ..kv.lease import Lease
from ..kv.loading import Load
from ..kv.terms import NO_TERMS, Terms
from ..kv.transfer import Chain
from ..retention.keeping import Keeping, StepRows
from ..reuse.blend import Repair
from ..types import FinishReason, FloatArray, SamplingParams, Session, SlotCopy, TokenArray, TokenLogprob

if TYPE_CHECKING:
    from ..kv.archive import Archive
    from .blending import Blend


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """What one sequence cost. Times are clock readings in seconds; ``None`` where it did not come so far."""

    prompt_tokens: int
    cached_tokens: int
    approximate_tokens: int
    written_tokens: int
    output_tokens: int
    dropped_tokens: int
    recalled_tokens: int
    loaded_tokens: int
    load_s: float
    moved_tokens: int
    repaired_tokens: int
    deviation: float | None
    is_move_refused: bool
    arrived_s: float
    started_s: float | None
    first_token_s: float | None
    finished_s: float


class TokenSink(Protocol):
    """Where a sequence's tokens go. Called in the engine's thread: be quick, never wait, never raise."""

    def on_token(self, token_id: int, logprob: TokenLogprob | None) -> bool:
        """Take one token; true ends the sequence (a stop string was completed)."""

    def on_finish(
        self, reason: FinishReason, stop_token: int | None, stats: SequenceStats, error: Exception | None
    ) -> FinishReason:
        """Called exactly once, last; returns the reason as whoever asked is told it."""


class Sequence:
    """One sequence from arrival to end. Only the engine's thread touches it after ``submit``."""

    __slots__ = (
        "_tokens", "approximate_tokens", "archive", "archive_epoch", "arrived_s", "blend", "cached_tokens",
        "cancelled", "chain", "copies", "deadline_s", "deviation", "distribution", "first_token_s", "id",
        "is_move_refused", "keeping", "lease", "load", "load_s", "loaded_tokens", "max_new", "moved_tokens",
        "namespace", "num_choices", "num_computed", "num_exact", "num_offered", "num_output_asked",
        "num_overtaken", "num_prompt", "num_tokens", "offers_tools", "params", "recalled_tokens", "repair",
        "repaired_tokens", "rows", "session", "sink", "started_s", "stop_token_ids", "terms",
        "wants_distribution", "written_tokens",
    )  # fmt: skip

    def __init__(
        self,
        prompt: TokenArray,
        params: SamplingParams,
        namespace: Namespace,
        sink: TokenSink,
        *,
        max_new_tokens: int,
        stop_token_ids: frozenset[int],
        num_choices: int = 1,
        offers_tools: bool = False,
        session: Session | None = None,
        terms: Terms = NO_TERMS,
        deadline_s: float = math.inf,
        keeping: Keeping | None = None,
        repair: Repair | None = None,
        wants_distribution: bool = False,
    ) -> None:
        """``deadline_s``: seconds from arrival, after which it ends with what it has.

        ``keeping``: how it stays within a budget of KV that it is going to exceed. ``repair``: it may be
        answered with moved KV, of which so much is computed again. ``wants_distribution``: of its first
        token.
        """
        assert keeping is None or repair is None, "what is moved within a budget is not known"
        assert len(prompt) > 0, "a sequence has at least one token"
        assert max_new_tokens > 0, "a sequence asks for at least one token"
        self.id = -1
        self.params = params
        self.namespace = namespace
        self.terms = terms
        self.sink = sink
        self.max_new = max_new_tokens
        self.stop_token_ids = stop_token_ids
        self.num_choices = num_choices
        self.offers_tools = offers_tools
        self.session = session
        self.num_prompt = len(prompt)
        self.num_tokens = len(prompt)
        self._tokens = np.empty(len(prompt) + min(max_new_tokens, 256), dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self.num_computed = 0
        self.chain = Chain(terms)  # what the lower tier knows of it
        self.lease: Lease | None = None
        self.load: Load | None = None  # while it waits: what is being read into its lease's blocks
        self.copies: tuple[SlotCopy, ...] = ()  # which the lease asked for, until the load is done
        self.cancelled = False
        self.deadline_s = deadline_s  # from its arrival on a reading of the clock
        self.num_overtaken = 0
        self.cached_tokens = 0
        self.approximate_tokens = 0  # of the cached ones
        self.num_exact: int | None = None  # leading tokens, where not all are
        self.keeping = keeping
        self.archive: Archive | None = None  # of what it drops, where that is kept
        self.archive_epoch = 0
        self.num_offered = 0  # leading tokens whose KV is in the archive when it starts
        self.recalled_tokens = 0
        self.loaded_tokens = 0  # of the cached ones: from the lower tier
        self.load_s = 0.0  # and what that took
        self.num_output_asked = 0  # of its answer, when it last chose from everything there had been
        self.repair = repair
        self.blend: Blend | None = None  # while some of its KV is moved
        self.moved_tokens = 0
        self.repaired_tokens = 0  # of the moved ones
        self.deviation: float | None = None
        self.is_move_refused = False
        self.wants_distribution = wants_distribution
        self.distribution: FloatArray | None = None
        self.rows: StepRows | None = None  # of the step under way, where it is kept within a budget
        self.written_tokens = 0
        self.arrived_s = 0.0
        self.started_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def tokens(self) -> TokenArray:
        """Prompt and output so far (a view)."""
        return self._tokens[: self.num_tokens]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def lookup_tokens(self) -> TokenArray:
        """Of which a prefix may come from a cache (a view)."""
        tokens = self.tokens
        return tokens if self.keeping is None else tokens[: self.keeping.keep.num_usable_hit + 1]

    @property
    def num_past(self) -> int:
        """How many tokens its next row attends to, itself not counted."""
        return self.num_computed if self.keeping is None else self.keeping.num_places

    @property
    def num_wanted(self) -> int:
        """Tokens that it needs room for, as long as it is."""
        if self.keeping is None:
            return self.num_tokens
        return min(self.num_tokens, self.keeping.keep.budget_tokens)

    @property
    def num_committable(self) -> int:
        """So many leading tokens may be found by others once they are computed.

        Where a prompt is longer than its budget, those that surely stay: the others' blocks are about to be
        written over. Once tokens were dropped what follows them is no prefix of anything; nor is what stands
        behind moved ones.
        """
        if self.blend is not None:
            return min(self.num_computed, self.blend.exact_end)
        if self.keeping is None:
            return self.num_computed
        if self.keeping.num_dropped or self.num_offered:
            return 0
        keep = self.keeping.keep
        if not keep.is_drop_certain:
            return self.num_computed
        num_sure = min(self.num_computed, keep.num_head)
        return num_sure if num_sure > self.keeping.num_cached else 0  # of what was there nothing is new

    @property
    def is_prefilling(self) -> bool:
        """More than its newest token has no KV yet."""
        return self.num_tokens - self.num_computed > 1 or self.num_computed < self.num_prompt

    @property
    def num_left(self) -> int:
        """Rows still to compute of what it is so far."""
        if self.blend is not None and self.blend.num_left:
            return self.blend.num_left
        return self.num_tokens - self.num_computed

    def next_positions(self, num_rows: int) -> TokenArray:
        """Of its next rows; with gaps where KV was moved."""
        blend = self.blend
        if blend is not None and blend.num_left:
            assert blend.rows is not None
            return blend.rows[blend.num_done : blend.num_done + num_rows]
        return np.arange(self.num_computed, self.num_computed + num_rows, dtype=np.int32)

    def advance(self, num_rows: int) -> None:
        """So many rows have their KV."""
        blend = self.blend
        if blend is None or not blend.num_left:
            self.num_computed += num_rows
            return
        assert blend.rows is not None
        blend.num_done += num_rows
        self.num_computed = int(blend.rows[blend.num_done]) if blend.num_left else self.num_tokens

    def forget_blend(self) -> None:
        """Nothing of it is moved (any more)."""
        if self.blend is not None:
            self.blend.release()
            self.blend = None
        self.moved_tokens = self.repaired_tokens = 0

    def stats(self, finished_s: float) -> SequenceStats:
        """What it cost, now that it has ended."""
        return SequenceStats(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens,
            approximate_tokens=self.approximate_tokens,
            written_tokens=self.written_tokens,
            output_tokens=self.num_output,
            recalled_tokens=self.recalled_tokens,
            loaded_tokens=self.loaded_tokens,
            load_s=self.load_s,
            moved_tokens=self.moved_tokens,
            repaired_tokens=self.repaired_tokens,
            deviation=self.deviation,
            is_move_refused=self.is_move_refused,
            dropped_tokens=0 if self.keeping is None else self.keeping.num_dropped,
            arrived_s=self.arrived_s,
            started_s=self.started_s,
            first_token_s=self.first_token_s,
            finished_s=finished_s,
        )

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self._tokens):
            grown = np.empty(2 * len(self._tokens), dtype=np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
