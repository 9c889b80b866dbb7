"""Dropping tokens of a running sequence: what is kept moves together in its blocks."""

from __future__ import annotations

import numpy as np

from ..retention.keeping import first_moved
from ..types import Plan, SlotMove
from .base import ModelRunner
from .sequence import Sequence


def thin(sequence: Sequence, num_kept: int, runner: ModelRunner, block_size: int) -> bool:
    """Leaves ``num_kept`` tokens of a sequence with KV, at once; ``False``: no room to do it in, nothing is
    done.

    Its table covers the whole budget afterwards. Blocks that it shared, and does not keep as they are, are
    replaced by its own. They are given up before the move has read them: nothing is written meanwhile, since
    whoever writes to blocks, or has them written to, does so in this same thread.
    """
    keeping, lease = sequence.keeping, sequence.lease
    assert keeping is not None, "a sequence without a budget"
    assert lease is not None, "a sequence that does not run"
    old_ids = lease.block_ids.copy()
    if keeping.keep.method.watches == "queries":
        slots = lease.slots(0, keeping.num_places)
        keeping.note_expected(runner.expect(sequence.id, slots, _next_position(sequence)))
    kept = keeping.choose(num_kept)
    num_blocks = lease.recast(first_moved(kept) // block_size, keeping.keep.budget_tokens)
    if num_blocks is None:
        return False
    start = num_blocks * block_size
    if sequence.archive is not None:
        left = np.ones(keeping.positions.shape, np.bool_)
        np.put_along_axis(left, kept, False, axis=2)
        dropped = np.nonzero(left)[2].reshape(*kept.shape[:2], -1)
        index, offset = np.divmod(dropped, block_size)
        positions = np.take_along_axis(keeping.positions, dropped, axis=2)
        sequence.archive.save(positions, old_ids[index] * block_size + offset)
    index, offset = np.divmod(kept[:, :, start:], block_size)
    sources = (old_ids[index] * block_size + offset).astype(np.int64)
    # Renumbered, a token's position is its place, before the move and after it.
    distances = np.arange(start, num_kept) - kept[:, :, start:] if keeping.keep.renumbers else None
    runner.execute(Plan((), moves=(SlotMove(sources, lease.slots(start, num_kept), distances),)))
    keeping.apply(kept)
    return True


def _next_position(sequence: Sequence) -> int:
    keeping = sequence.keeping
    assert keeping is not None, "a sequence without a budget"
    return keeping.num_places if keeping.keep.renumbers else sequence.num_computed
