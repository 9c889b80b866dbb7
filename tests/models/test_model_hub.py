"""Models from a hub: a real HTTP server on localhost stands where the hub would."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recorder import Recorder
from test_model_folder import make_old
from tiny_folder import edit_config, files_of, save_model
from tiny_hub import COMMIT, Repository, TinyHub, serve_hub

from ostinato.errors import ModelCorruptError, ModelError, ModelUnavailableError, ModelUnsupportedError
from ostinato.models import hub as hub_module
from ostinato.models.fetch import Alias, fetch
from ostinato.models.store import LocalModel, ModelStore

ID = "someone/tiny-llama"
Fetch = Callable[..., LocalModel]


@pytest.fixture
def hub() -> Iterator[TinyHub]:
    with serve_hub({}) as server:
        yield server


@pytest.fixture
def get(hub: TinyHub, store: ModelStore, tmp_path: Path) -> Fetch:
    def fetch_from_hub(name: str = ID, **options: object) -> LocalModel:
        options = {"endpoint": hub.endpoint, "hub_cache": tmp_path / "hub", **options}
        return fetch(name, store, **options)  # type: ignore[arg-type]

    return fetch_from_hub


def closed_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_downloads_what_is_needed_and_nothing_else(hub: TinyHub, get: Fetch, saved_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    extra = {
        "README.md": b"x",
        "pytorch_model.bin": b"pickle",
        "original/consolidated.pth": b"p",
        "x.py": b"",
    }
    hub.repositories[ID] = Repository(files_of(saved_model) | extra)
    progress = Recorder()
    model = get(progress=progress)
    assert model.name == ID
    assert model.source == f"hub {ID}@{COMMIT}"
    assert hub.downloaded() == set(files_of(saved_model))
    assert files_of(model.path).keys() == files_of(saved_model).keys()
    downloads = [s for s in progress.steps if s[0] == f"Downloading {ID}"]
    size_bytes = (saved_model / "model.safetensors").stat().st_size
    assert [(total, min(done, size_bytes)) for _, total, done in downloads] == [(size_bytes, size_bytes)]
    AutoModelForCausalLM.from_pretrained(str(model.path), local_files_only=True)


def test_later_starts_need_no_network(hub: TinyHub, get: Fetch, saved_model: Path) -> None:
    hub.repositories[ID] = Repository(files_of(saved_model))
    model = get()
    asked = len(hub.requests)
    assert get() == model
    assert get(offline=True) == model
    assert get(endpoint=closed_port()) == model
    assert len(hub.requests) == asked
    get(refresh=True)
    assert len(hub.requests) > asked, "refresh asks"


def test_same_digest_as_the_folder(hub: TinyHub, get: Fetch, saved_model: Path, store: ModelStore) -> None:
    hub.repositories[ID] = Repository(files_of(saved_model))
    assert get().weights_digest == fetch(str(saved_model), store).weights_digest


def test_shards(hub: TinyHub, get: Fetch, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "sharded", max_shard_size="20KB")
    files = files_of(folder)
    hub.repositories[ID] = Repository(files | {"model-99999-of-99999.safetensors": b"not in the index"})
    model = get()
    assert hub.downloaded() == set(files)
    assert files_of(model.path).keys() == files.keys()


def test_tokenizer_in_an_older_format(
    hub: TinyHub, get: Fetch, model_folder: Path, store: ModelStore
) -> None:
    make_old(model_folder)
    hub.repositories[ID] = Repository(files_of(model_folder))
    model = get()
    assert model.path.parent == store.root
    assert (model.path / "tokenizer.json").is_file()
    assert get(offline=True) == model


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        (Repository(status=403, error_code="GatedRepo"), r"is gated.*accept.*hf auth login"),
        (Repository(status=401, error_code="GatedRepo"), r"is gated.*accept.*hf auth login"),
        (Repository(status=403), r"is gated.*accept.*hf auth login"),
        (Repository(status=401), r"does not exist on the hub or is private.*hf auth login"),
        (Repository(status=401, error_code="RepoNotFound"), r"does not exist.*or is private"),
        (Repository(status=404, error_code="RepoNotFound"), r"The hub has no model 'someone/tiny-llama'"),
        (Repository(status=404), r"The hub has no model 'someone/tiny-llama'"),
        (Repository(status=500), r"The hub answered 500 .*Try again later"),
        (Repository(status=503), r"The hub answered 503 .*Try again later"),
        (Repository(status=429), r"The hub answered 429 .*Try again later"),
    ],
)
def test_refusals_of_the_hub(repository: Repository, message: str, hub: TinyHub, get: Fetch) -> None:
    hub.repositories[ID] = repository
    with pytest.raises(ModelUnavailableError, match=message):
        get()
    assert len(hub.requests) == 1, "one question, no storm of retries"


def test_no_such_model(get: Fetch) -> None:
    with pytest.raises(ModelUnavailableError, match="The hub has no model 'nobody/nothing'"):
        get("nobody/nothing")


def test_no_such_revision(hub: TinyHub, get: Fetch, saved_model: Path) -> None:
    hub.repositories[ID] = Repository(files_of(saved_model))
    with pytest.raises(ModelUnavailableError, match="has no revision 'v9'"):
        get(revision="v9")
    assert get(revision="main").path.name == COMMIT


def test_not_an_id(get: Fetch) -> None:
    with pytest.raises(ModelUnavailableError, match="not a model hub id"):
        get("a/b--c..d")


def test_private_with_token(hub: TinyHub, get: Fetch, saved_model: Path) -> None:
    hub.repositories[ID] = Repository(files_of(saved_model), token="hf_secret")
    with pytest.raises(ModelUnavailableError, match="private") as refused:
        get(token="hf_wrong")
    assert "hf_wrong" not in str(refused.value)
    assert get(token="hf_secret").name == ID


def test_nobody_listens(get: Fetch) -> None:
    began_s = time.perf_counter()
    with pytest.raises(
        ModelUnavailableError, match=r"cannot be reached.*not in the local cache.*HF_ENDPOINT"
    ):
        get(endpoint=closed_port())
    assert time.perf_counter() - began_s < 3


def test_nobody_answers(hub: TinyHub, get: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_module._PROBE_TIMEOUT_S <= 5
    monkeypatch.setattr(hub_module, "_PROBE_TIMEOUT_S", 0.3)
    hub.repositories[ID] = Repository(delay_s=1.5)
    began_s = time.perf_counter()
    with pytest.raises(ModelUnavailableError, match="cannot be reached"):
        get()
    assert time.perf_counter() - began_s < 1.4


def test_offline_and_not_here(hub: TinyHub, get: Fetch, saved_model: Path) -> None:
    hub.repositories[ID] = Repository(files_of(saved_model))
    with pytest.raises(ModelUnavailableError, match=r"switched off \(offline\).*ostinato model fetch"):
        get(offline=True)
    assert hub.requests == []


def refused(hub: TinyHub, get: Fetch, files: dict[str, bytes], kind: type[ModelError], message: str) -> None:
    hub.repositories[ID] = Repository(files)
    with pytest.raises(kind, match=message):
        get()
    large = {name for name in hub.downloaded() if name.endswith((".safetensors", ".bin", ".gguf"))}
    assert not large, "refused before anything large is downloaded"


def test_only_pickled(hub: TinyHub, get: Fetch, saved_model: Path) -> None:
    files = files_of(saved_model)
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    refused(hub, get, files, ModelUnsupportedError, "only pickled weights.*never loaded")


def test_only_gguf(hub: TinyHub, get: Fetch) -> None:
    files = {"tiny.Q4_0.gguf": b"GGUF", "README.md": b""}
    refused(hub, get, files, ModelUnsupportedError, r"GGUF files only \(tiny\.Q4_0\.gguf\)")


def test_no_config(hub: TinyHub, get: Fetch, saved_model: Path) -> None:
    files = files_of(saved_model)
    del files["config.json"]
    refused(hub, get, files, ModelUnsupportedError, r"has no config\.json")


def test_encoder_decoder(hub: TinyHub, get: Fetch, model_folder: Path) -> None:
    edit_config(model_folder, model_type="t5")
    refused(hub, get, files_of(model_folder), ModelUnsupportedError, "encoder-decoder")


def test_unknown_architecture(hub: TinyHub, get: Fetch, model_folder: Path) -> None:
    edit_config(model_folder, model_type="frobnicate")
    refused(hub, get, files_of(model_folder), ModelUnsupportedError, "does not know the model type")


def test_missing_shard(hub: TinyHub, get: Fetch, saved_model: Path) -> None:
    files = files_of(saved_model)
    del files["model.safetensors"]
    index = {"weight_map": {"x": "model-00001-of-00001.safetensors"}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    refused(hub, get, files, ModelCorruptError, "does not have it")


def test_truncated_on_the_hub(hub: TinyHub, get: Fetch, saved_model: Path) -> None:
    files = files_of(saved_model)
    files["model.safetensors"] = files["model.safetensors"][:-100]
    hub.repositories[ID] = Repository(files)
    with pytest.raises(ModelCorruptError, match="truncated or damaged"):
        get()


def test_a_connection_that_breaks_once(hub: TinyHub, get: Fetch, saved_model: Path) -> None:
    hub.repositories[ID] = Repository(files_of(saved_model), breaks={"model.safetensors": 1})
    assert files_of(get().path) == files_of(saved_model)


def test_a_connection_that_always_breaks(
    hub: TinyHub, get: Fetch, saved_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub library tries a few times a second apart; here, without the pauses."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    hub.repositories[ID] = Repository(files_of(saved_model), breaks={"model.safetensors": 1000})
    with pytest.raises(ModelUnavailableError, match=r"cannot be reached.*goes on"):
        get()
    hub.repositories[ID] = Repository(files_of(saved_model))
    assert files_of(get().path) == files_of(saved_model)


# ---------------------------------------------------------------- aliases


def test_alias_from_the_hub(hub: TinyHub, get: Fetch, saved_model: Path, store: ModelStore) -> None:
    hub.repositories[ID] = Repository(files_of(saved_model))
    model = get("short", aliases={"short": Alias("short", ID, None)})
    assert model.name == "short"
    assert model.source == f"hub {ID}@{COMMIT}"
    assert store.list_models() == [], "the hub's own cache holds it"


def test_alias_with_no_source_left(hub: TinyHub, get: Fetch) -> None:
    with pytest.raises(
        ModelUnavailableError, match=r"short is not stored here and cannot be fetched.*no model"
    ):
        get("short", aliases={"short": Alias("short", ID, None)})


def test_unknown_name(get: Fetch) -> None:
    with pytest.raises(ModelUnavailableError, match=r"Unknown model 'smollm'.*smollm2-135m.*org/name"):
        get("smollm")
