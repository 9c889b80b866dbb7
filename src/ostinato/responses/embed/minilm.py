"""all-MiniLM-L6-v2 (and its kin) in numpy: six layers of BERT over a dozen tokens.

Source: Reimers and Gurevych, arXiv 1908.10084 (mean of the last layer's tokens, made as long as 1); Wang et
al., arXiv 2002.10957. A question's forward pass is some milliseconds of matrix products, which numpy does as
quickly as torch would; so a gateway or a client embeds without torch, whose import alone takes seconds and
hundreds of megabytes. Texts of equal length run together, so nothing is padded and nothing masked: a text's
vector does not depend on what stood beside it in a batch, but for rounding.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from ...errors import ModelCorruptError, ModelUnsupportedError
from .base import FloatMatrix, Memo, Piece, TokenVectors, normalized

_MAX_TOKENS: Final = 256
_MAX_BATCH_TOKENS: Final = 4096
_FILES: Final = ("config.json", "model.safetensors", "tokenizer.json")

# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: erf to 1.5e-7.
_ERF: Final = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_ERF_P: Final = 0.3275911


class MiniLM:
    """:class:`~.base.Embedder` and :class:`~.base.Reader` over a folder with a BERT encoder in safetensors.

    Args:
        folder: with ``config.json``, ``model.safetensors`` and ``tokenizer.json``.
        digest: names the folder's content; a part of :attr:`identity`.

    Raises:
        ModelUnsupportedError: no BERT encoder with mean pooling.
        ModelCorruptError: a file is missing or unreadable.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        if missing := [name for name in _FILES if not (folder / name).is_file()]:
            raise ModelCorruptError(f"{folder} lacks {', '.join(missing)}: fetch the embedder again")
        try:
            config = orjson.loads((folder / "config.json").read_bytes())
            tensors = load_file(folder / "model.safetensors")
            self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except (orjson.JSONDecodeError, SafetensorError, OSError) as error:
            raise ModelCorruptError(f"{folder} cannot be read ({error}): fetch the embedder again") from error
        if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
            raise ModelUnsupportedError(
                f"{folder} is no BERT encoder; name an endpoint that serves it instead"
            )
        self.identity = f"minilm-numpy-1 {digest}"
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_MAX_TOKENS)
        self._lock = threading.Lock()  # of the tokenizer; numpy needs none
        self._num_heads = int(config["num_attention_heads"])
        self._epsilon = np.float32(config.get("layer_norm_eps", 1e-12))
        try:
            self._embedding = _Embedding(tensors)
            self._layers = [_Layer(tensors, at) for at in range(int(config["num_hidden_layers"]))]
        except KeyError as error:
            raise ModelCorruptError(f"{folder} lacks the tensor {error}: fetch the embedder again") from error
        self._memo: Memo[TokenVectors] = Memo()

    @property
    def num_dims(self) -> int:
        """The length of a vector."""
        return int(self._embedding.words.shape[1])

    def embed(self, texts: Sequence[str]) -> FloatMatrix:
        vectors = np.zeros((len(texts), self.num_dims), np.float32)
        for places, encodings, hidden in self._batches(texts):
            vectors[places] = normalized(hidden.mean(axis=1))
            for place, encoding in zip(places, encodings, strict=True):
                if len(encoding.ids) <= 2:  # nothing but the marks around it
                    vectors[place] = 0
        return vectors

    def read(self, texts: Sequence[str]) -> list[TokenVectors]:
        """Every token's vectors; what was read lately is not computed again."""
        return self._memo.get(texts, self._read)

    def _read(self, texts: list[str]) -> list[TokenVectors]:
        found: dict[int, TokenVectors] = {}
        for places, encodings, hidden in self._batches(texts):
            for place, encoding, vectors in zip(places, encodings, hidden, strict=True):
                inside = slice(1, len(encoding.ids) - 1)
                ids = encoding.ids[inside]
                pieces = tuple(
                    Piece(start, end, token)
                    for (start, end), token in zip(encoding.offsets[inside], ids, strict=True)
                )
                vector = normalized(vectors.mean(axis=0)) if ids else np.zeros(self.num_dims, np.float32)
                bare = self._embedding.words[np.asarray(ids, np.intp)]
                found[place] = TokenVectors(vector, pieces, vectors[inside].astype(np.float32), bare)
        return [found[place] for place in range(len(texts))]

    def _batches(self, texts: Sequence[str]) -> Any:
        """Places, encodings and hidden states ``(batch, tokens, dims)`` of texts that are equally long."""
        with self._lock:
            encodings = self._tokenizer.encode_batch([text or " " for text in texts])
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for place, encoding in enumerate(encodings):
            by_length[len(encoding.ids)].append(place)
        for length, places in by_length.items():
            size = max(1, _MAX_BATCH_TOKENS // length)
            for at in range(0, len(places), size):
                some = places[at : at + size]
                ids = np.array([encodings[place].ids for place in some], np.intp)
                yield some, [encodings[place] for place in some], self._forward(ids)

    def _forward(self, ids: npt.NDArray[np.intp]) -> FloatMatrix:
        """Hidden states of the last layer, ``(batch, tokens, dims)``."""
        parts = self._embedding
        hidden = parts.words[ids] + parts.positions[: ids.shape[1]] + parts.kinds[0]
        hidden = _layer_norm(hidden, parts.norm_weight, parts.norm_bias, self._epsilon)
        for layer in self._layers:
            hidden = layer.run(hidden, self._num_heads, self._epsilon)
        return hidden


class _Embedding:
    def __init__(self, tensors: Mapping[str, FloatMatrix]) -> None:
        self.words = _float(tensors["embeddings.word_embeddings.weight"])
        self.positions = _float(tensors["embeddings.position_embeddings.weight"])
        self.kinds = _float(tensors["embeddings.token_type_embeddings.weight"])
        self.norm_weight = _float(tensors["embeddings.LayerNorm.weight"])
        self.norm_bias = _float(tensors["embeddings.LayerNorm.bias"])


class _Layer:
    """One block: attention, then a wide layer, each added to what came in and normed."""

    def __init__(self, tensors: Mapping[str, FloatMatrix], at: int) -> None:
        def part(name: str) -> FloatMatrix:
            return _float(tensors[f"encoder.layer.{at}.{name}"])

        kinds = ("query", "key", "value")
        self._qkv = np.concatenate([part(f"attention.self.{kind}.weight") for kind in kinds]).T.copy()
        self._qkv_bias = np.concatenate([part(f"attention.self.{kind}.bias") for kind in kinds])
        self._out = part("attention.output.dense.weight").T.copy()
        self._out_bias = part("attention.output.dense.bias")
        self._norm = part("attention.output.LayerNorm.weight"), part("attention.output.LayerNorm.bias")
        self._wide = part("intermediate.dense.weight").T.copy()
        self._wide_bias = part("intermediate.dense.bias")
        self._narrow = part("output.dense.weight").T.copy()
        self._narrow_bias = part("output.dense.bias")
        self._last_norm = part("output.LayerNorm.weight"), part("output.LayerNorm.bias")

    def run(self, hidden: FloatMatrix, num_heads: int, epsilon: np.float32) -> FloatMatrix:
        batch, length, dims = hidden.shape
        qkv = (hidden @ self._qkv + self._qkv_bias).reshape(batch, length, 3, num_heads, dims // num_heads)
        query, key, value = qkv.transpose(2, 0, 3, 1, 4)
        scores = query @ key.swapaxes(-1, -2) * np.float32((dims // num_heads) ** -0.5)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ value
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, length, dims)
        hidden = _layer_norm(hidden + mixed @ self._out + self._out_bias, *self._norm, epsilon)
        wide = _gelu(hidden @ self._wide + self._wide_bias)
        return _layer_norm(hidden + wide @ self._narrow + self._narrow_bias, *self._last_norm, epsilon)


def _float(tensor: npt.NDArray[Any]) -> FloatMatrix:
    return np.ascontiguousarray(tensor, np.float32)


def _layer_norm(
    hidden: FloatMatrix, weight: FloatMatrix, bias: FloatMatrix, epsilon: np.float32
) -> FloatMatrix:
    centred = hidden - hidden.mean(axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    normed: FloatMatrix = centred / np.sqrt(variance + epsilon) * weight + bias
    return normed


def _gelu(x: FloatMatrix) -> FloatMatrix:
    """The exact form, with the error function to seven digits: numpy has none."""
    scaled = np.abs(x) * np.float32(0.7071067811865476)
    t: Any = 1 / (1 + np.float32(_ERF_P) * scaled)
    poly: Any = np.full_like(t, _ERF[-1])
    for factor in reversed(_ERF[:-1]):
        poly = poly * t + np.float32(factor)
    tail = poly * t * np.exp(-scaled * scaled)
    made: FloatMatrix = np.float32(0.5) * x * (1 + np.sign(x) * (1 - tail))
    return made
