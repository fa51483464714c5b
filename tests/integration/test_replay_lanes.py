"""A plan in lanes: many send at once, in order, and nobody who was replaced goes on."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update

from holdfast.brokers import connect
from holdfast.db.audit import verify
from holdfast.db.engine import open_database
from holdfast.dlq.replay import (
    EndingKind,
    Rate,
    ReplayOptions,
    Selection,
    Sender,
    StopPolicy,
    freeze,
)
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.lane_freeze import (
    Draft,
    LaneSizes,
    PlannedLetter,
    begin,
    claim_lane,
    finish,
)
from holdfast.dlq.replay.lane_sender import (
    LaneOrder,
    LaneResult,
    LanesSender,
    LanesUnfinished,
    send_lane,
)
from holdfast.dlq.replay.lanes import LEASE_SECONDS, LaneClaim, lane_of, marks_of
from holdfast.dlq.replay.lease import Fenced, PlanLease, TakenPlan
from holdfast.dlq.replay.plan import NotNow, PlanState
from holdfast.dlq.replay.retention import prune_plans
from holdfast.dlq.replay.schema import item, lane
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.replay.survey import surveyed
from holdfast.dlq.store.schema import message
from holdfast.errors import BrokerDown
from holdfast.testing import VirtualClock, wait_until
from tests.dead_letters import emptied, opened
from tests.integration.test_replay import ADA, BOB, QUICK, Shop, effects
from tests.migrated import migrated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay.plan import ReplayPlan

LANES = 3
BILLING = Selection(consumer_group="billing")
AT_ONCE = ReplayOptions(policy=StopPolicy(canary=0, ramp=(), patience=20))
PACE = Pace(batch=5, lease_seconds=2.0, poll_seconds=0.02)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on SQLite, where the database makes no difference."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    migrated(engine)
    yield Shop(engine, tmp_path)
    engine.dispose()


@pytest.fixture(scope="module", params=["sqlite", "postgres", "mariadb"])
def database(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Engine]:
    """Open each database once."""
    engine = opened(request, tmp_path_factory.mktemp("lanes"))
    yield engine
    engine.dispose()


@pytest.fixture
def shop(database: Engine, tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on each database, with nothing in it."""
    shop = Shop(emptied(database), tmp_path)
    with database.begin() as db:
        db.execute(effects.delete())
    yield shop
    shop.broker.close()


def drafted(shop: Shop, terms: ReplayOptions) -> tuple[PlanLease, Draft, list[list[PlannedLetter]]]:
    """Begin a plan of everything of billing, and return what each lane has to claim."""
    manifest = surveyed(shop.engine, BILLING, terms)
    size = min(terms.policy.canary, len(manifest.letters))
    sorts: list[list[list[PlannedLetter]]] = [[[] for _ in range(LANES)] for _ in range(3)]
    for at, one in enumerate(manifest.letters):
        made = PlannedLetter(one.dlq_id, one.seq, one.key_hash, one.fingerprint, "claimed", None)
        sorts[0 if at < size else 1][lane_of(one.key_hash, LANES)].append(made)
    for one, state, note in manifest.aside:
        made = PlannedLetter(one.dlq_id, one.seq, one.key_hash, one.fingerprint, state.value, note)
        sorts[2][lane_of(one.key_hash, LANES)].append(made)
    canary, rest, aside = (tuple(map(len, lanes)) for lanes in sorts)
    draft = Draft(
        selection=BILLING,
        terms=terms,
        operator=ADA,
        high_water=manifest.high_water,
        sizes=LaneSizes(canary=canary, rest=rest, aside=aside),
        fingerprints=tuple(manifest.fingerprints),
    )
    work = [[*sorts[0][n], *sorts[1][n], *sorts[2][n]] for n in range(LANES)]
    return begin(shop.engine, draft), draft, work


def taken(shop: Shop, lease: PlanLease, number: int, attempt: int = 0) -> LaneClaim:
    """Take a lane as that attempt."""
    return LaneClaim.take(shop.engine, lease.plan_id, number, epoch=lease.epoch, attempt=attempt)


def frozen(shop: Shop, terms: ReplayOptions = AT_ONCE) -> ReplayPlan:
    """Make a plan in lanes."""
    lease, draft, work = drafted(shop, terms)
    hashes = [h for n in range(LANES) for h in claim_lane(taken(shop, lease, n), iter(work[n]))]
    return finish(lease, draft, hashes)


