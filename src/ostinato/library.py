"""The library's door: ``ostinato.load(...)`` gives an :class:`Engine` to talk to."""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from .assembly import Assembler
from .config import Settings
from .delivery import Start, iterate, stream
from .errors import ParameterError
from .kv.hashing import Namespace
from .kv.keeper import CacheSummary, PurgeReport
from .kv.pins import Pin
from .kv.terms import Selection, prompt_id, tenant_of
from .models.digest import digest_bytes, digest_file
from .ports import Clock, SystemClock
from .prompt.canonical import CanonicalRules, read_canonical_rules
from .prompt.conversation import ROLES, conversation_from_dicts
from .prompt.registry import PromptRegistry, read_prompts
from .prompt.rules import CustomRole, MessageRules, read_rules
from .response_caches import with_answers
from .responses.control import read_cache_control
from .runtime import Runtime
from .tenants import allowances
from .types import (
    CacheControl,
    Chunk,
    Conversation,
    FinishReason,
    GenerationRequest,
    Message,
    PromptUse,
    Retention,
    SamplingParams,
    Session,
    SessionState,
    ToolCall,
    TrimRules,
    Usage,
)

if TYPE_CHECKING:
    from .beam import Beam
    from .engines.base import RunnerInfo
    from .engines.runners import PagedRunner
    from .engines.worker import Worker
    from .events import Observer
    from .front import Front
    from .kv.terms import Allowances
    from .kv.tiers.shared import SharedTier
    from .kv.transfer import TierLink
    from .models.store import LocalModel
    from .prompt.template import Template
    from .prompt.tokens import HFTokenizer
    from .request_log import RequestLog

_log = logging.getLogger(__name__)

_WRITE_BACK_BYTES = 64 << 20
_SPARE_BYTES = 512 << 20  # of memory, for all that is neither weights nor KV
"""What blocks on their way to the shared tier may take; more are not stored."""

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
    the answer) with ``retention`` (the method), ``entities`` and ``pinned_text``
    (:class:`~ostinato.types.Retention`), and for conversations:

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
    keep this one: ``True`` also where it is drawn. What was found stands in ``usage.served``.
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
        control = _cache_control(options.pop("cache_control", None), options.pop("cache_answer", None))
        retention = _retention(options)
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


def build_runtime(
    settings: Settings,
    clock: Clock,
    progress: Any = None,
    *,
    rules: MessageRules | None = None,
    canonical_rules: CanonicalRules | None = None,
    own_template: Template | None = None,
) -> Runtime:
    """Put the parts together: model, tokenizer, template, books, arena, engine."""
    from .engines.worker import Worker
    from .models.fetch import fetch
    from .models.store import ModelStore
    from .prompt.template import template_for
    from .prompt.tokens import HFTokenizer

    assert settings.store is not None, "Settings.from_environment sets the store"
    # What can be wrong in the operator's files is told before a model is fetched.
    if rules is None and settings.message_rules is not None:
        rules = read_rules(settings.message_rules)
    if canonical_rules is None and settings.canonical is not None:
        canonical_rules = read_canonical_rules(settings.canonical)
    prompts = PromptRegistry(() if settings.prompts is None else read_prompts(settings.prompts))
    local = fetch(
        settings.model,
        ModelStore(settings.store),
        progress=progress,
        offline=settings.offline,
        token=settings.hf_token,
    )
    nonce = str(secrets.randbelow(9 * 10**19) + 10**19)
    tokenizer = HFTokenizer.from_folder(local.path, nonce=nonce)
    template = own_template or template_for(tokenizer, settings.template, clock=clock, nonce=nonce)
    log = _request_log(settings, clock)
    worker = Worker("ostinato-engine")

    def assembler(namespace: Namespace) -> Assembler:
        return Assembler(
            tokenizer,
            template,
            namespace,
            rules=rules,
            canonical_rules=canonical_rules,
            trim=settings.trim_rules,
            prompts=prompts,
            keep_answers=settings.keep_answers,
            refuse_special_text=settings.refuse_special_text,
        )

    try:
        runtime = worker.submit(lambda: _start(settings, local, tokenizer, assembler, clock, worker)).result()
    except BaseException:
        worker.close()
        if log is not None:
            log.close()
        raise
    if log is not None:
        runtime.observers.append(log)
        runtime.on_close.append(log.close)
    return runtime


def _request_log(settings: Settings, clock: Clock) -> RequestLog | None:
    """The log that was asked for."""
    if settings.trace is None:
        return None
    from .request_log import RequestLog, log_key

    return RequestLog(
        settings.trace,
        key=log_key(settings.trace_key) if settings.trace_key else secrets.token_bytes(32),
        block_tokens=settings.block_size,
        clock=clock,
        with_content=settings.trace_content,
        max_bytes=settings.trace_bytes,
    )


