"""Recall: a conversation that goes on within a budget gets back what it had dropped, as far as it is worth
it.

What an archive has of a prompt is not computed again. It is offered, chunk by chunk, to the end of the new
prompt: loaded to where a chunk would be computed, and scored by the prompt's last rows as a chunk would be.
What these attend to stays, the rest makes room for the next chunk. So every new question chooses anew from
everything; and so does a long answer from time to time, asked by its own last rows.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ..kv.manager import KVManager
from ..types import Plan, SequencePlan
from .base import ModelRunner
from .sequence import Sequence

if TYPE_CHECKING:
    from ..kv.archive import Archives


def begin(archives: Archives, manager: KVManager, sequence: Sequence) -> None:
    """Of a sequence that starts: what is there of it, and room for what it is going to drop.

    What may be kept for a time only is not kept here at all, nor what has been renumbered.
    """
    keeping = sequence.keeping
    assert keeping is not None, "a sequence without a budget"
    sequence.archive, sequence.num_offered, sequence.archive_epoch = None, 0, archives.epoch
    keep = keeping.keep
    if keep.renumbers or manager.ttl_s(sequence.namespace, sequence.terms) < inf:
        return
    sequence.archive = archives.open(sequence.num_prompt + sequence.max_new)
    if not keep.is_drop_certain or not keep.num_probe:
        return
    setting = sequence.namespace.digest, *keep.setting
    found = archives.find(setting, sequence.tokens[: keep.num_prompt - keep.num_probe])
    if found is not None and found[1] > sequence.num_computed:
        sequence.archive.take_over(*found)
        sequence.num_offered = found[1]
        sequence.recalled_tokens = max(sequence.recalled_tokens, found[1] - sequence.num_computed)


def save_all(archives: Archives, sequence: Sequence) -> None:
    """Of a sequence that ends: what it has not dropped, too."""
    keeping, lease, archive = sequence.keeping, sequence.lease, sequence.archive
    if keeping is None or lease is None or archive is None or not keeping.num_dropped or lease.is_purged:
        return
    positions = keeping.positions
    slots = lease.slots(0, positions.shape[2])
    archive.save(positions, np.broadcast_to(slots, positions.shape))
    setting = sequence.namespace.digest, *keeping.keep.setting
    archives.keep(setting, archive, sequence.tokens[: sequence.num_computed], sequence.archive_epoch)


def choose_anew(sequence: Sequence, every: int) -> None:
    """Has a sequence that generated ``every`` tokens since be offered all that it has computed once more."""
    keeping, lease, archive = sequence.keeping, sequence.lease, sequence.archive
    if keeping is None or lease is None or archive is None or not keeping.keep.num_probe:
        return
    is_due = sequence.num_output - sequence.num_output_asked >= every
    if not is_due or sequence.is_prefilling or not keeping.num_dropped:
        return
    sequence.num_output_asked = sequence.num_output
    positions = keeping.positions.copy()
    num_first = keeping.start_anew(sequence.num_computed)
    if num_first is None:
        return
    archive.save(positions, np.broadcast_to(lease.slots(0, positions.shape[2]), positions.shape))
    sequence.num_offered = sequence.num_computed - keeping.keep.num_probe
    sequence.num_computed = num_first
    sequence.recalled_tokens = max(sequence.recalled_tokens, sequence.num_offered - num_first)


def offer(sequence: Sequence, runner: ModelRunner, block_size: int) -> None:
    """Brings the next chunk back and has it scored. There is room for it."""
    keeping, lease, archive = sequence.keeping, sequence.lease, sequence.archive
    assert keeping is not None, "a sequence without a budget"
    assert lease is not None, "a sequence that does not run"
    assert archive is not None, "nothing to offer"
    start = sequence.num_computed
    rows = keeping.next_rows(start, sequence.num_tokens, sequence.num_offered - start)
    first = keeping.num_places
    archive.load(start, start + rows.num_rows, lease.slots(first, first + rows.num_rows))
    places = np.arange(first + rows.num_rows, first + rows.num_rows + len(rows.probe), dtype=np.int32)
    probe = SequencePlan(
        sequence_id=sequence.id,
        tokens=sequence.tokens[rows.probe],
        positions=rows.probe,
        slots=lease.slots(int(places[0]), int(places[-1]) + 1),
        block_ids=lease.block_ids,
        block_size=block_size,
        sample=False,
        places=places,
        num_watched=len(places),
    )
    mass = runner.execute(Plan((probe,))).mass[sequence.id]
    keeping.note_rows(start, rows, mass)
    sequence.num_computed += rows.num_rows
