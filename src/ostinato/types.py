"""The frozen values that flow from stage to stage (docs/design: "One way through").

Token arrays are one-dimensional ``numpy.int32``, arrays of block ids ``numpy.intp``; ranges are half-open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from .errors import ParameterError

TokenArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BlockIds: TypeAlias = npt.NDArray[np.intp]
SessionState: TypeAlias = Literal["open", "idle", "closed"]
Layer: TypeAlias = Literal["exact", "joined", "semantic"]
ReuseMode: TypeAlias = Literal["exact", "moved", "verify"]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "abort", "error"]
TrimStrategy: TypeAlias = Literal["off", "drop", "shorten", "sticky"]

MAX_SESSION_ID_CHARS = 256
REUSE_MODES: tuple[ReuseMode, ...] = get_args(ReuseMode)


def num_common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """How many elements two arrays (of tokens, of block ids) begin with in common."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


# ---------------------------------------------------------------- meaning


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the assistant made. ``arguments`` is the JSON text exactly as it was produced."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``content`` may be empty; a ``tool`` message names its call by ``tool_call_id``.

    ``reasoning`` is what the assistant thought before it answered; most templates drop it from earlier turns.
    """

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, and the tools offered (JSON-schema objects in the OpenAI form)."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class TrimRules:
    """How to trim a conversation that is over its budget.

    Args:
        budget_tokens: the most tokens a prompt may have, generation prompt included. ``None``, where a model
            is asked: what the model's length leaves beside the answer.
        strategy: ``drop`` the oldest turns, ``shorten`` old tool results where they stand, ``sticky``: drop
            turns down to the low-water mark, or ``off``.
        low_water: the part of the budget that ``sticky`` and ``shorten`` make room down to; with 1 they do
            only what this prompt needs.
        keep_chars: how many characters ``shorten`` keeps of a tool result.

    Raises:
        ParameterError: a value is out of its range or of the wrong type.
    """

    budget_tokens: int | None = None
    strategy: TrimStrategy = "sticky"
    low_water: float = 0.5
    keep_chars: int = 400

    def __post_init__(self) -> None:
        for name in ("budget_tokens", "keep_chars"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise ParameterError(f"{name} must be a whole number", param=name, code="invalid_type")
        if self.budget_tokens is not None and self.budget_tokens < 1:
            raise ParameterError("budget_tokens must be at least 1", param="budget_tokens")
        if self.strategy not in ("off", "drop", "shorten", "sticky"):
            raise ParameterError("strategy must be off, drop, shorten or sticky", param="strategy")
        if isinstance(self.low_water, bool) or not isinstance(self.low_water, int | float):
            raise ParameterError("low_water must be a number", param="low_water", code="invalid_type")
        if not 0 < self.low_water <= 1:
            raise ParameterError("low_water must be above 0 and at most 1", param="low_water")
        if self.keep_chars < 0:
            raise ParameterError("keep_chars must not be negative", param="keep_chars")


@dataclass(frozen=True, slots=True)
class PromptUse:
    """A prompt by name, with a text for each of its variables. Its messages come before the request's own."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------- text and tokens


@dataclass(frozen=True, slots=True)
class Segment:
    """A span of the rendered prompt with one origin.

    ``is_marker`` is true for a template's special token, which becomes exactly that token; any other
    text, whatever it spells, never becomes a special token. ``message_index`` is the message it came
    from, ``None`` where the template wrote it or its origin is not known.
    """

    text: str
    is_marker: bool = False
    message_index: int | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A complete prompt as segments: BOS and generation prompt included, nobody adds text afterwards."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


