"""Documents that prompts will have in them, to be computed once: for retrieval, wherever they then stand.

Each is computed as a user's text behind the system text it will stand behind, or behind what the template
begins with. Alone it would not do: the first tokens of a sequence get attention for being first, and a
document whose own first tokens had that role keeps it when it is moved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from ostinato.errors import TraceError
from ostinato.types import Conversation, GenerationRequest, Message, TokenArray, num_common

from .logs import Encode
from .plan import Prefix

SUFFIXES: Final = frozenset({".txt", ".md", ".rst", ".html", ".csv", ".json"})
_ENDINGS: Final = ("\n\nWhat", "\n\nan end")  # so that what they have in common ends with the document


def read_documents(folder: Path, encode: Encode, *, system: str = "") -> list[Prefix]:
    """The documents in a folder, and in those below it, in order of their names; empty ones are left out.

    Raises:
        TraceError: there is none, or one is not UTF-8.
        ClientError: one is longer than the model takes.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    prefixes: list[Prefix] = []
    before: TokenArray = np.empty(0, np.int32)
    for path in files:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"cannot read the document {path}: {error}") from None
        if not text:
            continue
        tokens = _tokens(encode, system, text)
        num_new = len(tokens) - num_common(before, tokens)
        prefixes.append(Prefix(tokens, num_new, float(num_new), 1, 1.0, "", None))
        before = tokens
    if not prefixes:
        raise TraceError(f"{folder} has no documents ({', '.join(sorted(SUFFIXES))})")
    return prefixes


def _tokens(encode: Encode, system: str, text: str) -> TokenArray:
    """A document's, and those before it."""
    head = (Message("system", system),) if system else ()
    one, other = (
        encode(GenerationRequest(Conversation((*head, Message("user", text + ending)))))
        for ending in _ENDINGS
    )
    return one[: num_common(one, other)]
