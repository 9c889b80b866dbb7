"""A block in a form for each layer's keys and values, and the choice of a codec by its spec."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ..arena import Arena
from .exact import RawCodec
from .forms import Bytes, Cast, Form, Integers
from .spec import Coding, codings_of, spec_of

_VERSION = 1
"""Of what the bytes mean, and of how a block is cut into pieces and groups. It is part of a codec's name, and
so of the key of every block."""

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

WINDOW_TOKENS = 64
"""Of a prompt's last tokens, where some layer has four bits: what is said next depends on them most."""

_SERIAL_NUMBERS = 32_768
"""torch computes so many in the caller's thread, and shares out more. Blocks are decoded beside the engine:
a second team of threads would slow both."""


def make_codec(arena: Arena, block_size: int, spec: str) -> RawCodec | LayeredCodec:
    """The codec that ``spec`` asks for (see :mod:`ostinato.kv.codecs.spec`), for blocks of this arena.

    Raises:
        ParameterError: it cannot be read, or does not fit the model's layers.
    """
    codings = tuple(
        Coding(_own(coding.keys, arena.dtype), _own(coding.values, arena.dtype))
        for coding in codings_of(spec, len(arena.layers))
    )
    if all(coding == Coding() for coding in codings):
        return RawCodec(arena.groups, block_size)
    return LayeredCodec(arena, block_size, codings)


class LayeredCodec:
    """Loses some of every block. ``codings``: one for each layer, not all of them exact.

    A payload holds the pieces one after the other, each of few enough numbers to be worked on by one thread.
    Only a block's own tokens are in it.
    """

    is_exact = False

    def __init__(self, arena: Arena, block_size: int, codings: tuple[Coding, ...]) -> None:
        assert len(codings) == len(arena.layers), f"{len(codings)} codings, {len(arena.layers)} layers"
        self.spec = spec_of(codings)
        has_four_bits = any("int4" in (coding.keys, coding.values) for coding in codings)
        self.window_tokens = WINDOW_TOKENS if has_four_bits else 0
        self.name = f"lossy v{_VERSION} {self.spec}"
        self._block_size = block_size
        self._pieces: list[tuple[Tensor, Form, slice]] = []
        end = 0
        for tensor, form in _pieces(arena, block_size, codings):
            layers, heads, _, dim = tensor.shape
            start, end = end, end + form.num_bytes((layers, heads, block_size, dim))
            self._pieces.append((tensor, form, slice(start, end)))
        self.payload_bytes = end

    @torch.inference_mode()
    def encode(self, slot: int, into: memoryview) -> bool:
        """Writes the block that begins at ``slot`` to ``into``, ``payload_bytes`` long.

        ``False``: it has numbers that its form cannot hold (not finite, or too large); not for storing.
        """
        data = self._bytes(into)
        return all(
            form.pack(tensor[:, :, slot : slot + self._block_size], data[part])
            for tensor, form, part in self._pieces
        )

    @torch.inference_mode()
    def decode(self, payload: memoryview, slot: int) -> None:
        """Writes what ``encode`` made to the block that begins at ``slot``."""
        data = self._bytes(payload)
        for tensor, form, part in self._pieces:
            form.unpack(data[part], tensor[:, :, slot : slot + self._block_size])

    def _bytes(self, payload: memoryview) -> Bytes:
        assert len(payload) == self.payload_bytes, f"{len(payload)} bytes, not {self.payload_bytes}"
        return np.frombuffer(payload, np.uint8)


def _own(form: str, dtype: torch.dtype) -> str:
    """``exact`` for a form that can hold every number of the arena's type: nothing is gained by another."""
    stored = _DTYPES.get(form)
    return "exact" if stored is not None and torch.promote_types(stored, dtype) == stored else form


def _pieces(arena: Arena, block_size: int, codings: tuple[Coding, ...]) -> Iterator[tuple[Tensor, Form]]:
    """Parts ``[layers, heads, slots, dim]`` of the arena that are written in one form each."""
    for place, members in enumerate(arena.members):
        for is_key, group in ((True, arena.groups[2 * place]), (False, arena.groups[2 * place + 1])):
            names = [codings[layer].keys if is_key else codings[layer].values for layer in members]
            end = 0
            for name, run in groupby(names):
                start, end = end, end + len(list(run))
                form = _form(name, arena.dtype, is_key=is_key)
                yield from ((piece, form) for piece in _small(group[start:end], block_size))


def _small(tensor: Tensor, block_size: int) -> Iterator[Tensor]:
    """Splits by layers, and by heads where one layer's are too many."""
    layers, heads, _, dim = tensor.shape
    head_numbers = block_size * dim
    num_heads = max(1, min(heads, _SERIAL_NUMBERS // head_numbers))
    num_layers = max(1, _SERIAL_NUMBERS // (head_numbers * heads)) if num_heads == heads else 1
    for layer in range(0, layers, num_layers):
        for head in range(0, heads, num_heads):
            yield tensor[layer : layer + num_layers, head : head + num_heads]


def _form(name: str, dtype: torch.dtype, *, is_key: bool) -> Form:
    if name == "int8":
        return Integers(8, along_tokens=False, longest_group=128)
    if name == "int4":
        # Keys have channels of very different size, much the same in all tokens; values have not.
        return Integers(4, along_tokens=is_key, longest_group=32)
    return Cast(_DTYPES.get(name, dtype))