def _start(
    settings: Settings,
    local: LocalModel,
    tokenizer: HFTokenizer,
    assembler: Callable[[Namespace], Assembler],
    clock: Clock,
    worker: Worker,
) -> Runtime:
    """Load the model and start the engine; runs in ``worker``, which goes on as the engine."""
    import torch

    from .engines.batching import Batcher, BatchingSettings
    from .engines.hf import load_model
    from .engines.runners import PagedRunner, StatefulRunner
    from .kv.archive import Archives
    from .kv.keeper import Keeper
    from .kv.manager import KVManager
    from .kv.policies import make_policy
    from .kv.sessions import Sessions
    from .kv.tending import Tender

    _check_device(settings.device, torch)
    loaded = load_model(
        local.path,
        dtype=_dtype(settings, torch),
        device=settings.device,
        max_model_len=settings.max_model_len,
    )
    info, num_blocks = loaded.info, _num_blocks(settings, loaded.info)
    block_bytes = settings.block_size * info.kv_bytes_per_token
    runtime: Runtime

    policy = make_policy(
        settings.policy, num_blocks=num_blocks, block_tokens=settings.block_size, clock=clock
    )
    manager = KVManager(
        num_blocks,
        settings.block_size,
        policy=policy,
        observer=lambda event: runtime.observe(event),
        clock=clock,
        allowances=_allowances(settings, block_bytes, in_tier=False),
        pinned_share=settings.pinned_share,
    )
    sessions = Sessions(manager, clock)
    try:
        runner = (
            PagedRunner(loaded, num_blocks * settings.block_size) if info.reuse else StatefulRunner(loaded)
        )
    except RuntimeError as error:  # torch has no kind of its own for "out of memory" on a CPU
        size_gib = num_blocks * settings.block_size * info.kv_bytes_per_token / 2**30
        raise ParameterError(
            f"there is no memory for {size_gib:.1f} GiB of KV: lower kv_cache", param="kv_cache"
        ) from error
    tier, link = None, None
    if isinstance(runner, PagedRunner):
        tier, link = _tier_link(settings, runner, clock, lambda event: runtime.observe(event))
    archives = None
    if settings.kv_recall is not None and isinstance(runner, PagedRunner):
        archives = Archives(runner.arena, settings.kv_recall)
        manager.on_purge = archives.clear
    batcher = Batcher(
        runner,
        manager,
        clock,
        BatchingSettings(
            settings.max_batch_tokens,
            settings.max_sequences,
            settings.max_waiting,
            itl_target_s=None if settings.itl_target_ms is None else settings.itl_target_ms / 1e3,
        ),
        observer=lambda event: runtime.observe(event),
        worker=worker,
        tier_link=link,
        sessions=sessions,
        tender=Tender(manager, sessions),
        archives=archives,
    )
    runtime = Runtime(
        model_name=local.name,
        tokenizer=tokenizer,
        assembler=assembler(
            Namespace(
                weights=local.weights_digest,
                tokenizer=tokenizer.identity,
                template="",  # the assembler's to say
                kv_layout=info.kv_layout,
                kv_dtype=info.kv_dtype,
                rotary=info.rotary,
            )
        ),
        batcher=batcher,
        manager=manager,
        info=info,
        eos_token_ids=loaded.eos_token_ids | tokenizer.eos_token_ids,
        clock=clock,
        tier_link=link,
        sessions=sessions,
        deadline_s=math.inf if settings.deadline is None else settings.deadline,
        keeper=Keeper(manager, tier, block_bytes),
        revision=_revision(settings, local, info, loaded.eos_token_ids | tokenizer.eos_token_ids),
        budgets=_budgets(settings),
    )
    return runtime


def _revision(settings: Settings, local: LocalModel, info: RunnerInfo, eos_token_ids: frozenset[int]) -> str:
    """A digest of what decides answers beside the namespace: with another one they may be others."""
    parts = [
        *(f"{name} {version(name)}" for name in ("ostinato", "torch", "transformers")),
        f"{settings.device} {settings.dtype} {settings.tier_codec}",
        f"{info.max_model_len} {info.vocab_size} {sorted(eos_token_ids)}",
        *(digest_file(path) for path in sorted(local.path.glob("*config.json"))),
    ]
    return digest_bytes("\n".join(parts).encode())


def _budgets(settings: Settings) -> dict[str, Retention]:
    """The KV budgets of requests that bring none, by tenant; ``""``: everyone else's."""
    budgets = {tenant.id: tenant.kv_budget for tenant in settings.all_tenants()}
    budgets[""] = settings.kv_budget
    return {
        tenant: Retention(budget, settings.retention)
        for tenant, budget in budgets.items()
        if budget is not None
    }


