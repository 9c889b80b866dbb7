"""Whether two questions have the same answer: read, compared, guarded, decided."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Final, Protocol

from ..embed.base import Reader
from .compare import Comparison, Seen, compare, see
from .decision import DEFAULT_BUDGET, Decision, the_decision
from .features import features_of
from .guards import judge_all
from .guards.base import Verdict
from .words import parse

_MAX_SEEN: Final = 4096


@dataclass(frozen=True, slots=True)
class Judgement:
    """``is_same``: one answer serves both. ``score`` is the learned one, 0 to 1; ``verdicts`` those of guards
    that did not simply pass. ``refused_by`` names what kept it from being served, empty where it is.

    ``margin``: by how much the score is above what the budget asks for, in log-odds.
    """

    is_same: bool
    similarity: float
    score: float
    margin: float
    verdicts: tuple[Verdict, ...]
    refused_by: str = ""


class SecondJudge(Protocol):
    """Asked about pairs that guards and trees would serve only just. Whatever it raises counts as a no."""

    def is_same(self, one: str, other: str) -> bool: ...


class Judge:
    """Thread-safe.

    Args:
        reader: reads texts token by token; the decision was trained on MiniLM's.
        budget: the share of traps that may be answered wrongly, such as 0.01.
        decision: the trees; ``None``: those that are shipped.
    """

    def __init__(
        self, reader: Reader, *, budget: float = DEFAULT_BUDGET, decision: Decision | None = None
    ) -> None:
        self._reader = reader
        self._decision = decision or the_decision()
        self.budget = budget
        self._threshold = self._decision.threshold_for(budget)
        self._seen: OrderedDict[str, Seen] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """Names what judges: verdicts of two names are not compared."""
        return f"{self._decision.version} {self._reader.identity}"

    def see(self, texts: Sequence[str]) -> list[Seen]:
        """Texts, read; those that were seen lately are not read again."""
        with self._lock:
            known = {text: self._seen[text] for text in texts if text in self._seen}
        missing = [text for text in dict.fromkeys(texts) if text not in known]
        if missing:
            for text, vectors in zip(missing, self._reader.read(missing), strict=True):
                known[text] = see(parse(text), vectors)
            with self._lock:
                for text in missing:
                    self._seen[text] = known[text]
                while len(self._seen) > _MAX_SEEN:
                    self._seen.popitem(last=False)
        return [known[text] for text in texts]

    def judge(self, one: str, other: str, *, stricter: float = 0.0) -> Judgement:
        """Whether an answer to ``other`` answers ``one``. ``stricter`` adds to the threshold (log-odds)."""
        return self.judge_seen(*self.see([one, other]), stricter=stricter)

    def judge_seen(self, one: Seen, other: Seen, *, stricter: float = 0.0) -> Judgement:
        """The same of texts that have been read."""
        pair = compare(one, other)
        verdicts = judge_all(pair)
        refusal = next((verdict for verdict in verdicts if verdict.opinion == "refuses"), None)
        score = self._score(pair, verdicts)
        margin = score - self._threshold - stricter
        refused_by = ""
        if refusal is not None:
            refused_by = f"{refusal.guard}: {refusal.reason}"
        elif margin < 0:
            refused_by = "score"
        told = tuple(verdict for verdict in verdicts if verdict.opinion != "passes")
        return Judgement(not refused_by, pair.cosine, 1 / (1 + exp(-score)), margin, told, refused_by)

    def _score(self, pair: Comparison, verdicts: Sequence[Verdict]) -> float:
        return self._decision.score(features_of(pair, verdicts))
