"""The consumer: handlers by topic, and the run that feeds them."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

from holdfast.brokers import connect
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.concurrency import signals_heard
from holdfast.consumer.dead_letters import DeadLetterRouting
from holdfast.consumer.handlers.checks import check_apart, registered
from holdfast.consumer.handlers.route import Route, Routing
from holdfast.consumer.monitoring import ConsumerMetrics, Counters
from holdfast.consumer.own_loop import MessageHandler, OwnerHeartbeat
from holdfast.consumer.replays import ReplayConfirmations
from holdfast.consumer.run import ConsumerRun
from holdfast.consumer.settings import Batches, ConsumerContext, Settings, SettingsOptions
from holdfast.consumer.store import ConsumerStore
from holdfast.db.engine import open_database
from holdfast.dlq import CaptureSettings, DeadLetterStore, DeadLetterTopic
from holdfast.dlq.capture.capture import NOWHERE
from holdfast.dlq.triage import BUILT_IN, Triage
from holdfast.errors import ConfigurationError
from holdfast.ids import new_id, require_name
from holdfast.tracing.switch import system_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import MetaData
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from holdfast.consumer.intake.poller import Poller
    from holdfast.dlq import DeadLetter
    from holdfast.ports import Broker
    from holdfast.testing.handlers import ConsumerTest

F = TypeVar("F", bound="Callable[..., Any]")

log = logging.getLogger("holdfast.consumer")
_GRACE_SECONDS = 15.0
_HURRIED_SECONDS = 3.0
_EXIT_UNFINISHED = 4
_OWN_THREADS = 3
"""Those beside the workers that use the database: admission, the heartbeat, the circuits' state."""


class Registration(NamedTuple):
    """A handler as it was given to `Consumer.on`."""

    function: Callable[..., Any]
    name: str | None
    batch: Batches | None
    ordered: bool


