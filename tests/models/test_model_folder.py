"""Folders that hold a model, and all the ways in which they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from recorder import Recorder
from tiny_folder import edit_config, save_model

from ostinato.errors import ModelCorruptError, ModelUnavailableError, ModelUnsupportedError
from ostinato.models.fetch import fetch
from ostinato.models.folder import inspect_folder
from ostinato.models.store import ModelStore


def test_a_folder_is_used_where_it_lies(model_folder: Path, store: ModelStore) -> None:
    model = fetch(str(model_folder), store)
    assert model.path == model_folder
    assert model.name == "tiny-llama"
    assert model.source == f"folder {model_folder}"
    assert model.weights_digest.startswith("b3:")
    assert not store.root.exists(), "nothing is copied"


def test_digest_is_of_the_content(model_folder: Path, store: ModelStore, tmp_path: Path) -> None:
    digest = fetch(str(model_folder), store).weights_digest
    moved = Path(shutil.copytree(model_folder, tmp_path / "elsewhere" / "other-name"))
    assert fetch(str(moved), store).weights_digest == digest
    (moved / "tokenizer.json").write_bytes((moved / "tokenizer.json").read_bytes() + b"\n")
    assert fetch(str(moved), store).weights_digest == digest, "the tokenizer has its own identity"
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    assert fetch(str(moved), store).weights_digest != digest
    edit_config(model_folder, rms_norm_eps=1e-4)
    assert fetch(str(model_folder), store).weights_digest != digest, "the config decides what they compute"


def test_shards(store: ModelStore, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "sharded", max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    before = fetch(str(folder), store).weights_digest
    data = bytearray(shards[-1].read_bytes())
    data[-1] ^= 1
    shards[-1].write_bytes(data)
    assert fetch(str(folder), store).weights_digest != before, "every shard counts"
    shards[0].unlink()
    with pytest.raises(ModelCorruptError, match=f"lacks 1 of {len(shards)} weight files"):
        fetch(str(folder), store)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/x.safetensors", "weights.bin"])
def test_index_that_points_elsewhere(name: str, model_folder: Path, store: ModelStore) -> None:
    (model_folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": name}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelCorruptError, match="outside its folder or to another format"):
        fetch(str(model_folder), store)


def test_truncated_weights(model_folder: Path, store: ModelStore) -> None:
    path = model_folder / "model.safetensors"
    data = path.read_bytes()
    for length in (0, 3, 8, 9, 200, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ModelCorruptError, match="truncated or damaged"):
            fetch(str(model_folder), store)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("", "not valid JSON"), ("[1]", "JSON object"), ("\x00", "not valid JSON")],
)
def test_broken_config(text: str, message: str, model_folder: Path, store: ModelStore) -> None:
    (model_folder / "config.json").write_text(text)
    with pytest.raises(ModelCorruptError, match=message):
        fetch(str(model_folder), store)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_broken_companions(name: str, model_folder: Path, store: ModelStore) -> None:
    path = model_folder / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelCorruptError, match=r"not valid JSON.*Fetch the model again"):
        fetch(str(model_folder), store)


def test_no_config(tmp_path: Path, store: ModelStore) -> None:
    with pytest.raises(ModelUnsupportedError, match=r"has no config\.json"):
        fetch(str(tmp_path), store)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelUnsupportedError, match=r"give the path of the \.gguf file"):
        fetch(str(tmp_path), store)


def test_pickled_weights_are_refused(model_folder: Path, store: ModelStore) -> None:
    (model_folder / "model.safetensors").rename(model_folder / "pytorch_model.bin")
    with pytest.raises(ModelUnsupportedError, match=r"only pickled weights.*never loaded.*save_pretrained"):
        fetch(str(model_folder), store)


def test_no_weights(model_folder: Path, store: ModelStore) -> None:
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupportedError, match="no weights to load"):
        fetch(str(model_folder), store)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "frobnicate"}, "does not know the model type 'frobnicate'.*newer transformers"),
        ({"model_type": None}, "does not know the model type None"),
        ({"model_type": "own", "auto_map": {"AutoModel": "x.Y"}}, "its own code, which is never run"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "bart"}, "encoder-decoder"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "vit"}, "does not generate text"),
        ({"architectures": ["LlamaModel"]}, "without a language head"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "without a language head"),
    ],
)
def test_not_a_causal_language_model(
    changes: dict[str, object], message: str, model_folder: Path, store: ModelStore
) -> None:
    edit_config(model_folder, **changes)
    with pytest.raises(ModelUnsupportedError, match=message):
        fetch(str(model_folder), store)


def test_no_such_path(store: ModelStore) -> None:
    for name in ("./nowhere", "/nowhere/at/all", "~/nowhere-at-all"):
        with pytest.raises(ModelUnavailableError, match="There is no file or folder"):
            fetch(name, store)
    with pytest.raises(ModelUnavailableError, match="There is no file"):
        fetch("nowhere.gguf", store)


def test_tokenizer_in_an_older_format(model_folder: Path, store: ModelStore) -> None:
    """Without tokenizer.json, one is built into the store, beside links to the weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_old(model_folder)
    progress = Recorder()
    model = fetch(str(model_folder), store, progress=progress)
    assert model.path != model_folder
    assert (model.path / "tokenizer.json").is_file()
    assert (model.path / "model.safetensors").is_symlink()
    assert model.weights_digest == fetch(str(model_folder), store).weights_digest
    tokenizer = AutoTokenizer.from_pretrained(str(model.path), local_files_only=True)
    assert tokenizer.decode(tokenizer("hello world")["input_ids"]) == "hello world"
    AutoModelForCausalLM.from_pretrained(str(model.path), local_files_only=True)
    (stored,) = store.list_models()
    assert stored.size_bytes < 100_000, "the weights are not copied"
    built = [s for s in progress.steps if s[0].startswith("Building")]
    again = Recorder()
    fetch(str(model_folder), store, progress=again)
    assert len(built) == 1
    assert not any(s[0].startswith("Building") for s in again.steps)


def test_links_to_a_folder_that_moved(model_folder: Path, store: ModelStore, tmp_path: Path) -> None:
    make_old(model_folder)
    before = fetch(str(model_folder), store)
    (tmp_path / "elsewhere").mkdir()
    moved = model_folder.rename(tmp_path / "elsewhere" / model_folder.name)
    assert not (before.path / "model.safetensors").exists(), "the link leads nowhere now"
    after = fetch(str(moved), store)
    assert after.path == before.path
    assert (after.path / "model.safetensors").samefile(moved / "model.safetensors")
    assert after.weights_digest == before.weights_digest


def test_no_tokenizer_at_all(model_folder: Path, store: ModelStore) -> None:
    for path in model_folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelUnsupportedError, match=r"no tokenizer\.json and none can be built"):
        fetch(str(model_folder), store)
    assert store.list_models() == []


def make_old(folder: Path) -> None:
    """Replace the tokenizer by GPT-2's two files."""
    for path in folder.glob("tokenizer*"):
        path.unlink()
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [chr(256 + i) for i in range(256 - len(alphabet))]
    tokens = ["<|endoftext|>", *map(chr, alphabet), *rest, "he", "ll", "hell", "hello"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\nhell o\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def test_inspect_names_what_would_be_loaded(model_folder: Path) -> None:
    folder = inspect_folder(model_folder)
    assert folder.weight_files == ("model.safetensors",)
    assert folder.has_tokenizer
    assert folder.config["model_type"] == "llama"
