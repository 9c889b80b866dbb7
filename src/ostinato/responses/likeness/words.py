"""A question as words: what is said, what is only polite, and which marks make it this question."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from .frames import Frame, find_frame
from .lexicon import stem_of, the_lexicon, words_in

_TOKEN: Final = re.compile(
    r"https?://\S+|[\w.+-]+@[\w-]+\.[\w.]+"
    r"|[A-Za-z]\+\+|[A-Za-z]#|\.NET\b|[Nn]ode\.js"
    r"|\d+(?:[.,:]\d+)*(?![^\W_]|[.,:]\d)"
    r"|[^\W_]+(?:[-_./][^\W_]+)*(?:['’][^\W\d_]+)*"
    r"|[%€$£@+<>=*&^|/\\~-]",
    re.UNICODE,
)
_QUOTED: Final = re.compile(r"```(.+?)```|`([^`]+)`|\"([^\"]+)\"|“([^”]+)”|«([^»]+)»", re.DOTALL)
_UNIT: Final = re.compile(
    r"(\d+(?:[.,]\d+)*)"
    r"(am|pm|kg|mg|km|cm|mm|ml|gb|mb|kb|tb|mph|kmh|kw|kwh|hz|px|st|nd|rd|th|g|m|l|h|k|s|v|w|x|%)"
)
_MARKS: Final = frozenset("%€$£+<>=*&^|/\\~@-")

_CONTRACTIONS: Final = {
    **{
        "can't": "can not",
        "cannot": "can not",
        "won't": "will not",
        "shan't": "shall not",
        "ain't": "is not",
    },
    **{"let's": "let us", "what's": "what is", "who's": "who is", "where's": "where is", "how's": "how is"},
    **{"when's": "when is", "why's": "why is", "it's": "it is", "that's": "that is", "there's": "there is"},
    **{"he's": "he is", "she's": "she is", "here's": "here is", "dont": "do not", "doesnt": "does not"},
    **{"cant": "can not", "wont": "will not", "didnt": "did not", "isnt": "is not", "whats": "what is"},
    **{"pls": "please", "plz": "please", "u": "you", "ur": "your", "im": "i am", "wanna": "want to"},
    **{"gonna": "going to", "thx": "thanks", "e-mail": "email", "e-mails": "emails", "wi-fi": "wifi"},
}
_ENDINGS: Final = (
    ("n't", "not"),
    ("'re", "are"),
    ("'ve", "have"),
    ("'ll", "will"),
    ("'m", "am"),
    ("'d", "would"),
)

_SMALL_NUMBERS: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
_NUMBER_WORDS: Final = {word: str(number) for number, word in enumerate(_SMALL_NUMBERS.split())} | {
    **{"thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "seventy": "70", "eighty": "80"},
    **{"ninety": "90", "hundred": "100", "thousand": "1000", "million": "1000000", "billion": "1000000000"},
    **{"dozen": "12", "twice": "2", "double": "2", "triple": "3", "half": "0.5", "couple": "2", "pair": "2"},
    **{"second": "2", "third": "3", "fourth": "4", "fifth": "5", "sixth": "6", "seventh": "7", "eighth": "8"},
    **{"ninth": "9", "tenth": "10", "quarter": "0.25"},
}
_MAYBE_NUMBERS: Final = words_in("one second quarter pair couple half double")
_ROMAN: Final = {"II": "2", "III": "3", "IV": "4", "VI": "6", "VII": "7", "VIII": "8", "IX": "9", "XI": "11"}

STOP: Final = words_in(
    "a an the this that these those is are am be been being was were do does did done doing have "
    "has had having i me my mine we us our ours you your yours it its there here of to for in on "
    "at by with as from into onto upon about and or but if then so than can could may might "
    "shall should will would must ought let also just very really quite too please kindly thanks "
    "thank hello hi hey dear sir okay ok well now what which who whom whose when where why how "
    "whether that one ones some any such own same via per each during while because up down out "
    "off over under again further once both such only mr mrs ms allowed permitted possible able "
    "need needed want wish like way ways exactly actually currently simply possibly perhaps "
    "maybe thing things get got go going went make makes made have's 's s t go come comes etc eg "
    "ie"
) - {"only", "over", "under", "up", "down", "out", "off", "each", "per", "both", "now"}
"""Words that carry no content by themselves; some of them are looked at by guards of their own."""

NEGATORS: Final = words_in(
    "not no never without none nobody nothing neither nor nowhere hardly barely unable impossible except"
)
PARTICLES: Final = words_in(
    "on off in out up down before after during above below inside outside against under over "
    "within since until between through across around behind beside near from to into with "
    "without for by at past"
)
SCOPES: Final = {
    **dict.fromkeys(words_in("all every everything everyone everybody entire whole each"), "all"),
    **dict.fromkeys(words_in("some several few certain somebody"), "some"),
    **dict.fromkeys(words_in("single individual"), "single"),
    **dict.fromkeys(words_in("only solely exclusively"), "only"),
    **dict.fromkeys(words_in("both"), "both"),
    **dict.fromkeys(words_in("other another else others"), "other"),
}
TIMES: Final = words_in(
    "now today tonight yesterday tomorrow latest current currently nowadays recent recently ago "
    "next last previous upcoming still already soon future past"
)
FRESH: Final = words_in("now today tonight latest currently current live breaking recent tomorrow")
DEGREES: Final = words_in("too very enough most least more less fewer")
THIRD: Final = words_in("he him his she her hers they them their theirs")


@dataclass(frozen=True, slots=True)
class Word:
    """One word: in lower case, its stem, where it stands in the text (half-open), how it was written."""

    text: str
    stem: str
    start: int
    end: int
    is_capital: bool = False
    is_first: bool = False
    is_code: bool = False
    is_content: bool = True


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text as the guards see it. ``numbers`` and ``codes`` are sorted, with repeats."""

    raw: str
    words: tuple[Word, ...]
    content: tuple[Word, ...]
    frame: Frame
    numbers: tuple[str, ...]
    codes: tuple[str, ...]
    quoted: tuple[str, ...]
    num_negations: int
    texts: frozenset[str]
    """All words in lower case, with those that stand for phrases."""

    @property
    def stems(self) -> tuple[str, ...]:
        return tuple(word.stem for word in self.content)


