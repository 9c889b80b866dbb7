"""Nothing a user wrote, and nothing that names them, is in a key, a metric, a log or a report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from doors.tiny import save_tiny_chat_model
from ostinato.cli import main
from ostinato.kv.terms import tenant_id
from ostinato.tenants import key_salt

pytestmark = pytest.mark.slow

TEXT = "canaryword"
SECRETS = {
    "user text": TEXT,
    "system text": "canarysystem",
    "salt": "canarysalt@example.com",
    "API key": "sk-canarykey",
    "admin key": "canaryadmin",
    "session": "canarysession",
    "user field": "canaryuser",
    "metadata": "canarymeta",
    "request's parameter": "canaryparameter",
    "model name asked for": "canarymodel",
}
MESSAGES = [
    {"role": "system", "content": SECRETS["system text"] * 3},
    {"role": "user", "content": f"{TEXT} " * 20},
]


class Running:
    """``ostinato serve`` with a shared tier, saying all that it has to say into a file."""

    def __init__(self, folder: Path, tier: Path, log: Path, *more: str) -> None:
        self.tier = tier
        self.log = log
        command = [sys.executable, "-m", "ostinato", "-v", "serve", str(folder), "--port", "0"]
        command += ["--kv-cache", "2M", "--block-size", "4", "--shared-tier", str(tier)]
        command += ["--shared-tier-bytes", "2M", *more]
        self._file = log.open("w")
        self.process = subprocess.Popen(command, stdout=self._file, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 300
        while not (found := re.search(r"Serving (\S+) at (http://\S+)", log.read_text())):
            assert time.monotonic() < deadline, log.read_text()
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.1)
        self.model, self.url = found.groups()

    def call(self, path: str, body: Any = None, key: str = SECRETS["API key"], **headers: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"} | headers
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers)) as reply:
                return reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode()

    def ask(self, **more: Any) -> Any:
        body = {"model": self.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 4}
        return self.call("/v1/chat/completions", body | {"ignore_eos": True} | more)

    def cached(self) -> int:
        tokens: int = json.loads(self.ask())["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    def wait_for_write_back(self) -> None:
        deadline = time.monotonic() + 30
        while re.search(r"^ostinato_kv_tier_buffered_bytes (?!0)", self.call("/metrics"), re.MULTILINE):
            assert time.monotonic() < deadline, "blocks are still on their way"
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self._file.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def running(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("OSTINATO_API_KEYS", f"{SECRETS['API key']},sk-other")
    monkeypatch.setenv("OSTINATO_ADMIN_KEY", SECRETS["admin key"])
    running = Running(folder, tmp_path / "tier", tmp_path / "log")
    yield running
    running.stop()


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_of_a_user_is_in_files_logs_metrics_or_reports(running: Running) -> None:
    session = {"x-ostinato-session": SECRETS["session"]}
    for salt in (None, SECRETS["salt"]):
        more = {} if salt is None else {"cache_salt": salt}
        more |= {"user": SECRETS["user field"], "metadata": {"x": SECRETS["metadata"]}}
        assert "usage" in json.loads(running.ask(**more))
    running.ask(stream=True)
    running.call("/v1/chat/completions", {"model": running.model, "messages": MESSAGES}, **session)
    # Refusals are logged as well.
    running.ask(model=SECRETS["model name asked for"])
    running.ask(**{SECRETS["request's parameter"]: 1})
    running.ask(temperature=SECRETS["request's parameter"])
    running.call(f"/v1/{TEXT}")
    running.call("/v1/chat/completions", {"model": running.model, "messages": MESSAGES}, key="sk-canarykey2")
    admin = SECRETS["admin key"]
    pin = {"messages": MESSAGES, "tenant": "key-1", "cache_salt": SECRETS["salt"]}
    assert "pin-" in running.call("/v1/ostinato/cache/pin", pin, admin)
    running.call("/v1/ostinato/cache/purge", {"cache_salt": SECRETS["salt"]}, admin)
    running.wait_for_write_back()
    said = {
        "metrics": running.call("/metrics"),
        "health": running.call("/health"),
        "summary": running.call("/v1/ostinato/cache", key=admin),
    }
    running.stop()
    said["log"] = running.log.read_text()
    assert said["log"].count("/v1/chat/completions") >= 8, "the log says nothing: it proves nothing"
    assert tenant_id(key_salt(SECRETS["API key"])) in said["summary"]
    found = {name: text.encode() for name, text in said.items()} | bytes_of(running.tier)
    assert len(found["blocks-of-1024-bytes/slab"]) > 0
    for what, secret in SECRETS.items():
        for name, data in found.items():
            assert secret.encode() not in data, f"{what} is in {name}"
            assert secret.encode("utf-16-le") not in data, f"{what} is in {name}"


def test_the_tokens_are_in_the_index_as_the_documentation_says(running: Running, folder: Path) -> None:
    """So that the test above is known to look where something is: ids, not text, for the owner only."""
    running.ask()
    running.wait_for_write_back()
    running.stop()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.array(tokenizer.encode(TEXT, add_special_tokens=False).ids, "<i4")
    index = bytes_of(running.tier)["blocks-of-1024-bytes/index/data.mdb"]
    assert any(ids[start : start + 4].tobytes() in index for start in range(4)), "blocks of 4 tokens"
    for path in running.tier.rglob("*"):
        assert not path.stat().st_mode & 0o077, f"others may read {path}"


def test_a_purge_in_the_folder_reaches_a_running_server(running: Running) -> None:
    assert running.cached() == 0
    assert running.cached() > 0
    running.wait_for_write_back()
    words = ["cache", "purge", "--tier", str(running.tier), "--json"]
    other = CliRunner().invoke(main, [*words, "--tenant", tenant_id(key_salt("sk-other"))])
    assert json.loads(other.output)["shared_tier"]["blocks"] == 0
    assert running.cached() > 0
    shown = CliRunner().invoke(main, ["cache", "ls", "--tier", str(running.tier), "--json"])
    tenant = tenant_id(key_salt(SECRETS["API key"]))
    assert {entry["tenant"] for entry in json.loads(shown.output)["shared_tier"]} == {tenant}
    mine = CliRunner().invoke(main, [*words, "--tenant", tenant])
    assert json.loads(mine.output)["shared_tier"]["blocks"] > 10
    assert running.cached() == 0, "neither its arena nor the tier has any of it"
    assert running.cached() > 0
