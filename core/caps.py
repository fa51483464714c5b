"""What a broker can do: declared by its adapter, proven by the conformance kit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Settle(Enum):
    """How messages are acknowledged."""

    CUMULATIVE = "cumulative"
    INDIVIDUAL = "individual"


class Counts(Enum):
    """What the broker's own delivery counter counts."""

    NONE = "none"
    DELIVERY = "delivery"
    FAILURE = "failure"


class Ordering(Enum):
    """Within what the broker hands messages out in order."""

    PARTITION = "partition"
    KEY = "key"
    NONE = "none"


class Pause(Enum):
    """What can be paused without leaving the group."""

    LANE = "lane"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The capabilities of one broker through one adapter.

    What is not declared here raises `Unsupported`; it is never pretended.
    """

    settle: Settle
    """Cumulative brokers get the contiguous watermark, so `accept` is safe in any order."""
    ordering: Ordering
    counts: Counts = Counts.NONE
    """Deliveries carry `count`, from 1. FAILURE counts blamed releases and crashes only."""
    blameless_release: bool = False
    """`release(blame=False)` leaves the native count as it was."""
    release_keeps_order: bool = False
    """After a release, later messages of that key not yet handed out wait behind it."""
    delay: float | None = None
    """Longest native delay of a release, in seconds; None: `release(delay=…)` is refused."""
    lease: float | None = None
    """Seconds until an unsettled delivery comes again; None: it stays with its owner."""
    native_dlq: bool = False
    """`reject` moves the message to a dead-letter place of the broker's own."""
    pause: Pause = Pause.NONE
    transactions: bool = False
    """A batch can be published atomically: all that can be stored of it, or nothing.

    Kafka does so for sinks made with `transactional_id=`, where one refused message takes
    the others back, too; the embedded brokers and Redis do so for every batch.
    """
    fencing: bool = False
    """Whether a sink opened under the same transactional id shuts its elder out."""
    publish_dedup: float | None = None
    """Seconds within which a message id published twice is stored once."""
    max_message: int | None = None
    """Bytes of payload, key and headers that the adapter takes; None: no limit known."""
    max_headers: int | None = None
    """Bytes of headers that the adapter takes; None: bounded by `max_message` alone."""
    replay: bool = False
    """`seek` moves a group to an offset or a time."""
    prune: bool = False
    """`prune` deletes what every group has settled; the others end messages by settings of
    their own, or with their settling."""
    late_groups: bool = False
    """A new group also gets what was published before it came, as far as that is still kept.

    Else it gets what is published once `create_group`, or its first source, has returned: make
    groups before the first message is published.
    """
