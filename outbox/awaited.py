"""Staging through asyncio: what was never awaited fails the commit, instead of being lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy.orm import Session

    from holdfast.message import Message

_FORGOTTEN = "holdfast_not_awaited"


def staged_async(
    session: Any, stage: Callable[[Any], None], messages: list[Message]
) -> Awaitable[list[Message]]:
    """Return what stages *messages* when it is awaited.

    Until then an `AsyncSession` refuses to commit: a forgotten `await` would lose the events.
    """
    sync: Session | None = getattr(session, "sync_session", None)
    waiting = set() if sync is None else _waiting(sync)
    waiting.add(token := object())

    async def work() -> list[Message]:
        waiting.discard(token)
        await session.run_sync(stage)
        return messages

    return work()


def _waiting(session: Session) -> set[object]:
    waiting: set[object] | None = session.info.get(_FORGOTTEN)
    if waiting is None:
        waiting = session.info[_FORGOTTEN] = set()
        event.listen(session, "before_commit", _refuse)
        event.listen(session, "after_rollback", _forget)
    return waiting


def _refuse(session: Session) -> None:
    if count := len(session.info[_FORGOTTEN]):
        raise ConfigurationError(
            f"{count} event(s) were added to an AsyncSession and never awaited, so they are not "
            "staged: write  await outbox.add(session, …)"
        )


def _forget(session: Session) -> None:
    session.info[_FORGOTTEN].clear()
