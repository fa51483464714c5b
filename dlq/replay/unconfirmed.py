"""What was sent again and nobody has confirmed: how much, and for how long nothing moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.schema import item, plan
from holdfast.dlq.replay.state import WAITING

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection


@dataclass(slots=True, kw_only=True)
class Unconfirmed:
    """Asked now and then, it remembers since when each plan waits without any outcome."""

    clock: Clock = SYSTEM_CLOCK
    messages: int = 0
    seconds: float = 0.0
    _seen: dict[str, tuple[tuple[int, int], float]] = field(default_factory=dict)

    def sample(self, db: Connection) -> None:
        """Count what waits now, and for how long the longest waiting plan has not moved."""
        waiting = (
            select(plan.c.id, plan.c.sent, func.count())
            .join(item, item.c.plan_id == plan.c.id)
            .where(
                item.c.live.is_not(None), item.c.state.in_(WAITING), item.c.position < plan.c.sent
            )
            .group_by(plan.c.id, plan.c.sent)
        )
        now, before, self._seen = self.clock.monotonic(), self._seen, {}
        self.messages, self.seconds = 0, 0.0
        for plan_id, sent, count in db.execute(waiting):
            stand, since = before.get(plan_id, ((-1, -1), now))
            since = since if stand == (sent, count) else now
            self._seen[plan_id] = (sent, count), since
            self.messages += count
            self.seconds = max(self.seconds, now - since)
