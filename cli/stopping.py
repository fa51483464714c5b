"""Ending on a signal: first in good order, then in any case."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.cli.exits import EXIT_UNFINISHED
from holdfast.concurrency import signals_heard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("holdfast.cli")


@contextmanager
def stopped_by_signals(stop: Callable[[], None], *, drain_seconds: float) -> Iterator[None]:
    """Call *stop* on SIGTERM or SIGINT; end the process if that takes too long.

    A signal once more, a second later or more, ends it at once. Whatever was in flight then
    is still in the outbox, and is published again.
    """
    timers: list[threading.Timer] = []

    def asked(number: int) -> None:
        name = signal.Signals(number).name
        if timers:
            _end(f"{name} again: ending at once")
        log.info("%s: finishing the batch in hand, for at most %g s", name, drain_seconds)
        late = f"the batch in hand took more than {drain_seconds:g} s: ending without it"
        timer = threading.Timer(drain_seconds, _end, [late])
        timer.daemon = True
        timers.append(timer)
        timer.start()
        stop()

    with signals_heard(asked):
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()


def _end(why: str) -> None:
    log.error("%s; nothing is lost, it is published again", why)
    logging.shutdown()
    os._exit(EXIT_UNFINISHED)  # a thread that hangs in a client library cannot be ended otherwise
