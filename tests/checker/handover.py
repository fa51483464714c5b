"""A relay freezes in the worst moment, another takes over, and the first one wakes up.

The relay that freezes has been refused an event and is about to park it. Its heir owns the
shards, has looked for parked keys, and freezes in its turn before it reads the table. Now
the first relay wakes, with its lease long gone, and does what it was about to do. The order
of these moments is fixed by the processes stopping themselves, never by waiting.

With the epoch guard it is refused, and the heir publishes everything in order. Without it
an event leaves the table unseen, and the next ones of its key go first.
"""

from __future__ import annotations

import os
import signal
import sys
from select import select
from typing import TYPE_CHECKING, Any

from holdfast import MessageTooLarge
from holdfast.outbox.relay.leases import Leases
from holdfast.outbox.schema import SHARDS
from holdfast.ports import Published
from holdfast.testing import wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

ZOMBIE, UNGUARDED, HEIR = "zombie", "unguarded", "heir"
ZOMBIE_SECONDS, HEIR_SECONDS = 1.0, 600.0
"""Leases: the first one runs out, the second one does not, however slow the machine is."""
_PATIENCE = 60.0


class Refusing:
    """A sink whose broker refuses the first batch: its limit is raised afterwards."""

    def __init__(self, sink: Any) -> None:
        self.caps = sink.caps
        self._sink = sink
        self._raised = False

    def publish(self, messages: Any) -> Any:
        if self._raised:
            return self._sink.publish(messages)
        self._raised = True
        return [Published(MessageTooLarge(2, 1)) for _ in messages]

    def close(self) -> None:
        self._sink.close()


def freeze_before_parking(engine: Any, *, guarded: bool) -> None:
    """Stop this process when it is about to park; afterwards say that the attempt is over."""
    if not guarded:
        Leases.holds = lambda *_: True  # type: ignore[method-assign]
    parking, move = engine._parking, engine._parking._move

    def frozen(leases: Any, rows: Any) -> Any:
        if not rows:
            return move(leases, rows)
        parking._move = move
        _stop()
        try:
            return move(leases, rows)
        finally:
            sys.stdout.write("awake\n")
            sys.stdout.flush()

    parking._move = frozen


def freeze_before_reading(engine: Any) -> None:
    """Stop this process when every shard is its own, before its snapshot is taken."""
    moving = engine._opening if engine.name == "wal" else engine._scan
    begin = moving.begin

    def frozen() -> None:
        if len(engine._leases.owned) == SHARDS:
            moving.begin = begin
            _stop()
        begin()

    moving.begin = frozen


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hand_over(
    zombie: subprocess.Popen[bytes],
    write_more: Callable[[], None],
    inherit: Callable[[], subprocess.Popen[bytes]],
) -> subprocess.Popen[bytes]:
    """Lead both relays through the handover; return the heir."""
    _await_stop(zombie)
    write_more()
    heir = inherit()
    try:
        _await_stop(heir)
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.stdout is not None
        assert select([zombie.stdout], [], [], _PATIENCE)[0], "the relay did not wake up"
        assert zombie.stdout.readline() == b"awake\n"
        os.kill(heir.pid, signal.SIGCONT)
    except BaseException:
        heir.kill()
        heir.communicate()
        raise
    return heir


def _await_stop(process: subprocess.Popen[bytes]) -> None:
    how = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG  # an end is for `Popen` to collect

    def has_stopped() -> bool:
        state = os.waitid(os.P_PID, process.pid, how)
        assert state is None or state.si_code == os.CLD_STOPPED, "the relay ended early"
        return state is not None

    wait_until(has_stopped, deadline=_PATIENCE, what="the relay froze")
