"""What the server needs of a runtime. :class:`ostinato.runtime.Runtime` is one; so is any other that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..events import AnswerOutcome, Observer
from ..observe import Load
from ..ports import Tokenizer
from ..types import Chunk, GenerationRequest, Served, Session


class Handle(Protocol):
    """A request that was accepted."""

    @property
    def outcome(self) -> AnswerOutcome | None:
        """What the response caches made of it; ``None`` where there are none."""

    @property
    def served(self) -> Served | None:
        """What is known of the kept answer that it gets."""

    def cancel(self) -> None:
        """End it now, from any thread. Of a request that has ended: nothing."""


class Health(Load, Protocol):
    """Is it well, and how busy is it?"""

    @property
    def ok(self) -> bool: ...

    @property
    def detail(self) -> str: ...


class Backend(Protocol):
    """The runtime, seen from the server. What ``prepare`` returns is the runtime's own affair."""

    @property
    def model_name(self) -> str: ...

    @property
    def revision(self) -> str:
        """Beside model and tokenizer, what decides answers: with another one they may be others."""

    @property
    def created_s(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def observers(self) -> list[Observer]: ...

    def prepare(self, request: GenerationRequest, /) -> Any:
        """Validate, render, tokenise. Called in a thread. Raises :class:`~ostinato.errors.ClientError`."""

    def num_prompt_tokens(self, request: GenerationRequest, /) -> int:
        """How long its prompt is. Called in a thread; nothing is computed, looked up or kept. Raises as
        :meth:`prepare` does."""

    def start(self, prepared: Any, sink: Callable[[Chunk], None], /) -> Handle:
        """Accept it; from now on ``sink`` gets its chunks, from the engine's thread, and must not wait.

        Raises :class:`~ostinato.errors.QueueFullError` or :class:`~ostinato.errors.ShuttingDownError`.
        """

    def tell_session(self, session: Session, salt: str = "", /) -> bool:
        """How a session stands, whose requests had this salt; false where nothing is known of it."""

    def health(self) -> Health: ...

    async def drain(self, timeout_s: float, /) -> None:
        """Accept nothing more; when the time is up, end what still runs. A second call may shorten it."""
