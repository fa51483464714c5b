"""A standalone Spark cluster from the pip package: a master and two workers on loopback."""

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import pyspark

from tests.servers.install import program, spark_classes
from tests.servers.ports import free_port
from tests.servers.processes import Command, Processes
from tests.servers.waiting import wait_until

_HOME = Path(pyspark.__file__).parent
_HOST = "127.0.0.1"
_SECONDS = 400.0  # four or more JVMs start at once, on a machine that does other things, too


def java_options() -> str:
    """Return what makes a JVM that lives for seconds cheap, at the price of one that lives long."""
    usual = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    # Where it was made for: elsewhere every pointer in 190 MB would be changed first.
    mapped = "-XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0"
    classes = spark_classes()
    # Silent, for a JVM to which the archive is of no use goes on without it.
    archive = f"{mapped} -XX:SharedArchiveFile={classes} -Xlog:disable"
    return f"{usual} {archive}" if classes.exists() else usual


class SparkCluster:
    """Two workers with one core each; use it in `with`."""

    def __init__(self) -> None:
        self._processes = Processes("spark")
        self._port = free_port()
        self.folder = self._processes.folder
        self.workers: list[int] = []

    @property
    def url(self) -> str:
        """The address of the master."""
        return f"spark://{_HOST}:{self._port}"

    @property
    def log(self) -> str:
        """What all processes have said so far."""
        return self._processes.log_path.read_text(errors="replace")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process and remove the folder."""
        self._processes.close()

    def _start(self) -> None:
        ui = ("--webui-port", "0")
        self._daemon("master.Master", "--host", _HOST, "--port", str(self._port), *ui)
        wait_until(lambda: "Starting Spark master" in self.log, "Spark's master", _SECONDS)
        for _ in range(2):
            self.add_worker()
        wait_until(lambda: self.log.count("Registering worker ") >= 2, "its workers", _SECONDS)

    def add_worker(self) -> None:
        """Start one more worker; it registers by itself."""
        work = ("--work-dir", str(self.folder / f"work{len(self.workers)}"))
        size = ("--webui-port", "0", "--cores", "1", "--memory", "1g")
        self.workers.append(self._daemon("worker.Worker", "--host", _HOST, *size, *work, self.url))

    def _daemon(self, name: str, *arguments: str) -> int:
        argv = (str(_HOME / "bin/spark-class"), f"org.apache.spark.deploy.{name}", *arguments)
        return self._processes.start(
            Command(argv=argv, env=environment(SPARK_DAEMON_MEMORY="512m"))
        )

    def submit(self, conf: Mapping[str, str], files: Sequence[Path], *arguments: str) -> int:
        """Start `spark-submit` of *arguments* and return its pid; its output is in `log`."""
        settings = {
            "spark.driver.host": _HOST, "spark.driver.bindAddress": _HOST,
            "spark.executor.memory": "640m", "spark.executor.cores": "1",
            "spark.ui.enabled": "false",
            "spark.driver.extraJavaOptions": java_options(),
            "spark.executor.extraJavaOptions": java_options(),
            "spark.sql.shuffle.partitions": "4", **conf,
        }  # fmt: skip
        given = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        argv = (
            str(_HOME / "bin/spark-submit"), "--master", self.url, *given,
            "--py-files", ",".join(map(str, files)), *arguments,
        )  # fmt: skip
        return self._processes.start(Command(argv=argv, env=environment()))

    def wait(self, pid: int, seconds: float = 600.0) -> int:
        """Return how the process *pid* ended."""
        wait_until(partial(self._processes.ended, pid), f"the job ({self.log[-3000:]})", seconds)
        code = self._processes.exit_code(pid)
        assert code is not None
        return code

    def executors(self) -> int:
        """Return how many executors the master has started so far."""
        return len(re.findall(r"Launching executor app-\S+ on worker", self.log))

    def tasks(self, number: int) -> tuple[int, int]:
        """Return how many tasks the newest job has begun on a worker, and how many it has done."""
        jobs = sorted((self.folder / f"work{number}").glob("app-*"))
        logs = (
            [log.read_text(errors="replace") for log in jobs[-1].glob("*/stderr")] if jobs else []
        )
        begun, done = (sum(log.count(f"{word} task ") for log in logs)
                       for word in ("Running", "Finished"))  # fmt: skip
        return begun, done

    def alive(self) -> int:
        """Return how many workers run."""
        return sum(not self._processes.ended(pid) for pid in self.workers)

    def kill_worker(self, number: int) -> None:
        """Kill a worker as a failing machine would: with its executors and their Python."""
        for pid in (self.workers[number], *_descendants(self.workers[number])):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue  # it has ended
        found += [one] if one != pid else []
    return found


def environment(**more: str) -> dict[str, str]:
    """Return what Spark's scripts need to know, on loopback and with this very Python."""
    return {
        "SPARK_HOME": str(_HOME), "SPARK_LOCAL_IP": _HOST, "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(program("java").resolve().parents[1]),
        "PATH": os.environ.get("PATH", ""), "SPARK_DAEMON_JAVA_OPTS": java_options(),
        "SPARK_LAUNCHER_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", **more,
    }  # fmt: skip