class Threads:
    """Sends the lanes by threads, each through a connection of its own."""

    def __init__(self, shop: Shop, wrapped: Callable[[Any, int], Any] | None = None) -> None:
        self._shop = shop
        self._wrapped = wrapped
        self._attempts = iter(range(1_000_000))
        self.orders: list[LaneOrder] = []

    def __call__(self, order: LaneOrder) -> list[LaneResult]:
        self.orders.append(order)
        with ThreadPoolExecutor(order.lanes) as threads:
            return list(threads.map(lambda n: self._send(order, n), range(order.lanes)))

    def _send(self, order: LaneOrder, number: int) -> LaneResult:
        with closing(connect(self._shop.url)) as broker:
            through = broker if self._wrapped is None else self._wrapped(broker, number)
            return send_lane(
                order, number, self._shop.engine, through, attempt=next(self._attempts)
            )


def send(shop: Shop, plan: ReplayPlan, lanes: Any = None, **more: Any) -> Any:
    """Send a plan to its end."""
    return LanesSender(shop.engine, lanes or Threads(shop), pace=PACE, **more).run(plan.id)


def test_lanes_send_everything_once_in_the_order_of_each_key(shop: Shop) -> None:
    """Canary, ramp and rest, by three senders at a time; the plan ends as any other does."""
    shop.fail(60)
    plan = frozen(shop, ReplayOptions(policy=QUICK))
    assert (plan.state, plan.lanes, plan.total) == (PlanState.DRAFT, LANES, 60)
    assert shop.plans.manifest_hash(plan) == plan.hash
    lanes = Threads(shop)
    with shop.billing.running("orders.billing.replay"):
        ending = send(shop, plan, lanes)
    assert ending.kind is EndingKind.CONFIRMED
    assert [order.gate for order in lanes.orders] == [3, 30, 60]
    assert shop.items(plan.id) == {"confirmed": 60}
    assert shop.effects() == {f"k{k}": [n for n in range(60) if n % 7 == k] for k in range(7)}
    assert sorted(m.id for m in shop.billing.seen) == [f"m-{n:05}" for n in range(60)]
    found = shop.plans.find(plan.id)
    assert (found.state, found.sent) == (PlanState.DONE, 60)
    counts = shop.plans.tally(found)
    assert (counts[ItemState.CONFIRMED], counts[ItemState.SENT], counts.published) == (60, 0, 60)
    with shop.engine.connect() as db:
        assert verify(db).is_whole


class Cut:
    """A broker whose sender dies in its second batch, before or after the broker took it."""

    def __init__(self, broker: Any, *, stored: bool, error: BaseException) -> None:
        self._broker = broker
        self._stored = stored
        self._error = error
        self.batches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def sink(self) -> Any:
        """Return the sink that dies."""
        inner, outer = self._broker.sink(), self

        class Sink:
            caps = inner.caps

            def publish(self, messages: Any) -> Any:
                outer.batches += 1
                if outer.batches == 1:
                    return inner.publish(messages)
                if outer._stored:
                    inner.publish(messages)
                raise outer._error

            def close(self) -> None:
                inner.close()

        return Sink()


@pytest.mark.parametrize("stored", [True, False])
def test_a_sender_that_dies_repeats_one_batch_of_its_lane_and_no_effect(
    shop: Shop, stored: bool
) -> None:
    """The next attempt goes on from the mark of the lane; the other lanes do not notice."""
    shop.fail(60)
    plan = frozen(shop)
    lease = PlanLease.take(shop.engine, plan.id, seconds=60)
    order = LaneOrder(plan_id=plan.id, lanes=LANES, epoch=lease.epoch, gate=60, batch=5)
    cut = Cut(shop.broker, stored=stored, error=KeyboardInterrupt())
    busiest = max(range(LANES), key=lambda n: _size(shop, plan, n))
    with pytest.raises(KeyboardInterrupt):
        send_lane(order, busiest, shop.engine, cut, attempt=1)  # type: ignore[arg-type]
    lease.release()
    # Nobody confirms before all is sent: whether a copy goes again is the mark's to say.
    lanes = Threads(shop)
    successor = PlanLease.take(shop.engine, plan.id, seconds=60)
    lanes(replace(order, epoch=successor.epoch))
    successor.release()
    with shop.billing.running("orders.billing.replay"):
        ending = send(shop, plan, lanes)
    assert ending.kind is EndingKind.CONFIRMED
    copies = Counter(m.id for m in shop.billing.seen)
    assert len(copies) == 60
    assert sum(copies.values()) - 60 == (5 if stored else 0)
    assert shop.effects() == {f"k{k}": [n for n in range(60) if n % 7 == k] for k in range(7)}


