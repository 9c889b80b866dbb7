"""A model folder's tokenizer files, read: vocabulary, special tokens, end tokens, chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from tokenizers import AddedToken

from ..errors import ModelCorruptError, ModelUnsupportedError

# The names under which a tokenizer's configuration gives its special tokens a role.
TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_Json: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What decides how a model's text becomes tokens, as its folder says it.

    ``backend`` is ``tokenizer.json``, parsed. ``named_tokens`` are the texts of the tokens with a role
    (``bos_token`` …), ``control_tokens`` those and all others that the configuration sets apart; ``added``
    are token declarations outside ``tokenizer.json``, by id. ``chat_templates`` are the model's templates by
    name, the usual one under ``default``.
    """

    backend: dict[str, _Json]
    named_tokens: dict[str, str]
    control_tokens: tuple[AddedToken, ...]
    added: dict[int, AddedToken]
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a folder in Hugging Face's layout.

    Raises:
        ModelUnsupportedError: there is no ``tokenizer.json``.
        ModelCorruptError: a file is not what its name says.
    """
    backend_file = folder / "tokenizer.json"
    if not backend_file.is_file():
        raise ModelUnsupportedError(
            f"{folder} has no tokenizer.json: load the model once with transformers and save its tokenizer"
        )
    backend = _read(backend_file)
    if not isinstance(backend.get("model"), dict):
        raise ModelCorruptError(f"{backend_file} describes no tokenizer model")
    config = _read_if_there(folder / "tokenizer_config.json")
    added = {
        int(number): _added_token(declared)
        for number, declared in config.get("added_tokens_decoder", {}).items()
    }
    # As transformers has it: the older file counts only where the newer form is missing.
    if "added_tokens_decoder" not in config:
        config = {**config, **_read_if_there(folder / "special_tokens_map.json")}
    declared = {token.content: token for token in added.values()}
    for token in backend.get("added_tokens", []):
        declared.setdefault(token["content"], _added_token(token))
    return TokenizerFiles(
        backend=backend,
        named_tokens={role: text for role in TOKEN_ROLES if (text := _text(config.get(role))) is not None},
        control_tokens=tuple(_control_tokens(config, declared)),
        added=added,
        eos_token_ids=_eos_token_ids(folder),
        chat_templates=_chat_templates(folder, config),
    )


def _control_tokens(config: Mapping[str, _Json], declared: Mapping[str, AddedToken]) -> list[AddedToken]:
    """Tokens with a role, and all that the configuration lists as special: text must never become them."""
    given = [value for key, value in config.items() if key.endswith("_token") and value is not None]
    for key in ("additional_special_tokens", "extra_special_tokens", "chat_control_tokens"):
        listed = config.get(key) or []
        given.extend(listed.values() if isinstance(listed, dict) else listed)
    found: dict[str, AddedToken] = {}
    for value in given:
        text = _text(value)
        if text is None:  # a setting such as "add_bos_token"
            continue
        token = declared.get(text) or (
            _added_token(value) if isinstance(value, dict) else AddedToken(text, normalized=False)
        )
        found[text] = AddedToken(
            text,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=True,
        )
    return list(found.values())


def _text(value: _Json) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _added_token(declared: Mapping[str, _Json]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(declared["content"], **{flag: declared[flag] for flag in flags if flag in declared})


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The end tokens that the model's generation settings name; a model can have several."""
    for name in ("generation_config.json", "config.json"):
        given = _read_if_there(folder / name).get("eos_token_id")
        if given is not None:
            return tuple(given) if isinstance(given, list) else (given,)
    return ()


def _chat_templates(folder: Path, config: Mapping[str, _Json]) -> dict[str, str]:
    """Separate files count before entries in the configuration, as in transformers."""
    templates: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        templates.update((entry["name"], entry["template"]) for entry in given)
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    elif "default" not in templates:
        older = _read_if_there(folder / "chat_template.json").get("chat_template")
        if isinstance(older, str):
            templates["default"] = older
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def _read(file: Path) -> dict[str, _Json]:
    try:
        content = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ModelCorruptError(f"{file} is not valid JSON: {error}; fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelCorruptError(f"{file} is not a JSON object")
    return content


def _read_if_there(file: Path) -> dict[str, _Json]:
    return _read(file) if file.is_file() else {}
