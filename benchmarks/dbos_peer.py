"""DBOS at its best: many workflows side by side, in a process of its own, on the same server.

Prints the steps per second of one run, without the start of the process and of its threads.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path


def measured(url: str, *, workflows: int, steps: int) -> float:
    """Return the steps per second of a fresh process."""
    command = [sys.executable, str(Path(__file__)), url, str(workflows), str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return float(done.stdout.split()[-1])


def main(url: str, workflows: int, steps: int) -> float:
    """Run the workflows, each of which calls the same empty step so often."""
    dbos = importlib.import_module("dbos")  # a peer, which type checkers need not know
    dbos.DBOS(
        config={
            "name": "bench", "system_database_url": url, "run_admin_server": False,
            "log_level": "ERROR",
        }
    )  # fmt: skip

    @dbos.DBOS.step()  # type: ignore[untyped-decorator]
    def one(number: int) -> int:
        return number

    @dbos.DBOS.workflow()  # type: ignore[untyped-decorator]
    def flow(count: int) -> int:
        return sum(one(number) for number in range(count))

    dbos.DBOS.launch()
    try:
        for warm in [dbos.DBOS.start_workflow(flow, 2) for _ in range(20)]:
            warm.get_result()
        began = time.perf_counter()
        for handle in [dbos.DBOS.start_workflow(flow, steps) for _ in range(workflows)]:
            handle.get_result()
        return workflows * steps / (time.perf_counter() - began)
    finally:
        dbos.DBOS.destroy()


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
