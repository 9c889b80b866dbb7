"""Bars on a terminal, plain text elsewhere, and silence where nobody listens."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from recorder import Recorder
from rich.console import Console

from ostinato.models.fetch import fetch
from ostinato.models.progress import RichProgress, note, step
from ostinato.models.store import ModelStore


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def written(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_bar(tiny_gguf: Path, store: ModelStore) -> None:
    target = console(terminal=True)
    with RichProgress(target) as progress:
        fetch(str(tiny_gguf), store, progress=progress)
    text = written(target)
    for description in ("Checking tiny.gguf", "Reading tiny.gguf", "Converting tiny.gguf"):
        assert description in text
    assert "\x1b[?25h" in text, "the cursor is shown again"


def test_not_a_terminal() -> None:
    target = console(terminal=False)
    progress = RichProgress(target)
    progress.start("Working", 100)
    progress.advance(100)
    progress.note("[bold] is not markup")
    progress.finish()
    assert "\x1b" not in written(target)
    assert "[bold] is not markup" in written(target)


def fail_within_a_step(progress: Recorder | RichProgress) -> None:
    with step(progress, "Working", 10) as advance:
        advance(3)
        raise ZeroDivisionError


def test_a_step_ends_when_the_work_fails() -> None:
    progress = Recorder()
    with pytest.raises(ZeroDivisionError):
        fail_within_a_step(progress)
    assert progress.steps == [("Working", 10, 3)]
    target = console(terminal=True)
    with pytest.raises(ZeroDivisionError):
        fail_within_a_step(RichProgress(target))
    assert "\x1b[?25h" in written(target)


def test_quiet(capfd: pytest.CaptureFixture[str], saved_model: Path, store: ModelStore) -> None:
    with step(None, "Working", 10) as advance:
        advance(3)
    note(None, "nobody hears this")
    fetch(str(saved_model), store)
    assert capfd.readouterr() == ("", "")


def test_importing_is_light() -> None:
    """None of the heavy libraries come in before they are needed."""
    program = (
        "import sys, ostinato.models.fetch, ostinato.models.store, ostinato.models.progress\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'rich', 'gguf', 'safetensors', 'filelock'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
