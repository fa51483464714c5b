"""The embedded broker shared by processes, and short of disk."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast import BrokerDown, Message
from holdfast.brokers import connect
from holdfast.brokers.sqlite import SqliteBroker
from holdfast.ports import Lane
from holdfast.testing import VirtualClock, wait_until
from holdfast.urls import BrokerUrl

if TYPE_CHECKING:
    from pathlib import Path

PUBLISHER = """
import sys
from holdfast import Message
from holdfast.brokers import connect
url, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
sink = connect(url).sink()
for n in range(count):
    (result,) = sink.publish([Message.new("orders", f"{name}-{n}".encode(), key=name)])
    assert result.error is None, result.error
sink.close()
"""

CONSUMER = """
import json, sys
from holdfast.brokers import connect
broker = connect(sys.argv[1])
source = broker.source(["orders"], group="g")
print("ready", flush=True)
while True:
    batch = source.poll(5, 0.2)
    for d in batch:
        print(json.dumps([d.lane.partition, d.position, d.body.decode()]), flush=True)
    source.accept(batch)
"""


def child(code: str, *args: str) -> subprocess.Popen[str]:
    """Start a Python process that runs *code*."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_many_processes_never_see_a_locked_database(tmp_path: Path) -> None:
    """Four publishers and three consumers share a file: no error, and no loss."""
    url = f"sqlite:///{tmp_path}/b.db?session=3"
    connect(url).close()
    count = 60
    publishers = [child(PUBLISHER, url, f"p{n}", str(count)) for n in range(4)]
    consumers = [child(CONSUMER, url) for _ in range(3)]
    for process in publishers:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    broker = connect(url)
    wait_until(lambda: not any(broker.lag("g", ["orders"]).values()), deadline=120, what="drained")
    broker.close()
    seen: list[str] = []
    for process in consumers:
        process.terminate()
        output, errors = process.communicate(timeout=90)
        assert not errors
        seen += [json.loads(line)[2] for line in output.splitlines() if line.startswith("[")]
    assert set(seen) == {f"p{p}-{n}" for p in range(4) for n in range(count)}


def test_a_full_disk_is_an_outage_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """Publishing fails as BrokerDown while the file may not grow, and works again after."""
    code = """
import resource, sys
from holdfast import BrokerDown, Message
from holdfast.brokers import connect
sink = connect(sys.argv[1]).sink()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
first = [Message.new("orders", b"x" * 1000, key="k") for _ in range(10)]
sink.publish(first)
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
try:
    for _ in range(100):
        sink.publish([Message.new("orders", b"y" * 100_000, key="k")] * 5)
except BrokerDown as error:
    print("down:", error)
else:
    sys.exit("the limit was not felt")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
results = sink.publish([Message.new("orders", b"z", key="k")])
print("after:", results[0].position)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, f"sqlite:///{tmp_path}/b.db"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "down: the broker file does not answer" in done.stdout
    broker = connect(f"sqlite:///{tmp_path}/b.db")
    source = broker.source(["orders"], group="g")
    bodies = [d.body for d in source.poll(1000, 1.0)]
    assert bodies[:10] == [b"x" * 1000] * 10
    assert bodies[-1] == b"z"
    assert len(bodies) % 5 == 1  # whole batches of five, or none of them
    source.close()
    broker.close()


@pytest.fixture
def clock() -> VirtualClock:
    """Return a clock that moves when it is waited on."""
    return VirtualClock(auto=True)


def test_pruning_never_removes_what_a_group_has_not_settled(
    tmp_path: Path, clock: VirtualClock
) -> None:
    """Retention counts from settling by every group, not from publishing."""
    broker = SqliteBroker(
        BrokerUrl.parse(f"sqlite:///{tmp_path}/b.db"), clock=clock, session=1e9, lease=1e9
    )
    broker.create_topic("orders", partitions=1)
    sink = broker.sink()
    sink.publish([Message.new("orders", b"%d" % n, key="k") for n in range(10)])
    fast, slow = (broker.source(["orders"], group=name) for name in ("fast", "slow"))
    assert broker.prune(older_than=0) == {}
    fast.accept(fast.poll(10, 1.0))
    held = slow.poll(10, 1.0)
    slow.accept([held[0], held[1], held[5]])
    clock.advance(100)
    assert broker.prune(older_than=200) == {}
    assert broker.prune(["other"], older_than=50) == {}
    assert broker.prune(older_than=50, dry_run=True) == {"orders": 2}
    assert broker.prune(older_than=50) == {"orders": 2}
    slow.close()
    again = broker.source(["orders"], group="slow")
    assert [d.body for d in again.poll(10, 1.0)] == [b"2", b"3", b"4", b"6", b"7", b"8", b"9"]
    for part in (sink, fast, again, broker):
        part.close()


def test_an_expired_lease_hands_the_message_out_again_and_the_late_settling_is_ignored(
    tmp_path: Path, clock: VirtualClock
) -> None:
    """Only the newest handing-out of a message can settle it."""
    broker = SqliteBroker(
        BrokerUrl.parse(f"sqlite:///{tmp_path}/b.db"), clock=clock, session=1e9, lease=30
    )
    broker.sink().publish([Message.new("orders", b"1", key="k")])
    source = broker.source(["orders"], group="g")
    (first,) = source.poll(10, 1.0)
    clock.advance(31)
    (second,) = source.poll(10, 1.0)
    assert (first.count, second.count) == (1, 2)
    source.accept([first])
    assert sum(source.lag().values()) == 1
    source.accept([second])
    assert sum(source.lag().values()) == 0
    source.close()
    broker.close()


def test_an_accept_that_failed_is_stored_by_the_next_call(tmp_path: Path) -> None:
    """BrokerDown from accept means: call it again."""
    broker = connect(f"sqlite:///{tmp_path}/b.db?partitions=1")
    broker.sink().publish([Message.new("orders", b"1", key="k")])
    source = broker.source(["orders"], group="g")
    batch = source.poll(10, 1.0)
    rival = broker.sink()  # its transaction holds the write lock
    with rival._db.write():  # type: ignore[attr-defined]
        source._db._db.execute("PRAGMA busy_timeout = 1")  # type: ignore[attr-defined]
        with pytest.raises(BrokerDown, match="locked"):
            source.accept(batch)
    assert broker.lag("g", ["orders"]) == {Lane("orders", 0): 1}
    source.accept(batch)
    assert broker.lag("g", ["orders"]) == {Lane("orders", 0): 0}
    source.close()
    broker.close()
