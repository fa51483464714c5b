"""Releasing a message for later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.brokers.rabbitmq.failures import NotFound, Refused
from holdfast.brokers.rabbitmq.incoming import postponed
from holdfast.brokers.rabbitmq.outlet import Outlet, Parcel, await_batch
from holdfast.errors import BrokerDown

if TYPE_CHECKING:
    from holdfast.brokers.rabbitmq.link import Link
    from holdfast.brokers.rabbitmq.settings import RabbitSettings
    from holdfast.brokers.rabbitmq.topology import Topology
    from holdfast.clock import Clock
    from holdfast.ports import Delivery


class Delays:
    """Puts copies of messages where they wait; the caller settles the original after that.

    A crash in between leaves both: the message comes twice, and is never lost.
    """

    def __init__(
        self, link: Link, topology: Topology, settings: RabbitSettings, clock: Clock
    ) -> None:
        self._link = link
        self._topology = topology
        self._settings = settings
        self._clock = clock
        self._outlet: Outlet | None = None

    def put(self, delivery: Delivery, queue: str, seconds: float) -> float:
        """Return once a copy of *delivery* is stored that enters *queue* after *seconds*.

        What is returned is the moment from which a server that is killed keeps the copy.
        """
        if self._outlet is None or not self._outlet.is_usable:
            self._outlet = Outlet(self._link)
        _, original = delivery.receipt
        position = str(delivery.position)
        properties = postponed(original, position, delivery.count or 1)
        exchange, safe_from = self._topology.delay(seconds)
        batch = self._outlet.send(
            [Parcel(exchange, queue, properties, delivery.body or b"", position)]
        )
        try:
            await_batch(batch, self._link, self._clock, self._settings.patience)
        except (NotFound, Refused) as error:
            self._topology.forget_delays()
            raise BrokerDown(f"the queue of this delay was deleted meanwhile: {error}") from error
        if batch.refused:
            self._topology.forget_delays()
            raise BrokerDown(f"RabbitMQ could not store the message in {exchange!r}")
        return safe_from
