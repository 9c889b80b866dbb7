"""JSON bodies to checked values: strict parsing, and pydantic's complaints in OpenAI's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from ..errors import MalformedRequestError, ParameterError

MAX_TOKEN_ID: Final = 2**31 - 1
MAX_STOPS: Final = 16
MAX_SHOWN_CHARS: Final = 80

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Model = TypeVar("Model", bound=BaseModel)


class Wire(BaseModel):
    """Base of every object on the wire: exact types, finite numbers, no unknown field.

    A field that may be ``null`` treats it as left out, as OpenAI does.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def text_or_list(value: Any) -> str | None:
    """Which member of a union of text and a list is meant: the tag of either."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag("<list>")],
    Discriminator(text_or_list),
]


def decode(body: bytes) -> dict[str, Any]:
    """A body to a JSON object, without NaN or half characters. Raises :class:`MalformedRequestError`."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        reason = str(error)[:MAX_SHOWN_CHARS]
        raise MalformedRequestError(f"We could not parse the JSON body of your request: {reason}") from None
    if not isinstance(data, dict):
        raise MalformedRequestError("The body of the request must be a JSON object.")
    return data


def validate(model: type[Model], data: Mapping[str, Any]) -> Model:
    """Check ``data`` against ``model``; the first fault is raised as :class:`ParameterError`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _parameter_error(first["type"], first["loc"], first["msg"]) from None


def path_of(location: Sequence[int | str]) -> str:
    """``("messages", 0, "<list>", "text")`` as a client would write it: ``messages[0].text``."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            shown = step[:MAX_SHOWN_CHARS]
            path += f".{shown}" if path else shown
    return path


_EXPECTED: Final[Mapping[str, str]] = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "union_tag_not_found": "one of the documented forms",
    "union_tag_invalid": "one of the documented forms",
}

# pydantic's error type → (what the client is told, its code)
_FAULTS: Final[Mapping[str, tuple[str, str]]] = {
    "extra_forbidden": ("Unrecognized request argument supplied: {}", "unknown_parameter"),
    "missing": ("Missing required parameter: '{}'.", "missing_required_parameter"),
    "none_required": (
        "Unsupported parameter: '{}' is not supported by this server.",
        "unsupported_parameter",
    ),
}


def _parameter_error(kind: str, location: Sequence[int | str], message: str) -> ParameterError:
    path = path_of(location)
    if kind in _FAULTS:
        text, code = _FAULTS[kind]
        return ParameterError(text.format(path), param=path, code=code)
    if kind in _EXPECTED:
        text = f"Invalid type for '{path}': expected {_EXPECTED[kind]}."
        return ParameterError(text, param=path, code="invalid_type")
    reason = message[:1].lower() + message[1:]
    return ParameterError(f"Invalid value for '{path}': {reason}.", param=path)
