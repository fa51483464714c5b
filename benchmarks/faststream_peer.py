"""The same handler on FastStream: dedup and effect in one transaction, acknowledged after it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
from consuming import ENTER, SEEN, values
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker, KafkaMessage

if TYPE_CHECKING:
    from consuming import Place, Stopwatch


def run(place: Place, watch: Stopwatch) -> None:
    """Handle messages, one transaction each, until *watch* has seen them all."""
    asyncio.run(_run(place, watch))


async def _run(place: Place, watch: Stopwatch) -> None:
    broker = KafkaBroker(place.kafka, logger=None)
    app = FastStream(broker, logger=None)
    dsn = place.database.replace("postgresql+psycopg", "postgresql")
    async with await psycopg.AsyncConnection.connect(dsn) as db:

        @broker.subscriber(
            place.topic,
            group_id=place.group,
            auto_offset_reset="earliest",
            ack_policy=AckPolicy.NACK_ON_ERROR,  # by default it acknowledges before the handler
        )
        async def handle(order: dict[str, Any], message: KafkaMessage) -> None:
            async with db.transaction():
                found = await db.execute(SEEN, [[message.headers["ce_id"]]])
                if await found.fetchone() is not None:
                    await db.execute(ENTER, values(order))
            if watch.handled():
                watch.end()
                app.exit()

        await app.run()
