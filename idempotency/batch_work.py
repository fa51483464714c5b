"""One transaction of a batch: the claims in it, and what becomes of each message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from holdfast.errors import StaleDelivery
from holdfast.idempotency.aborted import require_whole
from holdfast.idempotency.inbox import Inbox, wanted
from holdfast.transactions import is_deadlock

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import Self

    from holdfast.idempotency.claim import Claim, Wanted
    from holdfast.message import Message

    Committing = Callable[[Any, "Batch", list["Outcome"]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Messages to handle in one transaction."""

    consumer: str
    messages: Sequence[Message]
    wanted: Sequence[Wanted] | None = None
    """Their identities, where a key function of the user makes them; else their ids."""
    lanes: Sequence[Hashable] | None = None
    """What each keeps its order in, e.g. its key: once one fails, the later ones of its lane
    are left out. Without lanes, none waits for another."""
    committing: Committing | None = None
    """Given the session, the batch and the outcomes, it may add to the transaction just
    before it commits."""

    def only(self, places: Sequence[int]) -> Batch:
        """Return a batch of the messages at *places*."""
        return Batch(
            consumer=self.consumer,
            messages=[self.messages[place] for place in places],
            wanted=None if self.wanted is None else [self.wanted[place] for place in places],
            lanes=None if self.lanes is None else [self.lanes[place] for place in places],
            committing=self.committing,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one message: handled now, handled before, or failed with an error.

    Every outcome is final once the batch has run: what was done is committed.
    """

    error: BaseException | None = None
    is_duplicate: bool = False
    result: Any = None

    @property
    def is_done(self) -> bool:
        """Whether the effect is there, from now or before: the broker may be told."""
        return self.error is None


HANDLED = Outcome()


class LeftBehind(StaleDelivery):
    """An earlier message of the same lane failed; this one was not handled and keeps its turn."""


class Known(Exception):
    """A message that was hoped to be new has been handled before."""


class Uncommitted(Exception):
    """The database refused the commit because of what is in it, e.g. a deferred constraint."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class BatchWork:
    """One transaction of a batch: the claims, and what has become of them."""

    def __init__(
        self,
        session: Any,
        inbox: Inbox,
        batch: Batch,
        *,
        hopeful: bool,
    ) -> None:
        self.batch = batch
        self._stuck: set[Hashable] = set()
        self.session = session
        self._inbox = inbox
        self._hopeful = hopeful
        self._outcomes: list[Outcome | None] = [None] * len(batch.messages)
        self._items = (
            [wanted(message) for message in batch.messages]
            if batch.wanted is None
            else batch.wanted
        )
        self._claims: list[Claim] = []
        self._failed: list[int] = []
        self.new: list[int] = []

    def __enter__(self) -> Self:
        hopeful, consumer = self._hopeful, self.batch.consumer
        try:
            self._claims = self._inbox.claim_all(
                self.session, consumer, self._items, hopeful=hopeful
            )
        except BaseException as error:
            Session.close(self.session)
            if hopeful and isinstance(error, IntegrityError):
                raise Known from error
            raise
        for place, claim in enumerate(self._claims):
            if claim.is_new:
                if not self.is_left_out(place):
                    self.new.append(place)
            elif claim.conflict is not None:
                self._outcomes[place] = Outcome(error=claim.conflict)
                self._stick(place)
            elif claim.twin is None:
                self._outcomes[place] = Outcome(is_duplicate=True, result=claim.result)
        return self

    def __exit__(self, *_: object) -> None:
        Session.close(self.session)

    def handled(self, place: int, result: Any) -> None:
        """Note that the message at *place* was handled."""
        self._outcomes[place] = HANDLED if result is None else Outcome(result=result)

    def all_handled(self, places: list[int], results: Any) -> None:
        """Note that the messages at *places* were handled together."""
        fit = isinstance(results, list) and len(results) == len(places)
        for place, result in zip(places, results if fit else [None] * len(places), strict=True):
            self.handled(place, result)

    def failed(self, place: int, error: Exception) -> None:
        """Note that it failed; an error of the database itself ends the whole transaction."""
        if ends(error):
            raise error
        self._outcomes[place] = Outcome(error=error)
        self._failed.append(place)
        self._stick(place)

    def is_left_out(self, place: int) -> bool:
        """Whether an earlier message of its lane failed; it is noted as left behind then."""
        lanes = self.batch.lanes
        if lanes is None or lanes[place] not in self._stuck:
            return False
        self._outcomes[place] = Outcome(error=left_behind(self.batch, place))
        self._failed.append(place)
        return True

    def commit(self) -> list[Outcome]:
        """Commit, without the claims of what failed; return all outcomes."""
        require_whole(self.session)
        gone = [(self._items[place], self._claims[place]) for place in self._failed]
        self._inbox.unclaim_all(self.session, self.batch.consumer, gone)
        outcomes = [self._outcome(place) for place in range(len(self._outcomes))]
        if self.batch.committing is not None:
            self.batch.committing(self.session, self.batch, outcomes)
        try:
            self._commit()
        except DBAPIError as error:
            if ends(error):
                raise
            raise Uncommitted(error) from error
        return outcomes

    def _commit(self) -> None:
        end = getattr(self.session, "end", None)  # a session of handlers, who may not commit it
        if end is None:
            Session.commit(self.session)
        else:
            end(commit=True)

    def _stick(self, place: int) -> None:
        if self.batch.lanes is not None:
            self._stuck.add(self.batch.lanes[place])

    def _outcome(self, place: int) -> Outcome:
        outcome = self._outcomes[place]
        if outcome is not None:
            return outcome
        twin = self._claims[place].twin
        first = self._outcome(place if twin is None else twin)
        return first if first.error is not None else Outcome(is_duplicate=True, result=first.result)


def left_behind(batch: Batch, place: int) -> LeftBehind:
    """Return why the message at *place* was not handled."""
    return LeftBehind(f"message {batch.messages[place].id} waits behind one that failed")


def ends(error: BaseException) -> bool:
    """Whether *error* has ended the whole transaction, not only one message's work."""
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or isinstance(error, Known) or is_deadlock(error)
