"""GGUF to a Hugging Face folder, once: fp32 safetensors, config, tokenizer.

What a tensor is called in the model and how its rows are permuted is transformers' knowledge, used here as it
stands, so that the result is bit-equal to ``from_pretrained(gguf_file=…)``. What we add: one tensor at a time
in memory, a file that can be continued, and a refusal where transformers would fill a hole with noise.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ostinato.errors import ModelCorruptError, ModelUnsupportedError

from . import disk
from .digest import digest_bytes
from .folder import WEIGHTS_FILE, check_architecture
from .gguf_header import GgufHeader, read_gguf_header
from .gguf_tensors import TensorMap, one_line, tensor_map_of
from .progress import Progress, note, step
from .weights_file import Layout, ResumableWriter, layout_of

_CONVERTER = 1
_LINK = "model.gguf"
# What building a model or a tokenizer from a stranger's metadata may raise: it reaches every constructor.
_FOREIGN_ERRORS = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError),
    *(RuntimeError, ImportError),
)


def convert_gguf(source: Path, work: Path, *, source_digest: str, progress: Progress | None = None) -> Path:
    """Convert ``source`` inside the folder ``work``; returns the finished folder in it, not yet published.

    An earlier run in the same ``work`` that was interrupted is continued where it stopped.

    Raises:
        ModelCorruptError: the file is truncated or contradicts itself.
        ModelUnsupportedError: transformers cannot read this architecture or kind of file.
        StorageFullError: no room for the result.
    """
    plan = _plan(source, work, source_digest, progress)
    out = work / "out"
    with disk.disk_errors(f"Converting {source.name}", work):
        out.mkdir(exist_ok=True)
        _write_weights(plan, out / WEIGHTS_FILE, work / "journal", progress)
        with step(progress, f"Writing the tokenizer of {source.name}", None):
            _write_config(out, plan)
            _write_tokenizer(out, plan)
    return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that is known before the first tensor is read. ``identity`` names what the result depends on."""

    source: Path
    lonely: Path
    header: GgufHeader
    model: Any
    tensor_map: TensorMap
    layout: Layout
    identity: str


def _plan(source: Path, work: Path, source_digest: str, progress: Progress | None) -> _Plan:
    header = read_gguf_header(source)
    with step(progress, f"Reading {source.name}", None):
        lonely = _lonely_link(source, work)
        model = _model_of(lonely, header, source)
        shapes = _distinct_tensors(model)
        tensor_map = tensor_map_of(lonely, header, model, shapes.keys())
    layout = layout_of({piece.target: shapes[piece.target] for piece in tensor_map.pieces})
    if missing := sorted(shapes.keys() - layout.shapes.keys()):
        raise ModelUnsupportedError(
            f"{source} lacks {len(missing)} of the model's tensors ({', '.join(missing[:3])} …), or"
            f" transformers does not know their names for the architecture {header.architecture!r}."
        )
    parts = [str(_CONVERTER), source_digest, digest_bytes(layout.header)]
    parts += [_version(package) for package in ("transformers", "gguf", "numpy", "torch")]
    identity = digest_bytes("\n".join(parts).encode())
    return _Plan(source, lonely, header, model, tensor_map, layout, identity)


def _write_weights(plan: _Plan, path: Path, journal_path: Path, progress: Progress | None) -> None:
    present_bytes = path.stat().st_size if path.exists() else 0
    purpose = f"Converting {plan.source.name}"
    disk.require_space(path.parent, plan.layout.size_bytes - present_bytes, purpose)
    with ResumableWriter(path, journal_path, plan.layout, plan.identity) as writer:
        if writer.num_done:
            note(progress, f"Going on where an earlier conversion of {plan.source.name} stopped.")
        with step(progress, purpose, plan.layout.size_bytes) as advance:
            advance(writer.done_bytes)
            for piece in plan.tensor_map.pieces[writer.num_done :]:
                tensor = plan.tensor_map.convert(piece)
                if tensor.shape != (expected := plan.layout.shapes[piece.target]):
                    raise ModelCorruptError(
                        f"{plan.source}: {piece.target} has the shape {tensor.shape}, by the metadata it is"
                        f" {expected}. The file contradicts itself; use another conversion of this model."
                    )
                writer.write(piece.target, tensor)
                advance(tensor.nbytes)
        writer.finish()


# ---------------------------------------------------------------- what transformers makes of the file


def _lonely_link(source: Path, work: Path) -> Path:
    """The file under a fixed name in a folder of its own: transformers also looks at what lies beside it."""
    link = work / "source" / _LINK
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(source.resolve())
    return link


def _model_of(lonely: Path, header: GgufHeader, source: Path) -> Any:
    """The model as transformers builds it from the file's metadata, on the meta device (without memory)."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(lonely.parent), gguf_file=lonely.name)
        config.dtype = torch.float32
        check_architecture(config.to_dict(), str(source))
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (*_FOREIGN_ERRORS, StrictDataclassError) as error:
        raise ModelUnsupportedError(
            f"transformers {_version('transformers')} cannot read the GGUF architecture"
            f" {header.architecture!r} of {source} ({one_line(error)}). Use the model's safetensors folder"
            " or model hub id instead."
        ) from error


def _distinct_tensors(model: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that must be stored; of tied ones only the first."""
    distinct: dict[str, tuple[int, ...]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            distinct[name] = tuple(tensor.shape)
    return distinct


# ---------------------------------------------------------------- the small files


def _write_config(out: Path, plan: _Plan) -> None:
    body = orjson.loads(plan.model.config.to_json_string(use_diff=False))
    for key in ("quantization_config", "_name_or_path", "name_or_path", "_model_name_or_path"):
        body.pop(key, None)
    body["architectures"] = [type(plan.model).__name__]
    body["dtype"] = "float32"
    (out / "config.json").write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    generation = plan.model.generation_config
    generation.eos_token_id = _end_tokens(generation.eos_token_id, plan.header.metadata)
    generation.save_pretrained(str(out))


def _end_tokens(eos: int | list[int] | None, metadata: Mapping[str, Any]) -> int | list[int] | None:
    """A chat model may end a turn (``eot``) with another token than a text (``eos``): both end an answer."""
    known = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    turn = metadata.get("tokenizer.ggml.eot_token_id")
    if isinstance(turn, int) and turn not in known:
        return [*known, turn]
    return eos


def _write_tokenizer(out: Path, plan: _Plan) -> None:
    from transformers import TokenizersBackend
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    # AutoTokenizer would read the whole metadata again, seconds for a large vocabulary, only to learn the
    # config that we hold. Beside a lone GGUF file its choice comes down to this.
    chosen = TOKENIZER_MAPPING.get(type(plan.model.config), TokenizersBackend)
    if chosen is None or not issubclass(chosen, TokenizersBackend):
        chosen = TokenizersBackend
    try:
        tokenizer = chosen.from_pretrained(str(plan.lonely.parent), gguf_file=plan.lonely.name)
    except _FOREIGN_ERRORS as error:
        raise ModelUnsupportedError(
            f"transformers {_version('transformers')} cannot build the tokenizer of {plan.source} (kind"
            f" {plan.header.metadata.get('tokenizer.ggml.model')!r}: {one_line(error)}). Use the model's"
            " safetensors folder or model hub id instead."
        ) from error
    tokenizer.save_pretrained(str(out))


def _version(package: str) -> str:
    return importlib.metadata.version(package)
