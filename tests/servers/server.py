"""What all test servers have in common: their life cycle."""

import shutil
import signal
import socket
import time
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from tests.servers.ports import HOST, free_port
from tests.servers.processes import Command, Processes
from tests.servers.waiting import DeadlineExceeded, wait_until

_ANSWER_SECONDS = 5.0
_STOP_SECONDS = 90.0
_TAIL_LINES = 30


class ServerFailed(Exception):
    """A server did not start, or not in time; the message ends with the tail of its log."""


class Server(ABC):
    """A real server on loopback, with a port and a folder of its own.

    Port and data outlive ``stop()`` and ``kill()``. ``close()``, or the end of this process by
    whatever means, removes every process and every file.
    """

    name: ClassVar[str]
    start_deadline: ClassVar[float] = 90.0
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self) -> None:
        self.host = HOST
        self.port = free_port()
        self.start_seconds = 0.0
        self.is_hurried = False
        """Whether a commit need not survive a crash of the machine, only one of the server."""
        self._pid: int | None = None
        self._prepared = False
        self._ran = False
        self._processes = Processes(self.name, self.user)

    @classmethod
    def borrowed(cls, port: int, pid: int, processes: Any) -> Self:
        """Return a server that another process of this run started, to talk to only."""
        server = cls.__new__(cls)
        server.host, server.port, server.start_seconds = HOST, port, 0.0
        server._pid, server._prepared, server._ran = pid, True, True
        server._processes = processes
        return server

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect."""

    @property
    @abstractmethod
    def version(self) -> str:
        """The server's own version."""

    @abstractmethod
    def command(self) -> Command:
        """Return the command whose process is the server."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether the server answers its own protocol; OSError means not yet."""

    def prepare(self) -> None:  # noqa: B027 - the small servers need nothing
        """Create what the first start needs in the folder."""

    def launch(self) -> int:
        """Start the server's processes and return the pid of the main one."""
        return self._processes.start(self.command())

    @property
    def user(self) -> str | None:
        """The user the server runs as; None for the current one."""
        return None

    @property
    def address(self) -> str:
        """Host and port, as in ``127.0.0.1:5432``."""
        return f"{self.host}:{self.port}"

    @property
    def folder(self) -> Path:
        """The private folder, data and log included."""
        return self._processes.folder

    @property
    def log_path(self) -> Path:
        """All output of all starts so far."""
        return self._processes.log_path

    @property
    def pid(self) -> int:
        """The main process; raises RuntimeError while the server is down."""
        if self._pid is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._pid

    def start(self) -> None:
        """Return once the server answers, with the port and the data of its last life.

        One that ran before and now ends at once gets a second chance; its log shows both.
        """
        if self._pid is not None:
            raise RuntimeError(f"{self.name} already runs; stop it first")
        began = time.monotonic()
        for chance in (1, 2):
            try:
                self._bring_up()
                break
            except (RuntimeError, DeadlineExceeded) as error:
                self.kill()
                if not self._ran or chance == 2 or isinstance(error, DeadlineExceeded):
                    raise ServerFailed(f"{self.name}: {error}\n{self._log_tail()}") from error
        self._ran = True
        self.start_seconds = time.monotonic() - began

    def _bring_up(self) -> None:
        if not self._prepared:
            self.prepare()
            self._prepared = True
        self._pid = self.launch()
        wait_until(self._ready, "its first answer", self.start_deadline)

    def _ready(self) -> bool:
        if (code := self._processes.exit_code(self.pid)) is not None:
            raise RuntimeError(f"ended with code {code} before its first answer")
        try:
            return self.answers()
        except OSError:
            return False

    def stop(self) -> None:
        """Ask the server to end in its own orderly way; return once all its processes are gone."""
        pid = self.pid
        self._processes.terminate(pid, self.stop_signal)
        ended = partial(self._processes.ended, pid)
        wait_until(ended, f"{self.name}'s end", _STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """SIGKILL all processes at once, as a crash would; return once they are gone."""
        self._processes.kill()
        self._pid = None

    def restart(self) -> None:
        """Stop in an orderly way and start again."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze every process: connections stay open and nothing answers."""
        self._processes.signal(signal.SIGSTOP)
        if self._pid is not None:  # a process of many threads stops thread by thread
            wait_until(lambda: _is_stopped(self._pid), "the server stands still")

    def resume(self) -> None:
        """Let a paused server go on."""
        self._processes.signal(signal.SIGCONT)

    def close(self) -> None:
        """Return once all processes and files are gone."""
        self._processes.close()
        self._pid = None

    def keep_log(self, folder: Path) -> None:
        """Copy the log, if any was written, into *folder*."""
        if self.log_path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.log_path, folder / f"{self.name}-{self.port}.log")

    def connect(self) -> socket.socket:
        """Return a new connection whose reads and writes give up after some seconds."""
        return socket.create_connection((self.host, self.port), _ANSWER_SECONDS)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _log_tail(self) -> str:
        if not self.log_path.exists():
            return "(no log)"
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def _is_stopped(pid: int | None) -> bool:
    """Whether no thread of process *pid* runs any more."""
    try:
        stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TtZ" for stat in stats)
