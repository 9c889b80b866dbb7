"""Warming the engine in this process; what its shared tier has is loaded there, not computed."""

from __future__ import annotations

import threading
from typing import Final

from ostinato.errors import EngineError
from ostinato.kv.transfer import TierReport
from ostinato.runtime import Runtime
from ostinato.types import GenerationRequest, SamplingParams, TokenArray

from .plan import Prefix
from .report import Room
from .run import Had

_POLL_S: Final = 0.05


class EngineTarget:
    """Asks for a prefix and one token after it, in pieces of an engine step, while nobody else asks.

    A request that comes meanwhile shares a step with the piece at hand and then goes first. ``stop`` ends
    the warming after that piece.
    """

    def __init__(self, runtime: Runtime, *, piece_tokens: int, share: float, fill_tier: bool = False) -> None:
        """``fill_tier``: the room that counts is the shared tier's, and everything has to arrive there."""
        manager = runtime.cache().manager
        self.piece_tokens = piece_tokens
        self.max_tokens = runtime.max_model_len - 1
        self.stop = threading.Event()
        self._runtime = runtime
        self._fill_tier = fill_tier
        self._block_bytes = runtime.info.kv_bytes_per_token * manager.block_size
        self.num_tier_blocks = self._tier().capacity_bytes // self._block_bytes if fill_tier else 0
        num_blocks = self.num_tier_blocks if fill_tier else manager.num_blocks
        self._room = Room(int(num_blocks * share), manager.block_size)

    def wait_for_idle(self) -> bool:
        while not self.stop.is_set():
            health = self._runtime.health()
            if not health.ok:
                return False
            if not health.num_running and not health.num_waiting:
                return True
            self.stop.wait(_POLL_S)
        return False

    def num_cached(self, prefix: Prefix) -> int:
        view = self._runtime.cache(prefix.salt)
        return view.manager.peek(view.namespace, prefix.tokens)

    def room_until(self, start: int) -> int:
        if not self._fill_tier:
            return self._room.until(start, self._runtime.cache().manager.num_free_blocks)
        tier = self._tier()
        return self._room.until(start, (tier.capacity_bytes - tier.used_bytes) // self._block_bytes)

    def _tier(self) -> TierReport:
        tier = self._runtime.health().tier
        assert tier is not None, "a tier that is not there was to be filled"
        return tier

    def settle(self) -> None:
        """Waits until what was computed has arrived in the tier."""
        while self._tier().buffered_bytes and self._runtime.health().ok:
            self.stop.wait(_POLL_S)

    def have(self, prefix: Prefix, num_tokens: int) -> Had:
        tokens = prefix.tokens[:num_tokens]
        found = self._num_found(prefix.salt, tokens)
        request = GenerationRequest(
            tuple(tokens.tolist()),
            SamplingParams(max_tokens=1, temperature=0.0),
            salt=prefix.salt,
            is_warming=True,
        )
        last = None
        for chunk in self._runtime.iterate(self._runtime.prepare(request)):
            last = chunk
        assert last is not None, "a request ended without an end"
        assert last.usage is not None, "a request ended without its usage"
        if last.error is not None:
            raise last.error
        if last.finish_reason == "abort":
            raise EngineError("the engine stopped while it was being warmed")
        usage = last.usage
        loaded = max(0, usage.cached_tokens - found)
        self._room.take(usage.cached_tokens if self._fill_tier else found, num_tokens)
        return Had(found, loaded, usage.prompt_tokens - usage.cached_tokens)

    def _num_found(self, salt: str, tokens: TokenArray) -> int:
        view = self._runtime.cache(salt)
        return view.manager.peek(view.namespace, tokens)
