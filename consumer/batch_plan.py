"""A handler compiled for batches: what is done once for a batch, and what for each message."""

from __future__ import annotations

import functools
import typing
from typing import TYPE_CHECKING, Any

from holdfast.codec import payload_annotation
from holdfast.consumer.injection import wanted_by, wants_async_session
from holdfast.consumer.session import HandlerSession
from holdfast.consumer.transaction import for_handlers, outage_of
from holdfast.errors import ConfigurationError
from holdfast.idempotency import BatchRunner
from holdfast.idempotency.layer import Idempotent
from holdfast.layer import Layer, Stage
from holdfast.plan import Plan
from holdfast.retry import Budget, Retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine

    from holdfast.consumer.batches import Batches
    from holdfast.consumer.payload import Payload

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

    def __init__(self, batches: Batches, plan: Plan, payload: Payload, engine: Engine) -> None:
        self.batches = batches
        self.payload = payload
        self.dedup = _dedup(plan)
        apart = [layer.inside() for layer in plan.layers if layer.stage in _ONCE]
        self.inner = Plan(
            [
                *(layer for layer in plan.layers if layer.stage not in _ONCE),
                *(layer for layer in apart if layer is not None),
            ],
            plan.function,
            clock=plan.clock,
        )
        """The layers that each call in the shared transaction runs through."""
        self.budgets: list[Budget] = [
            layer.budget
            for layer in plan.layers
            if isinstance(layer, Retry) and layer.budget is not None
        ]
        self.runner = BatchRunner(
            for_handlers(engine), inbox=self.dedup.inbox, session=_session, clock=plan.clock
        )
        """What runs the batches; it learns from each whether duplicates are about."""


def check_batched(batches: Batches, plan: Plan, engine: Engine | None) -> None:
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
    if Plan((), function).is_async:

        @functools.wraps(function)
        async def single(payload: Any, **wanted: Any) -> Any:
            return await function([payload], **wanted)
    else:

        @functools.wraps(function)
        def single(payload: Any, **wanted: Any) -> Any:
            return function([payload], **wanted)

    return single


def _dedup(plan: Plan) -> Idempotent:
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
