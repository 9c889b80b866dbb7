"""What is near a vector: an index in memory beside a store that cannot search.

Below some thousands of entries every vector is compared, which is exact and takes less than a millisecond;
above that an HNSW graph of usearch is asked (Malkov and Yashunin, arXiv 1603.09320), which may miss a
neighbour: then a question is computed that need not have been. What the store has lost meanwhile is still
in here until somebody asks for it (:meth:`Nearby.drop`); whoever finds something fetches the entry itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from .embed.base import FloatMatrix
from .stores.base import KEY_BYTES, Vector

EXACT_UP_TO: Final = 4096
_EXPANSION: Final = 96
_FIRST_ROWS: Final = 64


class Nearby:
    """Vectors of length 1 of one space, by the store's numbers (``seq``). Thread-safe."""

    def __init__(self, exact_up_to: int = EXACT_UP_TO) -> None:
        self._exact_up_to = exact_up_to
        self._lock = threading.Lock()
        self._places: dict[int, int] = {}
        self._seqs: list[int] = []
        self._keys: list[bytes] = []
        self._vectors: FloatMatrix | None = None
        self._graph: Any = None
        self.last_seq = 0
        """Of what was added; what a store has later is to be added still."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def last_key(self) -> bytes | None:
        """The key of the latest entry, if that is still in here."""
        with self._lock:
            at = self._places.get(self.last_seq)
            return None if at is None else self._keys[at]

    def add(self, seqs: Sequence[int], keys: Sequence[bytes], vectors: FloatMatrix) -> None:
        """More entries; an entry that was stored anew has another number, and its old one is dropped."""
        if not seqs:
            return
        with self._lock:
            matrix = self._room_for(len(seqs), vectors.shape[1])
            first = len(self._seqs)
            matrix[first : first + len(seqs)] = vectors
            for at, (seq, key) in enumerate(zip(seqs, keys, strict=True), first):
                self._places[seq] = at
                self._seqs.append(seq)
                self._keys.append(key)
            if self._graph is not None:
                self._graph.add(np.asarray(seqs, np.uint64), vectors)
            elif len(self._places) > self._exact_up_to:
                self._graph = _graph(vectors.shape[1])
                self._graph.add(np.asarray(self._seqs, np.uint64), matrix[: len(self._seqs)])
            self.last_seq = max(self.last_seq, *seqs)

    def drop(self, seqs: Sequence[int]) -> None:
        """These are in the store no more."""
        with self._lock:
            for seq in seqs:
                if (at := self._places.pop(seq, None)) is None or self._vectors is None:
                    continue
                self._vectors[at] = 0  # similar to nothing
                if self._graph is not None:
                    self._graph.remove(seq)

    def search(self, vector: Vector, num: int) -> list[tuple[int, bytes, float]]:
        """The nearest ones as number, key and cosine, best first."""
        with self._lock:
            if not self._places or self._vectors is None:
                return []
            if self._graph is not None:
                found = self._graph.search(vector, min(num, len(self._places)))
                seqs = [int(seq) for seq in found.keys]
                at = [self._places[seq] for seq in seqs if seq in self._places]
                near = self._vectors[at] @ vector  # the graph's own distances are rounded
            else:
                everything = self._vectors[: len(self._seqs)] @ vector
                num = min(num, len(everything))
                at = np.argpartition(-everything, num - 1)[:num].tolist()
                near = everything[at]
            order = np.argsort(-near, kind="stable")
            return [
                (self._seqs[at[i]], self._keys[at[i]], float(near[i]))
                for i in order
                if self._seqs[at[i]] in self._places
            ]

    def _room_for(self, num: int, num_dims: int) -> FloatMatrix:
        needed = len(self._seqs) + num
        if self._vectors is None or len(self._vectors) < needed:
            larger = np.zeros((max(_FIRST_ROWS, needed, 2 * len(self._seqs)), num_dims), np.float32)
            if self._vectors is not None:
                larger[: len(self._seqs)] = self._vectors[: len(self._seqs)]
            self._vectors = larger
        return self._vectors

    # ------------------------------------------------------------ at rest

    def save(self, path: Path) -> None:
        """Writes a graph down beside a store, so that the next process need not make it anew; small indexes
        are not written. Raises :class:`OSError`."""
        with self._lock:
            if self._graph is None or self._vectors is None:
                return
            kept = [at for at, seq in enumerate(self._seqs) if seq in self._places]
            head = orjson.dumps(
                {"last_seq": self.last_seq, "num": len(kept), "dims": int(self._vectors.shape[1])}
            )
            partial = path.with_suffix(".partial")
            graph = bytes(self._graph.save())
            with partial.open("wb") as out:
                out.write(len(head).to_bytes(4, "little") + head)
                out.write(np.asarray([self._seqs[at] for at in kept], "<u8").tobytes())
                out.write(b"".join(self._keys[at] for at in kept))
                out.write(self._vectors[kept].astype("<f4").tobytes())
                out.write(graph)
            partial.chmod(0o600)
            partial.replace(path)

    @classmethod
    def load(cls, path: Path, exact_up_to: int = EXACT_UP_TO) -> Nearby | None:
        """What :meth:`save` wrote; ``None`` where there is nothing, or nothing whole."""
        try:
            data = path.read_bytes()
            at = 4 + int.from_bytes(data[:4], "little")
            head = orjson.loads(data[4:at])
            num, num_dims = int(head["num"]), int(head["dims"])
            sizes = (8 * num, KEY_BYTES * num, 4 * num * num_dims)
            if len(data) < at + sum(sizes):
                return None
            index = cls(exact_up_to)
            seqs = np.frombuffer(data, "<u8", num, at).tolist()
            at += sizes[0]
            index._keys = [data[at + KEY_BYTES * i : at + KEY_BYTES * (i + 1)] for i in range(num)]
            at += sizes[1]
            index._vectors = np.frombuffer(data, "<f4", num * num_dims, at).reshape(num, num_dims).copy()
            at += sizes[2]
            index._seqs, index._places = seqs, {seq: place for place, seq in enumerate(seqs)}
            index._graph = _graph(num_dims)
            index._graph.load(data[at:])
            index.last_seq = int(head["last_seq"])
            return index if len(index._graph) == num else None
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # usearch raises the last
            return None


def _graph(num_dims: int) -> Any:
    from usearch.index import Index

    return Index(
        ndim=num_dims,
        metric="ip",
        dtype="f16",
        connectivity=16,
        expansion_add=128,
        expansion_search=_EXPANSION,
    )
