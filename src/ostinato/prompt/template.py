"""Templates: from a conversation to the complete prompt, as text and markers.

The contract of every template: what it renders is *complete*. BOS stands in it where the format has one, and
the generation prompt where one is asked for; nobody adds text or tokens afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ParameterError
from ..ports import Clock
from ..types import Conversation, Rendered
from .base import Template
from .conversation import ROLES
from .formats import FORMATS, Format
from .identity import identity_of
from .jinja import JinjaTemplate
from .prefill import cut_at_end, with_end
from .rules import CustomRole, MessageRules, RuledTemplate
from .sandbox import Limits
from .tokens import HFTokenizer

__all__ = [
    "CustomRole",
    "FunctionTemplate",
    "JinjaTemplate",
    "Limits",
    "MessageRules",
    "RuledTemplate",
    "Template",
    "chatml",
    "format_for",
    "named_template",
    "reads_clock",
    "template_for",
]


class FunctionTemplate:
    """A chat format written as a function (:mod:`ostinato.prompt.formats`).

    Args:
        chat_format: the format.
        options: what to set otherwise than the format's default.

    Raises:
        ParameterError: the format knows no such option.
    """

    def __init__(self, chat_format: Format, **options: Any) -> None:
        for option in options:
            if option not in chat_format.options:
                raise ParameterError(
                    f"the {chat_format.name} template has no option {option!r}", param="template"
                )
        self.name = chat_format.name
        self.roles: Sequence[str] = ROLES
        self._write = chat_format.write
        self._options = {**chat_format.options, **options}
        self.identity = identity_of("function", chat_format.name, chat_format.version, self._options)

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Rendered:
        """The complete prompt; segments name the message they come from.

        Raises:
            ConversationError: the last message cannot be continued.
            TemplateError: the format cannot express this conversation.
        """
        if continue_final_message:
            conversation, add_generation_prompt = with_end(conversation), False
        segments = tuple(self._write(conversation, add_generation_prompt, **self._options))
        return Rendered(cut_at_end(segments) if continue_final_message else segments)

    def locate(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Rendered:
        """:meth:`render`: segments of formats written as code always say what they are of."""
        return self.render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )


def chatml(*, default_system: str | None = None) -> FunctionTemplate:
    """ChatML; ``default_system`` is written where a conversation does not begin with a system message."""
    return FunctionTemplate(FORMATS["chatml"], default_system=default_system)


def named_template(name: str, **options: Any) -> FunctionTemplate:
    """The chat format of that name.

    Raises:
        ParameterError: there is none of that name, or it has no such option.
    """
    if name not in FORMATS:
        raise ParameterError(
            f"there is no template {name!r}; there are {', '.join(sorted(FORMATS))}", param="template"
        )
    return FunctionTemplate(FORMATS[name], **options)


def reads_clock(template: Template | None) -> bool:
    """Whether the same conversation may be written down otherwise at another time. Of templates that are not
    ours that is not known: they may."""
    if isinstance(template, RuledTemplate):
        return reads_clock(template.inner)
    if isinstance(template, JinjaTemplate):
        return template.reads_clock
    return template is not None and not isinstance(template, FunctionTemplate)


# Special tokens that tell a format, the more telling ones first.
_TELLING = (
    ("<|im_sep|>", "phi4"),
    ("<|im_start|>", "chatml"),
    ("<|channel|>", "harmony"),
    ("<|start_header_id|>", "llama3"),
    ("<start_of_turn>", "gemma"),
    ("<|START_OF_TURN_TOKEN|>", "command-r"),
    ("<｜User｜>", "deepseek-v3"),
    ("[SYSTEM_PROMPT]", "mistral-v7-tekken"),
    ("[INST]", "mistral-v3"),
    ("<|end|>", "phi3"),
)


def format_for(tokenizer: HFTokenizer) -> str | None:
    """The name of the chat format that a model's special tokens tell of, for models without a template."""
    return next((name for token, name in _TELLING if token in tokenizer.special_tokens), None)


def template_for(
    tokenizer: HFTokenizer, choice: str = "auto", *, clock: Clock, nonce: str, limits: Limits | None = None
) -> Template | None:
    """The template to use with a model.

    Args:
        tokenizer: the model's.
        choice: ``auto`` (the model's own; ``None`` where it has none), the name of a chat format, or the path
            of a file with a Jinja template.
        clock: for templates that print the date, and for their time limit.
        nonce: a secret random text of digits, new with every process.
        limits: what one rendering may take.

    Raises:
        ParameterError: there is no such format or file.
        TemplateError: the template is not valid Jinja.
    """
    if choice in FORMATS:
        return named_template(choice)
    tool_source = None
    if choice == "auto":
        source = tokenizer.chat_template
        if source is None:
            return None
        tool_source = tokenizer.chat_templates.get("tool_use")
        name = "model"
    else:
        file = Path(choice)
        if not file.is_file():
            raise ParameterError(
                f"{choice!r} is neither a template's name ({', '.join(sorted(FORMATS))}) nor a file",
                param="template",
            )
        source, name = file.read_text(encoding="utf-8"), file.name
    return JinjaTemplate(
        source,
        special_tokens=tokenizer.special_tokens,
        nonce=nonce,
        clock=clock,
        named_tokens=tokenizer.named_tokens,
        tool_source=tool_source,
        name=name,
        limits=limits,
    )
