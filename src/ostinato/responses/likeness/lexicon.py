"""Which words mean the same, the opposite, or another thing of the same kind.

From WordNet 3.0 (``lexicon.txt.gz``, made by ``benchmarks/semantic_lexicon.py``) and from a list of our own
(``own.txt``). Words are compared by their stems.
"""

from __future__ import annotations

import gzip
import re
import threading
from collections import defaultdict
from functools import cache
from importlib.resources import files
from typing import Any, Final

from snowballstemmer import stemmer


def words_in(text: str) -> frozenset[str]:
    """The words of a text, for lists that people read."""
    return frozenset(text.split())


_PREFIXES: Final = ("un", "in", "im", "il", "ir", "dis", "non", "mis", "de", "anti", "re")

_stemmer: Any = stemmer("english")
_stemmer_lock = threading.Lock()
_stems: dict[str, str] = {}
_MAX_STEMS: Final = 50_000

_BRITISH: Final = {
    **{"tyre": "tire", "grey": "gray", "licence": "license", "cheque": "check", "programme": "program"},
    **{"metre": "meter", "litre": "liter", "centre": "center", "theatre": "theater", "mould": "mold"},
    **{"travelling": "traveling", "cancelled": "canceled", "cancelling": "canceling", "jewellery": "jewelry"},
    **{"kerb": "curb", "aluminium": "aluminum", "pyjamas": "pajamas", "defence": "defense"},
    **{"children": "child", "men": "man", "women": "woman", "people": "person", "feet": "foot"},
    **{"mice": "mouse", "teeth": "tooth", "geese": "goose", "wrote": "write", "written": "write"},
    **{"bought": "buy", "sold": "sell", "paid": "pay", "went": "go", "gone": "go", "made": "make"},
    **{
        "got": "get",
        "gotten": "get",
        "won": "win",
        "lost": "lose",
        "lying": "lie",
        "died": "die",
        "dying": "die",
    },
    **{"broke": "break", "broken": "break", "froze": "freeze", "frozen": "freeze", "took": "take"},
    **{"taken": "take", "gave": "give", "given": "give", "found": "find", "ate": "eat", "eaten": "eat"},
    **{"sent": "send", "built": "build", "kept": "keep", "left": "left", "fell": "fall", "fallen": "fall"},
    **{"rose": "rise", "risen": "rise", "ran": "run", "saw": "see", "seen": "see", "told": "tell"},
    **{"drove": "drive", "driven": "drive", "chose": "choose", "chosen": "choose", "forgot": "forget"},
    **{"forgotten": "forget", "stolen": "steal", "stole": "steal", "wore": "wear", "worn": "wear"},
    **{"grew": "grow", "grown": "grow", "flew": "fly", "flown": "fly", "drank": "drink", "drunk": "drink"},
    **{"monthly": "month", "yearly": "year", "annual": "year", "annually": "year", "daily": "day"},
    **{"weekly": "week", "hourly": "hour", "nightly": "night", "quarterly": "quarter"},
    **{"bitten": "bite", "bit": "bite", "slept": "sleep", "taught": "teach", "caught": "catch"},
    **{"sewn": "sew", "drawn": "draw", "drew": "draw", "shown": "show", "led": "lead", "owed": "owe"},
}
_APART: Final = words_in(
    "employer employers employee employees trainer trainee payer payee university universe "
    "general generic generous news new universal interviewer interviewee "
    "lessor lessee policy police"
)
"""Words that a stemmer takes for others; they lose their plural only."""
_OUR: Final = re.compile(r"^(colo|favo|behavio|neighbo|hono|labo|flavo|humo|rumo|harbo|odo|vapo)ur")
_ISE: Final = re.compile(r"(?<=[a-z]{3})is(e|ed|es|ing|ation)$")
_KEEP_ISE: Final = words_in("exercise advise promise surprise raise otherwise noise rise")


def stem_of(word: str) -> str:
    """A word's stem, lower case; British and American spelling have one, irregular forms their verb's."""
    known = _stems.get(word)
    if known is not None:
        return known
    if word in _APART:
        return word.removesuffix("s") if word.endswith(("ers", "ees")) else word
    plain = _BRITISH.get(word) or _BRITISH.get(word.removesuffix("s"), word)
    plain = _OUR.sub(r"\1r", plain)
    if plain not in _KEEP_ISE and not plain.endswith("wise"):
        plain = _ISE.sub(r"iz\1", plain)
    with _stemmer_lock:  # it keeps its place in the word
        found = str(_stemmer.stemWord(plain)) if plain.isascii() and plain.isalpha() else plain
    if len(_stems) < _MAX_STEMS:
        _stems[word] = found
    return found


class Lexicon:
    """What is known of stems. Read-only once built."""

    def __init__(self, lines: list[str]) -> None:
        self._groups: defaultdict[str, set[int]] = defaultdict(set)
        self._antonyms: defaultdict[str, set[str]] = defaultdict(set)
        self._kinds: defaultdict[str, set[int]] = defaultdict(set)
        self.phrases: list[tuple[str, str]] = []
        """Phrases, longest first, and the word that stands for each."""
        for number, line in enumerate(lines):
            mark, _, rest = line.partition(" ")
            words = [stem_of(word) for word in rest.split()]
            if mark in ("S", "D"):
                for word in words:
                    self._groups[word].add(number)
            elif mark == "A":
                one, other = words
                self._antonyms[one].add(other)
                self._antonyms[other].add(one)
            elif mark == "H":
                for word in words:
                    self._kinds[word].add(number)
            elif mark == "P":
                name, _, phrases = rest.partition(":")
                self.phrases += [(phrase.strip(), name.strip()) for phrase in phrases.split("|")]
        self.phrases.sort(key=lambda pair: -len(pair[0]))

    def are_alike(self, one: str, other: str) -> bool:
        """Whether two stems may mean the same."""
        return not self._groups.get(one, _NONE).isdisjoint(self._groups.get(other, _NONE))

    def are_opposite(self, one: str, other: str) -> bool:
        """Whether two stems are each other's opposite, by the lists or by a prefix."""
        if other in self._antonyms.get(one, ()):
            return True
        short, long = sorted((one, other), key=len)
        return len(short) > 2 and any(
            long == prefix + short or (long.startswith(prefix) and stem_of(long[len(prefix) :]) == short)
            for prefix in _PREFIXES
        )

    def are_siblings(self, one: str, other: str) -> bool:
        """Whether two different stems are things of one kind, such as two days of the week."""
        return one != other and not self._kinds.get(one, _NONE).isdisjoint(self._kinds.get(other, _NONE))

    def knows(self, stem: str) -> bool:
        """Whether it is an ordinary word."""
        return stem in self._groups or stem in self._antonyms or stem in self._kinds


_NONE: Final[frozenset[int]] = frozenset()


@cache
def the_lexicon() -> Lexicon:
    """The one that is shipped; read at first use (a tenth of a second)."""
    folder = files(__package__)
    lines = gzip.decompress((folder / "lexicon.txt.gz").read_bytes()).decode().splitlines()
    lines += (folder / "own.txt").read_text("utf-8").splitlines()
    return Lexicon([line for line in lines if line and not line.startswith("#")])
