"""One step's attention through the compiled kernel: its rows laid out once, for all layers.

:mod:`ostinato.engines.kernel` computes; this module tells it what, and gives it threads. Those are torch's
own: its OpenMP runtime has a team already, which spins for the next piece of work. A second pool beside it
would fight with it for the cores.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kv.arena import Arena
from ..types import SequencePlan, num_common

_log = logging.getLogger(__name__)

COMPILING = "compiling the attention kernel for this processor: some seconds, once"

_Numbers = npt.NDArray[np.int64]
_SLOW_S = 1.0
_KEPT_ROWS = 4  # so many watched rows of a sequence at most have their scores kept instead of computed again


@cache
def load_kernel() -> ModuleType | None:
    """The compiled kernel; ``None`` where numba cannot be had. The first time on a machine it is compiled."""
    started_s = time.monotonic()
    notice = threading.Timer(_SLOW_S, _log.warning, [COMPILING])  # whether it is cached only numba knows
    notice.daemon = True
    notice.start()
    try:
        from . import kernel

        one = np.zeros(1, np.int64)
        kernel.plan_units(one, one, 1, 1, 0, 4, 1)
        kernel.write_rows(np.zeros(kernel.NUM_FIELDS, np.int64))
    except ImportError as error:
        _log.warning("attention runs without its compiled kernel, more slowly: %s", error)
        return None
    finally:
        notice.cancel()
    if (duration_s := time.monotonic() - started_s) > _SLOW_S:
        _log.info("the attention kernel was ready after %.0f s", duration_s)
    return kernel


@cache
def _launcher() -> Callable[[int, int], None]:
    """Runs the kernel's threads on the job at an address."""
    kernel = load_kernel()
    assert kernel is not None
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.run_units.address)
    team = _torch_team()
    if team is not None:
        code = ctypes.cast(run, ctypes.c_void_p)

        def launch(job: int, num_threads: int) -> None:
            if num_threads == 1:
                run(job)
            else:
                team(code, job, num_threads, 0)

        return launch
    pool = ThreadPoolExecutor(torch.get_num_threads(), "ostinato-attention")

    def launch_in_pool(job: int, num_threads: int) -> None:
        others = [pool.submit(run, job) for _ in range(num_threads - 1)]
        run(job)
        for other in others:
            other.result()

    return launch_in_pool


