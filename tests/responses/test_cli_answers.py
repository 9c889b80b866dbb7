"""Looking after a store of answers from the command line, without a server."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from ostinato.cli import main
from ostinato.kv.terms import model_id, prompt_id, tenant_id
from ostinato.responses.exact import id_of
from ostinato.responses.stores.base import Entry, Limits
from ostinato.responses.stores.sqlite import SqliteStore


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cache", *arguments])


def shown(path: Path) -> dict[str, int]:
    found = json.loads(run("ls", "--answers", str(path), "--json").stdout)
    return {entry["tenant"]: entry["entries"] for entry in found["answers"]}


def test_showing_purging_and_forgetting(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    anna, bob = tenant_id("anna"), tenant_id("bob")
    store = SqliteStore(path, limits=Limits(), now_ms=1)
    entries = [
        Entry("exact", bytes([n]) * 32, bytes(32), b"x", 1, None, tenant, model_id("m"), prompt_id(prompt))
        for n, (tenant, prompt) in enumerate([(anna, "p"), (anna, ""), (bob, ""), (bob, "p")])
    ]
    store.put(entries, 1)
    store.close()
    assert shown(path) == {anna: 2, bob: 2}
    assert "1 dropped" in run("purge", "--answers", str(path), "--tenant", anna, "--prompt-name", "p").stdout
    assert shown(path) == {anna: 1, bob: 2}
    forgotten = run("forget", "--answers", str(path), id_of(bytes([2]) * 32))
    assert forgotten.exit_code == 0
    again = run("forget", "--answers", str(path), id_of(bytes([2]) * 32))
    assert again.exit_code != 0
    assert shown(path) == {anna: 1, bob: 1}
    assert (
        json.loads(run("purge", "--answers", str(path), "--all", "--json").stdout)["answers"]["entries"] == 2
    )
    assert shown(path) == {}


def test_what_makes_no_sense_is_said(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    for arguments in (
        ("ls", "--answers", str(path)),
        ("purge", "--answers", str(path), "--all"),
        ("purge", "--answers", str(path), "--tenant", "anna"),
        ("ls", "--answers", str(path), "--url", "http://127.0.0.1:1"),
        ("forget", "--answers", str(path), "answer-1"),
    ):
        result = run(*arguments)
        assert result.exit_code != 0
        assert result.stderr
    assert not path.exists()
    path.write_bytes(b"this is not a database, and it is long enough to look like one" * 99)
    broken = run("ls", "--answers", str(path))
    assert broken.exit_code == 1
    assert "choose another file, or remove it" in broken.stderr
