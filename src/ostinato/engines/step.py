"""The running step: its KV written to the arena, its rows attended in the way that serves each layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..kv.arena import Arena
from ..types import SequencePlan
from .attention import LayerRule, RunsStep, runs_of, weigh_rows
from .flash_infer import FlashInferStep
from .paged import PagedStep
from .ways import Kind, Way, are_at_the_end, ways_for

if TYPE_CHECKING:
    from .flex import FlexStep


class LayerReached(Exception):
    """Ends a forward call early: what it was run for is known. Never leaves the engine."""


class Step:
    """The running step, laid out once for all layers.

    With ``compare_layer`` it is run only up to there: the keys and values that it computes for that layer are
    compared with those in their slots, and :class:`LayerReached` is raised.

    Attributes:
        mass: by layer, for each watched sequence in order, ``[kv_heads, places]``.
        queries: by layer, for each sequence in order whose queries are noted, ``[heads, rows, key_dim]``.
        differences: of ``compare_layer``, sums of squares ``[4, rows]`` in the order of
            :class:`~ostinato.engines.base.Deviations`.
    """

    def __init__(
        self,
        arena: Arena,
        sequences: Sequence[SequencePlan],
        device: torch.device,
        *,
        compare_layer: int | None = None,
    ) -> None:
        slots = np.concatenate([sequence.slots for sequence in sequences])
        self._arena = arena
        self._sequences = sequences
        self._device = device
        self._slots = torch.from_numpy(slots.astype(np.int64)).to(device)
        self._compare_layer = compare_layer
        self._is_watched = any(sequence.num_watched for sequence in sequences)
        self.mass: dict[int, list[Tensor]] = {}
        self.queries: dict[int, list[Tensor]] = {}
        self._noted = _noted_rows(sequences)
        self.differences: Tensor | None = None

    @functools.cached_property
    def _paged(self) -> PagedStep:
        return PagedStep(self._arena, self._sequences, self._slots)

    @functools.cached_property
    def _flash_infer(self) -> FlashInferStep:
        return FlashInferStep(self._arena, self._sequences, self._device)

    @functools.cached_property
    def _flex(self) -> FlexStep:
        from .flex import FlexStep  # with torch's compiler, which a processor does not need

        return FlexStep(self._arena, self._sequences, self._device)

    @functools.cached_property
    def _runs(self) -> RunsStep:
        return RunsStep(self._arena, self._sequences, self._device)

    @functools.cached_property
    def _has_gaps(self) -> bool:
        return not are_at_the_end(self._sequences)

    def attend(
        self,
        layer: int,
        rule: LayerRule,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write this step's KV of one layer, then attend.

        Args:
            query: ``[1, heads, T, key_dim]``; key and value ``[1, kv_heads, T, dim]``.
            sinks: per-head logits that take part in the softmax without a value (GPT-OSS), ``[heads]``.

        Returns:
            ``[1, T, heads, value_dim]``.
        """
        if layer == self._compare_layer:
            self._compare(layer, key, value)
            raise LayerReached
        if self._noted:
            self.queries[layer] = [query[0, :, rows] for rows in self._noted]
        way = self._way(layer, rule, query)
        if way == "kernel":
            output, lse = self._paged.attend(
                layer, query, key, value, scaling=rule.scaling, window=rule.window
            )
            if self._is_watched:
                self.mass[layer] = self._paged.weigh(
                    layer, query, _lse_with(lse, sinks), scaling=rule.scaling, window=rule.window
                )
            return output if sinks is None else _with_sinks(output, lse, sinks)
        for stretch, new in ((self._arena.keys[layer], key[0]), (self._arena.values[layer], value[0])):
            stretch.index_copy_(1, self._slots, new if way == "runs" else new.nan_to_num())
        if way == "flashinfer":
            output, lse = self._flash_infer.attend(layer, query, rule)
        elif way == "flex":
            needs_lse = self._is_watched or sinks is not None
            output, lse = self._flex.attend(layer, query, rule, with_lse=needs_lse)
        else:
            output, lse = self._runs.attend(layer, query, key, value, rule)
        if self._is_watched:
            self.mass[layer] = self._weigh(layer, query, _lse_with(lse, sinks), rule)
        return output if sinks is None else _with_sinks(output, lse, sinks)

    def _way(self, layer: int, rule: LayerRule, query: Tensor) -> Way:
        kind = Kind(query.device, query.dtype, query.shape[1], self._arena.layers[layer], rule)
        return next(way for way in ways_for(kind) if way != "flashinfer" or not self._has_gaps)

    def _weigh(self, layer: int, query: Tensor, lse: Tensor, rule: LayerRule) -> list[Tensor]:
        """Of the watched rows of each sequence that has some; ``lse`` ``[T, heads]``."""
        masses, end = [], 0
        for sequence in self._sequences:
            end += len(sequence.tokens)
            if not sequence.num_watched:
                continue
            part = slice(end - sequence.num_watched, end)
            places = sequence.row_places[-sequence.num_watched :]
            masses.append(
                weigh_rows(
                    torch.from_numpy(places.astype(np.int64)).to(query.device),
                    runs_of(sequence.block_ids, sequence.block_size, int(places[-1]) + 1),
                    query[:, :, part],
                    lse[part].T,
                    self._arena.keys[layer],
                    rule,
                )
            )
        return masses

    def _compare(self, layer: int, key: Tensor, value: Tensor) -> None:
        sums = []
        for new, arena in ((key, self._arena.keys), (value, self._arena.values)):
            new = new[0].float()
            old = arena[layer][:, self._slots].float()
            sums += [(new - old).square().sum(dim=(0, 2)), new.square().sum(dim=(0, 2))]
        self.differences = torch.stack([sums[0], sums[2], sums[1], sums[3]])


def _noted_rows(sequences: Sequence[SequencePlan]) -> list[slice]:
    """Of each sequence whose queries are noted, its rows in the step."""
    ends = np.cumsum([len(sequence.tokens) for sequence in sequences]).tolist()
    return [
        slice(end - len(sequence.tokens), end)
        for end, sequence in zip(ends, sequences, strict=True)
        if sequence.notes_queries
    ]


def _lse_with(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Log-sum-exps ``[rows, heads]``, the sinks counted in."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype))


def _with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``output`` ``[1, rows, heads, dim]`` had the sinks been scored too; ``lse`` ``[rows, heads]``."""
    return output * torch.sigmoid(lse - sinks).unsqueeze(-1).to(output.dtype)
