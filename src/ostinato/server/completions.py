"""``/v1/completions``: the request's fields, and the answer's shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Discriminator, Field, Tag

from ..errors import ParameterError
from ..types import Chunk, GenerationRequest, TokenLogprob, Usage
from .extras import extras_object, remarks_object, reuse_wanted
from .fields import TokenId
from .sampling import MAX_LOGPROBS, SamplingFields, check_max_tokens, namespace_salt, unsupported
from .sessions import session_of
from .wire import Collected, Frame, Json, TokenText, finish_fields, finite, usage_object

_DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's


def _prompt_tag(value: object) -> str | None:
    if isinstance(value, list):
        first = type(value[0]) if value else str
        return {str: "<texts>", int: "<tokens>", list: "<token lists>"}.get(first)
    return "<text>" if isinstance(value, str) else None


TokenList = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TokenList, Tag("<tokens>")]
    | Annotated[list[str], Field(min_length=1), Tag("<texts>")]
    | Annotated[list[TokenList], Tag("<token lists>")],
    Discriminator(_prompt_tag),
]


class CompletionRequest(SamplingFields):
    """The body of a (legacy) completion request. ``max_tokens`` is 16 unless given, as at OpenAI."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Any = None

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """One or several, each as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens: list[int] = []
        prompts: list[str | tuple[int, ...]] = []
        for item in self.prompt:
            if isinstance(item, int):
                tokens.append(item)
            else:
                prompts.append(item if isinstance(item, str) else tuple(item))
        return prompts or [tuple(tokens)]

    def check(self, *, model_name: str, max_choices: int, max_model_len: int) -> None:
        """Raise what is wrong with the fields taken together, or not supported."""
        self.check_shared(model_name=model_name, max_choices=max_choices)
        best_of = self.num_choices if self.best_of is None else self.best_of
        if best_of < self.num_choices:
            raise ParameterError("'best_of' must not be less than 'n'.", param="best_of")
        if len(self.prompts) * best_of > max_choices:
            text = f"'prompt' times 'n' or 'best_of' asks for more than {max_choices} answers."
            raise ParameterError(text, param="prompt" if best_of == self.num_choices else "best_of")
        if self.stream and best_of > self.num_choices:
            raise ParameterError("Answers with 'best_of' cannot be streamed.", param="best_of")
        if self.suffix not in (None, ""):
            raise unsupported("suffix")
        if self.echo and self.logprobs is not None:
            text = "'echo' together with 'logprobs' is not supported: the prompt has no logprobs here."
            raise ParameterError(text, param="echo", code="unsupported_parameter")
        check_max_tokens(self.max_tokens, param="max_tokens", max_model_len=max_model_len)

    def generations(self, *, request_id: str, key_salt: str) -> tuple[GenerationRequest, ...]:
        """What the runtime is asked for, one request for each prompt."""
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        params = self.sampling(max_tokens=max_tokens, logprobs=self.logprobs)
        salt = namespace_salt(key_salt, self.cache_salt)
        prompts = self.prompts
        return tuple(
            GenerationRequest(
                prompt=prompt,
                params=params,
                num_choices=self.num_choices,
                best_of=self.best_of,
                salt=salt,
                cache_ttl_s=self.cache_ttl,
                deadline_s=self.deadline,
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                session=session_of(self.session),
                retention=self.retention_wanted(),
                reuse=reuse_wanted(self.reuse),
            )
            for index, prompt in enumerate(prompts)
        )


@dataclass(slots=True)
class _Offset:
    """Where in a choice's text the next token begins. Part of a character counts where that begins."""

    num_chars: int = 0

    def advance(self, raw: bytes) -> int:
        is_inside = bool(raw) and raw[0] & 0xC0 == 0x80
        start = max(0, self.num_chars - 1) if is_inside else self.num_chars
        self.num_chars += sum(byte & 0xC0 != 0x80 for byte in raw)
        return start


class CompletionWriter:
    """An answer as ``text_completion``, whole or in pieces (the two have the same shape)."""

    def __init__(
        self,
        frame: Frame,
        tokens: TokenText,
        *,
        num_choices: int,
        logprobs: int | None,
        echo: Callable[[int], str],
        include_usage: bool,
    ) -> None:
        """``echo`` gives what precedes the answers to a prompt: its text, or nothing."""
        self._frame = frame
        self._tokens = tokens
        self._num_choices = num_choices
        self._logprobs = logprobs
        self._echo = echo
        self._include_usage = include_usage
        self._opened: set[int] = set()
        self._offsets: defaultdict[int, _Offset] = defaultdict(_Offset)
        self._choices: defaultdict[int, Collected] = defaultdict(Collected)

    def events(self, prompt_index: int, chunk: Chunk) -> Iterator[Json]:
        index = prompt_index * self._num_choices + chunk.choice_index
        text = chunk.text
        if index not in self._opened:
            self._opened.add(index)
            text = self._echo(prompt_index) + text
        if text or chunk.logprobs or chunk.finish_reason is not None:
            event = self._frame.around("text_completion", [self._choice(index, text, chunk.logprobs, chunk)])
            if self._include_usage:
                event["usage"] = None
            if chunk.usage is not None and (remarks := remarks_object([chunk.usage])):
                event["ostinato"] = remarks
            yield event

    def collect(self, prompt_index: int, chunk: Chunk) -> None:
        index = prompt_index * self._num_choices + chunk.choice_index
        self._choices[index].add(chunk)

    def whole(self, usages: Sequence[Usage]) -> Json:
        choices: list[Json] = []
        for index, choice in sorted(self._choices.items()):
            assert choice.last is not None, "a choice that never finished"
            text = self._echo(index // self._num_choices) + "".join(choice.text)
            choices.append(self._choice(index, text, choice.logprobs, choice.last))
        whole = self._frame.around("text_completion", choices)
        return whole | {"usage": usage_object(usages), "ostinato": extras_object(usages)}

    def usage_event(self, usages: Sequence[Usage]) -> Json:
        event = self._frame.around("text_completion", [])
        return event | {"usage": usage_object(usages), "ostinato": extras_object(usages)}

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprob], last: Chunk) -> Json:
        shaped = self._logprobs_object(index, logprobs)
        return {"index": index, "text": text, "logprobs": shaped, **finish_fields(last)}

    def _logprobs_object(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json | None:
        if self._logprobs is None:
            return None
        offset = self._offsets[index]
        tops = [self._top(entry) for entry in logprobs] if self._logprobs else None
        return {
            "tokens": [self._tokens.legacy(entry.token_id) for entry in logprobs],
            "token_logprobs": [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": tops,
            "text_offset": [offset.advance(self._tokens.bytes(entry.token_id)) for entry in logprobs],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest, and the chosen one whether it is among them or not."""
        pairs = (*entry.top, (entry.token_id, entry.logprob))
        return {self._tokens.legacy(token_id): finite(logprob) for token_id, logprob in pairs}
