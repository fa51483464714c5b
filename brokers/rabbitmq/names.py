"""What things are called on the broker, and with which arguments they are declared."""

from __future__ import annotations

from typing import Any, Final

from holdfast.errors import ConfigurationError

_LONGEST = 255  # bytes of any name in AMQP 0-9-1

LANE: Final[dict[str, Any]] = {
    "x-queue-type": "quorum",
    "x-single-active-consumer": True,
    # From 4.0 on a quorum queue drops what came back 20 times unless it is told otherwise, and
    # versions disagree on how to say "never": a limit that is never reached suits them all.
    "x-delivery-limit": 2**31 - 1,
}
"""The queue that holds what a group has yet to settle of one lane."""

TALLY: Final[dict[str, Any]] = {"x-expires": 3_600_000}
"""A queue that never holds a message: how many consumers it has is the information."""


def delay_arguments(milliseconds: int) -> dict[str, Any]:
    """Return the arguments of a queue in which messages wait for *milliseconds*.

    At-least-once: a message leaves only once the lane's queue has it.
    """
    return {
        "x-queue-type": "quorum",
        "x-message-ttl": milliseconds,
        "x-dead-letter-exchange": "",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }


def lanes_arguments(lanes: int) -> dict[str, Any]:
    """Return the arguments of the queue that says how many *lanes* a topic has."""
    return {"x-max-length": lanes}


def lanes(topic: str) -> str:
    """Return the name of the queue that says how many lanes *topic* has."""
    return _checked(f"{_safe(topic)}:lanes")


def others(topic: str) -> str:
    """Return the name of the exchange for what reaches *topic* under a key that is no lane."""
    return _checked(f"{_safe(topic)}:others")


def topic_arguments(topic: str) -> dict[str, Any]:
    """Return the arguments of the exchange of *topic*."""
    return {"alternate-exchange": others(topic)}


def lane_queue(topic: str, group: str, partition: int) -> str:
    """Return the name of *group*'s queue for one lane of *topic*."""
    return _checked(f"{_safe(topic)}:{_safe(group)}:{partition}")


def owner(topic: str, group: str, partition: int) -> str:
    """Return the name of the tally that whoever owns the lane is on."""
    return _checked(f"{lane_queue(topic, group, partition)}:owner")


def members(topic: str, group: str) -> str:
    """Return the name of the tally of all members."""
    return _checked(f"{_safe(topic)}:{_safe(group)}:members")


def hungry(topic: str, group: str) -> str:
    """Return the name of the tally of members that have less than their share."""
    return _checked(f"{_safe(topic)}:{_safe(group)}:hungry")


def ready(topic: str, group: str) -> str:
    """Return the name of the queue that says that *group*'s queues are bound, and old enough."""
    return _checked(f"{_safe(topic)}:{_safe(group)}:ready")


def delay(milliseconds: int) -> str:
    """Return the name of the exchange and the queue of one delay."""
    return f":delay:{milliseconds}"


def _safe(name: str) -> str:
    return name.replace("%", "%25").replace(":", "%3A")


def _checked(name: str) -> str:
    if len(name.encode("utf-8", "replace")) > _LONGEST:
        raise ConfigurationError(
            f"{name[:60]!r}… is longer than {_LONGEST} bytes, the most that AMQP allows: "
            "shorten the topic or the group"
        )
    return name
