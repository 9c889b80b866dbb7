"""How a template takes what its format has no place for: more roles, repeated roles, late system messages.

The rules change a conversation before the template sees it. They are part of the template they wrap: a new
rule is a new identity, so KV that was made under the old one can never be taken for the new one's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..errors import ConversationError, ParameterError
from ..types import Conversation, Message, Rendered
from .base import GrowingTemplate, Growth, Template
from .conversation import ROLES
from .identity import identity_of

_PLACE = "{content}"

Repeats: TypeAlias = Literal["keep", "merge", "refuse"]
LateSystem: TypeAlias = Literal["keep", "lead", "user", "refuse"]


@dataclass(frozen=True, slots=True)
class CustomRole:
    """A role of the user's own, written as one of the known roles.

    ``pattern`` is what stands in the message, with ``{content}`` where its content goes.
    """

    name: str
    as_role: str
    pattern: str = _PLACE

    def __post_init__(self) -> None:
        if not self.name or self.name in ROLES:
            raise ParameterError(f"a custom role cannot be called {self.name!r}", param="roles")
        if self.as_role not in ("system", "user", "assistant"):
            raise ParameterError(
                f"the role {self.name!r} must be written as system, user or assistant", param="roles"
            )
        if self.pattern.count(_PLACE) != 1:
            raise ParameterError(
                f"the pattern of the role {self.name!r} must have {_PLACE} in it, once", param="roles"
            )

    def write(self, message: Message) -> Message:
        before, after = self.pattern.split(_PLACE)
        return replace(message, role=self.as_role, content=f"{before}{message.content}{after}")


@dataclass(frozen=True, slots=True)
class MessageRules:
    """What to do before a template renders.

    Args:
        roles: more roles.
        repeats: messages of one role in a row: ``keep`` them apart, ``merge`` them with ``separator`` between
            their contents, or ``refuse``. Messages with calls, results, names or reasoning are never merged.
        late_system: system messages that do not stand at the beginning: ``keep`` them (the format has a place
            for them), put them in the ``lead`` with ``separator`` between (which changes the beginning of the
            prompt, and so costs the cache all that follows), write them as a ``user`` message by
            ``late_system_pattern``, or ``refuse``.
    """

    roles: tuple[CustomRole, ...] = ()
    repeats: Repeats = "keep"
    separator: str = "\n\n"
    late_system: LateSystem = "keep"
    late_system_pattern: str = "[system] {content}"

    def __post_init__(self) -> None:
        names = [role.name for role in self.roles]
        if len(set(names)) < len(names):
            raise ParameterError(f"a role is defined twice: {', '.join(names)}", param="roles")
        if self.repeats not in ("keep", "merge", "refuse"):
            raise ParameterError("repeats must be keep, merge or refuse", param="repeats")
        if self.late_system not in ("keep", "lead", "user", "refuse"):
            raise ParameterError("late_system must be keep, lead, user or refuse", param="late_system")
        if self.late_system_pattern.count(_PLACE) != 1:
            raise ParameterError(
                f"late_system_pattern must have {_PLACE} in it, once", param="late_system_pattern"
            )

    def apply(self, conversation: Conversation) -> tuple[Conversation, tuple[int, ...]]:
        """The conversation to render, and for each of its messages the index of the (first) original one.

        Raises:
            ConversationError: a rule refuses; names the message.
        """
        by_name = {role.name: role for role in self.roles}
        messages = [
            (by_name[message.role].write(message) if message.role in by_name else message, index)
            for index, message in enumerate(conversation.messages)
        ]
        messages = self._place_system(messages)
        messages = self._join_repeats(messages)
        return (
            replace(conversation, messages=tuple(message for message, _ in messages)),
            tuple(index for _, index in messages),
        )

    def _place_system(self, messages: list[tuple[Message, int]]) -> list[tuple[Message, int]]:
        if self.late_system == "keep":
            return messages
        leading = 0
        while leading < len(messages) and _is_system(messages[leading][0]):
            leading += 1
        late = [(message, index) for message, index in messages[leading:] if _is_system(message)]
        if not late:
            return messages
        if self.late_system == "refuse":
            index = late[0][1]
            raise ConversationError(
                f"messages[{index}] is a system message in mid-conversation, which is refused here",
                index=index,
            )
        if self.late_system == "user":
            as_user = CustomRole("late system", "user", self.late_system_pattern)
            return messages[:leading] + [
                (as_user.write(message) if _is_system(message) else message, index)
                for message, index in messages[leading:]
            ]
        others = [(message, index) for message, index in messages[leading:] if not _is_system(message)]
        first, index = (messages[:leading] + late)[0]
        texts = [message.content for message, _ in messages[:leading] + late]
        return [(replace(first, content=self.separator.join(texts)), index), *others]

    def _join_repeats(self, messages: list[tuple[Message, int]]) -> list[tuple[Message, int]]:
        if self.repeats == "keep":
            return messages
        joined: list[tuple[Message, int]] = []
        for message, index in messages:
            before = joined[-1][0] if joined else None
            if before is None or before.role != message.role or message.role == "tool":
                joined.append((message, index))
            elif self.repeats == "refuse":
                raise ConversationError(
                    f"messages[{index}] has the role of the message before it, {message.role!r}, "
                    "which is refused here",
                    index=index,
                )
            elif _is_plain(before) and _is_plain(message):
                content = f"{before.content}{self.separator}{message.content}"
                joined[-1] = (replace(before, content=content), joined[-1][1])
            else:
                joined.append((message, index))
        return joined


def read_rules(file: Path) -> MessageRules:
    """Rules out of a TOML file: the fields of :class:`MessageRules`, and for each role a table
    ``[roles.NAME]`` with ``as_role`` and ``pattern``.

    Raises:
        ParameterError: it cannot be read, or a rule makes no sense; the message names the file.
    """
    try:
        with file.open("rb") as opened:
            given: dict[str, Any] = tomllib.load(opened)
    except (OSError, ValueError) as error:  # a fault in TOML or in its encoding is a ValueError
        raise ParameterError(f"{file} cannot be read: {error}", param="message_rules") from error
    roles = given.pop("roles", {})
    known = {item.name for item in fields(MessageRules)} - {"roles"}
    if not isinstance(roles, dict) or not all(
        isinstance(role, dict) and role.keys() <= {"as_role", "pattern"} and "as_role" in role
        for role in roles.values()
    ):
        raise ParameterError(f"{file}: [roles.NAME] takes as_role and pattern", param="message_rules")
    for name, value in given.items():
        if name not in known or not isinstance(value, str):
            raise ParameterError(f"{file}: {name} is no rule, or not text", param="message_rules")
    try:
        return MessageRules(roles=tuple(CustomRole(name, **role) for name, role in roles.items()), **given)
    except (ParameterError, AttributeError, TypeError) as error:
        raise ParameterError(f"{file}: {error}", param="message_rules") from error


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _is_plain(message: Message) -> bool:
    return not message.tool_calls and message.name is None and not message.reasoning


@dataclass(frozen=True, slots=True)
class _RuledState:
    """The messages as the rules made them, and what the template can go on from."""

    messages: tuple[Message, ...]
    inner: object


def written_as(template: Template) -> dict[str, str]:
    """The roles of the user's own that ``template`` knows, and the known role each is written as."""
    return dict(template.written_as) if isinstance(template, RuledTemplate) else {}


