"""From a request to the tokens of its prompt: named prompts, trimming, rendering, and what was left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .errors import ParameterError, TemplateError
from .kv.hashing import Namespace
from .ports import Tokenizer
from .prompt.calls import CallSyntax, call_syntax
from .prompt.canonical import CanonicalRules, canonical
from .prompt.conversation import validate
from .prompt.growing import GrowingPrompts, Prompt
from .prompt.kept import KeptAnswers
from .prompt.registry import PromptRegistry
from .prompt.rules import CustomRole, MessageRules, RuledTemplate
from .prompt.template import Template
from .prompt.tokens import HFTokenizer, Tail
from .prompt.trimming import EarlierCuts, Trimmed, Trimmer
from .prompt.trust import refuse_special_tokens
from .prompt.unrendered import unrendered
from .types import (
    Change,
    Conversation,
    GenerationRequest,
    PromptUse,
    TokenArray,
    Trim,
    TrimRules,
    Unrendered,
    Usage,
)

_ANSWER_SHARE = 4
"""Where a request does not say how long its answer may be, trimming leaves it a quarter of the length."""


def tokenize_conversation(
    conversation: Conversation,
    tokenizer: Tokenizer,
    template: Template,
    *,
    scope: str = "",
    continue_final_message: bool = False,
) -> TokenArray:
    """Check, render and tokenise; the tokens of a complete prompt, ready for the answer to follow.

    All of it, every time: :class:`~ostinato.prompt.growing.GrowingPrompts` goes on from earlier prompts.
    ``scope`` keeps what the tokenizer remembers apart: a tenant's salt.
    """
    validate(conversation, roles=template.roles)
    rendered = template.render(
        conversation,
        add_generation_prompt=not continue_final_message,
        continue_final_message=continue_final_message,
    )
    return tokenizer.encode_rendered(rendered, scope=scope)


@dataclass(frozen=True, slots=True)
class Assembled:
    """A prompt as tokens, the namespace they belong to, and what its assembly did to the conversation.

    ``conversation`` is what was rendered, ``None`` for a raw prompt. ``syntax`` is how calls are written in
    the answer, where any may come. ``pinned`` are the request's, as indices of ``conversation``.
    """

    tokens: TokenArray
    namespace: Namespace
    conversation: Conversation | None = None
    syntax: CallSyntax | None = None
    tool_names: tuple[str, ...] = ()
    trimmed: Trim | None = None
    unrendered: tuple[Unrendered, ...] = ()
    changed: tuple[Change, ...] = ()
    prompt_name: str = ""
    num_kept: int = 0
    tail: Tail | None = None
    pinned: tuple[int, ...] = ()

    def annotate(self, usage: Usage) -> Usage:
        """``usage`` with what only the assembly knows."""
        return replace(
            usage,
            trimmed=self.trimmed,
            unrendered=self.unrendered,
            changed=self.changed,
            prompt_name=self.prompt_name,
            kept_tokens=self.num_kept,
        )


@dataclass(frozen=True, slots=True)
class _Writing:
    """How conversations are written down, and the namespace in which KV of such prompts is exchangeable.

    One value, replaced as a whole: no request can render by one and look up in the other.
    """

    template: Template | None
    namespace: Namespace
    syntax: CallSyntax | None
    prompts: GrowingPrompts | None

    @classmethod
    def of(
        cls,
        template: Template | None,
        namespace: Namespace,
        tokenizer: HFTokenizer,
        kept: KeptAnswers | None,
    ) -> _Writing:
        if template is None:
            return cls(None, replace(namespace, template=""), None, None)
        namespace = replace(namespace, template=template.identity)
        return cls(template, namespace, call_syntax(template), GrowingPrompts(template, tokenizer, kept=kept))


class Assembler:
    """Makes prompts for one model. Safe to use from several threads.

    Args:
        tokenizer: the model's.
        template: how conversations are written; ``None``: not at all.
        namespace: of the model; its template is set to the identity of what writes.
        canonical_rules: what to bring into one form before anything else is done; ``None``: nothing.
        rules: what to do with roles and orders of messages that the template has no place for.
        trim: what to do with a conversation that is too long, where the request does not say.
        prompts: the named prompts that requests may use.
        keep_answers: have answers come back as history in the ids they were generated in
            (:mod:`ostinato.prompt.kept`).
        refuse_special_text: refuse messages in which the text of a special token stands, which else is text
            like any other.
    """

    def __init__(
        self,
        tokenizer: HFTokenizer,
        template: Template | None,
        namespace: Namespace,
        *,
        rules: MessageRules | None = None,
        canonical_rules: CanonicalRules | None = None,
        trim: TrimRules | None = None,
        prompts: PromptRegistry | None = None,
        keep_answers: bool = False,
        refuse_special_text: bool = False,
    ) -> None:
        self._refuse_special_text = refuse_special_text
        self._kept = KeptAnswers(tokenizer) if keep_answers else None
        self.prompts = PromptRegistry() if prompts is None else prompts
        self._tokenizer = tokenizer
        self._trim = TrimRules(strategy="off") if trim is None else trim
        self._cuts = EarlierCuts()
        self._canonical_rules = canonical_rules
        self._own_template = template
        self._message_rules = MessageRules() if rules is None else rules
        self._lock = threading.Lock()
        self._writing = self._written_by(self._message_rules, namespace)

    @property
    def template(self) -> Template | None:
        return self._writing.template

    @property
    def tokenizer(self) -> HFTokenizer:
        return self._tokenizer

    @property
    def habits(self) -> dict[str, Any]:
        """What it does to every request beside writing it by the template: plain values."""
        rules = self._canonical_rules
        return {
            "canonical": None if rules is None else asdict(rules),
            "trim": asdict(self._trim),
            "keep_answers": self._kept is not None,
            "refuse_special_text": self._refuse_special_text,
        }

    @property
    def namespace(self) -> Namespace:
        return self._writing.namespace

    def register_role(self, role: CustomRole) -> None:
        """Know one more role, or another rendering of one that is known, from the next request on.

        It takes its rendering and changes the namespace at once: nothing cached under other renderings is
        found any more, and all of it is found again when they are registered again.

        Raises:
            TemplateError: the model has no template.
        """
        if self._own_template is None:
            raise TemplateError("this model has no chat template: there is nothing to write a role by")
        with self._lock:
            others = (known for known in self._message_rules.roles if known.name != role.name)
            # In one order, so that the order of registration changes no identity.
            roles = tuple(sorted((*others, role), key=lambda known: known.name))
            self._message_rules = replace(self._message_rules, roles=roles)
            self._writing = self._written_by(self._message_rules, self._writing.namespace)

    def _written_by(self, rules: MessageRules, namespace: Namespace) -> _Writing:
        template = self._own_template
        if template is not None and rules != MessageRules():
            template = RuledTemplate(template, rules)
        return _Writing.of(template, namespace, self._tokenizer, self._kept)

    def assemble(self, request: GenerationRequest, max_model_len: int) -> Assembled:
        """The tokens of a request's prompt; at least one, and as many as they are.

        Raises:
            ClientError: what is wrong with the prompt, the conversation or its trimming.
        """
        writing, prompt = self._writing, request.prompt
        namespace = writing.namespace.with_salt(request.salt)
        if not isinstance(prompt, Conversation):
            for name in ("trim", "pinned", "named_prompt", "continue_final_message"):
                if getattr(request, name):
                    text = f"{name} is for conversations, not for raw prompts"
                    raise ParameterError(text, param=name)
            return Assembled(self._raw_tokens(prompt, request.salt), namespace)
        if writing.template is None:
            raise TemplateError(
                "this model has no chat template: choose one when it is loaded, or send a text prompt"
            )
        given = self._with_named(prompt, request.named_prompt, writing.template)
        if self._refuse_special_text:
            validate(given, roles=writing.template.roles)
            refuse_special_tokens(
                given, self._tokenizer.special_tokens, num_ahead=len(given.messages) - len(prompt.messages)
            )
        changed: tuple[Change, ...] = ()
        if self._canonical_rules is not None and request.canonical:
            validate(given, roles=writing.template.roles)
            form = canonical(given, self._canonical_rules)
            given, changed = form.conversation, form.changes
        conversation, made, trimmed = self._within_budget(given, request, writing, max_model_len)
        left_out = unrendered(
            conversation, writing.template, continue_final_message=request.continue_final_message
        )
        if trimmed is not None:  # back to the indices of the messages as they were given
            left_out = tuple(
                replace(item, messages=tuple(trimmed.kept[index] for index in item.messages))
                for item in left_out
            )
        syntax = writing.syntax
        if syntax is not None and not (prompt.tools or syntax.always):
            syntax = None
        return Assembled(
            made.ids,
            namespace,
            conversation,
            num_kept=made.num_kept,
            tail=made.tail,
            pinned=_still_pinned(_pinned(request.pinned, given, prompt), trimmed),
            syntax=syntax,
            tool_names=tuple(tool["function"]["name"] for tool in prompt.tools),
            trimmed=None if trimmed is None else _report(trimmed, self._rules(request, max_model_len)),
            unrendered=left_out,
            changed=changed,
            prompt_name="" if request.named_prompt is None else request.named_prompt.name,
        )

    def _with_named(
        self, conversation: Conversation, use: PromptUse | None, template: Template
    ) -> Conversation:
        """The messages of the named prompt, and the request's own after them."""
        if use is None:
            return conversation
        first = self.prompts.fill(use.name, use.variables)
        if conversation.messages:  # by themselves, so that a fault is named by the caller's own count
            validate(conversation, roles=template.roles)
        return replace(conversation, messages=(*first, *conversation.messages))

    def _within_budget(
        self, given: Conversation, request: GenerationRequest, writing: _Writing, max_model_len: int
    ) -> tuple[Conversation, Prompt, Trimmed | None]:
        """What is left of the conversation, its prompt, and the trimming if there was any."""
        goes_on, salt = request.continue_final_message, request.salt
        rules = self._rules(request, max_model_len)
        pinned = _pinned(request.pinned, given, request.prompt)
        prompt = self._prompt(given, writing, salt, goes_on)
        assert rules.budget_tokens is not None, "rules of a request have a budget"
        if rules.strategy == "off" or len(prompt.ids) <= rules.budget_tokens:
            return given, prompt, None
        assert writing.template is not None, "without a template nothing could be trimmed"
        trimmer = Trimmer(writing.template, self._tokenizer, rules)
        trimmed = self._cuts.trim(
            trimmer,
            given,
            pinned=pinned,
            scope=salt,
            continue_final_message=goes_on,
            space=(writing.template.identity, rules),
        )
        prompt = self._prompt(trimmed.conversation, writing, salt, goes_on)
        is_as_counted = prompt.num_kept > 0 or len(prompt.ids) == trimmed.num_tokens
        assert is_as_counted, "a trimmed prompt has another length than was counted"
        return trimmed.conversation, prompt, trimmed

    def owners(self, assembled: Assembled, *, continue_final_message: bool) -> TokenArray | None:
        """The message that every token of a prompt is of, -1 where it is none's; ``None``: it cannot be told.

        It takes renderings of its own: for who needs to know.
        """
        template = self._writing.template
        if assembled.conversation is None or template is None:
            return None
        located = template.locate(
            assembled.conversation,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )
        spanned = self._tokenizer.encode_spans(located, scope=assembled.namespace.salt)
        if not np.array_equal(spanned.ids, assembled.tokens):
            return None  # answers that came back in tokens of their own
        owners = [-1 if s.message_index is None else s.message_index for s in located.segments]
        return np.array(owners, np.int32)[spanned.segments]

    def pieces(self, tokens: TokenArray) -> list[bytes]:
        """The bytes that each token stands for."""
        return [self._tokenizer.token_bytes(int(token)) for token in tokens]

    def keeper(self, assembled: Assembled) -> Callable[[Sequence[int]], object] | None:
        """What takes the ids of an answer to be kept; ``None`` where none are."""
        kept, tail = self._kept, assembled.tail
        if kept is None or tail is None:
            return None
        return lambda ids: kept.keep(tail, ids, scope=assembled.namespace.salt)

    def _prompt(
        self, conversation: Conversation, writing: _Writing, salt: str, continue_final_message: bool
    ) -> Prompt:
        template, prompts = writing.template, writing.prompts
        assert template is not None, "there is no template"
        assert prompts is not None, "a template without prompts"
        if not continue_final_message:
            return prompts.prompt(conversation, scope=salt)
        ids = tokenize_conversation(
            conversation, self._tokenizer, template, scope=salt, continue_final_message=True
        )
        return Prompt(ids, 0, None)

    def _rules(self, request: GenerationRequest, max_model_len: int) -> TrimRules:
        """The request's rules, or the operator's, with a budget in tokens that leaves room for the answer."""
        rules = self._trim if request.trim is None else request.trim
        wanted = request.params.max_tokens
        room = max(1, max_model_len // _ANSWER_SHARE) if wanted is None else wanted
        most = max_model_len - room
        if most < 1:  # no trimming makes room for such an answer: the runtime says so
            return replace(rules, strategy="off", budget_tokens=max_model_len)
        budget = self._trim.budget_tokens if rules.budget_tokens is None else rules.budget_tokens
        return replace(rules, budget_tokens=most if budget is None else min(budget, most))

    def _raw_tokens(self, prompt: str | tuple[int, ...], salt: str) -> TokenArray:
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                text = f"the prompt is not Unicode text: lone surrogate at character {error.start}"
                raise ParameterError(text, param="prompt") from None
            return self._tokenizer.encode_prompt(prompt, scope=salt)
        return np.array(prompt, dtype=np.int32)


def _report(trimmed: Trimmed, rules: TrimRules) -> Trim:
    assert rules.budget_tokens is not None, "rules of a request have a budget"
    return Trim(rules.strategy, rules.budget_tokens, trimmed.given_tokens, trimmed.dropped, trimmed.shortened)


def _still_pinned(pinned: tuple[int, ...], trimmed: Trimmed | None) -> tuple[int, ...]:
    if trimmed is None:
        return pinned
    return tuple(index for index, given in enumerate(trimmed.kept) if given in pinned)


def _pinned(pinned: Sequence[Any], given: Conversation, prompt: Any) -> tuple[int, ...]:
    """The request's own indices, moved behind the messages of a named prompt."""
    num_own = len(prompt.messages)
    ahead = len(given.messages) - num_own
    for index in pinned:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < num_own:
            raise ParameterError(f"pinned names messages[{index}], which is not there", param="pinned")
    return tuple(index + ahead for index in pinned)
