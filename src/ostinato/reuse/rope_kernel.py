"""Moving keys and values inside an arena on a processor, compiled: one pass over what is moved.

In torch's operations the same takes several passes, and one call after the other for every run of slots.
"""

from __future__ import annotations

import numba

_FLAGS = {"nogil": True, "cache": True, "error_model": "numpy"}


@numba.njit(**_FLAGS)
def turn_keys(keys, moves, first, second, rest, cos, sin):
    """Keys of one layer to other slots, turned.

    Args:
        keys: float32 ``[kv_heads, slots, dim]``.
        moves: int64 ``[moves, 4]``: source, target, length, row of ``cos`` and ``sin``.
        first, second: int64 ``[pairs]``, elements that turn with one another; ``rest``: those that do not.
        cos, sin: float32 ``[rows, pairs]``.
    """
    num_pairs = len(first)
    lies_together = num_pairs > 0
    for i in range(1, num_pairs):
        lies_together &= first[i] == first[0] + i and second[i] == second[0] + i
    for m in range(len(moves)):
        source, target, length, row = moves[m]
        c, s = cos[row], sin[row]
        for head in range(keys.shape[0]):
            for token in range(length):
                old, new = keys[head, source + token], keys[head, target + token]
                if lies_together:  # in halves: these loops become vectors
                    a, b = old[first[0] : first[0] + num_pairs], old[second[0] : second[0] + num_pairs]
                    x, y = new[first[0] : first[0] + num_pairs], new[second[0] : second[0] + num_pairs]
                    for i in range(num_pairs):
                        x[i] = a[i] * c[i] - b[i] * s[i]
                    for i in range(num_pairs):
                        y[i] = b[i] * c[i] + a[i] * s[i]
                else:
                    for i in range(num_pairs):
                        p, q = old[first[i]], old[second[i]]
                        new[first[i]] = p * c[i] - q * s[i]
                        new[second[i]] = q * c[i] + p * s[i]
                for element in rest:
                    new[element] = old[element]


@numba.njit(**_FLAGS)
def copy_values(values, moves):
    """Values of one layer, float32 ``[kv_heads, slots, dim]``, to other slots as they are."""
    for m in range(len(moves)):
        source, target, length = moves[m, 0], moves[m, 1], moves[m, 2]
        for head in range(values.shape[0]):
            values[head, target : target + length] = values[head, source : source + length]
