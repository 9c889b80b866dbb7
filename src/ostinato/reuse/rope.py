"""Moving KV to other positions: keys turn by the difference, values stay as they are.

A rotary embedding turns pairs of a key's elements by ``position * frequency``. Keys lie in the arena turned
already, so to move them they are turned by the difference: exactly, whatever the frequencies are (default,
linear, llama3, yarn, per layer), as long as they are the same at both positions. A scale that the embedding
puts on keys (yarn) was put on before and is not again. Elements that are in no pair (partial rotary), and
layers that know no positions, are copied.

How a model's keys turn is observed (``engines/rotations.py``). What came through a lossy codec lies in the
arena as numbers like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostinato.kv.arena import Arena
from ostinato.types import SlotMove, SlotShift


@dataclass(frozen=True, slots=True)
class Rotation:
    """How one layer's keys turn with their position.

    Pair ``i`` is elements ``first[i]`` and ``second[i]``; it turns by ``frequencies[i]`` radians a position,
    from the first towards the second. No pairs: keys are the same at every position.
    """

    first: tuple[int, ...] = ()
    second: tuple[int, ...] = ()
    frequencies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.first) == len(self.second) == len(self.frequencies), "pairs without their partner"
        used = (*self.first, *self.second)
        assert len(set(used)) == len(used), "an element turns in two pairs"


@dataclass(frozen=True, slots=True)
class Movement:
    """One rotation for each layer; or none, and why this model's KV cannot be moved."""

    rotations: tuple[Rotation, ...] = ()
    reason: str | None = None


class Mover:
    """Moves KV inside an arena, in one pass over what is moved. Used by one thread."""

    def __init__(self, arena: Arena, rotations: Sequence[Rotation]) -> None:
        assert len(rotations) == len(arena.layers), "a rotation for each layer"
        kernel = _load_kernel() if arena.device.type == "cpu" and arena.dtype == torch.float32 else None
        self._num_slots = arena.num_slots
        self._layers = [
            _Layer(keys, values, rotation, kernel)
            for keys, values, rotation in zip(arena.keys, arena.values, rotations, strict=True)
        ]

    @torch.inference_mode()
    def move(self, shifts: Sequence[SlotShift]) -> None:
        """Does ``shifts`` in order, in all layers."""
        if not shifts:
            return
        distances = sorted({shift.distance for shift in shifts})
        rows = {distance: row for row, distance in enumerate(distances)}
        for shift in shifts:
            assert abs(shift.source - shift.target) >= shift.length, f"slots overlap: {shift}"
            assert min(shift.source, shift.target) >= 0, f"no such slots: {shift}"
            assert max(shift.source, shift.target) + shift.length <= self._num_slots, (
                f"no such slots: {shift}"
            )
        table = np.array([(s.source, s.target, s.length, rows[s.distance]) for s in shifts], np.int64)
        for layer in self._layers:
            layer.move(table, np.array(distances, np.float64))

    @torch.inference_mode()
    def move_each(self, move: SlotMove) -> None:
        """Moves KV in every layer and key head from slots of its own, and each token by its own distance.

        Where distances lie close together, as they do in a sequence that is pushed together: of every
        distance between the least and the greatest there is a table.
        """
        distances = move.distances
        assert distances is not None, "a move without distances is the arena's"
        if not distances.size:
            return
        least = int(distances.min())
        span = np.arange(least, int(distances.max()) + 1, dtype=np.float64)
        targets = torch.from_numpy(move.targets.astype(np.int64))
        for number, layer in enumerate(self._layers):
            layer.move_each(move.sources[number], targets, distances[number] - least, span)


class _Layer:
    """One layer's keys and values, ``[kv_heads, slots, dim]``."""

    def __init__(self, keys: Tensor, values: Tensor, rotation: Rotation, kernel: ModuleType | None) -> None:
        self._keys = keys
        self._values = values
        self._kernel = kernel
        order = np.argsort(rotation.first)
        self._first = np.array(rotation.first, np.int64)[order]
        self._second = np.array(rotation.second, np.int64)[order]
        self._frequencies = np.array(rotation.frequencies, np.float64)[order]
        turning = {*rotation.first, *rotation.second}
        assert turning <= set(range(keys.shape[2])), f"an element that keys of {keys.shape[2]} do not have"
        self._rest = np.array([i for i in range(keys.shape[2]) if i not in turning], np.int64)

    def move(self, table: npt.NDArray[np.int64], distances: npt.NDArray[np.float64]) -> None:
        """Angles are computed in float64, for they are as large as positions; the turn itself in float32."""
        angles = distances[:, None] * self._frequencies
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        if self._kernel is not None:
            keys, values = self._keys.numpy(), self._values.numpy()
            self._kernel.turn_keys(keys, table, self._first, self._second, self._rest, cos, sin)
            self._kernel.copy_values(values, table)
            return
        device = self._keys.device
        first, second, rest, c, s = (
            torch.from_numpy(array).to(device) for array in (self._first, self._second, self._rest, cos, sin)
        )
        for source, target, length, row in table.tolist():
            old, new = self._keys[:, source : source + length], self._keys[:, target : target + length]
            a, b = old[..., first].float(), old[..., second].float()
            new[..., first] = (a * c[row] - b * s[row]).to(new.dtype)
            new[..., second] = (b * c[row] + a * s[row]).to(new.dtype)
            new[..., rest] = old[..., rest]
            self._values[:, target : target + length] = self._values[:, source : source + length]

    def move_each(
        self,
        sources: npt.NDArray[np.int64],
        targets: Tensor,
        rows: npt.NDArray[np.int64],
        span: npt.NDArray[np.float64],
    ) -> None:
        """``rows`` of ``span`` are the distances; sources and rows ``[kv_heads, number]``."""
        device = self._keys.device
        angles = span[:, None] * self._frequencies
        cos, sin = (torch.from_numpy(f(angles).astype(np.float32)).to(device) for f in (np.cos, np.sin))
        first, second = (torch.from_numpy(array).to(device) for array in (self._first, self._second))
        targets = targets.to(device)
        for head in range(self._keys.shape[0]):
            source = torch.from_numpy(np.ascontiguousarray(sources[head])).to(device)
            row = torch.from_numpy(np.ascontiguousarray(rows[head])).to(device)
            old = self._keys[head].index_select(0, source)
            new = old.clone()
            a, b, c, s = old[:, first].float(), old[:, second].float(), cos[row], sin[row]
            new[:, first] = (a * c - b * s).to(new.dtype)
            new[:, second] = (b * c + a * s).to(new.dtype)
            self._keys[head].index_copy_(0, targets, new)
            self._values[head].index_copy_(0, targets, self._values[head].index_select(0, source))


@cache
def _load_kernel() -> ModuleType | None:
    """The compiled kernel; ``None`` where numba cannot be had."""
    try:
        from . import rope_kernel
    except ImportError:
        return None
    return rope_kernel
