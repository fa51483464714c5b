"""What the analytics answer: the same values whichever engine ran."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import ConfigurationError

HOUR = 3600
MOST_GROUPS = 20_000
"""The largest groups are listed and compared; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which dead letters are looked at; nothing given means all."""

    topic: str | None = None
    consumer_group: str | None = None
    tenant: str | None = None
    state: str | None = None
    since: float | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ConfigurationError("--since is not before --until: nothing lies between them")

    @property
    def equal(self) -> dict[str, str]:
        """The fields that must have a value, and which."""
        names = ("topic", "consumer_group", "tenant", "state")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


EVERYTHING = Scope()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Which engine answered, why that one, over how much and how long."""

    engine: str
    why: str
    records: int
    seconds: float
    outliers: int = 0
    """Letters whose host had a wrong clock: the moment of storing stands for theirs."""
    undated: int = 0
    """Letters of which no moment can be believed: counted, but in no series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriageGroup:
    """One problem, as found in the records; keys and tenants are approximate."""

    group_id: str
    count: int
    first: float | None
    last: float | None
    keys: int
    tenants: int
    sample: str
    fingerprint: str
    by: str
    title: str
    error_type: str
    error_class: str
    stage: str
    topic: str
    consumer_group: str
    handler: str
    calls: str = ""
    cluster: str | None = None
    """The cluster that it is in; groups of one cluster are probably one cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCluster:
    """Groups that look like one cause."""

    cluster: str
    groups: int
    count: int
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TriageResult:
    """The problems, largest first."""

    ran: Ran
    groups: tuple[TriageGroup, ...]
    groups_total: int
    unlisted: int = 0
    """Records in groups that are too small to be listed."""
    clusters: tuple[GroupCluster, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """Hours in which a group failed far more often than usual."""

    group_id: str
    start: float
    hours: int
    observed: int
    expected: float
    level: str
    """warning or critical."""

    @property
    def ratio(self) -> float:
        """How many times the usual it was."""
        return self.observed / max(self.expected, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A version of a service going live for a consumer group."""

    consumer_group: str
    version: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployEffect:
    """How often a group failed before and after a version went live, by the median day."""

    group_id: str
    consumer_group: str
    version: str
    at: float
    before: float
    after: float
    verdict: str
    """worse or better."""

    @property
    def ratio(self) -> float:
        """The rate after, in rates before."""
        return self.after / max(self.before, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupName:
    """How a group is told to people."""

    group_id: str
    title: str
    consumer_group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendsResult:
    """Failures by hour, the unusual times, and the deploys that changed something."""

    ran: Ran
    first_hour: int
    """Hours since 1970; `hourly` begins there."""
    hourly: tuple[int, ...]
    usual: tuple[float, ...]
    anomalies: tuple[Anomaly, ...]
    effects: tuple[DeployEffect, ...]
    named: tuple[GroupName, ...]
    """The groups that anomalies and effects speak of."""
    left_out: int = 0
    """Anomalies and effects beyond what is listed, the smallest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRadius:
    """Whom one group hits; entities are counted exactly, each once."""

    group_id: str
    title: str
    consumer_group: str
    records: int
    entities: int
    tenants: int
    value: float | None
    """The value of the entities hit, from the dimension table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRadius:
    """How one tenant is hit."""

    tenant: str
    records: int
    entities: int
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlastResult:
    """Whom the failures hit, in all, by group and by tenant."""

    ran: Ran
    entities: int
    tenants: int
    value: float | None
    unknown_entities: int
    """Entities that the dimension table does not have."""
    without_entity: int
    """Records that name no entity and have no key."""
    groups: tuple[GroupRadius, ...]
    by_tenant: tuple[TenantRadius, ...]
    groups_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonPattern:
    """A field of the failed payloads of one group that sets them apart."""

    group_id: str
    title: str
    consumer_group: str
    path: str
    what: str
    """value, or missing."""
    value: str
    failed: float
    """The share of the group's payloads."""
    healthy: float
    """The share of the healthy payloads."""
    lift: float
    support: int
    """How many failed payloads of the group have it."""

    @property
    def told(self) -> str:
        """The pattern in words."""
        if self.what == "missing":
            return f"{self.path} is missing"
        return f"{self.path} = {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonResult:
    """The patterns, strongest first within the largest groups."""

    ran: Ran
    healthy: int
    patterns: tuple[PoisonPattern, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldUsage:
    """A type, a version of it, or a field: how often, since when, last when."""

    type: str
    version: str
    path: str
    """Empty for the version itself."""
    kind: str
    """`event`, or the JSON type of the field."""
    count: int
    share: float
    """Of the events of that type and version."""
    first: float | None
    last: float | None
    unused: bool
    """Not seen in the last days that were asked about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageResult:
    """What occurs, by type and version."""

    ran: Ran
    fields: tuple[FieldUsage, ...]
    unused_days: float
