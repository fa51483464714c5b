"""Spans by OpenTelemetry's messaging conventions: create, send, receive, process, settle.

They are linked, not nested: a message may wait for days, and a batch has many creators. What a
message was created in travels with it and is never overwritten. While tracing is off nothing
of this is even loaded: whoever may trace looks at `holdfast.tracing.switch.spans` first.
"""

from __future__ import annotations

import re
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from holdfast.call import Later
from holdfast.message import current_message, current_origin
from holdfast.metrics import TraceLink
from holdfast.scrubbing import scrubbed, text_of, type_name
from holdfast.stored_message import StoredMessage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from opentelemetry.trace import Span, Tracer

    from holdfast.call import Call
    from holdfast.message import Message
    from holdfast.ports import Published

R = TypeVar("R")

MOST_LINKS = 128
"""Links that a span keeps by OpenTelemetry's default; larger batches get several spans."""
_MOST_FRAMES = 30
_propagator = TraceContextTextMapPropagator()
_PLAIN = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NOWHERE = Context()
# What other instrumentation makes inside belongs to a trace that nobody keeps.
_UNSAMPLED = NonRecordingSpan(SpanContext(trace_id=1, span_id=1, is_remote=False))


@contextmanager
def quiet() -> Iterator[None]:
    """Open a block in which instrumentation of client libraries makes no spans beside ours."""
    silent = trace.set_span_in_context(_UNSAMPLED)
    silent = otel_context.set_value(otel_context._SUPPRESS_INSTRUMENTATION_KEY, True, silent)
    token = otel_context.attach(silent)
    try:
        yield
    finally:
        otel_context.detach(token)


def origin_of(message: Message) -> SpanContext | None:
    """Return the span that *message* was created in, None if nobody traced it."""
    parent, state = message.traceparent, message.tracestate
    if isinstance(message, StoredMessage):
        said = dict(message.wire)
        parent, state = (_text(said.get(f"ce_trace{name}")) for name in ("parent", "state"))
    if parent is None:
        return None
    plain = None if state else _PLAIN.fullmatch(parent)
    if plain is not None:  # nearly always, and the propagator takes its time
        trace_id, span_id, flags = (int(part, 16) for part in plain.groups())
        found = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
        return found if found.is_valid else None
    within = _propagator.extract(_carrier(parent, state), _NOWHERE)
    found = trace.get_current_span(within).get_span_context()
    return found if found.is_valid else None


def _carrier(parent: str, state: str | None) -> dict[str, str]:
    return {"traceparent": parent, "tracestate": state} if state else {"traceparent": parent}


def _of_request() -> Context | None:
    """Return where the request that is served here comes from, if nobody has a span for it."""
    request = current_origin()
    if request is None or request.trace.parent is None or current_message() is not None:
        return None
    if trace.get_current_span().get_span_context().is_valid:
        return None
    return _propagator.extract(_carrier(request.trace.parent, request.trace.state), _NOWHERE)


class Spans:
    """Makes the spans of messages with *tracer*."""

    def __init__(self, tracer: Tracer, *, parent: bool) -> None:
        self._tracer = tracer
        self._parent = parent

    @contextmanager
    def create(self, topic: str, type_: str) -> Iterator[Span]:
        """Make the span in which a message is created; what is created inside carries it.

        It is a child of the current span, or of the caller's of the request that is served.
        """
        attributes = {**_operation("create", "create", topic), "holdfast.message.type": type_}
        with self._tracer.start_as_current_span(
            f"create {topic}", _of_request(), SpanKind.PRODUCER, attributes
        ) as span:
            yield span

    def send(
        self, system: str, messages: Sequence[Message], publish: Callable[[], list[Published]]
    ) -> list[Published]:
        """Publish, and make a span for the messages of each topic."""
        began = time.time_ns()
        results: list[Published] = []
        failure: BaseException | None = None
        try:
            with quiet():
                results = publish()
        except BaseException as error:
            failure = error
            raise
        finally:
            errors: dict[int, BaseException] = {
                id(message): result.error
                for message, result in zip(messages, results, strict=False)
                if result.error is not None
            }
            for topic, some in _by_topic((message.topic, message) for message in messages):
                refused = next((errors[id(one)] for one in some if id(one) in errors), None)
                with self._batch("send", "send", system, topic, some, began) as span:
                    note_error(span, failure or refused)
        return results

    def transferred(
        self, name: str, kind: str, system: str, group: str,
        messages: Iterable[tuple[str, Message]], began: int,
    ) -> None:  # fmt: skip
        """Make spans of what was received or settled since *began*, for each topic."""
        for topic, some in _by_topic(messages):
            with self._batch(name, kind, system, topic, some, began) as span:
                span.set_attribute("messaging.consumer.group.name", group)

    def process(
        self, topic: str, messages: Sequence[Message], *, group: str, system: str, attempt: int
    ) -> ProcessSpan:
        """Begin the span in which *messages*, one or a batch, are handled."""
        attributes = {
            **_operation("process", "process", topic),
            "messaging.system": system,
            "messaging.consumer.group.name": group,
        }
        within, links = _NOWHERE, []
        if len(messages) == 1:
            about, origin = _about(messages[0]), origin_of(messages[0])
            attributes |= about
            if self._parent and origin is not None:
                within = trace.set_span_in_context(NonRecordingSpan(origin))
            elif origin is not None:
                links = [Link(origin, about)]
        else:
            links = _links(messages)
            attributes["messaging.batch.message_count"] = len(messages)
        span = self._tracer.start_span(
            f"process {topic}", within, SpanKind.CONSUMER, attributes, links
        )
        return ProcessSpan(self._tracer, span, attempt)

    @contextmanager
    def step(self, name: str, cause: Message, attributes: dict[str, str | int]) -> Iterator[Span]:
        """Make a span for a step of ours that *cause* led to, e.g. of a saga."""
        with self._tracer.start_as_current_span(
            name, attributes=attributes, links=_links([cause]),
            record_exception=False, set_status_on_exception=False,
        ) as span:  # fmt: skip
            try:
                yield span
            except BaseException as error:
                note_error(span, error)
                raise

    @contextmanager
    def _batch(
        self, name: str, kind: str, system: str, topic: str, some: list[Message], began: int
    ) -> Iterator[Span]:
        attributes = {**_operation(name, kind, topic), "messaging.system": system}
        if len(some) == 1:
            attributes |= _about(some[0])
        else:
            attributes["messaging.batch.message_count"] = len(some)
        span = self._tracer.start_span(
            f"{name} {topic}", _NOWHERE, SpanKind.CLIENT, attributes, _links(some),
            start_time=began,
        )  # fmt: skip
        yield span
        span.end()


