"""Order by version: events of an entity take effect in their order, or the last one wins."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.db.engine import require_read_committed
from holdfast.db.sql import statements
from holdfast.db.text import fitted
from holdfast.errors import ConfigurationError, PoisonMessage, Transient
from holdfast.idempotency.identity import consumer_key, content_digest
from holdfast.stored_message import from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from holdfast.message import Message

log = logging.getLogger("holdfast.idempotency")

_LARGEST = 2**63 - 1
_READ_AT_ONCE = 500


class VersionConflict(PoisonMessage):
    """Two messages claim the same version of an entity with other content."""


class GapTooWide(Transient):
    """Too many messages of an entity wait for one that has not come; it may be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDecision:
    """What may take effect now, in order: loop over it. Nothing, if it is ahead or stale."""

    ready: tuple[Message, ...] = ()
    is_ahead: bool = False
    """A predecessor has not come yet; the message is kept and comes out after it."""
    is_stale: bool = False
    """The entity is at this version or beyond; the message is dropped, and counted."""

    def __iter__(self) -> Iterator[Message]:
        return iter(self.ready)


class VersionGate:
    """Lets the messages of an entity through in the order of their versions, without gaps.

    *name* is the scope: each projection of the events needs its own. The first version of
    an entity is *first*; None takes whatever comes first. At most *most_ahead* messages of
    an entity are kept. All is done in the caller's transaction, together with the effect,
    and messages of one entity take turns until it commits.
    """

    def __init__(self, name: str, *, first: int | None = 1, most_ahead: int = 1000) -> None:
        if not name:
            raise ConfigurationError("VersionGate(''): name the projection that it guards")
        if most_ahead < 1:
            raise ConfigurationError(f"VersionGate(most_ahead={most_ahead}): use 1 or more")
        self._rows = _Versions(name)
        self._first = first
        self._most_ahead = most_ahead

    def admit(
        self, session: Session | Connection, message: Message, *, entity: str, version: int
    ) -> VersionDecision:
        """Return what may take effect now that *message*, *version* of *entity*, is here."""
        rows = self._rows.of(session, entity, version)
        current = rows.lock(version - 1 if self._first is None else self._first - 1)
        if version <= current:
            rows.drop_stale(current)
            return VersionDecision(is_stale=True)
        if version > current + 1:
            rows.hold(message, current, self._most_ahead)
            freed = tuple(rows.drain(current))  # nothing, unless somebody forgot to
            if freed:
                rows.advance(current + len(freed))
            return VersionDecision(ready=freed, is_ahead=version > current + len(freed))
        ready = (message, *rows.drain(version))
        rows.advance(current + len(ready))
        return VersionDecision(ready=ready)

    async def admit_async(
        self, session: AsyncSession | AsyncConnection, message: Message, **what: Any
    ) -> VersionDecision:
        """Do the same as `admit` with an async session or connection."""
        return await session.run_sync(lambda sync: self.admit(sync, message, **what))

    def forget(self, session: Session | Connection, entity: str) -> None:
        """Forget *entity*, also what waits for it: its versions begin anew."""
        self._rows.of(session, entity, 0).forget()


class LastWriteWins:
    """Lets a message through unless a later version of the entity has taken effect.

    For state that is replaced as a whole: gaps do not matter, older news is dropped.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise ConfigurationError("LastWriteWins(''): name the projection that it guards")
        self._rows = _Versions(name)

    def admit(self, session: Session | Connection, *, entity: str, version: int) -> bool:
        """Return whether *version* of *entity* is the newest so far, and remember it."""
        rows = self._rows.of(session, entity, version)
        current = rows.lock(-_LARGEST)
        if version <= current:
            rows.drop_stale(current)
            return False
        rows.advance(version)
        return True

    async def admit_async(
        self, session: AsyncSession | AsyncConnection, *, entity: str, version: int
    ) -> bool:
        """Do the same as `admit` with an async session or connection."""
        return await session.run_sync(lambda sync: self.admit(sync, entity=entity, version=version))


@dataclass(frozen=True, slots=True)
class _Versions:
    """The rows of one scope."""

    name: str

    def of(self, session: Any, entity: str, version: int) -> _Entity:
        if not isinstance(entity, str) or not entity:
            raise PoisonMessage(f"entity {entity!r} of {self.name}: it must be a text, not empty")
        if isinstance(version, bool) or not isinstance(version, int):
            raise PoisonMessage(f"version {version!r} of {entity!r}: it must be a whole number")
        if not -_LARGEST < version < _LARGEST:
            raise PoisonMessage(f"version {version} of {entity!r} does not fit into 64 bits")
        return _Entity(session, self.name, entity, version)


class _Entity:
    """The rows of one entity, seen by a message with its version."""

    def __init__(self, session: Any, name: str, entity: str, version: int) -> None:
        self._session = session
        self._name, self._entity, self._version = name, entity, version
        bind = session.get_bind() if hasattr(session, "get_bind") else session
        self._sql = statements("holdfast.idempotency", bind.dialect.name)
        self._key = {"consumer": consumer_key(f"gate {name}"), "entity": fitted(entity)}

    def lock(self, start: int) -> int:
        """Return the version that the entity is at, made *start* if new, locked till the end."""
        require_read_committed(self._session)
        self._run("version_seed", version=start)
        return int(self._run("version_look").scalar_one())

    def advance(self, version: int) -> None:
        self._run("version_set", version=version)

    def drop_stale(self, current: int) -> None:
        self._run("version_stale", version=self._version)
        log.info(
            "%s: version %s of %r is dropped, it is at %s already",
            self._name, self._version, self._entity, current,
        )  # fmt: skip

    def hold(self, message: Message, current: int, most: int) -> None:
        """Keep *message* until its predecessor is here."""
        content = to_bytes(message)
        self._run("ahead_hold", version=self._version, content=content)
        found = self._run("ahead_read", version=self._version, most=1).one()
        other = from_bytes(bytes(found.content))
        if other.identity != message.identity and content_digest(other.payload) != content_digest(
            message.payload
        ):
            raise VersionConflict(
                f"{self._name}: messages {other.id} and {message.id} both are version "
                f"{self._version} of {self._entity!r}, with other content"
            )
        if self._run("ahead_count").scalar_one() > most:
            raise GapTooWide(
                f"{self._name}: more than {most} messages of {self._entity!r} wait for version "
                f"{current + 1}: find out what became of it, or forget the entity"
            )

    def drain(self, after: int) -> list[Message]:
        """Take out what follows *after* without a gap."""
        ready: list[Message] = []
        wanted = after + 1
        while rows := self._run("ahead_read", version=wanted, most=_READ_AT_ONCE).all():
            for row in rows:
                if row.version != wanted:
                    rows = []
                    break
                ready.append(from_bytes(bytes(row.content)))
                wanted += 1
            if len(rows) < _READ_AT_ONCE:
                break
        if ready:
            self._run("ahead_drop", version=wanted - 1)
        return ready

    def forget(self) -> None:
        self._run("ahead_drop", version=_LARGEST)
        self._run("version_forget")

    def _run(self, name: str, **values: Any) -> Any:
        return self._session.execute(self._sql[name], {**self._key, **values})
