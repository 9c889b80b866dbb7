"""Expected attention: what rows that are still to come will give to each key, from how queries were so far.

Devoto, Jeblick and Jégou, arXiv 2510.00636. Before they are turned by their position, the queries of a head
are taken to be normally distributed. Turned as rows of the next positions will be, on average, their mean μ
and covariance Σ give the expected weight of a key k: ``exp(μ·k s + ½ kᵀΣk s²)``, where s is the scale of the
scores. Its share among all keys, plus a little, is multiplied by the length of the key's value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..reuse.rope import Rotation
from ..types import TokenArray

NUM_AHEAD = 512
"""Positions over which the turn is averaged."""
NUM_LEFT_OUT = 4
"""First rows of a sequence, whose queries are unlike all others."""
_EPSILON = 1e-2


class QueryStatistics:
    """Mean and covariance of one sequence's queries, for each layer and query head.

    Sums are in float64: the covariance is a difference of two large numbers.
    """

    def __init__(self, rotations: Sequence[Rotation]) -> None:
        self._rotations = rotations
        self._num_rows = 0
        self._sums: list[Tensor] = []
        self._products: list[Tensor] = []

    def add(self, positions: TokenArray, queries: Sequence[Tensor]) -> None:
        """Rows at ``positions``; of each layer their queries ``[heads, rows, dim]``, turned."""
        rows = np.flatnonzero(positions >= NUM_LEFT_OUT)
        if not self._sums:
            for layer in queries:
                heads, _, dim = layer.shape
                self._sums.append(torch.zeros(heads, dim, dtype=torch.float64, device=layer.device))
                self._products.append(torch.zeros(heads, dim, dim, dtype=torch.float64, device=layer.device))
        if not len(rows):
            return
        self._num_rows += len(rows)
        at = torch.from_numpy(rows)
        back = -positions[rows].astype(np.float64)
        for number, (asked, rotation) in enumerate(zip(queries, self._rotations, strict=True)):
            plain = turn(asked[:, at.to(asked.device)].float(), rotation, back)
            self._sums[number] += plain.sum(dim=1, dtype=torch.float64)
            self._products[number] += torch.einsum("hri,hrj->hij", plain, plain)

    def expect(
        self, layer: int, keys: Tensor, values: Tensor, next_position: int, scale: float, num_sinks: int
    ) -> Tensor:
        """Scores of the keys of a layer.

        Args:
            keys, values: ``[kv_heads, places, dim]``, as they lie in the arena.
            next_position: of the first row that is still to come.
            num_sinks: so many first places have no part in it; they get as much as the best of the others.

        Returns:
            float32 ``[kv_heads, places]``.
        """
        count = max(1, self._num_rows)
        mean = (self._sums[layer] / count).float()
        covariance = (self._products[layer] / count).float() - mean[:, :, None] * mean[:, None, :]
        matrix = average_turn(self._rotations[layer], mean.shape[1], next_position).to(mean)
        mean, covariance = mean @ matrix.T, matrix @ covariance @ matrix.T
        kv_heads, num_places, dim = keys.shape
        first = min(num_sinks, num_places)
        if first == num_places:
            return torch.ones(kv_heads, num_places)
        seen = keys[:, None, first:].float()
        mean = mean.view(kv_heads, -1, 1, dim)
        covariance = covariance.view(kv_heads, -1, dim, dim)
        spread = torch.einsum("kgni,kgni->kgn", seen @ covariance, seen.expand(-1, mean.shape[1], -1, -1))
        logits = (seen * mean).sum(-1) * scale + spread * (0.5 * scale * scale)
        share = logits.softmax(-1).mean(dim=1)
        scores = (share + _EPSILON) * values[:, first:].float().norm(dim=-1)
        return torch.nn.functional.pad(scores, (first, 0), value=float(scores.max())).cpu()


def turn(vectors: Tensor, rotation: Rotation, distances: npt.NDArray[np.float64]) -> Tensor:
    """Vectors ``[heads, rows, dim]`` turned by so many positions each, as keys are (float32)."""
    angles = distances[:, None] * np.array(rotation.frequencies, np.float64)
    cos, sin = (torch.from_numpy(f(angles).astype(np.float32)).to(vectors.device) for f in (np.cos, np.sin))
    pairs = torch.tensor([rotation.first, rotation.second], dtype=torch.int64, device=vectors.device)
    first, second = pairs.unbind()
    turned = vectors.clone()
    a, b = vectors[..., first], vectors[..., second]
    turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
    return turned


def average_turn(rotation: Rotation, dim: int, next_position: int) -> Tensor:
    """The mean of the turns by the next positions, as a matrix float32 ``[dim, dim]``."""
    positions = next_position + np.arange(NUM_AHEAD, dtype=np.float64)
    angles = positions[:, None] * np.array(rotation.frequencies, np.float64)
    cos, sin = np.cos(angles).mean(axis=0), np.sin(angles).mean(axis=0)
    first, second = np.array(rotation.first, np.intp), np.array(rotation.second, np.intp)
    matrix = np.eye(dim)
    matrix[first, first] = matrix[second, second] = cos
    matrix[first, second], matrix[second, first] = -sin, sin
    return torch.from_numpy(matrix.astype(np.float32))
