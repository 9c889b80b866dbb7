"""Marks of slots, against a dictionary that knows of every slot what was written to it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kv.approximate import ApproximateSlots
from ostinato.types import SlotCopy

NUM_SLOTS = 24
slot_lists = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=10)
writes = st.tuples(slot_lists, st.integers(0, 12))
copies = st.tuples(st.integers(0, 11), st.integers(12, 23), st.integers(1, 6)).map(
    lambda c: SlotCopy(c[0], c[1], min(c[2], 12 - c[0], NUM_SLOTS - c[1]))
)


@given(st.lists(st.one_of(writes, copies), max_size=20), slot_lists)
def test_marks_follow_what_is_written_and_copied(steps, asked):
    marks = ApproximateSlots(NUM_SLOTS)
    model = dict.fromkeys(range(NUM_SLOTS), False)
    for step in steps:
        if isinstance(step, SlotCopy):
            marks.copy([step])
            before = dict(model)
            for place in range(step.length):
                model[step.target + place] = before[step.source + place]
        else:
            slots, num_exact = step
            marks.mark(np.array(slots, np.int32), num_exact)
            for place, slot in enumerate(slots):
                model[slot] = place >= num_exact
    expected = next((i for i, slot in enumerate(asked) if model[slot]), len(asked))
    assert marks.first(np.array(asked, np.int32)) == expected
