"""Settings, and the only place that reads the environment.

Every setting has a default, an environment variable ``OSTINATO_<NAME>`` and, on the command line, an
option; the command line wins over the environment, the environment over the default.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, cast

from .errors import ParameterError
from .kv.codecs.spec import is_lossy
from .kv.policy_names import POLICY_NAMES
from .responses.control import ANSWERS_FOR, HISTORIES, SEMANTIC_FOR
from .retention.budgets import parse_budget
from .retention.methods import DEFAULT_METHOD, method_by_name
from .reuse.blend import parse_repair
from .tenants import Tenant, read_tenants, tenants_of_keys
from .types import REUSE_MODES, TrimRules, TrimStrategy

DEFAULT_MODEL = "smollm2-135m"
PREFIX = "OSTINATO_"
_SIZES = (
    *("kv_cache", "shared_tier_bytes", "trace_bytes", "tenant_kv_cache", "tenant_shared_tier"),
    *("answers_bytes", "tenant_answers", "kv_recall"),
)
_PATHS = ("store", "shared_tier", "trace", "prompts", "message_rules", "canonical", "warm", "tenants")
QUANTIZATIONS = ("int8",)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be set, with the defaults of a first start.

    Attributes:
        model: alias, Hugging Face id, folder or ``.gguf`` file.
        store: folder that keeps fetched models; ``None``: ``$XDG_CACHE_HOME/ostinato/models``.
        kv_cache: KV capacity in bytes; memory is touched only as it fills (ahead, with a shared tier).
        shared_tier: folder in which this machine's processes keep KV blocks, also across restarts;
            ``None``: none. Under ``/dev/shm`` it is memory.
        shared_tier_bytes: what the blocks in it may take.
        tier_codec: how blocks are stored there: ``exact``, or in fewer bits at the price of answers that may
            differ, such as ``int8`` or ``0-14:int4,15-:int8`` (``docs/codecs.md``).
        policy: what is given up when ``kv_cache`` is full (``docs/policies.md``).
        block_size: tokens in a block.
        max_model_len: longest sequence in tokens; ``None``: the model's own.
        max_batch_tokens: rows of one engine step at most; a long prompt is computed in chunks of this.
        max_sequences: sequences that run at once; more wait.
        max_waiting: sequences that wait at most; more are refused (HTTP 429).
        itl_target_ms: milliseconds between two tokens of an answer to keep to while prompts are computed
            beside it; ``None``: four times what it is without.
        deadline: seconds that a request has where it does not say; ``None``: all it needs.
        dtype: ``auto`` (float32 on CPU, the model's own elsewhere), ``float32``, ``bfloat16``, ``float16``.
        quantization: ``int8``: linear layers in eight bits on a processor, faster and smaller, at the price
            of answers that may differ (``docs/devices.md``); ``None``: weights as they are.
        device: where torch computes.
        template: ``auto`` (the model's own), a named template, or a file with a Jinja template.
        message_rules: TOML file with roles of your own, and with rules for repeated roles and late system
            messages.
        canonical: TOML file with rules of canonical form, for all conversations; it changes what the model
            reads.
        prompts: TOML file with named prompts.
        trim: what to do with conversations that are too long, where a request does not say: ``off`` (refuse
            them), ``drop``, ``shorten`` or ``sticky``.
        trim_budget: the most tokens a prompt may then have; ``None``: what the model's length leaves beside
            the answer.
        trim_low_water: the part of the budget that trimming makes room down to.
        keep_answers: have answers come back as history in the tokens they were generated in. A prompt's
            tokens, and so its answer, then depend on what was generated before.
        refuse_special_text: refuse messages in which the text of a special token stands. Off, it is text like
            any other, and never becomes the token.
        offline: never ask the network for a model.
        hf_token: token for gated models on the hub.
        host, port: where the server listens.
        api_keys: comma-separated keys; each has its own salt, so that holders share no KV. Empty: open.
        tenants: TOML file with more keys, by name, and with limits of their own.
        tenant_kv_cache: what each tenant (API key, or salt) may keep of ``kv_cache``; ``None``: all.
        tenant_shared_tier: and of ``shared_tier_bytes``.
        kv_budget: within what the KV of each request is kept by dropping tokens, which may change answers:
            tokens, a part of the prompt such as ``50%``, or bytes; ``None``: it is not. Requests and tenants
            may say otherwise.
        kv_recall: bytes of memory beside ``kv_cache`` for what budgets drop, for later turns to have back;
            ``None``: none.
        kv_recall_every: generated tokens after which a long answer has back what it dropped, as far as it is
            worth it; ``None``: only new turns do.
        retention: what is kept then (``docs/retention.md``).
        reuse: what KV that is no prefix of a prompt may be used: ``exact`` (none), ``moved`` (that of
            text which stands elsewhere now; answers may change) or ``verify`` (both, answered exactly)
            (``docs/reuse.md``). Requests and tenants may say otherwise.
        reuse_repair: what of it is computed again: ``adaptive``, ``none``, ``15%``, ``first:16``.
        reuse_max_deviation: prompts of which more is estimated to be wrong are computed exactly; ``None``: as
            the repair has it.
        reuse_sample: the part of answers with moved KV that are computed exactly afterwards, to compare.
        reuse_max_kl: where these differ by more nats on average, moved KV is not used any more.
        cache_ttl: seconds after their last use for which KV is kept; ``None``: as long as there is room.
        pinned_share: the part of ``kv_cache`` that may be pinned.
        admin_key: key to look after the cache over HTTP; ``None``: nobody can.
        trace: file to log requests to, one line of JSON each, digests instead of text; ``None``: none.
        trace_content: put prompts and salts into that log as well.
        trace_key: secret behind the log's digests; ``None``: a new one at every start, so that digests of
            two runs cannot be compared.
        otel: send a span of every request over OTLP, to where OpenTelemetry's own variables say.
        trace_bytes: size at which a log is moved to ``FILE.1`` and begun anew.
        warm: request log to warm the cache from once the server answers; ``None``: none.
        warm_top: prefixes to warm at most.
        answers: where whole answers are kept for equal requests: a file, ``memory``, or ``postgresql://…``;
            ``None``: nowhere.
        answers_for: whose: ``asked`` (of requests that ask for it), ``greedy`` (and those at temperature 0)
            or ``all`` (drawn ones as well).
        answers_bytes: what they may take.
        answers_ttl: seconds for which an answer is kept; ``None``: as long as there is room.
        answers_key: secret to encrypt them with; ``None``: they are not.
        tenant_answers: what each tenant may keep of ``answers_bytes``; ``None``: all.
        semantic: who is given kept answers of questions that mean the same, which may be wrong: nobody
            (``off``), requests that ask for it (``asked``), or all that answers are kept for (``all``).
        semantic_budget: the share of near misses that may be answered wrongly, such as 0.01.
        semantic_history: whether a conversation has to be the same before its last message (``exact``), or to
            mean the same turn by turn (``guarded``).
        semantic_checks: the share of such answers that the model is asked for as well, to compare.
        embedder: what finds near questions: ``all-minilm-l6-v2``, a folder with an encoder of that kind, or
            ``MODEL@http://…``, an endpoint that speaks OpenAI's embeddings (key: ``OSTINATO_EMBEDDER_KEY``).
        embedder_key: the key of such an endpoint.
        drain_timeout: seconds that running requests get at shutdown.
        anthropic_rules: a model of Anthropic's by whose cache rules ``/v1/messages`` counts, to test clients
            against; ``None``: what was really read and written.
        pin_breakpoints: keep KV up to ``cache_control`` for its time, as a pin does.
        dollars_per_hour: what the machine costs: by it the dashboard says what time saved is worth.
    """

    model: str = DEFAULT_MODEL
    store: Path | None = None
    kv_cache: int = 2 << 30
    shared_tier: Path | None = None
    shared_tier_bytes: int = 8 << 30
    tier_codec: str = "exact"
    policy: str = "workload"
    block_size: int = 16
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    itl_target_ms: float | None = None
    deadline: float | None = None
    dtype: str = "auto"
    quantization: str | None = None
    device: str = "cpu"
    template: str = "auto"
    message_rules: Path | None = None
    canonical: Path | None = None
    prompts: Path | None = None
    trim: str = "off"
    trim_budget: int | None = None
    trim_low_water: float = 0.5
    keep_answers: bool = False
    refuse_special_text: bool = False
    offline: bool = False
    hf_token: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: str = ""
    tenants: Path | None = None
    tenant_kv_cache: int | None = None
    tenant_shared_tier: int | None = None
    kv_budget: str | None = None
    retention: str = DEFAULT_METHOD
    reuse: str = "exact"
    reuse_repair: str = "adaptive"
    reuse_max_deviation: float | None = None
    reuse_sample: float = 0.02
    reuse_max_kl: float = 0.05
    kv_recall: int | None = None
    kv_recall_every: int | None = None
    cache_ttl: float | None = None
    pinned_share: float = 0.25
    admin_key: str | None = None
    trace: Path | None = None
    trace_content: bool = False
    trace_key: str | None = None
    trace_bytes: int = 256 << 20
    otel: bool = False
    warm: Path | None = None
    warm_top: int = 16
    answers: str | None = None
    answers_for: str = "greedy"
    answers_bytes: int = 1 << 30
    answers_ttl: float | None = None
    answers_key: str | None = None
    tenant_answers: int | None = None
    semantic: str = "off"
    semantic_budget: float = 0.01
    semantic_history: str = "exact"
    semantic_checks: float = 0.0
    embedder: str = "all-minilm-l6-v2"
    embedder_key: str | None = None
    drain_timeout: float = 30.0
    anthropic_rules: str | None = None
    pin_breakpoints: bool = False
    dollars_per_hour: float | None = None

    @property
    def trim_rules(self) -> TrimRules:
        """How requests that do not say otherwise are trimmed.

        Raises:
            ParameterError: a value is out of its range.
        """
        return TrimRules(self.trim_budget, cast(TrimStrategy, self.trim), self.trim_low_water)

    def all_tenants(self) -> tuple[Tenant, ...]:
        """Those of ``api_keys`` and those of the file ``tenants``.

        Raises:
            ParameterError: the file cannot be read, or a key is in both or is the admin's.
        """
        known = tenants_of_keys(self.api_keys)
        if self.tenants is not None:
            known += read_tenants(self.tenants, parse_size)
        if len({tenant.id for tenant in known}) < len(known):
            raise ParameterError("an API key was given twice", param="api_keys")
        if self.admin_key and any(tenant.key == self.admin_key for tenant in known):
            raise ParameterError("the admin key must not be an API key", param="admin_key")
        return known

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **overrides: Any) -> Self:
        """Defaults, then the environment, then ``overrides`` that are not ``None``.

        Raises:
            ParameterError: a value cannot be read; it names the variable.
        """
        values: dict[str, Any] = {}
        for item in fields(cls):
            text = environment.get(PREFIX + item.name.upper())
            if text is not None:
                values[item.name] = _read(item.name, text)
        if "hf_token" not in values and environment.get("HF_TOKEN"):
            values["hf_token"] = environment["HF_TOKEN"]
        if environment.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
            values.setdefault("offline", True)
        values |= {name: value for name, value in overrides.items() if value is not None}
        if type(values.get("kv_budget")) is int:
            values["kv_budget"] = str(values["kv_budget"])
        for name in (*_PATHS, *_SIZES):
            if isinstance(values.get(name), str):
                values[name] = _read(name, values[name])
        if isinstance(values.get("answers"), Path):  # it may be an address as well, so it is text
            values["answers"] = str(values["answers"])
        if values.get("store") is None:
            values["store"] = _cache_home(environment) / "ostinato" / "models"
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not _is_of_kind(value, str(item.type)):
                raise ParameterError(
                    f"{item.name} is {value!r}, which is not a {item.type}",
                    param=item.name,
                    code="invalid_type",
                )
        for name in (*_SIZES, "block_size", "max_batch_tokens", "max_sequences", "max_waiting"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ParameterError(f"{name} must be at least 1", param=name)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ParameterError(
                "max_model_len must be at least 2: one token to ask, one to answer", param="max_model_len"
            )
        if self.dollars_per_hour is not None and not 0 <= self.dollars_per_hour < float("inf"):
            raise ParameterError("dollars_per_hour must be 0 or more", param="dollars_per_hour")
        if self.policy not in POLICY_NAMES:
            raise ParameterError(
                f"there is no policy {self.policy!r}; there are {', '.join(POLICY_NAMES)}", param="policy"
            )
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ParameterError(
                f"quantization is {self.quantization!r}; it may be {', '.join(QUANTIZATIONS)}",
                param="quantization",
            )
        if is_lossy(self.tier_codec) and self.shared_tier is None:
            raise ParameterError(
                f"tier_codec {self.tier_codec!r} says how a shared tier stores blocks: set shared_tier, too",
                param="tier_codec",
            )
        method_by_name(self.retention)
        if (every := self.kv_recall_every) is not None and (every < 1 or self.kv_recall is None):
            text = "kv_recall_every is a number of tokens, at least 1, and needs memory: set kv_recall, too"
            raise ParameterError(text, param="kv_recall_every")
        if self.reuse not in REUSE_MODES:
            raise ParameterError(
                f"reuse is {self.reuse!r}; it may be {', '.join(REUSE_MODES)}", param="reuse"
            )
        parse_repair(self.reuse_repair)
        if not 0 <= self.reuse_sample <= 1:
            raise ParameterError("reuse_sample must be between 0 and 1", param="reuse_sample")
        for name in ("reuse_max_deviation", "reuse_max_kl"):
            if (bound := getattr(self, name)) is not None and not bound >= 0:
                raise ParameterError(f"{name} must be 0 or more", param=name)
        if self.kv_budget is not None:
            parse_budget(self.kv_budget)
        if self.cache_ttl is not None and not self.cache_ttl >= 1:
            raise ParameterError("cache_ttl must be at least 1 second", param="cache_ttl")
        for name, known in (
            ("answers_for", ANSWERS_FOR),
            ("semantic", SEMANTIC_FOR),
            ("semantic_history", HISTORIES),
        ):
            if (given := getattr(self, name)) not in known:
                raise ParameterError(f"{name} is {given!r}; it may be {', '.join(known)}", param=name)
        if self.semantic != "off" and not self.answers:
            raise ParameterError(
                "semantic needs a place where answers are kept: set answers, too", param="semantic"
            )
        if not 0.0025 <= self.semantic_budget <= 0.1:
            raise ParameterError("semantic_budget must be between 0.0025 and 0.1", param="semantic_budget")
        if not 0 <= self.semantic_checks <= 1:
            raise ParameterError("semantic_checks must be between 0 and 1", param="semantic_checks")
        for name in ("itl_target_ms", "deadline", "answers_ttl"):
            if (limit := getattr(self, name)) is not None and not limit > 0:
                raise ParameterError(f"{name} must be above 0", param=name)
        if not 0 <= self.pinned_share <= 1:
            raise ParameterError("pinned_share must be between 0 and 1", param="pinned_share")
        if not 0 <= self.port <= 65535:
            raise ParameterError("port must be between 0 and 65535", param="port")
        try:
            assert self.trim_rules is not None
        except ParameterError as error:
            name = {"budget_tokens": "trim_budget", "low_water": "trim_low_water"}.get(
                error.param or "", "trim"
            )
            raise ParameterError(str(error).replace(error.param or "", name, 1), param=name) from None
        if not 0 <= self.drain_timeout < float("inf"):
            raise ParameterError("drain_timeout must be 0 seconds or more", param="drain_timeout")


def _is_of_kind(value: object, kind: str) -> bool:
    """Whether ``value`` is what the annotation ``kind`` of a setting says."""
    if value is None:
        return kind.endswith("| None")
    kinds: dict[str, type | tuple[type, ...]] = {
        "int": int, "float": (int, float), "bool": bool, "str": str, "Path": Path,
    }  # fmt: skip
    wanted = kinds[kind.removesuffix(" | None")]
    return isinstance(value, wanted) and (kind == "bool" or not isinstance(value, bool))


def tame_waiting_threads(environment: MutableMapping[str, str]) -> None:
    """Let torch's threads sleep soon when they wait for one another. Before torch is imported.

    GNU OpenMP spins for milliseconds at every barrier. Alone on a machine that costs nothing; where another
    process wants the same cores the spinning thread keeps the awaited one from running, and a step takes up
    to forty times as long (``LOG.md``). For processes that are ours; a library leaves its host alone.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "5000")


def parse_size(text: str) -> int:
    """Bytes from ``"512M"``, ``"2GiB"``, ``"1073741824"`` (units are powers of 1024).

    Raises:
        ValueError: not a size.
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    size = float(number.removesuffix(unit)) * _UNITS[unit]
    if not 0 <= size < 1 << 63:
        raise ValueError(f"{text} is not a number of bytes")
    return int(size)


def _read(name: str, text: str) -> Any:
    kind = Settings.__dataclass_fields__[name].type
    try:
        if name in _SIZES:
            return parse_size(text)
        if name in _PATHS:
            return Path(text).expanduser()
        if kind == "bool":
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}[
                text.strip().lower()
            ]
        if kind in ("int", "int | None"):
            return int(text)
        if kind in ("float", "float | None"):
            return float(text)
    except (ValueError, KeyError) as error:
        raise ParameterError(
            f"{PREFIX}{name.upper()} is {text!r}, which is not a {kind}", param=name
        ) from error
    return text


def _cache_home(environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_CACHE_HOME", "")
    # The specification: relative paths are invalid and to be ignored.
    return Path(home) if home.startswith("/") else Path("~/.cache").expanduser()
