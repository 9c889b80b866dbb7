"""A progress that remembers, to be looked at afterwards."""

from __future__ import annotations


class Recorder:
    """Steps as ``[description, total, advanced]``, and notes."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int | None, int]] = []
        self.notes: list[str] = []
        self._open: list[tuple[str, int | None, int]] = []

    def start(self, description: str, total_bytes: int | None) -> None:
        assert not self._open, f"{description} began inside {self._open}"
        self._open = [(description, total_bytes, 0)]

    def advance(self, num_bytes: int) -> None:
        description, total_bytes, advanced = self._open.pop()
        self._open.append((description, total_bytes, advanced + num_bytes))

    def finish(self) -> None:
        self.steps.append(self._open.pop())

    def note(self, message: str) -> None:
        self.notes.append(message)
