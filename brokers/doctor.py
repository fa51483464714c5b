"""What the doctor looks at of a broker: does it answer, and are its topics safe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.findings import Finding, Severity, counted
from holdfast.ports import BrokerPowers
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from holdfast.ports import Broker, TopicSettings

_SETTLED = 7 * 86400.0
_MANY = 10_000  # messages that every group settled so long ago
_TOPICS = 200  # of more than these not all are asked for: each is a question of its own


def answers(broker: Broker) -> Iterator[Finding]:
    """Tell that the broker answers; an error says that it does not."""
    broker.sink().close()
    yield Finding(check="broker", severity=Severity.OK, text=f"{mask(broker.name)} answers")


def topics(broker: Broker, read: Collection[str] = ()) -> Iterator[Finding]:
    """Judge whether topics survive the loss of a server, and whether they grow without bound.

    Of very many those come first that are *read* here.
    """
    powers = BrokerPowers.of(broker)
    known = powers.topics()
    if known is None:
        yield Finding(
            check="topics",
            severity=Severity.UNSEEN,
            text="this broker does not tell which topics it has",
            fix="ask its own tools",
        )
        return
    facts = {"topics": len(known), "partitions": sum(known.values())}
    yield Finding(check="topics", severity=Severity.OK, facts=facts,
                  text=f"{counted(len(known), 'topic', 'topics')}, "
                  f"{counted(sum(known.values()), 'partition', 'partitions')}")  # fmt: skip
    servers = powers.servers()
    order = sorted(known, key=lambda topic: (topic not in read, topic))
    for topic, kept in powers.settings(order[:_TOPICS]).items():
        yield from judged_copies(topic, kept, servers)
    if broker.caps.prune:
        settled = broker.prune(older_than=_SETTLED, most=_MANY, dry_run=True)
        for topic, count in sorted(settled.items()):
            if count >= _MANY:
                yield _grown(topic, count)


def judged_copies(topic: str, kept: TopicSettings, servers: int | None) -> Iterator[Finding]:
    """Judge how many copies *topic* keeps: one that can be lost is no use on several servers."""
    if kept.replicas is None:
        return
    facts = {"topic": topic, "replicas": kept.replicas, "in_sync": kept.in_sync,
             "min_insync_replicas": kept.least_in_sync}  # fmt: skip
    change = f"kafka-configs --alter --entity-type topics --entity-name {topic} --add-config "
    least, now = kept.least_in_sync, kept.in_sync
    if least is not None and now is not None and now < least:
        yield Finding(
            check="topics", severity=Severity.CRITICAL, facts=facts,
            text=f"{topic}: {now} of {kept.replicas} replicas are in sync, and "
            f"min.insync.replicas is {least}: what is published is refused",
            fix="start the brokers that are missing",
        )  # fmt: skip
    elif kept.replicas == 1 and (servers or 1) > 1:
        yield Finding(
            check="topics", severity=Severity.WARNING, facts=facts,
            text=f"{topic} has 1 replica on {servers} brokers: it is lost with the disk of one",
            fix="give it 3 with  kafka-reassign-partitions --execute,  and new topics with "
            "replication_factor=3 in --broker",
        )  # fmt: skip
    elif kept.replicas > 1 and least is not None and least < 2:
        yield Finding(
            check="topics", severity=Severity.WARNING, facts=facts,
            text=f"{topic}: min.insync.replicas is {least}: what one broker alone has stored "
            "counts as published, and is lost with it",
            fix=f"run  {change}min.insync.replicas=2",
        )  # fmt: skip
    elif kept.replicas > 1 and least is not None and least >= kept.replicas:
        yield Finding(
            check="topics", severity=Severity.WARNING, facts=facts,
            text=f"{topic}: min.insync.replicas is {least} of {kept.replicas}: nothing can be "
            "published while one broker restarts",
            fix=f"run  {change}min.insync.replicas={kept.replicas - 1}",
        )  # fmt: skip


def _grown(topic: str, count: int) -> Finding:
    return Finding(
        check="topics",
        severity=Severity.WARNING,
        text=f"{topic} keeps {count:,} or more messages that every group settled over 7 days ago; "
        "nothing deletes them by itself",
        fix="run  holdfast brokers prune --older-than 7d  regularly, once a day say",
        facts={"topic": topic, "settled": count},
    )
