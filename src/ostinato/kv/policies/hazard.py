"""How likely a block comes back, and how long it must be held for that: two learners of one question.

Both learn the *hazard* of reuse: the probability that a block unused for so long is used in the next stretch
of time. What a block is worth is its Gittins index: the best ratio, over all times to wait, of the
probability of a reuse until then to the expected time held.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int16]


def gittins(hazard: Floats, width_s: Floats) -> Floats:
    """Gittins index at the start of every bin (last axis), from the hazard in each bin of ``width_s``."""
    num_bins = hazard.shape[-1]
    worth: Floats = np.zeros_like(hazard)
    hold_s = width_s * (1 - hazard / 2)  # a reuse comes in the middle of its bin
    for start in range(num_bins):
        survive = np.cumprod(1 - hazard[..., start:], axis=-1)
        before = np.concatenate((np.ones((*hazard.shape[:-1], 1)), survive[..., :-1]), axis=-1)
        reused = np.cumsum(before * hazard[..., start:], axis=-1)
        held_s = np.cumsum(before * hold_s[..., start:], axis=-1)
        worth[..., start] = (reused / held_s).max(axis=-1)
    return worth


class HazardTables:
    """Hazards counted for a few classes of blocks, by age; groups of ``num_classes`` are learned apart."""

    def __init__(self, num_classes: int, num_groups: int = 1) -> None:
        edges, width = [0.0], 5.0
        while edges[-1] < 4000:
            edges.append(edges[-1] + width)
            width *= 1.2
        self.edges_s = np.array(edges)
        self._width_s = np.diff(np.append(self.edges_s, self.edges_s[-1] * 2))
        shape = (num_classes * num_groups, len(edges))
        self._num_classes = num_classes
        self._events: Floats = np.zeros(shape)
        self._closed: Floats = np.zeros(shape)
        self._waiting: Floats = np.zeros(shape)
        self._worth: Floats = np.zeros(shape)

    def close(self, classes: Ints, ages_s: Floats, num_blocks: Floats, *, is_reuse: bool) -> None:
        """The wait of these blocks ended, with a reuse or because they were forgotten."""
        bins = self._bin(ages_s)
        np.add.at(self._closed, (classes, bins), num_blocks)
        if is_reuse:
            np.add.at(self._events, (classes, bins), num_blocks)

    def wait(self, classes: Ints, ages_s: Floats, num_blocks: Floats) -> None:
        """These blocks wait still; counted for the next ``learn``."""
        np.add.at(self._waiting, (classes, self._bin(ages_s)), num_blocks)

    def learn(self) -> Iterator[None]:
        """Puts the index together from what ended and from the blocks that still wait, a group at a time."""
        at_risk = self._at_risk(self._closed + self._waiting)
        self._waiting[:] = 0
        # Of a class of which little is known yet its group is believed, and of a group all of them.
        overall = (self._events.sum(0) + 0.03) / (at_risk.sum(0) + 3)
        for start in range(0, len(at_risk), self._num_classes):
            rows = slice(start, start + self._num_classes)
            within = (self._events[rows].sum(0) + 30 * overall) / (at_risk[rows].sum(0) + 30)
            hazard = (self._events[rows] + 30 * within) / (at_risk[rows] + 30)
            self._worth[rows] = gittins(np.clip(hazard, 1e-9, 1 - 1e-9), self._width_s)
            yield

    @staticmethod
    def _at_risk(ended: Floats) -> Floats:
        """How many were still there at the beginning of each bin."""
        return np.asarray(np.cumsum(ended[..., ::-1], axis=-1)[..., ::-1])

    def worth(self, classes: Ints, ages_s: Floats) -> Floats:
        bins = self._bin(ages_s)
        behind = np.minimum(bins + 1, len(self.edges_s) - 1)
        part = np.minimum((ages_s - self.edges_s[bins]) / self._width_s[bins], 1.0)
        return np.asarray(self._worth[classes, bins] * (1 - part) + self._worth[classes, behind] * part)

    def _bin(self, ages_s: Floats) -> npt.NDArray[np.intp]:
        return np.searchsorted(self.edges_s, ages_s, "right") - 1


class HazardRegression:
    """A logistic regression of the hazard on one-hot features, learned one step a passed bin (AdaGrad)."""

    edges_s = np.array(
        [0, 10, 20, 30, 45, 60, 80, 100, 130, 170, 220, 300, 400, 550, 750, 1000, 1400, 2000, 3600], float
    )
    num_bins = len(edges_s) - 1

    def __init__(self, num_weights: int, num_strata: int, *, rate: float = 0.02, decay: float = 1e-4) -> None:
        self._width_s = np.diff(self.edges_s)
        start = 0.3 * self._width_s / (150 + self.edges_s[1:])
        self._rate, self._decay = rate, decay
        self._num_weights, self._num_strata = num_weights, num_strata
        # One vector of parameters: weights, a bias a bin, a bias a stratum and bin.
        num_biases = self.num_bins * (1 + num_strata)
        self._params: Floats = np.zeros(num_weights + num_biases)
        self._params[num_weights : num_weights + self.num_bins] = np.log(start / (1 - start))
        self._squares: Floats = np.ones_like(self._params)
        self._grid = np.linspace(-6, 6, 61)
        self._worth: Floats = np.zeros((61, num_strata, self.num_bins))

    def learn(self, features: Indices, strata: Ints, bins: Ints, is_reuse: bool, weight: Floats) -> None:
        """One step from samples: a row of ``features`` (indices of weights) each, in its bin."""
        biases = self._num_weights + bins
        strata_biases = biases + self.num_bins * (1 + strata)
        used = np.column_stack((features, biases, strata_biases))
        logit = self._params[used].sum(1)
        error = (1 / (1 + np.exp(-logit)) - is_reuse) * weight
        spread = np.repeat(error, used.shape[1])
        index = used.ravel()
        gradient = np.bincount(index, spread, len(self._params)).astype(np.float64)
        squares = np.bincount(index, spread * spread, len(self._params)).astype(np.float64)
        self._squares = self._squares + squares
        hit = squares > 0
        step = (gradient[hit] + self._decay * self._params[hit]) / np.sqrt(self._squares[hit])
        self._params[hit] -= self._rate * step

    def refresh(self) -> Iterator[None]:
        """Puts the index together from the present weights, a stratum at a time."""
        at = self._num_weights
        bias = self._params[at : at + self.num_bins]
        strata = self._params[at + self.num_bins :].reshape(self._num_strata, self.num_bins)
        for stratum in range(self._num_strata):
            logit = self._grid[:, None] + bias + strata[stratum]
            self._worth[:, stratum] = gittins(1 / (1 + np.exp(-logit)), self._width_s)
            yield

    def sums(self, features: Indices) -> Floats:
        """The features' part of the logit, a row each."""
        return np.asarray(self._params[features].sum(1))

    def worth(self, sums: Floats, strata: Ints, ages_s: Floats) -> Floats:
        bins = np.minimum(np.searchsorted(self.edges_s, ages_s, "right") - 1, self.num_bins - 1)
        place = np.clip((sums + 6) * 5, 0, 59.999)
        low = place.astype(np.int64)
        part = place - low
        at_low, at_high = self._worth[low, strata, bins], self._worth[low + 1, strata, bins]
        return np.asarray(at_low * (1 - part) + at_high * part)
