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
from ..types import FinishReason, SamplingParams, Session, SlotCopy, TokenArray, TokenLogprob

if TYPE_CHECKING:
    from ..kv.archive import Archive


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
        "_tokens", "approximate_tokens", "archive", "archive_epoch", "arrived_s", "cached_tokens",
        "cancelled", "chain", "copies", "deadline_s", "first_token_s", "id", "keeping", "lease", "load",
        "load_s", "loaded_tokens", "max_new", "namespace", "num_choices", "num_computed", "num_exact",
        "num_offered", "num_output_asked", "num_overtaken", "num_prompt", "num_tokens", "offers_tools",
        "params", "recalled_tokens", "rows", "session", "sink", "started_s", "stop_token_ids", "terms",
        "written_tokens",
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
    ) -> None:
        """``deadline_s``: seconds from arrival, after which it ends with what it has.

        ``keeping``: how it stays within a budget of KV that it is going to exceed.
        """
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
        written over. Once tokens were dropped what follows them is no prefix of anything.
        """
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

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self._tokens):
            grown = np.empty(2 * len(self._tokens), dtype=np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
