"""`holdfast lag` as an operator sees it: screens, JSON, exit codes, watching."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Message
from holdfast.brokers import connect
from tests.golden import NOW
from tests.servers.ports import free_port
from tests.servers.waiting import wait_until
from tests.shell import shell

if TYPE_CHECKING:
    from tests.golden import Screens

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
ADAPTER = '''
"""A broker adapter of somebody else's: it only tells how far a group is, from a file."""
import json
from pathlib import Path

from holdfast.ports import BrokerPowers, GroupProgress, Lane, LaneProgress


class Told(BrokerPowers):
    tells_progress = True

    def __init__(self, url, **native):
        self.name = str(url)
        self.looks = json.loads(Path("told.json").read_text())

    def create_topic(self, topic, *, partitions=1): ...

    def sink(self, **native): ...

    def topics(self):
        return None

    def progress(self, group, topics=None):
        told = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return GroupProgress(
            lanes={Lane(t, p): LaneProgress(**facts) for t, p, facts in told["lanes"]},
            members=told.get("members", {}),
            retention=told.get("retention", {}),
        )

    def close(self): ...
'''
HOUR, DAY = 3600.0, 86400.0


@pytest.fixture
def told(screens: Screens, monkeypatch: pytest.MonkeyPatch) -> Screens:
    """Install an adapter for `told://`, as a package of somebody else's would be."""
    folder = screens.folder / "site"
    about = folder / "told-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "told_adapter.py").write_text(ADAPTER)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: told\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[holdfast.brokers]\ntold = told_adapter:Told\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "told_adapter", raising=False)
    screens.urls["HOLDFAST_BROKER"] = "told://broker:9092"
    screens.urls["HOLDFAST_GROUP"] = "billing"
    return screens


def tell(screens: Screens, *looks: dict[str, Any]) -> None:
    """Let the adapter answer by *looks*, the last again and again."""
    (screens.folder / "told.json").write_text(json.dumps(looks))


def lane(topic: str, partition: int, current: Any, end: Any, **facts: Any) -> list[Any]:
    """Return what the adapter tells of one lane."""
    unsettled = facts.pop("lag", None)
    unsettled = end - current if unsettled is None else unsettled
    return [topic, partition, {"committed": current, "end": end, "unsettled": unsettled, **facts}]


def stored(seconds: float) -> float:
    """Return the moment so many *seconds* before now, which stands still."""
    return NOW.timestamp() - seconds


def test_the_screen_of_a_group_that_works(told: Screens) -> None:
    """Offsets, lag, age, trend and verdict by partition; what is settled takes one line."""
    facts = {
        "members": {"orders": 2, "orders.billing.retry.1m": 2},
        "retention": {"orders": 7 * DAY},
    }
    retry = lane("orders.billing.retry.1m", 0, 40, 40)
    before = [
        lane("orders", 0, 4521850, 4521890, oldest=stored(9)),
        lane("orders", 1, 3892090, 3892100, oldest=stored(2)),
        lane("orders", 2, 5102300, 5102310, oldest=stored(60)),
    ]
    after = [
        lane("orders", 0, 4521890, 4521895, oldest=stored(3)),
        lane("orders", 1, 3892100, 3892100),
        lane("orders", 2, 5102340, 5102380, oldest=stored(75)),
    ]
    tell(told, {"lanes": [*before, retry], **facts}, {"lanes": [*after, retry], **facts})
    told.check("lag", "lag", "--window", "1s")
    shown = told.run("lag", "--window", "1s")
    for numbers in (
        "4521890 │ 4521895 │   5",
        "3892100 │ 3892100 │   0",
        "5102340 │ 5102380 │  40",
    ):
        assert numbers in shown


def test_the_screen_of_a_bad_night(told: Screens) -> None:
    """The most urgent topic first, what is lost and will be lost, and what to do next."""
    facts = {
        "members": {"orders": 3, "refunds": 0, "mails": 1},
        "retention": {"orders": 7 * DAY, "refunds": DAY},
    }
    lanes = [
        lane("mails", 0, 120, 120),
        lane("orders", 0, 900, 1204500, oldest=stored(6 * DAY)),
        lane("orders", 1, 7000, 7000),
        lane("refunds", 0, 10, 90, lag=60, deleted=20, oldest=stored(25 * HOUR)),
    ]
    tell(told, {"lanes": lanes, **facts})
    told.check("lag_bad_night", "lag", "--window", "1s")


def test_the_screen_of_a_broker_with_long_positions(told: Screens) -> None:
    """Ids of entries do not fit into 80 columns; nothing wraps, and --json has them."""
    last = "1794971999000-17"
    lanes = [lane("orders", 0, "1794960000000-0", last, lag=812, oldest=stored(3 * HOUR))]
    tell(told, {"lanes": lanes, "members": {"orders": 0}})
    told.check("lag_long_positions", "lag")
    assert last in told.run("lag", terminal=120)
    assert last in told.run("lag", "--json")


def test_json_tells_what_the_page_says(told: Screens) -> None:
    """One object a partition; lengths are seconds, and what is not told is null."""
    oldest = stored(6 * DAY)
    lanes = [lane("orders", 0, 900, 1200, oldest=oldest), lane("queue", 0, None, None, lag=4)]
    facts = {"members": {"orders": 3, "queue": 0}, "retention": {"orders": 7 * DAY}}
    tell(told, {"lanes": lanes, **facts})
    shown = told.run("lag", "--json", "--window", "1s").split("\n", 1)[1]
    orders, queue = json.loads(shown)
    assert orders == {
        "topic": "orders", "partition": 0, "current": 900, "end": 1200, "lag": 300,
        "lag_seconds": 6 * DAY, "lag_change": 0, "members": 3, "verdict": "stalled",
        "retention_seconds": 7 * DAY, "retention_left_seconds": DAY, "is_near_retention": True,
        "deleted": 0,
    }  # fmt: skip
    assert queue == {
        "topic": "queue", "partition": 0, "current": None, "end": None, "lag": 4,
        "lag_seconds": None, "lag_change": 0, "members": 0, "verdict": "stopped",
        "retention_seconds": None, "retention_left_seconds": None, "is_near_retention": False,
        "deleted": 0,
    }  # fmt: skip
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith("| `lag` |")]
    assert [name for name in orders if f"`{name}`" not in row] == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--group", "biling"), 1, "does not know group 'biling'"),
        (("--group", "biling", "--topic", "orders"), 1, "does not know group 'biling'"),
        (("--group", "billing", "--topic", "order"), 1, "has no topic 'order'"),
        (("--group", "billing", "--window", "0s"), 2, "above 0"),
        (("--group", "billing", "--window", "10"), 2, "10"),
        (("--group", "billing", "--watch", "--json"), 2, "--watch draws for people"),
        (("--group", ""), 2, "empty"),
        (("--group", "billing", "--topic", ""), 2, "empty"),
    ],
)
def test_a_wrong_name_or_setting_is_one_sentence(
    words: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    """Nobody is told that all is well because of a typing error."""
    with closing(connect(f"sqlite:///{tmp_path}/b.db")) as broker:
        broker.create_group("orders", "billing")
    done = shell("lag", "--broker", "sqlite:///b.db", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "url",
    [
        "kafka://{}?timeout=2",
        "kafka+confluent://{}?timeout=2",
        "redis://{}/0",
        "nats://{}",
        "amqp://g:g@{}/",
    ],
)
def test_a_broker_that_is_down_ends_with_3(url: str, tmp_path: Path) -> None:
    """Within the broker's own timeout, and in one sentence."""
    address = url.format(f"127.0.0.1:{free_port()}")
    done = shell(
        "lag", "--broker", address, "--group", "billing", "--topic", "orders", cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "\nholdfast: " in f"\n{done.stderr}"


def test_watch_draws_again_until_ctrl_c(tmp_path: Path) -> None:
    """What comes and goes meanwhile shows; the end is quiet."""
    with closing(connect(f"sqlite:///{tmp_path}/b.db?partitions=1")) as broker:
        broker.create_group("orders", "billing")
        # Where SIGINT is ignored, as in a shell's background, Python would not listen to it either.
        code = ("import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
                "from holdfast.cli import main; main()")  # fmt: skip
        command = [sys.executable, "-c", code, "lag", "--broker", "sqlite:///b.db",
                   "--group", "billing", "--watch", "--every", "1s"]  # fmt: skip
        file, told = tmp_path / "seen.txt", tmp_path / "told.txt"
        with file.open("w") as seen, told.open("w") as aside:
            process = subprocess.Popen(
                command, cwd=tmp_path, stdout=seen, stderr=aside,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        try:
            wait_until(lambda: "nothing waits" in file.read_text(), "the first look", 60)
            with closing(broker.sink()) as sink:
                sink.publish([Message.new("orders", b"1", key="k") for _ in range(3)])
            wait_until(lambda: "3 not settled" in file.read_text(), "the second look", 60)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
            assert told.read_text() == ""
        finally:
            process.kill()
            process.wait()