class RuledTemplate:
    """A template (``inner``) with rules before it. ``written_as`` says which known role each of the user's
    own is."""

    def __init__(self, template: Template, rules: MessageRules) -> None:
        self.inner = template
        self._rules = rules
        self.name = template.name
        self.roles = (*template.roles, *(role.name for role in rules.roles))
        self.written_as = {role.name: role.as_role for role in rules.roles}
        self.identity = identity_of("rules", 1, asdict(rules), template.identity)

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Rendered:
        """The complete prompt; segments name the original messages (of merged ones, the first).

        Raises:
            ConversationError: a rule refuses the conversation.
            TemplateError: the template does.
        """
        ruled, origins = self._rules.apply(conversation)
        rendered = self.inner.render(
            ruled,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return _as_given(rendered, origins)

    def locate(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Rendered:
        """:meth:`render` with the message of every segment, as far as the template can tell."""
        ruled, origins = self._rules.apply(conversation)
        located = self.inner.locate(
            ruled,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return _as_given(located, origins)

    def render_on(self, conversation: Conversation, state: object | None) -> Growth:
        """:meth:`render` with a generation prompt; goes on where the rules leave earlier messages as they
        were, and the template can.

        Raises:
            ConversationError: a rule refuses the conversation.
            TemplateError: the template does.
        """
        ruled, _ = self._rules.apply(conversation)
        if not isinstance(self.inner, GrowingTemplate):
            return Growth(self.inner.render(ruled).segments)
        inner = None
        if state is not None:
            assert isinstance(state, _RuledState), "a state of another template"
            if ruled.messages[: len(state.messages)] == state.messages:
                inner = state.inner
        growth = self.inner.render_on(ruled, inner)
        if growth.state is None:
            return growth
        return replace(growth, state=_RuledState(ruled.messages, growth.state))


def _as_given(rendered: Rendered, origins: Sequence[int]) -> Rendered:
    """Segments that name the messages as they were before the rules."""
    return Rendered(
        tuple(
            segment
            if segment.message_index is None
            else replace(segment, message_index=origins[segment.message_index])
            for segment in rendered.segments
        )
    )
