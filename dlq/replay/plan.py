"""A replay plan as a value: what was frozen, how it is to be sent, how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.dlq.replay.memory import Memory  # noqa: TC001 - a field
from holdfast.dlq.replay.rate import Rate
from holdfast.dlq.replay.state import ItemState, PlanState
from holdfast.dlq.replay.steps import Policy
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a plan is to be sent, decided when it is made."""

    policy: Policy = Policy()  # noqa: RUF009 - frozen
    rate: Rate = Rate()  # noqa: RUF009 - frozen
    to_topic: str | None = None
    """None: the private topic of the group; `shared`: back to the original topic, where
    other groups skip it; else a topic of this name."""
    approve_above: int = 10_000
    """Larger plans wait for the approval of somebody else."""
    transform: str | None = None
    """`module:function@version` that made the revisions to send."""
    memory: Memory | None = None
    """How long consumers remember what they handled; None: nobody asked."""
    beyond_window: bool = False
    """Whether also what is older than that is sent; else it is held."""

    def __post_init__(self) -> None:
        if self.to_topic is not None and not self.to_topic.strip():
            raise ConfigurationError("--to-topic is empty: name a topic, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One row of the plans."""

    id: str
    state: PlanState
    created_at: float
    created_by: str
    reason: str
    total: int
    hash: str
    high_water: int
    selection: dict[str, Any]
    policy: Policy
    rate: Rate
    target: str | None
    fingerprints: tuple[str, ...]
    transform: str | None
    approval: int
    approved_by: str | None
    approved_at: float | None
    sent: int
    forgiven: int
    stopped_because: str | None
    owner: str | None
    epoch: int
    until: float
    ended_at: float | None

    @classmethod
    def of(cls, row: Any) -> Plan:
        """Return the plan in *row*."""
        return cls(
            **{
                **row,
                "state": PlanState(row["state"]),
                "selection": msgspec.json.decode(row["selection"]),
                "policy": msgspec.json.decode(row["policy"], type=Policy),
                "rate": Rate(row["rate"]),
                "fingerprints": tuple(msgspec.json.decode(row["fingerprints"])),
            }
        )

    @property
    def short(self) -> str:
        """The end of the id, by which people name it: its start is only the time."""
        return self.id[-8:]

    @property
    def waits_for_approval(self) -> bool:
        """Whether somebody else must look at it first."""
        return bool(self.approval) and self.approved_by is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The items of a plan by what became of them."""

    total: int
    counts: Mapping[ItemState, int]

    def __getitem__(self, state: ItemState) -> int:
        return self.counts.get(state, 0)

    @property
    def aside(self) -> int:
        """Items that are not to be sent."""
        return sum(self[s] for s in (ItemState.HELD, ItemState.PARKED, ItemState.SKIPPED))

    @property
    def settled(self) -> int:
        """Items with an outcome, or without need of one."""
        return self[ItemState.CONFIRMED] + self[ItemState.FAILED_AGAIN] + self.aside
