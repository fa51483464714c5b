"""What an operator asks at night is answered: nothing looks like peace that is none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select, update

from holdfast.brokers import connect
from holdfast.cli.dlq.look import pace
from holdfast.db.audit import Operator
from holdfast.dlq import CaptureSettings, DeadLetterTopic, capture, close
from holdfast.dlq.replay import ReplayOptions, Selection, freeze
from holdfast.dlq.store.closing import SYSTEM
from holdfast.dlq.store.counters import snapshot, unfolded
from holdfast.dlq.store.schema import message
from holdfast.errors import Transient
from holdfast.message import Message
from tests.acceptance.test_dlq_cli import Desk
from tests.dead_letters import letter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOB = Operator(actor="bob", reason="fixed")


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Desk]:
    """Open a desk on SQLite."""
    made = Desk(tmp_path, capsys)
    yield made
    made.engine.dispose()


def first(desk: Desk) -> str:
    """Return the id of the latest letter."""
    return str(desk.json("list", "--state", "any")[0]["dlq_id"])


def test_a_letter_is_explained_like_its_group(desk: Desk) -> None:
    """Also on SQLite, where a second connection would wait for the first."""
    desk.fail(3, ValueError("bad total"))
    code, said, _ = desk.run("explain", first(desk))
    assert code == 0
    assert "looks like" in said
    assert "triage" in said
    assert said == desk.run("explain", desk.group())[1]


@pytest.mark.parametrize(
    "filters", [("--class", "bogus"), ("--state", "bogus")], ids=["class", "state"]
)
@pytest.mark.parametrize("command", ["groups", "list"])
def test_a_filter_that_cannot_match_is_refused(
    desk: Desk, command: str, filters: tuple[str, str]
) -> None:
    """A typing error must not look like peace."""
    desk.fail(2, ValueError("bad total"))
    code, _, error = desk.run(command, *filters)
    assert code == 2
    assert "bogus" in error
    assert "use one of" in error


def test_a_filter_that_matches_nothing_says_what_is_pending_without_it(desk: Desk) -> None:
    """The topic may be mistyped."""
    desk.fail(2, ValueError("bad total"))
    said = desk.run("groups", "--topic", "ordesr")[1]
    assert "nothing matches --topic ordesr" in said
    assert "2 messages are pending" in said
    assert "topic=ordesr" in desk.run("list", "--topic", "ordesr")[1]


def test_triage_is_seen_where_the_problem_is(desk: Desk) -> None:
    """What was decided, when the next retry is due, and what failed around it."""
    desk.fail(2, Transient("gateway times out"))
    said = desk.run("show", desk.group())[1]
    assert "retry by itself after a while: 2, the next 20" in said
    assert "looks like: " in said
    assert desk.json("show", desk.group())["triage"]["retry"]["pending"] == 2
    assert "2 wait for a retry, 0 are due now" in desk.run("stats")[1]


def test_a_group_shows_a_message_that_is_pending(desk: Desk) -> None:
    """Not the first one ever seen, which may be closed or pruned."""
    desk.fail(1, ValueError("bad total"))
    dead = first(desk)
    with desk.engine.begin() as db:
        close(db, [dead], "discarded", actor="ada", reason="x")
        db.execute(update(message).values(closed_at=1.0))
    assert desk.run("prune", "--older-than", "1d", "--yes")[0] == 0
    desk.fail(1, ValueError("bad total"))
    (found,) = desk.json("groups")
    assert found["state"] == "regressed"
    assert desk.json("show", found["group_id"])["letter"]["dlq_id"] == first(desk)


def test_a_letter_tells_who_failed_and_who_closed_it_and_why(desk: Desk) -> None:
    """Version, host and tenant; the actor and the reason; and what can be done about it."""
    origin = CaptureSettings(service_version="1.4.1", host="pod-7", tenant="tenant")
    made = Message.new("orders", b"{}", headers={"tenant": "acme"})
    one = capture(made, ValueError("bad"), group="billing", handler="shop.bill", origin=origin)
    desk.home.put(one)
    said = desk.run("show", one.dlq_id)[1]
    assert "billing with shop.bill, version 1.4.1, on pod-7; tenant acme" in said
    assert f"next: holdfast dlq replay --id {one.dlq_id[:8]} --dry-run" in said
    assert desk.run("discard", "--id", one.dlq_id, "--reason", "a test", "--yes")[0] == 0
    said = desk.run("show", one.dlq_id)[1]
    assert "discarded by " in said
    assert "Z: a test" in said
    assert "holdfast dlq reopen --id" in said
    found = desk.json("show", one.dlq_id)["letter"]
    assert (found["closed"]["reason"], found["tenant"]) == ("a test", "acme")


def test_a_letter_is_found_however_its_id_is_written(desk: Desk) -> None:
    """Ours are lower case; an envelope of another writer may say what it likes."""
    desk.fail(1, ValueError("bad total"))
    assert desk.run("show", first(desk).upper())[0] == 0
    with desk.engine.begin() as db:
        db.execute(update(message).values(dlq_id="ABCD-1"))
    assert desk.json("show", "ABCD")["letter"]["dlq_id"] == "ABCD-1"


def test_credentials_in_headers_are_on_no_screen(desk: Desk) -> None:
    """A replay sends them as they were; who looks sees stars, also in what an edit changed."""
    secret = "Bearer abcdefghijklmnop"
    made = Message.new("orders", b"{}", headers={"Authorization": secret, "own": "shown"})
    one = capture(made, ValueError("bad"), group="billing", handler="shop.bill")
    desk.home.put(one)
    edit = ("edit", one.dlq_id, "--header", "x-token=tiger", "--reason", "OPS-1")
    assert "tiger" not in desk.run(*edit)[1]
    for form in ((), ("--json",)):
        said = desk.run("show", one.dlq_id, *form)[1]
        assert "shown" in said
        assert "abcdefghijklmnop" not in said
        assert "tiger" not in said
    with desk.engine.connect() as db:
        assert secret in str(db.execute(select(message.c.headers)).scalar())


def test_a_parked_letter_is_reopened_with_a_reason(desk: Desk) -> None:
    """The loop cap is no dead end: replay, edit and discard are possible again."""
    desk.fail(2, ValueError("bad total"))
    dead = first(desk)
    with desk.engine.begin() as db:
        close(db, [dead], "parked", actor=SYSTEM, reason="replayed 3 times")
    code, _, error = desk.run("discard", "--id", dead, "--reason", "x", "--yes")
    assert code == 1
    assert "1 are parked" in error
    assert "holdfast dlq reopen" in error
    code, said, _ = desk.run("reopen", "--id", dead, "--reason", "fixed in 1.4.2", "--yes")
    assert (code, said.strip()) == (0, "1 messages are pending again")
    assert {row["state"] for row in desk.json("list", "--state", "any")} == {"pending"}
    assert desk.run("reopen", "--id", dead, "--reason", "x", "--yes")[0] == 1
    assert "reopen" in desk.run("audit")[1]
    assert desk.run("discard", "--id", dead, "--reason", "void", "--yes")[0] == 0
    assert desk.run("reopen", desk.group(), "--reason", "x", "--yes")[0] == 1
    assert desk.run("reopen", "--id", dead, "--reason", "a mistake", "--yes")[0] == 0


def test_what_a_plan_has_claimed_meanwhile_is_not_discarded(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator thought about it for a while; somebody else was quicker."""
    desk.fail(3, ValueError("bad total"))
    dead = first(desk)

    def asked(*_args: object, **_more: object) -> None:
        freeze(desk.engine, Selection(dlq_ids=(dead,)), ReplayOptions(), BOB)

    monkeypatch.setattr("holdfast.cli.dlq.letters.confirm", asked)
    code, said, _ = desk.run("discard", desk.group(), "--reason", "test data")
    assert code == 0
    assert "2 messages are discarded" in said
    assert "1 were closed or claimed by a plan meanwhile" in said
    assert [row["dlq_id"] for row in desk.json("list")] == [dead]


