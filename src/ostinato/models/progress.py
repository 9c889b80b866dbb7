"""How long steps tell how far they are: a small protocol, and a version that draws bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichBars


class Progress(Protocol):
    """Told about one step at a time: ``start``, any number of ``advance``, ``finish``; notes in between."""

    def start(self, description: str, total_bytes: int | None) -> None:
        """A step begins. ``total_bytes`` is ``None`` where nobody knows."""

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are done."""

    def finish(self) -> None:
        """The step is over, whether it succeeded or not."""

    def note(self, message: str) -> None:
        """Something the user may want to know, one sentence."""


@contextmanager
def step(
    progress: Progress | None, description: str, total_bytes: int | None
) -> Iterator[Callable[[int], None]]:
    """One step around a block; gives the function to report bytes with. ``None`` is quiet."""
    if progress is None:
        yield _ignore
        return
    progress.start(description, total_bytes)
    try:
        yield progress.advance
    finally:
        progress.finish()


def note(progress: Progress | None, message: str) -> None:
    """Pass a note on, if anyone listens."""
    if progress is not None:
        progress.note(message)


def _ignore(_num_bytes: int) -> None:
    return None


class RichProgress:
    """Bars on the terminal (standard error), one line a step; plain lines where there is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console as RichConsole

        self._console = console if console is not None else RichConsole(stderr=True)
        self._bars: RichBars | None = None

    def __enter__(self) -> RichProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def start(self, description: str, total_bytes: int | None) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        self.finish()
        name = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        amount = DownloadColumn(table_column=Column(no_wrap=True, min_width=14))
        counted = (BarColumn(bar_width=16), amount, TimeRemainingColumn(table_column=Column(no_wrap=True)))
        self._bars = Progress(SpinnerColumn(), name, *(counted if total_bytes else ()), console=self._console)
        self._bars.add_task(description, total=total_bytes)
        self._bars.start()

    def advance(self, num_bytes: int) -> None:
        if self._bars is not None:
            self._bars.advance(self._bars.task_ids[0], num_bytes)

    def finish(self) -> None:
        if self._bars is not None:
            task_id = self._bars.task_ids[0]
            if self._bars.tasks[0].total is None:  # nothing was counted: at its end it is simply done
                self._bars.update(task_id, total=1, completed=1)
            self._bars.stop()
            self._bars = None

    def note(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False)
