"""Triage holds, retries or alerts by rules; alerts are told once, and regrouping is mapped."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update

from holdfast.backoff import Backoff, Jitter
from holdfast.db.audit import Operator, entries
from holdfast.dlq import DeadLetterStore, close
from holdfast.dlq.alerts import Alerts, Command, Webhook
from holdfast.dlq.store.closing import judged, look_around
from holdfast.dlq.store.counters import fold
from holdfast.dlq.store.groups import FailureGroups
from holdfast.dlq.store.regroup import moves, regroup
from holdfast.dlq.store.rows import fingerprint_of
from holdfast.dlq.store.schema import group, message
from holdfast.dlq.triage import Rule, Triage, TriageVerdict
from holdfast.errors import ConfigurationError, DecodeFailed, Transient
from holdfast.testing import VirtualClock
from tests.dead_letters import KINDS, emptied, letter, opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.dlq.capture import fingerprint

OPERATOR = Operator(actor="ada", reason="OPS-1")


@pytest.fixture(scope="module", params=KINDS)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a database of each kind."""
    made = opened(request, tmp_path_factory.mktemp("triage"))
    yield made
    made.dispose()


@pytest.fixture
def engine(database: Engine) -> Engine:
    """Return the database, empty."""
    return emptied(database)


def row(engine: Engine, dlq_id: str) -> Any:
    """Return the stored row."""
    with engine.connect() as db:
        return db.execute(select(message).where(message.c.dlq_id == dlq_id)).mappings().one()


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (DecodeFailed("bad", "byte 3"), TriageVerdict.CODE),
        (DecodeFailed("bad", "$.total"), TriageVerdict.DATA),
        (TimeoutError("slow"), TriageVerdict.RETRY),
        (ConnectionResetError("gone"), TriageVerdict.RETRY),
        (NameError("x"), TriageVerdict.CODE),
        (KeyError("x"), TriageVerdict.CODE),
        (RuntimeError("?"), TriageVerdict.ALERT),
    ],
)
def test_the_built_in_rules(engine: Engine, error: BaseException, verdict: TriageVerdict) -> None:
    """Schema waits for code, validation for data, outages are retried, the unknown alerts."""
    put = letter(error=error)
    DeadLetterStore(engine).put(put)
    stored = row(engine, put.dlq_id)
    assert stored["verdict"] == verdict.value
    assert (stored["due_at"] is not None) == (verdict is TriageVerdict.RETRY)


def test_automatic_retries_come_later_and_later_and_end(engine: Engine) -> None:
    """Each failure sets the next one further away; after the last it is an alert."""
    clock = VirtualClock()
    delays = Backoff(first=60, ceiling=1000, factor=2, attempts=3, jitter=Jitter.NONE)
    home = DeadLetterStore(engine, clock=clock, triage=Triage(delays=delays))
    waits = []
    for _ in range(3):
        put = letter(error=TimeoutError("slow"), clock=clock)
        home.put(put)
        stored = row(engine, put.dlq_id)
        due = stored["due_at"]
        waits.append(None if due is None else round(due - clock.now().timestamp()))
        with engine.begin() as db:  # as the sender of due messages does
            sent = {"due_at": None, "retries": message.c.retries + 1}
            db.execute(update(message).values(**sent))
        clock.advance(2000)
    assert waits == [60, 120, None]
    assert row(engine, put.dlq_id)["verdict"] == TriageVerdict.ALERT.value


def test_rules_of_the_user_come_first_and_a_broken_one_is_skipped(engine: Engine) -> None:
    """A rule that raises does not lose the letter."""
    declined = Rule("declined", lambda case: "declined" in case.error_text, TriageVerdict.DATA)
    broken = Rule("broken", lambda case: case.nonsense, TriageVerdict.CODE)  # type: ignore[attr-defined]
    home = DeadLetterStore(engine, triage=Triage(rules=[broken, declined]))
    put = letter(error=RuntimeError("card declined"))
    home.put(put)
    assert row(engine, put.dlq_id)["verdict"] == TriageVerdict.DATA.value
    with pytest.raises(ConfigurationError, match="predicate"):
        Rule("bad", "x", TriageVerdict.CODE)  # type: ignore[arg-type]


class Ear:
    """A hook that remembers, and fails as often as told."""

    def __init__(self, failures: int = 0) -> None:
        self.heard: list[dict[str, Any]] = []
        self._failures = failures

    def tell(self, alert: dict[str, Any]) -> None:
        """Take *alert*, or fail."""
        if self._failures:
            self._failures -= 1
            raise Transient("deaf")
        self.heard.append(alert)


def test_an_unknown_problem_is_told_once_and_again_when_it_returns(engine: Engine) -> None:
    """Not per message; a failed hook is asked again; known problems are quiet."""
    clock = VirtualClock()
    home, ear = DeadLetterStore(engine, clock=clock), Ear(failures=1)
    letters = [letter(n, RuntimeError("odd"), clock=clock) for n in range(3)]
    home.put_all([*letters, letter(9, TimeoutError("slow"), clock=clock)])
    alerts = Alerts(engine, [ear], clock=clock)
    assert [alerts.run_once() for _ in range(3)] == [0, 1, 0]
    (alert,) = ear.heard
    assert alert["pending"] == 3
    assert "payload" not in json.dumps(alert)
    with engine.begin() as db:
        ids = [one.dlq_id for one in letters]
        close(db, ids, "discarded", actor="ada", reason="x", clock=clock)
    fold(engine)
    home.put(letter(5, RuntimeError("odd"), clock=clock))
    assert alerts.run_once() == 1
    assert ear.heard[1]["state"] == "regressed"


