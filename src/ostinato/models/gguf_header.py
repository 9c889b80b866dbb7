"""Reading a GGUF file's header strictly: every length is checked before it is believed.

The libraries that read GGUF assume a whole file: cut one short and they fail with an index error deep inside,
or hand out views of what is not there. So a file passes here first.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, TypeAlias

from ostinato.errors import ModelCorruptError, ModelUnsupportedError

Scalar: TypeAlias = int | float | bool | str

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_WIDTHS = {kind: struct.calcsize(form) for kind, form in _SCALARS.items()}
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies in the file. ``shape`` is in torch order, ``kind`` is ggml's type number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata's single values (an array is represented by its length) and the tensors, in file order."""

    architecture: str
    metadata: Mapping[str, Scalar]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check a GGUF file's header, and that the file is long enough for all its tensors.

    Raises:
        ModelCorruptError: the file is truncated or its header contradicts itself.
        ModelUnsupportedError: not GGUF, or of a version, byte order, type or kind that is not handled.
        OSError: the file cannot be read.
    """
    size_bytes = path.stat().st_size
    with path.open("rb", buffering=1 << 20) as file:
        reader = _Reader(file, size_bytes, path)
        num_tensors, num_values = _preamble(reader)
        metadata = {}
        for _ in range(num_values):
            key = reader.string()
            metadata[key] = reader.value(reader.number("<I"))
        infos = [_tensor_info(reader) for _ in range(num_tensors)]
        data_start = _aligned(reader.position, metadata, path)
    _refuse_special_kinds(metadata, path)
    tensors = tuple(_placed(info, data_start, size_bytes, path) for info in infos)
    if len({t.name for t in tensors}) != len(tensors):
        raise ModelCorruptError(f"{path} names a tensor twice. Download the file again.")
    return GgufHeader(str(metadata["general.architecture"]), metadata, tensors)


class _Reader:
    """Little-endian values in order; a length beyond the end of the file is an error, not an allocation."""

    def __init__(self, file: BinaryIO, size_bytes: int, path: Path) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._path = path
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        if self.position + num_bytes > self._size_bytes:
            raise ModelCorruptError(
                f"{self._path} is truncated: it ends after {self._size_bytes:,} bytes, inside its header."
                " Download the file again."
            )
        data = self._file.read(num_bytes)
        self.position += num_bytes
        return data

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def string(self) -> str:
        data = self.take(self.number("<Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelCorruptError(
                f"{self._path} holds a name that is not UTF-8, at byte {self.position:,}."
                " Download the file again."
            ) from error

    def value(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._skip_array()
        if kind not in _SCALARS:
            raise ModelCorruptError(
                f"{self._path} has metadata of the unknown type {kind}, before byte {self.position:,}."
                " Download the file again."
            )
        value: Scalar = struct.unpack(_SCALARS[kind], self.take(_WIDTHS[kind]))[0]
        return value

    def _skip_array(self) -> int:
        kind, length = self.number("<I"), self.number("<Q")
        if kind in _WIDTHS:
            self.take(length * _WIDTHS[kind])
        elif kind == _STRING:
            for _ in range(length):
                self.take(self.number("<Q"))
        else:
            raise ModelUnsupportedError(
                f"{self._path} has metadata arrays of type {kind}, which is not read."
                " Convert the model again with a current llama.cpp."
            )
        return length


def _preamble(reader: _Reader) -> tuple[int, int]:
    magic = reader.take(4)
    if magic != b"GGUF":
        raise ModelUnsupportedError(f"{reader._path} is not a GGUF file: it does not begin with 'GGUF'.")
    version = reader.number("<I")
    if version not in (2, 3):
        hint = " It seems to be for big-endian machines." if version & 0xFFFF == 0 else ""
        raise ModelUnsupportedError(
            f"{reader._path} is GGUF version {version}; versions 2 and 3 are read.{hint}"
            " Convert the model again with a current llama.cpp."
        )
    return reader.number("<Q"), reader.number("<Q")


def _tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string()
    num_dimensions = reader.number("<I")
    if not 0 < num_dimensions <= _MAX_DIMENSIONS:
        raise ModelCorruptError(
            f"{reader._path}: tensor {name!r} claims {num_dimensions} dimensions. Download the file again."
        )
    shape = tuple(reversed([reader.number("<Q") for _ in range(num_dimensions)]))
    return name, shape, reader.number("<I"), reader.number("<Q")


def _aligned(position: int, metadata: Mapping[str, Scalar], path: Path) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ModelCorruptError(f"{path} claims an alignment of {alignment}. Download the file again.")
    return (position + alignment - 1) // alignment * alignment


def _placed(
    info: tuple[str, tuple[int, ...], int, int], data_start: int, size: int, path: Path
) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape, kind, offset = info
    if kind not in set(GGMLQuantizationType):
        raise ModelUnsupportedError(
            f"{path}: tensor {name!r} has the unknown quantisation type {kind}. Update the gguf package."
        )
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape[-1] % block:
        raise ModelCorruptError(
            f"{path}: rows of tensor {name!r} have {shape[-1]} values, not a multiple of {block}."
            " Download the file again."
        )
    size_bytes = prod(shape) // block * block_bytes
    start = data_start + offset
    if start + size_bytes > size:
        raise ModelCorruptError(
            f"{path} is truncated: it ends after {size:,} bytes, but tensor {name!r} reaches to byte"
            f" {start + size_bytes:,}. Download the file again."
        )
    return GgufTensor(name, shape, kind, start, size_bytes)


def _refuse_special_kinds(metadata: Mapping[str, Scalar], path: Path) -> None:
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelUnsupportedError(f"{path} does not say its architecture; it is no language model.")
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise ModelUnsupportedError(
            f"{path} is one of {parts} parts of a split model. Merge them with llama.cpp's"
            " `llama-gguf-split --merge` and give the merged file."
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ModelUnsupportedError(f"{path} is of the kind {kind!r}, not a whole model.")
