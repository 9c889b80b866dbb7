"""Warming while a server already answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ostinato.errors import OstinatoError
from ostinato.runtime import Runtime
from ostinato.types import GenerationRequest, SamplingParams, TokenArray

from .engine import EngineTarget
from .logs import LoggedPrompt, PromptLog, read_log
from .plan import Prefix, choose
from .report import Cache, Expected, expect
from .run import Warmed, warm

_log = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan, what came of it, and what it is expected to bring."""

    log: PromptLog
    prefixes: Sequence[Prefix]
    expected: Expected
    warmed: Warmed


def encode_for(runtime: Runtime) -> Callable[[GenerationRequest], TokenArray]:
    """A request's tokens as this runtime makes them; refuses what it would refuse."""

    def encode(request: GenerationRequest) -> TokenArray:
        return runtime.prepare(replace(request, params=SamplingParams(max_tokens=1))).tokens

    return encode


def usable(prompts: Sequence[LoggedPrompt]) -> list[LoggedPrompt]:
    """Those that a client can ask for: of no tenant whose salt only the server knows."""
    return [each for each in prompts if each.cache_salt is not None]


class BackgroundWarming:
    """A thread that reads a log and warms a runtime. ``on_end`` is told in that thread what came of it."""

    def __init__(
        self,
        runtime: Runtime,
        path: Path,
        *,
        top: int,
        piece_tokens: int,
        policy: str,
        on_end: Callable[[Outcome], None],
    ) -> None:
        self._runtime = runtime
        self._path = path
        self._top = top
        self._policy = policy
        self._on_end = on_end
        self._target = EngineTarget(runtime, piece_tokens=piece_tokens, share=DEFAULT_SHARE)
        self._thread = threading.Thread(target=self._run, name="ostinato-warming", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends it after the piece at hand, and waits for that."""
        self._target.stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            log = read_log(self._path, encode_for(self._runtime))
            prefixes = choose(log.prompts, self._top)
            manager = self._runtime.cache().manager
            warmed = warm(prefixes, self._target)
            cache = Cache(manager.num_blocks, manager.block_size, self._policy, DEFAULT_SHARE)
            expected = expect(log.prompts, prefixes, cache)
        except OstinatoError as error:  # also a shutdown: warming is nobody's request
            _log.warning("warming ended: %s", error)
            return
        self._on_end(Outcome(log, prefixes, expected, warmed))
