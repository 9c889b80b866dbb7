"""Attention over pages on a processor: one compiled kernel, for decoding and for prompts.

Why not the fused kernel of torch: it takes one sequence a call and contiguous keys, and its results depend,
in the last bits, on how many rows are computed together. Here

- keys and values are read where they lie, through the sequences' block tables;
- rows that share blocks (a common prefix) read them once (cascade attention), whatever sequence they are
  of;
- the queries of one key head are stacked as rows, so grouped heads are not expanded;
- **a row's result depends on nothing but its query and its keys**, to the last bit: not on who else is in
  the step, how the prompt was cut, how many threads there are, or where the blocks lie.

The last is by construction. Keys are taken in tiles of 64 and tiles in parts of 256, both aligned to the
token's index in its sequence. Inside a part the softmax runs online from a fresh state (Milakov and
Gimelshein, 2018), and parts are joined in order by their log-sum-exps (FlashDecoding), always: also where
one thread does all of them. Every sum is a chain of fused multiply-adds in the order of the keys (or of the
head's dimensions), the same in each of the kernel's shapes; a masked key adds an exact zero.

What rows give to each key (their attention mass) is asked for after that, and follows from their
log-sum-exps: of a few rows the scores were kept, of many they are computed once more, tile by tile.

Compiled by numba for the processor at hand, once (the result is cached on disk). What numba's loops would
not reliably vectorise is written as LLVM vectors; everything compiled stands in this one file because the
cache is renewed when the file changes.
"""

from __future__ import annotations

import math
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE = 64  # keys of a tile
PART = 4 * TILE  # keys of a part
_FEW = 32  # stacked rows up to which memory, not arithmetic, is what a tile waits for
_SLICE = 16  # stacked rows that go through a tile together

# Widest vectors that the processor has, in float32.
_FEATURES = llvmlite.binding.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") and _FEATURES.get("fma") else 4

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_ADDRESS, _COUNT = types.uintp, types.intp
FEW_LANES = 4  # for what is left of a dimension that is no multiple of LANES


# ---------------------------------------------------------------- vectors


