"""One run of a consumer: its parts put together, started, and taken down in order."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.consumer.batch_performer import BatchPerformer
from holdfast.consumer.books import translated
from holdfast.consumer.burial import bury
from holdfast.consumer.chores import Chores
from holdfast.consumer.circuits import shared
from holdfast.consumer.clerk import Clerk
from holdfast.consumer.crew import Crew
from holdfast.consumer.delays import Delays
from holdfast.consumer.gates import Gates
from holdfast.consumer.intake import Intake
from holdfast.consumer.judge import Judge
from holdfast.consumer.lanes import Lanes
from holdfast.consumer.performer import Performer
from holdfast.consumer.reader import Reader
from holdfast.consumer.reporter import Reporter
from holdfast.consumer.runtime import Runtime
from holdfast.consumer.tables import require_tables
from holdfast.consumer.transaction import AsyncTransaction, DatabaseDown, is_outage
from holdfast.dlq.metrics import METRICS
from holdfast.dlq.replay.marks import replay_topic
from holdfast.dlq.replay.target import Target
from holdfast.errors import BrokerDown, HoldfastError
from holdfast.scrubbing import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.circuit import Sharing
    from holdfast.clock import Clock
    from holdfast.consumer.books import Books
    from holdfast.consumer.homes import Homes
    from holdfast.consumer.metrics import ConsumerMetrics
    from holdfast.consumer.route import Route
    from holdfast.consumer.settings import Settings
    from holdfast.consumer.tally import Tally
    from holdfast.consumer.work import Work
    from holdfast.ports import Broker

log = logging.getLogger("holdfast.consumer")
T = TypeVar("T")


class Assembly:
    """Poll thread, crew, clerk and lanes of one run."""

    def __init__(
        self,
        broker: Broker,
        group: str,
        routes: Mapping[str, Route],
        books: Books | None,
        homes: Homes,
        *,
        owner: str,
        settings: Settings,
        clock: Clock,
        tally: Tally,
        metrics: ConsumerMetrics,
    ) -> None:
        self._broker, self._group, self._routes = broker, group, routes
        self._books, self._owner = books, owner
        self.routes, self.homes = routes, homes
        self.settings = self._settings = settings
        self._clock = clock
        self._fatal: BaseException | None = None
        self.asked = False
        """Whether a signal has asked it to end."""
        self.clerk: Clerk | None = None
        self._chores: Chores | None = None
        gates = Gates(routes.values(), clock)
        self.lanes = Lanes(
            gates, clock, company=settings.workers, wake=self._wake, dropped=self._finished
        )
        self._gates = gates
        self._delays = delays = Delays(broker, group, routes, clock)
        judge = Judge(
            books, delays, settings=settings, tally=tally, metrics=metrics, stop=self._fail,
            reporter=Reporter(broker),
        )  # fmt: skip
        performer = Performer(
            self.lanes, books, judge, owner=owner, settings=settings, tally=tally,
            metrics=metrics, bury=partial(bury, clock=clock),
        )  # fmt: skip
        batch = (
            None if books is None else BatchPerformer(books, judge, clock=clock, metrics=metrics)
        )
        self._crew = Crew(
            self.lanes, performer, judge, batch, workers=settings.workers, tasks=settings.tasks,
            has_async=any(route.plan.is_async for route in routes.values()), clock=clock,
            finished=self._finished,
            farewells=[
                layer.dispose
                for route in routes.values()
                for layer in route.plan.layers
                if isinstance(layer, AsyncTransaction)
            ],
        )  # fmt: skip
        reader = Reader(settings, tally, metrics)
        self._sharing: list[Sharing] = []
        if books is not None:
            if settings.share_circuits:
                self._sharing = shared(routes.values(), books.engine, clock)
            self._chores = chores = Chores(
                books, self.lanes, routes, reader, owner=owner, settings=settings, clock=clock,
                metrics=metrics, sharing=self._sharing,
            )  # fmt: skip
            self.clerk = Clerk(
                books, self.lanes, reader=reader, owner=owner, settings=settings, clock=clock,
                chores=chores,
            )  # fmt: skip
            chores.admit = self.clerk.admit
        intake = Intake(
            group, routes, delays if books is None else None, reader, settings=settings,
            clock=clock, tally=tally, has_database=books is not None,
        )  # fmt: skip
        self.runtime = Runtime(
            group, routes, self.lanes, gates, intake, admit=self._admit, is_down=self._is_down,
            # Without a database, what others sent back to wait counts as lag, too.
            watches_lag=books is not None or broker.caps.delay is None,
            settings=settings, clock=clock, metrics=metrics,
        )  # fmt: skip
        metrics.begin(routes, lambda: len(self.lanes.running()), self.lanes.suspects)
        metrics.watch("broker", lambda: self.runtime.broker_down)
        metrics.watch("database", self._is_down)
        metrics.watch("dead letters", lambda: self.homes.down)
        for topic in routes:
            METRICS.watch(group, topic)

    def run(self, *, until_idle: bool) -> None:
        """Run until stopped, or until nothing is left to do."""
        with ExitStack() as closing:
            self._open(closing)
            while not self.runtime.stopping.is_set():
                came = self.runtime.step()
                if until_idle and not came and self._is_idle():
                    break
            self.runtime.drain(self._settings.drain_seconds)
        if self._fatal is not None:
            raise self._fatal

    def stop(self, *, at_once: bool = False) -> None:
        """End the run in good order, however often asked; or *at_once*, without what runs."""
        if at_once:
            self.runtime.hurry.set()
        self.runtime.stopping.set()
        self._wake()

    def _open(self, closing: ExitStack) -> None:
        if self._books is not None:
            self._patiently("database", self._prepare_database)
        tiers = self._delays.tiers if self._books is None else ()
        topics = [
            *self._routes,
            *tiers,
            *(replay_topic(topic, self._group) for topic in self._routes),
        ]
        source = self._connected(sorted(topics))
        self.runtime.attach(source)
        closing.callback(self._close, source)
        closing.callback(self._delays.close)
        for end in (*self._gates.listen(self._wake), *(one.end for one in self._sharing)):
            closing.callback(end)
        if self.clerk is not None:
            self.clerk.start()
            closing.callback(self._depart)
            closing.callback(self.clerk.stop)
        self._crew.start()
        closing.callback(self._crew.stop)

    def _connected(self, topics: list[str]) -> Any:
        """Return the source, however long the broker takes to answer."""
        if self._books is None:
            self._delays.prepare()
        target = Target(self._broker, None)
        for topic in self._routes:
            if replay_topic(topic, self._group) in topics:
                with suppress(HoldfastError):  # the source says what is wrong
                    target.prepare([(topic, self._group)])
        return self._patiently(
            "broker",
            lambda: self._broker.source(topics, group=self._group, listener=self.runtime),
        )

    def _prepare_database(self) -> None:
        books = self._books
        assert books is not None  # noqa: S101 - asked by the caller
        with translated(), books.engine.connect() as db:
            require_tables(db)
        books.introduce(self._routes.values())

    def _patiently(self, what: str, job: Callable[[], T]) -> T:
        """Return what *job* returns, once what it needs answers; a stop ends the wait."""
        attempt = 0
        while True:
            attempt += 1
            self.runtime.pulse = self._clock.monotonic()
            try:
                return job()
            except (BrokerDown, DatabaseDown) as error:
                cause = error.__cause__
                if (
                    isinstance(error, DatabaseDown)
                    and cause
                    and not is_outage(cause, connecting=True)
                ):
                    raise  # it answers, and refuses
                if isinstance(error, BrokerDown):
                    self.runtime.broker_down = text_of(error)
                elif self.clerk is not None:
                    self.clerk.down = text_of(error)
                log.error("the %s is down, the consumer waits for it: %s",  # noqa: TRY400
                          what, text_of(error))  # fmt: skip
                delay = self._settings.backoff.delay(min(attempt, 6)) or 1.0
                if self._clock.wait(self.runtime.stopping, max(delay, 0.2)):
                    raise

    def _is_idle(self) -> bool:
        if not self.lanes.is_empty() or not (self.clerk is None or self.clerk.is_idle):
            return False
        if self._chores is not None and self._chores.retrying:
            return False
        source = self.runtime.source
        try:
            return not any(source.lag().values())
        except BrokerDown:
            return False

    def _admit(self, works: list[Work]) -> None:
        if self.clerk is None:
            self.lanes.admit(works)
        else:
            self.clerk.admit(works)

    def _finished(self, work: Work) -> None:
        if self.clerk is not None:
            self.clerk.finished(work)
            if work.row is not None:
                self.clerk.hurry()

    def _is_down(self) -> str | None:
        return None if self.clerk is None else self.clerk.down

    def _wake(self) -> None:
        self.runtime.wake()

    def _fail(self, error: BaseException) -> None:
        self._fatal = error
        self.runtime.stopping.set()
        self._wake()

    def _depart(self) -> None:
        """Say goodbye to the database: nobody is blamed for what was left."""
        books = self._books
        if books is None:
            return
        try:
            with translated():
                books.ledger.depart(self._owner)
            books.run(lambda db: books.held.leave(db, self._owner))
        except HoldfastError as error:
            log.warning("the database did not hear that this consumer ends: %s", error)

    def _close(self, source: Any) -> None:
        try:
            source.close()
        except HoldfastError as error:
            log.warning("the broker did not hear that this consumer ends: %s", error)
