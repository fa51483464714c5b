"""Where the embedded broker keeps its tables: a file shared by processes, or memory.

Topics and their lanes in the embedded broker.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.errors import BrokerDown, ConfigurationError, InvalidMessage, UnknownTopic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.brokers.embedded.broker import EmbeddedSettings
    from holdfast.clock import Clock


APPLICATION = 0x486F6C64  # "Hold", in the file's application_id
VERSION = 1
_BUSY_SECONDS = 60.0
_POLL_FIRST, _POLL_LONGEST = 0.001, 0.02


class StoreSession(Protocol):
    """One user's access to the tables; one thread at a time."""

    def read(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """Return all rows of one consistent statement."""
        ...

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Hold the one write lock; commit at the end, or leave nothing behind.

        A commit that need not be *durable* survives the process, perhaps not a power cut.
        """
        ...

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Wait until something was committed elsewhere, *event* is set, or time is up."""
        ...

    def close(self) -> None:
        """Release the session."""
        ...


class Store(Protocol):
    """Opens sessions on the same tables."""

    def session(self) -> StoreSession:
        """Return a new session."""
        ...

    def close(self) -> None:
        """Release what the store itself holds."""
        ...


@contextmanager
def translated() -> Iterator[None]:
    """Turn SQLite's errors into those that state the remedy."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise _translation(error) from error
    except sqlite3.DatabaseError as error:
        raise ConfigurationError(f"the broker file cannot be used: {error}") from error


def _translation(error: sqlite3.OperationalError) -> Exception:
    text = str(error)
    if "unable to open" in text or "readonly" in text or "no such table" in text:
        return ConfigurationError(
            f"the broker file cannot be used: {text}; check that its folder exists and that "
            "this user may write the file and its folder"
        )
    return BrokerDown(f"the broker file does not answer: {text}")


class FileStore:
    """Tables in a file; every session has a connection of its own."""

    def __init__(self, path: Path, clock: Clock, *, adopt: bool) -> None:
        self._path = path
        self._clock = clock
        with translated():
            connection = _open(str(path), clock)
            try:
                _prepare(connection, str(path), adopt=adopt)
            finally:
                connection.close()

    def session(self) -> StoreSession:
        """Return a session with its own connection."""
        with translated():
            return FileSession(_open(str(self._path), self._clock), self._clock)

    def close(self) -> None:
        """Nothing is held between sessions."""


class FileSession:
    """A connection to a shared file; other processes are noticed by its data version."""

    def __init__(self, connection: sqlite3.Connection, clock: Clock) -> None:
        self._db = connection
        self._clock = clock
        self._seen = -1
        self._durable = True

    def read(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """Return all rows."""
        with translated():
            return self._db.execute(sql, args).fetchall()

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Hold the file's write lock."""
        with translated():
            if durable != self._durable:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._durable = durable
            with _transaction(self._db):
                yield self._db

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Look at the data version, more and more seldom, until it changes."""
        pause, until = _POLL_FIRST, self._clock.monotonic() + seconds
        while not self._changed():
            left = until - self._clock.monotonic()
            if left <= 0 or self._clock.wait(event, min(pause, left)):
                return
            pause = min(pause * 1.5, _POLL_LONGEST)

    def _changed(self) -> bool:
        with translated():
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
        changed, self._seen = version != self._seen, version
        return bool(changed)

    def close(self) -> None:
        """Close the connection; an unfinished transaction is rolled back."""
        self._db.close()


class MemoryStore:
    """Tables in this process's memory; sessions take turns on one connection."""

    def __init__(self, clock: Clock) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._db.executescript(_schema())
        self._clock = clock
        self._turn = threading.RLock()
        self._waiting: set[threading.Event] = set()
        self._commits = 0

    def session(self) -> StoreSession:
        """Return a session on the one connection."""
        return MemorySession(self)

    def read(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """Return all rows."""
        with self._turn, translated():
            return self._db.execute(sql, args).fetchall()

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Take a turn and wake whoever waits; nothing here outlives the process anyway."""
        with self._turn, translated():
            with _transaction(self._db):
                yield self._db
            self._commits += 1
            for event in self._waiting:
                event.set()

    def await_commit(self, event: threading.Event, seconds: float, seen: int) -> int:
        """Wait for a commit after the one numbered *seen*; return the newest number."""
        with self._turn:
            if self._commits != seen:
                return self._commits
            self._waiting.add(event)
        self._clock.wait(event, seconds)
        with self._turn:
            self._waiting.discard(event)
            return self._commits

    def close(self) -> None:
        """Keep the tables: other sessions may still use them."""


class MemorySession:
    """One user's view of a memory store: it knows which commits it has seen."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._seen = -1
        self.read = store.read
        self.write = store.write

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Wait until something was committed since the last wait."""
        self._seen = self._store.await_commit(event, seconds, self._seen)

    def close(self) -> None:
        """Nothing is held for one session."""


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    # IMMEDIATE takes the write lock first: a reader that turns writer could only fail.
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _schema() -> str:
    return files(__package__).joinpath("schema.sql").read_text()


def _open(path: str, clock: Clock) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA synchronous = FULL")
    return db


def _prepare(db: sqlite3.Connection, path: str, *, adopt: bool) -> None:
    """Make the file ours: WAL, tables, marks of application and version."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION and not adopt:
        _refuse_foreign(db, path)
    _use_wal(db)
    with _transaction(db):
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application == APPLICATION and version > VERSION:
            raise ConfigurationError(
                f"{path} was written by a newer Holdfast (schema {version}, this one knows "
                f"{VERSION}): upgrade with  pip install -U holdfast"
            )
        for statement in _schema().split(";"):
            db.execute(statement)
        if not adopt:
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {VERSION}")


def _refuse_foreign(db: sqlite3.Connection, path: str) -> None:
    rows = db.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'hf!_%' ESCAPE '!'")
    names = [name for (name,) in rows.fetchmany(4)]
    if names:
        raise ConfigurationError(
            f"{path} belongs to another application (it holds {', '.join(names)}): name a "
            "file of its own, or add ?adopt=true to keep the broker's tables in this one"
        )


def _use_wal(db: sqlite3.Connection) -> None:
    # The switch to WAL ignores the busy timeout while another process makes the same
    # switch, so it is asked for until somebody has done it.
    for _ in range(200):
        try:
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) and "busy" not in str(error):
                raise
        else:
            if mode == "wal":
                return
        db.execute("BEGIN IMMEDIATE")  # waits its turn behind whoever holds the file
        db.execute("ROLLBACK")
    raise BrokerDown("the broker file stays locked by another process")


class EmbeddedTopics:
    """Finds topics, and makes them where that is allowed."""

    def __init__(self, session: StoreSession, settings: EmbeddedSettings) -> None:
        self._db = session
        self._settings = settings

    def create(self, topic: str, partitions: int) -> None:
        """Make sure that *topic* exists; an existing one keeps its partitions."""
        if not topic:
            raise InvalidMessage("topic is empty: name the topic to create")
        if partitions < 1:
            raise ConfigurationError(f"partitions={partitions}: a topic needs at least 1")
        with self._db.write() as db:
            known = db.execute("SELECT 1 FROM hf_lane WHERE topic = ?", (topic,)).fetchone()
            if known is None:
                db.executemany(
                    "INSERT INTO hf_lane (topic, partition) VALUES (?, ?)",
                    [(topic, partition) for partition in range(partitions)],
                )

    def find(self, topic: str) -> dict[int, int]:
        """Return the lane ids of *topic* by partition; empty if there is no such topic."""
        rows = self._db.read("SELECT partition, id FROM hf_lane WHERE topic = ?", topic)
        return dict(rows)

    def lanes(self, topic: str) -> dict[int, int]:
        """Return the lane ids of *topic* by partition, making the topic where allowed."""
        found = self.find(topic)
        if not found:
            if not self._settings.auto_create:
                raise UnknownTopic(topic, "create it with broker.create_topic(), or auto_create")
            self.create(topic, self._settings.partitions)
            found = self.find(topic)
        return found
