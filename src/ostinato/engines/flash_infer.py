"""One step's attention through FlashInfer, where it is installed: CUDA, 16-bit floats.

Its pages are the arena's blocks. Rows of a sequence must be its newest places, one after the other: the last
row sees everything up to itself, the one before one key less.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kv.arena import Arena, LayerShape
from ..types import SequencePlan
from .attention import LayerRule

_WORKSPACE_BYTES = 128 << 20  # as its documentation asks for


@dataclass(frozen=True, slots=True)
class Pages:
    """The step as FlashInfer is told it; int32, on the processor.

    ``rows`` and ``pages`` are where each sequence's begin, and where the last one's end.
    """

    rows: Tensor
    pages: Tensor
    ids: Tensor
    last_lengths: Tensor

    @classmethod
    def of(cls, sequences: Sequence[SequencePlan]) -> Pages:
        size = sequences[0].block_size
        lengths = [int(sequence.row_places[-1]) + 1 for sequence in sequences]
        tables = [s.block_ids[: -(-length // size)] for s, length in zip(sequences, lengths, strict=True)]
        return cls(
            _starts([len(sequence.tokens) for sequence in sequences]),
            _starts([len(table) for table in tables]),
            torch.from_numpy(np.concatenate(tables).astype(np.int32)),
            torch.tensor([(length - 1) % size + 1 for length in lengths], dtype=torch.int32),
        )


def _starts(lengths: list[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@functools.cache
def _wrapper(device: torch.device, heads: int, shape: LayerShape, rule: LayerRule) -> Any:
    """One for each kind of layer: they are planned once a step and run by turns."""
    import flashinfer

    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "HND")


class FlashInferStep:
    """The rows of one step for all layers; their KV is in the arena already."""

    def __init__(self, arena: Arena, sequences: Sequence[SequencePlan], device: torch.device) -> None:
        self._arena = arena
        self._device = device
        self._block_size = sequences[0].block_size
        self._pages = Pages.of(sequences)
        self._planned: dict[tuple[int, LayerShape, LayerRule], Any] = {}

    def attend(self, layer: int, query: Tensor, rule: LayerRule) -> tuple[Tensor, Tensor]:
        """
        Args:
            query: ``[1, heads, T, key_dim]``.

        Returns:
            output ``[1, T, heads, value_dim]`` and log-sum-exp of the scores ``[T, heads]``, float32.
        """
        keys, values = (self._paged(tensors[layer]) for tensors in (self._arena.keys, self._arena.values))
        wrapper = self._plan(query.shape[1], self._arena.layers[layer], rule)
        output, lse = wrapper.run(query[0].transpose(0, 1).contiguous(), (keys, values), return_lse=True)
        return output.unsqueeze(0), lse * math.log(2)  # it counts in powers of two

    def _paged(self, stretch: Tensor) -> Tensor:
        """``[kv_heads, slots, dim]`` as ``[blocks, kv_heads, block_size, dim]``, a view."""
        size = self._block_size
        num_blocks = stretch.shape[1] // size
        whole = stretch[:, : num_blocks * size]
        return whole.view(len(whole), num_blocks, size, -1).transpose(0, 1)

    def _plan(self, heads: int, shape: LayerShape, rule: LayerRule) -> Any:
        kind = (heads, shape, rule)
        if kind not in self._planned:
            wrapper = _wrapper(self._device, *kind)
            pages = self._pages
            wrapper.plan(
                pages.rows,
                pages.pages,
                pages.ids.to(self._device),
                pages.last_lengths,
                heads,
                shape.kv_heads,
                shape.key_dim,
                self._block_size,
                causal=True,
                sm_scale=rule.scaling,
                window_left=-1 if rule.window is None else rule.window - 1,
                logits_soft_cap=rule.softcap,
                q_data_type=self._arena.dtype,
                kv_data_type=self._arena.dtype,
            )
            self._planned[kind] = wrapper
        return self._planned[kind]
