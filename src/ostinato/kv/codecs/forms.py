"""How a few numbers of a block become bytes and back.

Blocks are ``[layers, kv_heads, tokens, dim]`` in the arena's data type. Whatever loses something refuses
numbers it cannot come near: infinities, NaNs, and what is too large for it.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]

# float16 holds steps and zero points; it rounds by at most this share, or by this much near zero.
_MARGIN = 2.0**-10
_TINY = 2.0**-24
_LARGEST = torch.finfo(torch.float16).max


class Form(Protocol):
    """One way to write numbers."""

    def num_bytes(self, shape: tuple[int, int, int, int]) -> int: ...

    def pack(self, block: Tensor, into: Bytes) -> bool:
        """``False``: it has numbers that cannot be written that way, and ``into`` holds anything."""

    def unpack(self, part: Bytes, block: Tensor) -> None:
        """Writes what ``pack`` made to ``block``. Any bytes give some numbers."""


class Cast:
    """As numbers of a floating-point type. Of the block's own type it keeps every bit."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def num_bytes(self, shape: tuple[int, int, int, int]) -> int:
        return prod(shape) * self._dtype.itemsize

    def pack(self, block: Tensor, into: Bytes) -> bool:
        if block.dtype != self._dtype:
            largest = torch.finfo(self._dtype).max
            # A comparison with NaN is false, and a NaN anywhere makes both NaN.
            if not bool((block.amin() >= -largest) & (block.amax() <= largest)):
                return False
        _write(block.to(self._dtype), into)
        return True

    def unpack(self, part: Bytes, block: Tensor) -> None:
        block.copy_(_read(part, self._dtype).view(block.shape))


class Integers:
    """In ``bits`` (4 or 8) bits a number, and a zero point and a step (float16 both) for every group of them.

    A group is a channel's next tokens or a token's next channels, ``longest_group`` at most where that can
    be had. The zero point is never above the group's smallest number and the step wide enough to reach its
    largest, so that an error is half a step at most: about (largest - smallest) / 30 or / 510.
    """

    def __init__(self, bits: int, *, along_tokens: bool, longest_group: int) -> None:
        self._bits = bits
        self._levels = (1 << bits) - 1
        self._axis = 2 if along_tokens else 3
        self._longest_group = longest_group

    def num_bytes(self, shape: tuple[int, int, int, int]) -> int:
        num_groups = prod(shape) // _group_size(shape[self._axis], self._longest_group)
        return 4 * num_groups + -(-prod(shape) * self._bits // 8)

    def pack(self, block: Tensor, into: Bytes) -> bool:
        grouped, axis = block.float().reshape(self._grouped(block.shape)), self._axis + 1
        low, high = grouped.amin(axis, keepdim=True), grouped.amax(axis, keepdim=True)
        zero = (torch.minimum(low * (1 - _MARGIN), low * (1 + _MARGIN)) - _TINY).half()
        step = ((high - zero.float()) * ((1 + _MARGIN) / self._levels) + _TINY).half()
        if not bool(((step > 0) & (step <= _LARGEST)).all()):  # nor is it where the zero point is not finite
            return False
        # Half a step more, cut off, is the nearest. torch's round() shares out even a few numbers among
        # threads, and the way to eight bits is three times as fast by sixteen.
        numbers = (grouped - zero.float()).div_(step.float()).add_(0.5)
        numbers = numbers.to(torch.int16).to(torch.uint8).flatten()
        if self._bits == 4:
            half = -(-len(numbers) // 2)
            upper = numbers[half:] << 4
            numbers = numbers[:half].clone()
            numbers[: len(upper)] |= upper
        head = 2 * step.numel()
        _write(zero, into[:head])
        _write(step, into[head : 2 * head])
        _write(numbers, into[2 * head :])
        return True

    def unpack(self, part: Bytes, block: Tensor) -> None:
        shape = self._grouped(block.shape)
        runs = [1 if place == self._axis + 1 else size for place, size in enumerate(shape)]
        head = 2 * prod(runs)
        zero = _read(part[:head], torch.float16).view(runs).float()
        step = _read(part[head : 2 * head], torch.float16).view(runs).float()
        numbers = torch.from_numpy(part[2 * head :])
        if self._bits == 4:
            numbers = torch.cat([numbers & 15, numbers >> 4])[: prod(shape)]
        block.copy_(numbers.view(shape).float().mul_(step).add_(zero).view(block.shape))

    def _grouped(self, shape: torch.Size) -> list[int]:
        size = _group_size(shape[self._axis], self._longest_group)
        before, after = shape[: self._axis], shape[self._axis + 1 :]
        return [*before, shape[self._axis] // size, size, *after]


def _group_size(length: int, longest: int) -> int:
    """All of ``length``, or what divides it evenly into groups that are neither longer nor very short."""
    if length <= longest:
        return length
    fitting = (size for size in range(longest, longest // 2 - 1, -1) if length % size == 0)
    return next(fitting, length)


def _write(numbers: Tensor, into: Bytes) -> None:
    # numpy copies in the caller's thread; torch would wake its own for so many bytes.
    into[:] = numbers.contiguous().cpu().flatten().view(torch.uint8).numpy()


def _read(part: Bytes, dtype: torch.dtype) -> Tensor:
    # Copied: bytes seen as wider numbers have to begin where such numbers may.
    return torch.from_numpy(part.copy()).view(dtype)
