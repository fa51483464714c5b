"""One transaction per transition: what happened, what became of the saga, and what it causes.

The saga row is written over the revision that was read, beside the attempts, timers, history and
the commands in the outbox. All of it commits with the inbox row of the reply, or none of it.
Transitions of many sagas may share a transaction; then their rows are written together.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy.exc import IntegrityError

from holdfast.clock import SYSTEM_CLOCK
from holdfast.codec import JsonCodec
from holdfast.durations import in_seconds
from holdfast.errors import ConfigurationError, InvalidMessage, NotFound, PoisonMessage
from holdfast.ids import new_id
from holdfast.message import Message, current_message, handling
from holdfast.outbox import Event, Outbox
from holdfast.sagas import store, writes
from holdfast.sagas.coroutines import completed
from holdfast.sagas.counters import LATE_REPLIES
from holdfast.sagas.graph import NodeKind
from holdfast.sagas.participant import StepFailed
from holdfast.sagas.states import (
    Accept,
    Answer,
    Answered,
    ClearTimers,
    Decide,
    Decided,
    Direction,
    FinishSaga,
    Ignore,
    ParkStep,
    RunStep,
    SagaEffect,
    SagaEvent,
    SagaProgress,
    SendCommand,
    SetTimer,
    Signalled,
    Started,
    TimerKind,
)
from holdfast.sagas.store import Changes, StepRow, StoredSaga, TimerRow
from holdfast.sagas.transitions import begin, transition
from holdfast.sagas.wire import CommandHeaders
from holdfast.scrubbing import told
from holdfast.tracing import switch

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from holdfast.backoff import Backoff
    from holdfast.sagas.definition import Saga
    from holdfast.sagas.graph import Node

log = logging.getLogger("holdfast.sagas")

_MOST_ERROR = 500
_codec = JsonCodec()


class DuplicateSaga(ConfigurationError):
    """A saga with this key is running already, and was started with another state."""

    def __init__(self, saga: str, key: str) -> None:
        super().__init__(
            f"saga {saga!r} with key {key!r} is running already and was started with another "
            "state: use another key, or wait until it has ended"
        )
        self.saga = saga
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedSaga:
    """What a start gives back: the saga that runs under the key now."""

    id: str
    key: str
    is_new: bool


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """What came with an event: the payload of a reply or signal, or a local step's new state."""

    payload: bytes | None = None
    state: Any = None
    is_local: bool = False


_NOTHING = Came()


def start(db: Connection, saga: Saga[Any], state: Any, key: str, outbox: Outbox) -> StartedSaga:
    """Start *saga* in the caller's transaction, or return the one that runs under *key*."""
    data = encoded(saga, state)
    digest = hashlib.sha256(data).hexdigest()[:16]
    known = store.active(db, saga.name, key)
    if known is None:
        work = _Work(saga, _new(saga, key, data, digest), outbox)
        work.follow(Started(), _NOTHING)
        try:
            with db.begin_nested():
                writes.add(db, work.changes)
        except IntegrityError:  # a rival has just started it
            known = store.active(db, saga.name, key)
            if known is None:
                raise
        else:
            outbox.stage(db, work.changes.commands)
            writes.write_followers(db, work.changes)
            return StartedSaga(id=work.changes.row.id, key=key, is_new=True)
    if known.start_digest != digest:
        raise DuplicateSaga(saga.name, key)
    return StartedSaga(id=known.id, key=key, is_new=False)


def _new(saga: Saga[Any], key: str, data: bytes, digest: str) -> StoredSaga:
    cause = current_message()
    own = new_id()
    return StoredSaga(
        id=own,
        type=saga.name,
        version=saga.version,
        hash=saga.graph.hash,
        key=key,
        status="running",
        progress=begin(saga.graph),
        data=data,
        start_digest=digest,
        revision=0,
        correlation_id=own if cause is None else cause.correlation_id or cause.id,
        traceparent=None if cause is None else cause.traceparent,
    )


