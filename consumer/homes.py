"""Where the dead letters of a consumer go, and what is done together with that."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.consumer.work import current_work
from holdfast.errors import DependencyDown, StaleDelivery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Connection

    from holdfast.consumer.books import Books
    from holdfast.consumer.work import Work


class QuarantineHome:
    """The consumer's home of dead letters: the letter and the hold on its key commit together."""

    in_thread = True

    def __init__(self, books: Books, home: Any) -> None:
        self._books = books
        self._home = home
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
            self._books.bury(work, letter, self._home.put)
        work.letter = letter


class NotingHome:
    """The home of dead letters of a consumer without a database: a topic, and nothing is held."""

    in_thread = True

    def __init__(self, home: Any) -> None:
        self._home = home
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
            work.letter = letter


@contextmanager
def _watched(home: QuarantineHome | NotingHome) -> Iterator[None]:
    """Note at *home* whether the letter could be written."""
    try:
        yield
    except DependencyDown as error:
        home.down = str(error)
        raise
    home.down = None


def require_ours(work: Work) -> None:
    """Refuse to dead-letter a message whose partition has gone: its new owner may do well."""
    if work.dropped:
        raise StaleDelivery(f"message {work.message.id} belongs to another member now")
