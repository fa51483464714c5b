"""Which definition an instance goes on with, while several versions are deployed.

An instance pins the version and the shape that it was started with. A program works on the
versions that it has, and on those that one of its definitions has a migration from; everything
else is left to a program that knows it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from sqlalchemy import select, update

from holdfast.errors import ConfigurationError, Transient
from holdfast.sagas import store
from holdfast.sagas.graph import NodeKind
from holdfast.sagas.orchestrator import checked, encoded
from holdfast.sagas.schema import saga as saga_table
from holdfast.sagas.schema import timer
from holdfast.sagas.states import (
    ENDED,
    OWING,
    UNDOING,
    Direction,
    Migrated,
    SagaPhase,
    SagaProgress,
    StepState,
    StepStatus,
)
from holdfast.sagas.writes import write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy.engine import Connection

    from holdfast.codec import Decoder
    from holdfast.sagas.definition import Saga
    from holdfast.sagas.graph import Graph, Node
    from holdfast.sagas.store import StoredSaga

Local = frozenset[tuple[str, Direction]]
"""What runs in the engine's own transaction at the moment: steps and their directions."""

_NOTHING_STANDS = frozenset(
    {StepStatus.SKIPPED, StepStatus.CANCELLED, StepStatus.FAILED, StepStatus.UNDONE}
)
_ACTIVE = ("running", "compensating", "parked")
_AT_ONCE = 500
_MOST_KEYS = 100


class UnknownVersion(Transient):
    """A saga of a version that this program does not have; one that has it goes on with it."""

    def __init__(self, saga: str, version: int) -> None:
        super().__init__(
            f"saga {saga!r} version {version} is not known here: keep its definition until the "
            "last instance has ended, or write a migration"
        )
        self.saga = saga
        self.version = version


class CannotMigrate(Transient):
    """An instance is at a point from which the new version could not go on; it waits, unchanged."""

    def __init__(self, saga: str, version: int, why: str) -> None:
        super().__init__(
            f"an instance of saga {saga!r} version {version} cannot be moved: {why}; keep "
            f"version {version} until it has ended"
        )
        self.saga = saga
        self.version = version
        self.why = why


