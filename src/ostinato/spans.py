"""Requests as OpenTelemetry spans, by the conventions for generative AI. An extra: ``ostinato[otel]``.

A span is made when its request has ended, of the times it took: from arrival to last token, with the wait,
the prefill and the answer inside it. Nothing that a user wrote is in it. OpenTelemetry's own variables say
where spans go (``OTEL_EXPORTER_OTLP_ENDPOINT``, …); they are sent in batches, by a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .errors import ParameterError
from .events import Event, RequestFinished, RequestServed, reuse_of
from .ports import Clock
from .records import pattern_of
from .types import Conversation, GenerationRequest, Usage

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

PROVIDER: Final = "ostinato"
_NS: Final = 1_000_000_000


def exported_tracer() -> tuple[Tracer, Callable[[], None]]:
    """A tracer whose spans are sent over OTLP, and what ends that: it sends what is left.

    Raises:
        ParameterError: the packages for it are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ParameterError(
            "spans need packages more: pip install 'ostinato[otel]'", param="otel"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": PROVIDER}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer(PROVIDER), provider.shutdown


class SpanObserver:
    """An observer (:data:`ostinato.events.Observer`) that makes a span of every request that ends."""

    def __init__(self, tracer: Tracer, *, model: str, clock: Clock) -> None:
        self._tracer = tracer
        self._model = model
        self._clock = clock

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RequestFinished | RequestServed) or event.request is None:
            return
        request, usage = event.request, event.usage
        if request.is_warming:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        end_s = self._clock.now()
        start_s = end_s - usage.total_s
        operation = "chat" if isinstance(request.prompt, Conversation) else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            kind=SpanKind.SERVER,
            start_time=_ns(start_s),
            attributes=self._attributes(operation, event.finish_reason, request, usage),
        )
        if event.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", "error")
        if usage.completion_tokens and usage.served is None:
            inside = set_span_in_context(span)
            began_s, first_s = start_s + usage.queue_s, start_s + usage.ttft_s
            for name, from_s, to_s in (
                ("wait", start_s, began_s),
                ("prefill", began_s, first_s),
                ("decode", first_s, end_s),
            ):
                part = self._tracer.start_span(name, context=inside, start_time=_ns(from_s))
                part.end(_ns(to_s))
        span.end(_ns(end_s))

    def _attributes(
        self, operation: str, finish_reason: str, request: GenerationRequest, usage: Usage
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.response.finish_reasons": (finish_reason,),
            "gen_ai.request.temperature": float(request.params.temperature),
            "gen_ai.request.top_p": float(request.params.top_p),
            "gen_ai.request.choice.count": request.num_choices,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(reuse_of(usage).values()),
            "gen_ai.usage.cache_creation.input_tokens": usage.written_tokens,
            "ostinato.request.pattern": pattern_of(request),
            "ostinato.time_to_first_token": usage.ttft_s,
        }
        for layer, num_tokens in reuse_of(usage).items():
            found[f"ostinato.reuse.{layer}.tokens"] = num_tokens
        if request.params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = request.params.max_tokens
        if usage.prompt_name:
            found["ostinato.prompt.name"] = usage.prompt_name
        return found


def _ns(time_s: float) -> int:
    return int(time_s * _NS)
