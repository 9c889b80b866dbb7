"""Why two prompts part: what changed between them, by name, and what mends it."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..prompt.lint import volatile_spans
from ..types import Conversation, Message
from .align import Run
from .writing import TEMPLATE, TEXT, Written

FIXES: Final[Mapping[str, str]] = {
    "timestamp": "Move the time to the end of the newest message, or write it as coarsely as"
    " will do (the day).",
    "uuid": "Leave the id out of the prompt, or move it to the end of the newest message.",
    "id": "Leave the id out of the prompt, or move it to the end of the newest message.",
    "number_format": "Format numbers in one place, always alike.",
    "tool_order": "Send the tools in one order, for example sorted by name.",
    "key_order": "Write JSON with its keys in one order (sort_keys=True).",
    "whitespace": "Trim and join texts in one place, so that spaces and line breaks stay the same.",
    "unicode": "Bring texts into one Unicode form (NFC) before they are sent.",
    "case": "Write names and headings always alike.",
    "order": "Put lists and documents into one order; what is asked most goes first.",
    "user_data": "Put what is of one user behind what is the same for all: into the newest message.",
    "system_text": "Keep what changes out of the system text, or move it behind what does not.",
    "default_system": "Send the system text with every request, so that the template never adds its own.",
    "template_date": "Fix the date that the template writes, or take a template without one.",
    "bos": "Let one place add the token that begins a prompt: the template, and not the client too.",
    "reasoning_dropped": "Keep the reasoning in the history until the next question, as the template"
    " writes it.",
    "retokenised": "Send answers back in the tokens they came in (--keep-answers), or as the very same text.",
    "parameter": "Keep parameters that the template writes down the same for all requests"
    " that share a beginning.",
    "tools_changed": "Offer the same tools all along, and say in the newest message which may be used.",
    "history_dropped": "Drop old turns in large steps, not one a turn (--trim sticky).",
    "history_edited": "Leave earlier messages as they were sent; say what has changed in the newest one.",
    "model": "Stay with one model in a conversation: no two share a cache.",
    "salt": "Use one salt (cache key) for all requests that may share a cache.",
    "content": "Move what changes behind what stays the same.",
    "new_text": "",
    "grows": "",
    "identical": "",
}
HARMLESS: Final = frozenset({"new_text", "grows", "identical"})
_CONTEXT_TOKENS: Final = 48
_MAX_SHOWN: Final = 200
_ENOUGH_CHARS: Final = 60
_USER = re.compile(
    r"[\w.+-]+@[\w-]+\.\w+|^\W*(?:user|customer|client|name|account|tenant|locale|location|language|session)\b[^:\n]{0,20}:",
    re.IGNORECASE | re.MULTILINE,
)
_THINK = re.compile(r"</?think(?:ing)?>")
_WORD_TOKENS: Final = 24
_WORD_END = re.compile(r"\S{0,40}\Z")
_WORD_START = re.compile(r"\A\S{0,40}")
_KEYED = re.compile(r'"[^"\n]+"\s*:')


@dataclass(frozen=True, slots=True)
class Gap:
    """What two prompts do not have in common between two runs: tokens of ``a`` and of ``b``."""

    a: int
    a_end: int
    b: int
    b_end: int


@dataclass(frozen=True, slots=True)
class Cause:
    """``kind`` is a key of :data:`FIXES`. ``was`` and ``now`` are excerpts; ``where`` names the part of
    ``b``."""

    kind: str
    where: str
    was: str = ""
    now: str = ""

    @property
    def fix(self) -> str:
        return FIXES[self.kind]

    @property
    def is_harmless(self) -> bool:
        """Whether it is what prompts are for: another question, or a conversation that goes on."""
        return self.kind in HARMLESS


def gaps_of(runs: Sequence[Run], num_a: int, num_b: int) -> tuple[Gap, ...]:
    """What lies before, between and behind the runs."""
    gaps: list[Gap] = []
    a = b = 0
    for run in (*runs, Run(num_a, num_b, 0)):
        if run.a > a or run.b > b:
            gaps.append(Gap(a, run.a, b, run.b))
        a, b = run.a_end, run.b_end
    return tuple(gaps)


def causes_of(
    a: Written, b: Written, gap: Gap, *, is_last: bool, moved: Sequence[Run] = ()
) -> tuple[Cause, ...]:
    """What changed at a gap, the most telling first; at least one cause.

    ``is_last``: nothing that both have follows but what the template writes. ``moved``: runs of ``b`` that
    stand elsewhere in ``a``.
    """
    was, now = a.text(gap.a, gap.a_end), b.text(gap.b, gap.b_end)
    where = b.label(gap.b) if gap.b_end > gap.b else a.label(gap.a)
    by_structure = _structure(a, b, gap, was, now, where, is_last=is_last)
    if by_structure is not None:
        return (Cause(by_structure, where, _shown(was), _shown(now)),)
    is_moved = sum(max(0, min(run.b_end, gap.b_end) - max(run.b, gap.b)) for run in moved)
    if is_moved * 2 > gap.b_end - gap.b > 0 or _is_shuffled(a, b, gap):
        return (Cause("order", where, _shown(was), _shown(now)),)
    wide_was, wide_now = _widened(a, gap.a, gap.a_end), _widened(b, gap.b, gap.b_end)
    if where == TEMPLATE and a.label(gap.a) == TEMPLATE and volatile_spans(wide_now):
        return (Cause("template_date", where, _shown(was), _shown(now)),)
    kinds = text_causes(wide_was, wide_now)
    if not kinds or kinds[-1] == "content":
        kinds = [*kinds[:-1], _by_place(b, gap, wide_was, wide_now, is_last=is_last)]
    words = _shown(_in_words(a, gap.a, gap.a_end)), _shown(_in_words(b, gap.b, gap.b_end))
    return tuple(Cause(kind, where, *words) for kind in kinds)


# ---------------------------------------------------------------- by what was sent


def _structure(
    a: Written, b: Written, gap: Gap, was: str, now: str, where: str, *, is_last: bool
) -> str | None:
    """What the requests themselves say of a gap, ``None`` where the text has to be looked at."""
    one, other = a.asked, b.asked
    bos = b.words.bos_token
    if gap.a == gap.b == 0 and bos and (was, now) in ((bos, ""), ("", bos)):
        return "bos"
    if was and was == now:
        return "retokenised"
    first, second = one.conversation, other.conversation
    if first is None or second is None:
        return None
    if "tools" in (where, a.label(gap.a)) or (first.tools != second.tools and where == TEMPLATE):
        return _tools(first, second)
    if _has_system(first) != _has_system(second):
        bare, added = (first, was) if _has_system(second) else (second, now)
        if added.strip() and not any(added.strip()[:_ENOUGH_CHARS] in m.content for m in bare.messages):
            return "default_system"
        if gap.a < _head(a) or gap.b < _head(b):
            return "system_text"
    if is_last and gap.b == gap.b_end and gap.a == gap.a_end:
        return "identical"
    number = b.message_at(gap.b)
    if number is not None and (kind := _history(first, second, number)) is not None:
        return kind
    if first.messages[: len(second.messages)] == second.messages[: len(first.messages)]:
        if dict(one.parameters) != dict(other.parameters) and not is_last:
            return "parameter"
        if _THINK.search(was + now):
            return "reasoning_dropped"
    return None


def _tools(first: Conversation, second: Conversation) -> str | None:
    if not first.tools or not second.tools:
        return "tools_changed"
    plain = [[json.dumps(tool) for tool in talk.tools] for talk in (first, second)]
    sorted_keys = [[json.dumps(tool, sort_keys=True) for tool in talk.tools] for talk in (first, second)]
    if plain[0] == plain[1]:
        return None
    if sorted_keys[0] == sorted_keys[1]:
        return "key_order"
    if sorted(sorted_keys[0]) == sorted(sorted_keys[1]):
        return "tool_order"
    names = [[str(tool.get("function", {}).get("name")) for tool in talk.tools] for talk in (first, second)]
    if names[0] == names[1]:
        return None  # the text of one has changed: that is looked at
    return "tools_changed"


def _has_system(talk: Conversation) -> bool:
    return bool(talk.messages) and talk.messages[0].role in ("system", "developer")


def _head(written: Written) -> int:
    """Where the first message begins that is not the system's."""
    for place, owner in enumerate(written.owners.tolist()):
        label = written.labels[owner]
        if label.startswith("messages[") and "(system)" not in label and "(developer)" not in label:
            return place
    return len(written.tokens)


