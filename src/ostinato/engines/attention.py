"""Attention run by run, with what torch has on any device: slower than the other ways, and never wrong.

It serves what they do not (:mod:`ostinato.engines.ways`): other number formats, layers that squash their
scores, devices without a fused kernel.

A sequence's past is a few runs of consecutive slots; each run is a view of the arena. Attention over
a run gives an output and the log-sum-exp of its scores; runs, and the step's own rows, merge exactly from
those. So a shared prefix is read in place and never copied.

Grouped queries are not expanded: the queries of one key head are stacked as rows, which reads its keys once
(under a mask the fused CPU kernel takes fewer key heads than query heads as they are).

Sliding windows: where the window covers everything it is ordinary attention; for one row the runs are cut;
for several rows the last ``window`` keys (never more) are gathered and masked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..kv.arena import Arena
from ..types import BlockIds, SequencePlan

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# A pool in disorder gives a sequence many short runs. The longest are read where they lie; the rest are
# cheaper to gather once than to attend one by one.
MAX_VIEWS = 8

# The end of the past that is attended together with the rows that continue it (as after a hit in the middle
# of a block): one call for both costs less than two, as long as the mask stays small.
_MAX_TAIL = 64

# Keys that a part has at least when a run is cut in parts; below, cutting costs more than idle threads.
_MIN_PART = 1024

# Watched rows whose weights are computed at a time: bounds the memory that they take.
_WEIGHED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` tokens at consecutive slots, the first of them token ``position`` of its sequence."""

    slot: int
    position: int
    length: int


