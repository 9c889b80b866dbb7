"""The learned decision: boosted trees over features, read from a small file that training wrote.

``decision.json`` is made by ``benchmarks/semantic_training.py`` of the pairs in ``benchmarks/semantic_data``.
Besides the trees it has thresholds by *error budget*: the share of traps (questions that are near and have
another answer) that may be answered wrongly, as counted on pairs that the trees had not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from .features import NAMES

DEFAULT_BUDGET: Final = 0.01
_FORMAT: Final = 1


@dataclass(frozen=True)
class Decision:
    """Trees as arrays ``(trees, nodes)``. A leaf is its own child. ``budgets`` rise; each has a threshold."""

    feature: npt.NDArray[np.intp]
    threshold: npt.NDArray[np.float64]
    left: npt.NDArray[np.intp]
    right: npt.NDArray[np.intp]
    value: npt.NDArray[np.float64]
    depth: int
    budgets: tuple[float, ...]
    thresholds: tuple[float, ...]
    version: str

    def score(self, features: npt.NDArray[np.float32]) -> float:
        """Log-odds that both questions have one answer. ``features`` as of :func:`~.features.features_of`."""
        trees = np.arange(len(self.feature))
        node = np.zeros(len(self.feature), np.intp)
        for _ in range(self.depth):
            goes_left = features[self.feature[trees, node]] <= self.threshold[trees, node]
            node = np.where(goes_left, self.left[trees, node], self.right[trees, node])
        return float(self.value[trees, node].sum())

    def threshold_for(self, budget: float) -> float:
        """The score from which on pairs are served, for an error budget (a share, such as 0.01).

        Between two budgets that were measured the stricter one's holds; below all of them nothing is served.
        """
        found = [t for b, t in zip(self.budgets, self.thresholds, strict=True) if b <= budget + 1e-12]
        return found[-1] if found else np.inf


def read_decision(data: bytes) -> Decision:
    """Raises :class:`ValueError` where it is not what this version trains."""
    item: dict[str, Any] = orjson.loads(data)
    if item["format"] != _FORMAT or tuple(item["features"]) != NAMES:
        raise ValueError("decision.json was trained for other features: train it again")
    trees = item["trees"]
    num_nodes = max(len(tree["feature"]) for tree in trees)

    def table(name: str, kind: type) -> npt.NDArray[Any]:
        rows: npt.NDArray[Any] = np.zeros((len(trees), num_nodes), kind)
        for at, tree in enumerate(trees):
            rows[at, : len(tree[name])] = tree[name]
        return rows

    return Decision(
        table("feature", np.intp),
        table("threshold", np.float64),
        table("left", np.intp),
        table("right", np.intp),
        table("value", np.float64),
        int(item["depth"]),
        tuple(item["budgets"]),
        tuple(item["thresholds"]),
        str(item["version"]),
    )


@cache
def the_decision() -> Decision:
    """The one that is shipped."""
    return read_decision((files(__package__) / "decision.json").read_bytes())
