"""One run of a consumer: its parts put together, started, and taken down in order."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.consumer.attempt.batch import BatchExecutor
from holdfast.consumer.attempt.executor import AttemptExecutor
from holdfast.consumer.attempt.settlement import Settlement
from holdfast.consumer.attempt.workers import WorkerPool
from holdfast.consumer.intake.admission import Admission
from holdfast.consumer.intake.decode import BodyReader, MessageDecoder
from holdfast.consumer.intake.poller import Poller
from holdfast.consumer.intake.retry_topics import RetryTopics
from holdfast.consumer.maintenance import Maintenance
from holdfast.consumer.replays import ReplayConfirmations
from holdfast.consumer.scheduling.circuit_gate import CircuitGate
from holdfast.consumer.scheduling.scheduler import KeyScheduler
from holdfast.consumer.schema import require_tables
from holdfast.consumer.store import translated
from holdfast.db.errors import DatabaseDown, outage
from holdfast.dlq.metrics import METRICS
from holdfast.dlq.replay.target import Target
from holdfast.errors import BrokerDown, HoldfastError
from holdfast.headers import replay_topic
from holdfast.ports import BrokerPowers
from holdfast.scrubbing import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.circuit import Sharing
    from holdfast.consumer.dead_letters import DeadLetterRouting
    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.settings import ConsumerContext
    from holdfast.ports import Broker

log = logging.getLogger("holdfast.consumer")
T = TypeVar("T")


class ConsumerRun:
    """Poller, admission, scheduler and workers of one run."""

    def __init__(
        self,
        context: ConsumerContext,
        broker: Broker,
        routes: Mapping[str, Route],
        homes: DeadLetterRouting,
    ) -> None:
        self.context, self._broker = context, broker
        self.routes, self.homes = routes, homes
        self.asked = False
        """Whether a signal has asked it to end."""
        self._gates = gates = CircuitGate(routes.values(), context.clock)
        self.lanes = lanes = KeyScheduler(context, gates)
        self._delays = RetryTopics(context, broker, routes)
        self.admission: Admission | None = None
        self._maintenance: Maintenance | None = None
        self._sharing: list[Sharing] = []
        reader, store = BodyReader(context), context.store
        if store is not None:
            if context.settings.share_circuits:
                from holdfast.consumer.shared_circuits import shared

                self._sharing = shared(routes.values(), store.engine, context.clock)
            self._maintenance = Maintenance(context, store, lanes, routes, reader, self._sharing)
            self.admission = Admission(context, store, lanes, reader, self._maintenance)
        intake = MessageDecoder(context, routes, self._delays if store is None else None, reader)
        self.poller = Poller(
            context, intake, lanes, gates, self.admission,
            # Without a database, what others sent back to wait counts as lag, too.
            watches_lag=store is not None or broker.caps.delay is None,
        )  # fmt: skip
        executor = AttemptExecutor(context, ReplayConfirmations(broker))
        settlement = Settlement(context, executor, lanes, self._delays, self.poller.fail)
        batch = None if store is None else BatchExecutor(context, store, settlement)
        self._workers = WorkerPool(context, lanes, executor, settlement, batch, routes.values())
        metrics = context.metrics
        metrics.begin(routes, lambda: len(lanes.running()), lanes.suspects)
        metrics.watch("broker", lambda: self.poller.broker_down)
        metrics.watch("database", lambda: self.poller.database_down)
        metrics.watch("dead letters", lambda: self.homes.down)
        for topic, route in routes.items():
            METRICS.watch(context.group, topic)
            for budget in route.budgets:
                metrics.watch_budget(budget.name or topic, budget.balance)

    def run(self, *, until_idle: bool) -> None:
        """Run until stopped, or until nothing is left to do."""
        with ExitStack() as closing:
            self._open(closing)
            while not self.poller.stopping.is_set():
                came = self.poller.step()
                if until_idle and not came and self._is_idle():
                    break
            self.poller.drain(self.context.settings.drain_seconds)
        if self.poller.fatal is not None:
            raise self.poller.fatal

    def _open(self, closing: ExitStack) -> None:
        if self.context.store is not None:
            self._patiently("database", self._prepare_database)
        tiers = self._delays.tiers if self.context.store is None else ()
        topics = [
            *self.routes,
            *tiers,
            *(replay_topic(topic, self.context.group) for topic in self.routes),
        ]
        source = self._connected(sorted(topics))
        self.poller.attach(source)
        closing.callback(self._close, source)
        closing.callback(self._delays.close)
        for end in (*self._gates.listen(self.poller.wake), *(one.end for one in self._sharing)):
            closing.callback(end)
        if self.admission is not None:
            self.admission.start()
            closing.callback(self._depart)
            closing.callback(self.admission.stop)
        self._workers.start()
        closing.callback(self._workers.stop)

    def _connected(self, topics: list[str]) -> Any:
        """Return the source, however long the broker takes to answer."""
        if self.context.store is None:
            self._delays.prepare()
        target = Target(self._broker, None)
        for topic in self.routes:
            if replay_topic(topic, self.context.group) in topics:
                with suppress(HoldfastError):  # the source says what is wrong
                    target.prepare([(topic, self.context.group)])
        source = self._patiently(
            "broker",
            lambda: self._broker.source(topics, group=self.context.group, listener=self.poller),
        )
        with suppress(HoldfastError):  # a figure more; nothing depends on it
            self.context.metrics.show_retention(
                BrokerPowers.of(self._broker).retention(self.routes)
            )
        return source

    def _prepare_database(self) -> None:
        store = self.context.store
        assert store is not None  # noqa: S101 - asked by the caller
        with translated(), store.engine.connect() as db:
            require_tables(db, lineage=self.context.settings.lineage is not None)
        store.introduce(self.routes.values())

    def _patiently(self, what: str, job: Callable[[], T]) -> T:
        """Return what *job* returns, once what it needs answers; a stop ends the wait."""
        attempt = 0
        while True:
            attempt += 1
            self.poller.pulse = self.context.clock.monotonic()
            try:
                return job()
            except (BrokerDown, DatabaseDown) as error:
                cause = error.__cause__
                if isinstance(error, DatabaseDown) and cause and not outage(cause).away:
                    raise  # it answers, and refuses
                if isinstance(error, BrokerDown):
                    self.poller.broker_down = text_of(error)
                elif self.admission is not None:
                    self.admission.down = text_of(error)
                log.error("the %s is down, the consumer waits for it: %s",  # noqa: TRY400
                          what, text_of(error))  # fmt: skip
                delay = self.context.settings.backoff.delay(min(attempt, 6)) or 1.0
                if self.context.clock.wait(self.poller.stopping, max(delay, 0.2)):
                    raise

    def _is_idle(self) -> bool:
        if not self.lanes.is_empty() or not (self.admission is None or self.admission.is_idle):
            return False
        if self._maintenance is not None and self._maintenance.retrying:
            return False
        source = self.poller.source
        try:
            return not any(source.lag().values())
        except BrokerDown:
            return False

    def _depart(self) -> None:
        """Say goodbye to the database: nobody is blamed for what was left."""
        store = self.context.store
        if store is None:
            return
        try:
            with translated():
                store.ledger.depart(self.context.owner)
            store.run(lambda db: store.held.leave(db, self.context.owner))
        except HoldfastError as error:
            log.warning("the database did not hear that this consumer ends: %s", error)

    def _close(self, source: Any) -> None:
        try:
            source.close()
        except HoldfastError as error:
            log.warning("the broker did not hear that this consumer ends: %s", error)