def runs_of(block_ids: BlockIds, block_size: int, end: int) -> tuple[Run, ...]:
    """The tokens ``[0, end)`` of a sequence as few maximal runs, in order."""
    if end == 0:
        return ()
    ids = block_ids[: -(-end // block_size)]
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    behind = np.append(starts[1:], len(ids)) * block_size
    return tuple(
        Run(
            int(ids[start]) * block_size,
            int(start) * block_size,
            min(int(stop), end) - int(start) * block_size,
        )
        for start, stop in zip(starts, behind, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's part of a step: rows ``[start, end)`` of it, first at ``position``.

    ``past`` are the runs before this step, in order of position. ``tail`` is the run that the rows themselves
    were written to, together with a short end of the past that it continues; ``None`` where they do not lie
    in one run. ``tail_mask`` (additive, ``[rows, tail]``) hides from each row what comes after it, and is
    ``None`` where being causal says that already.

    Rows with gaps between their places are another case: then ``places`` (int64 ``[rows]``) is set, and the
    past is everything up to the last of them.
    """

    start: int
    end: int
    position: int
    past: tuple[Run, ...]
    tail: Run | None
    tail_mask: Tensor | None
    places: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerRule:
    """How one layer attends; read from the model's own call when it is loaded."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


def make_rows(
    start: int, end: int, position: int, past: tuple[Run, ...], slot: int | None, *, dtype: torch.dtype
) -> Rows:
    """Lay out one sequence's rows; ``slot`` is where they begin, ``None`` if they do not lie in one run."""
    num_rows = end - start
    if slot is None:
        return Rows(start, end, position, past, None, None)
    last = past[-1] if past else None
    continues = last is not None and (last.slot + last.length, last.position + last.length) == (
        slot,
        position,
    )
    if last is None or not continues or (num_rows > 1 and last.length > _MAX_TAIL):
        return Rows(start, end, position, past, Run(slot, position, num_rows), None)
    tail = Run(last.slot, last.position, last.length + num_rows)
    mask = None
    if num_rows > 1:
        mask = torch.full((num_rows, tail.length), float("-inf"), dtype=dtype).triu(last.length + 1)
    return Rows(start, end, position, past[:-1], tail, mask)


def attend(
    query: Tensor, key: Tensor, value: Tensor, rule: LayerRule, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one group of rows over one stretch of keys.

    Args:
        query: ``[1, heads, rows, key_dim]``.
        key: ``[1, kv_heads, keys, key_dim]``, value: ``[1, kv_heads, keys, value_dim]``.
        causal: row ``i`` sees keys up to ``i`` (then rows equals keys).
        mask: additive float ``[rows, keys]``; every row sees at least one key.

    Returns:
        output ``[1, heads, rows, value_dim]`` and log-sum-exp of the scores ``[1, heads, rows]``, float32.
    """
    heads, rows = query.shape[1], query.shape[2]
    kv_heads = key.shape[1]
    if query.device.type != "cpu" or rule.softcap is not None or key.shape[3] != value.shape[3]:
        return _attend_plain(query, key, value, rule, causal=causal, mask=mask)
    causal = causal and rows > 1
    if kv_heads != heads and not causal and mask is None:
        # The kernel would read each key head once per query head; stacked, it reads it once, and more rows
        # at a time make better products.
        stacked = query.reshape(1, kv_heads, heads // kv_heads * rows, query.shape[3])
        output, lse = _attend_in_parts(stacked, key, value, rule)
        return output.reshape(1, heads, rows, -1), lse.reshape(1, heads, rows)
    output, lse = _flash_cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=rule.scaling)
    return output, lse


def _attend_in_parts(query: Tensor, key: Tensor, value: Tensor, rule: LayerRule) -> tuple[Tensor, Tensor]:
    """The fused kernel, with long keys cut so that its pieces of work come out even for the threads.

    The kernel shares out (key head, slice of rows); three heads on two threads leave one idle a third of the
    time. The same keys as two halves are twice the pieces, and halves merge exactly.
    """
    num_keys = key.shape[2]
    num_parts = _num_parts(key.shape[1], query.shape[2], num_keys, torch.get_num_threads())
    if num_parts == 1:
        output, lse = _flash_cpu(query, key, value, 0.0, False, scale=rule.scaling)
        return output, lse
    length = num_keys // num_parts
    cut = num_parts * length
    keys, values = (_cut(t[0, :, :cut], num_parts) for t in (key, value))
    outputs, lses = _flash_cpu(
        query.expand(num_parts, -1, -1, -1), keys, values, 0.0, False, scale=rule.scaling
    )
    parts = [(outputs[i : i + 1], lses[i : i + 1]) for i in range(num_parts)]
    if cut < num_keys:
        parts.append(_flash_cpu(query, key[:, :, cut:], value[:, :, cut:], 0.0, False, scale=rule.scaling))
    return merge(parts)


def _cut(stretch: Tensor, num_parts: int) -> Tensor:
    """``[kv_heads, keys, dim]`` as ``[num_parts, kv_heads, keys / num_parts, dim]``, a view."""
    kv_heads, num_keys, dim = stretch.shape
    return stretch.view(kv_heads, num_parts, num_keys // num_parts, dim).transpose(0, 1)


@functools.lru_cache(maxsize=1024)
def _num_parts(kv_heads: int, rows: int, num_keys: int, num_threads: int) -> int:
    """Into how many parts to cut the keys: the fewest that keep the threads busy 95 % of the time."""
    rows_a_slice = 256 if rows >= 768 else 64 if rows >= 192 else 32  # as the kernel slices them
    pieces = kv_heads * -(-rows // rows_a_slice)
    best, best_busy = 1, 0.0
    num_parts = 1
    while num_parts == 1 or num_keys // num_parts >= _MIN_PART:
        rounds = num_parts * pieces / num_threads
        busy = rounds / math.ceil(rounds)
        if busy > best_busy:
            best, best_busy = num_parts, busy
        if busy >= 0.95 or num_parts >= 8:
            break
        num_parts *= 2
    return best


def _attend_plain(
    query: Tensor, key: Tensor, value: Tensor, rule: LayerRule, *, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same in plain operations: for devices and layers the fused kernel does not serve."""
    heads, rows = query.shape[1], query.shape[2]
    scores = _scores(query, key, rule)
    if causal and rows > 1:
        hidden = torch.ones(rows, key.shape[2], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).to(value.dtype)
    output = torch.matmul(weights, value.unsqueeze(2))
    return output.reshape(1, heads, rows, -1), lse.reshape(1, heads, rows)


def _scores(query: Tensor, key: Tensor, rule: LayerRule) -> Tensor:
    """Of every query with every key, float32 ``[1, kv_heads, heads / kv_heads, rows, keys]``."""
    heads, rows, kv_heads = query.shape[1], query.shape[2], key.shape[1]
    grouped = query.reshape(1, kv_heads, heads // kv_heads, rows, query.shape[3])
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)).float() * rule.scaling
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    return scores


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint sets of keys, exactly, from their outputs and log-sum-exps.

    Two sets weigh ``exp(lse) / (exp(lse) + exp(other lse))``, which is the sigmoid of the difference.
    """
    output, lse = parts[0]
    for other, other_lse in parts[1:]:
        weight = torch.sigmoid(other_lse - lse).unsqueeze(-1).to(output.dtype)
        output = torch.lerp(output, other, weight)
        lse = torch.logaddexp(lse, other_lse)
    return output, lse


def attend_rows(
    rows: Rows, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, rule: LayerRule
) -> tuple[Tensor, Tensor]:
    """One sequence's rows over its past and themselves.

    Args:
        query, key, value: this sequence's rows, ``[1, heads, rows, dim]``, keys already rotated.
        keys, values: the layer's arena tensors, in which this step's KV is already written.
    """
    num_rows = rows.end - rows.start
    window = rule.window
    if rows.places is not None:
        return _attend_masked(rows, query, key, value, keys, values, rule)
    if window is not None and rows.position + num_rows <= window:
        window = None
    if num_rows > 1 and window is not None:
        return _attend_masked(rows, query, key, value, keys, values, rule)
    past, tail = rows.past, rows.tail
    if window is not None:
        cut = rows.position + 1 - window
        past = _last(past, cut)
        tail = None if tail is None else _last((tail,), cut)[0]
    parts = [attend(query, k, v, rule, causal=False) for k, v in _stretches(past, keys, values)]
    if tail is None:
        parts.append(attend(query, key, value, rule, causal=True))
    elif rows.tail_mask is None:
        parts.append(attend(query, *_view(keys, values, tail), rule, causal=True))
    else:
        parts.append(attend(query, *_view(keys, values, tail), rule, causal=False, mask=rows.tail_mask))
    return merge(parts)


def _attend_masked(
    rows: Rows, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, rule: LayerRule
) -> tuple[Tensor, Tensor]:
    """All that any of the rows may see is gathered, and hidden from those that may not."""
    places = rows.places
    if places is None:
        places = torch.arange(rows.position, rows.position + rows.end - rows.start, device=query.device)
    runs = rows.past if rows.tail is None else (*rows.past, rows.tail)
    if rule.window is not None:
        runs = _last(runs, rows.position + 1 - rule.window)
    views = [_view(keys, values, run) for run in runs]
    if rows.tail is None and rows.places is None:
        views.append((key, value))
    all_keys, all_values = (torch.cat(tensors, dim=2) for tensors in zip(*views, strict=True))
    hidden = _hidden(places, runs[0].position if runs else rows.position, all_keys.shape[2], rule.window)
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
    return attend(
        query, all_keys, all_values, rule, causal=False, mask=mask.masked_fill_(hidden, float("-inf"))
    )


def _hidden(places: Tensor, start: int, num_keys: int, window: int | None) -> Tensor:
    """Which keys, at places from ``start`` on, rows at ``places`` may not see: bool ``[rows, keys]``."""
    distance = places.unsqueeze(1) - torch.arange(start, start + num_keys, device=places.device)
    hidden = distance < 0
    return hidden if window is None else hidden | (distance >= window)


def weigh_rows(
    places: Tensor, runs: Sequence[Run], query: Tensor, lse: Tensor, keys: Tensor, rule: LayerRule
) -> Tensor:
    """What rows give to each place of their sequence, summed over them and the query heads of a key head.

    Args:
        places: int64 ``[rows]``.
        runs: the sequence up to the last row.
        query: ``[1, heads, rows, key_dim]``; lse: log-sum-exp of the rows' scores, ``[heads, rows]``.

    Returns:
        float32 ``[kv_heads, places]``.
    """
    kv_heads = keys.shape[0]
    all_keys = torch.cat([keys[:, run.slot : run.slot + run.length] for run in runs], dim=1).unsqueeze(0)
    num_keys = all_keys.shape[2]
    mass = torch.zeros(kv_heads, num_keys, device=query.device)
    for at in range(0, len(places), _WEIGHED_ROWS):
        part = slice(at, at + _WEIGHED_ROWS)
        scores = _scores(query[:, :, part], all_keys, rule)
        scores = scores.masked_fill(_hidden(places[part], 0, num_keys, rule.window), float("-inf"))
        own = lse[:, part].reshape(1, kv_heads, -1, scores.shape[3], 1)
        mass += torch.exp(scores - own).sum(dim=(0, 2, 3))
    return mass


def _view(keys: Tensor, values: Tensor, run: Run) -> tuple[Tensor, Tensor]:
    slots = slice(run.slot, run.slot + run.length)
    return keys[:, slots].unsqueeze(0), values[:, slots].unsqueeze(0)


def _stretches(runs: Sequence[Run], keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of ``runs``: views, and one gathered piece where there are too many."""
    if len(runs) <= MAX_VIEWS:
        return [_view(keys, values, run) for run in runs]
    by_length = sorted(runs, key=lambda run: run.length, reverse=True)
    stretches = [_view(keys, values, run) for run in by_length[: MAX_VIEWS - 1]]
    rest = [_view(keys, values, run) for run in by_length[MAX_VIEWS - 1 :]]
    stretches.append((torch.cat([k for k, _ in rest], dim=2), torch.cat([v for _, v in rest], dim=2)))
    return stretches


def _last(runs: Sequence[Run], position: int) -> tuple[Run, ...]:
    """The parts of ``runs`` at ``position`` and after."""
    kept = []
    for run in runs:
        cut = max(0, position - run.position)
        if cut < run.length:
            kept.append(Run(run.slot + cut, run.position + cut, run.length - cut))
    return tuple(kept)


class RunsStep:
    """The rows of one step, laid out as runs for all layers; their KV is in the arena already."""

    def __init__(self, arena: Arena, sequences: Sequence[SequencePlan], device: torch.device) -> None:
        self._arena = arena
        rows, end = [], 0
        for sequence in sequences:
            start, end = end, end + len(sequence.tokens)
            rows.append(_lay_out(sequence, start, arena.dtype, device))
        self._rows = tuple(rows)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: LayerRule
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            query: ``[1, heads, T, key_dim]``; key and value ``[1, kv_heads, T, dim]``.

        Returns:
            output ``[1, T, heads, value_dim]`` and log-sum-exp of the scores ``[T, heads]``.
        """
        keys, values = self._arena.keys[layer], self._arena.values[layer]
        outputs, lses = [], []
        for rows in self._rows:
            part = slice(rows.start, rows.end)
            output, lse = attend_rows(
                rows, query[:, :, part], key[:, :, part], value[:, :, part], keys, values, rule
            )
            outputs.append(output.transpose(1, 2))
            lses.append(lse[0].T)
        if len(outputs) == 1:
            return outputs[0], lses[0]
        return torch.cat(outputs, dim=1), torch.cat(lses)


def _lay_out(sequence: SequencePlan, start: int, dtype: torch.dtype, device: torch.device) -> Rows:
    slots, places = sequence.slots, sequence.row_places
    first, position = int(slots[0]), int(places[0])
    if int(places[-1]) - position != len(places) - 1:
        runs = runs_of(sequence.block_ids, sequence.block_size, int(places[-1]) + 1)
        at = torch.from_numpy(places.astype(np.int64)).to(device)
        return Rows(start, start + len(slots), position, runs, None, None, at)
    in_one_run = int(slots[-1]) - first == len(slots) - 1 and bool((np.diff(slots) == 1).all())
    rows = make_rows(
        start,
        start + len(slots),
        position,
        runs_of(sequence.block_ids, sequence.block_size, position),
        first if in_one_run else None,
        dtype=dtype,
    )
    if rows.tail_mask is not None and device.type != "cpu":
        rows = replace(rows, tail_mask=rows.tail_mask.to(device))
    return rows