def test_a_batch_goes_only_once_the_one_before_it_is_marked(small: Shop) -> None:
    """That is why a crash repeats one batch of a lane and not two."""
    small.fail(30, keys=1)
    plan = frozen(small)
    seen: list[tuple[int, int]] = []

    class Noting(Cut):
        def sink(self) -> Any:
            inner = self._broker.sink()

            class Sink:
                caps = inner.caps

                def publish(self, messages: Any) -> Any:
                    with small.engine.connect() as db:
                        marked = sum(one.sent - one.start for one in marks_of(db, plan.id))
                    seen.append((marked, len(messages)))
                    return inner.publish(messages)

                def close(self) -> None:
                    inner.close()

            return Sink()

    lanes = Threads(small, lambda broker, _: Noting(broker, stored=True, error=RuntimeError()))
    with small.billing.running("orders.billing.replay"):
        assert send(small, plan, lanes).kind is EndingKind.CONFIRMED
    assert seen == [(n, 5) for n in range(0, 30, 5)]


def _size(shop: Shop, plan: ReplayPlan, number: int) -> int:
    with shop.engine.connect() as db:
        return sum(one.beyond - one.start for one in marks_of(db, plan.id, number))


def test_an_attempt_that_was_replaced_is_fenced_at_its_next_batch(shop: Shop) -> None:
    """Two live attempts of one lane: the older one sends the batch in hand and no more."""
    shop.fail(60, keys=1)
    plan = frozen(shop)
    lease = PlanLease.take(shop.engine, plan.id, seconds=60)
    number = next(n for n in range(LANES) if _size(shop, plan, n))
    order = LaneOrder(plan_id=plan.id, lanes=LANES, epoch=lease.epoch, gate=60, batch=5)
    inside, goes_on = threading.Event(), threading.Event()
    older: list[BaseException] = []

    class Slow(Cut):
        def sink(self) -> Any:
            inner = self._broker.sink()

            class Sink:
                caps = inner.caps

                def publish(self, messages: Any) -> Any:
                    inside.set()
                    assert goes_on.wait(60)
                    return inner.publish(messages)

                def close(self) -> None:
                    inner.close()

            return Sink()

    def work() -> None:
        slow: Any = Slow(shop.broker, stored=True, error=RuntimeError())
        try:
            send_lane(order, number, shop.engine, slow, attempt=4)
        except Fenced as error:
            older.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    newer = taken(shop, lease, number, attempt=5)
    goes_on.set()
    thread.join()
    assert len(older) == 1
    with shop.engine.connect() as db:
        assert sum(one.sent - one.start for one in marks_of(db, plan.id)) == 0
    with pytest.raises(Fenced):
        taken(shop, lease, number, attempt=3)
    with shop.engine.begin() as db:
        newer.write(db, 0)
    lease.release()


def test_a_second_leader_is_refused_and_a_dead_one_is_fenced_off_with_its_lanes(
    shop: Shop,
) -> None:
    """While the first lives the plan is taken; afterwards what its lanes write is refused."""
    shop.fail(12)
    plan = frozen(shop)
    first = PlanLease.take(shop.engine, plan.id, seconds=60)
    old = taken(shop, first, 1, attempt=7)
    with pytest.raises(TakenPlan):
        LanesSender(
            shop.engine, Threads(shop), pace=Pace(batch=5, lease_seconds=0.2, poll_seconds=0.02)
        ).run(plan.id)
    first.release()
    PlanLease.take(shop.engine, plan.id, seconds=60)
    with shop.engine.connect() as db, pytest.raises(Fenced):
        old.check_plan(db)
    with pytest.raises(Fenced):
        taken(shop, first, 2, attempt=99)


def test_a_pause_ends_every_lane_and_the_plan_goes_on_from_there(small: Shop) -> None:
    """An operator elsewhere stops it as she stops any plan; nothing is sent twice."""
    small.fail(60)
    plan = frozen(small, ReplayOptions(policy=AT_ONCE.policy, rate=Rate.parse("40/s")))
    endings: list[Any] = []
    thread = threading.Thread(target=lambda: endings.append(send(small, plan)))
    with small.billing.running("orders.billing.replay"):
        thread.start()
        wait_until(lambda: small.plans.tally(small.plans.find(plan.id)).published > 0)
        paused = small.plans.pause(small.plans.find(plan.id), BOB)
        thread.join()
        assert endings[0].kind is EndingKind.PAUSED
        assert 0 < small.plans.tally(small.plans.find(plan.id)).published < 60
        small.plans.resume(paused, BOB, rate=Rate.parse("10000/s"))
        assert send(small, plan).kind is EndingKind.CONFIRMED
    assert sorted(m.id for m in small.billing.seen) == [f"m-{n:05}" for n in range(60)]


