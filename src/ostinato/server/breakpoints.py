"""Breakpoints on our own KV: what is reported of them, and KV that is pinned for their time.

The usage of an answer is what really happened: ``cache_read_input_tokens`` were read from KV, and what was
written up to the last breakpoint is ``cache_creation_input_tokens``. In strict mode the rules of a vendor's
model decide instead, over this server's token counts, so that clients can be tested against them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from ..errors import OstinatoError
from ..ports import Tokenizer
from ..providers.rules import CacheRules
from ..providers.shape import Prompt, chain_of
from ..providers.simulator import Asked, VendorCache, check, with_automatic
from ..providers.wire_anthropic import read_request
from ..types import GenerationRequest, Usage
from .admin import Kept
from .wire import Json

if TYPE_CHECKING:
    from .anthropic import MessagesRequest

logger = logging.getLogger("ostinato.server")

MAX_SCOPES: Final = 1024


class Breakpoints:
    """Those of one request. Without any, everything that was not read is plain input."""

    def __init__(
        self,
        prompt: Prompt | None,
        rules: CacheRules,
        *,
        strict: StrictCache | None = None,
    ) -> None:
        self._strict = strict
        # In strict mode: by the vendor's rules, as of now.
        self._asked = strict.ask(prompt) if strict is not None and prompt is not None else None
        self.prompt = prompt
        # Tokens up to the last breakpoint of every time to live.
        self._ends: dict[str, int] = {}
        if prompt is not None:
            chain = chain_of(prompt, rules)
            tokens = dict(zip(chain.indices, chain.tokens, strict=True))
            for index, ttl in prompt.markers.items():
                self._ends[ttl] = max(self._ends.get(ttl, 0), tokens.get(index, 0))

    def begun(self) -> None:
        """The answer has begun: what the request writes can be read."""
        if self._strict is not None and self._asked is not None:
            assert self.prompt is not None, "what was asked for"
            self._strict.commit(self.prompt.scope, self._asked)

    def expected(self) -> Json:
        """What is known at the start of a stream."""
        if self._asked is None:
            return _object(0, 0, {}, 0)
        use = self._asked.use
        return _object(use.uncached, use.read, use.written, 0)

    def usage_object(self, usage: Usage) -> Json:
        """Anthropic's counts: they add up to the prompt's tokens."""
        if self._asked is not None:
            use = self._asked.use
            left = max(0, usage.prompt_tokens - use.read - use.num_written)
            return _object(left, use.read, use.written, usage.completion_tokens)
        read, billed = usage.cached_tokens, usage.cached_tokens
        written: dict[str, int] = {}
        for ttl in ("1h", "5m"):
            end = min(self._ends.get(ttl, 0), usage.prompt_tokens)
            if end > billed:
                written[ttl], billed = end - billed, end
        return _object(usage.prompt_tokens - billed, read, written, usage.completion_tokens)


def _object(uncached: int, read: int, written: Mapping[str, int], output: int) -> Json:
    return {
        "input_tokens": uncached,
        "cache_creation_input_tokens": sum(written.values()),
        "cache_read_input_tokens": read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": written.get("5m", 0),
            "ephemeral_1h_input_tokens": written.get("1h", 0),
        },
        "output_tokens": output,
    }


class StrictCache:
    """A vendor's cache for every tenant, by the rules of one model."""

    def __init__(self, rules: CacheRules) -> None:
        self.rules = rules
        self._caches: OrderedDict[str, VendorCache] = OrderedDict()
        self._lock = threading.Lock()

    def ask(self, prompt: Prompt) -> Asked:
        """Raises :class:`~ostinato.errors.ParameterError` where the vendor would."""
        with self._lock:
            cache = self._caches.pop(prompt.scope, None) or VendorCache(self.rules, capacity=100_000)
            self._caches[prompt.scope] = cache
            if len(self._caches) > MAX_SCOPES:
                self._caches.popitem(last=False)
            return cache.ask(prompt, time.monotonic())

    def commit(self, scope: str, asked: Asked) -> None:
        """The answer to it has begun."""
        with self._lock:
            if (cache := self._caches.get(scope)) is not None:
                cache.commit(asked, time.monotonic())


class BreakpointReader:
    """Finds breakpoints in request bodies; counts blocks by this server's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, rules: CacheRules, strict: StrictCache | None) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._strict = strict

    def read(self, body: Mapping[str, Any], *, scope: str) -> Breakpoints:
        """Raises :class:`~ostinato.errors.ParameterError` for breakpoints that Anthropic refuses."""
        if self._strict is None and b'"cache_control"' not in orjson.dumps(body):
            return Breakpoints(None, self._rules)
        prompt = read_request(body, self._count, scope=scope)
        if self._strict is not None:
            return Breakpoints(prompt, self._strict.rules, strict=self._strict)
        prompt = with_automatic(prompt, self._rules)
        check(prompt, self._rules)
        return Breakpoints(prompt, self._rules)

    def _count(self, data: bytes) -> int:
        """Of a block's text; of anything else its JSON, as templates write it."""
        part = orjson.loads(data)
        text = part.get("text") if part.get("type") == "text" else None
        if part.get("type") == "tool_result" and isinstance(part.get("content"), str):
            text = part["content"]
        return len(self._tokenizer.encode(text if isinstance(text, str) else data.decode()))


class Pinner:
    """Has the KV before a request's breakpoints pinned once it was answered, as far as there is room."""

    def __init__(self, kept: Kept, rules: CacheRules) -> None:
        self._kept = kept
        self._rules = rules

    def pins(
        self, fields: MessagesRequest, breakpoints: Breakpoints, generation: GenerationRequest
    ) -> Callable[[], None] | None:
        """What to do after the answer; ``None``: there is nothing to pin.

        A breakpoint inside a message keeps what stands before that message: only whole messages are pinned.
        """
        prompt = breakpoints.prompt
        if prompt is None:
            return None
        ends: dict[int, str] = {}
        for index, ttl in prompt.markers.items():
            block = prompt.blocks[index]
            if block.level == "messages" and isinstance(block.path[1], int):
                ends[block.path[1] + block.ends_message] = ttl
        if (num_messages := max(ends, default=0)) == 0:
            return None
        shorter = fields.model_copy(update={"messages": fields.messages[:num_messages], "stream": None})
        pinned = replace(
            shorter.generation(request_id="", key_salt=""), salt=generation.salt, is_warming=True
        )
        ttl_s = self._rules.lifetime(ends[num_messages]).seconds

        def pin() -> None:
            try:
                self._kept.pin(pinned, ttl_s)
            except OstinatoError as error:  # no room, shutting down: the answer is sent already
                logger.info("a breakpoint is not pinned: %s", error)

        return pin
