"""A database with an outbox, a sink that remembers, and a relay between them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from holdfast.backoff import Backoff
from holdfast.errors import BrokerDown, PoisonMessage
from holdfast.outbox import Event, LeaseTerms, Outbox, Relay, create_tables
from holdfast.outbox.relay.monitoring import default_slot
from holdfast.outbox.wal import drop_slot
from holdfast.ports import Caps, Ordering, Published, Settle
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.engine import Engine

    from holdfast.message import Message
    from holdfast.outbox import RelayEngine


class Recorder:
    """A sink that remembers; it can be made to wait, to be down, or to refuse."""

    caps = Caps(settle=Settle.INDIVIDUAL, ordering=Ordering.KEY)

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.messages: list[Message] = []
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.down = False
        self.refused: set[str] = set()
        self.refuse_all = False
        self.pause_after: int | None = None
        """After so many it holds the next batch until the gate is opened."""

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Take *messages*, unless told otherwise."""
        self.entered.set()
        assert self.gate.wait(120)
        if self.down:
            raise BrokerDown("the recorder is down")
        self.batches.append(len(messages))
        if self.pause_after is not None and len(self.seen) >= self.pause_after:
            self.gate.clear()
            self.pause_after = None
        results = []
        for message in messages:
            body = (message.payload or b"").decode()
            if self.refuse_all or body in self.refused:
                results.append(Published(error=PoisonMessage(f"{body} is refused")))
            else:
                self.seen.append((message.key_text or "", body))
                self.messages.append(message)
                results.append(Published())
        return results

    def close(self) -> None:
        """Nothing to release."""

    @property
    def bodies(self) -> list[str]:
        return [body for _, body in self.seen]


class Shop:
    """A database with an outbox, and the means to look at it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine: Engine = create_engine(url)
        create_tables(self.engine)
        self.slot = default_slot(self.engine)

    def add(self, *events: tuple[str | None, str], outbox: Outbox | None = None) -> None:
        """Commit *events* of (key, body) in one transaction."""
        with Session(self.engine) as session, session.begin():
            listed = [Event(body=body, topic="orders", key=key) for key, body in events]
            (Outbox() if outbox is None else outbox).add_all(session, listed)

    def ask(self, query: str, **values: Any) -> Any:
        """Run *query* and return its one value, if it has one."""
        with self.engine.begin() as db:
            result = db.execute(text(query), values)
            return result.scalar() if result.returns_rows else None

    def drop(self) -> None:
        """Drop the slot, whoever reads it."""
        wait_until(self._drop, what="the slot is dropped")
        self.engine.dispose()

    def _drop(self) -> bool:
        query = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active"
        self.ask(f"{query} AND slot_name = :s", s=self.slot)
        drop_slot(self.engine, self.slot)
        return not self.ask("SELECT 1 FROM pg_replication_slots WHERE slot_name = :s", s=self.slot)

    @property
    def reader(self) -> int | None:
        """The process that reads its slot."""
        query = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = :s AND active"
        found: int | None = self.ask(query, s=self.slot)
        return found

    def cut(self) -> bool:
        """End the slot's reader and drop the slot; return whether it was fast enough."""
        self.ask("SELECT pg_terminate_backend(:pid)", pid=self.reader)
        return drop_slot(self.engine, self.slot)

    @property
    def left(self) -> int:
        """How many rows the outbox holds."""
        return int(self.ask("SELECT count(*) FROM holdfast_outbox"))

    @property
    def has_slot(self) -> bool:
        """Whether its slot is made: what is committed from now on is in it."""
        query = "SELECT confirmed_flush_lsn IS NOT NULL FROM pg_replication_slots"
        return bool(self.ask(f"{query} WHERE slot_name = :s", s=self.slot))

    @property
    def confirmed(self) -> int:
        """How far the slot is confirmed."""
        query = "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = :s"
        return int(self.ask(query, s=self.slot))

    @property
    def log_end(self) -> int:
        """Where the log ends now."""
        return int(self.ask("SELECT pg_current_wal_insert_lsn() - '0/0'"))


@contextmanager
def running(engine: RelayEngine) -> Iterator[Relay]:
    """Run a relay in a thread; end it with the block."""
    relay = Relay(engine, backoff=Backoff(first=0.01, ceiling=0.1))
    failures: list[BaseException] = []

    def run() -> None:
        try:
            relay.run()
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield relay
    finally:
        relay.stop()
        thread.join(60)
        if failures:  # it explains whatever else went wrong
            raise failures[0]
    assert not thread.is_alive()


def terms(seconds: float = 30.0) -> LeaseTerms:
    """Return terms that a machine which stands still for some seconds does not break."""
    return LeaseTerms(seconds=seconds)


def steps_until(engine: RelayEngine, condition: Any, what: str, deadline: float = 60) -> None:
    """Step the engine until *condition* holds."""

    def stepped() -> bool:
        engine.step()
        return bool(condition())

    wait_until(stepped, deadline=deadline, what=what, every=0)
