"""The one way through: messages → assemble → render → tokenize → look up and hold → plan → run → answer.

Only this module knows the order of the stages. What comes after the tokens (look-up, plan, steps, commit)
happens in the engine's thread, at the moment the request is admitted (:mod:`ostinato.engines.batching`):
a request that waits holds nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Self

import numpy as np

from .answers import Answer, Calls, Choice
from .assembly import Assembled, Assembler, tokenize_conversation
from .delivery import iterate, stream
from .engines.base import RunnerInfo
from .engines.batching import Batcher
from .engines.sequence import Sequence, SequenceStats, TokenSink
from .errors import (
    ClientError,
    EngineError,
    ParameterError,
    PromptTooLongError,
    ShuttingDownError,
)
from .events import AnswerOutcome, Event, MoveVerified, Observer, RequestFinished
from .kv.hashing import Namespace
from .kv.keeper import CacheSummary, Keeper, PurgeReport
from .kv.lease import Lease
from .kv.manager import CacheView, KVManager
from .kv.pins import Pin
from .kv.sessions import Sessions
from .kv.survey import Surveyor
from .kv.terms import Selection, Terms, prompt_id
from .kv.transfer import TierLink, TierReport
from .parameters import check_request
from .ports import Clock, Tokenizer
from .prompt.conversation import ROLES
from .prompt.detokenize import Detokenizer
from .prompt.registry import PromptRegistry
from .prompt.rules import CustomRole
from .prompt.template import Template
from .prompt.tokens import HFTokenizer
from .protect import check_retention, keep_of
from .ranking import BestOf
from .retention.keeping import Keep, Keeping
from .reuse.blend import Repair
from .types import (
    Chunk,
    Conversation,
    FinishReason,
    GenerationRequest,
    Message,
    Retention,
    Reuse,
    Reused,
    SamplingParams,
    Served,
    Session,
    TokenArray,
    Usage,
)
from .verifying import Unheard, Watch, check_reuse, compare, followed_by, reused_of

_log = logging.getLogger(__name__)

_PIN_TRIES = 3
_MOST_LENGTHS = 64
"""A sequence whose positions are renumbered may be so many times as long as the model's length."""


# ---------------------------------------------------------------- assembly


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt with what the cache already holds of it; holds that until it is released.

    Attributes:
        input_ids: all token ids of the prompt, int32.
        cache_slots: the slots of the first ``prefix_len`` tokens' KV, int32, in order.
        prefix_len: how many tokens were found; at most one less than the prompt has.
        new_token_start: index of the first token to compute (equals ``prefix_len``).
    """

    input_ids: TokenArray
    cache_slots: TokenArray
    prefix_len: int
    new_token_start: int
    lease: Lease

    def release(self) -> None:
        """Let go of what is held. Releasing twice is fine."""
        self.lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def assemble_prompt(
    conversation: Conversation, tokenizer: Tokenizer, cache: CacheView, template: Template
) -> TokenizedPrompt:
    """From messages to token ids, and hold what ``cache`` has of them.

    Use the result as a context manager (or call ``release``): what it holds cannot be evicted until then.

    Raises:
        ConversationError: a message breaks a rule; ``index`` says which.
        TemplateError: the template refuses the conversation.
    """
    tokens = tokenize_conversation(conversation, tokenizer, template, scope=cache.namespace.salt)
    lease = cache.acquire(tokens)
    found = lease.prefix_len
    return TokenizedPrompt(tokens, lease.slots(0, found), found, found, lease)


# ---------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed every check, as tokens. Its prompt is what was rendered of it.

    ``keep``: how it stays within a budget of KV that it is going to exceed. ``repair``: what is computed
    again where it may be answered with moved KV, or is compared with that.
    """

    request: GenerationRequest
    assembled: Assembled
    max_new_tokens: int
    keep: Keep | None = None
    repair: Repair | None = None

    @property
    def tokens(self) -> TokenArray:
        return self.assembled.tokens

    @property
    def namespace(self) -> Namespace:
        return self.assembled.namespace


