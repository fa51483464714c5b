"""A customer was never told that her order is paid: `python examples/detective/investigate.py`.

She gives support one number, the correlation corr-def-456. A few commands lead from there to the
cause and back: the chain of events and what is missing in it, the lag and the log of the service
that should have answered, its dead letter, the fix tried out and deployed, the replay, the chain.

Everything runs on SQLite in a temporary folder, each command and each service as a process of its
own. Each `$` line is a command as it would be typed; what follows is its answer.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
PATIENCE = 400  # seconds, for a machine that has much else to do


class Folder:
    """Where the databases, the broker and the log are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for file in HERE.glob("*.py"):
            shutil.copy(file, path)
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        known = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        self.environment = known | {
            "PATH": programs,
            "HOLDFAST_DATABASE": "sqlite:///notification.db",
            "HOLDFAST_BROKER": "sqlite:///broker.db",
        }

    def run(self, command: str, *, quiet: bool = False) -> str:
        """Run a command as it would be typed; show and return its answer."""
        done = subprocess.run(
            shlex.split(command), cwd=self.path, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if not quiet:
            print(f"\n$ {command}\n{done.stdout}[exit {done.returncode}]", flush=True)
        elif done.returncode:
            raise SystemExit(f"{command}: {done.stdout}")
        return done.stdout

    @contextmanager
    def service(self, target: str) -> Iterator[None]:
        """Keep a service running; what it logs is appended to notification.log."""
        command = ["holdfast", "consume", target, "--log-format", "json"]
        named = self.environment | {"OTEL_SERVICE_NAME": "notification"}
        with self.log.open("a") as log:
            process = subprocess.Popen(command, cwd=self.path, env=named, stderr=log)
        try:
            yield
            process.terminate()
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()

    @property
    def log(self) -> Path:
        """Return the file that the service logs to."""
        return self.path / "notification.log"

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Look again and again until *condition* holds."""
        until = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > until:
                raise SystemExit(f"{what}: not within {PATIENCE} s\n{self.log.read_text()}")
            time.sleep(0.1)

    def has_settled(self) -> bool:
        """Whether the notification service is through with its topic."""
        if "is dead-lettered" not in self.log.read_text():
            return False
        lanes = json.loads(self.run("holdfast lag --group notification --json", quiet=True))
        return all(not one["lag"] and one["members"] for one in lanes)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shop = Folder(Path(folder))
        shop.run(f"{sys.executable} afternoon.py", quiet=True)
        with shop.service("notification:consumer"):
            shop.wait_for("the payments are handled", shop.has_settled)
            print("What came of the order, and what is missing?")
            shop.run("holdfast lineage show corr-def-456 --also sqlite:///shop.db")
            print("\nNotification should have answered evt-102. Is it behind?")
            shop.run("holdfast lag --group notification")
            print("\nIt is not. What does its log say about evt-102?")
            shop.run("grep evt-102 notification.log")
            print("\nSo the payment is a dead letter:")
            listed = shop.run("holdfast dlq list --correlation corr-def-456")
            shop.run("holdfast dlq show --correlation corr-def-456 --also sqlite:///shop.db")
        problem = listed.partition("group ")[2].split()[0]
        print("\nA guest has no customerEmail. The fix is tried on the very message that failed:")
        shop.run(f"holdfast dlq simulate {problem} --handler notification:notify")
        shop.run(f"holdfast dlq simulate {problem} --handler notification_fixed:notify")
        print("\nVersion 2.3.1 is deployed, and the message is replayed:")
        with shop.service("notification_fixed:consumer"):
            shop.wait_for(
                "it has its partitions", lambda: shop.log.read_text().count("assigned") > 1
            )
            why = "--reason 'guests have an address, fixed in 2.3.1'"
            shop.run(f"holdfast dlq replay --correlation corr-def-456 --patience 5m {why} --yes")
        shop.run("holdfast relay --once")
        print("\nThe chain is whole:")
        shop.run("holdfast lineage show corr-def-456 --also sqlite:///shop.db")
        print("\nAn order that went well, to compare: what led to evt-005, and to both?")
        shop.run("holdfast lineage show corr-abc-123 --also sqlite:///shop.db "
                 "--event evt-005 --other evt-004")  # fmt: skip


if __name__ == "__main__":
    main()
