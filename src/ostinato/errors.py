"""Every error Ostinato raises on purpose, in one tree.

::

    OstinatoError
    ├── ClientError                      the caller can mend it            4xx
    │   ├── ConversationError            a message breaks a rule           400  (has .index)
    │   │   ├── EmptyConversationError   no messages at all
    │   │   ├── UnknownRoleError         a role no template knows
    │   │   ├── OrphanToolResultError    a tool result without its call
    │   │   └── MessageTypeError         a field of the wrong type, or text that is not Unicode
    │   ├── TemplateError                the model's template refuses it   400
    │   ├── PromptTooLongError           more tokens than the model takes  400  (both numbers)
    │   ├── BudgetTooSmallError          protected tokens fill a KV budget 400  (both numbers)
    │   ├── MalformedRequestError        a body that is not a JSON object  400
    │   ├── ParameterError               a parameter out of its range      400  (has .param)
    │   ├── AuthenticationError          no key, or a wrong one            401
    │   ├── TraceError                   a recorded trace cannot be read   400
    │   ├── UnknownModelError            no such model here                404
    │   ├── NotPinnedError               no pin of this name               404
    │   ├── NoAnswerError                no kept answer of this name       404
    │   ├── PinRefusedError              more than may be pinned           409  (both numbers)
    │   ├── RequestTimeoutError          the request arrived too slowly    408
    │   ├── RequestTooLargeError         the body is over the limit        413
    │   └── QueueFullError               come back later                   429  (has .retry_after_s)
    ├── ModelError                       a model cannot be had or loaded
    │   ├── ModelUnavailableError        no network, not found, or gated
    │   ├── ModelCorruptError            truncated, or a digest differs
    │   ├── ModelUnsupportedError        an architecture or format we do not know
    │   └── StorageFullError             no room on disk
    ├── TierError                        a KV tier's folder cannot be used
    ├── StoreError                       a store of answers cannot be used
    ├── WarmingError                     the server to be warmed does not answer, or refuses
    └── ServerError                      our side                          5xx
        ├── EngineError                  the engine failed in this request 500
        ├── UpstreamError                another server failed             502
        │   ├── UpstreamTimeoutError     it is silent                      504
        │   └── NoWorkerError            none of a fleet is ready          503
        └── ShuttingDownError            the server is going away          503

A message says what is wrong and what to do. It never contains a secret, and of a user's text at most
the part that is at fault.
"""

from __future__ import annotations


class OstinatoError(Exception):
    """Base of everything Ostinato raises on purpose."""


class ClientError(OstinatoError):
    """The caller can mend it. ``status`` is the HTTP status that says so."""

    status = 400
    code: str | None = None
    param: str | None = None


class ConversationError(ClientError):
    """A message breaks a rule. ``index`` is its place in the conversation, ``None`` for the whole."""

    code = "invalid_conversation"

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.param = "messages" if index is None else f"messages[{index}]"


class EmptyConversationError(ConversationError):
    code = "empty_conversation"


class UnknownRoleError(ConversationError):
    code = "unknown_role"


class OrphanToolResultError(ConversationError):
    code = "orphan_tool_result"


class MessageTypeError(ConversationError):
    code = "invalid_type"


class TemplateError(ClientError):
    """The chat template refuses this conversation, or cannot be rendered within its bounds."""

    code = "template_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(ClientError):
    """More tokens than the model, or the KV capacity, can take."""

    code = "context_length_exceeded"
    param = "messages"

    def __init__(self, message: str, *, num_tokens: int, max_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class BudgetTooSmallError(ClientError):
    """A sequence's KV budget has no room beside the tokens that are protected."""

    code = "kv_budget_too_small"
    param = "kv_budget"

    def __init__(self, message: str, *, num_protected: int, budget_tokens: int) -> None:
        super().__init__(message)
        self.num_protected = num_protected
        self.budget_tokens = budget_tokens


class MalformedRequestError(ClientError):
    """The request's body is not JSON, or not a JSON object."""

    code = "invalid_json"


class ParameterError(ClientError):
    """A parameter is out of its range, of the wrong type or not supported; ``param`` names it."""

    def __init__(self, message: str, *, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class AuthenticationError(ClientError):
    status = 401
    code = "invalid_api_key"


class TraceError(ClientError):
    """A recorded trace is missing, or a line of it has another form; the message names both."""

    code = "invalid_trace"


class UnknownModelError(ClientError):
    status = 404
    code = "model_not_found"
    param = "model"


class NotPinnedError(ClientError):
    status = 404
    code = "pin_not_found"
    param = "id"


class NoAnswerError(ClientError):
    status = 404
    code = "answer_not_found"
    param = "id"


class PinRefusedError(ClientError):
    """Pinning this would keep more blocks than may be pinned, or than the tenant may keep."""

    status = 409
    code = "pin_refused"

    def __init__(self, message: str, *, num_blocks: int, max_blocks: int) -> None:
        super().__init__(message)
        self.num_blocks = num_blocks
        self.max_blocks = max_blocks


class RequestTimeoutError(ClientError):
    status = 408
    code = "request_timeout"


class RequestTooLargeError(ClientError):
    status = 413
    code = "request_too_large"


class QueueFullError(ClientError):
    """Too many requests wait already. ``retry_after_s`` goes into ``Retry-After``."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelError(OstinatoError):
    """A model cannot be had or loaded; the message says what to do."""


class ModelUnavailableError(ModelError):
    """No source has it: no network, no such name, or access is gated."""


class ModelCorruptError(ModelError):
    """A file is truncated or its digest differs from what was recorded."""


class ModelUnsupportedError(ModelError):
    """An architecture or file format this version cannot run."""


class StorageFullError(ModelError):
    """The disk has no room for the model."""


class WarmingError(OstinatoError):
    """The server to be warmed does not answer, or refuses."""


class TierError(OstinatoError):
    """A KV tier's folder cannot be opened; the message says which and what to do."""


class StoreError(OstinatoError):
    """A store of answers cannot be opened or reached; the message says which and what to do."""


class ServerError(OstinatoError):
    """Our side failed. ``status`` is the HTTP status that says so."""

    status = 500
    code: str | None = "server_error"


class EngineError(ServerError):
    """The engine failed while it ran this request; nothing of it was cached."""

    code = "engine_error"


class DeadlineError(ServerError):
    """The time that the request had was over before its first token."""

    status = 504
    code = "deadline_exceeded"


class UpstreamError(ServerError):
    """A server that a request was passed on to cannot be reached, or what it sends makes no sense."""

    status = 502
    code = "upstream_error"


class UpstreamTimeoutError(UpstreamError):
    """It is silent for too long."""

    status = 504
    code = "upstream_timeout"


class NoWorkerError(UpstreamError):
    """Of all workers that a request could go to none is ready."""

    status = 503
    code = "no_worker"


class ShuttingDownError(ServerError):
    status = 503
    code = "shutting_down"