@dataclass(frozen=True, slots=True)
class Health:
    """How the engine is. Blocks are of KV: held by requests, cached and evictable, or free."""

    ok: bool
    detail: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_held_blocks: int
    num_evictable_blocks: int
    num_free_blocks: int
    num_pinned_blocks: int = 0
    tier: TierReport | None = None


class RequestHandle:
    """A request under way."""

    __slots__ = ("_batcher", "_sequences")

    outcome: AnswerOutcome | None = None
    """No response cache was asked."""
    served: Served | None = None

    def __init__(self, batcher: Batcher, sequences: list[Sequence]) -> None:
        self._batcher = batcher
        self._sequences = sequences

    def cancel(self) -> None:
        """End it within one step. Unfinished choices get their last chunk with reason "abort"."""
        self._batcher.cancel(self._sequences)


@dataclass(frozen=True, slots=True)
class Ledger:
    """What memory goes to, and what it holds. Bytes and tokens.

    ``kv_bytes_per_token`` 0: the model keeps its state itself.
    """

    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    max_model_len: int

    def __str__(self) -> str:
        lines = [f"weights    {_size(self.weight_bytes)}"]
        if self.kv_bytes_per_token:
            lines += [
                f"KV         {_size(self.kv_bytes)}, {_size(self.kv_bytes_per_token)} a token: "
                f"{self.kv_tokens:,} tokens",
                f"that is    {self.kv_tokens // self.max_model_len} conversations of {self.max_model_len:,} "
                f"tokens at once, {self.kv_tokens // 1024} of 1,024",
            ]
        return "\n".join(lines)


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if size >= 100 or unit == "B" else f"{size:,.1f} {unit}"


