"""Dead-lettering a message that no handler may see any more."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.consumer.work import current_work

if TYPE_CHECKING:
    from holdfast.clock import Clock
    from holdfast.consumer.work import Work

log = logging.getLogger("holdfast.consumer")


def bury(work: Work, error: BaseException, clock: Clock) -> None:
    """Return once *work* is a dead letter, as its handler's own layer would have written it."""
    route, letters = work.route, work.route.letters
    assert letters.home is not None  # noqa: S101 - every route has one
    letter = letters.captured(
        work.message, error, group=route.group, handler=route.name,
        delivery=work.delivery if work.row is None else work.row.origin,
        attempts=work.attempt + work.crashes, clock=clock,
        stage="crash" if work.refused is None else "deserialize",
    )  # fmt: skip
    token = current_work.set(work)
    try:
        letters.home.put(letter)
    finally:
        current_work.reset(token)
    log.error(
        "message %s is dead-lettered as %s: %s", work.message.id, letter.dlq_id, work.told(error)
    )