def test_the_audit_is_found_by_who_and_what(desk: Desk) -> None:
    """With the hour, in UTC, and the whole subject."""
    desk.fail(1, ValueError("bad total"))
    group = desk.json("groups")[0]["group_id"]
    desk.run("ack", group, "--reason", "OPS-1", "--actor", "ada")
    desk.run("mute", group, "--for", "1h", "--reason", "OPS-2", "--actor", "bob")
    said = desk.run("audit", "--by", "ada")[1]
    assert "ada: acknowledge" in said
    assert "bob" not in said
    assert "Z" in said
    assert len(desk.json("audit", "--subject", group[:8])) == 2
    assert "no entry matches" in desk.run("audit", "--subject", "nothing")[1]


def test_a_late_ack_is_refused(desk: Desk) -> None:
    """The problem is over; its return must be told."""
    desk.fail(1, ValueError("bad total"))
    group = desk.group()
    desk.run("discard", group, "--reason", "x", "--yes")
    code, _, error = desk.run("ack", group, "--reason", "OPS-1")
    assert code == 2
    assert "nothing pending" in error


def test_prune_says_what_it_would_delete(desk: Desk) -> None:
    """Nothing is deleted by asking."""
    desk.fail(2, ValueError("bad total"))
    desk.run("discard", desk.group(), "--reason", "x", "--yes")
    said = desk.run("prune", "--older-than", "0s", "--dry-run")[1]
    assert "2 closed dead letters would be deleted" in said
    assert len(desk.json("list", "--state", "any")) == 2