class ProcessSpan:
    """The handling of a message, over all its attempts, each of which is a span inside of it."""

    def __init__(self, tracer: Tracer, span: Span, attempt: int) -> None:
        self._tracer = tracer
        self._span = span
        self._attempt = attempt
        self._is_over = False

    def link(self) -> TraceLink | None:
        """Return what links a measurement to it; None if nobody records it."""
        found = self._span.get_span_context()
        if not self._span.is_recording() or not found.trace_flags.sampled:
            return None
        labels = {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}
        return TraceLink(labels, trace.set_span_in_context(self._span))

    def run(self, function: Callable[[Call], R], call: Call) -> R:
        """Call *function* as the next attempt."""
        span, token = self._begin()
        try:
            result = function(call)
        except BaseException as error:
            _end_attempt(span, token, call, error)
            raise
        _end_attempt(span, token, call, _failure(call, result))
        return result

    async def run_async(self, function: Callable[[Call], Awaitable[R]], call: Call) -> R:
        """Await *function* as the next attempt."""
        span, token = self._begin()
        try:
            result = await function(call)
        except BaseException as error:
            _end_attempt(span, token, call, error)
            raise
        _end_attempt(span, token, call, _failure(call, result))
        return result

    def _begin(self) -> tuple[Span, Any]:
        """Begin an attempt, and make its span the current one."""
        attributes = {"holdfast.attempt": self._attempt}
        self._attempt += 1
        inside = trace.set_span_in_context(self._span)
        span = self._tracer.start_span("attempt", inside, attributes=attributes)
        return span, otel_context.attach(trace.set_span_in_context(span))

    def end(
        self, outcome: str, error: BaseException | None = None, call: Call | None = None
    ) -> None:
        """End it, and say what became of the message."""
        if self._is_over:
            return
        self._is_over = True
        self._span.set_attribute("holdfast.outcome", outcome)
        note_error(self._span, error, call)
        if call is not None and call.letter is not None:
            letter = getattr(call.letter, "dlq_id", "")
            self._span.add_event("dead letter", {"holdfast.dead_letter.id": str(letter)})
        self._span.end()

    def __del__(self) -> None:
        """End it where its run was given up, e.g. because the process stops."""
        self.end("abandoned")


def _end_attempt(span: Span, token: Any, call: Call, error: BaseException | None) -> None:
    otel_context.detach(token)
    note_error(span, error, call)
    span.end()


def _failure(call: Call, result: object) -> BaseException | None:
    """Return why an attempt that gave back *result* failed; one that waits is tried again."""
    return call.error if isinstance(result, Later) else call.failure


def note_error(span: Span, error: BaseException | None, call: Call | None = None) -> None:
    """Say on *span* that *error* happened, without secrets and hidden fields."""
    if error is None or not span.is_recording():
        return
    kind = type_name(error)
    text = text_of(error)
    if call is not None:
        text = call.told(error).partition(": ")[2]
    # Frames hold source lines only; the text of the error, with which a traceback ends, is above.
    frames = scrubbed("".join(traceback.format_tb(error.__traceback__, -_MOST_FRAMES)))
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, text[:500]))
    span.add_event(
        "exception",
        {"exception.type": kind, "exception.message": text, "exception.stacktrace": frames},
    )


def _operation(name: str, kind: str, topic: str) -> dict[str, Any]:
    return {
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }


def _about(message: Message) -> dict[str, Any]:
    type_, correlation = message.type, message.correlation_id
    if isinstance(message, StoredMessage):
        said = dict(message.wire)
        type_, correlation = (
            _text(said.get("ce_type")) or type_,
            _text(said.get("ce_correlationid")),
        )
    found = {"messaging.message.id": message.id, "holdfast.message.type": type_}
    if correlation is not None:
        found["messaging.message.conversation_id"] = correlation
    return found


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _links(messages: Iterable[Message]) -> list[Link]:
    return [
        Link(origin, _about(message))
        for message in messages
        if (origin := origin_of(message)) is not None
    ]


def _by_topic(messages: Iterable[tuple[str, Message]]) -> Iterator[tuple[str, list[Message]]]:
    """Yield the messages of each topic, as many at a time as a span has links for."""
    found: dict[str, list[Message]] = {}
    for topic, message in messages:
        found.setdefault(topic, []).append(message)
    for topic, some in found.items():
        for begin in range(0, len(some), MOST_LINKS):
            yield topic, some[begin : begin + MOST_LINKS]