def test_an_abort_fences_the_lanes_and_frees_what_was_not_sent(small: Shop) -> None:
    """Whoever claims or sends for it is told at the next batch."""
    small.fail(60)
    plan = frozen(small, ReplayOptions(policy=AT_ONCE.policy, rate=Rate.parse("40/s")))
    endings: list[Any] = []

    def work() -> None:
        try:
            endings.append(send(small, plan))
        except Fenced as error:
            endings.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: small.plans.tally(small.plans.find(plan.id)).published > 0)
    small.plans.abort(small.plans.find(plan.id), BOB)
    thread.join()
    assert isinstance(endings[0], Fenced) or endings[0].kind is EndingKind.ABORTED
    assert small.plans.find(plan.id).state is PlanState.ABORTED
    again = freeze(small.engine, BILLING, AT_ONCE, ADA).plan
    assert again.total == 60


def test_a_handler_that_is_still_broken_stops_all_lanes_at_the_canary(small: Shop) -> None:
    """The leader heeds what comes back as the sender of a small plan does."""
    small.fail(30)
    plan = frozen(small, ReplayOptions(policy=QUICK))
    small.billing.broken = lambda _: True
    with small.billing.running("orders.billing.replay"):
        ending = send(small, plan)
    assert ending.kind is EndingKind.STOPPED
    assert "canary" in ending.reason or "failed again" in ending.reason
    assert small.plans.tally(small.plans.find(plan.id)).published == 3


def test_failures_in_the_middle_of_a_stage_stop_the_lanes_within_a_batch(small: Shop) -> None:
    """Nobody waits for the gate: the plan is stopped while its lanes send."""
    small.fail(400, keys=50)
    policy = StopPolicy(canary=0, ramp=(), patience=20, least_outcomes=1)
    plan = frozen(small, ReplayOptions(policy=policy, rate=Rate.parse("60/s")))
    small.billing.broken = lambda _: True
    with small.billing.running("orders.billing.replay"):
        ending = send(small, plan)
    assert ending.kind is EndingKind.STOPPED
    assert small.plans.tally(small.plans.find(plan.id)).published < 400


@pytest.mark.parametrize("others", [0, 2])
def test_a_lane_sends_at_its_part_of_the_rate_of_the_plan(small: Shop, others: int) -> None:
    """With two other lanes at work it takes a third; alone it takes all of it."""
    small.fail(60, keys=1)
    plan = frozen(small, ReplayOptions(policy=AT_ONCE.policy, rate=Rate.parse("60/s")))
    lease = PlanLease.take(small.engine, plan.id, seconds=600)
    number = next(n for n in range(LANES) if _size(small, plan, n))
    rest = [n for n in range(LANES) if n != number][:others]
    with small.engine.begin() as db:  # they gave a sign of life that lasts
        db.execute(update(lane).where(lane.c.lane.in_(rest)).values(until=4e9))
    order = LaneOrder(plan_id=plan.id, lanes=LANES, epoch=lease.epoch, gate=60, batch=5)
    clock = VirtualClock(auto=True)
    began = clock.monotonic()
    result = send_lane(order, number, small.engine, small.broker, attempt=0, clock=clock)
    lease.release()
    assert result.sent == 60
    took = clock.monotonic() - began - LEASE_SECONDS / 3  # so long it waits for the others to see
    assert took == pytest.approx(59 / 60 * (1 + others), rel=0.2)


def test_a_broker_that_stays_away_leaves_a_plan_that_goes_on(small: Shop) -> None:
    """The lane gives up when the plan's patience is over, and says so; nothing is lost."""
    small.fail(30)
    policy = StopPolicy(canary=0, ramp=(), patience=3.0)
    plan = frozen(small, ReplayOptions(policy=policy))
    away = Threads(small, lambda broker, _: Cut(broker, stored=False, error=BrokerDown("away")))
    with pytest.raises(LanesUnfinished, match=r"away.*holdfast spark replay"):
        send(small, plan, away)
    assert small.plans.find(plan.id).state is PlanState.RUNNING
    assert not small.plans.is_sent_now(small.plans.find(plan.id))
    with small.billing.running("orders.billing.replay"):
        assert send(small, plan).kind is EndingKind.CONFIRMED
    assert sorted(m.id for m in small.billing.seen) == [f"m-{n:05}" for n in range(30)]


