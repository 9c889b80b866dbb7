"""The preallocated tensors that hold KV, one slot a token.

Layout, per layer: keys ``[kv_heads, num_slots, key_dim]`` and values ``[kv_heads, num_slots, value_dim]``.
Tokens of one head lie next to each other, so a run of consecutive slots is a *view* that attention reads
where it lies; nothing is gathered. Layers of one shape share one tensor, so that copying slots in all of
them is one operation.

Memory is reserved at once and touched only as slots are written: the operating system gives pages then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..types import SlotCopy


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
        for shape in dict.fromkeys(self.layers):
            members = [i for i, layer in enumerate(self.layers) if layer == shape]
            keys = torch.empty(
                len(members), shape.kv_heads, num_slots, shape.key_dim, dtype=dtype, device=device
            )
            values = torch.empty(
                len(members), shape.kv_heads, num_slots, shape.value_dim, dtype=dtype, device=device
            )
            self.groups += [keys, values]
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
