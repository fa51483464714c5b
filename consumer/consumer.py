"""The consumer: handlers by topic, and the loop that feeds them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.codec import JsonCodec, payload_annotation
from holdfast.consumer.transaction import Transaction
from holdfast.database import open_database
from holdfast.errors import ConfigurationError, DependencyDown
from holdfast.layer import Call
from holdfast.message import handling
from holdfast.plan import Handler, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine

    from holdfast.ports import Broker, Delivery, Source

log = logging.getLogger("holdfast.consumer")
_BATCH, _POLL_SECONDS = 100, 1.0


@dataclass(slots=True)
class Tally:
    """What a consumer has done so far."""

    handled: int = 0
    duplicates: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Registered:
    """A handler ready to run."""

    plan: Plan
    consumer: str
    decode: Callable[[bytes | None], Any]


class Consumer:
    """Runs handlers for the messages of a group; the broker is told only after the commit.

    A message whose handler fails is given back and comes again, later and later: nothing
    is dropped.
    """

    def __init__(
        self,
        broker: str | Broker,
        *,
        group: str,
        database: str | Engine | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self.broker = connect(broker) if isinstance(broker, str) else broker
        self.group = group
        self.tally = Tally()
        self._engine = None if database is None else open_database(database)
        self._backoff = Backoff(first=0.1, ceiling=60) if backoff is None else backoff
        self._handlers: dict[str, Registered] = {}
        self._stop = threading.Event()

    def on(self, topic: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function for *topic*; its layers are checked here."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            if topic in self._handlers:
                raise ConfigurationError(f"topic {topic!r} has a handler already: keep one")
            self._handlers[topic] = self._registered(function)
            return function

        return register

    def explain(self) -> str:
        """Return every handler's plan as text."""
        return "\n".join(
            f"{topic} → {entry.plan.explain()}" for topic, entry in self._handlers.items()
        )

    def run(self, *, until_idle: bool = False) -> None:
        """Handle messages until `stop`, SIGTERM or SIGINT; or until nothing is left.

        Everything in hand is settled before this returns.
        """
        if not self._handlers:
            raise ConfigurationError("no handler is registered: decorate one with consumer.on()")
        source = self.broker.source(sorted(self._handlers), group=self.group)
        restore = self._catch_signals(source)
        try:
            self._loop(source, until_idle=until_idle)
        finally:
            source.close()
            restore()

    def stop(self) -> None:
        """End `run` after the message in hand."""
        self._stop.set()

    def _loop(self, source: Source, *, until_idle: bool) -> None:
        while not self._stop.is_set():
            batch = source.poll(_BATCH, _POLL_SECONDS)
            for delivery in batch:
                if self._stop.is_set():
                    source.release(delivery, blame=False)
                else:
                    self._handle(source, delivery)
            if until_idle and not batch and not any(source.lag().values()):
                return

    def _handle(self, source: Source, delivery: Delivery) -> None:
        entry = self._handlers[delivery.lane.topic]
        message = delivery.message
        try:
            with handling(message):
                call = Call(
                    (entry.decode(message.payload),), {}, message=message, consumer=entry.consumer
                )
                _run(entry.plan, call)
        except DependencyDown as error:
            log.warning("dependency down, message %s is given back: %s", message.id, error)
            self._give_back(source, delivery, blame=False)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises, nothing is dropped
            self.tally.failed += 1
            log.warning("handler failed, message %s comes again: %r", message.id, error)
            self._give_back(source, delivery, blame=True)
        else:
            # Committed before accepted: a crash here is absorbed as a duplicate.
            source.accept([delivery])
            self.tally.handled += not call.duplicate
            self.tally.duplicates += call.duplicate

    def _give_back(self, source: Source, delivery: Delivery, *, blame: bool) -> None:
        delay = self._backoff.delay(delivery.count or 1)
        source.release(delivery, blame=blame, delay=delay if source.caps.delay else None)

    def _registered(self, function: Callable[..., Any]) -> Registered:
        handler = function if isinstance(function, Handler) else Handler((), function)
        plan = handler.plan
        layers = list(plan.layers)
        if self._engine is not None:
            inject = "session" in inspect.signature(plan.function).parameters
            layers.append(Transaction(self._engine, inject=inject))
            layers.sort(key=lambda layer: layer.stage)
        return Registered(
            Plan(layers, plan.function),
            f"{self.group}/{plan.function.__module__}.{plan.function.__qualname__}",
            JsonCodec().decoder_for(payload_annotation(plan.function)),
        )

    def _catch_signals(self, source: Source) -> Callable[[], None]:
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def stop(_number: int, _frame: object) -> None:
            self._stop.set()
            source.wake()

        previous = {
            number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)
        }

        def restore() -> None:
            for number, handler in previous.items():
                signal.signal(number, handler)

        return restore


def _run(plan: Plan, call: Call) -> Any:
    return asyncio.run(plan.run_async(call)) if plan.is_async else plan.run(call)
