"""The consumer: handlers by topic, and the runtime that feeds them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.brokers import connect
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.consumer.assembly import Assembly
from holdfast.consumer.batches import Batches
from holdfast.consumer.books import Books
from holdfast.consumer.fitness import check_apart, registered
from holdfast.consumer.homes import Homes
from holdfast.consumer.lingering import end_if_it_lingers
from holdfast.consumer.metrics import ConsumerMetrics
from holdfast.consumer.reporter import Reporter
from holdfast.consumer.route import Route, Routing
from holdfast.consumer.settings import Settings
from holdfast.consumer.single import Single
from holdfast.consumer.tally import Tally
from holdfast.consumer.vigil import Vigil
from holdfast.database import open_database
from holdfast.dlq import Origin, StoreHome, TopicHome
from holdfast.dlq.origin import NOWHERE
from holdfast.dlq.triage import BUILT_IN, Triage
from holdfast.errors import ConfigurationError
from holdfast.ids import new_id
from holdfast.names import require_name
from holdfast.signals import signals_heard

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from holdfast.dlq import DeadLetter
    from holdfast.ports import Broker

log = logging.getLogger("holdfast.consumer")


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
        origin: Origin = NOWHERE,
        triage: Triage | None = None,
        settings: Settings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        metrics: ConsumerMetrics | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(group, str) or not group:
            raise ConfigurationError(f"group={group!r}: name the consumer group, e.g. 'billing'")
        require_name(group, "group=…")
        if settings is not None and not isinstance(settings, Settings):
            raise ConfigurationError(f"settings={settings!r}: pass a holdfast.consumer.Settings")
        if not isinstance(version, str):
            raise ConfigurationError(f"version={version!r}: write it as a text, e.g. '1.4.2'")
        if not isinstance(origin, Origin):
            raise ConfigurationError(f"origin={origin!r}: pass a holdfast.dlq.Origin")
        if triage is not None and not isinstance(triage, Triage):
            raise ConfigurationError(f"triage={triage!r}: pass a holdfast.dlq.triage.Triage")
        if settings is not None and options:
            raise ConfigurationError(
                f"{', '.join(options)} beside settings=: put everything into the Settings"
            )
        self.broker = connect(broker) if isinstance(broker, str) else _required(broker)
        self.group = group
        self.tally = Tally()
        self.settings = Settings.read(options) if settings is None else settings
        self.metrics = ConsumerMetrics() if metrics is None else metrics
        self.owner = f"{socket.gethostname()[:16]}-{os.getpid()}-{new_id()[-12:]}"
        """The name of this process in the database."""
        self._clock = clock
        engine = None if database is None else open_database(database)
        self._books = None if engine is None else Books(engine, group, self.settings, clock)
        books = self._books
        self._vigil = None if books is None else Vigil(books.ledger, self.owner, clock)
        self._homes = Homes(self._own_home(triage), self._books, self.settings)
        said = Origin(service_version=version).over(origin).over(Origin(broker=self.broker.name))
        self._routing = Routing(group, self.settings, engine, clock, self._homes, said)
        if async_database is not None:
            self._routing.use(async_database)
        self._routes: dict[str, Route] = {}
        self._singles: dict[str, Single] = {}
        self._assembly: Assembly | None = None
        self._stopped = threading.Event()

    def on(
        self,
        topic: str,
        *,
        name: str | None = None,
        batch: Batches | int | None = None,
        ordered: bool = True,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            if topic in self._routes:
                raise ConfigurationError(f"topic {topic!r} has a handler already: keep one")
            route = self._routing.route(topic, function, batches, ordered=ordered, name=name)
            check_apart(route, self._routes.values())
            self._routes[topic] = route
            return registered(function, topic)

        return register

    def identify(self, version: str) -> None:
        """Say which version of your service this is, where the program itself does not."""
        known = Origin(service_version=version)
        self._routing.origin = self._routing.origin.over(known)
        for route in self._routes.values():
            route.letters.origin = route.letters.origin.over(known)

    def explain(self) -> str:
        """Return every handler's plan as text."""
        return "\n".join(f"{topic} → {route.explain()}" for topic, route in self._routes.items())

    def handler(self, topic: str) -> Single:
        """Return the handler of *topic* for a loop of your own: `handle(message) -> Outcome`."""
        if topic not in self._routes:
            there = ", ".join(sorted(self._routes)) or "none"
            raise ConfigurationError(f"topic {topic!r} has no handler; there are: {there}")
        known = self._singles.get(topic)
        if known is None:  # it remembers which replays have failed, so there is one
            known = self._singles[topic] = Single(
                self._routes[topic], self._books, Reporter(self.broker), self._vigil,
                owner=self.owner, settings=self.settings, tally=self.tally, metrics=self.metrics,
            )  # fmt: skip
        return known

    @property
    def engine(self) -> Engine | None:
        """The database, None for a consumer without one."""
        return None if self._books is None else self._books.engine

    @property
    def topics(self) -> list[str]:
        """The topics that have a handler."""
        return sorted(self._routes)

    @property
    def running(self) -> Assembly | None:
        """The parts of the run under way, for probes; None when there is none."""
        return self._assembly

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
            self._assembly = assembly = Assembly(
                self.broker,
                self.group,
                self._routes,
                self._books,
                self._homes,
                owner=self.owner,
                settings=self.settings,
                clock=self._clock,
                tally=self.tally,
                metrics=self.metrics,
            )
            closing.callback(setattr, self, "_assembly", None)
            if threading.current_thread() is threading.main_thread():
                ended = threading.Event()
                closing.callback(ended.set)
                closing.enter_context(signals_heard(partial(self._asked, assembly, ended)))
            if self._stopped.is_set():
                return
            assembly.run(until_idle=until_idle)

    def stop(self, *, at_once: bool = False) -> None:
        """End `run` after what is in hand, within `drain_seconds`. Any thread may call it.

        To call it again changes nothing. With *at_once* running handlers are not waited for:
        what they return counts for nothing, and their messages come again without blame.
        """
        self._stopped.set()
        assembly = self._assembly
        if assembly is not None:
            assembly.stop(at_once=at_once)

    def _own_home(self, triage: Triage | None) -> Any:
        if self._books is not None:
            rules = BUILT_IN if triage is None else triage
            return StoreHome(self._books.engine, clock=self._clock, triage=rules)
        if triage is not None:
            raise ConfigurationError(
                "triage is done where dead letters are stored: give the consumer a database, or "
                "give the rules to the collector,  holdfast dlq collect --triage module:name"
            )
        return _LateTopicHome(self.broker)

    def _asked(self, assembly: Assembly, ended: threading.Event, number: int) -> None:
        again = assembly.asked
        assembly.asked = True
        seconds = self.settings.drain_seconds
        end_if_it_lingers(assembly.runtime, ended, drain_seconds=seconds)
        assembly.stop(at_once=again)
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
        self._home: TopicHome | None = None

    def put(self, letter: DeadLetter, connection: Any = None) -> None:
        """Return once *letter* is durable."""
        if self._home is None:
            self._home = TopicHome.on(self._broker)
        self._home.put(letter, connection)
