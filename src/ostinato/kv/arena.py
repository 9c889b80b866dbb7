"""The preallocated tensors that hold KV, one slot a token.

Layout, per layer: keys ``[kv_heads, num_slots, key_dim]`` and values ``[kv_heads, num_slots, value_dim]``.
Tokens of one head lie next to each other, so a run of consecutive slots is a *view* that attention reads
where it lies; nothing is gathered. Layers of one shape share one tensor, so that copying slots in all of
them is one operation.

Memory is reserved at once and touched only as slots are written: the operating system gives pages then (on
other devices it is set to zero, because masks there hide what is finite only). Where
blocks are read in from below that is most of the cost, so there it is asked for ahead (``Arena.populate``).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..types import SlotCopy, SlotMove

_PIECE_BYTES = 4 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The KV of one token in one layer, in elements."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class Arena:
    """KV of ``num_slots`` tokens for every layer in ``layers`` (see the module's text for the layout).

    Attributes:
        keys, values: one tensor per layer, in the order of ``layers``.
        groups: the tensors they are views of, ``[layers of one shape, kv_heads, num_slots, dim]``: for what
            is done to some slots in all layers.
        members: for each pair of groups (keys, values), which layers they hold, in order.
    """

    def __init__(
        self, layers: Sequence[LayerShape], num_slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert num_slots > 0, "an arena without slots holds nothing"
        self.layers = tuple(layers)
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = device
        self.keys: list[torch.Tensor] = [torch.empty(0)] * len(self.layers)
        self.values: list[torch.Tensor] = [torch.empty(0)] * len(self.layers)
        self.groups: list[torch.Tensor] = []
        self.members: list[tuple[int, ...]] = []
        for shape in dict.fromkeys(self.layers):
            members = tuple(i for i, layer in enumerate(self.layers) if layer == shape)
            make = torch.empty if device.type == "cpu" else torch.zeros
            keys, values = (
                make(len(members), shape.kv_heads, num_slots, dim, dtype=dtype, device=device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            self.groups += [keys, values]
            self.members.append(members)
            for place, layer in enumerate(members):
                self.keys[layer] = keys[place]
                self.values[layer] = values[place]

    @staticmethod
    def bytes_per_slot(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
        """Bytes that one token's KV takes over all layers."""
        return sum(layer.num_elements for layer in layers) * dtype.itemsize

    @property
    def size_bytes(self) -> int:
        return self.bytes_per_slot(self.layers, self.dtype) * self.num_slots

    def copy(self, copy: SlotCopy) -> None:
        """Copy the KV of consecutive slots in every layer (source and target do not overlap)."""
        source = slice(copy.source, copy.source + copy.length)
        target = slice(copy.target, copy.target + copy.length)
        for group in self.groups:
            group[:, :, target] = group[:, :, source]

    def move(self, move: SlotMove) -> None:
        """Move KV, in every layer and key head from slots of its own."""
        targets = torch.from_numpy(move.targets.astype(np.int64)).to(self.device)
        sources = torch.from_numpy(np.ascontiguousarray(move.sources)).to(self.device)
        for layer, shape in enumerate(self.layers):
            for head in range(shape.kv_heads):
                for tensor in (self.keys[layer][head], self.values[layer][head]):
                    tensor.index_copy_(0, targets, tensor.index_select(0, sources[layer, head]))

    def populate(self, max_bytes: int) -> Iterator[None]:
        """Has the operating system give memory for up to ``max_bytes``, a piece at each step.

        What is in the arena stays. Does nothing on devices, and where the system does not know of it.
        """
        if self.device.type != "cpu" or sys.platform != "linux":
            return
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for group in self.groups:
            start = -(-group.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (group.data_ptr() + group.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                madvise(start, end - start, _MADV_HUGEPAGE)  # fewer and larger, if it may
            for at in range(start, end, _PIECE_BYTES):
                size = min(_PIECE_BYTES, end - at)
                if size > max_bytes or madvise(at, size, _MADV_POPULATE_WRITE) != 0:
                    return
                max_bytes -= size
                yield
