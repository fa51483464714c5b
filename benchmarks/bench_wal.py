"""`holdfast relay`, PostgreSQL → Kafka, against the raw clients, a relay by hand and Debezium."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import psycopg
from debezium_peer import Found, measured
from latencies import EVENTS, Latency, produced, published, relay_profile, relayed
from profiles import explained, told
from relaying import PYTHON_ROWS, ROWS, Place, drained, fill
from sqlalchemy import text

from figures import Figure, Goal, against, compare, contest, rate
from holdfast.outbox import Relay
from holdfast.outbox.wal import WalEngine
from holdfast.outbox.wal.protocol import arguments
from holdfast.ports import Caps, Ordering, Published, Settle
from tests.servers import Kafka, Postgres, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from relaying import Drain

    from holdfast.message import Message

ROUNDS = 3
_TABLE, _STREAM, _LEASE = "wal, from the table", "wal, from the stream", "lease"
_BY_HAND = "by hand"
_HOW = {
    _TABLE: "it starts with the rows there and publishes them from the table (Reconcile)",
    _STREAM: "it stands at the end of the log when the rows are committed in one transaction",
    _LEASE: "it starts with the rows there",
}


def figures() -> Iterator[Figure]:
    """Measure the drain of a backlog and the latency of single events."""
    with Postgres() as postgres, Kafka() as kafka:
        place = Place(postgres, kafka)
        null = NullPlace(place)
        yield compare(
            "wal: backlog to a null sink, from the table",
            ours=null.from_table,
            peer=null.raw_table,
            unit="rows/s",
            goal=Goal(),
            detail=f"{ROWS} rows of 300 bytes; raw: psycopg reads the rows, deletes nothing",
            rounds=ROUNDS,
        )
        yield compare(
            "wal: stream to a null sink",
            ours=null.from_stream,
            peer=null.raw_stream,
            unit="rows/s",
            goal=Goal(at_least=0.5),
            detail="one transaction; raw: psycopg receives the same stream and counts",
            rounds=ROUNDS,
        )
        yield from python_figures(place)
        yield from kafka_figures(place)


def python_figures(place: Place) -> Iterator[Figure]:
    """Measure the drains by kafka-python, against kafka-python itself."""
    kinds = {_TABLE: "wal", _LEASE: "lease"}
    sides: dict[str, Callable[[], float]] = {
        name: lambda kind=kind: place.drain(kind, "kafka", PYTHON_ROWS).rate  # type: ignore[misc]
        for name, kind in kinds.items()
    }
    found = contest({**sides, "raw": place.raw_python}, ROUNDS)
    for name, kind in kinds.items():
        figure = against(
            f"{name}: backlog to Kafka against raw kafka-python",
            found[name],
            found["raw"],
            unit="rows/s",
            goal=Goal(at_least=0.85),
            detail=f"{PYTHON_ROWS} rows; {_HOW[name]}; raw: kafka-python fed from memory, same "
            f"bytes and headers; {ROUNDS} rounds",
        )
        yield explained(figure, partial(place.drain_here, kind, "kafka", PYTHON_ROWS))


def kafka_figures(place: Place) -> Iterator[Figure]:
    """Measure drains and latencies of both engines and of their peers."""
    debezium: list[Found] = []
    ours: dict[str, tuple[Callable[[], Drain], Callable[[], float], float]] = {
        # in a process; in this one, for its profile; goal against Debezium
        _TABLE: (partial(place.drain, "wal"), partial(place.drain_here, "wal"), 4.5),
        _STREAM: (place.stream, place.stream_here, 4.0),
        _LEASE: (partial(place.drain, "lease"), partial(place.drain_here, "lease"), 4.5),
    }
    drains: dict[str, list[Drain]] = {name: [] for name in (*ours, _BY_HAND)}

    def noted(name: str, drain: Callable[[], Drain]) -> float:
        drains[name].append(drain())
        return drains[name][-1].rate

    def peer() -> float:
        debezium.append(measured(place))
        return debezium[-1].rate

    sides = {name: partial(noted, name, work) for name, (work, _, _) in ours.items()}
    sides[_BY_HAND] = partial(noted, _BY_HAND, place.by_hand)
    found = contest({**sides, "raw": place.raw_confluent, "debezium": peer}, ROUNDS)
    for name, (_, here, goal) in ours.items():
        detail = (
            f"{ROWS} rows of 300 bytes, one process, confluent driver; {_HOW[name]}; rates from "
            f"the first to the last record; {ROUNDS} rounds"
        )
        for other, bound, how in (
            ("raw", 0.7, "the raw producer: confluent-kafka fed from memory, same bytes"),
            (_BY_HAND, 0.9, "a relay by hand: one thread, four batches on their way"),
            ("debezium", goal, "Debezium: tuned, without its start"),
        ):
            figure = against(
                f"{name}: to Kafka against {how.partition(':')[0]}",
                found[name], found[other], unit="rows/s", goal=Goal(at_least=bound),
                detail=f"{detail}; {how}",
            )  # fmt: skip
            yield explained(figure, here)
        cpu = [drain.cpu for drain in drains[name]]
        peak = max(drain.peak_mb for drain in drains[name])
        for other, peers in (
            ("a relay by hand", [drain.cpu for drain in drains[_BY_HAND]]),
            ("Debezium", [each.cpu for each in debezium]),
        ):
            yield against(
                f"{name}: CPU of {ROWS} rows against {other}",
                cpu, peers, unit="CPU-s", goal=Goal(),
                detail=f"{detail}; its start included; at most {peak:.0f} MB resident",
            )  # fmt: skip
    yield from latency_figures(place, [each.latency for each in debezium])


def latency_figures(place: Place, debezium: Sequence[Latency]) -> Iterator[Figure]:
    """Measure single events, a few milliseconds apart."""
    kinds = ("wal", "lease")
    sides: dict[str, Callable[[], Latency]] = {"floor": partial(produced, place)}
    sides |= {kind: partial(relayed, place, kind) for kind in kinds}
    found = contest(sides, ROUNDS)
    alone = published(place)
    for kind in kinds:
        why = partial(relay_profile, place, kind)
        for which in ("p50", "p99"):
            value = attrgetter(which)
            ours, floor, peer = (
                [value(each) for each in side] for side in (found[kind], found["floor"], debezium)
            )
            detail = (
                f"{EVENTS} events of 300 bytes, 4 ms apart, {ROUNDS} rounds; counted from the "
                "commit's return (floor: from the produce call, same bytes, headers and consumer)"
            )
            legs = f"; our sink alone, without database and relay: {value(alone):.2f} ms"
            name = f"{kind}: commit → consumed {which}"
            low = against(
                f"{name} against the raw produce floor",
                ours, floor, unit="ms", goal=Goal(at_most=1.5), detail=detail + legs,
            )  # fmt: skip
            yield told(low, why)
            other = against(
                f"{name} against Debezium",
                ours, peer, unit="ms", goal=Goal(at_most=0.15),
                detail=f"{detail}; Debezium with poll.interval.ms=5, after a backlog",
            )  # fmt: skip
            yield told(other, why)


class Null:
    """A sink that takes everything at once."""

    caps = Caps(settle=Settle.INDIVIDUAL, ordering=Ordering.KEY)

    def __init__(self) -> None:
        self.taken = 0

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Take *messages*."""
        self.taken += len(messages)
        return [Published()] * len(messages)

    def close(self) -> None:
        """Nothing to release."""


