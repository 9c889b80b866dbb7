"""What is known of a run when it was used, as small numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .history import Run

NUM_CLASSES = 16
NUM_STRATA = 4


def class_of(run: Run) -> int:
    """Part-filled last block, or uses (5 steps) and how many prompts go on from here (3 steps)."""
    if run.is_part:
        return 15
    branches = 0 if run.branches < 2 else 1 if run.branches < 8 else 2
    return min(4, _log2(run.uses)) * 3 + branches


def stratum_of(run: Run) -> int:
    """Never used before, or used again within one, four, more minutes."""
    gap_s = run.last_gap_s
    return 0 if gap_s < 0 else 1 if gap_s < 60 else 2 if gap_s < 240 else 3


# How many values each feature has, in the order of ``features_of``.
_SIZES = (8, 6, 3, 15, 12, 18, 12, 16, 96, 15, 12, 15, 15, 12, 10, 128, 2)
_STARTS = np.concatenate(([0], np.cumsum(_SIZES)[:-1]))
NUM_FEATURES = len(_SIZES)
NUM_WEIGHTS = int(sum(_SIZES))


def features_of(run: Run, is_last: bool) -> npt.NDArray[np.int16]:
    """Indices of the weights that apply, one of each feature."""
    request = run.request
    num_blocks, turn = min(11, _log2(request.num_blocks)), request.turn
    uses, gap = min(7, _log2(run.uses)), _log2_gap(run.last_gap_s)
    mean_gap_s = (run.last_s - run.first_s) / (run.uses - 1) if run.uses > 1 else -1.0
    values = (
        uses,
        min(5, _log2(run.branches + 1)),
        2 if run.is_part else int(is_last),
        min(14, _log2(request.hints.output_tokens + 1)),
        min(11, _log2(request.num_blocks - request.num_known + 1)),
        _message(request.message_tokens, turn),
        min(11, _log2(request.num_known + 1)),
        min(15, turn),
        min(7, turn) * 12 + num_blocks,
        _log2_gap(request.parent_gap_s),
        num_blocks,
        gap,
        _log2_gap(mean_gap_s),
        min(11, _log2(run.depth + 1)),
        min(9, max(0, run.uses - turn + 2)),
        uses * 16 + gap,
        int(run.uses == 1),
    )
    return np.asarray(values + _STARTS, np.int16)


def _message(num_tokens: int, turn: int) -> int:
    if turn == 0:
        return 0
    return 1 if num_tokens <= 0 else 2 + min(15, _log2(num_tokens))


def _log2(value: int) -> int:
    return max(0, int(value).bit_length() - 1)


def _log2_gap(gap_s: float) -> int:
    return 0 if gap_s < 0 else min(14, 1 + int(gap_s).bit_length())