def _history(first: Conversation, second: Conversation, number: int) -> str | None:
    """What happened to the messages around ``number``, if they were not just gone on with."""
    one, other = first.messages, second.messages
    for place in (number - 1, number, number + 1):
        if not 0 <= place < min(len(one), len(other)):
            continue
        before, after = one[place], other[place]
        if before != after and before == replace(after, reasoning=before.reasoning):
            return "reasoning_dropped"
        if _calls_reordered(before, after):
            return "key_order"
    head = 1 if _has_system(first) and _has_system(second) else 0
    for shift in range(1, min(len(one) - head, 64)):
        kept = one[head + shift :]
        if len(kept) >= 2 and other[head : head + len(kept)] == kept and number <= head + len(kept):
            return "history_dropped"
    return None


def _is_shuffled(a: Written, b: Written, gap: Gap) -> bool:
    """Whether the texts around a gap have the same lines in another order."""
    texts: list[str] = []
    for written, place in ((a, gap.a), (b, gap.b)):
        number, talk = written.message_at(place), written.asked.conversation
        if talk is not None and number is None:
            return False
        texts.append((written.asked.text or "") if talk is None else talk.messages[number or 0].content)
    lines = [sorted(line.strip() for line in text.splitlines() if line.strip()) for text in texts]
    return texts[0] != texts[1] and len(lines[0]) > 1 and lines[0] == lines[1] and "".join(
        texts[0].split()) != "".join(texts[1].split())  # fmt: skip


