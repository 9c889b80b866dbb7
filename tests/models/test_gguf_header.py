"""A header is believed only as far as the file reaches."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_gguf import write_gguf

from ostinato.errors import ModelCorruptError, ModelError, ModelUnsupportedError
from ostinato.models.gguf_header import read_gguf_header


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("header") / "whole.gguf", quantisation="Q4_0")


def test_agrees_with_the_library(whole: Path) -> None:
    """On a good file, gguf's own reader sees the same."""
    header = read_gguf_header(whole)
    reader = gguf.GGUFReader(whole)
    assert [t.name for t in header.tensors] == [t.name for t in reader.tensors]
    for ours, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.kind, ours.offset) == (theirs.tensor_type, theirs.data_offset)
        assert ours.size_bytes == theirs.n_bytes
    for key, value in header.metadata.items():
        field = reader.fields[key]
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            assert value == len(field.data)
        else:
            assert value == field.contents()
    assert header.architecture == "llama"


def test_truncated_anywhere(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    header_bytes = read_gguf_header(whole).tensors[0].offset
    lengths = [*range(0, header_bytes, 29), *range(header_bytes, len(data), len(data) // 97), len(data) - 33]
    cut = tmp_path / "cut.gguf"
    for length in lengths:
        cut.write_bytes(data[:length])
        with pytest.raises(ModelCorruptError, match="truncated"):
            read_gguf_header(cut)


def test_any_changed_byte_is_an_error_or_harmless(whole: Path, tmp_path: Path) -> None:
    """Whatever is wrong in a header, it is one of our errors; nothing escapes, nothing allocates wildly."""
    data = bytearray(whole.read_bytes())
    header_bytes = read_gguf_header(whole).tensors[0].offset
    places = random.Random(11)
    refused = 0
    changed = tmp_path / "changed.gguf"
    for _ in range(600):
        at, old = places.randrange(header_bytes), 0
        old, data[at] = data[at], places.randrange(256)
        changed.write_bytes(data)
        try:
            read_gguf_header(changed)
        except ModelError:
            refused += 1
        data[at] = old
    assert refused > 40, "so few refusals mean that the places were chosen badly"


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(60), "GGUF version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(60), "big-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(60), "does not say its architecture"),
    ],
)
def test_other_files(start: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(start)
    with pytest.raises(ModelUnsupportedError, match=message):
        read_gguf_header(tmp_path / "x.gguf")


def test_parts_and_adapters(tmp_path: Path) -> None:
    part = write_gguf(tmp_path / "p.gguf", metadata={"split.count": 3})
    with pytest.raises(ModelUnsupportedError, match="one of 3 parts"):
        read_gguf_header(part)
    adapter = write_gguf(tmp_path / "a.gguf", metadata={"general.type": "adapter"})
    with pytest.raises(ModelUnsupportedError, match="of the kind 'adapter', not a whole model"):
        read_gguf_header(adapter)


def test_alignment_of_its_own(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(256)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("a", values)
    writer.add_tensor("b", values + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = (tmp_path / "x.gguf").read_bytes()
    tensors = read_gguf_header(tmp_path / "x.gguf").tensors
    assert all(t.offset % 256 == 0 for t in tensors)
    assert data[tensors[1].offset : tensors[1].offset + 48] == (values + 1).tobytes()