# ---------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy the KV of ``length`` consecutive slots: the copy in copy-on-write."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Move KV to ``targets``, in each layer and key head from slots of its own.

    ``sources``: integers ``[layers, kv_heads, number]``; ``targets``: ``[number]``. The two may overlap.
    ``distances``, of the shape of ``sources``: by how many positions further on each stands then; ``None``:
    where it stood.
    """

    sources: npt.NDArray[np.int64]
    targets: TokenArray
    distances: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class SlotShift:
    """Copy the KV of ``length`` consecutive slots to where it stands ``distance`` positions further on.

    Source and target do not overlap.
    """

    source: int
    target: int
    length: int
    distance: int


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What one sequence does in one step.

    Its rows are ``tokens`` at ``positions`` (which the model's position embedding gets), whose KV is written
    to ``slots`` (all of equal length). A row's *place* is its index in the sequence's table: place ``i`` is
    slot ``block_ids[i // block_size] * block_size + i % block_size``. Every row attends to all places up to
    and including its own; those that no row of the step writes were written before. The array is valid until
    the plan has run. ``sample`` asks for the logits of the last row.

    ``places`` are strictly increasing and may have gaps (KV that lies there already, moved or computed
    before); ``None``: they are the positions, which then follow one another. Places other than the positions
    (a sequence that was thinned out and pushed together) are only for models whose
    :class:`~ostinato.engines.base.RunnerInfo` has no ``compaction_reason``.

    ``num_watched`` of the last rows are watched: the step's result tells what attention they give to each
    place. ``notes_queries``: the runner remembers how the rows' queries are distributed, to tell what rows
    that are still to come will attend to. ``with_distribution``: the result has the
    probabilities of all tokens after the last row, too.
    """

    sequence_id: int
    tokens: TokenArray
    positions: TokenArray
    slots: TokenArray
    block_ids: BlockIds
    block_size: int
    sample: bool
    places: TokenArray | None = None
    num_watched: int = 0
    notes_queries: bool = False
    with_distribution: bool = False

    @property
    def row_places(self) -> TokenArray:
        return self.positions if self.places is None else self.places


@dataclass(frozen=True, slots=True)
class Plan:
    """One step of the engine: first moves, copies and shifts, in this order, then all rows of all sequences
    at once."""

    sequences: tuple[SequencePlan, ...]
    copies: tuple[SlotCopy, ...] = ()
    moves: tuple[SlotMove, ...] = ()
    shifts: tuple[SlotShift, ...] = ()


