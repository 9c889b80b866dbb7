"""The command line, as a person or a script meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from doors.tiny import save_tiny_chat_model
from ostinato.cli import main
from ostinato.config import Settings, parse_size
from ostinato.errors import ParameterError


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


def test_help_names_every_command() -> None:
    code, text = run("--help")
    assert code == 0
    assert {"serve", "chat", "model"} <= set(text.split())


def test_fetching_a_folder_prints_where_it_is(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    code, text = run("model", "fetch", str(folder), "--json", "--store", str(tmp_path / "store"))
    assert code == 0
    record = json.loads(text)
    assert Path(record["path"]) == folder
    assert record["digest"].startswith("b3:")


def test_our_errors_are_one_line(tmp_path: Path) -> None:
    code, text = run("model", "fetch", str(tmp_path / "nothing-here"), "--store", str(tmp_path), "--offline")
    assert code == 1
    assert text.startswith("Error: ")
    assert "Traceback" not in text


def test_an_empty_store_says_how_to_fill_it(tmp_path: Path) -> None:
    code, text = run("model", "list", "--store", str(tmp_path / "store"))
    assert (code, "ostinato model fetch" in text) == (0, True)
    assert run("model", "list", "--store", str(tmp_path / "store"), "--json") == (0, "[]\n")


def test_chat_shows_what_was_reused(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "-m", "ostinato", "chat", str(folder), "--temperature", "0", "--max-tokens", "5"],
        input="Hello\nAnd again\n/new\nHello\n/quit\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"},
    )
    turns = [line for line in done.stdout.splitlines() if "reused" in line]
    assert len(turns) == 3
    reused = [int(line.split("reused ")[1].split()[0]) for line in turns]
    assert reused[0] == 0
    assert reused[1] > 0
    assert reused[2] > 0


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1.5k", 1536), ("3gb", 3 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_options_win_over_the_environment_over_defaults() -> None:
    environment = {"OSTINATO_PORT": "9", "OSTINATO_OFFLINE": "yes", "OSTINATO_KV_CACHE": "1G", "HOME": "/h"}
    settings = Settings.from_environment(environment, port=10, host=None)
    assert (settings.port, settings.offline, settings.kv_cache, settings.host) == (
        10,
        True,
        1 << 30,
        "127.0.0.1",
    )
    assert Settings.from_environment({"XDG_CACHE_HOME": "/c"}).store == Path("/c/ostinato/models")
    with pytest.raises(ParameterError, match="OSTINATO_PORT"):
        Settings.from_environment({"OSTINATO_PORT": "many"})
    with pytest.raises(ParameterError, match="block_size"):
        Settings.from_environment({}, block_size=0)