def test_a_small_new_problem_is_told_among_a_hundred_large_ones(engine: Engine) -> None:
    """Those are known; it is news."""
    home, ear = DeadLetterStore(engine), Ear()
    home.put_all([letter(n, RuntimeError("odd"), handler=f"h{n % 101}") for n in range(202)])
    with engine.begin() as db:
        db.execute(update(group).values(alerted_at=1.0))  # they were told
    alerts = Alerts(engine, [ear])
    home.put(letter(999, RuntimeError("odd"), handler="new"))
    assert alerts.run_once() == 1
    assert ear.heard[-1]["handler"] == "new"


def test_a_muted_problem_is_told_again_when_the_time_is_over(engine: Engine) -> None:
    """Until then it is quiet; after that somebody must look, for it is still there."""
    clock, ear = VirtualClock(), Ear()
    DeadLetterStore(engine, clock=clock).put(letter(1, RuntimeError("odd"), clock=clock))
    alerts, groups = Alerts(engine, [ear], clock=clock), FailureGroups(engine, clock=clock)
    assert alerts.run_once() == 1
    until = clock.now() + timedelta(hours=4)
    groups.mute(groups.listed()[0].group_id, OPERATOR, until=until)
    assert alerts.run_once() == 0
    clock.advance(4 * 3600)
    assert [alerts.run_once() for _ in range(2)] == [1, 0]


def test_an_acknowledged_problem_is_quiet(engine: Engine) -> None:
    """Somebody looks after it already."""
    DeadLetterStore(engine).put(letter(1, RuntimeError("odd")))
    groups = FailureGroups(engine)
    groups.acknowledge(groups.listed()[0].group_id, OPERATOR)
    assert Alerts(engine, [Ear()]).run_once() == 0


def test_many_failing_at_once_point_to_a_dependency_and_one_to_data(engine: Engine) -> None:
    """By keys within the window, not by the size of the group."""
    home = DeadLetterStore(engine)
    home.put_all([letter(n, RuntimeError("down")) for n in range(12)])
    home.put(letter(99, RuntimeError("other"), topic="lonely"))
    with engine.connect() as db:
        found = {
            one.topic: look_around(db, one.group_id).verdict
            for one in FailureGroups(engine).listed()
        }
    assert found == {"orders": "dependency", "lonely": "data"}
    assert judged(same=3, keys=3, others=2).verdict == "unclear"
    assert judged(same=12, keys=12, others=0, handled=5000).verdict == "unclear"


def coarse(failure: Any) -> fingerprint.Fingerprint:
    """Return another algorithm's fingerprint: by stage alone."""
    found = fingerprint_of(failure)
    text = f"v9 {failure.stage.value}"
    return found._replace(value=text.ljust(64, "0"), text=text, algorithm="v9")


def test_regrouping_is_explicit_counted_and_mapped(engine: Engine) -> None:
    """Messages, figures, owner and note move; the old groups rest; a second run does nothing."""
    home, groups = DeadLetterStore(engine), FailureGroups(engine)
    home.put_all([letter(n, RuntimeError("odd")) for n in range(3)])
    closed = letter(7, KeyError("x"))
    home.put_all([letter(n, KeyError("x")) for n in range(5, 7)] + [closed])
    with engine.begin() as db:
        close(db, [closed.dlq_id], "discarded", actor="ada", reason="x")
    old = {one.group_id for one in groups.listed()}
    groups.acknowledge(next(iter(old)), OPERATOR, owner="bob")
    moved = regroup(engine, OPERATOR, fingerprint=coarse)
    assert sum(moved.values()) == 6
    assert {pair[0] for pair in moved} == old
    (one,) = groups.listed()
    assert (one.pending, one.total, one.discarded) == (5, 6, 1)
    assert (one.algorithm, one.owner) == ("v9", "bob")
    with engine.connect() as db:
        assert sum(count for _, _, count in moves(db)) == 6
        assert entries(db)[0].action == "regroup"
    assert regroup(engine, OPERATOR, fingerprint=coarse) == {}
    home.put(letter(50, RuntimeError("odd")))  # by a process of the old version
    assert {one.pending for one in groups.listed()} == {5, 1}


@pytest.mark.parametrize("said", ["acknowledged", "new"])
def test_moving_messages_is_no_recurrence(engine: Engine, said: str) -> None:
    """A closed message ahead of pending ones does not make the new group a regressed one."""
    home, groups = DeadLetterStore(engine), FailureGroups(engine)
    closed = letter(1)
    home.put(closed)
    with engine.begin() as db:
        close(db, [closed.dlq_id], "discarded", actor="ada", reason="x")
    home.put_all([letter(n) for n in range(2, 5)])
    fold(engine)
    with engine.begin() as db:  # as it was before anything was closed
        db.execute(update(group).values(state=said, alerted_at=7.0))
    regroup(engine, OPERATOR, fingerprint=coarse)
    (one,) = groups.listed()
    assert (one.state, one.pending, one.discarded) == (said, 3, 1)
    assert Alerts(engine, [Told()]).run_once() == 0


