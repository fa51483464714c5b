"""Where things stand in the chain: what waits where, and where each missing order is."""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select, text

from holdfast.brokers import connect
from holdfast.consumer.schema import held, held_key
from holdfast.db.engine import open_database
from holdfast.dlq.store.schema import message as letter
from holdfast.outbox.schema import delayed, outbox, parked
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sqlalchemy.engine import Engine

    from tests.chain.verdict import Observed

_OPEN = letter.c.state == "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A consumer group, the database of its effects, and the table that holds them."""

    group: str
    topic: str
    broker: str
    database: str
    effects: str


class Places:
    """Every place of the chain where a message can be."""

    def __init__(self, shop: str, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self._shop = open_database(shop, pool_pre_ping=True)  # servers come and go here
        self._engines = {
            stage.group: open_database(stage.database, pool_pre_ping=True) for stage in stages
        }

    def close(self) -> None:
        """Let go of the databases."""
        for engine in self._databases().values():
            engine.dispose()

    def committed(self) -> list[tuple[str, str]]:
        """Return every order that was committed, as (customer, id), in the customer's order."""
        wanted = text("SELECT customer, order_id FROM orders ORDER BY customer, number")
        return _pairs(self._shop, wanted)

    def effects(self, stage: Stage) -> list[tuple[str, str]]:
        """Return the effects of *stage* as (customer, id), in the order they happened."""
        wanted = text(f"SELECT customer, order_id FROM {stage.effects} ORDER BY seq")  # noqa: S608
        return _pairs(self._engines[stage.group], wanted)

    def open_letters(self, stage: Stage) -> int:
        """Return how many dead letters of *stage* wait for somebody."""
        return _count(self._engines[stage.group], select(func.count()).where(_OPEN))

    def standing(self) -> dict[str, int]:
        """Return what stands where: the databases first, then what the commands say.

        The commands take their time, so they are asked only when the databases are clean.
        """
        found = self._in_databases()
        return found if any(found.values()) else found | self._by_commands()

    def _in_databases(self) -> dict[str, int]:
        found: dict[str, int] = {}
        wanted = len(self.committed())
        for name, engine in self._databases().items():
            for table in (outbox, delayed, parked):
                if name != "shipping":
                    rows = select(func.count()).select_from(table)
                    found[f"{name}, {table.name}"] = _count(engine, rows)
        for stage in self.stages:
            engine = self._engines[stage.group]
            done = text(f"SELECT count(DISTINCT order_id) FROM {stage.effects}")  # noqa: S608
            found[f"{stage.group}, orders without effect"] = wanted - _count(engine, done)
            for table in (held, held_key):
                rows = select(func.count()).select_from(table)
                found[f"{stage.group}, {table.name}"] = _count(engine, rows)
            found[f"{stage.group}, open dead letters"] = self.open_letters(stage)
        return found

    def _by_commands(self) -> dict[str, int]:
        """Ask what an operator asks: lag, keys, parked events, letters, messages in trouble."""
        found: dict[str, int] = {}
        for stage in self.stages:
            found |= self._of_stage(stage)
        return found | self._of_outbox("shop") | self._of_outbox("billing")

    def _of_stage(self, stage: Stage) -> dict[str, int]:
        at = ("--database", stage.database)
        lanes = _said(
            "lag", "--topic", stage.topic, "--broker", stage.broker, "--group", stage.group
        )
        letters = _said("dlq", "stats", *at)
        marks = _said("inbox", "stats", *at)
        found = {
            "lag": sum(lane["lag"] for lane in lanes),
            "held keys": len(_said("keys", "list", *at)),
            "open plans": len(_said("dlq", "plans", "list", "--open", *at)),
            "pending letters": letters["pending"],
            "parked letters": letters["parked"],
            **{what: marks[what] for what in ("in_flight", "failing", "suspects", "ahead")},
        }
        return {f"{stage.group}, {what}": count for what, count in found.items()}

    def _of_outbox(self, name: str) -> dict[str, int]:
        url = self._databases()[name].url.render_as_string(hide_password=False)
        keys = _said("outbox", "parked", "list", "--database", url)
        return {f"{name}, parked keys": len(keys)}

    def where(self, observed: Observed, most: int = 12) -> str:
        """Say of each order that lacks an effect where it is now."""
        lines: list[str] = []
        places = self._places()
        for stage, effects in observed.effects.items():
            have = set(effects)
            missing = [order for order in observed.committed if order not in have]
            lines += [
                f"{stage} lacks {key} {order}: {', '.join(places[order]) or 'nowhere'}"
                for key, order in missing[:most]
            ]
            if missing[most:]:
                lines.append(f"{stage} lacks {len(missing) - most} more")
        return "\n".join(lines)

    def _places(self) -> Mapping[str, list[str]]:
        """Return, by order, every place that holds it."""
        places: defaultdict[str, list[str]] = defaultdict(list)
        for name, engine in self._databases().items():
            for place, body in _bodies(engine):
                if order := _order(body):
                    places[order].append(f"{name}: {place}")
        for stage in self.stages:
            for place, body in _stored(stage):
                if order := _order(body):
                    places[order].append(place)
            for _, order in self.effects(stage):
                places[order].append(f"handled by {stage.group}")
        return places

    def _databases(self) -> dict[str, Engine]:
        return {"shop": self._shop, **self._engines}


def _pairs(engine: Engine, wanted: Any) -> list[tuple[str, str]]:
    with engine.connect() as db:
        return [(row[0], row[1]) for row in db.execute(wanted)]


def _count(engine: Engine, wanted: Any) -> int:
    with engine.connect() as db:
        return int(db.execute(wanted).scalar_one())


def _said(*args: str) -> Any:
    """Return what a command says to scripts; within this process, which is a second quicker."""
    with warnings.catch_warnings():
        # A command leaves its connections to the end of its process.
        warnings.simplefilter("ignore", ResourceWarning)
        done = shell(*args, "--json")
        gc.collect()
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(args)} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def _order(body: bytes | None) -> str | None:
    try:
        return json.loads(body or b"{}").get("order_id")
    except ValueError:
        return None


def _bodies(engine: Engine) -> Iterator[tuple[str, bytes | None]]:
    """Yield the payloads that a database holds, each with its table."""
    with engine.connect() as db:
        have = set(db.dialect.get_table_names(db))
        for table, column in (
            (outbox, outbox.c.payload),
            (parked, parked.c.payload),
            (held, held.c.body),
        ):
            if table.name in have:
                for body in db.execute(select(column)).scalars():
                    yield table.name, body
        if letter.name in have:
            for state, body in db.execute(select(letter.c.state, letter.c.payload)):
                yield f"dead letter, {state}", body


def _stored(stage: Stage) -> Iterable[tuple[str, bytes | None]]:
    """Read a topic again from its beginning, where the broker keeps what was read."""
    found: list[tuple[str, bytes | None]] = []
    with closing(connect(stage.broker)) as broker:
        if not broker.caps.replay:
            return [(f"(what {stage.topic} stored cannot be read again)", None)]
        with closing(broker.source([stage.topic], group=f"look-{time.time_ns()}")) as source:
            quiet, until = 0, time.monotonic() + 30
            while quiet < 3 and time.monotonic() < until:
                batch = source.poll(1000, 0.5)
                found += [(f"stored at {one.lane}@{one.position}", one.body) for one in batch]
                source.accept(batch)
                quiet = 0 if batch or not source.assignment() else quiet + 1
    return found
