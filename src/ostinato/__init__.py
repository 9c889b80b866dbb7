"""Ostinato makes the repeated part of LLM prompts cheap and fast, and never wrong.

>>> import ostinato
>>> engine = ostinato.load("smollm2-135m")          # doctest: +SKIP
>>> engine.chat("Hello!").text                      # doctest: +SKIP

Importing this package imports neither torch nor transformers; loading a model does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import ClientError, ModelError, OstinatoError, ServerError
    from .library import Engine, Reply, load
    from .runtime import TokenizedPrompt, assemble_prompt
    from .types import Conversation, Message, SamplingParams, ToolCall, Usage

__version__ = "0.1.0"

_HOMES = {
    "ClientError": "errors",
    "Conversation": "types",
    "Engine": "library",
    "Message": "types",
    "ModelError": "errors",
    "OstinatoError": "errors",
    "Reply": "library",
    "SamplingParams": "types",
    "ServerError": "errors",
    "Session": "types",
    "TokenizedPrompt": "runtime",
    "ToolCall": "types",
    "Usage": "types",
    "assemble_prompt": "runtime",
    "load": "library",
}

__all__ = [
    "ClientError",
    "Conversation",
    "Engine",
    "Message",
    "ModelError",
    "OstinatoError",
    "Reply",
    "SamplingParams",
    "ServerError",
    "Session",
    "TokenizedPrompt",
    "ToolCall",
    "Usage",
    "__version__",
    "assemble_prompt",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
