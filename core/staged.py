"""A message on its way from the outbox to a broker, its wire headers already made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.message import Message

if TYPE_CHECKING:
    from holdfast.headers import Pair


class Staged(Message, frozen=True, kw_only=True, gc=False):
    """A message of which a relay needs the wire form only.

    `wire` holds all headers in binary mode with the prefix `ce_`, as `to_wire` returned
    them when the event was staged; the other attributes are not taken apart again.
    """

    wire: tuple[Pair, ...]

    def __post_init__(self) -> None:
        """Trust the row: it was checked when it was staged."""
