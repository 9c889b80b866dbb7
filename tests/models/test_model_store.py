"""The store shows whole models only, and notices every change to one."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from recorder import Recorder

from ostinato.errors import ModelCorruptError, ModelUnavailableError, ModelUnsupportedError
from ostinato.models.store import MANIFEST, ModelStore, StoredModel, key_of


def put(store: ModelStore, saved_model: Path, name: str, *, key: str | None = None) -> StoredModel:
    """Store a copy of a real model under a name."""
    key = key or key_of(name)
    with store.lock(key):
        out = store.staging(key) / "out"
        shutil.copytree(saved_model, out)
        store.publish(key, out, name=name, source="test")
        store.discard_staging(key)
    stored = store.find(key)
    assert stored is not None
    return stored


def test_empty(store: ModelStore) -> None:
    assert store.list_models() == []
    assert store.find("x") is None
    assert store.open("x") is None
    assert store.sweep() == 0
    with pytest.raises(ModelUnavailableError, match=r"No stored model is called 'x'.*nothing yet"):
        store.remove("x")
    assert not store.root.exists(), "looking creates nothing"


def test_put_find_list_remove(store: ModelStore, saved_model: Path) -> None:
    one = put(store, saved_model, "one")
    put(store, saved_model, "two")
    assert [m.model.name for m in store.list_models()] == ["one", "two"]
    assert store.open("one") == one.model
    assert one.model.source == "test"
    assert one.size_bytes == sum(p.stat().st_size for p in saved_model.iterdir())
    freed_bytes = store.remove("one")
    assert freed_bytes >= one.size_bytes
    assert [m.model.name for m in store.list_models()] == ["two"]
    assert store.find("one") is None


def test_manifest_says_what_every_file_is(store: ModelStore, saved_model: Path) -> None:
    from blake3 import blake3

    folder = put(store, saved_model, "one").model.path
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["format"] == 1
    assert manifest["ostinato_version"]
    assert manifest["files"].keys() == {p.name for p in saved_model.iterdir()}
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"size_bytes": len(data), "digest": f"b3:{blake3(data).hexdigest()}"}


def test_every_byte_is_checked(store: ModelStore, saved_model: Path) -> None:
    folder = put(store, saved_model, "one").model.path
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST:
            continue
        data = path.read_bytes()
        for at in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(ModelCorruptError, match=r"digest differs.*ostinato model remove one"):
                store.open("one")
            with pytest.raises(ModelCorruptError, match="digest differs"):
                store.verify("one")
        path.write_bytes(data[:-1])
        with pytest.raises(ModelCorruptError, match=r"bytes, but .* were stored"):
            store.open("one")
        path.unlink()
        with pytest.raises(ModelCorruptError, match="is missing"):
            store.open("one")
        path.write_bytes(data)
    assert store.verify("one").path == folder


def test_same_size_and_time_are_not_enough(store: ModelStore, saved_model: Path) -> None:
    path = put(store, saved_model, "one").model.path / "model.safetensors"
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ModelCorruptError, match="digest differs"):
        store.open("one")


def test_surplus_file(store: ModelStore, saved_model: Path) -> None:
    """transformers would load an adapter that lies in the folder without being asked."""
    folder = put(store, saved_model, "one").model.path
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelCorruptError, match=r"not stored there: adapter_config\.json"):
        store.open("one")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "files": 3}', "\x00"])
def test_broken_manifest(text: str, store: ModelStore, saved_model: Path) -> None:
    put(store, saved_model, "other")
    folder = put(store, saved_model, "one").model.path
    (folder / MANIFEST).write_text(text)
    with pytest.raises(ModelCorruptError, match=r"unreadable.*ostinato model remove one"):
        store.open("one")
    assert [m.key for m in store.list_models()] == ["other"], "one bad model does not hide the others"
    store.remove("one")
    assert store.open("one") is None


def test_manifest_of_another_format(store: ModelStore, saved_model: Path) -> None:
    folder = put(store, saved_model, "one").model.path
    manifest = json.loads((folder / MANIFEST).read_text()) | {"format": 2}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ModelUnsupportedError, match="format 2"):
        store.open("one")


def test_folder_without_manifest_is_no_model(store: ModelStore, saved_model: Path) -> None:
    shutil.copytree(saved_model, store.root / "half")
    assert store.list_models() == []
    assert store.open("half") is None
    put(store, saved_model, "half")
    assert [m.key for m in store.list_models()] == ["half"], "and it gives way to a whole one"


def test_names_that_are_not_unique(store: ModelStore, saved_model: Path) -> None:
    put(store, saved_model, "same", key="same-1")
    put(store, saved_model, "same", key="same-2")
    with pytest.raises(ModelUnavailableError, match="same-1, same-2"):
        store.remove("same")
    store.remove("same-1")
    assert [m.key for m in store.list_models()] == ["same-2"]
    store.remove("same")
    assert store.list_models() == []


@pytest.mark.parametrize(
    "name", ["../../etc", "..", ".", "", "/", "a/b", ".hidden", "x" * 300, "naïve ☃", "a\x00b"]
)
def test_keys_stay_inside_the_store(name: str, store: ModelStore, saved_model: Path) -> None:
    key = key_of(name)
    assert key
    assert not key.startswith(".")
    assert Path(key).name == key
    assert len(key) <= 80
    put(store, saved_model, name)
    assert [p.name for p in store.root.iterdir() if not p.name.startswith(".")] == [key]
    with pytest.raises(ModelUnavailableError):
        store.remove("../" + store.root.name)


def test_replacing(store: ModelStore, saved_model: Path) -> None:
    put(store, saved_model, "one")
    with store.lock("one"):
        out = store.staging("one") / "out"
        shutil.copytree(saved_model, out)
        (out / "chat_template.jinja").write_text("new")
        store.publish("one", out, name="one", source="second")
    model = store.open("one")
    assert model is not None
    assert model.source == "second"
    assert (model.path / "chat_template.jinja").read_text() == "new"


def test_lock_is_for_one_at_a_time(store: ModelStore) -> None:
    inside, waited = threading.Event(), threading.Event()
    order: list[str] = []

    def second() -> None:
        inside.wait()
        with store.lock("m", on_wait=waited.set):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with store.lock("m"):
        inside.set()
        assert waited.wait(timeout=10)
        with store.lock("another"):
            order.append("first")
    thread.join(timeout=10)
    assert order == ["first", "second"]


class FixedClock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def now(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


def test_sweep(store: ModelStore) -> None:
    old, young, busy = (store.staging(key) for key in ("old", "young", "busy"))
    for folder in (old, young, busy):
        (folder / "journal").write_bytes(bytes(1000))
    trash = store.root / ".staging" / ".trash-x-1-0"
    trash.mkdir()
    now_s = (old / "journal").stat().st_mtime + 10 * 24 * 3600
    os.utime(young / "journal", (now_s, now_s))
    with store.lock("busy"):
        freed_bytes = store.sweep(clock=FixedClock(now_s))
    assert freed_bytes >= 1000
    assert {p.name for p in (store.root / ".staging").iterdir()} == {"young", "busy"}


def test_progress_of_checking(store: ModelStore, saved_model: Path) -> None:
    put(store, saved_model, "one")
    progress = Recorder()
    store.verify("one", progress=progress)
    ((description, total_bytes, done_bytes),) = progress.steps
    assert description == "Checking one"
    assert total_bytes == done_bytes == sum(p.stat().st_size for p in saved_model.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_forbidden_place(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with (
        pytest.raises(ModelUnavailableError, match="cannot use"),
        ModelStore(tmp_path / "closed" / "s").lock("x"),
    ):
        pass


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailableError, match="cannot use"), ModelStore(tmp_path / "file").lock("x"):
        pass
