"""One sequence within its budget: how many rows it may run, when it must drop tokens, and which.

Pure bookkeeping. The engine asks before each step, brings the attention mass after it, and moves the KV.

A prompt that is longer than the budget is computed in chunks with drops between them. What the methods that
watch a window want to know, how the prompt's *end* attends, would be known only when it is too late; so the
prompt's last rows are computed along with every chunk, in places that the next chunk overwrites, at the
positions they will have. (FINCH, Corallo and Papotti, arXiv 2408.00167, puts the question before each chunk.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..errors import BudgetTooSmallError
from ..types import TokenArray
from .choice import Flags, choose
from .evidence import Evidence, Mass, Places
from .methods import Method

_MAX_CHUNK = 128
_MAX_PROBE = 32
_STRETCH = 64
"""Generated tokens between two summaries."""
_SAMPLED_EVERY = 4
"""Of generated rows one in so many is watched, where a method wants windows or queries: that costs little."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How one sequence is kept.

    Args:
        budget_tokens: the most tokens that have KV at any moment.
        method: what to keep.
        protected, preferred: flags over the prompt's tokens: what must stay, what stays before others.
        setting: what KV that was computed in this way has in common.
        renumbers: whether what stays is given the positions of its places.

    Raises:
        BudgetTooSmallError: what is protected does not leave room to work in.
    """

    budget_tokens: int
    method: Method
    protected: Flags
    preferred: Flags
    setting: tuple[str, ...] = ()
    renumbers: bool = False

    def __post_init__(self) -> None:
        num_protected = int(self.protected.sum())
        num_working = 1 + max(self.chunk + self.num_probe, self.slack)
        if num_protected + num_working > self.budget_tokens:
            raise BudgetTooSmallError(
                f"{num_protected} tokens are protected and {num_working} are needed to work with, "
                f"but the KV budget is {self.budget_tokens}",
                num_protected=num_protected,
                budget_tokens=self.budget_tokens,
            )

    @property
    def chunk(self) -> int:
        """Rows of a prompt in one step at most."""
        return max(1, min(_MAX_CHUNK, self.budget_tokens // 8))

    @property
    def num_probe(self) -> int:
        """Rows of the prompt's end that are computed along with every other chunk."""
        if self.method.watches != "window":
            return 0
        return min(_MAX_PROBE, self.budget_tokens // 8, len(self.protected))

    @property
    def slack(self) -> int:
        """So many tokens are dropped at once while an answer grows."""
        return max(1, min(_STRETCH, self.budget_tokens // 8))

    @property
    def num_prompt(self) -> int:
        return len(self.protected)

    @property
    def is_drop_certain(self) -> bool:
        """Whether the prompt alone is more than the budget."""
        return self.num_prompt > self.budget_tokens

    @property
    def num_head(self) -> int:
        """So many leading tokens are protected, one after the other."""
        open_places = np.flatnonzero(~self.protected)
        return int(open_places[0]) if len(open_places) else self.num_prompt

    @property
    def num_usable_hit(self) -> int:
        """The longest prefix that can be taken from a cache: it must leave room for the next step.

        None where the method asks all rows: those that were not computed could not be asked, and what stays
        would depend on what happened to be cached.
        """
        if self.method.watches in ("all", "queries"):
            return 0
        return self.budget_tokens - self.chunk - self.num_probe


@dataclass(slots=True)
class StepRows:
    """What a sequence does in a step: ``num_rows`` new ones, then ``probe`` (which tokens), of which the last
    ``num_watched`` (of all rows together) are watched; ``notes_queries``: how all of them ask is noted."""

    num_rows: int
    probe: TokenArray
    num_watched: int
    notes_queries: bool = False


_NO_PROBE = np.zeros(0, np.int32)


@dataclass(slots=True)
class Keeping:
    """The state of one sequence that is kept by ``keep`` on a model of ``num_layers`` × ``num_heads`` (key
    heads)."""

    keep: Keep
    num_layers: int
    num_heads: int
    num_dropped: int = 0
    num_cached: int = 0
    """Leading tokens that had their KV from the start."""
    _evidence: Evidence = field(init=False)
    _num_decoded: int = field(init=False, default=0)
    _num_asked: int = field(init=False)
    """The last of so many tokens say what stays: the prompt's, until it chooses anew."""

    def __post_init__(self) -> None:
        self.start(0)

    @property
    def num_places(self) -> int:
        """Tokens that have KV."""
        return self._evidence.size

    @property
    def positions(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """Which token each place holds, ``[layers, heads, places]`` (a view)."""
        return self._evidence.positions

    def start(self, num_cached: int) -> None:
        """From the beginning, with a prefix from the cache."""
        assert num_cached <= self.keep.budget_tokens, "a hit beyond the budget"
        self._evidence = Evidence(self.num_layers, self.num_heads, self.keep.budget_tokens)
        self._evidence.grow(np.arange(num_cached, dtype=np.int32))
        self.num_dropped = 0
        self.num_cached = num_cached
        self._num_decoded = 0
        self._num_asked = self.keep.num_prompt

    def start_anew(self, num_computed: int) -> int | None:
        """All ``num_computed`` tokens are going to be offered again; the last of them are asked what stays.

        Returns how many of the first are where they belong, and stay there; ``None``: so many that no chunk
        fits behind them, and nothing is done.
        """
        num_first = first_moved(self.positions)
        if num_first > self.keep.num_usable_hit:
            return None
        self.start(num_first)
        self._num_asked = num_computed
        return num_first

    def next_rows(self, num_computed: int, num_tokens: int, most: int) -> StepRows:
        """The rows of the next step, ``most`` new ones at most; the probe comes on top."""
        keep, method = self.keep, self.keep.method
        num_rows = min(num_tokens - num_computed, most)
        if num_tokens > keep.budget_tokens:
            num_rows = min(num_rows, keep.chunk)
        behind = num_computed + num_rows
        probe = _NO_PROBE
        # A sequence that was preempted computes its own output again: it has asked already.
        is_certain = keep.is_drop_certain or self._num_asked > keep.num_prompt
        if is_certain and behind < self._num_asked and keep.num_probe:
            start = max(behind, self._num_asked - keep.num_probe)
            probe = np.arange(start, self._num_asked, dtype=np.int32)
        num_watched = self._num_watched(method, num_computed, behind, len(probe))
        is_noted = num_computed < self._num_asked or num_rows > 1 or self._num_decoded % _SAMPLED_EVERY == 0
        return StepRows(num_rows, probe, num_watched, method.watches == "queries" and is_noted)

    def _num_watched(self, method: Method, num_computed: int, behind: int, num_probe: int) -> int:
        num_rows = behind - num_computed
        if method.watches == "all":
            return num_rows
        if method.watches == "last":
            return 1
        if method.watches in ("none", "queries"):
            return 0
        if num_probe:
            return num_probe
        if num_computed >= self._num_asked and num_rows == 1:
            return 1 if self._num_decoded % _SAMPLED_EVERY == 0 else 0
        return min(num_rows, max(1, behind - (self._num_asked - self.keep.num_probe)))

    def room_for(self, rows: StepRows) -> int | None:
        """To how many places it must shrink before these rows; ``None``: there is room."""
        wanted = rows.num_rows + len(rows.probe)
        if self.num_places + wanted <= self.keep.budget_tokens:
            return None
        is_decoding = rows.num_rows == 1 and not len(rows.probe)
        return self.keep.budget_tokens - max(wanted, self.keep.slack if is_decoding else 0)

    def choose(self, num_kept: int) -> Places:
        """Which places stay when it shrinks; ``apply`` once their KV has been moved."""
        keep, positions = self.keep, self.positions
        in_prompt = positions < keep.num_prompt
        at = np.where(in_prompt, positions, 0)
        protected = in_prompt & keep.protected[at]
        room = num_kept - int(protected[0, 0].sum())
        num_newest = min(keep.method.num_newest(keep.budget_tokens), room)
        protected[:, :, protected.shape[2] - num_newest :] = True
        preferred = in_prompt & keep.preferred[at] if keep.preferred.any() else None
        return choose(keep.method.scores(self._evidence), protected, num_kept, preferred)

    def note_expected(self, mass: tuple[Mass, ...]) -> None:
        """What rows that are still to come are expected to give to all places; before ``choose``."""
        self._evidence.note(np.stack(mass), 1)

    def apply(self, kept: Places) -> None:
        """Only ``kept`` are there now, in their order."""
        self.num_dropped += self.num_places - kept.shape[2]
        self._evidence.keep(kept)

    def note_rows(self, start: int, rows: StepRows, mass: tuple[Mass, ...] | None) -> None:
        """A step has run: ``rows`` from token ``start`` on; ``mass`` by layer, where some were watched."""
        evidence, watches = self._evidence, self.keep.method.watches
        evidence.grow(np.arange(start, start + rows.num_rows, dtype=np.int32))
        is_decoding = start >= self._num_asked
        self._num_decoded += rows.num_rows if is_decoding else 0
        if mass is not None:
            evidence.note(np.stack([layer[:, : evidence.size] for layer in mass]), rows.num_watched)
        stretch = _STRETCH // _SAMPLED_EVERY if is_decoding else 1
        if watches == "window" and evidence.num_recent_rows >= stretch:
            evidence.summarise()


def first_moved(kept: Places | npt.NDArray[np.int32]) -> int:
    """So many leading places stay where they are, in all rows."""
    moved = (kept != np.arange(kept.shape[2])).any(axis=(0, 1))
    return int(moved.argmax()) if moved.any() else kept.shape[2]