class Told:
    """A hook that keeps what it is told, and can be away."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self.away: BaseException | None = None

    def tell(self, alert: dict[str, Any]) -> None:
        """Take *alert*, or fail as hooks of others do."""
        if self.away is not None:
            raise self.away
        self.groups.append(alert["verdicts"])


def test_a_hook_that_is_away_repeats_nothing_to_the_others(engine: Engine) -> None:
    """Whatever it raises; each hears of the problem once."""
    DeadLetterStore(engine).put(letter(1, RuntimeError("odd")))
    well, ill = Told(), Told()
    ill.away = http.client.BadStatusLine("?")
    teller = Alerts(engine, [ill, well])
    assert [teller.run_once(), teller.run_once()] == [0, 0]
    assert well.groups == [["alert"]]
    ill.away = None
    assert [teller.run_once(), teller.run_once()] == [1, 0]
    assert (len(well.groups), len(ill.groups)) == (1, 1)


def test_whatever_waits_for_a_person_is_told(engine: Engine) -> None:
    """A storm of bad data or a bug too; only what is tried again by itself is not."""
    home = DeadLetterStore(engine)
    home.put(letter(1, KeyError("x")))
    home.put(letter(2, DecodeFailed("bad", "$.total")))
    home.put(letter(3, TimeoutError("slow")))
    told = Told()
    assert Alerts(engine, [told]).run_once() == 2
    assert sorted(told.groups) == [["hold for code"], ["hold for data"]]


def test_an_answer_that_is_not_http_is_a_refusal() -> None:
    """It is translated, as every other fault of a webhook."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        peer, _ = server.accept()
        with peer:
            peer.recv(65536)
            peer.sendall(b"nonsense\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(Transient, match="did not take"):
        Webhook(f"http://127.0.0.1:{server.getsockname()[1]}").tell({})
    thread.join()
    server.close()
    for broken in ("http://[::1/", "http://host:port/", "http://"):
        with pytest.raises(ConfigurationError, match="is no address"):
            Webhook(broken)


def test_an_outage_without_keys_is_not_taken_for_bad_data(engine: Engine) -> None:
    """Each message without a key stands for itself."""
    DeadLetterStore(engine).put_all([letter(n, TimeoutError("slow"), key=None) for n in range(20)])
    name = FailureGroups(engine).listed()[0].group_id
    with engine.connect() as db:
        around = look_around(db, name)
    assert (around.verdict, around.keys) == ("dependency", 20)


def test_a_webhook_gets_the_alert_as_json() -> None:
    """A refusal is told as such, without the secret of the URL."""
    bodies: list[bytes] = []
    known: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            known.append(self.headers["authorization"])
            moved = self.path.startswith("/moved")
            self.send_response(204 if self.path == "/ok" else 301 if moved else 500)
            if moved:
                self.send_header("location", "/ok")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)  # what a redirected POST would have become
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        Webhook(f"{base}/ok").tell({"group": "7f3a"})
        with pytest.raises(Transient, match="did not take") as info:
            Webhook(f"{base}/no?token=hush").tell({})
        assert "hush" not in str(info.value)
        for path in ("/moved", "/T0/B0/hush"):
            hook = Webhook(f"http://ops:hush@127.0.0.1:{server.server_port}{path}/hush")
            with pytest.raises(Transient, match=r"it answered (301|500)") as info:
                hook.tell({})
            assert not any(word in f"{info.value} {hook!r}" for word in ("hush", "ops", "T0"))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert json.loads(bodies[0]) == {"group": "7f3a"}
    assert known[0] is None
    assert known[-1] == "Basic b3BzOmh1c2g="
    with pytest.raises(ConfigurationError, match="http"):
        Webhook("file:///etc/passwd")
    with pytest.raises(Transient, match=r"http://127\.0\.0\.1:1 did not take") as info:
        Webhook("http://ops:hush@127.0.0.1:1/hush").tell({})
    assert "hush" not in f"{info.value}{info.value.__cause__}"


@pytest.mark.programs
def test_a_command_gets_the_alert_on_its_input_and_no_shell(tmp_path: Path) -> None:
    """Hostile text stays text."""
    target = tmp_path / "out"
    program = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    hostile = "$(touch pwned); `rm -rf /`\n"
    Command([sys.executable, "-c", program, str(target)]).tell({"title": hostile})
    assert json.loads(target.read_text())["title"] == hostile
    with pytest.raises(Transient, match="ended with 3"):
        Command([sys.executable, "-c", "raise SystemExit(3)"]).tell({})
    with pytest.raises(Transient, match="did not take"):
        Command(["/nowhere/at/all"]).tell({})
    with pytest.raises(ConfigurationError, match="as a list"):
        Command("rm -rf /")