class Consumer:
    """Runs handlers for the messages of a group; the broker is told only after the commit.

    Each key keeps its order and waits for nobody else. What fails comes again, what is
    poison goes to the dead letters and holds its key, what is down pauses the intake:
    nothing is dropped, nothing is blamed for an outage. *async_database* is the same database
    for handlers that ask for an `AsyncSession`, with its own pool and settings; without it
    one is made from the URL alone. *version* is that of your service, *origin* what else its
    dead letters say and protect, *triage* the rules for them; a handler's own `@dead_letter`
    goes first. *options* are those of `Settings`.
    """

    def __init__(
        self,
        broker: str | Broker,
        *,
        group: str,
        database: str | Engine | None = None,
        async_database: AsyncEngine | None = None,
        version: str = "",
        origin: CaptureSettings = NOWHERE,
        triage: Triage | None = None,
        settings: Settings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        metrics: ConsumerMetrics | None = None,
        **options: Unpack[SettingsOptions],
    ) -> None:
        if not isinstance(group, str) or not group:
            raise ConfigurationError(f"group={group!r}: name the consumer group, e.g. 'billing'")
        require_name(group, "group=…")
        if settings is not None and not isinstance(settings, Settings):
            raise ConfigurationError(f"settings={settings!r}: pass a holdfast.consumer.Settings")
        if not isinstance(version, str):
            raise ConfigurationError(f"version={version!r}: write it as a text, e.g. '1.4.2'")
        if not isinstance(origin, CaptureSettings):
            raise ConfigurationError(f"origin={origin!r}: pass a holdfast.CaptureSettings")
        if triage is not None and not isinstance(triage, Triage):
            raise ConfigurationError(f"triage={triage!r}: pass a holdfast.dlq.triage.Triage")
        if settings is not None and options:
            raise ConfigurationError(
                f"{', '.join(options)} beside settings=: put everything into the Settings"
            )
        self.broker = connect(broker) if isinstance(broker, str) else _required(broker)
        self.group = group
        self.settings = Settings.read(options) if settings is None else settings
        self.metrics = ConsumerMetrics() if metrics is None else metrics
        self.metrics.belongs_to(group)
        self.tally = Counters(self.metrics)
        self.owner = f"{socket.gethostname()[:16]}-{os.getpid()}-{new_id()[-12:]}"
        """The name of this process in the database."""
        if self.settings.lineage is not None and database is None:
            raise ConfigurationError(
                "lineage is written in the transaction of the handler: give the consumer a "
                "database, Consumer(…, database=…)"
            )
        users = self.settings.workers + _OWN_THREADS
        engine = None if database is None else open_database(database, users=users)
        store = None if engine is None else ConsumerStore(engine, group, self.settings, clock)
        self.context = ConsumerContext(
            group=group, owner=self.owner, settings=self.settings, clock=clock,
            counters=self.tally, store=store, system=system_of(self.broker),
        )  # fmt: skip
        self._heartbeat = None if store is None else OwnerHeartbeat(store.ledger, self.owner, clock)
        self._homes = DeadLetterRouting(self._own_home(triage), store, self.settings)
        said = (
            CaptureSettings(service_version=version)
            .over(origin)
            .over(CaptureSettings(broker=self.broker.name))
        )
        self._routing = Routing(group, self.settings, engine, clock, self._homes, said)
        if async_database is not None:
            self._routing.use(async_database)
        self.registrations: dict[str, Registration] = {}
        """The handlers by topic, as they were given to `on`."""
        self._routes: dict[str, Route] = {}
        self._singles: dict[str, MessageHandler] = {}
        self._run: ConsumerRun | None = None
        self._stopped = threading.Event()

    def on(
        self,
        topic: str,
        *,
        name: str | None = None,
        batch: Batches | int | None = None,
        ordered: bool = True,
    ) -> Callable[[F], F]:
        """Register the decorated function for *topic*; its layers are checked here.

        The handler is known by the topic in its group, or by *name* if that is given: under this
        its dedup rows, attempts and dead letters are kept, whatever the function is called and
        however the program is started. With *batch*, a size or `Batches`, so many messages share
        one transaction. A handler to which the order of a key's messages does not matter says
        *ordered* False: they run side by side, and none waits for one that failed.
        """
        if not isinstance(topic, str) or not topic:
            raise ConfigurationError(
                f"on({topic!r}): name the topic that the handler reads, e.g. @consumer.on('orders')"
                "; for several topics write it several times"
            )
        require_name(topic, f"on({topic!r})")
        if name is not None:
            require_name(name, f"on({topic!r}, name=…)")
        batches = Batches.of(batch)

        def register(function: F) -> F:
            if topic in self._routes:
                raise ConfigurationError(f"topic {topic!r} has a handler already: keep one")
            route = self._routing.route(topic, function, batches, ordered=ordered, name=name)
            check_apart(route, self._routes.values())
            self._routes[topic] = route
            self.registrations[topic] = Registration(function, name, batches, ordered)
            return registered(function, topic)

        return register

    def identify(self, version: str) -> None:
        """Say which version of your service this is, where the program itself does not."""
        known = CaptureSettings(service_version=version)
        self._routing.origin = self._routing.origin.over(known)
        for route in self._routes.values():
            route.letters.origin = route.letters.origin.over(known)

    def explain(self) -> str:
        """Return every handler's plan as text."""
        return "\n".join(f"{topic} → {route.explain()}" for topic, route in self._routes.items())

    def handler(self, topic: str) -> MessageHandler:
        """Return the handler of *topic* for a loop of your own: `handle(message)` runs it."""
        if topic not in self._routes:
            there = ", ".join(sorted(self._routes)) or "none"
            raise ConfigurationError(f"topic {topic!r} has no handler; there are: {there}")
        known = self._singles.get(topic)
        if known is None:  # it remembers which replays have failed, so there is one
            known = self._singles[topic] = MessageHandler(
                self.context, self._routes[topic], ReplayConfirmations(self.broker), self._heartbeat
            )
        return known

    def for_test(
        self,
        *,
        database: str | Engine | None = None,
        tables: MetaData | None = None,
        effects: bool = False,
    ) -> ConsumerTest:
        """Return the same handlers for a test: no broker, a virtual clock, a database of its own.

        *database* is a URL or an engine for what they write, a SQLite file that goes with the
        test if left out. Holdfast's tables are made in it, and yours if you pass your *tables*.
        Functions marked `@effect` are called only with *effects*.
        """
        from holdfast.testing.handlers import ConsumerTest  # only tests need it

        return ConsumerTest(self, database=database, tables=tables, effects=effects)

    @property
    def engine(self) -> Engine | None:
        """The database, None for a consumer without one."""
        store = self.context.store
        return None if store is None else store.engine

    @property
    def topics(self) -> list[str]:
        """The topics that have a handler."""
        return sorted(self._routes)

    @property
    def running(self) -> ConsumerRun | None:
        """The parts of the run under way, for probes; None when there is none."""
        return self._run

    def run(self, *, until_idle: bool = False) -> None:
        """Handle messages until `stop`, SIGTERM or SIGINT; or until nothing is left.

        What runs is finished and settled before this returns, within `drain_seconds`; the
        rest goes back without blame. A second signal, a second later or more, ends it at
        once. Where a client library does not come back after a signal, the process ends all
        the same, with exit code 4.
        """
        if not self._routes:
            raise ConfigurationError("no handler is registered: decorate one with consumer.on()")
        with ExitStack() as closing:
            run = ConsumerRun(self.context, self.broker, self._routes, self._homes)
            if threading.current_thread() is threading.main_thread():
                ended = threading.Event()
                closing.callback(ended.set)
                closing.enter_context(signals_heard(partial(self._asked, run, ended)))
                if not until_idle and not gc.get_freeze_count():
                    # The process is the consumer's: what its imports made need not be looked at
                    # by each full collection of garbage, which the messages in hand bring about.
                    gc.freeze()
                    closing.callback(gc.unfreeze)
            self._run = run  # after the signals: whom a probe tells of it may end it
            closing.callback(setattr, self, "_run", None)
            if self._stopped.is_set():
                return
            run.run(until_idle=until_idle)

    def stop(self, *, at_once: bool = False) -> None:
        """End `run` after what is in hand, within `drain_seconds`. Any thread may call it.

        To call it again changes nothing. With *at_once* running handlers are not waited for:
        what they return counts for nothing, and their messages come again without blame.
        """
        self._stopped.set()
        run = self._run
        if run is not None:
            run.poller.stop(at_once=at_once)

    def _own_home(self, triage: Triage | None) -> Any:
        store = self.context.store
        if store is not None:
            rules = BUILT_IN if triage is None else triage
            return DeadLetterStore(store.engine, clock=self.context.clock, triage=rules)
        if triage is not None:
            raise ConfigurationError(
                "triage is done where dead letters are stored: give the consumer a database, or "
                "give the rules to the collector,  holdfast dlq collect --triage module:name"
            )
        return _LateTopicHome(self.broker)

    def _asked(self, run: ConsumerRun, ended: threading.Event, number: int) -> None:
        again = run.asked
        run.asked = True
        seconds = self.settings.drain_seconds
        end_if_it_lingers(run.poller, ended, drain_seconds=seconds)
        run.poller.stop(at_once=again)
        bound = f"finishing what is in hand, for at most {seconds:g} s"
        log.info("%s: %s", signal.Signals(number).name, "ending at once" if again else bound)


