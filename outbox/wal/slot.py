"""The replication slot and its publication: made when missing, checked before use."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError
from holdfast.outbox.slot_name import default_slot
from holdfast.outbox.wal.faults import SlotBusy, SlotLost, translated
from holdfast.outbox.wal.frames import position
from holdfast.outbox.wal.publication import Publication
from holdfast.outbox.wal.stream import Stream, options, replication_connection
from holdfast.sql import statements

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine, Row

    from holdfast.outbox.wal.waker import Waker

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
    required: bool = True
    """Whether the publication must hold the tables."""
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


class Slot:
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
        self._seen = 0
        self._stream: Stream | None = None
        self._is_published = False

    @property
    def confirmed(self) -> int:
        """How far the slot was confirmed, as far as is known here; 0 if nothing is."""
        return max(self._seen, 0 if self._stream is None else self._stream.confirmed)

    @property
    def is_first(self) -> bool:
        """Whether no slot can have been there before: its very publication was missing."""
        return not (self._is_published or self.confirmed)

    def prepare(self) -> None:
        """Check the server and the publication; create the publication if it is missing."""
        with self._engine.connect() as db:
            self._check_server(db)
        self._is_published = self.publication.prepare()

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
            found = db.execute(self._sql["slot"], {"name": self.names.slot}).first()
        if found is not None and found.confirmed is not None:
            self._seen = position(found.confirmed)
        return found

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
    ) -> Stream:
        """Return the stream from where it was confirmed last."""
        names = self.names
        chosen = options(names.publication, messages=messages, binary=binary)
        connection = replication_connection(self._engine.url, self.reader, self._settings)
        self._stream = Stream(
            connection, names.slot, chosen, clock=self._clock, waker=waker, patience=patience
        )
        return self._stream

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
