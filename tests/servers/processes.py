"""The processes and the folder of one server, held by a supervisor."""

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.servers.waiting import wait_until

_SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to execute, with which additions to the environment, and as whom."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None


class Processes:
    """Processes and a private folder that vanish with this object, or with this process.

    They vanish however this process ends, SIGKILL included.
    """

    def __init__(self, name: str, owner: str | None = None) -> None:
        """Create the folder; *owner* is the user it belongs to, by default the current one."""
        self._lock = threading.Lock()
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", str(_SUPERVISOR), name, str(os.getpid()), owner or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for pytest; its end is what ends the supervisor.
        )
        self._numbers = itertools.count(1)
        self.folder = Path(self._receive(0))
        self.log_path = self.folder / "server.log"

    def start(self, command: Command) -> int:
        """Start *command*, its output appended to the log, and return its pid."""
        request = {"argv": command.argv, "env": dict(command.env), "user": command.user}
        return int(self._ask("start", **request))

    def run(self, command: Command, seconds: float = 90.0) -> None:
        """Return once *command* succeeded; raise RuntimeError when it failed."""
        pid = self.start(command)
        wait_until(partial(self.ended, pid), command.argv[0], seconds)
        if code := self.exit_code(pid):
            raise RuntimeError(f"{command.argv[0]} ended with code {code}")

    def exit_code(self, pid: int) -> int | None:
        """Return how *pid* ended, negative for a signal; None while it runs."""
        code: int | None = self._ask("exit_code", pid=pid)
        return code

    def ended(self, pid: int) -> bool:
        """Return whether *pid* ended."""
        return self.exit_code(pid) is not None

    def terminate(self, pid: int, signum: int) -> None:
        """Send *signum* to the one process *pid*, unless it ended."""
        self._ask("terminate", pid=pid, signum=signum)

    def signal(self, signum: int) -> None:
        """Send *signum* to every process, however deep in the tree."""
        self._ask("signal", signum=signum)

    def kill(self) -> None:
        """Return once every process is dead; the folder stays."""
        self._ask("kill")

    def close(self) -> None:
        """Return once every process is dead and the folder is gone."""
        self._supervisor.communicate()

    def _ask(self, do: str, **arguments: Any) -> Any:
        stdin = self._supervisor.stdin
        assert stdin is not None
        with self._lock:
            number = next(self._numbers)
            request = {"number": number, "do": do, "arguments": arguments}
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            return self._receive(number)

    def _receive(self, number: int) -> Any:
        """Return the answer *number*, past those that an interrupted caller left unread."""
        assert self._supervisor.stdout is not None
        for line in self._supervisor.stdout:
            answer = json.loads(line)
            if answer["number"] == number:
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer["value"]
        raise RuntimeError("the supervisor died")
