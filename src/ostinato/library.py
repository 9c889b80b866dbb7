"""The library's door: ``ostinato.load(...)`` gives an :class:`Engine` to talk to."""

from __future__ import annotations

import asyncio
import operator
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from .config import Settings
from .errors import ParameterError
from .ports import Clock, SystemClock
from .prompt.conversation import conversation_from_dicts, message_as_dict
from .runtime import Prepared, Runtime
from .types import (
    Chunk,
    Conversation,
    FinishReason,
    GenerationRequest,
    Message,
    SamplingParams,
    Session,
    SessionState,
    Usage,
)

if TYPE_CHECKING:
    from .engines.base import RunnerInfo
    from .engines.runners import PagedRunner
    from .engines.worker import Worker
    from .events import Observer
    from .kv.transfer import TierLink
    from .models.store import LocalModel
    from .prompt.template import Template
    from .prompt.tokens import HFTokenizer
    from .request_log import RequestLog

_WRITE_BACK_BYTES = 64 << 20
"""What blocks on their way to the shared tier may take; more are not stored."""

ConversationLike: TypeAlias = Conversation | SequenceOf[Mapping[str, Any] | Message] | str


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None

    @property
    def message(self) -> Message:
        """The answer as a message, to go on with."""
        return Message("assistant", self.text)


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


class Engine:
    """A loaded model with its cache. Thread-safe; close it, or use it as a context manager.

    Keyword arguments of the methods are the fields of :class:`~ostinato.types.SamplingParams`, and
    ``n`` (choices), ``salt`` (keeps this caller's KV apart) and ``session`` (an id, or a
    :class:`~ostinato.types.Session`: a hint of what is worth keeping).
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def chat(self, conversation: ConversationLike, **options: Any) -> Reply:
        """Answer a conversation: messages (dicts or :class:`Message`), or one user message as text.

        Raises:
            ClientError: the conversation or a parameter is wrong.
            EngineError: the engine failed.
        """
        return _collect(self.runtime.iterate(self._prepare(_conversation(conversation), options)))

    def stream(self, conversation: ConversationLike, **options: Any) -> Iterator[Chunk]:
        """The same, piece by piece; the last chunk has ``usage``. Closing the iterator cancels."""
        return self.runtime.iterate(self._prepare(_conversation(conversation), options))

    async def achat(self, conversation: ConversationLike, **options: Any) -> Reply:
        """:meth:`chat` for asyncio."""
        chunks = [chunk async for chunk in self.astream(conversation, **options)]
        return _collect(iter(chunks))

    async def astream(self, conversation: ConversationLike, **options: Any) -> AsyncIterator[Chunk]:
        """:meth:`stream` for asyncio; what is wrong with the request is raised by the first step."""
        # Off the loop: a long prompt takes seconds to tokenise.
        prepared = await asyncio.to_thread(lambda: self._prepare(_conversation(conversation), options))
        async with aclosing(self.runtime.stream(prepared)) as chunks:
            async for chunk in chunks:
                yield chunk

    def complete(self, prompt: str | SequenceOf[int], **options: Any) -> Reply:
        """Continue a raw prompt, given as text or as token ids."""
        return _collect(self.runtime.iterate(self._prepare(_raw_prompt(prompt), options)))

    def session(
        self, id: str, state: SessionState, *, expires_in_s: float | None = None, salt: str = ""
    ) -> bool:
        """Says how a conversation stands, without a request: a hint of what is worth keeping.

        ``closed``: it will not go on. ``idle``: not soon. With ``expires_in_s`` it is closed then. False
        where nothing is known of it (any more).
        """
        return self.runtime.tell_session(Session(id, state, expires_in_s), salt)

    def close(self) -> None:
        """Stop the engine; unfinished requests end with reason "abort"."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _prepare(self, prompt: Conversation | str | tuple[int, ...], options: dict[str, Any]) -> Prepared:
        num_choices = options.pop("n", 1)
        session = options.pop("session", None)
        if isinstance(session, str):
            session = Session(session)
        salt = options.pop("salt", "")
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
        return self.runtime.prepare(GenerationRequest(prompt, params, num_choices, salt, session=session))