class Transitions:
    """Transitions of any number of sagas that are written together, in the caller's transaction.

    Those of one saga follow one another in the order in which they are added.
    """

    def __init__(self, db: Connection, outbox: Outbox) -> None:
        self._db = db
        self._outbox = outbox
        self._works: dict[str, _Work] = {}
        self._ended: dict[str, Changes] = {}

    def current(self, row: StoredSaga) -> StoredSaga:
        """Return *row* as it is after what was added for its saga."""
        work = self._works.get(row.id)
        return row if work is None else work.changes.after

    def tell(self, row: StoredSaga, event: SagaEvent, reason: str) -> None:
        """Tell *event* in the history of *row*, which it does not change."""
        _tell(self._ended.setdefault(row.id, Changes(row, row)), event, reason)

    def add(self, saga: Saga[Any], row: StoredSaga, event: SagaEvent, came: Came) -> SagaProgress:
        """Follow *event*; *row* counts only for the first of its saga. Return how far it was.

        The functions of the saga run here. One that raises where a command is built, a choice is
        made or a wait is told fails its own step, as a participant's failure would.
        """
        if (known := getattr(event, "step", None)) and known not in saga.graph.nodes:
            raise PoisonMessage(f"saga {row.type!r} has no step {known!r}")
        work = self._works.get(row.id)
        if work is None:
            work = self._works[row.id] = _Work(saga, row, self._outbox, self._db)
        before = work.changes.after.progress
        work.follow(event, came)
        return before

    def write(self) -> None:
        """Write everything; `SagaConflict` if one of the sagas was overtaken."""
        changes = [*(work.changes for work in self._works.values()), *self._ended.values()]
        if changes:
            writes.write(self._db, changes)
            self._outbox.stage(self._db, [sent for one in changes for sent in one.commands])


def advance(
    db: Connection,
    saga: Saga[Any],
    row: StoredSaga,
    event: SagaEvent,
    *,
    outbox: Outbox,
    came: Came = _NOTHING,
) -> None:
    """Write what *event* makes of *row* in the caller's transaction, or raise `SagaConflict`."""
    transitions = Transitions(db, outbox)
    transitions.add(saga, row, event, came)
    transitions.write()


def write_down(db: Connection, row: StoredSaga, event: SagaEvent, reason: str) -> None:
    """Tell *event* in the history of *row*, which it does not change."""
    changes = Changes(row, row)
    _tell(changes, event, reason)
    writes.write(db, [changes])


def _tell(changes: Changes, event: SagaEvent, reason: str) -> None:
    row, cause = changes.after, current_message()
    if isinstance(event, Answered):
        LATE_REPLIES.labels(row.type).inc()
    log.info("saga %s %s: %s", row.type, row.key, reason)
    causation_id = None if cause is None else cause.id
    changes.follow(row.progress, row.data, [(event, (Ignore(reason),))], causation_id)


def locked(db: Connection, saga_id: str) -> StoredSaga:
    """Return the saga, which nobody else changes until the caller commits."""
    row = store.read(db, saga_id, lock=True)
    if row is None:
        raise NotFound(f"there is no saga {saga_id!r}")
    return row


