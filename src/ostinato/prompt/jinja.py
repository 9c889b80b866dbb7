"""A model's own Jinja template as a :class:`~ostinato.prompt.template.Template`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.nodes

from ..errors import TemplateError
from ..ports import Clock
from ..types import Conversation, Message, Rendered, Segment
from .base import Growth
from .conversation import ROLES
from .identity import identity_of
from .origins import Turn, is_same_prompt, origins_of, split_by_origin
from .prefill import cut_at_end, with_end
from .sandbox import Limits, SandboxedTemplate
from .trust import Disguise, map_strings
from .watched import PartedError, Turns, Watch

# Part of the identity: raise it when the same template and conversation render differently than before.
_VERSION = 1

# Filters and methods through which text comes out whole (or trimmed): no part of it is cut out of the
# middle, none is joined to another. Slices are judged apart.
_WHOLE_FILTERS = frozenset(
    {"trim", "tojson", "length", "count", "default", "d", "string", "int", "items", "list", "safe"}
)
_WHOLE_METHODS = frozenset(
    {"strip", "lstrip", "rstrip", "startswith", "endswith", "items", "keys", "values", "get"}
)

# Words of tool schemas that templates look for. They are not the user's choice.
_SCHEMA_WORDS = (
    frozenset({"type", "function", "name", "description", "parameters", "return", "strict"})
    | frozenset({"properties", "required", "additionalProperties", "items", "enum", "const", "default"})
    | frozenset({"anyOf", "oneOf", "allOf", "not", "title", "format", "nullable", "$ref", "$defs"})
    | frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
)


@dataclass(frozen=True, slots=True)
class _Stand:
    """Where a rendering can be gone on from.

    ``before`` is the text before the loop; ``carry``, the settled turns' text after the last settled marker,
    ``num_chars`` the length of all settled text. ``messages`` and ``tools`` are in disguise.
    """

    turns: Turns
    before: str
    carry: str
    num_chars: int
    messages: list[dict[str, Any]]
    tools: list[Any]


class JinjaTemplate:
    """The template text that comes with a model, in a sandbox, with user text kept apart from markers.

    Args:
        source: the template.
        special_tokens: the texts of the tokenizer's special tokens; those that the template writes become
            markers.
        nonce: a secret random text, new with every process.
        clock: for the time limit and for templates that print the date.
        named_tokens: what the template may ask for by name: ``bos_token``, ``eos_token`` and the like.
        variables: more variables for the template, such as ``enable_thinking``; JSON types.
        tool_source: the template to take when tools are offered, where the model has one of its own.
        name: what to call it.
        limits: what one rendering may take.

    Raises:
        TemplateError: ``source`` is not a Jinja template.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Collection[str],
        nonce: str,
        clock: Clock,
        named_tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
        tool_source: str | None = None,
        name: str = "jinja",
        limits: Limits | None = None,
    ) -> None:
        self.name = name
        self.roles: Sequence[str] = ROLES
        self.reads_clock = "strftime_now" in source + (tool_source or "")
        self._fixed = {**(named_tokens or {}), **(variables or {})}
        self._disguise = Disguise(special_tokens, nonce)
        self._limits = limits = limits or Limits()
        self._plain_form = _Form(source, clock, limits, self._disguise)
        self._tool_form = (
            self._plain_form if tool_source is None else _Form(tool_source, clock, limits, self._disguise)
        )
        self.identity = identity_of(
            "jinja", _VERSION, source, tool_source, self._fixed, sorted(special_tokens)
        )

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Rendered:
        """The complete prompt; its segments do not say which message they are of (:meth:`locate`).

        ``continue_final_message``: end inside the assistant's last message, instead of with the generation
        prompt.

        Raises:
            ConversationError: the last message cannot be continued.
            TemplateError: the template refuses the conversation, knows no tools or tool calls where there
                are some, goes beyond its limits, or would make a special token out of a message's text.
        """
        if continue_final_message:
            conversation, add_generation_prompt = with_end(conversation), False
        form = self._tool_form if conversation.tools else self._plain_form
        form.check(conversation)
        messages = [form.message(message) for message in conversation.messages]
        tools = [_plain(tool) for tool in conversation.tools]
        texts, escape = list[str](), self._disguise.escape_for(())

        def lightly(text: str) -> str:
            texts.append(text)
            return self._disguise.light(text, escape)

        seen = _disguised(messages, tools, lightly)
        if (free := self._disguise.escape_for(texts)) != escape:  # somebody guessed it, once in 10^20
            escape, texts = free, []
            seen = _disguised(messages, tools, lightly)

        def render(seen: tuple[list[dict[str, Any]], list[Any]]) -> tuple[Segment, ...]:
            variables = self._variables(*seen, add_generation_prompt)
            return self._disguise.split(form.template.render(variables), escape)

        segments = render(seen)
        if suspects := self._suspects(form, texts):
            self._prove(segments, lambda hide: render(_disguised(messages, tools, hide)), suspects, escape)
        return Rendered(cut_at_end(segments) if continue_final_message else segments)

    def locate(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Rendered:
        """:meth:`render` with the message of every segment, where the template shows it.

        Raises:
            ConversationError, TemplateError: as :meth:`render`.
        """
        rendered = self.render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if continue_final_message:
            conversation, add_generation_prompt = with_end(conversation), False
        form = self._tool_form if conversation.tools else self._plain_form
        escape = self._disguise.escape_for(())
        texts: list[str] = []

        def lightly(text: str) -> str:
            texts.append(text)
            return self._disguise.light(text, escape)

        messages, tools = _disguised(
            [form.message(message) for message in conversation.messages],
            [_plain(tool) for tool in conversation.tools],
            lightly,
        )
        if any(escape in text for text in texts):
            return rendered

        def again(seen: list[dict[str, Any]]) -> str:
            return form.template.render(self._variables(seen, tools, add_generation_prompt))

        try:
            variables = self._variables(messages, tools, add_generation_prompt)
            raw, turns = self._turns(form, messages, variables)
            origins = origins_of(raw, turns, messages, again, self._disguise)
        except TemplateError:  # it refuses the marks, or they are too much for its limits
            return rendered
        segments = split_by_origin(raw, escape, origins, self._disguise)
        if continue_final_message:
            segments = cut_at_end(segments)
        return Rendered(segments) if is_same_prompt(segments, rendered.segments) else rendered

    def _turns(
        self, form: _Form, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> tuple[str, list[Turn]]:
        """The rendering, and which parts of it the loop over the messages wrote in which turn."""
        if form.template.reach is None:
            return form.template.render(variables), []
        watch = Watch(self._disguise.mark(), messages, form.template.reach, None)
        parts = form.template.render_watched(variables, watch).split(watch.mark)
        place, turns = len(parts[0]), list[Turn]()
        if watch.is_end:
            for index, text in enumerate(parts[2:-1], start=watch.offset):
                turns.append(Turn(place, place + len(text), index))
                place += len(text)
        return "".join(parts), turns

    def render_on(self, conversation: Conversation, state: object | None) -> Growth:
        """:meth:`render` with a generation prompt; goes on from an earlier one where nothing before differs.

        Raises:
            TemplateError: as :meth:`render` would.
        """
        assert state is None or isinstance(state, _Stand), "a state of another template"
        form = self._tool_form if conversation.tools else self._plain_form
        if form.template.reach is None:
            return Growth(self.render(conversation).segments)
        form.check(conversation)
        escape = self._disguise.escape_for(())
        texts: list[str] = []

        def lightly(text: str) -> str:
            texts.append(text)
            return self._disguise.light(text, escape)

        known = () if state is None else state.messages
        messages, tools = _disguised(
            [form.message(message) for message in conversation.messages[len(known) :]],
            [_plain(tool) for tool in conversation.tools] if state is None else [],
            lightly,
        )
        # What needs a proof, or another escape, is rare, and not worth remembering.
        if any(escape in text for text in texts) or self._suspects(form, texts):
            return Growth(self.render(conversation).segments)
        messages, tools = [*known, *messages], tools if state is None else state.tools
        try:
            try:
                return self._grow(form, messages, tools, state)
            except PartedError:
                return self._grow(form, messages, tools, None)
        except (PartedError, TemplateError):
            # The marks count in the limits: what holds is what happens without them.
            return Growth(self.render(conversation).segments)

    def _grow(
        self, form: _Form, messages: list[dict[str, Any]], tools: list[Any], since: _Stand | None
    ) -> Growth:
        template, mark, escape = form.template, self._disguise.mark(), self._disguise.escape_for(())
        assert template.reach is not None, "only what can be watched grows"
        watch = Watch(mark, messages, template.reach, None if since is None else since.turns)
        parts = template.render_watched(self._variables(messages, tools, True), watch).split(mark)
        assert len(parts) == watch.num_marks + 1, "a template lost marks"
        if watch.num_marks == 0:  # there are branches without the loop
            return Growth(self._disguise.split(parts[0], escape))
        before, turns, after = parts[0], parts[2:-1], parts[-1]
        carry, num_chars, num_before = before, len(before), 0
        if since is not None:
            if before != since.before:
                raise PartedError
            carry, num_chars, num_before = since.carry, since.num_chars, since.turns.count
        if num_chars + sum(map(len, turns)) + len(after) > self._limits.max_chars:
            raise PartedError
        settled = watch.settled
        count = 0 if settled is None else settled.count - num_before
        fixed = "" if settled is None else carry + "".join(turns[:count])
        rest = "".join(turns[count:]) + after if settled is not None else carry + "".join(turns) + after
        end = self._disguise.settled_end(fixed)
        head = self._disguise.split(fixed[:end], escape)
        segments = (*head, *self._disguise.split(fixed[end:] + rest, escape))
        if settled is None:
            return Growth(segments, since is not None)
        num_chars += sum(map(len, turns[:count]))
        # The turns that are not settled run again, but those before may have looked at their messages.
        stand = _Stand(settled, before, fixed[end:], num_chars, messages, tools)
        return Growth(segments, since is not None, len(head), stand)

    def _suspects(self, form: _Form, texts: list[str]) -> list[str]:
        """The texts that need a proof."""
        return [
            text
            for text in dict.fromkeys(texts)
            if self._disguise.is_suspect(text, is_cut=form.cuts_text, is_wrapped=form.leads_into_token)
        ]

    def _variables(
        self, messages: list[dict[str, Any]], tools: list[Any], add_generation_prompt: bool
    ) -> dict[str, Any]:
        return {
            **self._fixed,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _prove(
        self,
        segments: tuple[Segment, ...],
        render: Callable[[Callable[[str], str]], tuple[Segment, ...]],
        suspects: list[str],
        escape: str,
    ) -> None:
        """Check that the markers are the template's own, by a rendering that can have no others."""
        numbers = {text: number for number, text in enumerate(suspects)}

        def hide(text: str) -> str:
            number = numbers.get(text)
            return (
                self._disguise.light(text, escape) if number is None else self._disguise.heavy(text, number)
            )

        refusal = TemplateError(
            "the chat template would make a special token out of parts of a message: "
            "take pieces of special tokens out of the messages"
        )
        try:
            proof = render(hide)
        except TemplateError as error:
            raise refusal from error
        if _markers(proof) != _markers(segments):
            raise refusal


class _Form:
    """One template text, with what can be known of it before it renders anything."""

    def __init__(self, source: str, clock: Clock, limits: Limits, disguise: Disguise) -> None:
        self.template = SandboxedTemplate(source, clock=clock, limits=limits)
        tree = self.template.tree
        names = tree.find_all(jinja2.nodes.Name)
        self._knows_tools = any(name.name == "tools" and name.ctx == "load" for name in names)
        self._knows_calls = "tool_calls" in source
        self._knows_developer = "developer" in source
        # Most templates print a call's arguments as JSON themselves. Those that look whether they are text
        # already, or put them between texts, get exactly what the model wrote.
        self._verbatim_arguments = bool(_tests_of(tree, "arguments") & {"string", "mapping"}) or any(
            _is_field(operand, "arguments") for operand in _joined(tree)
        )
        # OpenAI's way to say that there is only a call; without such a look it would be printed as "None".
        self._knows_no_content = "none" in _tests_of(tree, "content")
        self.cuts_text = _cuts_text(tree)
        self.leads_into_token = any(disguise.leads_into_token(literal) for literal in _literals(tree))

    def check(self, conversation: Conversation) -> None:
        """What the template would drop without a word is refused."""
        if conversation.tools and not self._knows_tools:
            raise TemplateError("this model's chat template knows no tools", param="tools")
        if self._knows_calls:
            return
        for index, message in enumerate(conversation.messages):
            if message.tool_calls:
                raise TemplateError(
                    f"messages[{index}] calls tools, which this model's chat template does not know",
                    param=f"messages[{index}]",
                )

    def message(self, message: Message) -> dict[str, Any]:
        """The message as chat templates expect it: in OpenAI's form, without what is absent."""
        # OpenAI's newer word for "system"; to a template that does not know it, that is what it is.
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        given: dict[str, Any] = {"role": role, "content": message.content}
        if message.tool_calls and not message.content and self._knows_no_content:
            given["content"] = None
        if message.name is not None:
            given["name"] = message.name
        if message.reasoning:
            given["reasoning_content"] = given["thinking"] = message.reasoning
        if message.tool_calls:
            given["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": self._arguments(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            given["tool_call_id"] = message.tool_call_id
        return given

    def _arguments(self, arguments: str) -> Any:
        if self._verbatim_arguments:
            return arguments
        try:
            parsed = json.loads(arguments)
            if "\\u" in arguments:  # an escape may stand for half a character, which is no text
                json.dumps(parsed, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments


def _cuts_text(tree: jinja2.nodes.Template) -> bool:
    """Whether the template does anything to text but print it whole, compare it and trim it."""
    for name in tree.find_all(jinja2.nodes.Filter):
        if name.name not in _WHOLE_FILTERS:
            return True
    for call in tree.find_all(jinja2.nodes.Call):
        target = call.node
        if isinstance(target, jinja2.nodes.Getattr) and target.attr not in _WHOLE_METHODS:
            return True
        # Trimming anything but white space could trim an escape.
        if isinstance(target, jinja2.nodes.Getattr) and target.attr.endswith("strip") and call.args:
            return True
    return any(True for _ in tree.find_all(jinja2.nodes.Slice))


def _literals(tree: jinja2.nodes.Template) -> Iterator[str]:
    """All text that stands in the template as such."""
    for data in tree.find_all(jinja2.nodes.TemplateData):
        yield data.data
    for const in tree.find_all(jinja2.nodes.Const):
        if isinstance(const.value, str):
            yield const.value


def _is_field(node: jinja2.nodes.Node, name: str) -> bool:
    """Whether ``node`` reads the field ``name`` of something."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == name
    return (
        isinstance(node, jinja2.nodes.Getitem)
        and isinstance(node.arg, jinja2.nodes.Const)
        and node.arg.value == name
    )


def _tests_of(tree: jinja2.nodes.Template, name: str) -> set[str]:
    """What the template tests of fields ``name``: ``is string``, ``is none`` …"""
    return {test.name for test in tree.find_all(jinja2.nodes.Test) if _is_field(test.node, name)}


def _joined(tree: jinja2.nodes.Template) -> Iterator[jinja2.nodes.Node]:
    """All that the template joins to text by ``+`` and ``~``."""
    for node in tree.find_all(jinja2.nodes.Add):
        yield from (node.left, node.right)
    for concat in tree.find_all(jinja2.nodes.Concat):
        yield from concat.nodes


def _disguised(
    messages: list[dict[str, Any]], tools: list[Any], hide: Callable[[str], str]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages and tools with ``hide`` applied to all text that is the user's, and not to what is form."""
    return (
        [_disguised_message(message, hide) for message in messages],
        [map_strings(tool, lambda text: text if text in _SCHEMA_WORDS else hide(text)) for tool in tools],
    )


def _disguised_message(message: dict[str, Any], hide: Callable[[str], str]) -> dict[str, Any]:
    changed: dict[str, Any] = {
        key: value if value is None else hide(value)
        for key, value in message.items()
        if key not in ("role", "tool_calls")
    }
    changed["role"] = message["role"]
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {
                "id": hide(call["id"]),
                "type": call["type"],
                "function": {
                    "name": hide(call["function"]["name"]),
                    "arguments": map_strings(call["function"]["arguments"], hide),
                },
            }
            for call in message["tool_calls"]
        ]
    return changed


def _markers(segments: tuple[Segment, ...]) -> list[str]:
    return [segment.text for segment in segments if segment.is_marker]


def _plain(value: Any) -> Any:
    """``value`` out of plain JSON types, so that no template meets an object with methods of its own."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    return value