@lru_cache(maxsize=8192)
def parse(raw: str) -> Sentence:
    """Reads a text. Any text can be read."""
    text = unicodedata.normalize("NFKC", raw).replace("’", "'")
    if len(text) != len(raw):  # spans are of what is embedded: then they would not fit
        text = raw.replace("’", "'")
    quoted = tuple(
        next(part for part in found.groups() if part is not None).strip() for found in _QUOTED.finditer(text)
    )
    words = _with_phrases(_words(text))
    frame = find_frame([word.text for word in words])
    kept = []
    for place, word in enumerate(words):
        is_frame = place in frame.places
        is_content = (
            (word.text not in STOP or _is_letter(word)) and not is_frame and word.text not in NEGATORS
        )
        kept.append(
            Word(
                word.text,
                word.stem,
                word.start,
                word.end,
                word.is_capital,
                word.is_first,
                word.is_code,
                is_content,
            )
        )
    content = tuple(word for word in kept if word.is_content)
    if not content:  # nothing but small words: then they are what is said
        content = tuple(kept)
    numbers = sorted(word.stem for word in words if _is_number(word.stem) and word.stem not in ("1", "0.25"))
    codes = sorted(word.text for word in words if word.is_code)
    return Sentence(
        raw,
        tuple(kept),
        content,
        frame,
        tuple(numbers),
        tuple(codes),
        quoted,
        sum(word.text in NEGATORS for word in words),
        frozenset(word.text for word in words),
    )


def num_of(sentence: Sentence, among: frozenset[str]) -> Counter[str]:
    """How often each of these words stands there."""
    return Counter(word.text for word in sentence.words if word.text in among)


_NUMBER: Final = re.compile(r"\d+(?:[.:]\d+)*")


def _is_number(stem: str) -> bool:
    return _NUMBER.fullmatch(stem) is not None


def _is_letter(word: Word) -> bool:
    """A single capital that is a name of something: vitamin A, plan B, the language C."""
    return len(word.text) == 1 and word.is_capital and word.text != "i" and not word.is_first


def _words(text: str) -> list[Word]:
    found: list[Word] = []
    is_first = True
    for match in _TOKEN.finditer(text):
        token, start, end = match.group(), match.start(), match.end()
        lower = token.lower().strip("'")
        capital = token[0].isupper()
        if token in _MARKS:
            if token in "%€$£":
                found.append(Word(lower, lower, start, end))
            continue
        for word in _split(token, lower, start, end, capital, is_first):
            found.append(word)
        is_first = text[end : end + 1] in (".", "!", "?", ":", "\n")
    return found