class _Emit:
    """Vector code, written short. Addresses are integers; offsets count elements."""

    def __init__(self, builder: ir.IRBuilder, lanes: int = LANES) -> None:
        self.builder = builder
        self.lanes = lanes
        self.kind = ir.VectorType(_F32, lanes)

    def at(self, base: Any, *terms: tuple[Any, Any] | Any) -> Any:
        """``base`` plus the sum of ``terms``: offsets, or (count, stride) pairs."""
        builder, total = self.builder, ir.Constant(_I64, 0)
        for term in terms:
            one = builder.mul(*(_int(x) for x in term)) if isinstance(term, tuple) else _int(term)
            total = builder.add(total, one)
        return builder.add(base, builder.mul(total, ir.Constant(_I64, 4)))

    def load(self, address: Any) -> Any:
        value = self.builder.load(self.builder.inttoptr(address, self.kind.as_pointer()))
        value.align = 4
        return value

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = 4

    def constant(self, value: float) -> Any:
        return ir.Constant(self.kind, [ir.Constant(_F32, value)] * self.lanes)

    def whole(self, value: int) -> Any:
        return ir.Constant(ir.VectorType(_I32, self.lanes), [value] * self.lanes)

    def broadcast(self, scalar: Any) -> Any:
        empty = ir.Constant(self.kind, ir.Undefined)
        one = self.builder.insert_element(empty, scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(one, empty, self.whole(0))

    def call(self, name: str, *args: Any) -> Any:
        kinds = [self.kind] * len(args)
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(self.kind, kinds), f"llvm.{name}.v{self.lanes}f32"
        )
        return self.builder.call(function, args)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """``a * b + c``, rounded once."""
        return self.call("fma", a, b, c)

    def shuffle(self, a: Any, b: Any, places: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(places)), places))

    def greater(self, a: Any, b: Any) -> Any:
        """The greater of each pair; ``b`` where either is not a number."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def fold(self, vector: Any, join: Any) -> Any:
        """All lanes joined by ``join``, in halves; the same in every lane of the result."""
        step = self.lanes // 2
        while step:
            vector = join(vector, self.shuffle(vector, vector, [i ^ step for i in range(self.lanes)]))
            step //= 2
        return vector

    def exp(self, x: Any) -> Any:
        """e to the ``x`` for ``x`` ≤ 0, within 2 units in the last place; exactly 0 below -87.

        After Cephes' expf: ``x = n ln 2 + r``, a polynomial in ``r``, and ``n`` put into the exponent.
        """
        builder = self.builder
        low = builder.fcmp_ordered("<", x, self.constant(-87.0))
        n = self.call("rint", builder.fmul(x, self.constant(1.44269504088896341)))
        r = self.fma(n, self.constant(-0.693359375), x)
        r = self.fma(n, self.constant(2.12194440e-4), r)
        y = self.constant(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            y = self.fma(y, r, self.constant(factor))
        y = builder.fadd(self.fma(builder.fmul(y, r), r, r), self.constant(1.0))
        whole = builder.fptosi(n, ir.VectorType(_I32, self.lanes))
        power = builder.bitcast(builder.shl(builder.add(whole, self.whole(127)), self.whole(23)), self.kind)
        return builder.select(low, self.constant(0.0), builder.fmul(y, power))


def _int(value: Any) -> Any:
    return ir.Constant(_I64, value) if isinstance(value, int) else value


def _make_product(num_rows: int, num_vectors: int, lanes: int = LANES) -> Any:
    """``c[rows, columns] += a[rows, length] @ b[length, columns]``, accumulated in registers."""

    @intrinsic
    def product(context, a, a_stride, b, b_stride, c, c_stride, length):
        signature = types.void(_ADDRESS, _COUNT, _ADDRESS, _COUNT, _ADDRESS, _COUNT, _COUNT)

        def emit(context, builder, signature, args):
            a, a_stride, b, b_stride, c, c_stride, length = args
            e = _Emit(builder, lanes)
            places = [(row, v) for row in range(num_rows) for v in range(num_vectors)]
            targets = [e.at(c, (row, c_stride), v * lanes) for row, v in places]
            before = [e.load(target) for target in targets]
            entry, loop = builder.block, builder.append_basic_block("loop")
            builder.branch(loop)  # length is at least 1
            builder.position_at_end(loop)
            index, *sums = (builder.phi(kind) for kind in (_I64, *[e.kind] * len(places)))
            columns = [e.load(e.at(b, (index, b_stride), v * lanes)) for v in range(num_vectors)]
            after = []
            for row in range(num_rows):
                at = builder.inttoptr(e.at(a, (row, a_stride), index), _F32.as_pointer())
                factor = e.broadcast(builder.load(at))
                after += [
                    e.fma(factor, column, sums[row * num_vectors + v]) for v, column in enumerate(columns)
                ]
            following = builder.add(index, ir.Constant(_I64, 1))
            for phi, first, then in zip(
                (index, *sums), (ir.Constant(_I64, 0), *before), (following, *after), strict=True
            ):
                phi.add_incoming(first, entry)
                phi.add_incoming(then, loop)
            done = builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed("<", following, length), loop, done)
            builder.position_at_end(done)
            for result, target in zip(after, targets, strict=True):
                e.store(result, target)
            return context.get_dummy_value()

        return signature, emit

    return product


_product_4_4, _product_4_1 = _make_product(4, 4), _make_product(4, 1)
_product_1_4, _product_1_1 = _make_product(1, 4), _make_product(1, 1)
_product_4_few, _product_1_few = _make_product(4, 1, FEW_LANES), _make_product(1, 1, FEW_LANES)


@intrinsic
def _transpose(context, source, source_stride, target, target_stride):
    """A square of ``LANES`` rows and columns."""
    signature = types.void(_ADDRESS, _COUNT, _ADDRESS, _COUNT)

    def emit(context, builder, signature, args):
        source, source_stride, target, target_stride = args
        e = _Emit(builder)
        rows = [e.load(e.at(source, (row, source_stride))) for row in range(LANES)]
        step = 1
        while step < LANES:  # exchange the off-diagonal squares of side `step`
            low = [i if not i & step else LANES + (i ^ step) for i in range(LANES)]
            high = [i ^ step if not i & step else LANES + i for i in range(LANES)]
            for i in range(LANES):
                if not i & step:
                    a, b = rows[i], rows[i + step]
                    rows[i], rows[i + step] = e.shuffle(a, b, low), e.shuffle(a, b, high)
            step *= 2
        for i, row in enumerate(rows):
            e.store(row, e.at(target, (i, target_stride)))
        return context.get_dummy_value()

    return signature, emit


@intrinsic
def _prefetch(context, address):
    """Asks for the cache line at ``address``, to be read soon."""

    def emit(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32]), "llvm.prefetch.p0"
        )
        flags = [ir.Constant(_I32, flag) for flag in (0, 3, 1)]  # to read, keep near, data
        builder.call(function, [builder.inttoptr(args[0], byte), *flags])
        return context.get_dummy_value()

    return types.void(_ADDRESS), emit


@intrinsic
def _soften(context, scores, least, sums):
    """A tile of one row's scores to weights: ``exp(score - greatest)``.

    ``least`` is the greatest score so far. Returns the greatest now; the weights' sum goes to ``sums[0]``.
    Where every score is -inf nothing happens but that ``sums[0]`` becomes 0 and the weights too.
    """
    signature = types.float32(_ADDRESS, types.float32, _ADDRESS)

    def emit(context, builder, signature, args):
        scores, least, sums = args
        e = _Emit(builder)
        places = [e.at(scores, v * LANES) for v in range(TILE // LANES)]
        vectors = [e.load(place) for place in places]
        greatest = e.broadcast(least)
        for vector in vectors:
            greatest = e.greater(vector, greatest)
        greatest = e.fold(greatest, e.greater)
        # Nothing seen yet and nothing to see: any finite number keeps -inf minus -inf out.
        nothing = builder.fcmp_ordered("==", greatest, e.constant(-math.inf))
        base = builder.select(nothing, e.constant(0.0), greatest)
        total = e.constant(0.0)
        for vector, place in zip(vectors, places, strict=True):
            weights = e.exp(builder.fsub(vector, base))
            e.store(weights, place)
            total = builder.fadd(total, weights)
        first = ir.Constant(_I32, 0)
        e.store(builder.extract_element(e.fold(total, builder.fadd), first), sums)
        return builder.extract_element(greatest, first)

    return signature, emit


@intrinsic
def _add_weights(context, scores, lse, sums):
    """Adds ``exp(score - lse)`` of a tile of one row's scores to ``sums``."""
    signature = types.void(_ADDRESS, types.float32, _ADDRESS)

    def emit(context, builder, signature, args):
        scores, lse, sums = args
        e = _Emit(builder)
        whole = e.broadcast(lse)
        for v in range(TILE // LANES):
            place = e.at(sums, v * LANES)
            weights = e.exp(builder.fsub(e.load(e.at(scores, v * LANES)), whole))
            e.store(builder.fadd(e.load(place), weights), place)
        return context.get_dummy_value()

    return signature, emit


@intrinsic
def _add(context, counter, amount):
    """Adds to a number that all threads see, in one step; returns what it was."""
    signature = types.int64(_ADDRESS, types.int64)

    def emit(context, builder, signature, args):
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, args[1], "acq_rel")

    return signature, emit


