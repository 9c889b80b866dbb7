"""What embeds texts, and what reads them word by word."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

FloatMatrix = npt.NDArray[np.float32]
V = TypeVar("V")

_MEMO_TEXTS: Final = 2048


class Embedder(Protocol):
    """Texts to vectors of length 1. Thread-safe."""

    @property
    def identity(self) -> str:
        """Names everything that decides which vector a text gets: vectors of two names are not compared."""

    def embed(self, texts: Sequence[str]) -> FloatMatrix:
        """One row for each text, float32, of length 1 (zeros where a text has no words).

        Raises:
            UpstreamError: what computes them elsewhere fails.
        """


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a text: half-open range of characters, and its id (the lower, the more common)."""

    start: int
    end: int
    token_id: int


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """A text as its tokens: ``inner`` are vectors in their context, ``bare`` without it; ``(num, dims)``.

    ``vector`` is the text's own. Only as many tokens as the model takes.
    """

    vector: npt.NDArray[np.float32]
    pieces: tuple[Piece, ...]
    inner: FloatMatrix
    bare: FloatMatrix


class Reader(Protocol):
    """Reads texts token by token. Thread-safe."""

    @property
    def identity(self) -> str: ...

    def read(self, texts: Sequence[str]) -> list[TokenVectors]: ...


class Memo(Generic[V]):
    """The last so many results by text, computed together where several are missing."""

    def __init__(self, max_texts: int = _MEMO_TEXTS) -> None:
        self._max_texts = max_texts
        self._kept: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, texts: Sequence[str], compute: Callable[[list[str]], Sequence[V]]) -> list[V]:
        """The result of each text; ``compute`` is called once with those that are new."""
        found: dict[str, V] = {}
        with self._lock:
            for text in texts:
                if text in self._kept:
                    self._kept.move_to_end(text)
                    found[text] = self._kept[text]
        missing = [text for text in dict.fromkeys(texts) if text not in found]
        if missing:
            found.update(zip(missing, compute(missing), strict=True))
            with self._lock:
                for text in missing:
                    self._kept[text] = found[text]
                while len(self._kept) > self._max_texts:
                    self._kept.popitem(last=False)
        return [found[text] for text in texts]


class MemoEmbedder:
    """An :class:`Embedder` that remembers the last texts."""

    def __init__(self, inner: Embedder, max_texts: int = _MEMO_TEXTS) -> None:
        self._inner = inner
        self._memo: Memo[npt.NDArray[np.float32]] = Memo(max_texts)

    @property
    def identity(self) -> str:
        return self._inner.identity

    def embed(self, texts: Sequence[str]) -> FloatMatrix:
        if not texts:
            return self._inner.embed(texts)
        return np.stack(self._memo.get(texts, lambda missing: list(self._inner.embed(missing))))


def normalized(vectors: npt.NDArray[np.floating]) -> FloatMatrix:
    """Each row made as long as 1; zeros stay."""
    vectors = np.asarray(vectors, np.float32)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    made: FloatMatrix = vectors / np.maximum(lengths, np.float32(1e-12))
    return made