# ---------------------------------------------------------------- generation


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. ``temperature`` 0 is greedy. Ranges are checked where a request enters.

    ``max_tokens`` ``None``: as many as the model's length allows. ``seed`` ``None``: drawn at random.
    ``logprobs`` ``None``: none; ``k``: the chosen token's and the ``k`` likeliest, of the model's own
    distribution (before temperature and penalties). ``repetition_penalty`` is Hugging Face's (prompt and
    output), presence and frequency penalties are OpenAI's (output only).
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, and of the likeliest at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Trim:
    """What trimming left out of a prompt.

    ``dropped`` and ``shortened`` are indices of the messages as they were given (after those of a named
    prompt, if there was one). ``given_tokens`` is the length the prompt would have had.
    """

    strategy: TrimStrategy
    budget_tokens: int
    given_tokens: int
    dropped: tuple[int, ...]
    shortened: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What a rule of the canonical form changed.

    ``where`` is ``messages[2]``, ``messages[2].tool_calls[0]`` or ``tools``.
    """

    rule: str
    where: str


@dataclass(frozen=True, slots=True)
class Unrendered:
    """A field that the template left out of the prompt.

    ``field`` is ``name``, ``reasoning``, or ``content`` (beside tool calls); ``messages`` are the indices of
    the messages it stands in, as they were given.
    """

    field: str
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheControl:
    """What a request says about kept answers.

    ``read``: whether it may be given one; ``store``: whether its own may be kept; ``max_age_s``: it is not to
    be given an older one. ``asked``: it wants kept answers also where they are not given unasked, such as
    drawn ones (temperature above 0). ``semantic``: whether it may be given the answer of a question that
    means the same; ``None``: as the operator has it. ``namespace``: it shares such answers only with requests
    that name the same one.

    Raises:
        ParameterError: a value is out of its range or of the wrong type.
    """

    read: bool = True
    store: bool = True
    max_age_s: float | None = None
    asked: bool = False
    semantic: bool | None = None
    namespace: str = ""

    def __post_init__(self) -> None:
        for name in ("read", "store", "asked"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(f"{name} must be true or false", param=name, code="invalid_type")
        age: Any = self.max_age_s
        if age is not None and (isinstance(age, bool) or not isinstance(age, int | float) or not age >= 0):
            raise ParameterError("max_age_s must be seconds, 0 or more", param="max_age_s")


@dataclass(frozen=True, slots=True)
class Served:
    """An answer that was not computed for this request.

    ``exact``: the kept answer of an equal request; ``joined``: the answer of an equal request that was under
    way; ``semantic``: the kept answer of a question that means the same. ``entry_id`` names what was kept,
    ``age_s`` is how long ago. ``details`` are the layer's own: plain values.
    """

    layer: Layer
    age_s: float = 0.0
    entry_id: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verified:
    """How an answer with moved KV differs from the exact one of the same request.

    ``kl``: Kullback-Leibler divergence of the first token's distribution from the exact one, in nats.
    ``first_difference``: the first token that is another one (from 0); ``None``: all of the first
    ``num_compared`` are the same.
    """

    kl: float
    first_difference: int | None
    num_compared: int


@dataclass(frozen=True, slots=True)
class Reused:
    """Where the KV of a prompt came from that might be answered with moved KV.

    Tokens: ``moved_tokens`` of the prompt stood elsewhere before, ``repaired_tokens`` of these were computed
    again; ``computed_tokens`` were not there, and the rest is the prefix (``Usage.cached_tokens``).
    ``deviation`` is what is estimated to be left (0: nothing; ``None``: not measured). ``is_refused``: it
    was more than the bound, so all of it was computed.
    """

    mode: ReuseMode
    moved_tokens: int = 0
    repaired_tokens: int = 0
    computed_tokens: int = 0
    deviation: float | None = None
    is_refused: bool = False
    verified: Verified | None = None

    @property
    def reused_tokens(self) -> int:
        """Whose KV was not computed for the answer."""
        return self.moved_tokens - self.repaired_tokens if self.mode == "moved" else 0

    @property
    def may_differ(self) -> bool:
        """Whether the answer may be another one than without this."""
        return self.mode == "moved" and self.moved_tokens > 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and seconds of one request, summed over its ``n`` choices where they add up.

    ``cached_tokens`` of ``prompt_tokens`` were read from the cache, ``written_tokens`` were newly made
    findable. ``approximate_tokens`` of the cached ones come from a lossy codec that was asked for, or were
    computed behind such. ``ttft_s`` is arrival to first token, ``queue_s`` the part of it before the engine
    began. ``trimmed`` says what did not fit the budget, ``unrendered`` what the template does not write down,
    ``changed`` what was brought into canonical form; ``prompt_name`` is the named prompt that was used.
    ``kept_tokens`` of the prompt's are answers in the tokens they were generated in, where asked for.
    ``served``: a response cache had the answer; then nothing was computed, and all of the prompt counts as
    cached.
    ``loaded_tokens`` of the cached ones were read from the shared tier, which took ``load_s``.
    ``dropped_tokens`` of prompt and answer had no KV any more at the end, by the method ``retention``, where
    a budget was asked for; ``recalled_tokens`` of the prompt were not computed: their KV came back from what
    an earlier turn, kept in the same way, had kept or dropped.
    ``reuse``: what was moved, where a request might be answered with KV that is no prefix of it.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float = 0.0
    queue_s: float = 0.0
    total_s: float = 0.0
    trimmed: Trim | None = None
    unrendered: tuple[Unrendered, ...] = ()
    changed: tuple[Change, ...] = ()
    prompt_name: str = ""
    approximate_tokens: int = 0
    kept_tokens: int = 0
    served: Served | None = None
    dropped_tokens: int = 0
    recalled_tokens: int = 0
    retention: str = ""
    loaded_tokens: int = 0
    load_s: float = 0.0
    reuse: Reused | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one choice's answer. The last piece of a choice, and only that, has ``finish_reason``.

    The last piece of the request, and only that, has ``usage``. ``error`` goes with finish reason "error".
    ``stop_reason`` is the stop string or token id that ended it. ``tool_calls`` are calls that are complete;
    what they were written in is not in any ``text``, nor is ``reasoning``.
    """

    choice_index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    error: Exception | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Session:
    """The conversation that a request belongs to, and how it stands once the request is answered.

    Only a hint of what is worth keeping; nothing but ``salt`` keeps callers apart. ``idle``: whoever asks is
    away. ``closed``: it will not go on. ``expires_in_s``: it will not go on after so many seconds.

    Raises:
        ParameterError: a value is out of its range or of the wrong type.
    """

    id: str
    state: SessionState = "open"
    expires_in_s: float | None = None

    def __post_init__(self) -> None:
        given: tuple[Any, Any, Any] = self.id, self.state, self.expires_in_s
        id_text, state, seconds = given
        if not isinstance(id_text, str) or not 0 < len(id_text) <= MAX_SESSION_ID_CHARS:
            raise ParameterError(
                f"a session's id must be text of 1 to {MAX_SESSION_ID_CHARS} characters", param="session"
            )
        if state not in ("open", "idle", "closed"):
            raise ParameterError("a session is open, idle or closed", param="session")
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds < math.inf):
            raise ParameterError("a session expires in some seconds, more than 0", param="session")


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep a sequence's KV within a budget, by dropping tokens: the answer may change.

    ``budget``: tokens (``2048``), a part of the prompt (``"50%"``) or bytes (``"64MiB"``). ``method``: what
    to keep (:mod:`ostinato.retention.methods`). ``entities``: whether names, numbers, codes and quoted text
    stay before other text; ``None``: as the method has it. ``pinned_text``: wherever it stands in the
    prompt, it stays; so do the messages that a request pins, system text and the newest turn.
    ``renumber``: what stays gets the positions 0, 1, 2, ... instead of keeping its own, so that a sequence
    may be longer than the model's length.
    """

    budget: int | str
    method: str = "summary"
    entities: bool | None = None
    pinned_text: tuple[str, ...] = ()
    renumber: bool = False

    @property
    def label(self) -> str:
        """How tokens are chosen, and numbered, in a word."""
        return f"{self.method}+renumber" if self.renumber else self.method


@dataclass(frozen=True, slots=True)
class Reuse:
    """What KV a request may be answered with that is no prefix of it.

    ``exact``: none. ``moved``: stored runs of its tokens that stand elsewhere now are moved there, and what
    depends most on what stands before them is computed again; the answer may change. ``verify``: both, and
    it is answered with the exact one.

    ``repair``: what is computed again (:func:`ostinato.reuse.blend.parse_repair`). ``max_deviation``: where
    what is left is estimated to deviate by more, the prompt is computed exactly; ``None``: as the repair has
    it.
    """

    mode: ReuseMode = "moved"
    repair: str = "adaptive"
    max_deviation: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a door hands to the runtime: a conversation, or a raw prompt as text or as token ids.

    ``salt`` keeps this request's KV apart from everyone else's with another salt. ``num_choices`` is
    OpenAI's ``n``; with ``best_of`` so many are computed, and those whose tokens are likeliest on average
    come once all are there. Of conversations only: ``trim`` (``None``: as the runtime is set) and
    ``pinned``, the indices of messages that trimming must leave; ``named_prompt``, whose messages come first;
    ``continue_final_message``: go on with the assistant's last message instead of answering it;
    ``canonical``: whether to apply the runtime's rules of canonical form, where it has some.
    ``is_warming``: nobody waits for the answer, it is asked for what it leaves in the cache; such requests
    are no part of logs and statistics. ``session``: which conversation this is, where known. ``cache_ttl_s``:
    for how long after its last use what is kept of this request may be found; ``None``: as long as the server
    keeps things. ``deadline_s``: seconds
    from arrival; then an answer ends with what it has (reason "length"), or is refused if that is nothing.
    ``cache_control``: what it says about kept answers.
    ``retention``: a budget for its KV, within which tokens are dropped; ``None``: as the server has it.
    ``reuse``: what KV that is no prefix may be used; likewise.
    """

    prompt: Conversation | str | tuple[int, ...]
    params: SamplingParams = SamplingParams()
    num_choices: int = 1
    best_of: int | None = None
    salt: str = ""
    request_id: str = ""
    trim: TrimRules | None = None
    pinned: tuple[int, ...] = ()
    named_prompt: PromptUse | None = None
    continue_final_message: bool = False
    canonical: bool = True
    is_warming: bool = False
    session: Session | None = None
    cache_ttl_s: float | None = None
    deadline_s: float | None = None
    cache_control: CacheControl = CacheControl()
    retention: Retention | None = None
    reuse: Reuse | None = None
