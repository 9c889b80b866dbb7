"""Templates, and the files that pages need: read once, served under names that change with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

from blake3 import blake3
from jinja2 import Environment, PackageLoader, StrictUndefined

from . import formats

STATIC: Final = "/dashboard/static/"
_TYPES: Final = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as it is served."""

    body: bytes
    content_type: str
    digest: str


@lru_cache(maxsize=1)
def assets() -> dict[str, Asset]:
    """All of them by their path below ``static``."""
    found: dict[str, Asset] = {}
    top = files(__package__) / "static"
    for folder, prefix in ((top, ""), (top / "vendor", "vendor/")):
        for item in folder.iterdir():
            kind = _TYPES.get("." + item.name.rpartition(".")[2])
            if item.is_file() and kind is not None:
                body = item.read_bytes()
                found[prefix + item.name] = Asset(body, kind, blake3(body).hexdigest(length=6))
    return found


def url_of(path: str) -> str:
    return f"{STATIC}{path}?v={assets()[path].digest}"


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Everything is escaped, and a name that a template does not get is an error."""
    made = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("number", "count", "percent", "seconds", "size", "dollars", "ago", "utc"):
        made.filters[name] = getattr(formats, name)
    made.globals["asset"] = url_of
    return made


def render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(**values)
