"""Which dead letters are meant: whole groups, named ones, or all that a filter matches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK
from holdfast.columns import cut
from holdfast.dlq.rows import PENDING, key_hash
from holdfast.dlq.schema import message
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Conditions that all hold; an empty selection is refused where something is done."""

    groups: tuple[str, ...] = ()
    """Full ids of failure groups."""
    dlq_ids: tuple[str, ...] = ()
    consumer_group: str | None = None
    topic: str | None = None
    kind: str | None = None
    """The class: poison, transient, dependency, timeout or unknown."""
    error: str | None = None
    """The exception's type, whole or its last part."""
    tenant: str | None = None
    version: str | None = None
    key: str | None = None
    correlation: str | None = None
    """The correlation id, by which what belongs to one business case is found."""
    since: float | None = None
    until: float | None = None
    due: bool = False
    """Only what triage has put down for a retry that is due by now."""
    state: str | None = PENDING

    def __post_init__(self) -> None:
        if self.since is not None and self.until is not None and self.since > self.until:
            raise ConfigurationError("the selection ends before it begins: swap since and until")

    @property
    def is_empty(self) -> bool:
        """Whether everything is meant."""
        return not any(value for name, value in asdict(self).items() if name != "state")

    def where(self) -> list[ColumnElement[bool]]:
        """Return the conditions on the table of dead letters."""
        columns = message.c
        equal = (
            (columns.consumer_group, self.consumer_group),
            (columns.topic, self.topic),
            (columns["class"], self.kind),
            (columns.tenant, self.tenant),
            (columns.service_version, self.version),
            (columns.state, self.state),
            (columns.correlation_id, cut(self.correlation)),
            (columns.key_hash, None if self.key is None else key_hash(self.key.encode())),
        )
        found = [column == value for column, value in equal if value is not None]
        if self.groups:
            found.append(columns.group_id.in_(self.groups))
        if self.dlq_ids:
            found.append(columns.dlq_id.in_(self.dlq_ids))
        if self.error is not None:
            tail = columns.error_type.endswith(f".{self.error}", autoescape=True)
            found.append((columns.error_type == self.error) | tail)
        if self.due:
            found.append(columns.due_at <= SYSTEM_CLOCK.now().timestamp())
        if self.since is not None:
            found.append(columns.last_failed_at >= self.since)
        if self.until is not None:
            found.append(columns.last_failed_at < self.until)
        return found

    def described(self) -> dict[str, Any]:
        """Return what was asked for, for the plan and the audit trail."""
        return {name: value for name, value in asdict(self).items() if value}