def test_stats_warn_of_what_nobody_has_collected(desk: Desk) -> None:
    """The broker may forget it; what is stored is kept, however old."""
    desk.fail(2, ValueError("bad total"))
    with desk.engine.begin() as db:
        db.execute(update(message).values(event_at=message.c.event_at - 400 * 86400))
    assert "WARNING" not in desk.run("stats")[1]
    broker = connect(desk.broker)
    home = DeadLetterTopic.on(broker)
    home.put(letter())
    home.close()
    broker.close()
    asked = ("stats", "--uncollected", "orders.billing.dlq", "--uncollected", "none.dlq")
    said = desk.run(*asked, "--broker", desk.broker)[1]
    assert "WARNING 1 dead letters wait on orders.billing.dlq and are in no store" in said
    assert desk.json(*asked, "--broker", desk.broker)["uncollected"] == {
        "orders.billing.dlq": 1,
        "none.dlq": 0,
    }
    code, _, error = desk.run(*asked)
    assert code == 2
    assert "--broker" in error


def test_the_collector_takes_rules_of_ones_own(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name; what is no Triage is refused before anything is collected."""
    monkeypatch.chdir(tmp_path)
    rules = "from holdfast.dlq.triage import Rule, Triage, TriageVerdict\n"
    rules += (
        "mine = Triage(rules=[Rule('all', lambda case: True, TriageVerdict.RETRY)])\nother = 7\n"
    )
    (tmp_path / "desk_rules.py").write_text(rules)
    broker = connect(desk.broker)
    home = DeadLetterTopic.on(broker)
    home.put(letter())
    home.close()
    broker.close()
    words = ("collect", "orders.billing.dlq", "--broker", desk.broker, "--once", "--triage")
    code, _, error = desk.run(*words, "desk_rules:other")
    assert (code, "not a Triage" in error) == (2, True)
    assert desk.run(*words, "desk_rules:mine")[0] == 0
    with desk.engine.connect() as db:
        assert db.execute(select(message.c.verdict)).scalars().all() == ["retry"]


def test_the_trend_is_whole_on_a_narrow_terminal(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current hour is the right end: it must not be cut off."""
    from holdfast.cli import display

    monkeypatch.setattr(display.out, "_width", 80)
    desk.fail(3, ValueError("bad total"))
    assert re.search("[·█]{24}", desk.run("groups")[1])


def test_a_topic_that_does_not_exist_is_not_collected_in_silence(desk: Desk) -> None:
    """With the name that was meant, as far as the store knows it."""
    desk.fail(1, ValueError("bad total"))
    code, _, error = desk.run("collect", "orders.biling.dlq", "--broker", desk.broker, "--once")
    assert code == 1
    assert "no such topic: 'orders.biling.dlq' (did you mean orders.billing.dlq?)" in error


BOMB = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m" + "a" * 10_000_000 + "\x00\ud800"
VIEWS = (
    ("stats",), ("groups",), ("list",), ("show",), ("explain",), ("audit",), ("export",),
    ("replay", "--dry-run"),
)  # fmt: skip


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view[0])
def test_ten_megabytes_of_hostile_text_are_harmless_in_every_view(
    desk: Desk, view: tuple[str, ...]
) -> None:
    """Bounded, without anything that a terminal obeys; payload and key are no text at all."""
    made = Message.new("orders", b"\xff\xfe\x00\x1b[2J", key=b"\x80k\x1b[2J")
    error = RuntimeError(BOMB)
    error.add_note(BOMB)
    desk.home.put(capture(made, error, group="billing\x1b[2J", handler="shop.bill\x07"))
    named = view[0] in ("show", "explain", "replay")
    args = [view[0], *([desk.group()] if named else []), *view[1:]]
    desk.run("ack", desk.group(), "--reason", BOMB[:5000], "--actor", "ada\x1b[2J")
    if view[0] == "export":
        args += ["--to", "-"]
    for form in ([], ["--json"]) if view[0] != "export" else ([],):
        code, said, error_said = desk.run(*args, *form)
        assert code == 0, error_said
        assert len(said) < 100_000
        assert not set(said) & set("\x1b\x07\x9b\u202e\x00"), form


