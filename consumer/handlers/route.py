"""A registered handler: its topic, its compiled plan, and what its plan depends on.

A handler compiled for batches: what is done once for a batch, and what for each message.
"""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.call import Stage
from holdfast.circuit import Breaker, Circuit, Closed
from holdfast.codec import payload_annotation
from holdfast.consumer.attempt.outage import OutageDetector, OutageGuard, OutageWitness
from holdfast.consumer.attempt.transaction import (
    AsyncTransaction,
    HandlerSession,
    Transaction,
    for_handlers,
    outage_of,
)
from holdfast.consumer.dead_letters import DeadLetterRouting, place
from holdfast.consumer.handlers.arguments import Arguments, Payload, wanted_by, wants_async_session
from holdfast.consumer.handlers.checks import ReturnedValue, check_memory, handler_of
from holdfast.consumer.store import scope_of
from holdfast.dlq import DeadLetters
from holdfast.errors import ConfigurationError
from holdfast.extras import driver
from holdfast.idempotency import BatchRunner
from holdfast.idempotency.former import FormerScopes
from holdfast.idempotency.idempotent import Idempotent
from holdfast.idempotency.leased import Leased
from holdfast.ids import former_names, name_of
from holdfast.outbox import Outbox
from holdfast.pipeline import Pipeline
from holdfast.retry import Budget, Retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from holdfast.clock import Clock
    from holdfast.consumer.settings import Batches, Settings
    from holdfast.dlq import CaptureSettings
    from holdfast.layer import Layer


_ONCE = frozenset(
    {
        Stage.SETTLE,
        Stage.DURABLE_RETRY,
        Stage.DECODE,
        Stage.BUDGET,
        Stage.RETRY,
        Stage.TRANSACTION,
        Stage.DEDUP,
    }
)
"""What the batch does itself, or leaves to the run of a message by its own plan."""


class BatchPlan:
    """What the runtime knows about a handler whose messages share transactions."""

    def __init__(self, batches: Batches, plan: Pipeline, payload: Payload, engine: Engine) -> None:
        self.batches = batches
        self.payload = payload
        self.dedup = _dedup(plan)
        apart = [layer.inside() for layer in plan.layers if layer.stage in _ONCE]
        self.inner = Pipeline(
            [
                *(layer for layer in plan.layers if layer.stage not in _ONCE),
                *(layer for layer in apart if layer is not None),
            ],
            plan.function,
            clock=plan.clock,
        )
        """The layers that each call in the shared transaction runs through."""
        self.budgets = _budgets(plan)
        self.runner = BatchRunner(
            for_handlers(engine), inbox=self.dedup.inbox, session=_session,
            hasten=HandlerSession.collect_inserts, clock=plan.clock,
        )  # fmt: skip
        """What runs the batches; it learns from each whether duplicates are about."""


def _budgets(plan: Pipeline) -> list[Budget]:
    retries = (layer for layer in plan.layers if isinstance(layer, Retry))
    return [layer.budget for layer in retries if layer.budget is not None]


def check_batched(batches: Batches, plan: Pipeline, engine: Engine | None) -> None:
    """Refuse a handler that cannot run in batches, and say what to change."""
    if engine is None:
        raise ConfigurationError(
            f"{plan.name}() is to run in batches, which share a transaction: give the consumer a "
            "database, Consumer(…, database=…)"
        )
    if _dedup(plan).keeps_result:
        raise ConfigurationError(
            f"{plan.name}() keeps results, which batches do not: leave out keep_result=True, or "
            "batch="
        )
    if wants_async_session(plan.function):
        raise ConfigurationError(
            f"{plan.name}() asks for an AsyncSession, which batches do not have: annotate it as "
            "Session"
        )
    if batches.whole:
        alone = {"message", "attempt"} & set(wanted_by(plan.function).values())
        if alone:
            raise ConfigurationError(
                f"{plan.name}() takes a list of payloads and asks for {' and '.join(sorted(alone))}"
                ", which belongs to one message: leave it out, or use Batches(whole=False)"
            )
        element_annotation(plan.function)


def element_annotation(function: Callable[..., Any]) -> Any:
    """Return what the list that *function* takes is made of, None if it does not say."""
    annotation = payload_annotation(function)
    if annotation is None or annotation is list:
        return None
    if typing.get_origin(annotation) is not list:
        raise ConfigurationError(
            f"{getattr(function, '__qualname__', function)}() takes whole batches: annotate its "
            f"first parameter as a list, e.g. list[Order], not {annotation!r}"
        )
    return typing.get_args(annotation)[0]


