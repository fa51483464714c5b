"""The replication slot and its publication: made when missing, checked before use.

Somebody else who reads the slot and stays is told of.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from sqlalchemy.exc import DBAPIError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.sql import statements
from holdfast.errors import ConfigurationError
from holdfast.outbox.relay.monitoring import default_slot
from holdfast.outbox.wal.errors import SlotBusy, SlotLost, translated
from holdfast.outbox.wal.protocol import (
    ReplicationStream,
    options,
    position,
    replication_connection,
)

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine, Row, RowMapping

    from holdfast.outbox.wal.protocol import Waker


_PRIVILEGE = "42501"
_EXISTS = ("42710", "23505")  # made by another in the same moment
_ACTS = ("insert", "update", "delete", "truncate")


class Publication:
    """What of the tables' changes the slot tells; every fault names the command that mends it."""

    def __init__(self, engine: Engine, names: SlotNames) -> None:
        self.names = names
        self._engine = engine
        self._sql = statements("holdfast.outbox.wal", "postgresql")

    def prepare(self) -> None:
        """Create the publication if it is missing; one that tells too little raises."""
        found = self._found()
        if found is None:
            self._create()
        else:
            self._check_acts(found)
        self._check_tables()

    def _found(self) -> RowMapping | None:
        name = {"name": self.names.publication}
        with self._engine.connect() as db:
            return db.execute(self._sql["publication"], name).mappings().first()

    def _check_acts(self, found: RowMapping) -> None:
        wanted = self.names.publish.split(", ")
        if missing := [act for act in wanted if not found[act]]:
            acts = ", ".join(act for act in _ACTS if found[act] or act in wanted)
            raise ConfigurationError(
                f"publication {self.names.publication} leaves "
                f"{' and '.join(f'{act}s' for act in missing)} out: run  ALTER PUBLICATION "
                f"{self.names.quoted} SET (publish = '{acts}')"
            )

    def _create(self) -> None:
        names = self.names
        name = sql.Identifier(names.publication)
        with self._engine.connect() as db:
            has = {t: db.execute(self._sql["table"], {"table": t}).first() for t in names.tables}
        there = [found for found in has.values() if found is not None]
        if len(there) < len(names.tables):
            missing = ", ".join(table for table, found in has.items() if found is None)
            raise ConfigurationError(f"table {missing} does not exist: run  holdfast db upgrade")
        tables = sql.SQL(", ").join(sql.Identifier(*found) for found in there)
        clause = sql.SQL("FOR TABLE {} ").format(tables) if there else sql.SQL("")
        command = (
            sql.SQL(
                "CREATE PUBLICATION {} {}WITH (publish = {}, publish_via_partition_root = true)"
            )
            .format(name, clause, sql.Literal(names.publish))
            .as_string()
        )
        self._run("create the publication", command, *self._comments(names.remark))

    def _comments(self, remark: str | None) -> list[str]:
        if not self.names.remark:
            return []
        said = sql.SQL("COMMENT ON PUBLICATION {} IS {}")
        name = sql.Identifier(self.names.publication)
        return [said.format(name, sql.Literal(remark)).as_string()]

    def _run(self, what: str, *commands: str) -> None:
        """Run *commands*, unless another did so in the same moment."""
        try:
            with self._engine.begin() as db:
                for command in commands:
                    db.exec_driver_sql(command)
        except DBAPIError as error:
            state = getattr(error.orig, "sqlstate", None)
            if state not in (_PRIVILEGE, *_EXISTS):
                raise
            if state == _PRIVILEGE:
                raise ConfigurationError(
                    f"this role may not {what}; run as the owner:  {commands[0]}"
                ) from error

    @property
    def marked(self) -> bool:
        """Whether the publication was made here and `unmark` was not called yet."""
        found = self._found()
        return found is not None and found["remark"] == self.names.remark != ""

    def unmark(self) -> None:
        """Take the remark from the publication."""
        if self.marked:
            self._run("change the publication's comment", *self._comments(None))

    def _check_tables(self) -> None:
        with self._engine.connect() as db:
            for table in self.names.tables:
                where = {"name": self.names.publication, "table": table}
                if not db.execute(self._sql["published"], where).scalar():
                    raise ConfigurationError(
                        f"publication {self.names.publication} lacks the table: run  ALTER "
                        f"PUBLICATION {self.names.quoted} ADD TABLE {table}"
                    )


