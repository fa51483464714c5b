"""The names of the keys in Redis.

    hf:topics                       hash    topic -> number of lanes
    hf:{orders:0}                   stream  lane 0 of topic `orders`
    hf:{orders:0}:billing:state     hash    `epoch`, and `owner` = "<epoch> <member>"
    hf:{orders:0}:billing:lease     string  the owner, gone when it stayed silent for a session
    hf:{orders:0}:billing:due       zset    pending entries not handed out now, by due time in ms
    hf:{billing}:members            hash    member -> its topics, as a JSON list
    hf:{billing}:alive:<member>     string  gone when the member stayed silent for a session
    hf:{billing}:bell               stream  one entry, replaced whenever the group changes

The consumer group in Redis has the group's name, and `holdfast` is its one consumer: who may
read a lane is decided by the lane's owner, not by Redis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from holdfast.ports import Lane

_TAG = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})  # a brace would end the hash tag


class LaneKeys(NamedTuple):
    """The keys of one lane for one group; they share a hash tag."""

    stream: str
    state: str
    lease: str
    due: str


class GroupKeys(NamedTuple):
    """The keys of one group."""

    members: str
    bell: str
    alive: str
    """Where the names of the keys that show who lives begin."""


class Keys:
    """Names keys under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.topics = f"{prefix}:topics"

    def stream(self, lane: Lane) -> str:
        """Return the stream of *lane*."""
        return f"{self.prefix}:{{{lane.topic.translate(_TAG)}:{lane.partition}}}"

    def lane(self, lane: Lane, group: str) -> LaneKeys:
        """Return the keys of *lane* for *group*."""
        stream = self.stream(lane)
        start = f"{stream}:{group}:"
        return LaneKeys(stream, start + "state", start + "lease", start + "due")

    def group(self, group: str) -> GroupKeys:
        """Return the keys of *group*."""
        start = f"{self.prefix}:{{{group.translate(_TAG)}}}:"
        return GroupKeys(start + "members", start + "bell", start + "alive:")
