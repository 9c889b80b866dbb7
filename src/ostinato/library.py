"""The library's door: ``ostinato.load(...)`` gives an :class:`Engine` to talk to."""

from __future__ import annotations

import asyncio
import math
import operator
import os
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from .building import build_runtime
from .config import Settings
from .delivery import Start, iterate, stream
from .errors import ParameterError
from .kv.keeper import CacheSummary, PurgeReport
from .kv.pins import Pin
from .kv.terms import Selection, prompt_id, tenant_of
from .ports import Clock, SystemClock
from .prompt.canonical import CanonicalRules
from .prompt.conversation import ROLES, conversation_from_dicts
from .prompt.registry import PromptRegistry
from .prompt.rules import CustomRole, MessageRules
from .response_caches import with_answers
from .responses.control import read_cache_control
from .runtime import Runtime
from .types import (
    CacheControl,
    Chunk,
    Conversation,
    FinishReason,
    GenerationRequest,
    Message,
    PromptUse,
    Retention,
    Reuse,
    SamplingParams,
    Session,
    SessionState,
    ToolCall,
    TrimRules,
    Usage,
)

if TYPE_CHECKING:
    from .beam import Beam
    from .front import Front
    from .prompt.template import Template

ConversationLike: TypeAlias = Conversation | SequenceOf[Mapping[str, Any] | Message] | str


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    @property
    def message(self) -> Message:
        """The answer as a message, to go on with."""
        return Message("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request brought: one or more choices, and what it cost."""

    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def message(self) -> Message:
        return self.choices[0].message

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls


class Engine:
    """A loaded model with its cache. Thread-safe; close it, or use it as a context manager.

    Keyword arguments of the methods are the fields of :class:`~ostinato.types.SamplingParams`, ``n``
    (choices), ``best_of`` (so many are computed, and the ``n`` likeliest kept), ``salt`` (keeps this caller's
    KV apart), ``cache_ttl`` (seconds after its last use for which it is kept), ``deadline`` (seconds that the
    answer may take; then it ends with what it has), ``session`` (an id, or a
    :class:`~ostinato.types.Session`: a hint of what is worth keeping) and ``kv_budget`` (tokens, ``"50%"`` of
    the prompt or ``"64MiB"``: within it the KV of this request is kept by dropping tokens, which may change
    the answer) with ``retention`` (the method), ``entities``, ``pinned_text`` and ``renumber``
    (:class:`~ostinato.types.Retention`), ``reuse`` (``"moved"``: KV of text that stands elsewhere now may be
    used, which may change the answer; ``"verify"``: both ways, answered exactly; ``"exact"``; or
    :class:`~ostinato.types.Reuse`, or its fields as a dict; what was done stands in ``usage.reuse``), and for
    conversations:

    - ``tools``: what the model may call, in OpenAI's form. Calls come back as ``tool_calls``.
    - ``trim``: ``"off"``, ``"drop"``, ``"shorten"``, ``"sticky"``, or :class:`~ostinato.types.TrimRules` (or
      their fields, as a dict), and ``pinned``, the indices of messages that must stay, here and within a
      ``kv_budget`` (or ``"pin": True`` in these messages). What was left out stands in ``usage.trimmed``.
    - ``prompt`` and ``variables``: a prompt of :attr:`prompts` by name, whose messages come before the
      conversation's; then there need be none.
    - ``continue_final_message=True``: go on with the assistant's last message.
    - ``canonical=False``: leave this conversation as it is, where rules of canonical form were set.

    Where answers are kept (the setting ``answers``), ``cache_control`` takes what HTTP has in a header of
    that name (``"no-store"``, ``"no-cache"``, ``"max-age=60"``) and ``cache_answer`` says whether to give and
    keep this one: ``True`` also where it is drawn, ``"semantic"`` also that of a question that means the same
    (within one ``cache_namespace``), ``"exact"`` never that. What was found stands in ``usage.served``.
    """

    def __init__(self, runtime: Runtime, front: Front | None = None) -> None:
        """``front``: the response caches that stand before the runtime, where there are some."""
        self.runtime = runtime
        self.front = front

    @property
    def prompts(self) -> PromptRegistry:
        """The named prompts, and how much of each was found in the cache."""
        return self.runtime.prompts

    def register_role(self, name: str, *, as_role: str, pattern: str = "{content}") -> None:
        """Know a role of your own, written as ``as_role`` (system, user or assistant) by ``pattern``.

        Prompts from now on belong to another namespace, with or without that role in them: nothing that was
        cached under other renderings can be found for them. Registering a name again replaces its rendering.

        Raises:
            ParameterError: the name is taken by a role of every template, or the pattern has no {content}.
            TemplateError: the model has no template.
        """
        self.runtime.register_role(CustomRole(name, as_role, pattern))

    def chat(self, conversation: ConversationLike = (), **options: Any) -> Reply:
        """Answer a conversation: messages (dicts or :class:`Message`), or one user message as text.

        Raises:
            ClientError: the conversation or a parameter is wrong.
            EngineError: the engine failed.
        """
        return _collect(self.stream(conversation, **options))

    def stream(self, conversation: ConversationLike = (), **options: Any) -> Iterator[Chunk]:
        """The same, piece by piece; the last chunk has ``usage``. Closing the iterator cancels."""
        return iterate(self._prepare_chat(conversation, options))

    async def achat(self, conversation: ConversationLike = (), **options: Any) -> Reply:
        """:meth:`chat` for asyncio."""
        chunks = [chunk async for chunk in self.astream(conversation, **options)]
        return _collect(iter(chunks))

    async def astream(self, conversation: ConversationLike = (), **options: Any) -> AsyncIterator[Chunk]:
        """:meth:`stream` for asyncio; what is wrong with the request is raised by the first step."""
        # Off the loop: a long prompt takes seconds to tokenise.
        start = await asyncio.to_thread(self._prepare_chat, conversation, options)
        async with aclosing(stream(start)) as chunks:
            async for chunk in chunks:
                yield chunk

    def complete(self, prompt: str | SequenceOf[int], **options: Any) -> Reply:
        """Continue a raw prompt, given as text or as token ids."""
        return _collect(iterate(self._prepare(GenerationRequest(_raw_prompt(prompt)), options)))

    def beam_search(
        self,
        prompt: ConversationLike | SequenceOf[int],
        *,
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        salt: str = "",
    ) -> tuple[Beam, ...]:
        """The likeliest answers to a conversation (or continuations of token ids) as a whole, best first.

        Beams share in the cache what they have in common. ``length_penalty`` below 1 prefers short ones.

        Raises:
            ParameterError: a value is out of range.
            ClientError, EngineError: as for any request.
        """
        from .beam import search

        request = GenerationRequest(self._asked(prompt), SamplingParams(max_tokens=max_tokens), salt=salt)
        prepared = self.runtime.prepare(request)
        return search(
            self.runtime,
            prepared,
            beam_width=beam_width,
            length_penalty=length_penalty,
            ignore_eos=ignore_eos,
        )

    def session(
        self, id: str, state: SessionState, *, expires_in_s: float | None = None, salt: str = ""
    ) -> bool:
        """Says how a conversation stands, without a request: a hint of what is worth keeping.

        ``closed``: it will not go on. ``idle``: not soon. With ``expires_in_s`` it is closed then. False
        where nothing is known of it (any more).
        """
        return self.runtime.tell_session(Session(id, state, expires_in_s), salt)

    def pin(
        self, prompt: ConversationLike | SequenceOf[int], *, salt: str = "", ttl_s: float = math.inf
    ) -> Pin:
        """Keep the beginning of all conversations that begin with these messages (or tokens); computes it.

        Until it is unpinned, or for ``ttl_s`` seconds. Whole blocks are kept.

        Raises:
            PinRefusedError: more than may be pinned; both numbers are in it.
            ParameterError: it is shorter than a block.
        """
        return self.runtime.pin(GenerationRequest(self._asked(prompt), salt=salt), ttl_s)

    def _asked(self, prompt: ConversationLike | SequenceOf[int]) -> Conversation | str | tuple[int, ...]:
        is_ids = not isinstance(prompt, str | Conversation) and all(isinstance(item, int) for item in prompt)
        given: Any = prompt
        return _raw_prompt(given) if is_ids else _conversation(given, roles=self.runtime.roles)

    def unpin(self, pin: Pin | str) -> bool:
        """Let go of a pin, by itself or its id; false when it is gone already."""
        return self.runtime.unpin(pin if isinstance(pin, str) else pin.id)

    def purge(
        self, *, salt: str | None = None, prompt: str | None = None, older_than_s: float = 0.0
    ) -> PurgeReport:
        """Drop KV and answers, here and in the shared tier; with conditions, what meets all of them.

        Of the tenant with this salt, of the named prompt, stored so long ago. When this returns nobody finds
        any of it. What is in use is freed when it no longer is.
        """
        selection = Selection(
            tenant=None if salt is None else tenant_of(salt),
            prompt=None if prompt is None else prompt_id(prompt),
            min_age_s=older_than_s,
        )
        report = self.runtime.purge(selection)
        if self.front is None:
            return report
        return replace(report, num_answers=self.front.exact.purge(selection).num_entries)

    def forget(self, answer: Reply | str) -> bool:
        """Drop one kept answer, by a reply that it was given in or its id (``usage.served.entry_id``).

        False where there is none (any more).
        """
        served = answer.usage.served if isinstance(answer, Reply) else None
        entry_id = answer if isinstance(answer, str) else "" if served is None else served.entry_id
        return self.front is not None and self.front.exact.forget(entry_id)

    def rate(self, answer: Reply | str, *, is_good: bool) -> bool:
        """What you think of a semantic answer, by the reply or its id; the cache learns from it.

        False where there is no such answer (any more).
        """
        served = answer.usage.served if isinstance(answer, Reply) else None
        entry_id = answer if isinstance(answer, str) else "" if served is None else served.entry_id
        second = None if self.front is None else self.front.second
        return second is not None and second.feedback(entry_id, is_good)

    def cache_summary(self) -> CacheSummary:
        """What is kept now, and for whom."""
        return self.runtime.cache_summary()

    def close(self) -> None:
        """Stop the engine; unfinished requests end with reason "abort"."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _prepare_chat(self, given: ConversationLike, options: dict[str, Any]) -> Start:
        given, pinned = _without_pins(given)
        name, variables = options.pop("prompt", None), options.pop("variables", None)
        if name is None and variables is not None:
            raise ParameterError("variables are for a named prompt: give prompt", param="variables")
        conversation = _conversation(
            given, options.pop("tools", None), roles=self.runtime.roles, may_be_empty=name is not None
        )
        request = GenerationRequest(
            conversation,
            trim=_trim_rules(options.pop("trim", None)),
            pinned=(*options.pop("pinned", ()), *pinned),
            named_prompt=None if name is None else PromptUse(name, variables or {}),
            continue_final_message=bool(options.pop("continue_final_message", False)),
            canonical=bool(options.pop("canonical", True)),
        )
        return self._prepare(request, options)

    def _prepare(self, request: GenerationRequest, options: dict[str, Any]) -> Start:
        num_choices = options.pop("n", 1)
        best_of = options.pop("best_of", None)
        ttl_s = options.pop("cache_ttl", None)
        deadline_s = options.pop("deadline", None)
        session = options.pop("session", None)
        if isinstance(session, str):
            session = Session(session)
        salt = options.pop("salt", "")
        control = _cache_control(
            options.pop("cache_control", None),
            options.pop("cache_answer", None),
            options.pop("cache_namespace", ""),
        )
        retention = _retention(options)
        reuse = _reuse(options.pop("reuse", None))
        known = {item.name for item in fields(SamplingParams)}
        for name in options:
            if name not in known:
                raise ParameterError(f"there is no parameter {name!r}", param=name)
        if isinstance(options.get("stop"), str):
            options["stop"] = (options["stop"],)
        for name in ("stop", "stop_token_ids"):
            if isinstance(options.get(name), list | set | frozenset):
                options[name] = tuple(options[name])
        params = replace(SamplingParams(), **options)
        request = replace(
            request,
            params=params,
            num_choices=num_choices,
            best_of=best_of,
            salt=salt,
            session=session,
            cache_ttl_s=ttl_s,
            deadline_s=deadline_s,
            cache_control=control,
            retention=retention,
            reuse=reuse,
        )
        if self.front is not None:
            front, ready = self.front, self.front.prepare(request)
            return lambda deliver: front.start(ready, deliver)
        prepared = self.runtime.prepare(request)
        return lambda deliver: self.runtime.start(prepared, deliver)


def load(
    model: str | Path | None = None,
    *,
    clock: Clock | None = None,
    rules: MessageRules | None = None,
    canonical_rules: CanonicalRules | None = None,
    template: str | Path | Template | None = None,
    **settings: Any,
) -> Engine:
    """Load a model, fetching it first if need be, and start the engine.

    Args:
        model: alias (``smollm2-135m``), Hugging Face id, folder, or ``.gguf`` file.
        clock: where the time comes from; fix it to fix what a template says of today.
        rules: what to do with roles, repeated roles and late system messages that the template has no place
            for; instead of the setting ``message_rules``, which reads them from a file.
        canonical_rules: what to bring into one form in every conversation; instead of the setting
            ``canonical``, which reads them from a file.
        template: the setting of that name; or a template, such as a
            :class:`~ostinato.prompt.template.FunctionTemplate` of a function of your own.
        settings: fields of :class:`ostinato.config.Settings`.

    Raises:
        ModelError: the model cannot be had or loaded; the message says what to do.
        ParameterError: a setting is unknown or out of range.
    """
    known = {item.name for item in fields(Settings)}
    for name in settings:
        if name not in known:
            raise ParameterError(f"there is no setting {name!r}", param=name)
    if model is not None:
        settings["model"] = str(model)
    own_template = None
    if isinstance(template, str | Path):
        settings["template"] = str(template)
    else:
        own_template = template
    chosen = Settings.from_environment(os.environ, **settings)
    clock_at_hand = clock or SystemClock()

    def build() -> Runtime:
        return build_runtime(
            chosen, clock_at_hand, rules=rules, canonical_rules=canonical_rules, own_template=own_template
        )

    return Engine(*with_answers(chosen, clock_at_hand, build))


def _raw_prompt(given: str | SequenceOf[int]) -> str | tuple[int, ...]:
    """Text as it is; ids as plain integers, also out of an array."""
    if isinstance(given, str):
        return given
    try:
        return tuple(operator.index(token) for token in given)
    except TypeError:
        raise ParameterError(
            "a prompt must be text or a sequence of token ids", param="prompt", code="invalid_type"
        ) from None


def _cache_control(given: Any, asked: Any, namespace: Any) -> CacheControl:
    """As it may be written: rules, or the text of a header, and beside it whether it is asked for."""
    semantic = {"semantic": True, "exact": False}.get(asked) if isinstance(asked, str) else None
    if semantic is not None:
        asked = True
    if not isinstance(asked, bool | None):
        raise ParameterError(
            "cache_answer must be true, false, 'exact' or 'semantic'",
            param="cache_answer",
            code="invalid_type",
        )
    if not isinstance(namespace, str):
        raise ParameterError("cache_namespace must be text", param="cache_namespace", code="invalid_type")
    if isinstance(given, CacheControl):
        return given
    if not isinstance(given, str | None):
        raise ParameterError(
            "cache_control must be text or rules", param="cache_control", code="invalid_type"
        )
    return read_cache_control(given, asked, semantic=semantic, namespace=namespace)


def _conversation(
    given: ConversationLike,
    tools: Any = None,
    *,
    roles: Collection[str] = ROLES,
    may_be_empty: bool = False,
) -> Conversation:
    if isinstance(given, Conversation):
        return given if tools is None else replace(given, tools=tuple(tools))
    if isinstance(given, str):
        given = [Message("user", given)]
    if may_be_empty and isinstance(given, list | tuple) and not given:
        return Conversation((), tuple(tools or ()))
    return conversation_from_dicts(given, tools, roles=roles)


_Written = TypeVar("_Written", TrimRules, Reuse)


def _trim_rules(given: Any) -> TrimRules | None:
    """As it may be written: rules, the name of a strategy, or the fields of rules."""
    return _written_as(TrimRules, given, "trim", "strategy", "a strategy or rules")


def _reuse(given: Any) -> Reuse | None:
    """As it may be written: itself, a mode, or its fields."""
    return _written_as(Reuse, given, "reuse", "mode", "a mode or its fields")


def _written_as(kind: type[_Written], given: Any, param: str, short: str, forms: str) -> _Written | None:
    """A value, its field ``short`` alone, or several of its fields."""
    if given is None or isinstance(given, kind):
        return given
    named = {short: given} if isinstance(given, str) else given
    if not isinstance(named, Mapping):
        raise ParameterError(f"{param} must be {forms}", param=param, code="invalid_type")
    known = {item.name for item in fields(kind)}
    for name in named:
        if name not in known:
            raise ParameterError(f"{param} has no field {name!r}", param=param)
    return kind(**named)


def _without_pins(given: Any) -> tuple[Any, tuple[int, ...]]:
    """Messages without their ``pin``, and which of them had one that is true."""
    if not isinstance(given, list | tuple) or not any(isinstance(m, Mapping) and "pin" in m for m in given):
        return given, ()
    pins = [message.get("pin", False) if isinstance(message, Mapping) else False for message in given]
    for index, pin in enumerate(pins):
        if not isinstance(pin, bool):
            raise ParameterError(
                "pin must be true or false", param=f"messages[{index}].pin", code="invalid_type"
            )
    plain = [
        {key: value for key, value in message.items() if key != "pin"}
        if isinstance(message, Mapping)
        else message
        for message in given
    ]
    return plain, tuple(index for index, pin in enumerate(pins) if pin)


def _retention(options: dict[str, Any]) -> Retention | None:
    """Takes what is said of a KV budget out of a request's options."""
    budget = options.pop("kv_budget", None)
    names = {"retention": "method"} | {name: name for name in ("entities", "pinned_text", "renumber")}
    given = {field: options.pop(name) for name, field in names.items() if name in options}
    if budget is None:
        if given:
            name = next(name for name, field in names.items() if field in given)
            raise ParameterError(f"{name} is for a kv_budget: give one", param=name)
        return None
    if isinstance(given.get("pinned_text"), str | list):
        text = given["pinned_text"]
        given["pinned_text"] = (text,) if isinstance(text, str) else tuple(text)
    return Retention(budget, **given)


def _collect(chunks: Iterator[Chunk]) -> Reply:
    """All pieces of a request as a reply; raises what ended it instead, where something did."""
    texts: dict[int, list[str]] = {}
    thoughts: dict[int, list[str]] = {}
    calls: dict[int, list[ToolCall]] = {}
    tokens: dict[int, list[int]] = {}
    ends: dict[int, Chunk] = {}
    usage = Usage()
    for chunk in chunks:
        texts.setdefault(chunk.choice_index, []).append(chunk.text)
        thoughts.setdefault(chunk.choice_index, []).append(chunk.reasoning)
        calls.setdefault(chunk.choice_index, []).extend(chunk.tool_calls)
        tokens.setdefault(chunk.choice_index, []).extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            ends[chunk.choice_index] = chunk
        if chunk.usage is not None:
            usage = chunk.usage
    for end in ends.values():
        if end.error is not None:
            raise end.error
    choices = []
    for index, end in sorted(ends.items()):
        assert end.finish_reason is not None
        choices.append(
            Choice(
                text="".join(texts[index]),
                token_ids=tuple(tokens[index]),
                finish_reason=end.finish_reason,
                stop_reason=end.stop_reason,
                tool_calls=tuple(calls[index]),
                reasoning="".join(thoughts[index]),
            )
        )
    return Reply(tuple(choices), usage)
