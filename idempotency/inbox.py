"""The inbox: which messages a handler has already worked off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.idempotency.aborted import note_begin
from holdfast.idempotency.claim import Claim, Wanted, claim, unclaim
from holdfast.idempotency.former import Former, Formerly, carried, unclaim_carried
from holdfast.idempotency.isolation import require_read_committed
from holdfast.idempotency.keys import UNCOMPARED, content_digest, message_key
from holdfast.idempotency.roster import Roster
from holdfast.idempotency.window import Duration, in_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session

    from holdfast.message import Message

DEFAULT_WINDOW = "30d"
"""How long a handled message is remembered unless told otherwise."""


class Inbox:
    """Remembers handled messages inside the handler's own transaction.

    A message that comes again within *window* is known. It must be longer than a message
    can be retried, replayed or sent twice; None keeps everything for ever. Rows older than
    that are removed by `prune`.
    """

    def __init__(self, *, window: Duration | None = DEFAULT_WINDOW) -> None:
        self.window = None if window is None else in_seconds(window, of="window")
        self._roster = Roster()

    def claim(self, session: Session | Connection, consumer: str, message_id: str) -> bool:
        """Return whether *message_id* is new to *consumer*, and remember it.

        The memory commits or rolls back with the caller's work. A rival that handles the
        same message right now is waited for.
        """
        return self.claim_all(session, consumer, [by_key(message_id)])[0].is_new

    def claim_many(
        self, session: Session | Connection, consumer: str, messages: Sequence[Message]
    ) -> list[Claim]:
        """Claim *messages* with one statement; one answer for each, true if it is new."""
        return self.claim_all(session, consumer, [wanted(message) for message in messages])

    def claim_all(
        self,
        session: Session | Connection,
        consumer: str,
        items: Sequence[Wanted],
        *,
        hopeful: bool = False,
    ) -> list[Claim]:
        """Claim *items*, whose keys and digests are known already; *hopeful* as in `claim`."""
        require_read_committed(session)
        former = self.enter(session, consumer)
        claims = claim(session, consumer, items, hopeful=hopeful and not former)
        if former:
            claims = carried(session, consumer, former, items, claims)
        note_begin(session)
        return claims

    def unclaim_all(
        self,
        session: Session | Connection,
        consumer: str,
        claims: Sequence[tuple[Wanted, Claim]],
    ) -> None:
        """Take claims of this transaction back: the messages were not handled after all."""
        unclaim(session, consumer, [item.key for item, _ in claims])
        unclaim_carried(session, claims)

    def enter(self, session: Session | Connection, consumer: str) -> tuple[Former, ...]:
        """Put *consumer* on the roster with the window of this inbox; return what it takes over."""
        return self._roster.enter(session, consumer, self.window)

    def succeed(self, consumer: str, formerly: Formerly) -> None:
        """Say what earlier versions called *consumer*: what they remember is its own."""
        self._roster.succeed(consumer, formerly)

    def forget(self, session: Session | Connection, consumer: str, ids: Iterable[str]) -> None:
        """Forget messages: they may be handled again.

        *ids* are identities: `message.identity`, or the id of a message without a source.
        """
        unclaim(session, consumer, map(message_key, ids))


def wanted(
    message: Message, visible: Callable[[bytes | None], bytes | None] | None = None
) -> Wanted:
    """Return what is claimed for *message*: its source and id, compared by its payload.

    Of that only what is *visible* counts: hidden fields could be guessed from the digest.
    """
    identity, payload = message.identity, message.payload
    return Wanted(
        key=message_key(identity),
        digest=content_digest(payload if visible is None else visible(payload)),
        whole=b"" if visible is None else content_digest(payload),
        id=message.id,
        identity=identity,
    )


def by_key(text: str) -> Wanted:
    """Return what is claimed where a key of the user's own says what is the same."""
    return Wanted(key=message_key(text), digest=UNCOMPARED, id=text, identity=text)