def _torch_team() -> Callable[[ctypes.c_void_p, int, int, int], None] | None:
    """``GOMP_parallel`` of torch's OpenMP runtime (GNU's and LLVM's have it); ``None``: not found."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/" in line}
    for path in sorted(paths):
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            try:
                team: Any = ctypes.CDLL(path).GOMP_parallel
            except (OSError, AttributeError):
                continue
            team.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            team.restype = None
            return partial(team)
    return None


def can_page(key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel serves layers of this kind."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and key_dim % 4 == 0
        and value_dim % 4 == 0
        and load_kernel() is not None
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """Work cut for one kind of layer."""

    table: _Numbers
    num_left: _Numbers
    partials: npt.NDArray[np.float32]
    scratch: npt.NDArray[np.float32]
    scratch_stride: int


class PagedStep:
    """The rows of one step, sorted so that rows with a common prefix are neighbours.

    The arrays that a job points to live as long as this does. Used by one thread.
    """

    def __init__(self, arena: Arena, sequences: Sequence[SequencePlan], slots: Tensor) -> None:
        """``slots``: int64 ``[T]``, where each row's KV is written; rows in the order of ``sequences``."""
        kernel = load_kernel()
        assert kernel is not None
        self._kernel: Any = kernel
        self._launch = _launcher()
        self._arena = arena
        self._num_threads = torch.get_num_threads()
        self._units: dict[tuple[int, int, int, int, int], _Units] = {}
        self._weighing: dict[int, _Numbers] = {}
        self._kept: dict[int, tuple[_Numbers, npt.NDArray[np.float32]]] = {}
        block_size = sequences[0].block_size
        self._lay_out_rows(sequences)
        self._slots = slots
        job = self._job = np.zeros(kernel.NUM_FIELDS, np.int64)
        for field, array in (
            (kernel.ROW_TOKEN, self._row_token),
            (kernel.ROW_TABLE, self._row_table),
            (kernel.ROW_AT, self._row_at),
            (kernel.ROW_SHARED, self._row_shared),
            (kernel.TABLES, self._tables),
        ):
            job[field] = array.ctypes.data
        job[kernel.SLOTS] = slots.data_ptr()
        job[kernel.NUM_ROWS] = len(slots)
        job[kernel.NUM_SLOTS] = arena.num_slots
        job[kernel.BLOCK_SIZE] = block_size
        self._scale = np.zeros(1, np.float32)
        job[kernel.SCALE] = self._scale.ctypes.data

    def _lay_out_rows(self, sequences: Sequence[SequencePlan]) -> None:
        block_size = sequences[0].block_size
        tables = [sequence.block_ids.astype(np.int64, copy=False) for sequence in sequences]
        lengths = np.array([len(sequence.tokens) for sequence in sequences])
        firsts = np.cumsum(lengths) - lengths
        # Any order in which equal beginnings are neighbours will do; that of the bytes is one.
        order = sorted(range(len(tables)), key=lambda i: tables[i].tobytes()) if len(tables) > 1 else [0]
        shared = np.full(int(lengths.sum()), self._kernel.ALIKE, np.int64)
        at = 0
        ends = {}  # of each sequence's rows, in this order
        for turn, index in enumerate(order):
            before = tables[order[turn - 1]] if turn else tables[index][:0]
            shared[at] = num_common(before, tables[index]) * block_size
            at += int(lengths[index])
            ends[index] = at
        offsets = np.cumsum([0, *(len(tables[i]) for i in order[:-1])])
        self._row_shared = shared
        self._row_token = np.concatenate([sequences[i].row_places for i in order]).astype(np.int64)
        self._row_at = _ranges(firsts[order], lengths[order])
        self._row_table = np.repeat(offsets, lengths[order])
        self._tables = np.concatenate([tables[i] for i in order])
        self._watched = [
            (ends[i] - sequence.num_watched, ends[i])
            for i, sequence in enumerate(sequences)
            if sequence.num_watched
        ]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Writes the layer's new KV, then attends.

        Args:
            query: ``[1, heads, T, key_dim]``; key and value ``[1, kv_heads, T, dim]``; float32.

        Returns:
            output ``[1, T, heads, value_dim]`` and log-sum-exp of the scores ``[T, heads]``.
        """
        kernel, job = self._kernel, self._job
        query, key, value = (_dense(t) for t in (query, key, value))
        shape = self._arena.layers[layer]
        heads, num_rows = query.shape[1], query.shape[2]
        group = heads // shape.kv_heads
        output = query.new_empty(1, num_rows, heads, shape.value_dim)
        lse = query.new_empty(num_rows, heads)
        units = self._cut(shape.kv_heads, group, window or 0, shape.key_dim, shape.value_dim)
        left = units.num_left.copy()
        self._describe(layer, query, scaling, window)
        job[kernel.NEXT_UNIT : kernel.SCRATCH_STRIDE + 1] = (
            0, 0, len(units.table), units.table.ctypes.data, left.ctypes.data, units.scratch.ctypes.data,
            units.scratch_stride,
        )  # fmt: skip
        job[kernel.PARTIALS] = units.partials.ctypes.data
        job[kernel.NEW_KEY : kernel.LSE + 1] = (
            key.data_ptr(), key.stride(1), key.stride(2), value.data_ptr(), value.stride(1), value.stride(2),
            output.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        job[kernel.MASS] = job[kernel.KEPT] = 0
        if self._watched:
            row_kept, kept = self._keep(heads)
            job[kernel.ROW_KEPT], job[kernel.KEPT] = row_kept.ctypes.data, kept.ctypes.data
        kernel.write_rows(job)
        self._launch(job.ctypes.data, self._num_threads)
        return output, lse

    def weigh(
        self, layer: int, query: Tensor, lse: Tensor, *, scaling: float, window: int | None
    ) -> list[Tensor]:
        """What the watched rows of each sequence that has some give to each of its places.

        Args:
            query: ``[1, heads, T, key_dim]``, as it attended in this layer.
            lse: log-sum-exp of the scores, ``[T, heads]``.

        Returns:
            for each watched sequence, in the order of the sequences, ``[kv_heads, places]``.
        """
        kernel, job = self._kernel, self._job
        query, lse = _dense(query), lse.contiguous()
        shape = self._arena.layers[layer]
        group = query.shape[1] // shape.kv_heads
        num_places = [int(self._row_token[last - 1]) + 1 for _, last in self._watched]
        mass = query.new_empty(sum(num_places) * shape.kv_heads)
        table = self._weigh_units(shape.kv_heads, num_places)
        scratch = self._cut(shape.kv_heads, group, window or 0, shape.key_dim, shape.value_dim)
        self._describe(layer, query, scaling, window)
        job[kernel.NEXT_UNIT : kernel.SCRATCH_STRIDE + 1] = (
            0, 0, len(table), table.ctypes.data, 0, scratch.scratch.ctypes.data, scratch.scratch_stride,
        )  # fmt: skip
        job[kernel.LSE], job[kernel.MASS] = lse.data_ptr(), mass.data_ptr()
        self._launch(job.ctypes.data, self._num_threads)
        pieces = torch.split(mass, [shape.kv_heads * n for n in num_places])
        return [piece.view(shape.kv_heads, -1) for piece in pieces]

    def _keep(self, heads: int) -> tuple[_Numbers, npt.NDArray[np.float32]]:
        """Where the scores of each row are kept (-1: nowhere), and the room for them."""
        if heads not in self._kept:
            tile, offset = self._kernel.TILE, 0
            starts = np.full(len(self._row_token), -1, np.int64)
            for first, last in self._watched:
                if last - first <= _KEPT_ROWS:
                    for row in range(first, last):
                        starts[row] = offset
                        offset += heads * (int(self._row_token[row]) // tile + 1) * tile
            self._kept[heads] = starts, np.empty(max(1, offset), np.float32)
        return self._kept[heads]

    def _weigh_units(self, kv_heads: int, num_places: Sequence[int]) -> _Numbers:
        if kv_heads not in self._weighing:
            part = self._kernel.PART
            units, offset = [], 0
            for (first, last), length in zip(self._watched, num_places, strict=True):
                for head in range(kv_heads):
                    units += [(first, last, head, p, offset) for p in range(-(-length // part))]
                    offset += length
            self._weighing[kv_heads] = np.array(units, np.int64)
        return self._weighing[kv_heads]

    def _describe(self, layer: int, query: Tensor, scaling: float, window: int | None) -> None:
        kernel, job, shape = self._kernel, self._job, self._arena.layers[layer]
        self._scale[0] = scaling
        job[kernel.QUERY : kernel.GROUP + 1] = (
            query.data_ptr(), query.stride(1), query.stride(2),
            self._arena.keys[layer].data_ptr(), self._arena.values[layer].data_ptr(),
            shape.key_dim, shape.value_dim, self._arena.num_slots, shape.kv_heads,
            query.shape[1] // shape.kv_heads,
        )  # fmt: skip
        job[kernel.WINDOW] = window or 0

    def _cut(self, kv_heads: int, group: int, window: int, key_dim: int, value_dim: int) -> _Units:
        kind = (kv_heads, group, window, key_dim, value_dim)
        if kind not in self._units:
            kernel = self._kernel
            table, num_left, num_floats = kernel.plan_units(
                self._row_token, self._row_shared, kv_heads, group, window, value_dim, self._num_threads
            )
            stride = kernel.scratch_floats(group, key_dim, value_dim)
            self._units[kind] = _Units(
                table,
                num_left,
                np.empty(num_floats, np.float32),
                np.empty(stride * self._num_threads, np.float32),
                stride,
            )
        return self._units[kind]


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, whose last dimension lies together."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _ranges(starts: Sequence[int] | npt.NDArray[np.intp], lengths: npt.NDArray[np.intp]) -> _Numbers:
    """``[start, start + length)`` of each, one after the other."""
    ends = np.cumsum(lengths)
    ranges: _Numbers = np.arange(ends[-1]) + np.repeat(np.asarray(starts) - (ends - lengths), lengths)
    return ranges
