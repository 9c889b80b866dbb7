"""Continuous batching: ``schedule → run → postprocess``, over and over, in one thread.

Every step runs one row for each sequence that is decoding and spends what is left of the step's token
budget on prompts, so that sequences join and leave at every step. A sequence's KV is held by its lease
(:class:`~ostinato.kv.lease.Lease`) from admission to end; what it computed becomes findable when it is
written, chunk by chunk. When room runs out the youngest sequence gives its blocks back and waits again:
what it had computed stays findable as long as nobody needs the room, so coming back is a look-up.

Engines speak tokens: text, stop strings and choices are the sink's business.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DeadlineError, EngineError, ParameterError, QueueFullError, ShuttingDownError
from ..events import Observer, Preempted, StepFinished
from ..kv.lease import Lease
from ..kv.manager import KVManager
from ..kv.policy import RequestHints
from ..kv.sessions import Sessions, outlook_of
from ..kv.tending import Tender
from ..kv.transfer import TierLink
from ..ports import Clock
from ..types import (
    FinishReason,
    Plan,
    SequencePlan,
    SlotCopy,
    num_common,
)
from .base import ModelRunner, Sampled, StepResult
from .blending import Blender
from .line import Turns, prefixes_first
from .pace import Pace, Room
from .recall import begin, choose_anew, offer, save_all
from .sequence import Sequence
from .thinning import thin
from .worker import Worker

if TYPE_CHECKING:
    from ..kv.archive import Archives

_log = logging.getLogger(__name__)

_ROOM_POLL_S = 0.02
_LOOK_AHEAD = 8  # of those that wait for their turn to compute, so many may load meanwhile
_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    """``max_batch_tokens`` rows at most in a step; ``max_sequences`` run at once, ``max_waiting`` wait.

    ``growth_tokens`` is how far ahead a growing sequence reaches for room next to its last block, so that
    what it attends to lies together. ``itl_target_s`` is how long a step may last while somebody is decoding
    (:class:`~ostinato.engines.pace.Pace`); ``None``: four times as long as without prompts for as many.
    ``recall_every``: after so many generated tokens what was dropped is offered again; ``None``: never.
    """

    max_batch_tokens: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    growth_tokens: int = 128
    itl_target_s: float | None = None
    recall_every: int | None = None


@dataclass(frozen=True, slots=True)
class BatcherLoad:
    """How many sequences run and wait."""

    num_running: int
    num_waiting: int


class Batcher:
    """The engine: a queue, a schedule, a runner, a thread.

    ``submit`` and ``cancel`` may be called from any thread; everything else happens in the engine's own.
    """

    def __init__(
        self,
        runner: ModelRunner,
        manager: KVManager,
        clock: Clock,
        settings: BatchingSettings | None = None,
        observer: Observer | None = None,
        worker: Worker | None = None,
        tier_link: TierLink | None = None,
        sessions: Sessions | None = None,
        tender: Tender | None = None,
        archives: Archives | None = None,
        blender: Blender | None = None,
    ) -> None:
        """``worker``: the thread to run in, best the one that loaded the model; closed with the batcher.

        ``tier_link``: where committed blocks go, and blocks come from that are not in the arena; likewise.
        ``archives``: where sequences within a budget put what they drop; ``blender``: moves KV for those that
        may be answered with moved KV.
        ``sessions`` hears how sequences end, ``tender`` (closed likewise) works while steps are computed.
        """
        self._runner = runner
        self._info = runner.info
        self._manager = manager
        self._clock = clock
        self._settings = settings or BatchingSettings()
        self._observe = observer or (lambda event: None)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._tier_link = tier_link
        self._sessions = sessions
        self._tender = tender
        self._archives = archives
        self._blender = blender
        self._pace = Pace(self._settings.itl_target_s, keys_a_row=self._info.keys_a_row)
        self._turns = Turns()
        self._copies: list[SlotCopy] = []
        self._refused: tuple[int, int, int] | None = None  # who found no room, blocks and leases then
        self._next_id = 0
        self._wake = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._stopping = False
        self._worker = worker or Worker("ostinato-engine")
        self._worker.submit(self._loop)
        # The interpreter must not end amid a step: torch's own threads then abort the whole process.
        atexit.register(self.close)

    # ------------------------------------------------------------ from any thread

    def submit(self, sequences: list[Sequence]) -> None:
        """Accept sequences; from here on each gets exactly one ``on_finish``.

        Raises:
            ParameterError: these are more than may wait at all.
            QueueFullError: too many wait already; none of these was accepted.
            ShuttingDownError: the engine has been closed.
        """
        now = self._clock.monotonic()
        with self._wake:
            if not self.is_alive:  # also in a process forked from the engine's: threads stay behind
                raise ShuttingDownError("the engine does not run in this process; start it again")
            num_waiting, most = len(self._waiting) + len(self._inbox), self._settings.max_waiting
            if len(sequences) > most:
                raise ParameterError(
                    f"{len(sequences)} answers were asked for, but at most {most} may wait: ask for fewer",
                    param="n",
                )
            if num_waiting + len(sequences) > most:
                raise QueueFullError(
                    f"{num_waiting} sequences wait already; try again later", retry_after_s=_RETRY_AFTER_S
                )
            for sequence in sequences:
                sequence.arrived_s = now
                sequence.deadline_s += now
                self._inbox.append(sequence)
            self._wake.notify()

    def cancel(self, sequences: list[Sequence]) -> None:
        """End sequences within one step; they finish with reason "abort" unless they already have."""
        with self._wake:
            for sequence in sequences:
                sequence.cancelled = True
            self._wake.notify()

    @property
    def is_alive(self) -> bool:
        """Whether it still takes requests."""
        return not self._stopping and self._worker.is_alive

    def load(self) -> BatcherLoad:
        with self._wake:
            return BatcherLoad(len(self._running), len(self._waiting) + len(self._inbox))

    def close(self) -> None:
        """Stop; whatever still runs or waits finishes with reason "abort"."""
        atexit.unregister(self.close)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._worker.close()

    # ------------------------------------------------------------ the loop

    def _loop(self) -> None:
        try:
            while self._take_in():
                try:
                    self._step()
                except Exception as error:  # noqa: BLE001 - the engine's border: the step fails, we go on
                    _log.exception("an engine step failed")
                    self._fail(error)
        finally:
            with self._wake:
                self._stopping = True
                left = [*self._running, *self._waiting, *self._inbox]
                for queue in (self._running, self._waiting, self._inbox):
                    queue.clear()
            for sequence in left:
                self._finish_surely(sequence, "abort")
            if self._tier_link is not None:
                self._tier_link.close()
            if self._tender is not None:
                self._tender.close()

    def _step(self) -> None:
        self._end_overdue()
        plan, planned = self._schedule()
        if not plan.sequences:
            if plan.copies:
                self._runner.execute(plan)  # of one that gets back what it had before it computes anything
            # Everyone waits: for room that a lease outside the engine holds, or for the lower tier.
            with self._wake:
                has_news = self._inbox or any(s.load and s.load.is_done for s in self._waiting)
                is_idle = self._waiting or self._running
                if is_idle and not has_news and not self._stopping:
                    self._wake.wait(_ROOM_POLL_S)
            return
        if self._tender is not None:
            self._tender.wake()
        started_s = self._clock.monotonic()
        result = self._runner.execute(plan)
        duration_s = self._clock.monotonic() - started_s
        self._note_pace(plan, planned, duration_s)
        if self._tier_link is not None:
            self._tier_link.note_step(plan, duration_s)
        self._postprocess(plan, planned, result)
        self._observe(self._step_event(plan, self._clock.monotonic() - started_s))

    def _take_in(self) -> bool:
        """Move the inbox to the queue, waiting while there is nothing at all to do; false to stop."""
        with self._wake:
            while not (self._stopping or self._inbox or self._running or self._waiting):
                self._wake.wait()
            for sequence in self._inbox:
                sequence.id = self._next_id
                self._next_id += 1
                self._waiting.append(sequence)
            self._inbox.clear()
            return not self._stopping

    def _end_overdue(self) -> None:
        """Ends what was cancelled, and what has no more time: with what it has, if it has something."""
        now = self._clock.monotonic()
        for queue in (self._running, self._waiting):
            for sequence in [s for s in queue if s.cancelled or s.deadline_s <= now]:
                queue.remove(sequence)
                if sequence.cancelled:
                    self._finish(sequence, "abort")
                elif sequence.num_output:
                    self._finish(sequence, "length")
                else:
                    late = f"no answer within the {now - sequence.arrived_s:.1f} s that the request had"
                    self._finish(sequence, "error", error=DeadlineError(late))

    # ------------------------------------------------------------ schedule

    def _schedule(self) -> tuple[Plan, list[Sequence]]:
        """Choose this step's rows. Decoding comes first, then prompts in order of arrival."""
        self._copies = []
        self._take_loaded()
        self._thin()
        planned: list[tuple[Sequence, int]] = []
        for sequence in [s for s in self._running if not s.is_prefilling]:
            if sequence.lease is None or not self._make_room(sequence):
                continue
            if sequence.keeping is None or self._plan_kept(sequence, 1):
                planned.append((sequence, 1))
        planned = [(s, n) for s, n in planned if s.lease is not None]  # some were preempted after all
        room = self._room([s for s, _ in planned])
        for sequence in [s for s in self._running if s.is_prefilling]:
            self._plan_chunk(sequence, room, planned)
        while self._num_open < self._settings.max_sequences:
            admitted = self._admit(can_compute=room.is_open)
            if admitted is None:
                break
            self._plan_chunk(admitted, room, planned)
        plan = Plan(tuple(self._plan_rows(s, n) for s, n in planned), tuple(self._copies))
        return plan, [s for s, _ in planned]

    def _room(self, decoding: list[Sequence]) -> Room:
        """What the step has for prompts beside those who decode."""
        num_readers = sum(sequence.num_output > 1 for sequence in decoding)
        work = sum(self._pace.work(sequence.num_past, 1) for sequence in decoding)
        return self._pace.room(work, num_readers, self._settings.max_batch_tokens - len(decoding))

    def _note_pace(self, plan: Plan, planned: list[Sequence], duration_s: float) -> None:
        decoding = prompts = 0.0
        for rows, sequence in zip(plan.sequences, planned, strict=True):
            work = self._pace.work(sequence.num_past, len(rows.tokens))
            if sequence.is_prefilling:
                prompts += work
            else:
                decoding += work
        self._pace.note(decoding, prompts, duration_s)

    def _plan_chunk(self, sequence: Sequence, room: Room, planned: list[tuple[Sequence, int]]) -> None:
        if sequence.num_computed < sequence.num_offered:
            return  # it gets back what it had
        if self._blender is not None and not self._blender.go_on(sequence, room, self._copies):
            return
        remaining = sequence.num_left
        if sequence.keeping is not None:
            remaining = sequence.keeping.next_rows(
                sequence.num_computed, sequence.num_tokens, remaining
            ).num_rows
        num_rows = room.take(sequence.num_past, remaining)
        if not self._info.chunked:
            num_rows = remaining
        if num_rows > 0 and (sequence.keeping is None or self._plan_kept(sequence, num_rows)):
            planned.append((sequence, num_rows))
            if sequence.rows is not None:
                room.take(sequence.num_past, len(sequence.rows.probe))

    def _plan_kept(self, sequence: Sequence, num_rows: int) -> bool:
        """What a sequence within a budget does in this step; false: it waits for a load to give way."""
        keeping = sequence.keeping
        assert keeping is not None, "a sequence without a budget"
        sequence.rows = keeping.next_rows(sequence.num_computed, sequence.num_tokens, num_rows)
        assert sequence.rows.num_rows == num_rows, "rows that were not asked for"
        return keeping.room_for(sequence.rows) is None

    def _plan_rows(self, sequence: Sequence, num_rows: int) -> SequencePlan:
        assert sequence.lease is not None
        numbers = sequence.next_positions(num_rows)
        first, end = int(numbers[0]), int(numbers[-1]) + 1
        places, num_watched = None if end - first == num_rows else numbers, 0
        positions, notes_queries = numbers, False
        if (keeping := sequence.keeping) is not None:
            assert sequence.rows is not None
            numbers = np.concatenate([numbers, sequence.rows.probe])
            first, num_watched = keeping.num_places, sequence.rows.num_watched
            places = np.arange(first, first + len(numbers), dtype=np.int32)
            positions = places if keeping.keep.renumbers else numbers
            notes_queries = sequence.rows.notes_queries
        rows = positions if places is None else places
        return SequencePlan(
            sequence_id=sequence.id,
            tokens=sequence.tokens[numbers],
            positions=positions,
            slots=sequence.lease.slots(first, int(rows[-1]) + 1)[rows - first],
            block_ids=sequence.lease.block_ids,
            block_size=self._manager.block_size,
            sample=end == sequence.num_tokens,
            places=places,
            num_watched=num_watched,
            notes_queries=notes_queries,
            with_distribution=sequence.wants_distribution and not sequence.num_output,
        )

    def _thin(self) -> None:
        """Sequences that would exceed their budget in this step drop tokens first."""
        for sequence in [s for s in self._running if s.keeping is not None]:
            keeping = sequence.keeping
            assert keeping is not None
            if self._settings.recall_every is not None:
                choose_anew(sequence, self._settings.recall_every)
            most = self._settings.max_batch_tokens
            while sequence.lease is not None:
                rows = keeping.next_rows(sequence.num_computed, sequence.num_tokens, most)
                room = keeping.room_for(rows)
                if room is None or thin(sequence, room, self._runner, self._manager.block_size):
                    if sequence.num_computed < sequence.num_offered:
                        offer(sequence, self._runner, self._manager.block_size)
                    break
                if self._stop_a_load():
                    break
                self._preempt(self._running[-1])

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for a decoding sequence's next row, taken from the youngest if it must be."""
        assert sequence.lease is not None
        spare_tokens = self._settings.growth_tokens if sequence.keeping is None else 0
        while not sequence.lease.reserve(sequence.num_wanted, spare_tokens=spare_tokens):
            if self._stop_a_load():
                return False  # what it held is free in a moment; this one pauses until then
            youngest = self._running[-1]
            if youngest is sequence and sequence.num_wanted > self._manager.num_usable_tokens:
                self._running.remove(sequence)
                self._finish(sequence, "length")  # it fills the whole arena: nothing more ever fits
                return False
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._copies += sequence.lease.take_copies()
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._commit(sequence)
        self._release(sequence)
        self._observe(Preempted(sequence.num_computed))
        sequence.num_computed = 0
        self._runner.release_state(sequence.id)
        self._waiting.appendleft(sequence)

    def _admit(self, *, can_compute: bool) -> Sequence | None:
        """Look up, hold and reserve for the first waiting sequence that can start now.

        Those of which the lower tier has more than the arena begin to load on the way, and go on waiting.
        """
        for turn, sequence in enumerate(self._line() if can_compute else list(self._waiting)):
            if sequence.load is not None:
                continue
            if not can_compute and not (turn < _LOOK_AHEAD and self._is_below(sequence)):
                continue
            if self._info.reuse and self._shares_with_running(sequence):
                continue
            manager = self._manager
            available = manager.num_free_blocks + manager.num_evictable_blocks
            # The only lease can have everything: the last one to go may hold nothing and still matter.
            refused = sequence.id, available, manager.num_leases
            if self._refused == refused:
                return None  # nothing has changed since: a look-up now would only count as a use
            place = self._waiting.index(sequence)
            del self._waiting[place]
            self._running.append(sequence)  # so that whatever fails from here on ends it
            hints = RequestHints(input_tokens=sequence.num_prompt)
            lease = sequence.lease = self._manager.acquire(
                sequence.namespace, sequence.lookup_tokens, hints=hints, terms=sequence.terms
            )
            if not self._reserve_first(lease, sequence):
                self._running.pop()
                self._release(sequence)
                if self._ends_for_pins(sequence):
                    return None
                self._waiting.insert(place, sequence)
                self._refused = refused
                return None  # in order of arrival: nobody overtakes for being small
            self._refused = None
            self._turns.started(sequence)
            for other in list(self._waiting)[:place]:
                if other.namespace.salt == sequence.namespace.salt and other.load is None:
                    other.num_overtaken += 1
            sequence.copies = lease.take_copies()
            if self._tier_link is not None and self._info.reuse:
                sequence.load = self._tier_link.begin(
                    lease, sequence.lookup_tokens, sequence.chain, self._notify
                )
            if sequence.load is None:
                self._start(sequence, lease.prefix_len)
                return sequence
            self._running.pop()
            self._waiting.insert(place, sequence)
            if self._num_open >= self._settings.max_sequences:
                return None
        return None

    def _line(self) -> list[Sequence]:
        """The waiting in the order in which they should start."""
        line = self._turns.order(self._waiting, self._running)
        if not self._info.reuse or len(line) < 2:
            return line
        return prefixes_first(line, lambda s: self._manager.peek(s.namespace, s.lookup_tokens))

    def _reserve_first(self, lease: Lease, sequence: Sequence) -> bool:
        """Room for a sequence that is about to start, if as much is left as lets everyone else go on a while.

        Without that watermark a full arena would take in a sequence only to throw one out at the next step.
        """
        spare_tokens = self._settings.growth_tokens if sequence.keeping is None else 0
        if not lease.reserve(sequence.num_wanted, spare_tokens=spare_tokens):
            return False
        left = self._manager.num_free_blocks + self._manager.num_evictable_blocks
        return left >= len(self._running) - 1

    def _ends_for_pins(self, sequence: Sequence) -> bool:
        """Ends a sequence that there is not room for without what is pinned, as long as that is."""
        num_usable, num_pinned = self._manager.num_usable_tokens, self._manager.num_pinned_blocks
        if not num_pinned or sequence.num_wanted <= num_usable:
            return False
        if sequence.num_output:
            self._finish(sequence, "length")
        else:
            text = f"{num_pinned} blocks of KV are pinned: room for {num_usable} tokens is left, not for this"
            self._finish(sequence, "error", error=EngineError(text))
        return True

    def _start(self, sequence: Sequence, num_computed: int) -> None:
        """Of a running sequence: so many leading tokens have their KV."""
        assert sequence.lease is not None
        if (
            num_computed == sequence.lease.prefix_len
        ):  # otherwise what was to be copied has been read as a whole
            self._copies += sequence.copies
        else:
            sequence.copies = ()
        sequence.num_computed = num_computed
        if sequence.keeping is not None:
            sequence.keeping.start(num_computed)
            if self._archives is not None:
                begin(self._archives, self._manager, sequence)
        self._note_exactness(sequence)
        if self._blender is not None and self._info.reuse:
            self._blender.begin(sequence, self._notify)
        sequence.copies = ()
        if sequence.started_s is None:
            sequence.started_s = self._clock.monotonic()
            sequence.cached_tokens = num_computed
            if self._sessions is not None:
                self._sessions.began(sequence.namespace, sequence.tokens)
            self._runner.open(sequence.id, sequence.tokens[: sequence.num_prompt], sequence.params)

    def _note_exactness(self, sequence: Sequence) -> None:
        """Of a sequence that starts: where what was cached of it stops being exact."""
        sequence.num_exact = None
        if self._tier_link is not None and self._info.reuse:
            assert sequence.lease is not None
            num_cached = sequence.num_computed
            num_exact = self._tier_link.num_exact(sequence.lease, num_cached, sequence.copies)
            if num_exact < num_cached:
                sequence.num_exact = num_exact
                sequence.approximate_tokens = max(sequence.approximate_tokens, num_cached - num_exact)

    @property
    def _num_open(self) -> int:
        """Sequences that run, or wait for the lower tier with all the room they need."""
        return len(self._running) + sum(sequence.load is not None for sequence in self._waiting)

    def _is_below(self, sequence: Sequence) -> bool:
        """Whether the lower tier has more of a sequence than the arena, as far as anybody looked."""
        link = self._tier_link
        if link is None or not self._info.reuse:
            return False
        tokens = sequence.lookup_tokens
        below = link.num_tokens_below(sequence.namespace, tokens, sequence.chain)
        return below > 0 and below > self._manager.peek(sequence.namespace, tokens)

    def _take_loaded(self) -> None:
        """Sequences whose blocks have been read go on from there; those that were stopped wait again."""
        for sequence in [s for s in self._waiting if s.load is not None and s.load.is_done]:
            load, lease = sequence.load, sequence.lease
            assert load is not None
            assert lease is not None
            assert self._tier_link is not None
            place = self._waiting.index(sequence)
            del self._waiting[place]
            self._running.append(sequence)  # so that whatever fails from here on ends it
            sequence.load = None
            num_computed = self._tier_link.finish(load, lease, sequence.lookup_tokens, sequence.chain)
            if load.is_stopped:
                self._running.pop()
                self._release(sequence)
                self._waiting.insert(place, sequence)
            else:
                if sequence.started_s is None:
                    sequence.loaded_tokens = num_computed - lease.prefix_len
                    sequence.load_s = load.duration_s
                self._start(sequence, num_computed)

    def _stop_a_load(self) -> bool:
        """For room: whether one is being stopped, or was a moment ago."""
        loading = [s.load for s in self._waiting if s.load is not None]
        if loading:
            loading[-1].stop()
        return bool(loading)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _shares_with_running(self, sequence: Sequence) -> bool:
        """A prefix it needs is being computed right now: wait for it rather than compute it twice."""
        started = [*self._running, *(s for s in self._waiting if s.load is not None)]
        prefilling = [s for s in started if s.is_prefilling and s.namespace == sequence.namespace]
        if not prefilling:
            return False
        found = self._manager.peek(sequence.namespace, sequence.lookup_tokens)
        usable = len(sequence.lookup_tokens) - 1
        for other in prefilling:
            if other.keeping is not None and other.keeping.keep.is_drop_certain:
                continue  # hardly any of it is going to be found
            common = min(num_common(sequence.tokens, other.tokens), usable)
            if other.blend is not None:
                common = min(common, other.blend.exact_end)
            if common >= found + self._manager.block_size:
                return True
        return False

    # ------------------------------------------------------------ postprocess

    def _postprocess(self, plan: Plan, planned: list[Sequence], result: StepResult) -> None:
        now = self._clock.monotonic()
        for rows, sequence in zip(plan.sequences, planned, strict=True):
            was_prefilling = sequence.is_prefilling
            num_rows = len(rows.tokens)
            if sequence.keeping is not None:
                assert sequence.rows is not None
                num_rows = sequence.rows.num_rows
                sequence.keeping.note_rows(sequence.num_computed, sequence.rows, result.mass.get(sequence.id))
            sequence.advance(num_rows)
            if was_prefilling:
                self._commit(sequence)
            if not rows.sample:
                continue
            choice = result.sampled[sequence.id]
            if choice.error is not None:
                self._running.remove(sequence)
                self._finish(sequence, "error", error=EngineError(choice.error))
                continue
            if sequence.first_token_s is None:
                sequence.first_token_s, sequence.distribution = now, choice.distribution
            self._take_token(sequence, choice)

    def _take_token(self, sequence: Sequence, choice: Sampled) -> None:
        token_id = choice.token_id
        sequence.append(token_id)
        if token_id in sequence.stop_token_ids:
            self._running.remove(sequence)
            self._finish(sequence, "stop", stop_token=token_id)
            return
        stopped = sequence.sink.on_token(token_id, choice.logprob)
        if stopped or sequence.num_output >= sequence.max_new:
            self._running.remove(sequence)
            self._finish(sequence, "stop" if stopped else "length")

    def _fail(self, error: Exception) -> None:
        """A step failed: nothing of it is kept, and every running sequence ends with the error.

        With none running it failed in those that wait, and would again: then they end.
        """
        queue = self._running or self._waiting
        failed = list(queue)
        queue.clear()
        for sequence in failed:
            failure = EngineError(f"the engine failed in this request: {type(error).__name__}")
            failure.__cause__ = error
            self._finish_surely(sequence, "error", failure)

    def _finish_surely(
        self, sequence: Sequence, reason: FinishReason, error: Exception | None = None
    ) -> None:
        """One of several to end: a fault in doing so must not keep the others from being told."""
        try:
            self._finish(sequence, reason, error=error)
        except Exception:  # noqa: BLE001 - the engine's border, too
            _log.exception("a request could not be ended well")

    def _commit(self, sequence: Sequence) -> None:
        if self._info.reuse and sequence.lease is not None and sequence.load is None:
            computed = sequence.tokens[: sequence.num_committable]
            if sequence.keeping is not None and len(computed) <= sequence.lease.prefix_len:
                return  # of what it computed itself nothing surely stays
            if self._tier_link is not None:
                self._tier_link.note_computed(sequence.lease, len(computed), sequence.num_exact)
            sequence.written_tokens += sequence.lease.commit(computed)
            if self._blender is not None:
                self._blender.note(sequence.lease, computed)
            if self._tier_link is not None:
                self._tier_link.offer(sequence.lease, computed, sequence.chain)

    def _release(self, sequence: Sequence) -> None:
        if sequence.blend is not None:
            sequence.blend.release()
            sequence.blend = None
        if sequence.lease is not None:
            if sequence.load is None:
                sequence.lease.release()
            else:
                sequence.load.abandon(sequence.lease.release)
                sequence.load = None
            sequence.lease = None

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        error: Exception | None = None,
    ) -> None:
        if error is None:
            if sequence.lease is not None:
                sequence.lease.note_output(sequence.num_output)
            self._commit(sequence)
            if self._blender is not None:
                self._blender.keep(sequence)
            if self._archives is not None:
                save_all(self._archives, sequence)
        was_kept = sequence.lease is not None and error is None and self._info.reuse
        self._release(sequence)
        self._runner.close(sequence.id)
        stats = sequence.stats(self._clock.monotonic())
        told = sequence.sink.on_finish(reason, stop_token, stats, error)
        if was_kept and self._sessions is not None:
            self._sessions.ended(
                sequence.namespace,
                sequence.tokens[: sequence.num_computed],
                outlook_of(told, offers_tools=sequence.offers_tools),
                session=sequence.session,
                num_prompt=sequence.num_prompt,
                num_choices=sequence.num_choices,
            )

    def _step_event(self, plan: Plan, duration_s: float) -> StepFinished:
        lengths = [len(sequence.tokens) for sequence in plan.sequences]
        return StepFinished(sum(lengths), lengths.count(1), duration_s)