class _Work:
    """The transitions of one saga, and their effects on the way to the tables."""

    def __init__(
        self, saga: Saga[Any], row: StoredSaga, outbox: Outbox, db: Connection | None = None
    ) -> None:
        self.saga = saga
        self.row = row
        self.outbox = outbox
        self.db = db
        self.changes = Changes(row, row)
        self.state = saga.decode(row.data)
        self.came = _NOTHING
        self.events: deque[SagaEvent] = deque()
        self.told: list[tuple[SagaEvent, tuple[SagaEffect, ...]]] = []

    def follow(self, event: SagaEvent, came: Came) -> None:
        """Follow *event*, and what its effects tell, until nothing more follows."""
        self.came, self.told = came, []
        cause = current_message()
        if cause is not None:
            progress = self._traced(event, cause)
        else:
            with handling(_own(self.row)) as cause:
                progress = self._traced(event, cause)
        data = encoded(self.saga, self.state)
        self.changes.follow(progress, data, self.told, cause.causation_id)

    def _traced(self, event: SagaEvent, cause: Message) -> SagaProgress:
        if switch.spans is None:
            return self._followed(event)
        with switch.spans.step(f"saga {self.row.type}", cause, self._told_by_span(event)):
            return self._followed(event)

    def _told_by_span(self, event: SagaEvent) -> dict[str, str | int]:
        return {
            "saga.id": self.row.id, "saga.type": self.row.type, "saga.key": self.row.key,
            "saga.version": self.row.version, "saga.event": type(event).__name__,
            "saga.step": str(getattr(event, "step", "")),
        }  # fmt: skip

    def _followed(self, event: SagaEvent) -> SagaProgress:
        progress = self.changes.after.progress
        self.events.append(event)
        while self.events:
            event = self.events.popleft()
            before = progress
            progress, effects = transition(self.saga.graph, progress, event)
            self.told.append((event, effects))
            self._note(event)
            if isinstance(event, Signalled) and event.name not in before.signals:
                self._keep(event.name, progress.signals)
            for effect in effects:
                self._carry_out(effect)
        return progress

    def _keep(self, name: str, kept: tuple[str, ...]) -> None:
        if name in kept and self.db is not None:
            store.keep_signal(self.db, self.row.id, name, self.came.payload)

    def _note(self, event: SagaEvent) -> None:
        if isinstance(event, Answered):
            self.changes.ended.append(
                StepRow(
                    step=event.step, direction=event.direction.value, attempt=event.attempt,
                    status=event.answer.value, error=event.error or None,
                )
            )  # fmt: skip

    def _carry_out(self, effect: SagaEffect) -> None:
        match effect:
            case Accept(step=name, direction=direction):
                self._accept(self.saga.graph[name], direction)
            case SendCommand():
                self._send(effect)
            case RunStep():
                self._begun(effect.step, effect.direction, effect.attempt, None)
                self._set(effect.step, effect.direction, effect.attempt, store.RUN, 0.0)
            case Decide():
                self._decide(effect)
            case SetTimer():
                self._set_timer(effect)
            case ClearTimers(step=name, keep_deadline=keep):
                self.changes.clear_timers(name, keep_deadline=keep)
            case ParkStep():
                log.error(
                    "saga %s %s (%s) is parked at step %s: %s",
                    self.row.type, self.row.key, self.row.id, effect.step, effect.reason,
                )  # fmt: skip
            case Ignore(reason=reason):
                if isinstance(self.told[-1][0], Answered):
                    LATE_REPLIES.labels(self.row.type).inc()
                log.info("saga %s %s: %s", self.row.type, self.row.key, reason)
            case FinishSaga(phase=phase):
                log.info("saga %s %s is %s", self.row.type, self.row.key, phase.value)

    def _accept(self, node: Node, direction: Direction) -> None:
        functions = self.saga.steps[node.name]
        if direction is Direction.UNDO or node.kind is NodeKind.LOCAL:
            if self.came.is_local:
                self.state = self.came.state
            return
        payload = self.came.payload
        if node.kind is NodeKind.SIGNAL and self.told[-1][0] != Signalled(node.name):
            assert self.db is not None  # noqa: S101 - nothing came before the start
            payload = store.take_signal(self.db, self.row.id, node.name)  # it came early
        if functions.fold is None or functions.decode is None:
            return
        state = completed(functions.fold(self.state, functions.decode(payload)))
        self.state = checked(self.saga, node.name, state)

    def _send(self, effect: SendCommand) -> None:
        node = self.saga.graph[effect.step]
        is_do = effect.direction is Direction.DO
        name, topic = (
            (node.name, node.topic)
            if is_do or node.undo is None
            else (node.undo.name, node.undo.topic)
        )
        headers = CommandHeaders(
            saga_id=self.row.id,
            saga_type=self.row.type,
            step=effect.step,
            direction=effect.direction,
            attempt=effect.attempt,
            reply_to=self.saga.replies,
        ).headers()
        try:
            body = self.saga.steps[name].run(self.state)
            event = Event(body=body, topic=topic or "", key=self.row.id, headers=headers)
            command = self.outbox.message(event)  # what cannot be sent fails here, and alone
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises
            self._failed(effect, error)
            return
        self.changes.commands.append(command)
        self._begun(effect.step, effect.direction, effect.attempt, command.id)

    def _failed(self, effect: SendCommand, error: Exception) -> None:
        log.exception("saga %s %s: %s", self.row.type, self.row.key, effect.step)
        self._begun(effect.step, effect.direction, effect.attempt, None, error=described(error))
        self.events.append(
            Answered(
                effect.step, effect.direction, effect.attempt, _answer(error), described(error)
            )
        )

    def _decide(self, effect: Decide) -> None:
        try:
            case = self.saga.steps[effect.step].run(self.state)
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises
            why = described(error)
        else:
            if case in self.saga.graph[effect.step].cases:
                self.events.append(Decided(effect.step, case))
                return
            why = f"it has chosen {case!r}, which is no case of it"
        self.events.append(Answered(effect.step, Direction.DO, effect.attempt, Answer.FAILED, why))

    def _set_timer(self, effect: SetTimer) -> None:
        try:
            delay = self._delay(effect)
        except Exception as error:  # noqa: BLE001 - of the function that says how long to wait
            self.events.append(
                Answered(
                    effect.step, effect.direction, effect.attempt, Answer.FAILED, described(error)
                )
            )
        else:
            self._set(effect.step, effect.direction, effect.attempt, effect.kind.value, delay)

    def _delay(self, effect: SetTimer) -> float:
        graph = self.saga.graph
        if not effect.step:
            return graph.deadline or 0.0
        node = graph[effect.step]
        undo = node.undo if effect.direction is Direction.UNDO else None
        match effect.kind:
            case TimerKind.TIMEOUT:
                return (node.timeout if undo is None else undo.timeout) or 0.0
            case TimerKind.DEADLINE:
                return node.deadline or 0.0
            case TimerKind.RETRY:
                return _waits(node.retry if undo is None else undo.retry, effect.attempt)
            case TimerKind.SLEEP:
                return in_seconds(self.saga.steps[node.name].run(self.state), of=node.name)

    def _set(self, name: str, direction: Direction, attempt: int, kind: str, delay: float) -> None:
        self.changes.timers.append(
            TimerRow(step=name, direction=direction.value, attempt=attempt, kind=kind, delay=delay)
        )

    def _begun(
        self,
        name: str,
        direction: Direction,
        attempt: int,
        message_id: str | None,
        *,
        error: str | None = None,
    ) -> None:
        self.changes.begun.append(
            StepRow(
                step=name, direction=direction.value, attempt=attempt,
                status="running" if error is None else Answer.FAILED_FOR_NOW.value,
                message_id=message_id, error=error,
            )
        )  # fmt: skip


