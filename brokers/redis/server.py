"""What a server says of itself, and what it must be for messages to be safe on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.brokers.redis.link import log
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.brokers.redis.link import Link


def facts(link: Link) -> dict[str, str]:
    """Return what INFO tells; nothing where this user may not ask."""
    link.connect()
    try:
        answer = link.call("INFO")
    except ConfigurationError:
        return {}
    lines = (line.partition(b":") for line in answer.splitlines())
    return {name.decode(): value.decode() for name, separator, value in lines if separator}


def uptime(link: Link) -> float | None:
    """Return for how many seconds the server has been running; None if it does not tell."""
    seconds = facts(link).get("uptime_in_seconds")
    return None if seconds is None else float(seconds)


def check(link: Link) -> None:
    """Refuse a server that may delete messages by itself; warn of one that forgets them."""
    known = facts(link)
    policy = known.get("maxmemory_policy", "")
    if policy.startswith("allkeys") and known.get("maxmemory") != "0":
        raise ConfigurationError(
            f"{link.name} deletes any key when its memory is full, messages included "
            f"(maxmemory-policy {policy}): set it to noeviction"
        )
    if known.get("cluster_enabled") == "1":
        raise ConfigurationError(f"{link.name} is a Redis Cluster, which is not supported")
    if known.get("aof_enabled") == "0":
        log.warning(
            "%s keeps no append-only file: a crash loses messages; set appendonly yes", link.name
        )