def one_of_many(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function*, which takes a list, as one that takes a single payload."""
    if Pipeline((), function).is_async:

        @functools.wraps(function)
        async def single(payload: Any, **wanted: Any) -> Any:
            return await function([payload], **wanted)
    else:

        @functools.wraps(function)
        def single(payload: Any, **wanted: Any) -> Any:
            return function([payload], **wanted)

    return single


def _dedup(plan: Pipeline) -> Idempotent:
    found: list[Layer] = [layer for layer in plan.layers if layer.stage is Stage.DEDUP]
    if not found or not isinstance(found[0], Idempotent):
        raise ConfigurationError(
            f"{plan.name}() is to run in batches, which need the dedup row of each message: "
            "decorate it with @idempotent, without a lease"
        )
    return found[0]


def _session(engine: Engine) -> HandlerSession:
    """Begin a transaction, so that a database that is down shows before any work is done."""
    session = HandlerSession(engine)
    try:
        session.begin_guarded()
    except BaseException as error:
        session.end(commit=False)
        raise outage_of(error, connecting=True) from error
    return session


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """What the runtime knows about one handler."""

    topic: str
    consumer: str
    """Its identity: the group and its name; the scope of its dedup memory and its attempts."""
    group: str
    name: str
    """Its name in the group: the topic, unless the user gave one. No name of Python's: those
    change with how the program is started, and with every renaming."""
    function: str
    """What people find it by in the code."""
    formerly: FormerScopes
    """Under what earlier versions remembered it: by its name in the code."""
    plan: Pipeline
    letters: DeadLetters
    """How its messages are put aside; without `@dead_letter`, only those that end the process."""
    outage: OutageGuard
    breakers: tuple[Breaker, ...] = ()
    """The circuits that gate it, its outage detector and its dead-letter limit included."""
    limit: Breaker | None = field(default=None)
    ordered: bool = True
    """Whether the messages of a key must be handled in order."""
    batch: BatchPlan | None = None
    """How its messages share transactions; None: each has its own."""

    def explain(self) -> str:
        """Return the plan as text."""
        shared = "" if self.batch is None else f"\n  batches: {self.batch.batches.describe()}"
        return self.plan.explain() + shared

    @property
    def is_gated(self) -> bool:
        """Whether one of its circuits keeps messages from being tried now."""
        return any(not isinstance(breaker.state, Closed) for breaker in self.breakers)

    @property
    def budgets(self) -> list[Budget]:
        """The retry budgets that it draws on."""
        return _budgets(self.plan)

    @property
    def settles(self) -> bool:
        """Whether the plan dead-letters by itself."""
        return any(layer.stage is Stage.SETTLE for layer in self.plan.layers)


class Routing:
    """Compiles handlers into routes."""

    def __init__(
        self,
        group: str,
        settings: Settings,
        engine: Engine | None,
        clock: Clock,
        homes: DeadLetterRouting,
        origin: CaptureSettings,
    ) -> None:
        self._group = group
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._homes = homes
        self.origin = origin
        """What letters say unless their handler says otherwise."""
        self._outbox = Outbox(source=group)
        self._async_engine: Any = None
        self._witness = OutageWitness(clock)

    def route(
        self,
        topic: str,
        function: Callable[..., Any],
        batches: Batches | None = None,
        *,
        ordered: bool = True,
        name: str | None = None,
    ) -> Route:
        """Return the route of *topic* to *function*; its order is checked here."""
        handler = handler_of(function)
        bare = handler.plan.function
        name = topic if name is None else name
        formerly = FormerScopes(self._group, former_names(bare))
        whole = batches is not None and batches.whole
        if batches is not None:
            check_batched(batches, handler.plan, self._engine)
        letters = self._letters(handler.plan, name, bare, ordered=ordered)
        circuits = [layer for layer in handler.plan.layers if isinstance(layer, Circuit)]
        named = [circuit.dependency for circuit in circuits]
        detector = OutageDetector(topic, self._settings, self._witness, self._clock, named=named)
        outage = OutageGuard(circuits, detector, self._witness)
        around = self._layers(handler.plan, outage, letters)
        annotation = element_annotation(bare) if whole else payload_annotation(bare)
        payload = Payload(annotation, strict=self._settings.strict)
        layers = sorted([*around, payload], key=lambda layer: layer.stage)
        plan = Pipeline(layers, one_of_many(bare) if whole else bare, clock=self._clock)
        batch = None
        if batches is not None and self._engine is not None:
            of_many = Pipeline(layers, bare, clock=self._clock)
            batch = BatchPlan(batches, of_many, payload, self._engine)
        limit = self._limit(topic)
        consumer = f"{self._group}/{name}"
        for layer in plan.layers:
            if isinstance(layer, Idempotent | Leased):
                layer.succeed(scope_of(layer, consumer), formerly)
        breakers = (*(circuit.breaker for circuit in circuits), detector.breaker)
        return Route(
            topic=topic,
            consumer=consumer,
            group=self._group,
            name=name,
            function=name_of(bare),
            formerly=formerly,
            plan=plan,
            letters=letters,
            outage=outage,
            breakers=breakers if limit is None else (*breakers, limit),
            limit=limit,
            batch=batch,
            ordered=ordered,
        )

    def _letters(
        self, plan: Pipeline, name: str, function: Callable[..., Any], *, ordered: bool
    ) -> DeadLetters:
        """Return the handler's dead-letter layer, with a home and an origin of the consumer's."""
        own = next((one for one in plan.layers if isinstance(one, DeadLetters)), DeadLetters())
        home = self._homes.of(own.home, name_of(function), ordered=ordered)
        named = own.using(home, own.origin.over(self.origin))
        return named.named(self._group, name, function)

    def _layers(self, plan: Pipeline, outage: OutageGuard, letters: DeadLetters) -> list[Layer]:
        bare = plan.function
        layers: list[Layer] = [
            letters if isinstance(layer, DeadLetters) else self._bound(layer)
            for layer in plan.layers
        ]
        layers[:0] = [outage.detector]  # outside the handler's own circuits
        layers.append(outage)
        wanted = wanted_by(bare)
        if self._engine is not None:
            layers.append(self._transaction(plan, self._engine))
        elif "session" in wanted.values():
            raise ConfigurationError(
                f"{plan.name}() asks for a session: give the consumer a database, "
                "Consumer(…, database=…)"
            )
        else:
            check_memory(plan)
        if wanted:
            layers.append(Arguments(wanted, outbox=self._outbox))
        layers.append(ReturnedValue(plan.name))
        return layers

    def _bound(self, layer: Layer) -> Layer:
        """Give a layer that needs one the consumer's database."""
        return layer if self._engine is None else layer.bind_database(self._engine)

    def _transaction(self, plan: Pipeline, engine: Engine) -> Layer:
        if not wants_async_session(plan.function):
            return Transaction(engine)
        if not plan.is_async:
            raise ConfigurationError(
                f"{plan.name}() is a def and asks for an AsyncSession: make it async def, or "
                "annotate Session"
            )
        driver("greenlet", extra="asyncio")  # SQLAlchemy would miss it at the first message
        return AsyncTransaction(self._asynchronous(engine))

    def use(self, engine: AsyncEngine) -> None:
        """Give handlers that ask for an `AsyncSession` this *engine*, of the same database."""
        if not hasattr(engine, "sync_engine"):
            raise ConfigurationError(
                f"async_database={engine!r}: pass what create_async_engine(url) returns"
            )
        mine = None if self._engine is None else self._engine.url
        if mine is None or place(engine.url) != place(mine):
            raise ConfigurationError(
                f"async_database is {engine.url!r}, database is {mine!r}: name the same database "
                "twice, or dedup and effects would not commit together"
            )
        self._async_engine = engine

    def _asynchronous(self, engine: Engine) -> Any:
        if self._async_engine is None:
            from sqlalchemy.exc import InvalidRequestError
            from sqlalchemy.ext.asyncio import create_async_engine

            try:
                self._async_engine = create_async_engine(engine.url)
            except InvalidRequestError as error:
                raise ConfigurationError(
                    f"the driver {engine.driver!r} has no AsyncSession: use "
                    "postgresql+psycopg, or annotate the handler's session as Session"
                ) from error
        return self._async_engine

    def _limit(self, topic: str) -> Breaker | None:
        policy = self._settings.dead_letter_limit
        if policy is None:
            return None
        return Breaker(f"dead letters of {topic}", policy, clock=self._clock)
