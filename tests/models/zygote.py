"""Real processes that fetch a model, cheap enough to kill by the dozen.

One process imports everything once and forks a child for every job; a child can be killed at any moment like
any process. Run as a program, this file is that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclass
class Job:
    """A child at work. Its outcome, once it ended by itself, is a JSON file."""

    pid: int
    outcome_path: Path

    def outcome(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.outcome_path.read_text())
        return value


class Zygote:
    """The process that forks. ``start`` returns when the child exists."""

    def __enter__(self) -> Zygote:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._outcomes = 0
        try:
            assert self._read() == "ready"
        except AssertionError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def start(self, name: str, root: Path, folder: Path, *, delay_s: float) -> Job:
        """Fetch ``name`` into the store ``root``, resting ``delay_s`` after each piece of progress."""
        self._outcomes += 1
        job_path = folder / f"outcome-{self._outcomes}.json"
        self._write({"name": str(name), "root": str(root), "delay_s": delay_s, "outcome": str(job_path)})
        return Job(int(self._read()), job_path)

    def wait(self, job: Job) -> int:
        """The child's wait status."""
        self._write({"wait": job.pid})
        return int(self._read())

    def _write(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the forking process died"
        return line


class SlowRecorder:
    """Rests after each report, so that a tiny model takes long enough to be interrupted in it."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.steps: list[str] = []
        self.notes: list[str] = []

    def start(self, description: str, total_bytes: int | None) -> None:
        self.steps.append(description)

    def advance(self, num_bytes: int) -> None:
        time.sleep(self.delay_s)

    def finish(self) -> None:
        return None

    def note(self, message: str) -> None:
        self.notes.append(message)


def _work(job: dict[str, Any]) -> None:
    from ostinato.models.fetch import fetch
    from ostinato.models.store import ModelStore

    progress = SlowRecorder(job["delay_s"])
    model = fetch(job["name"], ModelStore(Path(job["root"])), progress=progress)
    outcome = {"path": str(model.path), "digest": model.weights_digest}
    outcome |= {"steps": progress.steps, "notes": progress.notes}
    partial = Path(job["outcome"] + ".partial")
    partial.write_text(json.dumps(outcome))
    partial.rename(job["outcome"])


def _warm_up() -> None:
    """Import what a fetch imports. Nothing here may start a thread: a fork would lose it."""
    import filelock  # noqa: F401
    import torch
    import transformers
    import transformers.modeling_gguf_pytorch_utils
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    import ostinato.models.fetch  # noqa: F401

    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(config)
    TOKENIZER_MAPPING.get(type(config), None)


def _main() -> None:
    _warm_up()
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            print(os.waitpid(command["wait"], 0)[1], flush=True)  # noqa: T201
            continue
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _work(command)
                status = 0
            finally:
                os._exit(status)
        print(pid, flush=True)  # noqa: T201


if __name__ == "__main__":
    _main()
