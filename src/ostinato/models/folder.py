"""What makes a folder a model that can be loaded: checked before anything is built from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ostinato.errors import ModelCorruptError, ModelUnsupportedError

from .digest import digest_file
from .progress import Progress, step
from .store import weights_digest

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CAUSAL_SUFFIXES = ("forcausallm", "lmheadmodel", "modelwithlmhead", "forconditionalgeneration")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with everything to load a model, and the names of the weight files that would be loaded."""

    path: Path
    config: Mapping[str, Any]
    weight_files: tuple[str, ...]
    has_tokenizer: bool


def inspect_folder(path: Path) -> ModelFolder:
    """Check that ``path`` holds a causal language model in safetensors form, complete.

    Raises:
        ModelUnsupportedError: no config, only pickled or GGUF weights, or not a causal language model.
        ModelCorruptError: unreadable JSON, a missing shard, or a truncated weight file.
    """
    config = read_config(path)
    weight_files = find_weights(path)
    for name in (TOKENIZER_FILE, "tokenizer_config.json", "generation_config.json"):
        if (path / name).is_file():
            read_json(path / name)
    for name in weight_files:
        if name.endswith(".safetensors"):
            check_safetensors(path / name)
    check_architecture(config, str(path))
    return ModelFolder(path, config, weight_files, (path / TOKENIZER_FILE).is_file())


def read_config(path: Path) -> dict[str, Any]:
    """The folder's ``config.json``. Raises as :func:`inspect_folder` does."""
    if not (path / CONFIG_FILE).is_file():
        present = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
        if any(name.endswith(".gguf") for name in present):
            hint = "It holds GGUF files: give the path of the .gguf file itself."
        else:
            hint = "Give the folder that save_pretrained wrote, or a model hub id like org/name."
        raise ModelUnsupportedError(f"{path} has no {CONFIG_FILE}, so it is no model folder. {hint}")
    return read_json(path / CONFIG_FILE)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelCorruptError."""
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ModelCorruptError(f"{path} is not valid JSON ({error}). Fetch the model again.") from error
    if not isinstance(value, dict):
        raise ModelCorruptError(f"{path} should hold a JSON object. Fetch the model again.")
    return value


def find_weights(path: Path) -> tuple[str, ...]:
    """Names of the files that transformers would load from this folder, in its order of preference."""
    if (path / WEIGHTS_FILE).is_file():
        return (WEIGHTS_FILE,)
    if (path / INDEX_FILE).is_file():
        shards = shard_names(path / INDEX_FILE)
        if missing := [name for name in shards if not (path / name).is_file()]:
            raise ModelCorruptError(
                f"{path} lacks {len(missing)} of {len(shards)} weight files ({', '.join(missing[:3])})."
                " Fetch the model again."
            )
        return (INDEX_FILE, *shards)
    raise no_weights(str(path), [p.name for p in path.iterdir()])


def shard_names(index_path: Path) -> tuple[str, ...]:
    """The weight files that a sharded checkpoint's index names. Raises ModelCorruptError."""
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelCorruptError(f"{index_path} names no weight files. Fetch the model again.")
    names = sorted({str(name) for name in weight_map.values()})
    if strange := [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]:
        raise ModelCorruptError(
            f"{index_path} points outside its folder or to another format: {strange[0]!r}."
            " Fetch the model from a source you trust."
        )
    return tuple(names)


def no_weights(where: str, names: list[str]) -> ModelUnsupportedError:
    """Why these files hold no weights that we load."""
    if any(name.endswith(_PICKLED) for name in names):
        return ModelUnsupportedError(
            f"{where} has only pickled weights (.bin, .pt). They are never loaded, because a pickle can run"
            " any program. Convert them once in a place you trust: load the model with transformers there and"
            " call save_pretrained, which writes safetensors."
        )
    gguf_files = sorted(name for name in names if name.endswith(".gguf"))
    if gguf_files:
        return ModelUnsupportedError(
            f"{where} has GGUF files only ({', '.join(gguf_files[:3])}). Download one and give its path."
        )
    return ModelUnsupportedError(f"{where} has no {WEIGHTS_FILE}, so there are no weights to load.")


def check_safetensors(path: Path) -> None:
    """The file is whole. Raises ModelCorruptError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np"):
            pass
    except SafetensorError as error:
        raise ModelCorruptError(
            f"{path} is truncated or damaged ({error}). Delete it and fetch the model again."
        ) from error


def check_architecture(config: Mapping[str, Any], where: str) -> None:
    """transformers knows this model, and it is a decoder with a language head.

    Raises:
        ModelUnsupportedError: it is not.
    """
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        own_code = " It comes with its own code, which is never run." if "auto_map" in config else ""
        raise ModelUnsupportedError(
            f"{where}: transformers {transformers.__version__} does not know the model type {model_type!r}."
            f"{own_code} A newer transformers may: pip install --upgrade transformers."
        )
    config_class = CONFIG_MAPPING[model_type]
    if config.get("is_encoder_decoder", getattr(config_class, "is_encoder_decoder", False)):
        raise ModelUnsupportedError(
            f"{where} is an encoder-decoder model ({model_type}); only decoder language models run here."
        )
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnsupportedError(
            f"{where} is a {model_type} model, which does not generate text token by token."
        )
    known = {str(name).lower() for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    named = [str(name).lower() for name in config.get("architectures") or ()]
    if named and not any(name in known or name.endswith(_CAUSAL_SUFFIXES) for name in named):
        raise ModelUnsupportedError(
            f"{where} was saved as {', '.join(config['architectures'])}, without a language head, so its"
            " next-token weights would be random. Take the causal language model of this family."
        )


def digest_weights(folder: ModelFolder, progress: Progress | None = None) -> str:
    """The digest of a folder's weights and config, by content. Raises OSError."""
    names = (CONFIG_FILE, *folder.weight_files)
    total_bytes = sum((folder.path / name).stat().st_size for name in names)
    with step(progress, f"Checking {folder.path.name}", total_bytes) as advance:
        return weights_digest({name: digest_file(folder.path / name, advance) for name in names})


def build_tokenizer(folder: Path, out: Path) -> None:
    """Write ``tokenizer.json`` and its companions for a folder that has only an older vocabulary format.

    Raises:
        ModelUnsupportedError: no tokenizer can be built from what is there.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        tokenizer.save_pretrained(str(out))
    except (ValueError, LookupError, TypeError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelUnsupportedError(
            f"{folder} has no {TOKENIZER_FILE} and none can be built from its other files ({reason})."
            " If it needs sentencepiece, install that: pip install sentencepiece."
        ) from error
    if not (out / TOKENIZER_FILE).is_file():
        raise ModelUnsupportedError(
            f"{folder} has a tokenizer of the kind {type(tokenizer).__name__}, which cannot be saved as"
            f" {TOKENIZER_FILE}."
        )
