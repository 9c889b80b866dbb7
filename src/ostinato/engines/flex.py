"""One step's attention as one call of torch's FlexAttention, for devices.

The whole arena is the keys; a mask says what each row sees of it, so nothing is gathered. For each tile of
rows only those tiles of the arena are looked at in which something lies that one of them sees: a block that
several sequences share is read once for all of them.

Under the mask a weight is zero, and zero times infinity is not: what lies in the arena has to be finite, also
where nothing was written yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ..kv.arena import Arena
from ..types import SequencePlan
from .attention import LayerRule

_MAX_VARIANTS = 64
TILE = 128  # rows, and slots, that are looked at together: torch's own choice

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@functools.cache
def compiled() -> Callable[..., Any]:
    """FlexAttention as a kernel. Sizes are left open: rows and sequences are other ones in every step.

    What torch still makes apart (each window, one tile of rows or more) is more than it allows. Beyond
    its limit it would run uncompiled, and the scores of all rows with the whole arena are a lot.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MAX_VARIANTS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


class FlexStep:
    """The rows of one step for all layers; their KV is in the arena already."""

    def __init__(self, arena: Arena, sequences: Sequence[SequencePlan], device: torch.device) -> None:
        self._arena = arena
        self._sequences = sequences
        self._block_size = sequences[0].block_size
        self._device = device
        self._masks: dict[int | None, BlockMask] = {}
        lengths = [len(sequence.tokens) for sequence in sequences]
        self._num_rows = sum(lengths)
        self._owner = self._tensor(np.repeat(np.arange(len(sequences)), lengths))
        self._place = self._tensor(np.concatenate([sequence.row_places for sequence in sequences]))
        self._logical = self._lay_out_blocks()

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)

    def _lay_out_blocks(self) -> Tensor:
        """Int32 ``[sequences, blocks]``: where each block of the arena stands in a sequence's table, or -1.

        There are at least two rows, so that code made for any number serves one, too.
        """
        size = self._block_size
        num_blocks = -(-self._arena.num_slots // size)
        tables = [s.block_ids[: int(s.row_places[-1]) // size + 1] for s in self._sequences]
        lengths = [len(table) for table in tables]
        logical = torch.full((max(2, len(tables)), num_blocks), -1, dtype=torch.int32, device=self._device)
        rows = self._tensor(np.repeat(np.arange(len(tables)), lengths))
        at = torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]))
        logical[rows, self._tensor(np.concatenate(tables))] = at.to(self._device)
        return logical

    def attend(
        self, layer: int, query: Tensor, rule: LayerRule, *, with_lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            query: ``[1, heads, T, key_dim]``.
            with_lse: whether the log-sum-exp is wanted; otherwise it is empty.

        Returns:
            output ``[1, T, heads, value_dim]`` and log-sum-exp of the scores ``[T, heads]``, float32.
        """
        keys, values = self._arena.keys[layer], self._arena.values[layer]
        output = compiled()(
            query,
            keys.unsqueeze(0),
            values.unsqueeze(0),
            score_mod=None if rule.softcap is None else _squashed(rule.softcap),
            block_mask=self._mask(rule.window),
            scale=rule.scaling,
            enable_gqa=query.shape[1] != keys.shape[0],
            **({"return_aux": AuxRequest(lse=True)} if with_lse else {}),
        )
        lse = query.new_empty(0)
        if with_lse:
            output, aux = output
            lse = aux.lse[0].T
        return output.transpose(1, 2), lse

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            tiles = self._tiles(window)
            width = max(2, max(len(row) for row in tiles))
            indices = np.zeros((len(tiles), width), np.int32)
            for row, found in enumerate(tiles):
                indices[row, : len(found)] = found
            counts = np.array([len(row) for row in tiles], np.int32)
            self._masks[window] = BlockMask.from_kv_blocks(
                torch.from_numpy(counts).to(self._device)[None, None],
                torch.from_numpy(indices).to(self._device)[None, None],
                BLOCK_SIZE=(TILE, TILE),
                mask_mod=self._visible(window),
                seq_lengths=(self._num_rows, self._arena.num_slots),
                compute_q_blocks=False,
            )
        return self._masks[window]

    def _tiles(self, window: int | None) -> list[np.ndarray[Any, Any]]:
        """For each tile of rows the tiles of the arena in which something lies that one of them sees."""
        size = self._block_size
        offsets = np.append(np.arange(0, size, TILE), size - 1)  # a block may lie in several
        found: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(-(-self._num_rows // TILE))]
        start = 0
        for sequence in self._sequences:
            places, end = sequence.row_places, start + len(sequence.tokens)
            for tile in range(start // TILE, -(-end // TILE)):
                first = max(tile * TILE, start) - start
                last = min((tile + 1) * TILE, end) - 1 - start
                oldest = 0 if window is None else max(0, int(places[first]) + 1 - window)
                blocks = sequence.block_ids[oldest // size : int(places[last]) // size + 1]
                found[tile].append(((blocks[:, None] * size + offsets) // TILE).ravel())
            start = end
        return [np.unique(np.concatenate(parts)) for parts in found]

    def _visible(self, window: int | None) -> MaskFunction:
        owner, places, logical, size = self._owner, self._place, self._logical, self._block_size

        def sees(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            place = logical[owner[row], slot // size] * size + slot % size
            return (place >= 0) & (place <= places[row])

        if window is None:
            return sees
        width = window

        def sees_near(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            place = logical[owner[row], slot // size] * size + slot % size
            return (place >= 0) & (place <= places[row]) & (places[row] - place < width)

        return sees_near


def _squashed(softcap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    def squash(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return squash
