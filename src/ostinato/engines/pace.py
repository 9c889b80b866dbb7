"""How many rows of prompts a step may take while others are being read to: the trade of smoothness for speed.

Everybody who is decoding waits for the whole step. So while anyone is, prompts are cut so that a step lasts
no longer than the target, by what rows have been measured to cost. Nobody decoding: steps are as large as
may be.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of what was measured before, so much stays at each new measurement: a few steps, then it has followed.
_MEMORY = 0.7
_MARGIN = 0.75  # of the target: attention grows along a prompt, and steps vary
_LEAST_ROWS = 16  # so that prompts get on even where the target cannot be kept


@dataclass(slots=True)
class Pace:
    """Learns what steps cost; used by the engine's thread.

    ``target_s``: the longest step while somebody is decoding; ``None``: ``times`` as long as one that only
    decodes.
    """

    target_s: float | None = None
    times: float = 4.0
    _decode_s: float | None = None
    _row_s: float | None = None

    def note(self, num_decoding: int, num_prompt_rows: int, duration_s: float) -> None:
        """A step of so many decoding rows, and rows of prompts beside them, took so long."""
        if num_prompt_rows == 0:
            self._decode_s = _blend(self._decode_s, duration_s)
            return
        own_s = duration_s - (self._decode_s or 0.0) if num_decoding else duration_s
        self._row_s = _blend(self._row_s, max(own_s, 0.0) / num_prompt_rows)

    def limit(self, num_decoding: int, most: int) -> int:
        """How many rows of prompts the next step may have, up to ``most``."""
        if num_decoding == 0 or self._row_s is None:
            return most
        decode_s = self._decode_s
        if decode_s is None:  # none has been seen alone; a prompt's row costs at least as much as it adds
            decode_s = 0.0 if self.target_s is not None else self._row_s * _LEAST_ROWS
        target_s = self.target_s if self.target_s is not None else self.times * decode_s
        rows = int((target_s * _MARGIN - decode_s) / self._row_s) if self._row_s > 0 else most
        return max(min(_LEAST_ROWS, most), min(most, rows))


def _blend(before: float | None, now: float) -> float:
    return now if before is None else _MEMORY * before + (1 - _MEMORY) * now
