"""What a message looks like when it comes out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from holdfast.ids import new_id
from holdfast.message import Message

if TYPE_CHECKING:
    from holdfast.testing.conformance.stage import ConformanceStage

_A_DAY = 86_400.0


class ContentPromises:
    """A message comes out as it went in."""

    def test_a_message_comes_out_as_it_went_in(self, stage: ConformanceStage) -> None:
        """Identity, type, time and lineage survive with payload and key."""
        topic = stage.topic()
        member = stage.member(topic)
        message = Message(
            id=new_id(),
            topic=topic,
            payload=b'{"total": 3}',
            type="order.placed",
            source="/kit",
            key=b"order-7",
            time=datetime(2026, 2, 3, 4, 5, 6, 789_012, tzinfo=UTC),
            correlation_id="correlation",
            causation_id="cause",
            content_type="application/json",
            schema="https://example.org/order.json",
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )
        stage.send(message)
        [delivery] = member.take(1)
        came = delivery.message
        kept = came.with_(headers=message.headers)  # the wire's own may be among them
        assert kept == message

    def test_headers_keep_their_order_repeats_and_bytes(self, stage: ConformanceStage) -> None:
        """Values may repeat a name, be binary, empty or None."""
        topic = stage.topic()
        member = stage.member(topic)
        headers: list[tuple[str, bytes | None]] = [
            ("kit-twice", b"1"),
            ("kit-binary", bytes(range(256))),
            ("kit-none", None),
            ("kit-empty", b""),
            ("kit-text", "héllo ✓".encode()),
            ("kit-twice", b"2"),
        ]
        stage.send(Message.new(topic, b"a", key=b"k", headers=headers))
        [delivery] = member.take(1)
        came = [pair for pair in delivery.message.headers if pair[0].startswith("kit-")]
        assert came == headers

    def test_no_payload_is_not_an_empty_payload(self, stage: ConformanceStage) -> None:
        """None stays None, and empty stays empty."""
        topic = stage.topic()
        member = stage.member(topic)
        sent = {"none": None, "empty": b"", "zero": b"\x00"}
        stage.send(*(Message.new(topic, body, key=key) for key, body in sent.items()))
        came = {d.message.key_text: (d.body, d.message.payload) for d in member.take(3)}
        assert came == {key: (body, body) for key, body in sent.items()}

    def test_keys_are_bytes_or_none(self, stage: ConformanceStage) -> None:
        """A key may be any bytes; a message may have no key."""
        topic = stage.topic()
        member = stage.member(topic)
        keys = {b"a": b"\x00\xff\xfe k", b"b": None, b"c": "ключ".encode()}
        stage.send(*(Message.new(topic, body, key=key) for body, key in keys.items()))
        came = member.take(3)
        assert {d.body: d.key for d in came} == keys
        assert {d.body: d.message.key for d in came} == keys

    def test_a_delivery_says_where_and_when_it_was_stored(self, stage: ConformanceStage) -> None:
        """Lane and position tell messages apart; the timestamp is in POSIX seconds."""
        topic = stage.topic()
        member = stage.member(topic)
        stage.publish(topic, *(b"%d" % n for n in range(6)))
        came = member.take(6)
        assert len({(d.lane, d.position) for d in came}) == len(came)
        for delivery in came:
            assert delivery.lane.topic == topic
            assert delivery.lane in member.source.assignment()
            if delivery.timestamp is not None:
                assert abs(delivery.timestamp - stage.clock.now().timestamp()) < _A_DAY

    def test_a_message_handed_out_again_has_the_same_coordinates(
        self, stage: ConformanceStage
    ) -> None:
        """Identity that is derived from lane and position holds over redeliveries."""
        topic = stage.topic()
        member = stage.member(topic)
        stage.publish(topic, b"a")
        [first] = member.take(1)
        member.source.release(first, blame=False)
        [again] = member.take(1)
        assert again.coordinates_id() == first.coordinates_id()
        assert again.message == first.message
