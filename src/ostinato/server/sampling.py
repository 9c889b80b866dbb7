"""The parameters that both completion APIs share, and how they become :class:`SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from blake3 import blake3
from pydantic import Discriminator, Field, Tag

from ..errors import ParameterError, UnknownModelError
from ..kv.terms import tenant_id, tenant_salt
from ..types import Retention, SamplingParams
from .extras import ReuseChoice
from .fields import MAX_SHOWN_CHARS, MAX_TOKEN_ID, Stop, TokenId, Wire
from .sessions import SessionGiven

MAX_LOGPROBS: Final = 20
_SEED_LIMIT: Final = 2**63

Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def _text_or_number(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<number>" if isinstance(value, int) else None


KVBudgetGiven = Annotated[
    Annotated[Annotated[int, Field(ge=1)], Tag("<number>")]
    | Annotated[Annotated[str, Field(min_length=1, max_length=32)], Tag("<text>")],
    Discriminator(_text_or_number),
]
PinnedText = Annotated[str, Field(min_length=1, max_length=4096)]


class SamplingFields(Wire):
    """Parameters of both APIs. After OpenAI's own come those that vLLM's users know.

    ``metadata`` to ``user`` cannot change an answer: they are accepted and not looked at.
    """

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-_SEED_LIMIT, lt=_SEED_LIMIT)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    cache_ttl: Annotated[float, Field(ge=1)] | None = None
    deadline: Annotated[float, Field(gt=0, le=86_400)] | None = None
    cache_answer: bool | None = None

    session: SessionGiven | None = None

    kv_budget: KVBudgetGiven | None = None
    retention: Annotated[str, Field(max_length=64)] | None = None
    entities: bool | None = None
    pinned_text: Annotated[list[PinnedText], Field(max_length=256)] | None = None
    renumber: bool | None = None

    reuse: ReuseChoice | None = None

    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    user: Any = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def retention_wanted(self) -> Retention | None:
        """Within which KV budget, and how; ``None``: as the server has it. Raises :class:`ParameterError`."""
        fields = {
            "retention": self.retention, "entities": self.entities, "pinned_text": self.pinned_text,
            "renumber": self.renumber,
        }  # fmt: skip
        if self.kv_budget is None:
            for name, value in fields.items():
                if value is not None:
                    raise ParameterError(f"'{name}' is for a 'kv_budget': give one.", param=name)
            return None
        method = {} if self.retention is None else {"method": self.retention}
        return Retention(
            self.kv_budget,
            entities=self.entities,
            pinned_text=tuple(self.pinned_text or ()),
            renumber=bool(self.renumber),
            **method,
        )

    def check_shared(self, *, model_name: str, max_choices: int) -> None:
        """The rules between fields. Raises :class:`ParameterError` or :class:`UnknownModelError`."""
        if self.model != model_name:
            shown = self.model[:MAX_SHOWN_CHARS]
            raise UnknownModelError(f"The model '{shown}' does not exist; this server has '{model_name}'.")
        if self.num_choices > max_choices:
            raise ParameterError(f"'n' is at most {max_choices} here.", param="n")
        if self.stream_options is None:
            return
        if not self.stream:
            text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
            raise ParameterError(text, param="stream_options")
        if self.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation")

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """As the engine takes it. ``top_p`` 0 leaves the likeliest token alone, which is temperature 0."""
        stop = self.stop or ()
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if self.top_p == 0 else _or(self.temperature, 1.0),
            top_p=self.top_p or 1.0,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            logit_bias=_bias(self.logit_bias or {}),
        )


def unsupported(param: str) -> ParameterError:
    """It would change the answer, and this server cannot do it: say so by name."""
    text = f"Unsupported parameter: '{param}' is not supported by this server."
    return ParameterError(text, param=param, code="unsupported_parameter")


def check_max_tokens(max_tokens: int | None, *, param: str, max_model_len: int) -> None:
    if max_tokens is not None and max_tokens > max_model_len:
        text = f"{param} is too large: {max_tokens}. This model supports at most {max_model_len} tokens."
        raise ParameterError(text, param=param)


def namespace_salt(key_salt: str, cache_salt: str | None) -> str:
    """One salt out of the tenant's and the request's; equal only where both are equal.

    The lengths are digested too: no tenant can choose a ``cache_salt`` that continues their own salt into
    another's. With neither there is no salt, which is the namespace of the library and the terminal. All
    salts of one key are of one tenant.
    """
    if not key_salt and not cache_salt:
        return ""
    parts = [part.encode() for part in (key_salt, cache_salt or "")]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    salt = f"b3:{blake3(framed, derive_key_context='ostinato server salt v1').hexdigest()}"
    return tenant_salt(tenant_id(key_salt), salt) if key_salt else salt


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            shown = key[:MAX_SHOWN_CHARS]
            raise ParameterError(
                f"The keys of 'logit_bias' are token ids, not '{shown}'.", param="logit_bias"
            )
        by_id[int(key)] = value
    return by_id
