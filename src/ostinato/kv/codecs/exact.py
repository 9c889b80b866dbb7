"""Every bit of a block: what is used unless something else is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Bytes = npt.NDArray[np.uint8]


class RawCodec:
    """Every bit of ``groups``, the arena's tensors ``[layers, kv_heads, num_slots, dim]``.

    In ordinary memory numpy copies, in the caller's thread: torch shares a copy out among its own threads,
    and waking them costs ten times what copying a block does (and a thread that waits for others' blocks
    must not have a team of its own).

    A payload holds exactly the block's tokens in all layers: group by group (see ``Arena.groups``: layers of
    one shape), ``[layers, kv_heads, block_size, dim]`` each, keys before values. No padding is stored.
    """

    name = "raw"
    is_exact = True
    window_tokens = 0

    def __init__(self, groups: Sequence[Tensor], block_size: int) -> None:
        assert groups, "an arena has groups"
        self._groups = tuple(groups)
        self._block_size = block_size
        self._sizes = [_block_elements(group, block_size) * group.dtype.itemsize for group in groups]
        self._bytes = [_as_bytes(group) for group in groups] if groups[0].device.type == "cpu" else None
        self.payload_bytes = sum(self._sizes)

    @torch.inference_mode()
    def encode(self, slot: int, into: memoryview) -> bool:
        """Copies the block that begins at ``slot`` into ``into``, ``payload_bytes`` long. Never refuses."""
        if self._bytes is None:
            for block, piece in self._pieces(slot, into):
                piece.copy_(block)
        else:
            for rows, part in self._rows(slot, into):
                np.copyto(part, rows)
        return True

    @torch.inference_mode()
    def decode(self, payload: memoryview, slot: int) -> None:
        """Writes what ``encode`` made to the block that begins at ``slot``."""
        if self._bytes is None:
            for block, piece in self._pieces(slot, payload):
                block.copy_(piece)
        else:
            for rows, part in self._rows(slot, payload):
                np.copyto(rows, part)

    def _pieces(self, slot: int, payload: memoryview) -> list[tuple[Tensor, Tensor]]:
        assert len(payload) == self.payload_bytes, f"{len(payload)} bytes, not {self.payload_bytes}"
        data = torch.frombuffer(payload, dtype=torch.uint8)
        parts = _cut(data, self._sizes)
        blocks = [group[:, :, slot : slot + self._block_size] for group in self._groups]
        return [(b, part.view(b.dtype).view(b.shape)) for b, part in zip(blocks, parts, strict=True)]

    def _rows(self, slot: int, payload: memoryview) -> list[tuple[_Bytes, _Bytes]]:
        """Of every group, the block in the arena and in the payload: bytes, a row for each layer and head."""
        assert len(payload) == self.payload_bytes, f"{len(payload)} bytes, not {self.payload_bytes}"
        assert self._bytes is not None
        pairs = []
        end = 0
        for group, data, size in zip(self._groups, self._bytes, self._sizes, strict=True):
            start, end = end, end + size
            token_bytes = group.shape[3] * group.dtype.itemsize
            rows = data[:, slot * token_bytes : (slot + self._block_size) * token_bytes]
            part = np.frombuffer(payload[start:end], np.uint8).reshape(rows.shape)
            pairs.append((rows, part))
        return pairs


def _as_bytes(group: Tensor) -> _Bytes:
    """A group's memory as bytes, ``[layers * kv_heads, num_slots * bytes of a token]``; not a copy."""
    assert group.is_contiguous(), "an arena's groups lie in one piece"
    data: _Bytes = group.view(torch.uint8).view(group.shape[0] * group.shape[1], -1).numpy()
    return data


def _block_elements(group: Tensor, block_size: int) -> int:
    layers, heads, _, dim = group.shape
    return int(layers * heads * block_size * dim)


def _cut(data: Tensor, sizes: list[int]) -> list[Tensor]:
    return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
