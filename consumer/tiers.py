"""Retry tiers: topics in which messages wait on brokers that cannot delay them themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import Self

    from holdfast.headers import Pair
    from holdfast.message import Message

TIERS: Final = {"5s": 5.0, "1m": 60.0, "10m": 600.0, "1h": 3600.0}
"""The tiers by name, and the longest wait of each; the last one also takes what is longer."""

_DUE, _ATTEMPT, _ID, _SINCE = _HEADERS = (
    "x-retry-due",
    "x-retry-attempt",
    "x-retry-id",
    "x-retry-since",
)


def retry_topic(topic: str, group: str, tier: str) -> str:
    """Return the name of the topic in which retries of *topic* by *group* wait."""
    return f"{topic}.{group}.retry.{tier}"


def tier_of(delay: float) -> str:
    """Return the tier for a wait of *delay* seconds."""
    return next((name for name, longest in TIERS.items() if delay <= longest), "1h")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What travels with a message that waits for its retry."""

    due: float
    """When it is to be tried again, in POSIX seconds."""
    attempt: int
    """Which attempt that will be: the counter goes on where it stood."""
    since: float | None = None
    """When it failed first, in POSIX seconds: a deadline bounds all its waits together."""

    def stamped(self, message: Message, topic: str) -> Message:
        """Return *message* with this ticket, on its way to *topic*.

        It travels under an id of its own for each attempt, and its id in the ticket: a broker
        that drops what was published twice would else drop the second wait, and the message.
        """
        own = [
            (_DUE, f"{self.due:.3f}".encode()),
            (_ATTEMPT, str(self.attempt).encode()),
            (_ID, message.id.encode()),
            *([] if self.since is None else [(_SINCE, f"{self.since:.3f}".encode())]),
        ]
        headers = type(message.headers)([*_bare(message), *own])
        return message.with_(topic=topic, headers=headers, id=f"{message.id}~{self.attempt}")

    @classmethod
    def taken_from(cls, message: Message) -> tuple[Self, Message]:
        """Return the ticket and *message* as it was; an unreadable one is due now."""
        found = dict(message.headers)
        try:
            since = found.get(_SINCE)
            ticket = cls(
                float(found[_DUE] or b""),
                max(1, int(found[_ATTEMPT] or b"")),
                None if since is None else float(since),
            )
            own_id = (found[_ID] or b"").decode()
        except (KeyError, ValueError):
            ticket, own_id = cls(0.0, 1), ""
        headers = type(message.headers)(_bare(message))
        return ticket, message.with_(headers=headers, id=own_id or message.id)


def _bare(message: Message) -> list[Pair]:
    return [pair for pair in message.headers if pair[0] not in _HEADERS]