def load(model: str | Path | None = None, *, clock: Clock | None = None, **settings: Any) -> Engine:
    """Load a model, fetching it first if need be, and start the engine.

    Args:
        model: alias (``smollm2-135m``), Hugging Face id, folder, or ``.gguf`` file.
        clock: where the time comes from; fix it to fix what a template says of today.
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
    return Engine(build_runtime(Settings.from_environment(os.environ, **settings), clock or SystemClock()))


def build_runtime(settings: Settings, clock: Clock, progress: Any = None) -> Runtime:
    """Put the parts together: model, tokenizer, template, books, arena, engine."""
    from .engines.worker import Worker
    from .models.fetch import fetch
    from .models.store import ModelStore
    from .prompt.template import template_for
    from .prompt.tokens import HFTokenizer

    assert settings.store is not None, "Settings.from_environment sets the store"
    local = fetch(
        settings.model,
        ModelStore(settings.store),
        progress=progress,
        offline=settings.offline,
        token=settings.hf_token,
    )
    nonce = str(secrets.randbelow(9 * 10**19) + 10**19)
    tokenizer = HFTokenizer.from_folder(local.path, nonce=nonce)
    template = template_for(tokenizer, settings.template, clock=clock, nonce=nonce)
    log = _request_log(settings, clock)
    worker = Worker("ostinato-engine")
    try:
        runtime = worker.submit(lambda: _start(settings, local, tokenizer, template, clock, worker)).result()
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
    template: Template | None,
    clock: Clock,
    worker: Worker,
) -> Runtime:
    """Load the model and start the engine; runs in ``worker``, which goes on as the engine."""
    import torch

    from .engines.batching import Batcher, BatchingSettings
    from .engines.hf import load_model
    from .engines.runners import PagedRunner, StatefulRunner
    from .kv.hashing import Namespace
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
    runtime: Runtime

    policy = make_policy(
        settings.policy, num_blocks=num_blocks, block_tokens=settings.block_size, clock=clock
    )
    manager = KVManager(
        num_blocks, settings.block_size, policy=policy, observer=lambda event: runtime.observe(event)
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
    link = None
    if isinstance(runner, PagedRunner):
        link = _tier_link(settings, runner, clock, lambda event: runtime.observe(event))
    batcher = Batcher(
        runner,
        manager,
        clock,
        BatchingSettings(settings.max_batch_tokens, settings.max_sequences, settings.max_waiting),
        observer=lambda event: runtime.observe(event),
        worker=worker,
        tier_link=link,
        sessions=sessions,
        tender=Tender(manager, sessions),
    )
    runtime = Runtime(
        model_name=local.name,
        tokenizer=tokenizer,
        template=template,
        batcher=batcher,
        manager=manager,
        namespace=Namespace(
            weights=local.weights_digest,
            tokenizer=tokenizer.identity,
            template=template.identity if template is not None else "",
            kv_layout=info.kv_layout,
            kv_dtype=info.kv_dtype,
            rotary=info.rotary,
        ),
        info=info,
        eos_token_ids=loaded.eos_token_ids | tokenizer.eos_token_ids,
        clock=clock,
        tier_link=link,
        sessions=sessions,
    )
    return runtime


def _num_blocks(settings: Settings, info: RunnerInfo) -> int:
    """How many blocks the KV capacity makes."""
    block_bytes = info.kv_bytes_per_token * settings.block_size
    # A model without reuse keeps its state itself: blocks then only count tokens.
    num_blocks = settings.kv_cache // block_bytes if block_bytes else info.max_model_len
    num_blocks = min(num_blocks, (2**31 - 1) // settings.block_size)  # slots are numbered in 32 bits
    if num_blocks < 2:
        raise ParameterError(
            f"kv_cache is {settings.kv_cache} bytes, but two blocks of this model need {2 * block_bytes}: "
            "raise it",
            param="kv_cache",
        )
    return num_blocks


def _tier_link(settings: Settings, runner: PagedRunner, clock: Clock, observer: Observer) -> TierLink | None:
    """The shared tier that was asked for. Models of different size share a folder, not a slab."""
    if settings.shared_tier is None:
        return None
    import psutil

    from .kv.codecs.exact import RawCodec
    from .kv.hashing import KEY_VERSION
    from .kv.tiers.shared import SharedTier
    from .kv.transfer import TierLink

    codec = RawCodec(runner.arena.groups, settings.block_size)
    size = codec.payload_bytes
    if settings.shared_tier_bytes < size:
        raise ParameterError(
            f"shared_tier_bytes is {settings.shared_tier_bytes}, but one block of this model takes {size}: "
            "raise it",
            param="shared_tier_bytes",
        )
    folder = settings.shared_tier / f"blocks-of-{size}-bytes"
    tier = SharedTier.open(
        folder, slot_bytes=size, capacity_bytes=settings.shared_tier_bytes, version=KEY_VERSION
    )
    buffered_bytes = max(_WRITE_BACK_BYTES, 2 * size)
    ahead = runner.arena.populate(psutil.virtual_memory().available // 4)
    return TierLink(
        tier,
        codec,
        settings.block_size,
        clock,
        max_buffered_bytes=buffered_bytes,
        idle=ahead,
        observer=observer,
    )


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


def _conversation(given: ConversationLike) -> Conversation:
    if isinstance(given, Conversation):
        return given
    if isinstance(given, str):
        return Conversation((Message("user", given),))
    if isinstance(given, list | tuple):  # answers put back among what was asked
        given = [message_as_dict(message) if isinstance(message, Message) else message for message in given]
    return conversation_from_dicts(given)


def _collect(chunks: Iterator[Chunk]) -> Reply:
    """All pieces of a request as a reply; raises what ended it instead, where something did."""
    texts: dict[int, list[str]] = {}
    tokens: dict[int, list[int]] = {}
    ends: dict[int, Chunk] = {}
    usage = Usage()
    for chunk in chunks:
        texts.setdefault(chunk.choice_index, []).append(chunk.text)
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
            Choice("".join(texts[index]), tuple(tokens[index]), end.finish_reason, end.stop_reason)
        )
    return Reply(tuple(choices), usage)