class Runtime:
    """Takes requests, gives answers. Thread-safe; one per model.

    ``observers`` hear what happens; ``on_close`` is called once the engine has stopped, the last one first.
    """

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: Tokenizer,
        assembler: Assembler,
        batcher: Batcher,
        manager: KVManager,
        info: RunnerInfo,
        eos_token_ids: frozenset[int],
        clock: Clock,
        tier_link: TierLink | None = None,
        sessions: Sessions | None = None,
        keeper: Keeper | None = None,
        deadline_s: float = inf,
        revision: str = "",
        budgets: Mapping[str, Retention] | None = None,
        reuse: Mapping[str, Reuse] | None = None,
        watch: Watch | None = None,
    ) -> None:
        """``tier_link``: the engine's own, to report on; closed with the engine.

        ``revision`` is a digest of what decides answers beside the namespace: versions, device,
        configuration. ``budgets``: by tenant, for the KV of requests that bring none; ``""`` is everyone
        else's. ``reuse``: likewise, what KV that is no prefix may be used; ``watch`` verifies some of that.

        Raises:
            ParameterError: such a budget is none, or the model cannot be kept within one; or it has no KV
            that
                could be moved.
        """
        for retention in (budgets or {}).values():
            check_retention(retention, info, model_name)
        for wanted in (reuse or {}).values():
            check_reuse(wanted, info, model_name)
        self.model_name = model_name
        self.created_s = int(clock.now())
        self.info = info
        self.tokenizer = tokenizer
        self.assembler = assembler
        self.revision = revision
        self.deadline_s = deadline_s
        self.observers: list[Observer] = []
        self.on_close: list[Callable[[], None]] = []
        self._batcher = batcher
        self._manager = manager
        self._keeper = keeper or Keeper(manager, None, manager.block_size * info.kv_bytes_per_token)
        self._sessions = sessions
        self.eos_token_ids = eos_token_ids
        self._tier_link = tier_link
        self._budgets = dict(budgets or {})
        self._reuse = dict(reuse or {})
        self.watch = watch or Watch()
        self._accepting = True
        self._active: set[RequestHandle] = set()
        self._idle = threading.Condition()

    @property
    def ledger(self) -> Ledger:
        num_tokens = self._manager.num_blocks * self._manager.block_size
        each = self.info.kv_bytes_per_token
        return Ledger(self.info.weight_bytes, each * num_tokens, each, num_tokens, self.max_model_len)

    @property
    def max_model_len(self) -> int:
        """The most tokens a sequence can have: what the model takes and the KV that is not pinned holds."""
        return min(self.info.max_model_len, self._manager.num_usable_tokens)

    @property
    def template(self) -> Template | None:
        """How conversations are written down at present."""
        return self.assembler.template

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that messages may have at present."""
        template = self.template
        return ROLES if template is None else tuple(template.roles)

    @property
    def prompts(self) -> PromptRegistry:
        """The named prompts that requests may use, and what the cache had of each."""
        return self.assembler.prompts

    def register_role(self, role: CustomRole) -> None:
        """Know one more role; see :meth:`~ostinato.assembly.Assembler.register_role`.

        Raises:
            TemplateError: the model has no template.
        """
        self.assembler.register_role(role)

    def cache(self, salt: str = "") -> CacheView:
        """What :func:`assemble_prompt` takes: this model's cache for one salt."""
        return CacheView(self._manager, self.assembler.namespace.with_salt(salt))

    def tell_session(self, session: Session, salt: str = "") -> bool:
        """Says how a conversation stands, without a request; false where nothing is known of it."""
        if self._sessions is None:
            return False
        return self._sessions.say(self.assembler.namespace.with_salt(salt), session)

    @property
    def weights_digest(self) -> str:
        """Of the model that is served."""
        return self.assembler.namespace.weights

    # ------------------------------------------------------------ operators

    def pin(self, request: GenerationRequest, ttl_s: float = inf) -> Pin:
        """Keep the beginning of whatever begins with this request's prompt; what is not there is computed.

        Waits for that, like any request. Of a conversation, without what the template writes for the answer.

        Raises:
            ClientError: what is wrong with the request; ``PinRefusedError``: more than may be pinned.
            EngineError: it could not be computed.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        prepared = self.prepare(replace(request, params=params, num_choices=1, is_warming=True))
        tokens, size = self._shared_beginning(request, prepared), self._manager.block_size
        if len(tokens) < size:
            raise ParameterError(
                f"{len(tokens)} tokens are less than a block of {size}, and only whole blocks are pinned",
                param="prompt",
            )
        terms = terms_of(prepared)
        for _ in range(_PIN_TRIES):
            for chunk in self.iterate(prepared):
                if chunk.error is not None:
                    raise chunk.error
            pin = self._manager.pin(prepared.namespace, tokens, ttl_s=ttl_s, terms=terms)
            if pin is not None and pin.num_tokens == len(tokens) // size * size:
                return pin
        raise EngineError("the prompt was evicted as soon as it was computed: there is no room to pin it")

    def _shared_beginning(self, request: GenerationRequest, prepared: Prepared) -> TokenArray:
        """The tokens that a conversation has in common with the same one going on."""
        conversation = prepared.request.prompt
        if not isinstance(conversation, Conversation):
            return prepared.tokens
        messages = (*conversation.messages, Message("user", "."))
        longer = replace(prepared.request, prompt=replace(conversation, messages=messages))
        try:
            other = self.assembler.assemble(longer, self.info.max_model_len).tokens
        except ClientError:  # nothing can follow there: then it is what it is
            return prepared.tokens
        length = min(len(other), len(prepared.tokens))
        parts = np.flatnonzero(other[:length] != prepared.tokens[:length])
        return prepared.tokens[: int(parts[0]) if len(parts) else length]

    def unpin(self, pin_id: str) -> bool:
        """Let go of a pin; false when there is none of this name."""
        return self._manager.unpin(pin_id)

    def purge(self, selection: Selection) -> PurgeReport:
        """Drop what is selected, here and in the shared tier: :meth:`~ostinato.kv.keeper.Keeper.purge`."""
        return self._keeper.purge(selection)

    def cache_summary(self) -> CacheSummary:
        """What is kept now, and for whom."""
        return self._keeper.summary()

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of KV."""
        return self._manager.block_size

    @property
    def words(self) -> HFTokenizer:
        """The tokenizer with all it can, for whoever compares prompts."""
        return self.assembler.tokenizer

    @property
    def surveyor(self) -> Surveyor:
        """Looks at the prefix index, for people."""
        return self._manager.surveyor

    @property
    def on_purge(self) -> list[Callable[[Selection], None]]:
        """What forgets whatever is purged, where something is kept beside the caches."""
        return self._manager.on_purge

    def ttl_s(self, request: GenerationRequest) -> float:
        """For how long what is kept of a request may be found; infinite: there is no limit."""
        ttl_s = inf if request.cache_ttl_s is None else request.cache_ttl_s
        return self._manager.ttl_s(self.assembler.namespace.with_salt(request.salt), Terms(ttl_s))

    def warm(self, request: GenerationRequest) -> Usage:
        """Have a request's prompt computed, so that its beginning is found from now on; waits for that.

        Raises:
            ClientError: what is wrong with the request.
            EngineError: it could not be computed.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        prepared = self.prepare(replace(request, params=params, num_choices=1, best_of=None, is_warming=True))
        usage = Usage()
        for chunk in self.iterate(prepared):
            if chunk.error is not None:
                raise chunk.error
            usage = chunk.usage or usage
        return usage

    def origins(self, request: GenerationRequest) -> TokenArray | None:
        """The message that each token of a conversation's prompt is of, -1 of none.

        ``None``: it is no conversation, or it cannot be told. It renders the prompt anew.

        Raises:
            ClientError: the request is none any more.
        """
        if not isinstance(request.prompt, Conversation):
            return None
        assembled = self.prepare(request).assembled
        return self.assembler.owners(assembled, continue_final_message=request.continue_final_message)

    def observe(self, event: Event) -> None:
        """Pass an event on to every observer. One that raises is logged: requests do not depend on it."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception:  # noqa: BLE001 - a border too: foreign code, called amid our own bookkeeping
                _log.exception("an observer failed on %s", type(event).__name__)

    # ------------------------------------------------------------ from messages to tokens

    def prepare(self, request: GenerationRequest) -> Prepared:
        """Check, render and tokenise. CPU work without waiting; call it off an event loop.

        Raises:
            ClientError: what is wrong with the request, by name.
        """
        check_request(request, self.info.vocab_size)
        limit = self.max_model_len
        request, repair = self._with_defaults(request)
        if request.retention is not None:
            check_retention(request.retention, self.info, self.model_name)
            limit = self.info.max_model_len * (_MOST_LENGTHS if request.retention.renumber else 1)
        assembled = self.assembler.assemble(request, limit)
        tokens = assembled.tokens
        if len(tokens) == 0:
            raise ParameterError("the prompt is empty: give at least one token", param="prompt")
        if (largest := int(tokens.max(initial=0))) >= self.info.vocab_size:  # it would fail the whole step
            raise ParameterError(
                f"the prompt has token {largest}, but the model's weights know only {self.info.vocab_size}: "
                "its tokenizer has more tokens than it was made for",
                param="prompt",
            )
        if len(tokens) >= limit:
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens; {self._longest(limit)}, answer included: shorten it",
                num_tokens=len(tokens),
                max_tokens=limit,
            )
        wanted = request.params.max_tokens
        if wanted is not None and len(tokens) + wanted > limit:
            raise PromptTooLongError(
                f"{self._longest(limit)}, but {len(tokens)} in the prompt and {wanted} in the answer were "
                f"asked for: lower max_tokens to {limit - len(tokens)} or shorten the prompt",
                num_tokens=len(tokens) + wanted,
                max_tokens=limit,
            )
        max_new = min(limit - len(tokens), self.info.max_model_len) if wanted is None else wanted
        keep = None
        if request.retention is not None:
            most = self._manager.num_usable_tokens
            keep = keep_of(request, assembled, self.assembler, self.info, max_new, most)
        if assembled.conversation is not None:
            request = replace(request, prompt=assembled.conversation, named_prompt=None, trim=None, pinned=())
        return Prepared(request, assembled, max_new, keep, repair)

    def _with_defaults(self, request: GenerationRequest) -> tuple[GenerationRequest, Repair | None]:
        """A request with the KV budget or the reuse of its tenant, and what is repaired of it.

        What is asked for to be kept is exact.
        """
        tenant = self.assembler.namespace.with_salt(request.salt).tenant
        if request.is_warming:
            return request, None
        if request.retention is not None and request.reuse is not None and request.reuse.mode != "exact":
            raise ParameterError(
                "KV cannot be moved within a KV budget: leave one of them out", param="reuse"
            )
        if request.retention is None and (request.reuse is None or request.reuse.mode == "exact"):
            request = replace(request, retention=self._budgets.get(tenant, self._budgets.get("")))
        if request.retention is None and request.reuse is None:
            request = replace(request, reuse=self._reuse.get(tenant, self._reuse.get("")))
        if request.reuse is None:
            return request, None
        return request, check_reuse(request.reuse, self.info, self.model_name)

    def _longest(self, limit: int) -> str:
        model = self.info.max_model_len
        if limit == model:
            return f"this model takes at most {limit} tokens"
        return f"there is KV for at most {limit} tokens at once (the model takes {model})"

    def num_prompt_tokens(self, request: GenerationRequest) -> int:
        """How many tokens a request's prompt has. Raises :class:`ClientError` as :meth:`prepare` does."""
        return len(self.prepare(request).tokens)

    # ------------------------------------------------------------ answers

    def start(self, prepared: Prepared, deliver: Callable[[Chunk], None]) -> RequestHandle:
        """Accept a request. ``deliver`` gets its chunks in the engine's thread: it must not wait or raise.

        Raises:
            QueueFullError: too many requests wait.
            ParameterError: it asks for more answers than may wait.
            ShuttingDownError: no more requests are taken.
        """
        request, params = prepared.request, prepared.request.params
        is_verifying = (
            prepared.repair is not None and request.reuse is not None and request.reuse.mode == "verify"
        )
        repair = None if is_verifying or self.watch.is_off else prepared.repair
        is_watched = repair is not None and self.watch.is_on
        if is_verifying and params.seed is None:
            params = replace(params, seed=secrets.randbits(48))  # both draw alike
        sequences: list[Sequence] = []
        handle: RequestHandle

        def done(reason: FinishReason, usage: Usage) -> None:
            with self._idle:
                self._active.discard(handle)
                self._idle.notify_all()
            if usage.prompt_name and not request.is_warming:
                self.prompts.record(usage.prompt_name, usage)
            space = prepared.namespace.digest
            self.observe(RequestFinished(reason, usage, request, prepared.tokens, space))
            if is_watched and usage.reuse is not None and usage.reuse.may_differ and self.watch.wants():
                self._watch_over(prepared, sequences[0])

        def reused(stats: SequenceStats) -> Reused | None:
            if is_verifying:
                return reused_of(first[0].stats(0.0), "verify", compare(sequences[0], first[0]))
            return None if prepared.repair is None else reused_of(stats, "moved")

        num_computed = request.best_of or request.num_choices
        if num_computed > request.num_choices:
            deliver = BestOf(request.num_choices, deliver, with_logprobs=params.logprobs is not None).take
            params = replace(params, logprobs=params.logprobs or 0)
        method = "" if request.retention is None else request.retention.label
        answer = Answer(prepared.assembled, num_computed, deliver, done, method, reused)
        keep = self.assembler.keeper(prepared.assembled)
        for index in range(num_computed):
            seed = None if params.seed is None else params.seed + index
            calls = Calls.of(prepared.assembled, self.tokenizer, index)
            detokenizer = Detokenizer(self.tokenizer, params.stop)
            sink = Choice(index, answer, detokenizer, calls, keep)
            told = index == 0 and (is_verifying or is_watched)
            sequences.append(
                self._sequence(prepared, replace(params, seed=seed), sink, num_computed, repair, told)
            )
        first = sequences
        if is_verifying:
            unheard = Unheard(Detokenizer(self.tokenizer, params.stop), followed_by(sequences, self._submit))
            first = [self._sequence(prepared, params, unheard, 1, prepared.repair, True)]
        handle = RequestHandle(self._batcher, sequences if first is sequences else [*first, *sequences])
        with self._idle:
            if not self._accepting:
                raise ShuttingDownError("the server is shutting down: send the request elsewhere")
            self._active.add(handle)
        try:
            self._batcher.submit(first)
        except Exception:
            with self._idle:
                self._active.discard(handle)
                self._idle.notify_all()
            raise
        return handle

    def _sequence(
        self,
        prepared: Prepared,
        params: SamplingParams,
        sink: TokenSink,
        num_choices: int,
        repair: Repair | None,
        wants_distribution: bool,
    ) -> Sequence:
        """One of a request's sequences."""
        request = prepared.request
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_token_ids
        return Sequence(
            prepared.tokens,
            params,
            prepared.namespace,
            sink,
            max_new_tokens=prepared.max_new_tokens,
            stop_token_ids=stop_ids,
            num_choices=num_choices,
            offers_tools=isinstance(request.prompt, Conversation) and bool(request.prompt.tools),
            session=request.session,
            terms=terms_of(prepared),
            deadline_s=self.deadline_s if request.deadline_s is None else request.deadline_s,
            keeping=None if prepared.keep is None else self._keeping(prepared.keep),
            repair=repair,
            wants_distribution=wants_distribution,
        )

    def _submit(self, sequences: list[Sequence]) -> None:
        self._batcher.submit(sequences)

    def _watch_over(self, prepared: Prepared, moved: Sequence) -> None:
        """Computes the first token of what was answered with moved KV exactly, when there is time for it."""

        def compared(reason: FinishReason) -> None:
            if (verified := compare(exact[0], moved)) is not None:
                self.watch.note(verified)
                is_same = verified.first_difference is None
                self.observe(MoveVerified(verified.kl, is_same, self.watch.is_off))

        params = prepared.request.params
        sink = Unheard(Detokenizer(self.tokenizer, ()), compared)
        exact = [self._sequence(replace(prepared, max_new_tokens=1), params, sink, 1, None, True)]
        followed_by(exact, self._submit)("stop")

    def _keeping(self, keep: Keep) -> Keeping:
        return Keeping(keep, len(self.info.kv_heads), self.info.kv_heads[0])

    def iterate(self, prepared: Prepared) -> Iterator[Chunk]:
        """Start a request and yield its chunks; closing the iterator cancels it."""
        return iterate(lambda deliver: self.start(prepared, deliver))

    def stream(self, prepared: Prepared) -> AsyncGenerator[Chunk, None]:
        """The same for asyncio; closing the iterator or cancelling its task cancels the request at once."""
        return stream(lambda deliver: self.start(prepared, deliver))

    # ------------------------------------------------------------ life

    def health(self) -> Health:
        load, manager = self._batcher.load(), self._manager
        ok = self._accepting and self._batcher.is_alive
        detail = "ok" if ok else ("shutting down" if not self._accepting else "the engine has stopped")
        return Health(
            ok=ok,
            detail=detail,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_blocks=manager.num_blocks,
            num_held_blocks=manager.num_held_blocks,
            num_evictable_blocks=manager.num_evictable_blocks,
            num_free_blocks=manager.num_free_blocks,
            num_pinned_blocks=manager.num_pinned_blocks,
            tier=None if self._tier_link is None else self._tier_link.report(),
        )

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let what runs finish for ``timeout_s`` seconds, then abort the rest."""
        with self._idle:
            self._accepting = False
        await asyncio.to_thread(self._wait_idle, timeout_s)
        with self._idle:
            left = list(self._active)
        for handle in left:
            handle.cancel()
        await asyncio.to_thread(self._wait_idle, None)

    def _wait_idle(self, timeout_s: float | None) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._active, timeout_s)

    def close(self) -> None:
        """Stop the engine; unfinished requests end with reason "abort"."""
        with self._idle:
            self._accepting = False
        self._batcher.close()
        while self.on_close:
            self.on_close.pop()()


def terms_of(prepared: Prepared) -> Terms:
    """For how long and under which name what is kept of a request is kept."""
    ttl_s = prepared.request.cache_ttl_s
    return Terms(inf if ttl_s is None else float(ttl_s), prompt_id(prepared.assembled.prompt_name))