log = logging.getLogger("holdfast.outbox.wal")

_NAME = re.compile(r"[a-z0-9_]{1,63}")
_OLDEST = 140000  # binary rows and logical messages came with PostgreSQL 14


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNames:
    """What to read: the slot, the publication and the tables that belong in it."""

    slot: str
    publication: str
    tables: tuple[str, ...]
    publish: str = "insert"
    when_lost: str = "is made anew, and what it held is gone"
    """What becomes of a slot that the server gave up."""
    remark: str = ""
    """A comment on the publication when it is made here, until `Publication.unmark`."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.slot):
            raise ConfigurationError(
                f"slot={self.slot!r}: use 1 to 63 of a-z, 0-9 and _, as PostgreSQL demands"
            )
        if not self.publication:
            raise ConfigurationError("publication is empty: name the publication")

    @property
    def quoted(self) -> str:
        """The publication's name as a command takes it."""
        plain = _NAME.fullmatch(self.publication) is not None
        return self.publication if plain else sql.Identifier(self.publication).as_string()


@dataclass(frozen=True, slots=True)
class Export:
    """The snapshot of a slot's first moment, alive as long as its connection is idle."""

    connection: psycopg.Connection[Any]
    slot: str
    position: int
    snapshot: str

    def close(self) -> None:
        """Let the snapshot go."""
        self.connection.close()


