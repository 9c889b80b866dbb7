"""Where requests go: upstream servers, chosen by the protocol of the request and the name of the model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from ..errors import ParameterError, UnknownModelError
from ..providers.planner import Mode
from ..providers.repair import RepairRules

Protocol: TypeAlias = Literal["openai", "anthropic"]

Diagnose: TypeAlias = Literal["off", "redacted", "text"]
REPAIRS: Final = frozenset(item.name for item in fields(RepairRules))

_KNOWN_HOSTS: Final[Mapping[str, tuple[Protocol, str, str]]] = {
    "api.anthropic.com": ("anthropic", "ANTHROPIC_API_KEY", "anthropic"),
    "api.openai.com": ("openai", "OPENAI_API_KEY", "openai"),
    "api.deepseek.com": ("openai", "DEEPSEEK_API_KEY", "deepseek"),
    "openrouter.ai": ("openai", "OPENROUTER_API_KEY", ""),
    "api.groq.com": ("openai", "GROQ_API_KEY", "groq"),
}
_TIMES: Final = ("connect_timeout_s", "idle_timeout_s", "max_wait_s")


@dataclass(frozen=True, slots=True)
class Upstream:
    """One server.

    Attributes:
        name: for logs and metrics.
        url: its address, without ``/v1``.
        protocol: which API it speaks.
        models: patterns of the names it serves; ``*`` stands for anything.
        key_env: the environment variable with its key; empty: the caller's own key is passed on.
        key: what stands there.
        vendor: whose cache rules and prices hold; empty: by the model's name.
        plan: about the vendor's prompt cache: ``off``, ``observe`` (count only) or ``plan`` (breakpoints).
        repair: what ``plan`` may rewrite first, so that prompts begin alike: ``tool_order``, ``key_order``,
            ``volatile``. The model reads something else then.
        diagnose: why the cache was not read: ``off``, ``redacted`` (shapes of texts) or ``text``; the vendor
            is asked, too.
        keep_alive: read what would expire, and will probably be asked for, once more before; costs tokens.
        count_streams: ask for the usage of Chat Completions' streams also where the client does not, and take
            it out of the stream again.
        max_tokens: how long answers may be where a request in the other API does not say; 0: it has to.
        connect_timeout_s: to reach it.
        idle_timeout_s: the longest silence.
        max_retries: how often a request is sent again when it was refused before anything of it was done.
        own_headers: it is an ostinato, too: headers that begin with ``x-ostinato-`` are passed on.
        max_wait_s: the longest wait before that; an upstream that asks for more is believed, and not asked.
    """

    name: str
    url: str
    protocol: Protocol = "openai"
    models: tuple[str, ...] = ("*",)
    key_env: str = ""
    key: str = field(default="", repr=False)
    vendor: str = ""
    plan: Mode = "observe"
    repair: tuple[str, ...] = ()
    diagnose: Diagnose = "off"
    keep_alive: bool = False
    count_streams: bool = False
    max_tokens: int = 0
    connect_timeout_s: float = 10.0
    idle_timeout_s: float = 120.0
    max_retries: int = 2
    max_wait_s: float = 20.0
    own_headers: bool = False

    def __post_init__(self) -> None:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ParameterError(f"{self.name}: {self.url!r} is not an address of HTTP", param="url")
        if address.username or address.password:
            raise ParameterError(f"{self.name}: keys belong into key_env, not into the url", param="url")
        if self.protocol not in get_args(Protocol):
            raise ParameterError(f"{self.name}: protocol must be openai or anthropic", param="protocol")
        if self.plan not in get_args(Mode):
            raise ParameterError(f"{self.name}: plan must be off, observe or plan", param="plan")
        if unknown := set(self.repair) - REPAIRS:
            raise ParameterError(f"{self.name}: there is no repair {min(unknown)!r}", param="repair")
        if self.diagnose not in get_args(Diagnose):
            raise ParameterError(f"{self.name}: diagnose must be off, redacted or text", param="diagnose")
        if self.plan != "plan" and (self.repair or self.keep_alive):
            raise ParameterError(f'{self.name}: repair and keep_alive need plan = "plan"', param="plan")
        if self.keep_alive and not self.key:
            # A caller's key is not ours to spend when nobody asks.
            raise ParameterError(f"{self.name}: keep_alive needs key_env", param="keep_alive")
        if self.max_tokens < 0:
            raise ParameterError(f"{self.name}: max_tokens must be 0 or more", param="max_tokens")
        for name in _TIMES:
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86_400:
                raise ParameterError(f"{self.name}: {name} must be seconds above 0", param=name)
        if not 0 <= self.max_retries <= 10:
            raise ParameterError(f"{self.name}: max_retries must be 0 to 10", param="max_retries")

    def knows(self, model: str) -> bool:
        return any(fnmatchcase(model, pattern) for pattern in self.models)

    def names(self, model: str) -> bool:
        """Whether it knows the model by more than ``*``."""
        return any(pattern != "*" and fnmatchcase(model, pattern) for pattern in self.models)


def choose(
    upstreams: Sequence[Upstream], protocol: Protocol, model: str, *, is_translatable: bool = False
) -> Upstream:
    """Where a request goes.

    Whose ``models`` name the model goes before whose are just ``*``; then who speaks the request's protocol
    before who speaks the other; then who stands first.

    Raises:
        UnknownModelError: none serves it.
        ParameterError: one does, but in the other protocol, into which this kind of request cannot be put.
    """
    knowing = [upstream for upstream in upstreams if upstream.knows(model)]
    fitting = [upstream for upstream in knowing if is_translatable or upstream.protocol == protocol]
    if fitting:
        return min(fitting, key=lambda upstream: (not upstream.names(model), upstream.protocol != protocol))
    shown = model[:80]
    if knowing:
        raise ParameterError(
            f"The model '{shown}' is behind {knowing[0].protocol}'s API here, into which this kind of "
            f"request of {protocol}'s cannot be put.",
            param="model",
            code="wrong_protocol",
        )
    raise UnknownModelError(f"No upstream serves the model '{shown}'.")


def parse_upstream(
    text: str, environment: Mapping[str, str], *, plan: Mode = "observe", diagnose: Diagnose = "off"
) -> Upstream:
    """An address as on the command line: ``https://api.openai.com``, ``anthropic+http://127.0.0.1:9000``.

    Raises:
        ParameterError: it is none.
    """
    protocol, plus, rest = text.partition("+")
    url = rest if plus and protocol in get_args(Protocol) else text
    host = urlsplit(url).hostname or ""
    known = _KNOWN_HOSTS.get(host)
    if url is text:
        protocol = known[0] if known is not None else "openai"
    key_env = known[1] if known is not None else ""
    return Upstream(
        name=host or text,
        url=_without_version(url),
        protocol=protocol,  # type: ignore[arg-type]  # checked just there
        models=("claude-*",) if host == "api.anthropic.com" else ("*",),
        key_env=key_env,
        key=environment.get(key_env, "") if key_env else "",
        vendor=known[2] if known is not None else "",
        plan=plan,
        diagnose=diagnose,
    )


def read_upstreams(file: Path, environment: Mapping[str, str]) -> tuple[Upstream, ...]:
    """Upstreams of a TOML file: ``[[upstream]]`` tables with the fields of :class:`Upstream` but ``key``.

    Raises:
        ParameterError: it cannot be read, a field is unknown, or a key's variable is not set; it names both.
    """
    try:
        given: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParameterError(f"{file} cannot be read: {error}", param="upstreams") from error
    tables = given.get("upstream")
    if given.keys() - {"upstream"} or not isinstance(tables, list) or not tables:
        raise ParameterError(
            f"{file}: there have to be [[upstream]] tables, and nothing else", param="upstreams"
        )
    allowed = {item.name for item in fields(Upstream)} - {"key"}
    found: list[Upstream] = []
    for number, table in enumerate(tables, 1):
        if unknown := table.keys() - allowed:
            raise ParameterError(
                f"{file}, upstream {number}: there is no {min(unknown)!r}", param="upstreams"
            )
        if not isinstance(table.get("url"), str):
            raise ParameterError(f"{file}, upstream {number}: url is missing", param="upstreams")
        values = dict(table)
        values["url"] = _without_version(values["url"])
        values["models"] = tuple(map(str, values.get("models", ("*",))))
        values["repair"] = tuple(map(str, values.get("repair", ())))
        values.setdefault("name", urlsplit(values["url"]).hostname or f"upstream {number}")
        if key_env := values.get("key_env"):
            if not environment.get(key_env):
                raise ParameterError(f"{file}, upstream {number}: {key_env} is not set", param=str(key_env))
            values["key"] = environment[key_env]
        try:
            found.append(Upstream(**values))
        except (ParameterError, TypeError) as error:
            raise ParameterError(f"{file}, upstream {number}: {error}", param="upstreams") from error
    return tuple(found)


def _without_version(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