def _make_pointer(kind: Any) -> Any:
    @intrinsic
    def pointer(context, address):
        def emit(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(_ADDRESS), emit

    return pointer


_floats, _ints = _make_pointer(types.float32), _make_pointer(types.int64)


# ---------------------------------------------------------------- the kernel

# What the kernel is told, as 64-bit integers (addresses, counts, strides in elements).
(
    NEXT_UNIT, NEXT_THREAD, NUM_UNITS, UNITS, UNITS_LEFT, SCRATCH, SCRATCH_STRIDE, PARTIALS,
    ROW_TOKEN, ROW_TABLE, ROW_AT, ROW_SHARED, TABLES, BLOCK_SIZE,
    QUERY, QUERY_HEAD, QUERY_ROW, KEYS, VALUES, KEY_DIM, VALUE_DIM, NUM_SLOTS, KV_HEADS, GROUP,
    NUM_ROWS, SLOTS, NEW_KEY, NEW_KEY_HEAD, NEW_KEY_ROW, NEW_VALUE, NEW_VALUE_HEAD, NEW_VALUE_ROW,
    OUTPUT, LSE, SCALE, WINDOW, MASS, ROW_KEPT, KEPT, NUM_FIELDS,
) = range(40)  # fmt: skip

# A unit of work: rows [FIRST, LAST) with one key head over the parts [PART_FIRST, PART_LAST). Where those are
# not all of [BLOCK_FIRST, BLOCK_LAST), states go to PARTIAL, and whoever finishes last joins them.
(
    U_FIRST, U_LAST, U_HEAD, U_PART_FIRST, U_PART_LAST, U_PARTIAL, U_BLOCK, U_BLOCK_FIRST, U_BLOCK_LAST,
    U_COST, NUM_UNIT_FIELDS,
) = range(11)  # fmt: skip

# Where MASS is not 0, a unit weighs instead: of the rows [FIRST, LAST), all of one sequence, it adds up what
# they give to the keys of one part with one key head, and writes it from MASS + TARGET on.
W_FIRST, W_LAST, W_HEAD, W_PART, W_TARGET, NUM_WEIGH_FIELDS = range(6)

_FLAGS = {"nogil": True, "cache": True, "error_model": "numpy"}
ALIKE = 1 << 60  # as many tokens as any two rows of one sequence share


@numba.njit(**_FLAGS)
def _multiply(a, a_stride, b, b_stride, c, c_stride, rows, columns, length):
    """``c += a @ b``, each sum one chain in order; ``columns`` is a multiple of ``FEW_LANES``."""
    wide = 4 * LANES
    row = 0
    while row < rows:
        tall = rows - row >= 4
        at_a, at_c = a + 4 * row * a_stride, c + 4 * row * c_stride
        column = 0
        while column < columns:
            at_b, to = b + 4 * column, at_c + 4 * column
            if columns - column >= wide:
                if tall:
                    _product_4_4(at_a, a_stride, at_b, b_stride, to, c_stride, length)
                else:
                    _product_1_4(at_a, a_stride, at_b, b_stride, to, c_stride, length)
                column += wide
            elif columns - column < LANES:
                if tall:
                    _product_4_few(at_a, a_stride, at_b, b_stride, to, c_stride, length)
                else:
                    _product_1_few(at_a, a_stride, at_b, b_stride, to, c_stride, length)
                column += FEW_LANES
            else:
                if tall:
                    _product_4_1(at_a, a_stride, at_b, b_stride, to, c_stride, length)
                else:
                    _product_1_1(at_a, a_stride, at_b, b_stride, to, c_stride, length)
                column += LANES
        row += 4 if tall else 1


@numba.njit(**_FLAGS)
def _piece(table, token, limit, block_size):
    """The slot of ``token``, and how many tokens from it on lie in consecutive slots, up to ``limit``."""
    block = token // block_size
    slot = table[block] * block_size + token % block_size
    end = (block + 1) * block_size
    while end < limit and table[end // block_size] == table[block] + end // block_size - block:
        end += block_size
    return slot, min(end, limit) - token


@numba.njit(**_FLAGS)
def _load_keys(job, table, head, token, num_keys, tile):
    """The keys of a tile, turned: ``tile[dim, TILE]``. Behind ``num_keys`` whatever; those are masked."""
    dim, block_size = job[KEY_DIM], job[BLOCK_SIZE]
    base = job[KEYS] + 4 * head * job[NUM_SLOTS] * dim
    target = _floats(tile)
    done = 0
    while done < num_keys:
        slot, length = _piece(table, token + done, token + num_keys, block_size)
        source = base + 4 * slot * dim
        column = 0
        while length - column >= LANES:
            for d in range(0, dim - LANES + 1, LANES):
                at = tile + 4 * (d * TILE + done + column)
                _transpose(source + 4 * (column * dim + d), dim, at, TILE)
            if dim % LANES:
                for i in range(column, column + LANES):
                    key = _floats(source + 4 * i * dim)
                    for d in range(dim - dim % LANES, dim):
                        target[d * TILE + done + i] = key[d]
            column += LANES
        while column < length:
            key = _floats(source + 4 * column * dim)
            for d in range(dim):
                target[d * TILE + done + column] = key[d]
            column += 1
        done += length


@numba.njit(**_FLAGS)
def _expect(job, base, dim, table, head, token, num_keys):
    """Asks for a tile's keys or values: the processor does not foresee the way from block to block."""
    base += 4 * head * job[NUM_SLOTS] * dim
    done = 0
    while done < num_keys:
        slot, length = _piece(table, token + done, token + num_keys, job[BLOCK_SIZE])
        start = base + 4 * slot * dim
        for offset in range(0, 4 * length * dim, 64):
            _prefetch(start + offset)
        done += length


@numba.njit(**_FLAGS)
def _add_values(job, table, head, token, num_keys, weights, rows, output):
    """``output[rows, dim] += weights[rows, TILE] @ values``, the values read where they lie."""
    dim, block_size = job[VALUE_DIM], job[BLOCK_SIZE]
    base = job[VALUES] + 4 * head * job[NUM_SLOTS] * dim
    done = 0
    while done < num_keys:
        slot, length = _piece(table, token + done, token + num_keys, block_size)
        _multiply(weights + 4 * done, TILE, base + 4 * slot * dim, dim, output, dim, rows, dim, length)
        done += length


@numba.njit(**_FLAGS)
def _scale(vector, factor, length):
    for i in range(length):
        vector[i] *= factor


@numba.njit(**_FLAGS)
def _hide(scores, low, high):
    """Of a tile's scores only ``[low, high)`` are seen."""
    for i in range(low):
        scores[i] = -np.float32(np.inf)
    for i in range(high, TILE):
        scores[i] = -np.float32(np.inf)


@numba.njit(**_FLAGS)
def _kept_scores(job, row, head):
    """Where the scores of a row and query head are kept, in whole tiles; 0 if they are not."""
    if not job[KEPT] or _ints(job[ROW_KEPT])[row] < 0:
        return 0
    length = (_ints(job[ROW_TOKEN])[row] // TILE + 1) * TILE
    return job[KEPT] + 4 * (_ints(job[ROW_KEPT])[row] + head * length)


@numba.njit(**_FLAGS)
def _attend_tile(job, unit, first, last, token, queries, state, buffer):
    """Rows ``[first, last)`` of a unit, which have the tile at ``token`` in common, take it in.

    ``state`` is, per stacked row of the unit, the greatest score, the sum of weights, the weighted values.
    """
    group, key_dim, value_dim, window = job[GROUP], job[KEY_DIM], job[VALUE_DIM], job[WINDOW]
    unit_first, head, most = unit[U_FIRST], unit[U_HEAD], (unit[U_LAST] - unit[U_FIRST]) * group
    row_token = _ints(job[ROW_TOKEN])
    table = _ints(job[TABLES] + 8 * _ints(job[ROW_TABLE])[first])
    num_keys = 0
    for row in range(first, last):
        num_keys = max(num_keys, min(TILE, row_token[row] + 1 - token))
    scores_at = buffer + 4 * key_dim * TILE
    sums_at = scores_at + 4 * _SLICE * TILE
    scores, sums = _floats(scores_at), _floats(sums_at)
    if (last - first) * group <= _FEW:
        _expect(job, job[VALUES], value_dim, table, head, token, num_keys)
        ahead = min(TILE, row_token[last - 1] + 1 - token - TILE)
        if ahead > 0:
            _expect(job, job[KEYS], key_dim, table, head, token + TILE, ahead)
    _load_keys(job, table, head, token, num_keys, buffer)
    greatest, total = _floats(state), _floats(state + 4 * most)
    stacked = (first - unit_first) * group
    end = (last - unit_first) * group
    while stacked < end:
        rows = min(_SLICE, end - stacked)
        outputs = state + 8 * most + 4 * stacked * value_dim
        for i in range(rows * TILE):
            scores[i] = np.float32(0.0)
        _multiply(
            queries + 4 * stacked * key_dim, key_dim, buffer, TILE, scores_at, TILE, rows, TILE, key_dim
        )
        for i in range(rows):
            row = unit_first + (stacked + i) // group
            own = row_token[row]
            high = min(TILE, own + 1 - token)
            low = max(0, own + 1 - window - token) if window else 0
            if low > 0 or high < TILE:
                _hide(_floats(scores_at + 4 * i * TILE), min(low, TILE), max(high, 0))
            kept = _kept_scores(job, row, head * group + (stacked + i) % group)
            if kept and high > 0:
                target = _floats(kept + 4 * token)
                for j in range(TILE):
                    target[j] = scores[i * TILE + j]
            before = greatest[stacked + i]
            now = _soften(scores_at + 4 * i * TILE, before, sums_at)
            if now != before and total[stacked + i] != 0.0:
                factor = np.float32(math.exp(before - now))
                total[stacked + i] *= factor
                _scale(_floats(outputs + 4 * i * value_dim), factor, value_dim)
            greatest[stacked + i] = now
            total[stacked + i] += sums[0]
        _add_values(job, table, head, token, num_keys, scores_at, rows, outputs)
        stacked += rows


@numba.njit(**_FLAGS)
def unit_rows(group):
    """How many rows a unit has at most: as many as keep their state in a core's own cache."""
    return max(1, 128 // group)


@numba.njit(**_FLAGS)
def scratch_floats(group, key_dim, value_dim):
    """Floats that a thread works on: queries, two states, a tile of keys, its scores, sums."""
    most = max(_SLICE, unit_rows(group) * group)
    return most * (key_dim + 2 * (2 + value_dim)) + TILE * key_dim + _SLICE * TILE + TILE


@numba.njit(**_FLAGS)
def _join(total, part, rows, dim):
    """Joins the state of one more part to the state so far."""
    most = rows
    for row in range(rows):
        part_max, part_sum = _floats(part)[row], _floats(part + 4 * most)[row]
        if part_sum == 0.0:
            continue  # it saw nothing of this part
        source = _floats(part + 8 * most + 4 * row * dim)
        target = _floats(total + 8 * most + 4 * row * dim)
        before_max, before_sum = _floats(total)[row], _floats(total + 4 * most)[row]
        if before_sum == 0.0:
            _floats(total)[row], _floats(total + 4 * most)[row] = part_max, part_sum
            for i in range(dim):
                target[i] = source[i]
            continue
        greatest = max(before_max, part_max)
        old, new = np.float32(math.exp(before_max - greatest)), np.float32(math.exp(part_max - greatest))
        _floats(total)[row] = greatest
        _floats(total + 4 * most)[row] = before_sum * old + part_sum * new
        for i in range(dim):
            target[i] = target[i] * old + source[i] * new


@numba.njit(**_FLAGS)
def _clear(state, rows, dim):
    numbers = _floats(state)
    for row in range(rows):
        numbers[row] = -np.float32(np.inf)
    for i in range(rows, rows * (2 + dim)):
        numbers[i] = np.float32(0.0)


@numba.njit(**_FLAGS)
def _finish(job, unit, state):
    """Divides by the sum of weights and writes output and log-sum-exp."""
    group, dim = job[GROUP], job[VALUE_DIM]
    most = (unit[U_LAST] - unit[U_FIRST]) * group
    row_at, lse = _ints(job[ROW_AT]), _floats(job[LSE])
    for row in range(unit[U_FIRST], unit[U_LAST]):
        for g in range(group):
            stacked = (row - unit[U_FIRST]) * group + g
            place = (row_at[row] * job[KV_HEADS] + unit[U_HEAD]) * group + g
            total = _floats(state + 4 * most)[stacked]
            source = _floats(state + 8 * most + 4 * stacked * dim)
            target = _floats(job[OUTPUT] + 4 * place * dim)
            factor = np.float32(1.0) / total
            for i in range(dim):
                target[i] = source[i] * factor
            lse[place] = _floats(state)[stacked] + np.float32(math.log(total))


@numba.njit(**_FLAGS)
def _attend_part(job, unit, part, queries, state, buffer):
    row_token, row_shared = _ints(job[ROW_TOKEN]), _ints(job[ROW_SHARED])
    window = job[WINDOW]
    for token in range(part * PART, (part + 1) * PART, TILE):
        first = unit[U_FIRST]
        while first < unit[U_LAST]:
            last = first + 1
            while last < unit[U_LAST] and row_shared[last] >= token + TILE:
                last += 1
            start, end = first, last
            while start < end and row_token[start] < token:
                start += 1
            while window and start < end and row_token[end - 1] - window >= token + TILE - 1:
                end -= 1
            if start < end:
                _attend_tile(job, unit, start, end, token, queries, state, buffer)
            first = last


@numba.njit(**_FLAGS)
def _stack_queries(job, head, first, num_stacked, target):
    """Scaled queries of a key head, from the stacked row ``first`` on: ``target[num_stacked, key_dim]``."""
    group, dim, scale = job[GROUP], job[KEY_DIM], _floats(job[SCALE])[0]
    row_at = _ints(job[ROW_AT])
    for i in range(num_stacked):
        row, g = (first + i) // group, (first + i) % group
        offset = (head * group + g) * job[QUERY_HEAD] + row_at[row] * job[QUERY_ROW]
        source, to = _floats(job[QUERY] + 4 * offset), _floats(target + 4 * i * dim)
        for d in range(dim):
            to[d] = source[d] * scale


@numba.njit(**_FLAGS)
def _attend_unit(job, unit, scratch):
    group, key_dim, value_dim = job[GROUP], job[KEY_DIM], job[VALUE_DIM]
    most = (unit[U_LAST] - unit[U_FIRST]) * group
    size = most * (2 + value_dim)
    queries = scratch
    total = queries + 4 * most * key_dim
    state = total + 4 * size
    buffer = state + 4 * size
    _stack_queries(job, unit[U_HEAD], unit[U_FIRST] * group, most, queries)
    _clear(total, most, value_dim)
    is_whole = unit[U_PARTIAL] < 0
    for part in range(unit[U_PART_FIRST], unit[U_PART_LAST]):
        if not is_whole:
            state = job[PARTIALS] + 4 * (unit[U_PARTIAL] + (part - unit[U_BLOCK_FIRST]) * size)
        _clear(state, most, value_dim)
        _attend_part(job, unit, part, queries, state, buffer)
        if is_whole:
            _join(total, state, most, value_dim)
    if not is_whole:
        num_parts = unit[U_PART_LAST] - unit[U_PART_FIRST]
        left = _add(job[UNITS_LEFT] + 8 * unit[U_BLOCK], -num_parts) - num_parts
        if left > 0:
            return  # another unit will be the last
        for part in range(unit[U_BLOCK_LAST] - unit[U_BLOCK_FIRST]):
            _join(total, job[PARTIALS] + 4 * (unit[U_PARTIAL] + part * size), most, value_dim)
    _finish(job, unit, total)


@numba.njit(**_FLAGS)
def _weigh_unit(job, unit, buffer):
    group, dim, window, head = job[GROUP], job[KEY_DIM], job[WINDOW], unit[W_HEAD]
    row_token, row_at, lse = _ints(job[ROW_TOKEN]), _ints(job[ROW_AT]), _floats(job[LSE])
    table = _ints(job[TABLES] + 8 * _ints(job[ROW_TABLE])[unit[W_FIRST]])
    first, last = unit[W_FIRST], unit[W_LAST]
    is_kept = _kept_scores(job, first, 0) != 0
    num_tokens = row_token[last - 1] + 1
    scores_at = buffer + 4 * dim * TILE
    sums_at = scores_at + 4 * _SLICE * TILE
    queries = sums_at + 4 * TILE
    scores, sums = _floats(scores_at), _floats(sums_at)
    for token in range(unit[W_PART] * PART, min((unit[W_PART] + 1) * PART, num_tokens), TILE):
        num_keys = min(TILE, num_tokens - token)
        if not is_kept:
            _load_keys(job, table, head, token, num_keys, buffer)
        for i in range(TILE):
            sums[i] = np.float32(0.0)
        while row_token[first] < token:
            first += 1
        end = last
        while window and end > first and row_token[end - 1] - window >= token + TILE - 1:
            end -= 1
        stacked = first * group
        while stacked < end * group:
            rows = min(_SLICE, end * group - stacked)
            if not is_kept:
                _stack_queries(job, head, stacked, rows, queries)
                for i in range(rows * TILE):
                    scores[i] = np.float32(0.0)
                _multiply(queries, dim, buffer, TILE, scores_at, TILE, rows, TILE, dim)
            for i in range(rows):
                row, g = (stacked + i) // group, (stacked + i) % group
                high = min(TILE, row_token[row] + 1 - token)
                low = max(0, row_token[row] + 1 - window - token) if window else 0
                if high <= 0 or low >= TILE:
                    continue
                at = scores_at + 4 * i * TILE
                if is_kept:
                    at = _kept_scores(job, row, head * group + g) + 4 * token
                elif low > 0 or high < TILE:
                    _hide(_floats(at), low, high)
                _add_weights(at, lse[(row_at[row] * job[KV_HEADS] + head) * group + g], sums_at)
            stacked += rows
        target = _floats(job[MASS] + 4 * (unit[W_TARGET] + token))
        for i in range(num_keys):
            target[i] = sums[i]


@numba.cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
def run_units(address):
    """What each thread runs, on the address of a job: it takes unit after unit until there is none."""
    job = numba.carray(address, NUM_FIELDS, np.int64)
    base = job.ctypes.data
    thread = _add(base + 8 * NEXT_THREAD, 1)
    scratch = job[SCRATCH] + 4 * thread * job[SCRATCH_STRIDE]
    while True:
        index = _add(base + 8 * NEXT_UNIT, 1)
        if index >= job[NUM_UNITS]:
            return
        if job[MASS]:
            _weigh_unit(job, _ints(job[UNITS] + 8 * index * NUM_WEIGH_FIELDS), scratch)
        else:
            _attend_unit(job, _ints(job[UNITS] + 8 * index * NUM_UNIT_FIELDS), scratch)


@numba.njit(**_FLAGS)
def write_rows(job):
    """Writes the step's new keys and values to their slots."""
    slots = _ints(job[SLOTS])
    for head in range(job[KV_HEADS]):
        for row in range(job[NUM_ROWS]):
            slot = head * job[NUM_SLOTS] + slots[row]
            source = _floats(job[NEW_KEY] + 4 * (head * job[NEW_KEY_HEAD] + row * job[NEW_KEY_ROW]))
            target = _floats(job[KEYS] + 4 * slot * job[KEY_DIM])
            for d in range(job[KEY_DIM]):
                target[d] = source[d]
            source = _floats(job[NEW_VALUE] + 4 * (head * job[NEW_VALUE_HEAD] + row * job[NEW_VALUE_ROW]))
            target = _floats(job[VALUES] + 4 * slot * job[VALUE_DIM])
            for d in range(job[VALUE_DIM]):
                target[d] = source[d]


@numba.njit(**_FLAGS)
def _part_cost(row_token, row_shared, first, last, part, group, window):
    """Roughly what a part costs: loading a tile is worth about as much as eight stacked rows of it."""
    cost = 0
    for token in range(part * PART, (part + 1) * PART, TILE):
        is_loaded = False
        for row in range(first, last):
            if row_shared[row] < token + TILE:
                is_loaded = False
            own = row_token[row]
            if own >= token and not (window and own - window >= token + TILE - 1):
                cost += group if is_loaded else group + 8
                is_loaded = True
    return cost


@numba.njit(**_FLAGS)
def plan_units(row_token, row_shared, kv_heads, group, window, value_dim, num_threads):
    """Cuts the rows (sorted so that rows with a common prefix are neighbours) into units of work.

    Args:
        row_token: index of each row's token in its sequence, int64 ``[rows]``.
        row_shared: how many leading tokens a row's table has in common with the row before, int64 ``[rows]``.

    Returns:
        units ``[units, NUM_UNIT_FIELDS]``, dearest first; parts left per split block; floats that the
        partial states take.
    """
    num_rows, most = len(row_token), unit_rows(group)
    bounds = np.empty(num_rows + 1, np.int64)
    bounds[0], num_blocks = 0, 1
    for row in range(1, num_rows):
        if row_shared[row] < TILE or row - bounds[num_blocks - 1] >= most:
            bounds[num_blocks] = row
            num_blocks += 1
    bounds[num_blocks] = num_rows
    spans = np.empty((num_blocks, 2), np.int64)
    for block in range(num_blocks):
        low, high = ALIKE, 0
        for row in range(bounds[block], bounds[block + 1]):
            low = min(low, max(0, row_token[row] + 1 - window) // PART if window else 0)
            high = max(high, row_token[row] // PART + 1)
        spans[block, 0], spans[block, 1] = low, high
    num_parts = spans[:, 1] - spans[:, 0]
    costs = np.zeros((num_blocks, num_parts.max()), np.int64)
    for block in range(num_blocks):
        for part in range(num_parts[block]):
            costs[block, part] = _part_cost(
                row_token, row_shared, bounds[block], bounds[block + 1], spans[block, 0] + part, group, window
            )
    share = costs.sum() * kv_heads // (4 * num_threads)
    is_split = (num_parts > 1) & (costs.sum(axis=1) > share) & (num_threads > 1)
    units = np.empty((kv_heads * np.where(is_split, num_parts, 1).sum(), NUM_UNIT_FIELDS), np.int64)
    left = np.empty(kv_heads * is_split.sum(), np.int64)
    num_units = num_left = num_partials = 0
    for block in range(num_blocks):
        low, high = spans[block]
        first, last = bounds[block], bounds[block + 1]
        for head in range(kv_heads):
            for part in range(num_parts[block] if is_split[block] else 1):
                unit = units[num_units]
                unit[U_FIRST], unit[U_LAST], unit[U_HEAD] = first, last, head
                unit[U_BLOCK], unit[U_BLOCK_FIRST], unit[U_BLOCK_LAST] = num_left, low, high
                if is_split[block]:
                    unit[U_PART_FIRST], unit[U_PART_LAST] = low + part, low + part + 1
                    unit[U_PARTIAL], unit[U_COST] = num_partials, costs[block, part]
                else:
                    unit[U_PART_FIRST], unit[U_PART_LAST] = low, high
                    unit[U_PARTIAL], unit[U_COST] = -1, costs[block].sum()
                num_units += 1
            if is_split[block]:
                left[num_left] = num_parts[block]
                num_left += 1
                num_partials += num_parts[block] * (last - first) * group * (2 + value_dim)
    order = np.argsort(-units[:, U_COST], kind="mergesort")
    return units[order], left, num_partials
