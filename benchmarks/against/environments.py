"""Every peer in an environment of its own under `build/peers`, made through pip with the user's settings."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build" / "peers"
INSTALL_TIMEOUT_S = 3_600.0


class Unavailable(Exception):
    """This peer cannot take part; the message says why, with paths from the project's folder on."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason.replace(f"{BUILD.parents[1]}/", ""))


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to install, and what of it to take out again."""

    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()


def prepare(name: str, recipe: Recipe) -> Path:
    """The ``bin`` folder of the peer's environment; made if it is not there, or was made by another recipe.

    Raises:
        Unavailable: pip could not install it.
    """
    folder = BUILD / name
    environment, marker, log = folder / "env", folder / "recipe.json", folder / "pip.log"
    wanted = json.dumps(asdict(recipe))
    if marker.is_file() and marker.read_text() == wanted:
        return environment / "bin"
    marker.unlink(missing_ok=True)
    shutil.rmtree(environment, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{name}: installing {' '.join(recipe.requirements)} (log in {log})", flush=True)
    python = str(environment / "bin" / "python")
    commands = [
        [sys.executable, "-m", "venv", str(environment)],
        [python, "-m", "pip", "install", "--progress-bar", "off", *recipe.requirements],
    ]
    if recipe.removed:
        commands.append([python, "-m", "pip", "uninstall", "--yes", *recipe.removed])
    with log.open("w") as output:
        for command in commands:
            _install(command, output.fileno(), log)
    marker.write_text(wanted)
    return environment / "bin"


def _install(command: list[str], output: int, log: Path) -> None:
    try:
        done = subprocess.run(command, stdout=output, stderr=output, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"installing took longer than {INSTALL_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        raise Unavailable(f"pip: {errors[-1] if errors else 'failed, see ' + str(log)}")
