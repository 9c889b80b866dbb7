"""What is done to rows of numbers, compiled: one pass, where torch's operations take half a dozen."""

from __future__ import annotations

import numba
import numpy as np

_FLAGS = {"nogil": True, "cache": True, "error_model": "numpy"}


# Vectors need leave to sum in lanes: the same lanes for every row, so that no row depends on others.
@numba.njit(**_FLAGS, fastmath={"reassoc", "contract"})
def normalize_rows(rows, weight, epsilon, normal):
    """Each row divided by its root mean square, times ``weight``.

    Args:
        rows: float32 ``[rows, width]``.
        weight: float32 ``[width]``.
        normal: as ``rows``, written.
    """
    num_rows, width = rows.shape
    for i in range(num_rows):
        row, target = rows[i], normal[i]
        total = np.float32(0)
        for j in range(width):
            total += row[j] * row[j]
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(epsilon))
        for j in range(width):
            target[j] = weight[j] * (row[j] * scale)


# Vectors need leave to reorder the maximum of a row; what is no number has no place in it.
@numba.njit(**_FLAGS, fastmath={"nnan", "nsz"})
def quantize_rows(rows, whole, steps, levels, num_mixed):
    """Each row, mixed, to whole numbers in ``[1, 2 levels + 1]`` and the step between them.

    Mixed is what ``num_mixed`` (a power of two) equal parts of a row have at the same place: by the Hadamard
    matrix of that size, not normalised.

    Args:
        rows: float32 ``[rows, width]``.
        whole: uint8 ``[at least rows, width]``, written; what is spare becomes 0.
        steps: float32 ``[as many, 1]``, written.
        levels: the number that a row's largest magnitude becomes, beside ``levels + 1`` for 0.
    """
    num_rows, width = rows.shape
    row = np.empty(width, np.float32)
    zero = np.float32(levels + 1)
    for i in range(num_rows):
        target = whole[i]
        row[:] = rows[i]
        run = width // num_mixed
        while run < width:
            for start in range(0, width, 2 * run):
                x, y = row[start : start + run], row[start + run : start + 2 * run]
                for j in range(run):
                    total, difference = x[j] + y[j], x[j] - y[j]
                    x[j], y[j] = total, difference
            run *= 2
        largest = np.float32(0)
        for j in range(width):
            largest = max(largest, abs(row[j]))
        step = largest / np.float32(levels)
        scale = np.float32(levels) / largest if step > 0 else np.float32(0)
        for j in range(width):
            target[j] = np.uint8(np.int32(np.rint(row[j] * scale) + zero))
        steps[i, 0] = step
    for i in range(num_rows, len(whole)):
        whole[i] = 0
        steps[i, 0] = 0
