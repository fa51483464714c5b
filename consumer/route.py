"""A registered handler: its topic, its compiled plan, and what its plan depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.circuit import Breaker, Circuit, Closed
from holdfast.codec import payload_annotation
from holdfast.consumer.batch_plan import BatchPlan, check_batched, element_annotation, one_of_many
from holdfast.consumer.detector import OutageDetector
from holdfast.consumer.fitness import Returned, check_memory, handler_of
from holdfast.consumer.homes import Homes, place
from holdfast.consumer.injection import Injection, wanted_by, wants_async_session
from holdfast.consumer.outage import Outage
from holdfast.consumer.payload import Payload
from holdfast.consumer.scopes import scope_of
from holdfast.consumer.transaction import AsyncTransaction, Transaction
from holdfast.consumer.witness import Witness
from holdfast.dlq import DeadLetters
from holdfast.errors import ConfigurationError
from holdfast.idempotency.former import Formerly
from holdfast.idempotency.layer import Idempotent
from holdfast.idempotency.leased import Leased
from holdfast.layer import Layer, Stage
from holdfast.names import former_names, name_of
from holdfast.outbox import Outbox
from holdfast.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from holdfast.clock import Clock
    from holdfast.consumer.batches import Batches
    from holdfast.consumer.settings import Settings
    from holdfast.dlq import Origin


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
    formerly: Formerly
    """Under what earlier versions remembered it: by its name in the code."""
    plan: Plan
    letters: DeadLetters
    """How its messages are put aside; without `@dead_letter`, only those that end the process."""
    outage: Outage
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
        homes: Homes,
        origin: Origin,
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
        self._witness = Witness(clock)

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
        formerly = Formerly(self._group, former_names(bare))
        whole = batches is not None and batches.whole
        if batches is not None:
            check_batched(batches, handler.plan, self._engine)
        letters = self._letters(handler.plan, name, bare, ordered=ordered)
        circuits = [layer for layer in handler.plan.layers if isinstance(layer, Circuit)]
        named = [circuit.dependency for circuit in circuits]
        detector = OutageDetector(topic, self._settings, self._witness, self._clock, named=named)
        outage = Outage(circuits, detector, self._witness)
        around = self._layers(handler.plan, outage, letters)
        annotation = element_annotation(bare) if whole else payload_annotation(bare)
        payload = Payload(annotation, strict=self._settings.strict)
        layers = sorted([*around, payload], key=lambda layer: layer.stage)
        plan = Plan(layers, one_of_many(bare) if whole else bare, clock=self._clock)
        batch = None
        if batches is not None and self._engine is not None:
            of_many = Plan(layers, bare, clock=self._clock)
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
        self, plan: Plan, name: str, function: Callable[..., Any], *, ordered: bool
    ) -> DeadLetters:
        """Return the handler's dead-letter layer, with a home and an origin of the consumer's."""
        own = next((one for one in plan.layers if isinstance(one, DeadLetters)), DeadLetters())
        home = self._homes.of(own.home, name_of(function), ordered=ordered)
        named = own.using(home, own.origin.over(self.origin))
        return named.named(self._group, name, function)

    def _layers(self, plan: Plan, outage: Outage, letters: DeadLetters) -> list[Layer]:
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
            layers.append(Injection(wanted, outbox=self._outbox))
        layers.append(Returned(plan.name))
        return layers

    def _bound(self, layer: Layer) -> Layer:
        """Give a layer that needs one the consumer's database."""
        if self._engine is not None and hasattr(layer, "bind_database"):
            return layer.bind_database(self._engine)  # type: ignore[no-any-return]
        return layer

    def _transaction(self, plan: Plan, engine: Engine) -> Layer:
        if not wants_async_session(plan.function):
            return Transaction(engine)
        if not plan.is_async:
            raise ConfigurationError(
                f"{plan.name}() is a def and asks for an AsyncSession: make it async def, or "
                "annotate Session"
            )
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
