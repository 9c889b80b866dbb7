"""Reuse that is not a prefix: KV that stands elsewhere is moved, and some of it computed again.

A sequence that may be answered that way and starts looks for runs of its prompt among what is stored. Each is
got by an exact look-up of where it was stored (and from the lower tier, while others compute), moved into
the sequence's own blocks, and compared in the first layers. What is to be repaired and what is new are then
rows like any others, with gaps between their places. There is no second way through the model.

What was moved, and all that is computed behind it, is never committed to its namespace: nobody who asks for
exact KV can find it. When such a sequence ends it is copied to a namespace of its own (:func:`moved_space`),
in which only sequences look that may be answered with moved KV. Without that a conversation whose head
changes at every turn would compute all turns again since the last exact one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np

from ..kv.hashing import Namespace
from ..kv.lease import Lease
from ..kv.loading import Load
from ..kv.manager import KVManager
from ..kv.transfer import Chain, TierLink
from ..reuse.blend import PROBED_LAYER, choose_repairs, relative_deviations
from ..reuse.match import Found, RunIndex
from ..reuse.shifts import shifts_of
from ..types import FloatArray, Plan, SequencePlan, SlotCopy, SlotShift, TokenArray
from .base import Deviations, ModelRunner
from .pace import Room
from .sequence import Sequence

MIN_RUN_TOKENS = 32
_MOST_TRIES = 8
_PROBED_ROWS = 4096
"""At a time: bounds what they take while they are computed."""


@dataclass(slots=True)
class _Source:
    """Where a run comes from: its sequence's first ``num_there`` tokens are in the arena, and ``is_below``:
    more of them in the lower tier. ``load`` is under way as long as there is one."""

    namespace: Namespace
    run: Found
    lease: Lease
    tokens: TokenArray
    num_there: int
    chain: Chain
    is_below: bool = False
    load: Load | None = None

    @property
    def is_cut(self) -> bool:
        """Whether some of the run is not there."""
        return self.num_there < self.run.source_end


@dataclass(slots=True)
class Blend:
    """What of one sequence is moved, and how far that is.

    ``runs`` are ``[start, end)`` of its tokens; ``rows`` the positions that are computed, once that is known,
    of which ``num_done`` are.
    """

    sources: list[_Source]
    exact_end: int
    runs: list[tuple[int, int]] = field(default_factory=list)
    num_probed: int = 0
    probed: list[Deviations] = field(default_factory=list)
    rows: TokenArray | None = None
    num_done: int = 0

    @property
    def num_left(self) -> int:
        """Rows still to compute."""
        return 0 if self.rows is None else len(self.rows) - self.num_done

    def release(self) -> None:
        """Lets go of all it holds; what is being loaded ends first."""
        for source in self.sources:
            if source.load is None:
                source.lease.release()
            else:
                source.load.abandon(source.lease.release)
        self.sources = []


class Blender:
    """Finds, moves and repairs, for one engine. Used by its thread, except for ``clear``."""

    def __init__(
        self,
        manager: KVManager,
        runner: ModelRunner,
        link: TierLink | None,
        max_tokens: int,
        *,
        seed: int = 0,
    ) -> None:
        """``max_tokens``: of stored sequences, that runs are found in; ``seed``: see :class:`RunIndex`."""
        self._manager = manager
        self._runner = runner
        self._link = link
        self._max_tokens, self._seed = max_tokens, seed
        self._index = RunIndex(max_tokens, seed=seed)
        self._lock = Lock()
        num_layers = max(1, len(runner.info.kv_heads))
        self._layer = min(PROBED_LAYER, num_layers - 1)
        self._probed_share = (self._layer + 0.5) / num_layers
        """Of a row's work, what probing it takes."""

    @property
    def num_tokens(self) -> int:
        """In how many tokens runs are found."""
        return self._index.num_tokens

    def note(self, lease: Lease, tokens: TokenArray) -> None:
        """``tokens`` have been committed on ``lease``: they may be found anywhere from now on."""
        with self._lock:
            if not lease.is_purged:
                self._index.add(lease.namespace.digest, tokens)

    def keep(self, sequence: Sequence) -> None:
        """Of a sequence with moved KV that ends: keeps a copy of it, where only such sequences look."""
        blend, lease, end = sequence.blend, sequence.lease, sequence.num_computed
        if blend is None or blend.rows is None or lease is None or lease.is_purged or end <= blend.exact_end:
            return
        tokens, space = sequence.tokens[:end], moved_space(sequence.namespace)
        with self._manager.acquire(
            space, np.append(tokens, np.int32(0)), terms=sequence.terms, is_counted=False
        ) as kept:
            start = kept.prefix_len
            if start >= end or not kept.reserve(end):
                return
            copies = kept.take_copies()
            shifts = shifts_of(lease.slots(start, end), kept.slots(start, end), 0)
            self._runner.execute(Plan((), copies, shifts=shifts))
            kept.commit(tokens)
            self.note(kept, tokens)

    def clear(self) -> None:
        """Forgets all tokens, because some were purged. Any thread may call this."""
        with self._lock:
            self._index = RunIndex(self._max_tokens, seed=self._seed)

    # ------------------------------------------------------------ one sequence

    def begin(self, sequence: Sequence, on_loaded: Callable[[], None]) -> None:
        """Of a sequence that starts: looks for what of it is stored elsewhere, and holds that.

        ``on_loaded`` is called in another thread when some of it has been read from the lower tier.
        """
        sequence.forget_blend()
        start, end = sequence.num_computed, sequence.num_tokens - 1
        if sequence.repair is None or end - start < MIN_RUN_TOKENS:
            return
        for _ in range(_MOST_TRIES):
            found = self._find(sequence, start, end)
            sources = [self._hold(sequence, namespace, run) for namespace, run in found]
            if not self._forget_lost(sources):
                break
            for source in sources:  # what is stored more than once may be had from elsewhere
                source.lease.release()
            sources = []
        if sources:
            sequence.blend = Blend(sources, sources[0].run.target_start)
            for source in sources:
                self._load(source, on_loaded)

    def _find(self, sequence: Sequence, start: int, end: int) -> list[tuple[Namespace, Found]]:
        """Runs of exact KV, and in the stretches between them those of moved KV; in order."""
        tokens, exact, moved = sequence.tokens, sequence.namespace, moved_space(sequence.namespace)
        with self._lock:
            runs = self._index.find(exact.digest, tokens, start=start, end=end, min_tokens=MIN_RUN_TOKENS)
            found = [(exact, run) for run in runs]
            edges = [start, *(edge for run in runs for edge in (run.target_start, run.target_end)), end]
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                if last - first >= MIN_RUN_TOKENS:
                    between = self._index.find(
                        moved.digest, tokens, start=first, end=last, min_tokens=MIN_RUN_TOKENS
                    )
                    found += [(moved, run) for run in between]
        if self._runner.info.movement_reason is not None:
            found = [(namespace, run) for namespace, run in found if not run.distance]
        return sorted(found, key=lambda item: item[1].target_start)

    def _hold(self, sequence: Sequence, namespace: Namespace, run: Found) -> _Source:
        tokens = np.append(run.source, np.int32(0))  # a look-up leaves the last token out
        lease = self._manager.acquire(namespace, tokens, terms=sequence.terms, is_counted=False)
        source = _Source(namespace, run, lease, tokens, lease.prefix_len, Chain(sequence.terms))
        if self._link is not None and source.is_cut:
            below = self._link.num_tokens_below(namespace, tokens, source.chain)
            source.is_below = below > source.num_there
        return source

    def _forget_lost(self, sources: list[_Source]) -> bool:
        """Of sources that are not there any more: forgets what is not; whether there was any."""
        lost = [source for source in sources if source.is_cut and not source.is_below]
        with self._lock:
            for source in lost:
                self._index.forget(source.namespace.digest, source.run.source, source.num_there)
        return bool(lost)

    def _load(self, source: _Source, on_loaded: Callable[[], None]) -> None:
        """Starts to read what of a source the lower tier has, if there is room for it."""
        link, lease = self._link, source.lease
        if link is None or not source.is_below or not lease.reserve(len(source.tokens)):
            return
        if copies := lease.take_copies():
            link.num_exact(lease, lease.prefix_len, copies)
            self._runner.execute(Plan((), copies))
        source.load = link.begin(lease, source.tokens, source.chain, on_loaded)

    def go_on(self, sequence: Sequence, room: Room, copies: list[SlotCopy]) -> bool:
        """Brings a sequence that has a blend nearer to its rows; whether these are known now.

        ``copies`` that were asked for run first, and are taken out of the list.
        """
        blend = sequence.blend
        if blend is None or blend.rows is not None:
            return True
        if any(source.load is not None and not source.load.is_done for source in blend.sources):
            return False
        if copies:
            self._runner.execute(Plan((), tuple(copies)))
            copies.clear()
        if blend.sources:
            self._move(sequence, blend)
        if not blend.runs:
            sequence.forget_blend()
            return True
        assert sequence.repair is not None
        if sequence.repair.is_measured and not self._probe(sequence, blend, room):
            return False
        self._settle(sequence, blend)
        return True

    def _move(self, sequence: Sequence, blend: Blend) -> None:
        """Moves what is there of all runs, and lets go of where it comes from."""
        assert sequence.lease is not None
        shifts: list[SlotShift] = []
        num_approximate = 0
        for source in blend.sources:
            run, lease = source.run, source.lease
            if source.load is not None:
                assert self._link is not None
                end = self._link.finish(source.load, lease, source.tokens, source.chain)
                source.num_there, source.load = max(source.num_there, end), None
            there = min(source.num_there, run.source_end)
            length = there - run.source_start
            if length < MIN_RUN_TOKENS:
                continue
            taken = lease.slots(run.source_start, there)
            target = sequence.lease.slots(run.target_start, run.target_start + length)
            shifts += shifts_of(taken, target, run.distance)
            blend.runs.append((run.target_start, run.target_start + length))
            if self._link is not None:
                num_exact = self._link.num_exact(lease, there, ())
                num_approximate += there - max(num_exact, run.source_start) if num_exact < there else 0
        self._runner.execute(Plan((), shifts=tuple(shifts)))
        blend.release()
        if blend.runs:
            blend.exact_end, blend.num_probed = blend.runs[0][0], sequence.num_computed
            sequence.approximate_tokens = max(sequence.approximate_tokens, num_approximate)

    def _probe(self, sequence: Sequence, blend: Blend, room: Room) -> bool:
        """Compares what was moved with what the first layers give, as far as the step has room; whether that
        is all."""
        lease, end = sequence.lease, blend.runs[-1][1]
        assert lease is not None
        left = end - blend.num_probed
        taken = room.take(blend.num_probed, math.ceil(left * self._probed_share))
        stop = min(end, blend.num_probed + int(taken / self._probed_share))
        while blend.num_probed < stop:
            start = blend.num_probed
            blend.num_probed = min(stop, start + _PROBED_ROWS)
            positions = np.arange(start, blend.num_probed, dtype=np.int32)
            rows = SequencePlan(
                sequence_id=sequence.id,
                tokens=sequence.tokens[positions],
                positions=positions,
                slots=lease.slots(start, blend.num_probed),
                block_ids=lease.block_ids,
                block_size=self._manager.block_size,
                sample=False,
            )
            blend.probed.append(self._runner.deviations(rows, self._layer))
        return blend.num_probed == end

    def _settle(self, sequence: Sequence, blend: Blend) -> None:
        """Chooses the rows; or computes all of them, where too much would be left."""
        assert sequence.repair is not None
        start = sequence.num_computed
        is_moved = np.zeros(sequence.num_tokens - start, np.bool_)
        for first, last in blend.runs:
            is_moved[first - start : last - start] = True
        deviations = None
        if blend.probed:
            deviations = _joined(blend.probed)[is_moved[: blend.num_probed - start]]
        chosen = choose_repairs(blend.runs, deviations, sequence.repair)
        sequence.deviation = chosen.deviation
        if chosen.deviation is not None and chosen.deviation > sequence.repair.max_deviation:
            sequence.is_move_refused = True
            sequence.forget_blend()
            return
        sequence.moved_tokens, sequence.repaired_tokens = int(is_moved.sum()), len(chosen.positions)
        is_row = ~is_moved
        is_row[chosen.positions - start] = True
        blend.rows = (start + np.flatnonzero(is_row)).astype(np.int32)
        blend.probed = []
        sequence.num_computed = int(blend.rows[0])


def moved_space(namespace: Namespace) -> Namespace:
    """Where sequences with moved KV are kept: nothing that is looked for elsewhere is found there."""
    return replace(namespace, kv_layout=f"{namespace.kv_layout} moved")


def _joined(parts: list[Deviations]) -> FloatArray:
    fields = ([getattr(part, name) for part in parts] for name in ("key", "value", "key_norm", "value_norm"))
    return relative_deviations(*(np.concatenate(arrays) for arrays in fields))
