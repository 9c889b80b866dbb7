"""What a block's KV looks like outside of the arena.

A payload holds exactly the block's tokens in all layers: group by group (see ``Arena.groups``: layers of one
shape), ``[layers, kv_heads, block_size, dim]`` each, keys before values. No padding is stored.

``RawCodec`` keeps every bit and is what is used unless something else is asked for. The others lose some;
their names go into the namespace, so that one's payload is never taken for another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Bytes = npt.NDArray[np.uint8]
_LARGEST_HALF = 65504.0


class RawCodec:
    """Every bit of ``groups``, the arena's tensors ``[layers, kv_heads, num_slots, dim]``.

    In ordinary memory numpy copies, in the caller's thread: torch shares a copy out among its own threads,
    and waking them costs ten times what copying a block does (and a thread that waits for others' blocks
    must not have a team of its own).
    """

    name = "raw"

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


class Int8Codec:
    """Eight bits a number; a scale and a zero point for every token of every head (float32 both).

    The error of a number is at most half a step: (largest - smallest of its token's head) / 510.
    """

    name = "int8 per token"

    def __init__(self, groups: Sequence[Tensor], block_size: int) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self._sizes = [_packed_bytes(group, block_size, 8, (3,), 4) for group in groups]
        self.payload_bytes = sum(self._sizes)

    @torch.inference_mode()
    def encode(self, slot: int, into: memoryview) -> bool:
        """Quantises the block at ``slot``. ``False``: it has numbers that are not finite; not for storing."""
        for group, part in _parts(self._groups, self._sizes, into):
            block = group[:, :, slot : slot + self._block_size].float()
            if not _pack(block, part, bits=8, axis=3, dtype=torch.float32):
                return False
        return True

    @torch.inference_mode()
    def decode(self, payload: memoryview, slot: int) -> None:
        for group, part in _parts(self._groups, self._sizes, payload):
            block = group[:, :, slot : slot + self._block_size]
            block.copy_(_unpack(part, block.shape, bits=8, axis=3, dtype=torch.float32))


class Int4Codec:
    """Four bits a number: keys by channel over the block's tokens, values by token; scales are float16.

    Keys have channels of very different size, the same in all tokens; values have not. Groups come in pairs,
    keys first. Blocks of few tokens gain little: every channel's scale and zero point take four bytes.
    """

    name = "int4 keys per channel, values per token"

    def __init__(self, groups: Sequence[Tensor], block_size: int) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self._axes = [2 if place % 2 == 0 else 3 for place in range(len(self._groups))]
        self._sizes = [
            _packed_bytes(group, block_size, 4, (axis,), 2)
            for group, axis in zip(self._groups, self._axes, strict=True)
        ]
        self.payload_bytes = sum(self._sizes)

    @torch.inference_mode()
    def encode(self, slot: int, into: memoryview) -> bool:
        """Quantises the block at ``slot``. ``False``: numbers too large for float16, or not finite."""
        parts = _parts(self._groups, self._sizes, into)
        for (group, part), axis in zip(parts, self._axes, strict=True):
            block = group[:, :, slot : slot + self._block_size].float()
            if not _pack(block, part, bits=4, axis=axis, dtype=torch.float16):
                return False
        return True

    @torch.inference_mode()
    def decode(self, payload: memoryview, slot: int) -> None:
        parts = _parts(self._groups, self._sizes, payload)
        for (group, part), axis in zip(parts, self._axes, strict=True):
            block = group[:, :, slot : slot + self._block_size]
            block.copy_(_unpack(part, block.shape, bits=4, axis=axis, dtype=torch.float16))


# ---------------------------------------------------------------- inside


def _as_bytes(group: Tensor) -> _Bytes:
    """A group's memory as bytes, ``[layers * kv_heads, num_slots * bytes of a token]``; not a copy."""
    assert group.is_contiguous(), "an arena's groups lie in one piece"
    data: _Bytes = group.view(torch.uint8).view(group.shape[0] * group.shape[1], -1).numpy()
    return data


def _block_elements(group: Tensor, block_size: int) -> int:
    layers, heads, _, dim = group.shape
    return int(layers * heads * block_size * dim)


def _packed_bytes(group: Tensor, block_size: int, bits: int, axes: tuple[int, ...], item_bytes: int) -> int:
    """Bytes of one group's block: the numbers, and two parameters for each run along ``axes``."""
    shape = [group.shape[0], group.shape[1], block_size, group.shape[3]]
    num_runs = prod(size for axis, size in enumerate(shape) if axis not in axes)
    return -(-prod(shape) * bits // 8) + 2 * num_runs * item_bytes


def _parts(groups: Sequence[Tensor], sizes: list[int], payload: memoryview) -> list[tuple[Tensor, Tensor]]:
    assert len(payload) == sum(sizes), f"{len(payload)} bytes, not {sum(sizes)}"
    data = torch.frombuffer(payload, dtype=torch.uint8)
    return list(zip(groups, _cut(data, sizes), strict=True))


def _cut(data: Tensor, sizes: list[int]) -> list[Tensor]:
    return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _pack(block: Tensor, into: Tensor, *, bits: int, axis: int, dtype: torch.dtype) -> bool:
    """Quantises ``block`` (float32) along ``axis``: scales, zero points, then the numbers."""
    low, high = block.amin(axis, keepdim=True), block.amax(axis, keepdim=True)
    # A comparison with NaN is false: what is not finite does not pass.
    if not bool(((low >= -_LARGEST_HALF) & (high <= _LARGEST_HALF)).all()):
        return False
    levels = (1 << bits) - 1
    scale = ((high - low) / levels).to(dtype)
    zero = low.to(dtype)
    step = torch.where(scale == 0, 1, scale.float())
    numbers = ((block - zero.float()) / step).round_().clamp_(0, levels).to(torch.uint8).flatten()
    if bits == 4:
        if len(numbers) % 2:
            numbers = torch.cat([numbers, numbers.new_zeros(1)])
        numbers = numbers[0::2] | (numbers[1::2] << 4)
    head = scale.numel() * dtype.itemsize
    into[:head].copy_(scale.flatten().contiguous().cpu().view(torch.uint8))
    into[head : 2 * head].copy_(zero.flatten().contiguous().cpu().view(torch.uint8))
    into[2 * head :].copy_(numbers)
    return True


def _unpack(part: Tensor, shape: torch.Size, *, bits: int, axis: int, dtype: torch.dtype) -> Tensor:
    runs = [1 if place == axis else size for place, size in enumerate(shape)]
    head = prod(runs) * dtype.itemsize
    # Cloned: a view of bytes as wider numbers needs an aligned start.
    scale = part[:head].clone().view(dtype).view(runs).float()
    zero = part[head : 2 * head].clone().view(dtype).view(runs).float()
    numbers = part[2 * head :]
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=1).flatten()[: prod(shape)]
    return numbers.view(shape).float() * scale + zero
