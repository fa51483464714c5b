"""One question for a whole poll: messages of which nothing is known begin in one round trip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, select

from holdfast import Message
from holdfast.consumer.parking.store import ParkedKey, hash_of
from holdfast.consumer.scheduling.work import Work
from holdfast.dlq import DeadLetterStore
from holdfast.idempotency.schema import start
from tests.consuming import Bench
from tests.dead_letters import letter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holdfast.consumer.store import ConsumerStore
    from tests.servers import Postgres

ME, OTHER = "me", "other"


@pytest.fixture
def bench(tmp_path: Path, postgres: Postgres) -> Iterator[Bench]:
    """Offer a broker in a file, and a database on a server."""
    bench = Bench(tmp_path, postgres.database("consumer_begun"))
    yield bench
    bench.close()


class Poll:
    """Three works of one handler, and the store that is asked about them."""

    def __init__(self, bench: Bench) -> None:
        consumer = bench.consumer()
        consumer.on("orders")(lambda order: None)
        route = consumer._routes["orders"]
        self.consumer = route.consumer
        self.works = [
            Work(
                route=route,
                message=Message.new("orders", b"1", key=f"k{n}", ids=lambda n=n: f"id-{n}"),  # type: ignore[misc]
                lane_key=(n,),
            )
            for n in range(3)
        ]
        self.ids = [work.message.identity for work in self.works]
        assert consumer.context.store is not None
        self.store: ConsumerStore = consumer.context.store
        self.store.ledger.alive(ME)
        self.engine = bench.engine

    def marks(self, owner: str = ME) -> list[str]:
        """Return the messages that are marked as begun by *owner*."""
        with self.engine.connect() as db:
            wanted = select(start.c.message_id).where(start.c.owner == owner)
            return sorted(db.execute(wanted).scalars())


def _failed(poll: Poll) -> None:
    poll.store.ledger.failed(poll.consumer, poll.ids[1], "boom")


def _begun_elsewhere(poll: Poll) -> None:
    poll.store.ledger.starting(poll.consumer, [poll.ids[1]], OTHER)


def _held(poll: Poll) -> None:
    message = poll.works[1].message
    key = ParkedKey("orders", hash_of(message.key, message.id), message.key)
    poll.store.run(lambda db: poll.store.held.hold(db, key, dlq_id=None, note="waits"))


def _letter_of_its_own(poll: Poll) -> None:
    DeadLetterStore(poll.engine).put(letter(1, key="another", group="another"))


def _letter_of_its_key(poll: Poll) -> None:
    DeadLetterStore(poll.engine).put(letter(9, key="k1", group="g"))


KNOWN: list[Callable[[Poll], Any]] = [
    _failed, _begun_elsewhere, _held, _letter_of_its_own, _letter_of_its_key,
]  # fmt: skip


def test_messages_of_which_nothing_is_known_begin_in_one_statement(bench: Bench) -> None:
    """They are marked, what has ended is not marked any more, and nothing else is asked."""
    poll, said = Poll(bench), []
    poll.store.ledger.starting(poll.consumer, ["before"], ME)
    poll.store.ledger.starting(poll.consumer, ["before"], OTHER)
    event.listen(bench.engine, "before_cursor_execute", lambda *args: said.append(args[2]))
    assert poll.store.begun(poll.works, ["before"], ME)
    assert len(said) == 1
    assert poll.marks() == sorted(poll.ids)
    assert poll.marks(OTHER) == ["before"]


@pytest.mark.parametrize("fact", KNOWN)
def test_one_of_which_something_is_known_keeps_all_from_beginning_unseen(
    bench: Bench, fact: Callable[[Poll], Any]
) -> None:
    """Failures, a start elsewhere, a held key, a letter of its own or an open one of its key."""
    poll = Poll(bench)
    fact(poll)
    assert not poll.store.begun(poll.works, [], ME)
    assert poll.marks() == []


def test_what_belongs_to_others_is_nothing_known(bench: Bench) -> None:
    """Letters of the key in another group, and what another handler failed on, do not count."""
    poll = Poll(bench)
    DeadLetterStore(poll.engine).put(letter(9, key="k1", group="another"))
    poll.store.ledger.failed("another", poll.ids[1], "boom")
    assert poll.store.begun(poll.works, [], ME)


def test_an_owner_gives_a_sign_of_life_before_it_begins(bench: Bench) -> None:
    """Without one its marks would be taken for those of the dead."""
    poll = Poll(bench)
    assert not poll.store.begun(poll.works, [], "unheard of")


@pytest.mark.parametrize("fact", KNOWN)
def test_what_comes_up_after_a_quiet_look_is_seen_by_the_next(
    bench: Bench, fact: Callable[[Poll], Any]
) -> None:
    """That nothing waited is not remembered: another process may change it at any time."""
    poll = Poll(bench)
    assert poll.store.begun(poll.works[:1], [], ME)
    poll.store.ledger.finished(poll.consumer, poll.ids, ME)
    fact(poll)
    assert not poll.store.begun(poll.works, [], ME)
    assert poll.marks() == []


def test_a_poll_while_others_wait_is_looked_up_by_its_own_ids_and_keys(bench: Bench) -> None:
    """The small question says only that something waits; the whole one, that it is none of it."""
    poll, said = Poll(bench), []
    DeadLetterStore(poll.engine).put(letter(9, key="k9", group="g"))
    event.listen(bench.engine, "before_cursor_execute", lambda *args: said.append(args[2]))
    assert poll.store.begun(poll.works, [], ME)
    assert [("key_hash = " in statement) for statement in said] == [False, True]
    assert poll.store.begun(poll.works, [], ME)
    assert len(said) == 3  # the small one is not asked again at once
    assert poll.marks() == sorted(poll.ids)