def test_a_plan_with_lanes_and_a_plan_without_are_sent_each_by_its_own_command(
    small: Shop,
) -> None:
    """Both refuse the other's, and name the command."""
    small.fail(10)
    plan = frozen(small)
    with pytest.raises(NotNow, match=r"3 lanes.*holdfast spark replay"):
        Sender(small.engine, small.broker).run(plan.id)
    small.plans.abort(plan, BOB)
    plain = freeze(small.engine, BILLING, AT_ONCE, ADA).plan
    with pytest.raises(NotNow, match=r"no lanes.*holdfast dlq plans resume"):
        send(small, plain)


def test_claiming_again_after_a_crash_claims_nothing_twice(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt by attempt the lane goes on from its mark; the hash is that of one attempt."""
    shop.fail(40, keys=1)
    lease, draft, work = drafted(shop, AT_ONCE)
    number = next(n for n in range(LANES) if work[n])

    def dies_after(count: int) -> Iterator[PlannedLetter]:
        yield from work[number][:count]
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.dlq.replay.lane_freeze.ROWS", 7)
    with pytest.raises(KeyboardInterrupt):
        claim_lane(taken(shop, lease, number), dies_after(25))
    with shop.engine.connect() as db:
        assert len(db.execute(select(item.c.position)).all()) == 21
    with pytest.raises(NotNow, match="not claimed whole"):
        finish(lease, draft, [])
    hashes = [
        h for n in range(LANES)
        for h in claim_lane(taken(shop, lease, n, attempt=1), iter(work[n]))
    ]  # fmt: skip
    plan = finish(lease, draft, hashes)
    assert shop.plans.manifest_hash(plan) == plan.hash
    assert shop.items(plan.id) == {"claimed": 40}


def test_a_message_that_another_plan_claims_meanwhile_is_held_with_what_follows_of_its_key(
    shop: Shop,
) -> None:
    """One live claim per message, and no later one of the key goes before it."""
    shop.fail(30, keys=3)
    lease, draft, work = drafted(shop, AT_ONCE)
    rival = freeze(shop.engine, Selection(key="k1", since=0.0), AT_ONCE, BOB).plan
    with shop.engine.begin() as db:  # the rival keeps the third of that key alone
        keep = select(item.c.dlq_id).where(item.c.plan_id == rival.id, item.c.position == 2)
        kept = db.execute(keep).scalar_one()
        db.execute(
            update(item).where(item.c.plan_id == rival.id, item.c.dlq_id != kept).values(live=None)
        )
    hashes = [h for n in range(LANES) for h in claim_lane(taken(shop, lease, n), iter(work[n]))]
    plan = finish(lease, draft, hashes)
    assert shop.items(plan.id) == {"claimed": 22, "held": 8}
    with shop.engine.connect() as db:
        notes = db.execute(
            select(item.c.note)
            .where(item.c.plan_id == plan.id, item.c.state == "held")
            .order_by(item.c.position)
        ).scalars().all()  # fmt: skip
    assert rival.id[-8:] in notes[0]
    assert all(kept in note for note in notes[1:])


def test_an_abort_while_it_is_made_ends_the_claiming(shop: Shop) -> None:
    """An operator need not wait for a plan that claims millions."""
    shop.fail(20)
    lease, draft, work = drafted(shop, AT_ONCE)
    claim = taken(shop, lease, 0)
    shop.plans.abort(shop.plans.find(lease.plan_id), BOB)
    with pytest.raises(Fenced):
        claim_lane(claim, iter(work[0] or work[1]))
    with pytest.raises(NotNow):
        finish(lease, draft, [])
    assert freeze(shop.engine, BILLING, AT_ONCE, ADA).plan.total == 20


def test_nothing_is_sent_before_all_is_claimed(small: Shop) -> None:
    """A plan that is being made is neither sent nor resumed, and an operator sees it."""
    small.fail(5)
    lease, _, _ = drafted(small, AT_ONCE)
    found = small.plans.find(lease.plan_id)
    assert found.state is PlanState.FREEZING
    assert found.id in {one.id for one in small.plans.latest(active=True)}
    with pytest.raises(NotNow, match="being made"):
        send(small, found)
    with pytest.raises(NotNow, match="being made"):
        small.plans.resume(found, ADA)


def test_lanes_are_pruned_with_their_plan(small: Shop) -> None:
    """The ledger goes when the plan goes."""
    small.fail(5)
    plan = frozen(small)
    small.plans.abort(plan, BOB)
    with small.engine.begin() as db:
        db.execute(message.delete())
    assert prune_plans(small.engine, older_than=-5, operator=BOB) == 1
    with small.engine.connect() as db:
        assert db.execute(select(lane)).all() == []