def _required(broker: Any) -> Broker:
    """Return *broker* if it is one."""
    if not all(hasattr(broker, name) for name in ("name", "caps", "source", "sink")):
        raise ConfigurationError(
            f"Consumer({broker!r}): give it a broker's URL, e.g. 'kafka://host:9092', or what "
            "connect(url) returns"
        )
    found: Broker = broker
    return found


class _LateTopicHome:
    """A topic as the home of dead letters, its sink opened when the first one comes."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._home: DeadLetterTopic | None = None

    def put(self, letter: DeadLetter, connection: Any = None) -> None:
        """Return once *letter* is durable."""
        if self._home is None:
            self._home = DeadLetterTopic.on(self._broker)
        self._home.put(letter, connection)


def end_if_it_lingers(poller: Poller, ended: threading.Event, *, drain_seconds: float) -> None:
    """End this process unless *ended* is set soon after the drain, or after a second signal.

    The thread that polls cannot be woken inside a client that spins or hangs. What it had in
    hand is not acknowledged, so it comes again.
    """
    thread = threading.main_thread()

    def watch() -> None:
        poller.hurry.wait(drain_seconds + _GRACE_SECONDS)
        if ended.wait(_HURRIED_SECONDS):
            return
        frame = sys._current_frames().get(thread.ident or 0)
        where = "".join(traceback.format_stack(frame, limit=12)) if frame else "unknown\n"
        log.error("ending without what is still in hand; nothing is lost, it comes again. The "
                  "poll thread was here:\n%s", where)  # fmt: skip
        logging.shutdown()
        os._exit(_EXIT_UNFINISHED)

    threading.Thread(target=watch, name="holdfast-end", daemon=True).start()