class ReplicationSlot:
    """A logical slot read with pgoutput; every fault names the command that mends it."""

    def __init__(
        self,
        engine: Engine,
        names: SlotNames,
        *,
        reader: str,
        clock: Clock = SYSTEM_CLOCK,
        settings: str = "",
    ) -> None:
        self.names = names
        self.publication = Publication(engine, names)
        self._engine = engine
        self._clock = clock
        self._settings = settings
        self.reader = reader
        self._sql = statements("holdfast.outbox.wal", "postgresql")
        self._warned = False
        self._creating: psycopg.Connection[Any] | None = None

    def prepare(self) -> None:
        """Check the server and the publication; create the publication if it is missing."""
        with self._engine.connect() as db:
            self._check_server(db)
        self.publication.prepare()

    def _check_server(self, db: Connection) -> None:
        settings = db.execute(self._sql["settings"]).one()
        if settings.version < _OLDEST:
            raise ConfigurationError(
                f"PostgreSQL {settings.version // 10000} is too old for the WAL engine: use 14 or "
                "newer, or the lease engine"
            )
        if settings.wal_level != "logical":
            raise ConfigurationError(
                f"wal_level is {settings.wal_level}: run  ALTER SYSTEM SET wal_level=logical  and "
                "restart PostgreSQL, or use the lease engine"
            )
        if settings.keep == "-1" and not self._warned:
            self._warned = True
            log.warning(
                "max_slot_wal_keep_size is unlimited: a relay that stays down fills the disk; "
                "run  ALTER SYSTEM SET max_slot_wal_keep_size='10GB'  (a slot lost that way %s)",
                self.names.when_lost,
            )

    def ensure(self) -> Export | None:
        """Make sure that the slot exists and can be read.

        Return None if it was there already; if it was made now, the snapshot from which on
        the stream tells everything, to be closed once it is taken over.
        """
        found = self._checked()
        if found is not None and found.wal_status == "lost":
            self.discard("PostgreSQL gave up what it needs (max_slot_wal_keep_size)")
            found = None
        if found is None:
            return self._create(self.names.slot)
        if found.active:
            self._oust()
        return None

    def begin(self, *, anew: bool) -> Export | None:
        """Return None if the slot can be read, else a slot for the time being, with its snapshot.

        That one is gone with its connection, unless `keep` gives it the name. Unless *anew*,
        a slot that is missing or lost raises `SlotLost`.
        """
        found = self._checked()
        if found is not None and found.wal_status != "lost":
            if found.active:
                raise SlotBusy(f"replication slot {self.names.slot} is in use")
            return None
        temporary = f"{self.names.slot[:58]}_new"
        with self._engine.connect() as db:
            if db.execute(self._sql["slot"], {"name": temporary}).first() is not None:
                raise SlotBusy("another process takes the snapshot")
        if not anew:
            why = "missing" if found is None else "lost (max_slot_wal_keep_size)"
            raise SlotLost(f"replication slot {self.names.slot} is {why}")
        if found is not None:
            self.discard("its log is gone and a new snapshot was asked for")
        return self._create(temporary, "TEMPORARY")

    def keep(self, export: Export) -> None:
        """Make the slot of *export* ours for good, as it was at its first moment."""
        with translated(f"keeping the slot {self.names.slot}"):
            export.connection.execute(
                "SELECT pg_copy_logical_replication_slot(%s, %s, false)",
                (export.slot, self.names.slot),
            )

    def _checked(self) -> Row[Any] | None:
        found = self._find()
        if found is None:
            return None
        if found.plugin != "pgoutput" or not found.ours:
            raise ConfigurationError(
                f"replication slot {self.names.slot} is another program's or another database's: "
                "choose another name with slot="
            )
        return found

    def _find(self) -> Row[Any] | None:
        with self._engine.connect() as db:
            return db.execute(self._sql["slot"], {"name": self.names.slot}).first()

    def _create(self, slot: str, kind: str = "") -> Export:
        """Create the slot; waits for the transactions that are running now."""
        connection = replication_connection(self._engine.url, self.reader)
        self._creating = connection
        command = f"CREATE_REPLICATION_SLOT {slot} {kind} LOGICAL pgoutput EXPORT_SNAPSHOT"
        try:
            with translated(f"creating {slot}", self._engine.url.username or "…"):
                row = connection.execute(command).fetchone()
        except BaseException:
            connection.close()
            raise
        finally:
            self._creating = None
        assert row is not None  # noqa: S101 - the command always answers
        log.info("replication slot %s begins at %s", slot, row[1])
        return Export(connection, slot, position(row[1]), row[2])

    def stream(
        self, waker: Waker, *, messages: bool, binary: bool, patience: float = float("inf")
    ) -> ReplicationStream:
        """Return the stream from where it was confirmed last."""
        names = self.names
        chosen = options(names.publication, messages=messages, binary=binary)
        connection = replication_connection(self._engine.url, self.reader, self._settings)
        return ReplicationStream(
            connection, names.slot, chosen, clock=self._clock, waker=waker, patience=patience
        )

    def cancel(self) -> None:
        """End a creation that waits, from another thread."""
        if (connection := self._creating) is not None:
            with suppress(psycopg.Error):  # it ends by itself then
                connection.cancel_safe(timeout=5)

    def discard(self, why: str) -> None:
        """Drop the slot, which cannot be read any more."""
        log.error("replication slot %s is made anew: %s", self.names.slot, why)
        with self._engine.begin() as db:
            db.execute(self._sql["drop_slot"], {"name": self.names.slot})
        if self._find() is not None:
            raise SlotBusy(f"replication slot {self.names.slot} is lost and still in use")

    def _oust(self) -> None:
        """End a relay that lost its lease and still sits on the slot, half-open say."""
        with self._engine.begin() as db:
            who = {"name": self.names.slot, "me": self.reader}
            if db.execute(self._sql["terminate_stale"], who).scalar():
                log.warning("ended the stale reader of replication slot %s", self.names.slot)


def drop_slot(engine: Engine, slot: str | None = None) -> bool:
    """Drop the slot unless it is in use: after leaving the WAL engine it would pin the log."""
    name = default_slot(engine) if slot is None else slot
    with engine.begin() as db:
        command = statements("holdfast.outbox.wal", "postgresql")["drop_slot"]
        return db.execute(command, {"name": name}).first() is not None


_PATIENCE_SECONDS = 5.0  # a relay that was ended leaves the slot within this


class SlotConflict:
    """Keeps a relay off its slot; one that stays is told of, for it would go on for ever."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._text: str | None = None

    @property
    def named(self) -> str | None:
        """What the server says of the stranger, once it is plain that it stays."""
        return self._text

    def seen(self, error: SlotBusy) -> None:
        """Note that the slot is taken."""
        now = self._clock.monotonic()
        if self._since is None:
            self._since = now
            log.info("standing by: %s", error)
        elif self._text is None and now - self._since >= _PATIENCE_SECONDS:
            log.error("a stranger reads our slot, end it or choose another --slot: %s", error)
            self._text = str(error)

    def gone(self) -> None:
        """Note that the slot is ours, or no longer our business."""
        self._since = self._text = None