def _calls_reordered(before: Message, after: Message) -> bool:
    pairs = list(zip(before.tool_calls, after.tool_calls, strict=False))
    return any(x.arguments != y.arguments and _is_same_json(x.arguments, y.arguments) for x, y in pairs)


# ---------------------------------------------------------------- by the text


def text_causes(was: str, now: str) -> list[str]:
    """What makes two texts differ, by kind; the last is ``content`` where that is not all."""
    kinds: list[str] = []
    spans = volatile_spans(was), volatile_spans(now)
    values = [[(kind, text[start:end]) for kind, start, end in found]
              for text, found in zip((was, now), spans, strict=True)]  # fmt: skip
    changed = [item for item in values[1] if item not in values[0]]
    changed += [item for item in values[0] if item not in values[1]]
    kinds += dict.fromkeys(kind for kind, _ in changed)
    was, now = _masked(was, spans[0]), _masked(now, spans[1])
    if was == now:
        return kinds
    for kind, is_it in _ALIKE:
        if is_it(was, now):
            return [*kinds, kind]
    return [*kinds, "content"]


def _masked(text: str, spans: Sequence[tuple[str, int, int]]) -> str:
    for kind, start, end in reversed(spans):
        text = f"{text[:start]}⟨{kind}⟩{text[end:]}"
    return text


def _is_same_json(was: str, now: str) -> bool:
    try:
        return bool(json.loads(was) == json.loads(now))
    except ValueError:
        return False


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _is_key_order(was: str, now: str) -> bool:
    if _is_same_json(was.strip(), now.strip()):
        return True
    return (
        bool(_KEYED.search(was) and _KEYED.search(now)) and sorted(_words(was)) == sorted(_words(now)) != []
    )


def _is_number_format(was: str, now: str) -> bool:
    plain = [re.sub(r"(?<=\d)[.,'’\u00a0\u202f ](?=\d)", "", text) for text in (was, now)]
    trimmed = [re.sub(r"(\d)[.,]?0*(?!\d)", r"\1", text) for text in plain]
    return bool(re.search(r"\d", was)) and (plain[0] == plain[1] or trimmed[0] == trimmed[1])


_ALIKE: Final[tuple[tuple[str, Any], ...]] = (
    ("unicode", lambda x, y: unicodedata.normalize("NFKC", x) == unicodedata.normalize("NFKC", y)),
    ("whitespace", lambda x, y: "".join(x.split()) == "".join(y.split())),
    ("number_format", _is_number_format),
    ("case", lambda x, y: x.casefold() == y.casefold()),
    ("key_order", _is_key_order),
    ("order", lambda x, y: sorted(_words(x)) == sorted(_words(y)) and len(_words(x)) > 1),
)


def _by_place(b: Written, gap: Gap, was: str, now: str, *, is_last: bool) -> str:
    """What other content means where it stands."""
    label = b.label(gap.b)
    if label == TEXT:
        return "new_text" if is_last else "user_data" if _is_of_user(was, now) else "content"
    number = b.message_at(gap.b)
    talk = b.asked.conversation
    if number is None or talk is None:
        return "new_text" if is_last else "content"
    if talk.messages[number].role in ("system", "developer"):
        return "user_data" if _is_of_user(was, now) else "system_text"
    newest = max((n for n, m in enumerate(talk.messages) if m.role != "assistant"), default=number)
    if is_last or number >= newest:
        return "new_text"
    return "history_edited"


def _is_of_user(was: str, now: str) -> bool:
    return bool(_USER.search(was) and _USER.search(now))


def _widened(written: Written, start: int, end: int) -> str:
    """The text of a range with the rest of the lines it begins and ends in."""
    before = written.text(start - _CONTEXT_TOKENS, start).rpartition("\n")[2]
    text = written.text(start, end)
    after = "" if text.endswith("\n") else written.text(end, end + _CONTEXT_TOKENS).partition("\n")[0]
    return before + text + after


def _in_words(written: Written, start: int, end: int) -> str:
    """The text of a range with the rest of the words it begins and ends in."""
    before = written.text(start - _WORD_TOKENS, start)
    text = written.text(start, end)
    after = written.text(end, end + _WORD_TOKENS)
    head = "" if text[:1].isspace() else _WORD_END.findall(before)[0]
    tail = "" if text[-1:].isspace() else _WORD_START.findall(after)[0]
    return head + text + tail


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]} … {text[-_MAX_SHOWN // 2 :]}"
