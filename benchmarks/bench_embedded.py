"""The embedded brokers against raw sqlite3 batches of the same bytes."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from figures import Figure, Goal, compare, rate
from holdfast import Message
from holdfast.brokers import connect
from holdfast.cloudevents import to_wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.ports import Broker

COUNT, BATCH = 20_000, 500


def figures() -> Iterator[Figure]:
    """Measure publishing and consuming with settling, in memory and in a file."""
    messages = [
        Message.new("orders", b"x" * 300, key=f"key-{n % 997}", type="OrderPlaced", source="shop")
        for n in range(COUNT)
    ]
    for kind in ("sqlite", "memory"):
        yield compare(
            f"{kind}: publish",
            ours=lambda kind=kind: _run(kind, messages)[0],
            peer=lambda kind=kind: _raw(kind, messages)[0],
            unit="messages/s",
            goal=Goal(at_least=0.6),
            detail=f"{_DETAIL}; ours also makes the headers and finds the lane of each key, and "
            "inserts lane by lane, not at the table's end: that is two thirds of its time",
        )
        yield compare(
            f"{kind}: consume and accept",
            ours=lambda kind=kind: _run(kind, messages)[1],
            peer=lambda kind=kind: _raw(kind, messages)[1],
            unit="messages/s",
            goal=Goal(at_least=0.6),
            detail=_DETAIL,
        )


_DETAIL = (
    "300 bytes and CloudEvents headers, batches of 500, synchronous=FULL; raw: executemany of "
    "rows with packed headers, then SELECT of a batch, headers unpacked, each row acknowledged "
    "by DELETE in one transaction"
)


def _run(kind: str, messages: list[Message]) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        broker = connect("memory:" if kind == "memory" else f"sqlite:///{folder}/b.db")
        broker.create_topic("orders", partitions=4)
        return _publish(broker, messages), _consume(broker)


def _publish(broker: Broker, messages: list[Message]) -> float:
    sink = broker.sink()

    def work() -> None:
        for start in range(0, COUNT, BATCH):
            sink.publish(messages[start : start + BATCH])

    figure = rate(work, COUNT)
    sink.close()
    return figure


def _consume(broker: Broker) -> float:
    source = broker.source(["orders"], group="bench")

    def work() -> None:
        left = COUNT
        while left:
            batch = source.poll(BATCH, 1.0)
            source.accept(batch)
            left -= len(batch)

    figure = rate(work, COUNT)
    source.close()
    return figure


def _raw(kind: str, messages: list[Message]) -> tuple[float, float]:
    pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.Decoder().decode
    rows = [(m.key, to_wire(m), m.payload, 0.0) for m in messages]
    with tempfile.TemporaryDirectory() as folder:
        path = ":memory:" if kind == "memory" else str(Path(folder) / "raw.db")
        db = sqlite3.connect(path, isolation_level=None)
        db.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;"
            "CREATE TABLE message (id INTEGER PRIMARY KEY, key, headers, body, stored)"
        )

        def publish() -> None:
            for start in range(0, COUNT, BATCH):
                db.execute("BEGIN IMMEDIATE")
                db.executemany(
                    "INSERT INTO message (key, headers, body, stored) VALUES (?, ?, ?, ?)",
                    [(k, pack(h), b, t) for k, h, b, t in rows[start : start + BATCH]],
                )
                db.execute("COMMIT")

        def consume() -> None:
            at = 0
            while at < COUNT:
                found = db.execute(
                    "SELECT id, key, headers, body, stored FROM message WHERE id > ?"
                    " ORDER BY id LIMIT ?",
                    (at, BATCH),
                ).fetchall()
                settled = []
                for row in found:
                    unpack(row[2])
                    settled.append((row[0],))
                at = found[-1][0]
                db.execute("BEGIN IMMEDIATE")
                db.executemany("DELETE FROM message WHERE id = ?", settled)
                db.execute("COMMIT")

        figures = rate(publish, COUNT), rate(consume, COUNT)
        db.close()
        return figures