def test_a_storm_is_told_from_a_usual_night(desk: Desk) -> None:
    """By the inflow of these hours against that of the day before."""
    desk.fail(12, ValueError("bad total"))
    assert ": A STORM, more than 5 times the usual" in desk.run("stats")[1]


@pytest.mark.parametrize(
    ("inflow", "now", "told"),
    [
        ((10,) * 22 + (10, 1), 360.0, "10.0 an hour in the last 66 min, 10.0 before: about as us"),
        ((10,) * 22 + (10, 20), 360.0, "27.3 an hour in the last 66 min, 10.0 before: RISING"),
        ((10,) * 22 + (40, 60), 3600.0, "100.0 an hour in the last 60 min, 10.0 before: A STORM"),
        ((10,) * 22 + (2, 2), 1800.0, "2.7 an hour in the last 90 min, 10.0 before: falling"),
        ((0,) * 22 + (1, 1), 1800.0, "1.3 an hour in the last 90 min, 0.0 before: about as us"),
    ],
)  # fmt: skip
def test_an_hour_that_has_just_begun_is_not_taken_for_a_whole_one(
    inflow: tuple[int, ...], now: float, told: str
) -> None:
    """At five past the inflow has not fallen, nor is a storm of five minutes a quiet hour."""
    assert pace(inflow, now).startswith(f"inflow {told}")


def test_the_most_urgent_problem_is_on_top(desk: Desk) -> None:
    """What nobody looks after comes before what somebody does, however large that is."""
    desk.fail(9, ValueError("known"))
    desk.fail(7, KeyError("hushed"))
    desk.fail(1, TypeError("news"))
    known, hushed, _ = (str(one["group_id"]) for one in desk.json("groups"))
    assert desk.run("ack", known, "--reason", "OPS-1", "--owner", "grace")[0] == 0
    assert desk.run("mute", hushed, "--for", "4h", "--reason", "OPS-2")[0] == 0
    assert [one["pending"] for one in desk.json("groups")] == [1, 9, 7]
    said = desk.run("groups")[1]
    assert "looked after by grace" in said
    assert "muted until 20" in said


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("list", "--limit", "9" * 20), "--limit"),
        (("audit", "--limit", "9" * 20), "--limit"),
        (("mute", "GROUP", "--for", "9" * 9 + "w", "--reason", "x"), "--for"),
    ],
)
def test_a_number_that_no_machine_takes_is_refused(
    desk: Desk, command: tuple[str, ...], told: str
) -> None:
    """With the option that is wrong, not with a traceback."""
    desk.fail(1, ValueError("bad total"))
    code, _, error = desk.run(*(desk.group() if word == "GROUP" else word for word in command))
    assert code == 2
    assert told in error


def test_a_plan_says_what_can_be_done_about_it(desk: Desk) -> None:
    """Whether it waits for somebody, is being sent, or has stopped."""
    desk.fail(3, ValueError("bad total"))
    plan = freeze(desk.engine, Selection(topic="orders"), ReplayOptions(approve_above=1), BOB).plan
    assert "next: somebody else than bob says" in desk.run("plans", "show", plan.id)[1]
    desk.run("plans", "approve", plan.id, "--reason", "x", "--actor", "eve")
    assert f"next: holdfast dlq plans resume {plan.short}" in desk.run("plans", "show", plan.id)[1]


def test_figures_that_are_not_counted_to_the_end_say_so(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million retries are not counted one by one while somebody waits for the answer."""
    for module in ("holdfast.dlq.store.stats", "holdfast.cli.dlq.look"):
        monkeypatch.setattr(f"{module}.MOST_COUNTED", 3)
    for module in ("holdfast.dlq.store.groups", "holdfast.cli.dlq.show"):
        monkeypatch.setattr(f"{module}.MOST", 3)
    desk.fail(5, Transient("gateway times out"))
    assert "3 or more wait for a retry, 0 are due now" in desk.run("stats")[1]
    assert "triage of the latest 3: retry" in desk.run("show", desk.group())[1]


def test_looking_keeps_no_writer_waiting(desk: Desk) -> None:
    """On SQLite, too: whoever reads for long does not stop the consumer meanwhile."""
    desk.fail(2, ValueError("bad total"))
    with snapshot(desk.engine) as db:
        assert len(unfolded(db)) == 1
        desk.fail(1, KeyError("while somebody looks"))
        assert len(unfolded(db)) == 1  # still the same moment
    assert len(desk.json("groups")) == 2
