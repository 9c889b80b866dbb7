"""Which way a layer attends: by what the device can do, and only after it was seen to compute the same.

| way | where it is tried |
|---|---|
| ``kernel`` | processors, float32 (:mod:`~ostinato.engines.paged`) |
| ``flashinfer`` | CUDA, 16-bit floats, where FlashInfer is installed (:mod:`~ostinato.engines.flash_infer`) |
| ``flex`` | CUDA and XPU, where torch can compile for them (:mod:`~ostinato.engines.flex`) |
| ``runs`` | everywhere, last (:mod:`~ostinato.engines.attention`) |

The ways of a device are tried on a small problem when a model is loaded, against ``runs``. One that fails or
differs is left out with a warning: a driver, a card or a version nobody has met costs speed, not answers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..kv.arena import Arena, LayerShape
from ..types import SequencePlan
from .attention import LayerRule, RunsStep
from .flash_infer import FlashInferStep
from .paged import can_page

_log = logging.getLogger(__name__)

Way: TypeAlias = Literal["kernel", "flashinfer", "flex", "runs"]

_HALF = (torch.float16, torch.bfloat16)
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Devices may multiply float32 with fewer bits; what is wrong with a mask or a table is far above this."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a layer, what decides about its way."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    shape: LayerShape
    rule: LayerRule


def ways_for(kind: Kind) -> tuple[Way, ...]:
    """The ways that serve such a layer, best first; ``runs`` is always the last."""
    if kind.device.type != "cpu":
        return _seen_to_work(kind)
    can = kind.rule.softcap is None and can_page(
        kind.shape.key_dim, kind.shape.value_dim, kind.dtype, kind.device
    )
    return ("kernel", "runs") if can else ("runs",)


@cache
def _seen_to_work(kind: Kind) -> tuple[Way, ...]:
    return (*(way for way in by_capability(kind) if works(way, kind)), "runs")


def by_capability(kind: Kind) -> tuple[Way, ...]:
    """The fused ways that a device should be able to go."""
    device, shape = kind.device.type, kind.shape
    if device not in ("cuda", "xpu"):
        return ()
    is_ampere = device == "xpu" or torch.cuda.get_device_capability(kind.device) >= (8, 0)
    ways: list[Way] = []
    if (
        device == "cuda"
        and is_ampere
        and kind.dtype in _HALF
        and shape.key_dim == shape.value_dim
        and shape.key_dim in (64, 128, 256)
        and find_spec("flashinfer") is not None
    ):
        ways.append("flashinfer")
    if is_ampere and kind.dtype in _TOLERANCE and find_spec("triton") is not None:
        ways.append("flex")
    return tuple(ways)


def are_at_the_end(sequences: Sequence[SequencePlan]) -> bool:
    """Whether each sequence's rows are one after the other (``flashinfer`` knows no gaps)."""
    return all(
        sequence.places is None or bool((np.diff(sequence.places) == 1).all()) for sequence in sequences
    )


def works(way: Way, kind: Kind) -> bool:
    """Whether a way computes what ``runs`` does: decoding, a chunk behind a shared prefix, a whole prompt."""
    try:
        query, key, value, arena, sequences = _problem(kind)
        expected, expected_lse = RunsStep(arena, sequences, kind.device).attend(
            0, query, key, value, kind.rule
        )
        if way == "flashinfer":
            output, lse = FlashInferStep(arena, sequences, kind.device).attend(0, query, kind.rule)
        else:
            from .flex import FlexStep  # with torch's compiler, which a processor does not need

            output, lse = FlexStep(arena, sequences, kind.device).attend(0, query, kind.rule)
        distance = max(_distance(output, expected), _distance(lse, expected_lse))
    except Exception as error:  # noqa: BLE001 - a border: whatever a compiler or a driver may say
        _log.warning("attention does not go through %s here: %s", way, str(error).partition("\n")[0])
        return False
    if not distance <= _TOLERANCE[kind.dtype]:
        _log.warning("attention does not go through %s here: it differs by %.2g", way, distance)
        return False
    return True


def _distance(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).abs().max())


def _problem(kind: Kind) -> tuple[Tensor, Tensor, Tensor, Arena, tuple[SequencePlan, ...]]:
    """Three sequences over scattered blocks, the first two of which begin alike."""
    size, shape = 16, kind.shape
    tables = [
        np.array(ids, np.intp) for ids in ([17, 4, 5, 30], [17, 4, 9], [2, 40, 41, 12, 11, 10, 3, 20, 21])
    ]
    rows = [range(50, 51), range(33, 44), range(140)]
    arena = Arena([shape], 48 * size, dtype=kind.dtype, device=kind.device)
    chance = torch.Generator().manual_seed(1)
    for group in arena.groups:
        group.copy_(torch.randn(group.shape, generator=chance))
    sequences = []
    for number, (table, at) in enumerate(zip(tables, rows, strict=True)):
        places = np.arange(at.start, at.stop, dtype=np.int32)
        slots = (table[places // size] * size + places % size).astype(np.int32)
        sequences.append(SequencePlan(number, places, places, slots, table, size, sample=True))
    num_rows = sum(len(at) for at in rows)
    query = torch.randn(1, kind.heads, num_rows, shape.key_dim, generator=chance)
    written = torch.from_numpy(np.concatenate([s.slots for s in sequences]).astype(np.int64)).to(kind.device)
    key, value = (t[0][:, written].unsqueeze(0) for t in (arena.keys, arena.values))
    return query.to(kind.device, kind.dtype), key, value, arena, tuple(sequences)