class NullPlace:
    """The WAL engine alone, and psycopg on the same rows."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._engine = place.engine

    def from_table(self) -> float:
        """Return the rate of a relay that starts with the backlog there and ends without."""
        fill(self._engine, "orders")
        figure = drained(Relay(WalEngine(self._engine, Null())), ROWS)
        self._place.empty()
        return figure

    def raw_table(self) -> float:
        """Return the rate of a bare read."""
        fill(self._engine, "orders")

        def read() -> None:
            with psycopg.connect(**arguments(self._engine.url)) as db:
                cursor = db.cursor(name="rows", binary=True)
                cursor.itersize = 2000
                cursor.execute("SELECT * FROM holdfast_outbox ORDER BY seq")
                for _ in cursor:
                    pass

        figure = rate(read, ROWS)
        self._place.empty()
        return figure

    def from_stream(self) -> float:
        """Return the rate of a relay that stands at the end of the log when it grows."""
        sink = Null()
        engine = WalEngine(self._engine, sink)
        while not engine.step().idle:
            pass
        fill(self._engine, "orders")

        def follow() -> None:
            while sink.taken < ROWS:
                engine.step()

        figure = rate(follow, ROWS)
        engine.close()
        assert sink.taken == ROWS
        self._place.empty()
        return figure

    def raw_stream(self) -> float:
        """Return the rate of a bare reader of the same stream."""
        engine = WalEngine(self._engine, Null())
        while not engine.step().idle:
            pass
        engine.close()
        fill(self._engine, "orders")
        name = text("SELECT slot_name FROM pg_replication_slots")
        with self._engine.connect() as db:
            slot = db.execute(name).scalar_one()
        connection = psycopg.connect(
            **arguments(self._engine.url), replication="database", autocommit=True
        )
        connection.execute(
            f"START_REPLICATION SLOT {slot} LOGICAL 0/0"
            " (proto_version '1', publication_names 'holdfast_outbox', binary 'true')"
        )

        def count() -> None:
            left, get = ROWS, connection.pgconn.get_copy_data
            while left:
                size, view = get(0)
                if view[0] == 0x77 and view[25] == 0x49:
                    left -= 1
                    bytes(view[25:size])

        figure = rate(count, ROWS)
        connection.close()
        wait_until(lambda: self._is_free(slot), "the slot is free")
        self._place.empty()
        return figure

    def _is_free(self, slot: str) -> bool:
        query = text("SELECT NOT active FROM pg_replication_slots WHERE slot_name = :s")
        with self._engine.connect() as db:
            return bool(db.execute(query, {"s": slot}).scalar())
