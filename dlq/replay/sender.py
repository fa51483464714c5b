"""The sender: publishes a plan in batches, fenced by its lease, and heeds what comes back.

Publish before marking: a crash sends what was in doubt again, two batches at most, which the
consumer's dedup absorbs, and never loses any. What is confirmed is never sent again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.flight import Publisher
from holdfast.dlq.replay.lease import Lease
from holdfast.dlq.replay.outgoing import Reader
from holdfast.dlq.replay.run import Run
from holdfast.dlq.replay.state import ENDED, NotNow
from holdfast.dlq.replay.stream import AHEAD, Stream
from holdfast.dlq.replay.target import Target
from holdfast.dlq.replay.watch import Watch, plan_row

if TYPE_CHECKING:
    import threading

    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay.ending import Ending
    from holdfast.dlq.replay.watch import Observer
    from holdfast.dlq.vault import Vault
    from holdfast.ports import Broker


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a sender works; the plan itself says what and how fast."""

    batch: int = 5000
    """Published at a time, less of large messages; after a crash at most two batches are sent
    again."""
    lease_seconds: float = 5.0
    poll_seconds: float = 0.2


class Sender:
    """Sends one plan from where it stands, until it ends or somebody stops it.

    When *stopping* is set it ends after the batch in hand; the plan waits for a next sender.
    """

    def __init__(
        self,
        engine: Engine,
        broker: Broker,
        *,
        pace: Pace | None = None,
        clock: Clock = SYSTEM_CLOCK,
        observe: Observer | None = None,
        vault: Vault | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        self._vault = vault
        self._stopping = stopping
        self._engine = engine
        self._broker = broker
        self._pace = Pace() if pace is None else pace
        self._clock = clock
        self._observe = observe

    def run(self, plan_id: str) -> Ending:
        """Send the plan on; returns how it ended. One sender at a time, whoever calls."""
        with self._engine.connect() as db:
            found = plan_row(db, plan_id)
        if found.state in ENDED:
            raise NotNow(f"plan {found.short} is {found.state}: nothing is left to send")
        if found.waits_for_approval:
            raise NotNow(
                f"plan {found.short} of {found.total:,} messages waits for the approval of "
                f"somebody else than {found.created_by}: holdfast dlq plans approve {found.short}"
            )
        seconds = self._pace.lease_seconds
        lease = Lease.take(self._engine, plan_id, seconds=seconds, clock=self._clock)
        sink = self._broker.sink()
        try:
            with (
                ThreadPoolExecutor(AHEAD, "holdfast-replay-read") as ahead,
                ThreadPoolExecutor(1, "holdfast-replay-send") as thread,
            ):
                reader = Reader(found, self._vault)
                run = Run(
                    lease,
                    Publisher(sink, thread, self._clock, meanwhile=seconds / 3),
                    Target(self._broker, found.target),
                    Watch(self._engine, clock=self._clock, observe=self._observe),
                    Stream(self._engine, reader, ahead, batch=self._pace.batch),
                    self._stopping,
                )
                return run.go(found, self._pace)
        finally:
            sink.close()
            lease.release()
