"""Where the dead letters of a consumer go, and what is done together with that."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.consumer.scheduling.work import current_work
from holdfast.dlq import DeadLetterStore
from holdfast.dlq.letter import ThreadedDestination, puts_in_thread
from holdfast.errors import ConfigurationError, DependencyDown, StaleDelivery
from holdfast.scrubbing import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import URL, Connection, Engine

    from holdfast.consumer.scheduling.work import Work
    from holdfast.consumer.settings import Settings
    from holdfast.consumer.store import ConsumerStore

_NOWHERE = (None, "", ":memory:")


class DeadLetterRouting:
    """Where the dead letters of a consumer go: its own home, and those that handlers name."""

    def __init__(self, own: Any, books: ConsumerStore | None, settings: Settings) -> None:
        self.own = (
            RecordingDestination(own, in_thread=True)
            if books is None
            else QuarantiningDestination(books, own)
        )
        self._books = books
        self._settings = settings
        self._all = [self.own]

    @property
    def down(self) -> str | None:
        """Why the last letter of some handler could not be written, None if all could."""
        return next((home.down for home in self._all if home.down is not None), None)

    def of(
        self, given: Any, handler: str, *, ordered: bool
    ) -> QuarantiningDestination | RecordingDestination:
        """Return the home of *handler*, which names *given*; None: the consumer's own.

        A letter in the consumer's database commits together with the hold on its key. One
        that goes elsewhere cannot hold its key, so that is refused while keys are held.
        """
        if given is None:
            return self.own
        books, settings = self._books, self._settings
        home: QuarantiningDestination | RecordingDestination
        if books is None:
            home = RecordingDestination(given, in_thread=puts_in_thread(given))
        elif isinstance(given, DeadLetterStore) and is_same_database(given.engine, books.engine):
            home = QuarantiningDestination(books, given)
        elif settings.quarantine and settings.parks and ordered:
            raise ConfigurationError(
                f"{handler} sends its dead letters to a {type(given).__name__} outside of the "
                "consumer's database, where nothing could hold their keys: use @dead_letter() or "
                "DeadLetterStore(engine) of that database; or let keys go on, Consumer(…, "
                "quarantine=False)"
            )
        else:
            home = QuarantiningDestination(books, given, elsewhere=True)
        self._all.append(home)
        return home


class QuarantiningDestination(ThreadedDestination):
    """A home of dead letters in the consumer's database: letter and hold commit together.

    With one *elsewhere*, which holds no keys, the letter is durable there before the message
    is settled here: a crash between the two puts the same letter again.
    """

    def __init__(self, books: ConsumerStore, home: Any, *, elsewhere: bool = False) -> None:
        self._books = books
        self._home = home
        self._elsewhere = elsewhere
        self.in_thread = not elsewhere or puts_in_thread(home)
        self.down: str | None = None
        """Why the last letter could not be written, None if it could."""

    def put(self, letter: Any, connection: Connection | None = None) -> None:
        """Return once *letter* is durable and its key is held."""
        work = current_work.get()
        with _watched(self):
            if connection is not None or work is None:
                self._home.put(letter, connection)
                return
            require_ours(work)
            if self._elsewhere:
                self._home.put(letter)
                self._books.bury(work, letter, lambda _letter, _db: None)
            else:
                self._books.bury(work, letter, self._home.put)
        work.run.letter = letter


class RecordingDestination(ThreadedDestination):
    """A home of dead letters of a consumer without a database: nothing is held."""

    def __init__(self, home: Any, *, in_thread: bool) -> None:
        self._home = home
        self.in_thread = in_thread
        self._lock = threading.Lock()  # threads do not share a sink
        self.down: str | None = None
        """Why the last letter could not be written, None if it could."""

    def put(self, letter: Any, connection: Connection | None = None) -> None:
        """Return once *letter* is durable."""
        work = current_work.get()
        if work is not None:
            require_ours(work)
        with self._lock, _watched(self):
            self._home.put(letter, connection)
        if work is not None:
            work.run.letter = letter


@contextmanager
def _watched(home: QuarantiningDestination | RecordingDestination) -> Iterator[None]:
    """Note at *home* whether the letter could be written."""
    try:
        yield
    except DependencyDown as error:
        home.down = text_of(error)
        raise
    home.down = None


def is_same_database(one: Engine, other: Engine) -> bool:
    """Whether what is written through *one* can be part of a transaction of *other*."""
    if one is other:
        return True
    return one.url.database not in _NOWHERE and place(one.url) == place(other.url)


def place(url: URL) -> tuple[object, ...]:
    """Return where the database of *url* is, whatever the driver."""
    return url.get_backend_name(), url.host, url.port, url.database


def require_ours(work: Work) -> None:
    """Refuse to dead-letter a message whose partition has gone: its new owner may do well."""
    if work.is_revoked:
        raise StaleDelivery(f"message {work.message.id} belongs to another member now")
