"""A GGUF file's tensors as a model's tensors, one piece at a time, by transformers' own rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ostinato.errors import ModelCorruptError, ModelUnsupportedError

from .gguf_header import GgufHeader, GgufTensor


@dataclass(frozen=True, slots=True)
class Piece:
    """GGUF tensors that are read together, and the model tensor that comes of them."""

    sources: tuple[str, ...]
    target: str


class TensorMap(Protocol):
    """transformers' knowledge of one file: which tensors belong together, and how they are turned."""

    @property
    def pieces(self) -> Sequence[Piece]: ...

    def convert(self, piece: Piece) -> npt.NDArray[np.float32]:
        """Read one piece from the file and give the model's tensor, C-contiguous."""


def tensor_map_of(path: Path, header: GgufHeader, model: Any, wanted: Collection[str]) -> TensorMap:
    """How transformers would fill the ``wanted`` tensors of this model (on the meta device) from this file.

    Raises:
        ModelUnsupportedError: it would not.
    """
    try:
        from transformers.integrations.gguf import is_gguf_arch_supported
    except ImportError:  # transformers before its second GGUF reader
        return ProcessorMap(path, header, model, wanted)
    if is_gguf_arch_supported(header.architecture):
        return TransformMap(path, header, model, wanted)
    return ProcessorMap(path, header, model, wanted)


class ProcessorMap:
    """transformers' first GGUF reader: a name map from the model, one processor for each architecture."""

    def __init__(self, path: Path, header: GgufHeader, model: Any, wanted: Collection[str]) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self._path = path
        self._tensors = {t.name: t for t in header.tensors}
        self._processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(
            config=model.config.to_dict()
        )
        try:
            # The map of the model's own tensors suffices for nearly all. Only where it leaves a hole are the
            # submodules asked too, as transformers always does, which takes seconds.
            self._names: dict[str, str] = get_gguf_hf_weights_map(_TopLevel(model), self._processor)
            if not set(wanted) <= set(self._targets()):
                self._names = get_gguf_hf_weights_map(model, self._processor)
        except NotImplementedError as error:
            raise ModelUnsupportedError(f"{header.architecture!r}: {one_line(error)}") from error
        sources: dict[str, list[str]] = {}
        for name, target in zip(self._tensors, self._targets(), strict=True):
            if target is not None and target in wanted:
                sources.setdefault(target, []).append(name)
        self.pieces = tuple(Piece(tuple(names), target) for target, names in sources.items())

    def _targets(self) -> Iterator[str | None]:
        """For each tensor of the file, the model tensor it becomes, or (an expert's half) becomes part of."""
        for name in self._tensors:
            yield self._names.get(name) or self._names.get(name.removesuffix(".weight"))

    def convert(self, piece: Piece) -> npt.NDArray[np.float32]:
        put_aside: dict[str, dict[str, Any]] = {"tensors": {}}
        weights = None
        for name in piece.sources:
            turned = self._processor.process(
                weights=read_tensor(self._path, self._tensors[name]),
                name=name,
                tensor_key_mapping=self._names,
                parsed_parameters=put_aside,
            )
            if turned.name is not None:
                weights = turned.weights
        if weights is None:  # the processor built the tensor itself, maybe of several
            weights = put_aside["tensors"][piece.target].numpy()
        return np.ascontiguousarray(weights, dtype=np.float32)


class _TopLevel:
    """As much of a model as transformers' name map asks for, without its submodules."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


class TransformMap:
    """transformers' second GGUF reader: renamings and conversions, as for its own checkpoints."""

    def __init__(self, path: Path, header: GgufHeader, model: Any, wanted: Collection[str]) -> None:
        import torch
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        from transformers.integrations.gguf import reader, utils

        self._model = model
        try:
            their_header = reader.GgufHeader.from_file(str(path))
        except ValueError as error:
            raise ModelUnsupportedError(one_line(error)) from error
        self._lazy = reader.load_gguf_state_dict(their_header)
        mapping = utils.get_gguf_conversion_mapping(header.architecture, model.config)
        quantised, _, _ = utils.get_gguf_plan(their_header, mapping)
        mapping = utils.add_gguf_load_ops(mapping, quantised, their_header, torch.float32)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._converters = {pattern: c for c in converters for pattern in c.source_patterns}
        self._patterns: dict[str, str] = {}
        state = model.state_dict()
        sources: dict[str, list[str]] = {}
        for tensor in header.tensors:
            target, pattern = rename_source_key(
                tensor.name, renamings, converters, model.base_model_prefix, state
            )
            if target in wanted:
                assert pattern is not None, f"{tensor.name} has no conversion, not even to fp32"
                self._patterns[tensor.name] = pattern
                sources.setdefault(target, []).append(tensor.name)
        self.pieces = tuple(Piece(tuple(names), target) for target, names in sources.items())

    def convert(self, piece: Piece) -> npt.NDArray[np.float32]:
        from copy import deepcopy

        converter = deepcopy(self._converters[self._patterns[piece.sources[0]]])
        for name in piece.sources:
            converter.add_tensor(piece.target, name, self._patterns[name], self._lazy[name][...])
        tensor = converter.convert(piece.target, model=self._model, config=self._model.config)[piece.target]
        single = tensor[0] if isinstance(tensor, list) else tensor
        return np.ascontiguousarray(single.numpy(), dtype=np.float32)


def read_tensor(path: Path, tensor: GgufTensor) -> npt.NDArray[Any]:
    """One tensor of a GGUF file as fp32, in torch order, exactly as ``gguf`` unpacks it.

    Raises:
        ModelCorruptError: the file became shorter.
        ModelUnsupportedError: ``gguf`` cannot unpack this type.
    """
    from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

    kind = GGMLQuantizationType(tensor.kind)
    raw = np.fromfile(path, dtype=np.uint8, count=tensor.size_bytes, offset=tensor.offset)
    if raw.nbytes != tensor.size_bytes:
        raise ModelCorruptError(f"{path.resolve()} became shorter while it was read. Download it again.")
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    if kind in plain:
        data = raw.view(plain[kind]).reshape(tensor.shape)
    else:
        data = raw.reshape(quant_shape_to_byte_shape(tensor.shape, kind))
    try:
        values: npt.NDArray[Any] = dequantize(data, kind)
    except NotImplementedError as error:
        raise ModelUnsupportedError(
            f"{path.resolve()}: tensor {tensor.name!r} is of type {kind.name}, which the gguf package cannot"
            " unpack. Use another quantisation of this model."
        ) from error
    return values


def one_line(error: BaseException) -> str:
    """An error's text, short enough to stand inside a sentence."""
    return " ".join(str(error).split())[:200] or type(error).__name__