class DefinitionChanged(ConfigurationError):
    """A saga has another shape than when its instances were started, under the same version."""

    def __init__(self, saga: str, version: int) -> None:
        super().__init__(
            f"saga {saga!r} was changed, but is still version {version}: give the new shape the "
            "next version, and keep the old one until its last instance has ended"
        )
        self.saga = saga
        self.version = version


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """How instances of an older version become instances of the version that has this."""

    function: Callable[[Any], Any]
    decode: Decoder
    """Reads the state as the older version wrote it."""
    skip: frozenset[str] = frozenset()
    """New steps that an instance which is past them does not do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInstances:
    """What would become of running sagas of one version under the definitions at hand."""

    type: str
    version: int
    running: int
    is_fine: bool
    verdict: str
    keys: tuple[str, ...]
    """The business keys of these, as many as help."""


class Definitions:
    """The sagas that this program knows, by name and version."""

    def __init__(self, sagas: Sequence[Saga[Any]]) -> None:
        self.known: dict[tuple[str, int], Saga[Any]] = {}
        self._newer: dict[tuple[str, int], Saga[Any]] = {}
        for saga in sorted(sagas, key=lambda one: one.version):
            if (saga.name, saga.version) in self.known:
                raise ConfigurationError(f"{saga!r} is there twice: keep one")
            _ = saga.graph  # what is wrong with it is told now
            self.known[saga.name, saga.version] = saga
            self._newer |= {(saga.name, older): saga for older in saga.migrations}

    @property
    def workable(self) -> frozenset[tuple[str, int]]:
        """The names and versions of what can be worked on here."""
        return frozenset(self.known.keys() | self._newer.keys())

    def of(self, row: StoredSaga) -> Saga[Any]:
        """Return the definition that *row* was started with."""
        saga = self.known.get((row.type, row.version))
        if saga is None:
            raise UnknownVersion(row.type, row.version)
        if saga.graph.hash != row.hash:
            raise DefinitionChanged(row.type, row.version)
        return saga

    def current(self, db: Connection, row: StoredSaga) -> tuple[Saga[Any], StoredSaga]:
        """Return the definition to go on with, and *row*, which is moved to it if need be.

        The move commits with what the caller does next, over the revision that was read. It is
        made only where the older version itself is not known here.
        """
        newer = self._newer.get((row.type, row.version))
        if newer is None or (row.type, row.version) in self.known:
            return self.of(row), row
        return newer, migrate(db, newer, row)

    def require_unchanged(self, db: Connection) -> None:
        """Raise `DefinitionChanged` if running sagas have another shape under the same version."""
        columns = (saga_table.c.type, saga_table.c.version, saga_table.c.hash)
        running = select(*columns).where(saga_table.c.status.in_(_ACTIVE)).distinct()
        for kind, version, shape in db.execute(running):
            known = self.known.get((kind, version))
            if known is not None and known.graph.hash != shape:
                raise DefinitionChanged(kind, version)

    def check(self, db: Connection) -> list[CheckedInstances]:
        """Return what would become of each running saga; nothing is changed.

        Migrations are tried on the real states, so they must do nothing but compute.
        """
        found: dict[tuple[str, int, bool, str], list[str]] = defaultdict(list)
        names = {name for name, _ in self.known}
        for row, local in _running(db, names):
            is_fine, verdict = self._verdict(row, local)
            found[row.type, row.version, is_fine, verdict].append(row.key)
        return [
            CheckedInstances(
                type=kind, version=version, running=len(keys), is_fine=is_fine, verdict=verdict,
                keys=tuple(keys[:_MOST_KEYS]),
            )
            for (kind, version, is_fine, verdict), keys in sorted(found.items())
        ]  # fmt: skip

    def _verdict(self, row: StoredSaga, local: Local) -> tuple[bool, str]:
        known = self.known.get((row.type, row.version))
        newer = self._newer.get((row.type, row.version))
        if known is not None and known.graph.hash != row.hash:
            return False, (
                f"is refused: the shape changed, give it another version than {row.version}"
            )
        try:
            if known is not None:
                known.decode(row.data)
                return True, "goes on as it began"
            if newer is not None:
                _moved(newer, row, local)
                return True, f"is moved to version {newer.version}"
        except CannotMigrate as error:
            return False, f"cannot be moved: {error.why}"
        except Exception as error:  # noqa: BLE001 - whatever the decoder makes of it
            return False, f"its state cannot be read: {error}"
        return False, f"waits until a worker has version {row.version}: keep its definition"


def migrate(db: Connection, newer: Saga[Any], row: StoredSaga) -> StoredSaga:
    """Move *row* to *newer* in the caller's transaction, or raise `CannotMigrate`."""
    progress, data = _moved(newer, row, _local(db, [row.id])[row.id])
    changes = store.Changes(row, row)
    definition = (newer.version, newer.graph.hash)
    changes.follow(progress, data, [(Migrated(row.version, newer.version), ())], None, definition)
    write(db, [changes])
    db.execute(update(timer).where(timer.c.saga_id == row.id).values(version=newer.version))
    return changes.after


def _moved(newer: Saga[Any], row: StoredSaga, local: Local) -> tuple[SagaProgress, bytes]:
    migration = newer.migrations[row.version]
    try:
        progress = moved(newer.graph, row.progress, skip=migration.skip, local=local)
        state = migration.function(migration.decode(row.data))
        data = encoded(newer, checked(newer, "its migration", state))
    except Impossible as error:
        raise CannotMigrate(row.type, row.version, str(error)) from error
    except Exception as error:
        why = f"its migration failed: {type(error).__name__}: {error}"
        raise CannotMigrate(row.type, row.version, why) from error
    return progress, data


class Impossible(Exception):
    """A new version could not go on from here; the text says why."""


