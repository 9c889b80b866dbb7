"""Does a template fit a tokenizer? Renders, tokenizes, decodes and compares."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConversationError, TemplateError
from ..types import Conversation, Message, Rendered
from .base import Template
from .tokens import HFTokenizer

# What the world's chat formats write their markers like.
_LIKE_MARKER = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|\[/?[A-Z_]{3,40}\]|</?[a-z]+(?:_[a-z]+)+>|</?s>"
)

SAMPLES = (
    (Message("user", "How many sides has a hexagon?"),),
    (
        Message("user", "How many sides has a hexagon?"),
        Message("assistant", "Six."),
        Message("user", "And what is 2 < 3 | 4?"),
    ),
    (
        Message("system", "Be brief."),
        Message("user", "How many sides has a hexagon?"),
        Message("assistant", "Six.\n\n- one\n- two"),
        Message("user", "Naïve 你好 🙂"),
    ),
)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What :func:`check_template` found.

    ``problems`` are faults, the first the one to mend first; ``notes`` may be meant so. ``markers`` are the
    special tokens the template wrote, in order of their first use.
    """

    template: str
    markers: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        return not self.problems


def check_template(template: Template, tokenizer: HFTokenizer) -> TemplateReport:
    """Try ``template`` with ``tokenizer`` on sample conversations."""
    markers: dict[str, None] = {}
    problems: dict[str, None] = {}
    notes: dict[str, None] = {}
    rendered_any = False
    for messages in SAMPLES:
        try:
            rendered = template.render(Conversation(messages))
        except (ConversationError, TemplateError) as error:
            notes[f"it refuses {', '.join(message.role for message in messages)}: {error}"] = None
            continue
        rendered_any = True
        markers.update((segment.text, None) for segment in rendered.segments if segment.is_marker)
        problems.update((problem, None) for problem in _problems(rendered, tokenizer))
        notes.update((note, None) for note in _notes(rendered, messages, tokenizer))
    if not rendered_any:
        problems["it renders none of the sample conversations"] = None
    return TemplateReport(template.name, tuple(markers), tuple(problems), tuple(notes))


def _problems(rendered: Rendered, tokenizer: HFTokenizer) -> list[str]:
    try:
        ids = tokenizer.encode_rendered(rendered).tolist()
    except TemplateError as error:
        return [str(error)]
    found = []
    begins = tokenizer.encode_prompt("").tolist()[:1]
    if begins and begins[0] == tokenizer.special_tokens.get(tokenizer.bos_token or "") and ids[:1] != begins:
        found.append(f"the tokenizer begins prompts with {tokenizer.bos_token!r}, the template does not")
    if ids[:1] == ids[1:2] and ids[:1] == begins:
        found.append(f"the prompt begins with {tokenizer.bos_token!r} twice")
    back = tokenizer.decode(ids, skip_special_tokens=False)
    if _without_spaces(back) != _without_spaces(rendered.text) and not _loses_text(tokenizer):
        found.append(f"the tokens do not give the text back: {back!r} instead of {rendered.text!r}")
    return found


def _notes(rendered: Rendered, messages: tuple[Message, ...], tokenizer: HFTokenizer) -> list[str]:
    given = " ".join(message.content for message in messages)
    found = []
    for segment in rendered.segments:
        for match in _LIKE_MARKER.finditer("" if segment.is_marker else segment.text):
            num_tokens = len(tokenizer.encode(match[0]))
            if match[0] not in given and num_tokens > 1:
                found.append(
                    f"{match[0]!r} looks like a special token, but is text here ({num_tokens} tokens)"
                )
    return found


def _without_spaces(content: str) -> str:
    """Tokenizers with ``▁`` add and drop spaces around special tokens."""
    return "".join(content.split())


def _loses_text(tokenizer: HFTokenizer) -> bool:
    """Whether the vocabulary folds letters or does not know them all: then text cannot come back."""
    sample = "".join(message.content for messages in SAMPLES for message in messages)
    return _without_spaces(tokenizer.decode(tokenizer.encode(sample).tolist())) != _without_spaces(sample)