def _split(token: str, lower: str, start: int, end: int, capital: bool, is_first: bool) -> list[Word]:
    """The words in a token: contractions, numbers with units, parts of what is hyphenated."""

    def word(text: str, *, code: bool = False) -> Word:
        return Word(text, text if code else _stem(text), start, end, capital, is_first, code)

    if token == "US":  # the country, not the pronoun
        return [word("usa")]
    if lower in _CONTRACTIONS:
        return [word(part) for part in _CONTRACTIONS[lower].split()]
    for ending, full in _ENDINGS:
        if lower.endswith(ending) and len(lower) > len(ending):
            return [word(lower.removesuffix(ending)), word(full)]
    lower = lower.removesuffix("'s").removesuffix("'")
    if "@" in token or token.startswith("http"):
        return [word(lower, code=True)]
    if any(c.isdigit() for c in lower):
        return _with_digits(lower, start, end, capital, is_first)
    if token in _ROMAN:
        return [Word(_ROMAN[token], _ROMAN[token], start, end, False, is_first)]
    if "-" in lower or "/" in lower:
        parts = [part for part in re.split(r"[-/]", lower) if part]
        return [word(part) for part in parts]
    return [word(lower)]


def _with_digits(lower: str, start: int, end: int, capital: bool, is_first: bool) -> list[Word]:
    if re.fullmatch(r"\d+(?:[.,:]\d+)*", lower):
        plain = _number(lower)
        return [Word(plain, plain, start, end, False, is_first)]
    if unit := _UNIT.fullmatch(lower):
        plain = _number(unit[1])
        return [
            Word(plain, plain, start, end, False, is_first),
            Word(
                unit[2],
                stem_of(unit[2]),
                start,
                end,
                False,
                is_first,
                False,
                unit[2] not in ("st", "nd", "rd", "th"),
            ),
        ]
    if re.fullmatch(r"(?:\d+|[a-z]+)(?:-(?:\d+|[a-z]+))+", lower) and lower[0].isdigit():
        found = []
        for part in lower.split("-"):
            plain = _number(part) if part[0].isdigit() else part
            found.append(
                Word(plain, plain if part[0].isdigit() else stem_of(part), start, end, False, is_first)
            )
        return found
    return [Word(lower, lower, start, end, capital, is_first, True)]


def _number(text: str) -> str:
    """A number in one form: thousands' commas away, no trailing zeros."""
    if ":" in text:
        return text
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text).replace(",", ".")
    return plain.rstrip("0").rstrip(".") if plain.count(".") == 1 else plain.lstrip("0") or "0"


def _stem(text: str) -> str:
    if text in _NUMBER_WORDS and text not in _MAYBE_NUMBERS:
        return _NUMBER_WORDS[text]
    if text in ("second",):
        return "2"
    return stem_of(text)


def _with_phrases(words: list[Word]) -> list[Word]:
    """The same, with one word in place of each phrase that has one."""
    for phrase, name in the_lexicon().phrases:
        parts = phrase.split()
        place = 0
        while place <= len(words) - len([part for part in parts if part != "_"]):
            if words[place].text == parts[0] and (hits := _match(words, place, parts)) is not None:
                first, last = words[hits[0]], words[hits[-1]]
                whole = Word(name, stem_of(name), first.start, last.end, False, first.is_first)
                inside = [
                    word for at, word in enumerate(words[hits[0] : hits[-1] + 1], hits[0]) if at not in hits
                ]
                words = [*words[:place], whole, *inside, *words[hits[-1] + 1 :]]
            place += 1
    return words


def _match(words: list[Word], place: int, parts: list[str]) -> list[int] | None:
    """Places of a phrase's words; a gap is one to three words."""
    hits: list[int] = []
    at = place
    for index, part in enumerate(parts):
        if part == "_":
            wanted = parts[index + 1]
            found = next(
                (gap for gap in range(at + 1, min(at + 4, len(words))) if words[gap].text == wanted), None
            )
            if found is None:
                return None
            at = found
        elif at < len(words) and words[at].text == part:
            hits.append(at)
            at += 1
        else:
            return None
    return hits