def moved(
    graph: Graph, before: SagaProgress, *, skip: frozenset[str] = frozenset(), local: Local
) -> SagaProgress:
    """Return *before* as progress in *graph*, or raise `Impossible`.

    Steps are the same if they have the same name. What stands, is under way or is owed must have
    its place in the new version, and nothing that it waits for may be missing.
    """
    steps = {node.name: before.steps.get(node.name, StepState()) for node in graph}
    for name, step in before.steps.items():
        if step.status is StepStatus.WAITING or step.status in _NOTHING_STANDS:
            continue
        if name not in steps:
            raise Impossible(
                f"step {name!r} is {step.status}, and version {graph.version} has no such step"
            )
        _check_kind(graph, graph[name], step, local)
        if before.phase is not SagaPhase.FORWARD:
            is_open = before.phase is SagaPhase.QUIESCING
            _check_undo(graph, graph[name], step, is_open=is_open)
    if before.phase in (SagaPhase.FORWARD, SagaPhase.QUIESCING):
        for name, step in before.steps.items():
            if name in steps and step.status is not StepStatus.WAITING:
                _pass_over(graph, name, steps, skip)
    return replace(before, steps=steps)


def _check_kind(graph: Graph, node: Node, step: StepState, local: Local) -> None:
    where = f"in version {graph.version}"
    if step.case is not None and step.case not in node.cases:
        raise Impossible(f"{node.name!r} has chosen {step.case!r}, which is no case {where}")
    undo = node.undo
    if step.status in UNDOING and undo is None:
        raise Impossible(f"step {node.name!r} is being undone, and has no compensation {where}")
    for status, direction, kind in (
        (StepStatus.RUNNING, Direction.DO, node.kind),
        (StepStatus.UNDOING, Direction.UNDO, None if undo is None else undo.kind),
    ):
        is_local = (node.name, direction) in local
        if step.status is status and is_local != (kind is NodeKind.LOCAL):
            raise Impossible(f"step {node.name!r} is under way, and is of another kind {where}")


def _check_undo(graph: Graph, node: Node, step: StepState, *, is_open: bool) -> None:
    """Refuse what could not be undone; while the way is open, a pivot that is done goes forward."""
    if (
        step.status in OWING
        and node.has_effect
        and node.undo is None
        and not node.is_harmless
        and not (node.pivot and is_open)
    ):
        raise Impossible(
            f"step {node.name!r} is to be undone, and has no compensation in version "
            f"{graph.version}"
        )


def _pass_over(graph: Graph, name: str, steps: dict[str, StepState], skip: frozenset[str]) -> None:
    """Skip new steps before *name*, which has begun, where that was said; refuse the rest."""
    for earlier in sorted(graph.ancestors[name]):
        if steps[earlier].status is StepStatus.WAITING and earlier in skip:
            steps[earlier] = replace(steps[earlier], status=StepStatus.SKIPPED)
        elif steps[earlier].status not in ENDED:
            raise Impossible(
                f"step {earlier!r} comes before {name!r} in version {graph.version}, and {name!r} "
                f"has begun without it: name it in skip=, if it need not be done"
            )


def _running(db: Connection, names: set[str]) -> Iterator[tuple[StoredSaga, Local]]:
    """Yield every saga of *names* that has not ended, and what of it runs locally now."""
    last = ""
    while rows := store.running(db, names, after=last, limit=_AT_ONCE):
        local = _local(db, [row.id for row in rows])
        for row in rows:
            yield row, local[row.id]
        last = rows[-1].id


def _local(db: Connection, ids: Sequence[str]) -> defaultdict[str, Local]:
    found: defaultdict[str, Local] = defaultdict(frozenset)
    columns = (timer.c.saga_id, timer.c.step, timer.c.direction)
    runs = select(*columns).where(timer.c.saga_id.in_(ids), timer.c.kind == store.RUN)
    for saga_id, name, direction in db.execute(runs):
        found[saga_id] |= {(name, Direction(direction))}
    return found
