"""The second pair of eyes: a large plan goes when somebody else than its maker says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import select

from holdfast.dlq.replay.state import NotNow
from holdfast.dlq.schema import audit

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from holdfast.dlq.audit import Warrant
    from holdfast.dlq.replay.plan import Plan


def check_approver(
    db: Connection, plan: Plan, warrant: Warrant, *, shared_account: bool = False
) -> None:
    """Raise `NotNow` unless whoever acts by *warrant* may approve *plan*.

    Neither the maker's name nor the maker's account at the system may; with
    *shared_account* the names alone count.
    """
    if not plan.approval:
        raise NotNow(f"plan {plan.short} needs no approval")
    if plan.approved_by is not None:
        raise NotNow(f"plan {plan.short} was approved by {plan.approved_by}")
    if warrant.actor.strip().casefold() == plan.created_by.strip().casefold():
        raise NotNow(f"{plan.created_by} made plan {plan.short}: somebody else must approve it")
    if warrant.account and not shared_account and warrant.account == _maker(db, plan):
        raise NotNow(
            f"plan {plan.short} was made by the account {warrant.account}, which is yours: "
            "somebody else must approve it, or say --shared-account if several people work under it"
        )


def _maker(db: Connection, plan: Plan) -> str:
    """Return the account that made *plan*; empty where it was not noted."""
    made = (audit.c.action == "replay.plan") & (audit.c.subject == f"plan {plan.id}")
    detail = db.execute(select(audit.c.detail).where(made)).scalar()
    return "" if detail is None else str(msgspec.json.decode(detail).get("account", ""))