def _num_blocks(settings: Settings, info: RunnerInfo) -> int:
    """How many blocks the KV capacity makes, and memory holds beside what is loaded already."""
    import psutil

    block_bytes = info.kv_bytes_per_token * settings.block_size
    capacity = settings.kv_cache
    if settings.device == "cpu":
        memory = psutil.virtual_memory()
        if capacity > memory.total:
            raise ParameterError(
                f"kv_cache is {capacity / 2**30:.1f} GiB, but this machine has {memory.total / 2**30:.1f}: "
                "lower it",
                param="kv_cache",
            )
        most = max(memory.available - _SPARE_BYTES, 0)
        if capacity > most:
            text = "kv_cache is %.1f GiB, but %.1f GiB of memory are left: taking those"
            _log.warning(text, capacity / 2**30, most / 2**30)
            capacity = most
    # A model without reuse keeps its state itself: blocks then only count tokens.
    num_blocks = capacity // block_bytes if block_bytes else info.max_model_len
    num_blocks = min(num_blocks, (2**31 - 1) // settings.block_size)  # slots are numbered in 32 bits
    if num_blocks < 2:
        raise ParameterError(
            f"there are {capacity} bytes for KV, but two blocks of this model need {2 * block_bytes}: "
            "raise kv_cache, or free memory",
            param="kv_cache",
        )
    return num_blocks


def _allowances(settings: Settings, block_bytes: int, *, in_tier: bool) -> Allowances:
    """What each tenant may keep, in the arena or in the shared tier."""
    return allowances(
        settings.all_tenants(),
        block_bytes=max(1, block_bytes),
        in_tier=in_tier,
        default_bytes=settings.tenant_shared_tier if in_tier else settings.tenant_kv_cache,
        ttl_s=math.inf if settings.cache_ttl is None else settings.cache_ttl,
    )


def _tier_link(
    settings: Settings, runner: PagedRunner, clock: Clock, observer: Observer
) -> tuple[SharedTier, TierLink] | tuple[None, None]:
    """The shared tier that was asked for. Models of different size share a folder, not a slab."""
    if settings.shared_tier is None:
        return None, None
    import psutil

    from .kv.approximate import ApproximateSlots
    from .kv.codecs.layered import make_codec
    from .kv.hashing import KEY_VERSION
    from .kv.tiers.shared import SharedTier
    from .kv.transfer import TierLink

    codec = make_codec(runner.arena, settings.block_size, settings.tier_codec)
    size = codec.payload_bytes
    if settings.shared_tier_bytes < size:
        raise ParameterError(
            f"shared_tier_bytes is {settings.shared_tier_bytes}, but one block of this model takes {size}: "
            "raise it",
            param="shared_tier_bytes",
        )
    folder = settings.shared_tier / f"blocks-of-{size}-bytes"
    tier = SharedTier.open(
        folder,
        slot_bytes=size,
        capacity_bytes=settings.shared_tier_bytes,
        version=KEY_VERSION,
        clock=clock,
        allowances=_allowances(settings, size, in_tier=True),
    )
    buffered_bytes = max(_WRITE_BACK_BYTES, 2 * size)
    ahead = runner.arena.populate(psutil.virtual_memory().available // 4)
    link = TierLink(
        tier,
        codec,
        settings.block_size,
        clock,
        max_buffered_bytes=buffered_bytes,
        idle=ahead,
        observer=observer,
        approximate=None if codec.is_exact else ApproximateSlots(runner.arena.num_slots),
    )
    return tier, link


def _check_device(name: str, torch: Any) -> None:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch says "not compiled with" by assertion
        reason = str(error).splitlines()[0][:200]
        raise ParameterError(f"cannot compute on device {name!r}: {reason}", param="device") from error


def _dtype(settings: Settings, torch: Any) -> Any:
    if settings.dtype == "auto":
        return torch.float32 if settings.device == "cpu" else "auto"
    if settings.dtype not in ("float32", "bfloat16", "float16"):
        raise ParameterError("dtype must be auto, float32, bfloat16 or float16", param="dtype")
    return getattr(torch, settings.dtype)


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


def _cache_control(given: Any, asked: Any) -> CacheControl:
    """As it may be written: rules, or the text of a header, and beside it whether it is asked for."""
    if not isinstance(asked, bool | None):
        raise ParameterError("cache_answer must be true or false", param="cache_answer", code="invalid_type")
    if isinstance(given, CacheControl):
        return given
    if not isinstance(given, str | None):
        raise ParameterError(
            "cache_control must be text or rules", param="cache_control", code="invalid_type"
        )
    return read_cache_control(given, asked)


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


def _trim_rules(given: Any) -> TrimRules | None:
    """As it may be written: rules, the name of a strategy, or the fields of rules."""
    if given is None or isinstance(given, TrimRules):
        return given
    named = {"strategy": given} if isinstance(given, str) else given
    if not isinstance(named, Mapping):
        raise ParameterError("trim must be a strategy or rules", param="trim", code="invalid_type")
    known = {item.name for item in fields(TrimRules)}
    for name in named:
        if name not in known:
            raise ParameterError(f"trim has no field {name!r}", param="trim")
    return TrimRules(**named)


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
    names = {"retention": "method", "entities": "entities", "pinned_text": "pinned_text"}
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
