"""The ids a model generated, for when its answer comes back as history.

A model may write a text in other tokens than the tokenizer would take for it. Tokenized again, the answer
then parts from the KV its generation left behind. Who keeps the generated ids and uses them for the same text
finds all of it again, at the price that a prompt's tokens depend on what was generated before. So it is an
option, not the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..types import Rendered, TokenArray
from .memo import PieceMemo
from .pieces import NO_NEIGHBOUR
from .tokens import HFTokenizer, Tail


class KeptAnswers:
    """Answers by their text, with the ids they were generated in, at most ``capacity_bytes`` of them.

    ``scope`` keeps the answers of one tenant apart from another's. Safe to use from several threads.
    """

    def __init__(self, tokenizer: HFTokenizer, *, capacity_bytes: int = 16 * 1024 * 1024) -> None:
        self._tokenizer = tokenizer
        self._answers = PieceMemo(capacity_bytes)

    def keep(self, tail: Tail, generated_ids: Sequence[int], *, scope: str = "") -> bool:
        """Keep what was generated after a prompt that ends with ``tail``; whether there was anything to keep.

        The answer ends at the first special token.
        """
        special = frozenset(self._tokenizer.special_tokens.values())
        ids: list[int] = []
        for token_id in generated_ids:
            if token_id in special or token_id >= self._tokenizer.vocab_size:
                break
            ids.append(token_id)
        whole = [*tail.ids.tolist(), *ids]
        text = self._tokenizer.decode(whole)
        # What does not end with a whole character, or not as the prompt does, comes back as other text.
        if not ids or not text.startswith(tail.text) or "\ufffd" in text[len(tail.text) :]:
            return False
        kept = np.array(whole, dtype=np.int32)
        kept.flags.writeable = False
        self._answers.put((f"{scope}\0{tail.left}", text, ""), kept)
        return True

    def known(self, scope: str = "") -> Callable[[str, str], TokenArray | None]:
        """What ``encode_after`` takes, to have the generated ids for every answer that stands whole in a
        prompt between two markers."""
        return lambda left, text: self._answers.get((f"{scope}\0{left}", text, ""))

    def encode(self, rendered: Rendered, *, scope: str = "") -> TokenArray:
        """``encode_rendered`` with the kept ids.

        Raises:
            TemplateError: a marker is not a token of this model.
        """
        known = self.known(scope)
        return self._tokenizer.encode_after(NO_NEIGHBOUR, rendered.segments, known=known, scope=scope).ids
