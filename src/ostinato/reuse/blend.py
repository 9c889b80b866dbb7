"""Which tokens of moved KV to compute again, so that the rest may stay as it is.

A moved token's KV was computed behind something else. How much that matters is measured in the first layers,
where it costs little: all tokens run through them, and what comes out is compared with what was moved
(CacheBlend, arXiv 2405.16444). First tokens of a run deviate most, as they had the least before them
(EPIC's LegoLink, arXiv 2410.15332). What is repaired runs through all layers and attends to everything before
it; what is not stays moved.

Whoever chooses by a bound is told what is left: the *deviation*, which is the part that is wrong of the keys
and values of a mean token, ``sqrt(sum of squares of what is left / sum of squares of all)``. 0 is exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

from ostinato.errors import ParameterError
from ostinato.types import FloatArray, TokenArray

PROBED_LAYER = 1
"""The first whose keys and values depend on what stands before: those of layer 0 are the token's own."""
DEFAULT_MAX_DEVIATION = 0.006
DEFAULT_LAST_TOKENS = 32
"""Of ``adaptive``: a prompt's end says most of what follows, and deviates in layers that are not probed."""
MOST_REPAIRED = 0.5
"""Of what was moved. Where more deviates, computing all of it takes hardly longer and is exact."""

_PART = re.compile(
    r"(?P<kind>adaptive|none|first:(?P<first>\d{1,4})|last:(?P<last>\d{1,4})"
    r"|(?P<percent>\d{1,3}(\.\d{1,3})?)%)"
)


@dataclass(frozen=True, slots=True)
class Repair:
    """What is computed again of each moved run.

    ``share`` of all moved tokens, those that deviate most; ``None``: as many as it takes to be within the
    bound. ``first_tokens`` of each run, in any case. Where more than ``max_deviation`` is left (or would be,
    by ``MOST_REPAIRED``), nothing is moved at all. ``last_tokens`` of the last run likewise: the end of a
    prompt says most of what follows.
    """

    share: float | None = None
    first_tokens: int = 0
    max_deviation: float = DEFAULT_MAX_DEVIATION
    last_tokens: int = 0

    @property
    def is_measured(self) -> bool:
        """Whether deviations are needed to choose."""
        return self.share is None or 0 < self.share < 1 or isfinite(self.max_deviation)


def parse_repair(text: str, max_deviation: float | None = None) -> Repair:
    """``adaptive``, ``none``, ``15%`` (of the tokens), ``first:16`` (of each run), ``last:16`` (of the last
    one), or several with ``+`` between.

    ``max_deviation`` ``None``: the default for ``adaptive``, and none for what is fixed.

    Raises:
        ParameterError: it is none of these.
    """
    share: float | None = 0.0
    first_tokens = last_tokens = 0
    for part in text.split("+"):
        match = _PART.fullmatch(part.strip())
        percent = float(match["percent"]) if match and match["percent"] else 0.0
        if match is None or percent > 100:
            raise ParameterError(
                f"repair is {text[:40]!r}; write adaptive, none, 15%, first:16, last:16, or 15%+first:16",
                param="repair",
            )
        if match["first"]:
            first_tokens = int(match["first"])
        elif match["last"]:
            last_tokens = int(match["last"])
        elif match["kind"] == "adaptive":
            share, last_tokens = None, DEFAULT_LAST_TOKENS
        elif percent:
            share = percent / 100
    if max_deviation is None:
        max_deviation = DEFAULT_MAX_DEVIATION if share is None else inf
    return Repair(share, first_tokens, max_deviation, last_tokens)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Positions to compute again, ascending, and what deviation is estimated to be left (``None``: not
    measured)."""

    positions: TokenArray
    deviation: float | None


def relative_deviations(
    key: FloatArray, value: FloatArray, key_norm: FloatArray, value_norm: FloatArray
) -> FloatArray:
    """Of each row: squared differences of keys and of values, relative to a mean row's own squares."""
    mean_key, mean_value = max(float(key_norm.mean()), 1e-30), max(float(value_norm.mean()), 1e-30)
    deviations: FloatArray = (0.5 * (key / mean_key + value / mean_value)).astype(np.float32)
    return deviations


def choose_repairs(
    runs: Sequence[tuple[int, int]],
    deviations: FloatArray | None,
    repair: Repair,
) -> Chosen:
    """Which tokens of the moved ``runs`` (``[start, end)`` each) are computed again.

    Args:
        deviations: of the moved tokens, in order (:func:`relative_deviations`); ``None``: not measured.
    """
    moved = np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in runs])
    must = np.concatenate([np.arange(end - start) < repair.first_tokens for start, end in runs])
    must[max(len(moved) - (runs[-1][1] - runs[-1][0]), len(moved) - repair.last_tokens) :] = True
    if repair.share is not None and repair.share >= 1:
        return Chosen(moved, 0.0)
    if deviations is None:
        assert not repair.is_measured, "a choice by deviations that were not measured"
        return Chosen(moved[must], None)
    assert len(deviations) == len(moved), f"{len(deviations)} deviations of {len(moved)} tokens"
    worst: npt.NDArray[np.intp] = np.argsort(-np.where(must, np.inf, deviations), kind="stable")
    # What is left behind the worst 0, 1, 2, ... of them.
    left = np.append(np.cumsum(deviations[worst][::-1], dtype=np.float64)[::-1], 0.0)
    if repair.share is None:
        count = int(np.argmax(left <= repair.max_deviation**2 * len(moved)))
        count = min(count, int(MOST_REPAIRED * len(moved)))
    else:
        count = round(repair.share * len(moved))
    count = max(count, int(must.sum()))
    return Chosen(np.sort(moved[worst[:count]]), float(np.sqrt(left[count] / len(moved))))
