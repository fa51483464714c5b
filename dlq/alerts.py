"""Alerts: each new or returned problem that nobody knows is told once, at least."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sqlalchemy import or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.groups import Group, Groups, Which
from holdfast.dlq.rows import PENDING
from holdfast.dlq.schema import group, message
from holdfast.dlq.siblings import look_around
from holdfast.dlq.tally import fold
from holdfast.dlq.transactions import committed
from holdfast.dlq.triage import Verdict
from holdfast.dlq.verdicts import verdicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.hooks import Hook

log = logging.getLogger("holdfast.dlq")
_CLAIM_SECONDS = 120.0
_LOUD = Which(states=("new", "regressed"))


class Alerts:
    """Tells hooks about problems that wait for a person; acknowledged and muted ones are quiet.

    What is tried again by itself is told once it has used up its retries. A group is claimed
    for two minutes while it is told, so several processes do not all tell it; who dies in
    between leaves it to the next. A hook that fails is asked again, the others are not.
    """

    def __init__(
        self, engine: Engine, hooks: Sequence[Hook], *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._engine = engine
        self._hooks = hooks
        self._clock = clock
        self._taken: dict[str, set[int]] = {}
        """The hooks that took the alert of a group while another one did not."""

    def run_once(self) -> int:
        """Tell what is to be told now; return how many groups were told to every hook."""
        fold(self._engine, clock=self._clock)
        told = 0
        groups = Groups(self._engine, clock=self._clock)
        # All of them: among a hundred large problems that are known, a small new one is news.
        loud = {one.group_id for one in groups.figures(_LOUD, limit=None)}
        for name in self._untold():
            if name in loud and self._claim(name) and self._tell(groups.find(name)):
                told += 1
        return told

    def _untold(self) -> list[str]:
        # Any of its messages: the first may be closed, and others have used up their retries.
        alarming = select(message.c.seq).where(
            message.c.group_id == group.c.group_id,
            message.c.state == PENDING,
            message.c.verdict != Verdict.RETRY.value,
        )
        query = (
            select(group.c.group_id)
            .where(_is_free(self._clock.now().timestamp()), alarming.exists())
            .order_by(group.c.first_seen)
        )
        with self._engine.connect() as db:
            return list(db.execute(query).scalars())

    def _claim(self, name: str) -> bool:
        now = self._clock.now().timestamp()
        return self._mark(name, -(now + _CLAIM_SECONDS), _is_free(now))

    def _tell(self, one: Group) -> bool:
        alert = alert_of(self._engine, one)
        taken = self._taken.setdefault(one.group_id, set())
        for number, hook in enumerate(self._hooks):
            if number in taken:
                continue
            try:
                hook.tell(alert)
                taken.add(number)
            except Exception as error:  # noqa: BLE001 - one hook's trouble is not the others'
                log.warning("group %s is told again later: %s", one.group_id, error)
        if len(taken) < len(self._hooks):
            self._mark(one.group_id, None)
            return False
        del self._taken[one.group_id]
        return self._mark(one.group_id, self._clock.now().timestamp())

    def _mark(self, name: str, value: float | None, *conditions: Any) -> bool:
        def work(db: Connection) -> bool:
            where = (group.c.group_id == name, *conditions)
            return db.execute(update(group).where(*where).values(alerted_at=value)).rowcount == 1

        return committed(self._engine, work, clock=self._clock)


def alert_of(engine: Engine, one: Group) -> dict[str, Any]:
    """Return what hooks are told: the problem, never a payload."""
    with engine.connect() as db:
        around = look_around(db, one.group_id)
        judged = verdicts(db, one.group_id)
    return {
        "group": one.group_id,
        "state": one.state,
        "title": one.title,
        "class": one.kind,
        "verdicts": list(judged),
        "topic": one.topic,
        "consumer_group": one.consumer_group,
        "handler": one.handler,
        "pending": one.pending,
        "keys": one.keys_text,
        "tenants": one.tenants_text,
        "versions": one.versions,
        "first_seen": one.first_seen,
        "last_seen": one.last_seen,
        "looks_like": around.verdict,
        "why": around.why,
        "see": f"holdfast dlq show {one.group_id}",
    }


def _is_free(now: float) -> Any:
    """Return the condition that a group is untold, or its claim is over."""
    claimed = group.c.alerted_at
    return or_(claimed.is_(None), (claimed < 0) & (claimed > -now))
