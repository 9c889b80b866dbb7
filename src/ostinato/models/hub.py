"""Models from a Hugging Face hub, into the hub library's own cache, where its users expect them.

A complete snapshot in the cache is used without asking the hub, so a start needs no network. Before anything
large is downloaded, one request with a short time-out tells whether the hub is there, whether we may, and
what the repository holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.errors import ModelCorruptError, ModelError, ModelUnavailableError, ModelUnsupportedError

from . import disk
from .folder import (
    CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    check_architecture,
    find_weights,
    no_weights,
    read_config,
    shard_names,
)
from .progress import Progress, step

_PROBE_TIMEOUT_S = 4.0
_SMALL_FILES = frozenset(
    {
        CONFIG_FILE,
        INDEX_FILE,
        TOKENIZER_FILE,
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
    }
)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository and how to reach it. ``None``: the hub library's own setting."""

    repo_id: str
    revision: str | None = None
    token: str | None = None
    endpoint: str | None = None
    cache: Path | None = None


def cached_snapshot(source: HubSource) -> Path | None:
    """The snapshot in the hub's cache, if it is complete; never touches the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(
            source.repo_id,
            revision=source.revision,
            cache_dir=source.cache,
            local_files_only=True,
            allow_patterns=[CONFIG_FILE],
        )
        read_config(Path(path))
        find_weights(Path(path))
    except (LocalEntryNotFoundError, HFValidationError, ModelCorruptError, ModelUnsupportedError):
        return None
    return Path(path)


def download_snapshot(source: HubSource, *, progress: Progress | None = None) -> Path:
    """Download what is needed to run the model, and nothing else; returns the snapshot folder.

    Raises:
        ModelUnavailableError: the hub cannot be reached or has no such model for us.
        ModelUnsupportedError: not a causal language model in safetensors form.
        StorageFullError: no room for it.
    """
    sizes = _list_files(source)
    _require_model(source, sizes)
    small = sorted(_SMALL_FILES & sizes.keys())
    folder = _download(source, small, lambda _num_bytes: None)
    check_architecture(read_config(folder), source.repo_id)
    weights = [WEIGHTS_FILE] if WEIGHTS_FILE in sizes else list(shard_names(folder / INDEX_FILE))
    if missing := [name for name in weights if name not in sizes]:
        raise ModelCorruptError(
            f"{source.repo_id} names the weight file {missing[0]}, but does not have it. Tell its authors."
        )
    wanted = {name: sizes[name] for name in weights if not (folder / name).exists()}
    total_bytes = sum(wanted.values())
    with disk.disk_errors(f"Downloading {source.repo_id}", folder):
        disk.require_space(folder, total_bytes, f"Downloading {source.repo_id}")
        with step(progress, f"Downloading {source.repo_id}", total_bytes) as advance:
            return _download(source, [*small, *weights], advance)


def _list_files(source: HubSource) -> Mapping[str, int]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError, OfflineModeIsEnabled

    try:
        info = HfApi(endpoint=source.endpoint, token=source.token).model_info(
            source.repo_id, revision=source.revision, timeout=_PROBE_TIMEOUT_S, files_metadata=True
        )
    except (HTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        raise hub_error(source, error) from error
    return {str(file.rfilename): int(file.size or 0) for file in info.siblings or ()}


def _require_model(source: HubSource, sizes: Mapping[str, int]) -> None:
    if WEIGHTS_FILE not in sizes and INDEX_FILE not in sizes:
        raise no_weights(source.repo_id, list(sizes))
    if CONFIG_FILE not in sizes:
        raise ModelUnsupportedError(f"{source.repo_id} has no {CONFIG_FILE}, so it is no transformers model.")


def _download(source: HubSource, names: list[str], advance: Callable[[int], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    try:
        path = snapshot_download(
            source.repo_id,
            revision=source.revision,
            cache_dir=source.cache,
            token=source.token,
            endpoint=source.endpoint,
            allow_patterns=names,
            tqdm_class=_silent_bar(advance),
        )
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise hub_error(source, error) from error
    except OSError as error:
        if error.errno is not None:  # the disk's, not the hub's
            raise
        raise hub_error(source, error) from error
    return Path(path)


def _silent_bar(advance: Callable[[int], None]) -> type[Any]:
    """A tqdm class that draws nothing and reports bytes. The hub counts the same bytes in more than one bar
    (as received, as written); what is reported is the one that is furthest."""
    from huggingface_hub.utils import tqdm

    reported = 0

    class SilentBar(tqdm):  # type: ignore[misc]  # the hub library is not checked
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            kwargs.pop("name", None)
            self._counts_bytes = kwargs.get("unit") == "B"
            self._num_bytes = 0
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal reported
            if self._counts_bytes:
                self._num_bytes += int(n or 0)
                if self._num_bytes > reported:
                    advance(self._num_bytes - reported)
                    reported = self._num_bytes
            return None

    return SilentBar


def hub_error(source: HubSource, error: Exception) -> ModelError:
    """What the hub library's error means for the user, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = source.repo_id
    log_in = "log in (hf auth login) or pass a token (HF_TOKEN)"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError) or status == 403:
        message = (
            f"{name} is gated: its authors want you to accept their terms. Open the model's page on the hub,"
            f" accept them with your account, then {log_in} of that account."
        )
    elif isinstance(error, RevisionNotFoundError):
        message = f"{name} has no revision {source.revision!r}. Check the branch, tag or commit."
    elif status == 401:
        message = (
            f"{name} does not exist on the hub or is private. Check the name; if it is private, {log_in}."
        )
    elif isinstance(error, RepositoryNotFoundError) or status == 404:
        message = f"The hub has no model {name!r}. Check the name (org/name); if it is private, {log_in}."
    elif isinstance(error, HFValidationError):
        message = f"{name!r} is not a model hub id. They look like org/name."
    elif isinstance(error, OfflineModeIsEnabled):
        message = f"{name} is not in the local cache, and HF_HUB_OFFLINE forbids to ask the hub for it."
    elif status is not None:
        message = f"The hub answered {status} for {name}. Try again later."
    else:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        message = (
            f"The model hub cannot be reached ({reason}), and {name} is not in the local cache. Check the"
            " network and proxy; behind a mirror set HF_ENDPOINT. A broken download goes on next time."
        )
    return ModelUnavailableError(message)
