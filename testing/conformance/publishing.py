"""What a sink promises."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.brokers import connect
from holdfast.errors import (
    BrokerDown,
    DependencyDown,
    HoldfastError,
    MessageTooLarge,
    Transient,
    UnknownTopic,
)
from holdfast.message import Message
from holdfast.ports import Ordering
from holdfast.testing.conformance.recording import WaitDeadline
from holdfast.testing.observed import check_order_per_key

if TYPE_CHECKING:
    from holdfast.ports import Published, Sink
    from holdfast.testing.conformance.stage import ConformanceStage

_THREADS = 3
_BATCHES = 3


class PublishingPromises:
    """Each message is stored or refused, and the caller knows which."""

    def test_publish_returns_one_result_per_message(self, stage: ConformanceStage) -> None:
        """Every message of a batch has its own result; an empty batch has none."""
        topic = stage.topic()
        sink = stage.sink()
        assert sink.publish([]) == []
        results = sink.publish([Message.new(topic, b"a"), Message.new(topic, b"b", key=b"k")])
        assert [result.error for result in results] == [None, None]

    def test_a_result_says_where_the_message_is(self, stage: ConformanceStage) -> None:
        """A lane or position in a result is the one that the delivery has."""
        topic = stage.topic()
        member = stage.member(topic)
        messages = [Message.new(topic, b"%d" % n, key=b"k%d" % n) for n in range(4)]
        results = stage.send(*messages)
        came = {delivery.body: delivery for delivery in member.take(4)}
        for message, result in zip(messages, results, strict=True):
            delivery = came[message.payload]
            assert result.lane in (None, delivery.lane)
            assert result.position in (None, delivery.position)

    def test_a_too_large_message_is_refused_and_the_rest_of_its_batch_is_stored(
        self, stage: ConformanceStage
    ) -> None:
        """`MessageTooLarge` is the result of that one message; without a limit all are stored."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        limit = stage.caps.max_message
        large = bytes(65_536 if limit is None else limit + 1)
        batch = [Message.new(topic, body, key=b"k") for body in (b"a", large, b"b")]
        first, second, third = stage.sink().publish(batch)
        assert first.error is None
        assert third.error is None
        if limit is None:
            assert second.error is None
        else:
            assert isinstance(second.error, MessageTooLarge)
        member.work(3 if limit is None else 2, limit=1)
        assert {b"a", b"b"} <= set(member.bodies)
        assert (large in member.bodies) == (limit is None)

    def test_a_message_just_under_the_limit_is_stored_whole(self, stage: ConformanceStage) -> None:
        """The declared limit is not smaller than what is taken."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        limit = 1 << 20 if stage.caps.max_message is None else stage.caps.max_message
        size = min(limit - min(4096, limit // 2), 4 << 20)  # room for the message's own headers
        body = (bytes(range(256)) * (size // 256 + 1))[:size]
        stage.send(Message.new(topic, body, key=b"k"))
        assert member.take(1)[0].body == body

    def test_too_large_headers_are_refused(self, stage: ConformanceStage) -> None:
        """`max_headers` bounds the headers alone; without it only `max_message` does."""
        topic = stage.topic(partitions=1)
        limit = stage.caps.max_headers
        headers = [("kit-big", bytes(1024 if limit is None else limit + 1))]
        [result] = stage.sink().publish([Message.new(topic, b"a", headers=headers)])
        if limit is None:
            assert result.error is None
        else:
            assert isinstance(result.error, MessageTooLarge)

    def test_an_unknown_topic_is_refused_or_made_and_never_swallowed(
        self, stage: ConformanceStage
    ) -> None:
        """`UnknownTopic` is the result of that message, or the message can be read after all."""
        known, unknown = stage.topic(partitions=1), stage.unknown_topic()
        topics = (known, unknown, known)
        results = stage.sink().publish([Message.new(topic, b"a", key=b"k") for topic in topics])
        assert results[0].error is None
        assert results[2].error is None
        if results[1].error is not None:
            assert isinstance(results[1].error, UnknownTopic)
        elif stage.caps.late_groups:
            assert stage.member(unknown).take(1)[0].body == b"a"

    def test_a_source_of_an_unknown_topic_says_so_or_waits_for_it(
        self, stage: ConformanceStage
    ) -> None:
        """`UnknownTopic` from `source` or `poll`, or else the messages once there are some."""
        unknown = stage.unknown_topic()
        try:
            member = stage.member(unknown)
            member.poll()
        except UnknownTopic:
            return
        stage.broker.create_topic(unknown, partitions=1)
        stage.send(Message.new(unknown, b"a", key=b"k"))
        assert member.take(1)[0].body == b"a"

    def test_creating_a_topic_again_changes_nothing(self, stage: ConformanceStage) -> None:
        """An existing topic keeps its messages."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        stage.broker.create_topic(topic, partitions=1)
        assert member.take(1)[0].body == b"a"

    def test_threads_with_a_sink_each_keep_the_order_per_key(self, stage: ConformanceStage) -> None:
        """Sinks do not disturb one another."""
        topic = stage.topic()
        member = stage.member(topic)
        batches = [
            [
                [Message.new(topic, b"%d.%d.%d" % (t, b, n), key=b"k%d" % t) for n in range(3)]
                for b in range(_BATCHES)
            ]
            for t in range(_THREADS)
        ]
        results: list[Published] = []

        def work(sink: Sink, mine: list[list[Message]]) -> None:
            for batch in mine:
                results.extend(sink.publish(batch))

        threads = [threading.Thread(target=work, args=(stage.sink(), mine)) for mine in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sent = [m for mine in batches for batch in mine for m in batch]
        assert [result.error for result in results] == [None] * len(sent)
        member.work(len(sent), limit=10)
        assert set(member.bodies) == {message.payload for message in sent}
        if stage.caps.ordering is not Ordering.NONE:
            check_order_per_key(
                [(message.key, message.payload) for message in sent],
                [(delivery.key, delivery.body) for delivery in member.inbox],
            )

    def test_an_id_published_twice_is_stored_as_often_as_declared(
        self, stage: ConformanceStage
    ) -> None:
        """Once within `publish_dedup`; twice where it is not declared, for a replay must pass.

        The same id of another source is another event, which is always stored.
        """
        topic = stage.topic(partitions=1)
        message = Message.new(topic, b"a", key=b"k")
        stage.send(message)
        stage.send(message)
        stage.send(message.with_(source="another", payload=b"b"))
        expected = 2 if stage.caps.publish_dedup is None else 1
        assert stage.leftovers(topic) == [b"a"] * expected + [b"b"]

    def test_an_unreachable_broker_is_reported_and_publishing_again_works(
        self, stage: ConformanceStage
    ) -> None:
        """While it cannot be reached nobody is told that a message is stored.

        When it is back, the sink that failed works again, and so does a new one; meanwhile
        the only answer is `BrokerDown`.
        """
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        message = Message.new(topic, b"a", key=b"k")
        broken = stage.hooks.break_publishing(stage.broker)
        sink = stage.sink()
        if broken is not None:
            with broken:
                error: HoldfastError | None
                try:
                    [result] = sink.publish([message])
                    error = result.error
                except BrokerDown as down:
                    error = down
                assert isinstance(error, (DependencyDown, Transient))
        for again in (sink, stage.sink()):
            _publish_when_back(stage, again, message)
        assert member.take(1)[0].body == b"a"

    def test_sinks_and_sources_outlive_the_broker_object(self, stage: ConformanceStage) -> None:
        """Closing the object that made them takes nothing away from them."""
        topic, fresh = stage.topic(partitions=1), stage.topic(partitions=1)
        broker = stage.broker if stage.url is None else connect(stage.url)
        sink = broker.sink(**stage.hooks.sink_settings)
        source = stage.hooks.source(broker, [topic], group=stage.group)
        if stage.url is not None:
            broker.close()
        member = stage.adopt(source)
        results = sink.publish([Message.new(t, b"a", key=b"k") for t in (topic, fresh)])
        assert [result.error for result in results] == [None, None]
        assert member.take(1)[0].body == b"a"
        sink.close()

    def test_a_closed_sink_may_be_closed_again(self, stage: ConformanceStage) -> None:
        """Closing twice is closing once, and loses nothing."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        sink = stage.sink()
        sink.publish([Message.new(topic, b"a")])
        sink.close()
        sink.close()
        assert member.take(1)[0].body == b"a"


def _publish_when_back(stage: ConformanceStage, sink: Sink, message: Message) -> None:
    """Publish as often as it takes a server that has just come back."""
    deadline = WaitDeadline(stage.hooks.settle_in)
    while True:
        try:
            [result] = sink.publish([message])
        except BrokerDown as down:
            deadline.check("publishing works again", down)
        else:
            assert result.error is None
            return
