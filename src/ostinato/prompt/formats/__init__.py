"""Chat formats as code, by name.

Each is one small function that writes a conversation as segments. What it passes to
:func:`~ostinato.prompt.formats.common.marker` becomes exactly that token; everything else is text.
"""

from __future__ import annotations

from . import chatml, harmony, llama, mistral, plain, turns
from .common import Format

FORMATS: dict[str, Format] = {
    chat_format.name: chat_format
    for module in (chatml, llama, mistral, turns, plain, harmony)
    for chat_format in module.FORMATS
}

__all__ = ["FORMATS", "Format"]
