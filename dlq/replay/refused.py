"""Messages of a plan that cannot be sent: set aside, with what follows of their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select, update

from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.state import WAITING, ItemState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection

    from holdfast.clock import Clock
    from holdfast.dlq.replay.letters import Outgoing


def set_aside(
    db: Connection, plan_id: str, refused: Sequence[tuple[Outgoing, str]], clock: Clock
) -> None:
    """Skip *refused* with the reasons; hold what the plan has of their keys after them."""
    now = clock.now().timestamp()
    for one, words in refused:
        own = (item.c.plan_id == plan_id) & (item.c.position == one.position)
        skipped = {
            "state": ItemState.SKIPPED,
            "live": None,
            "note": words[:2000],
            "settled_at": now,
        }
        db.execute(update(item).where(own).values(**skipped))
        key = db.execute(select(item.c.key_hash).where(own)).scalar_one()
        note = f"an earlier message of its key was refused ({one.dlq_id})"
        db.execute(
            update(item)
            .where(
                item.c.plan_id == plan_id,
                item.c.key_hash == key,
                item.c.position > one.position,
                item.c.state.in_(WAITING),
            )
            .values(state=ItemState.HELD, live=None, note=note, settled_at=now)
        )