def encoded(saga: Saga[Any], state: Any) -> bytes:
    """Return *state* as it is stored; what cannot be stored or has another type is refused."""
    payload, _ = _codec.encode(checked(saga, "state", state))
    if payload is None:
        raise InvalidMessage(f"saga {saga.name!r}: the state is None")
    return payload


def checked(saga: Saga[Any], where: str, state: Any) -> Any:
    """Return *state* if it is what the saga says that it is."""
    if not isinstance(state, saga.state):
        raise PoisonMessage(
            f"saga {saga.name!r}: {where} gave a {type(state).__name__}: return the state, a "
            f"{saga.state.__name__}"
        )
    return state


def described(error: BaseException) -> str:
    """Return what people read of *error*, without secrets."""
    return told(error)[:_MOST_ERROR]


def _answer(error: Exception) -> Answer:
    return error.answer if isinstance(error, StepFailed) else Answer.FAILED_FOR_NOW


def _waits(policy: Backoff, attempt: int) -> float:
    delay = policy.delay(attempt)
    return policy.longest(attempt) if delay is None else delay  # an operator asked for one more


def _own(row: StoredSaga) -> Message:
    """Return what the commands are caused by where no message is at hand: the saga itself."""
    return Message(
        id=row.id, topic=row.type, payload=None, time=SYSTEM_CLOCK.now(),
        correlation_id=row.correlation_id, traceparent=row.traceparent,
    )  # fmt: skip
