"""The process that owns one server: when the test run dies, the server and its folder go too.

Run as a script, standard library only. It answers one JSON line on stdout for each JSON line on
stdin, and ends once its owner does, however that happened: the pipe closes, or, should a forked
child of the owner still hold the pipe, the owner's pidfd reports the death.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_REAP_SECONDS = 0.5


class Supervisor:
    """Starts processes and can name every one of their descendants.

    Process groups are not enough: PostgreSQL's backends and Erlang's ports leave theirs, and epmd
    becomes a daemon. As a subreaper this process inherits whatever its descendants orphan.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / "server.log"
        self._exit_codes: dict[int, int] = {}

    def start(self, argv: Sequence[str], env: Mapping[str, str], user: str | None) -> int:
        """Start *argv* in its own session, its output appended to the log; return its pid."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                argv,
                env={**os.environ, **env},
                cwd=self._log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **_identity(user),
            )
        process.returncode = 0  # reap() collects it; Popen must neither wait nor warn.
        return process.pid

    def exit_code(self, pid: int) -> int | None:
        """Return how *pid* ended, negative for a signal; None while it runs."""
        return self._exit_codes.get(pid)

    def terminate(self, pid: int, signum: int) -> None:
        """Send *signum* to the one process *pid*, unless it ended."""
        # Only reap() frees a pid, so this one cannot have been given to a stranger.
        if pid in descendants(os.getpid()):
            _send(pid, signum)

    def signal(self, signum: int) -> None:
        """Send *signum* to every process, those forked meanwhile included."""
        reached: set[int] = set()
        while fresh := set(descendants(os.getpid())) - reached:
            for pid in fresh:
                _send(pid, signum)
            reached |= fresh

    def kill(self) -> None:
        """Return once every process is dead and reaped."""
        while pids := list(descendants(os.getpid())):
            for pid in pids:
                _send(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.002)  # pacing: the dead need a moment to be reaped

    def reap(self) -> None:
        """Collect the processes that ended, the inherited ones too."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._exit_codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])


def _identity(user: str | None) -> dict[str, Any]:
    return {"user": user, "group": user, "extra_groups": []} if user else {}


def _send(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):  # Its parent may have reaped it since it was listed.
        os.kill(pid, signum)


def descendants(ancestor: int) -> Iterator[int]:
    """Yield the pid of every descendant, parents first, zombies that await reaping included."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    generation = children.get(ancestor, [])
    while generation:
        yield from generation
        generation = [child for pid in generation for child in children.get(pid, [])]


def _parents() -> Iterator[tuple[int, int]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue  # It ended since the listing.
            # The name, in parentheses, may hold spaces: count from its end.
            yield int(entry), int(stat.rpartition(")")[2].split()[1])


def _requests(owner: int) -> Iterator[bytes]:
    """Yield the owner's lines, and an empty one when there is none, until the owner is gone."""
    try:
        death = os.pidfd_open(owner)
    except ProcessLookupError:
        return
    stdin, unfinished = sys.stdin.fileno(), b""
    while True:
        readable, _, _ = select.select([stdin, death], [], [], _REAP_SECONDS)
        if death in readable:
            return
        if stdin in readable:
            if not (chunk := os.read(stdin, 65536)):
                return
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            yield from lines
        else:
            yield b""


def _serve(supervisor: Supervisor, owner: int) -> None:
    for line in _requests(owner):
        supervisor.reap()
        if line:
            request = json.loads(line)
            method = getattr(supervisor, request["do"])
            try:
                answer = {"value": method(**request["arguments"])}
            except OSError as error:
                answer = {"error": str(error)}
            _answer(number=request["number"], **answer)


def _answer(**content: Any) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def _inherit_orphans() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a subreaper")


def main(name: str, owner: int, user: str | None) -> None:
    """Serve the process *owner* until it is gone; leave neither a process nor a file behind."""
    _inherit_orphans()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A handler, since an ignored signal would stay ignored in the server.
        signal.signal(signum, lambda *_: None)
    folder = Path(tempfile.mkdtemp(prefix=f"holdfast-{name}-"))
    supervisor = Supervisor(folder)
    try:
        if user:
            shutil.chown(folder, user, user)
        _answer(number=0, value=str(folder))
        _serve(supervisor, owner)
    finally:
        supervisor.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] or None)
