"""Small messages to the server: sent in order, without waiting, and confirmed on request."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import BrokerDown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from holdfast.brokers.nats.ack_tokens import Answer
    from holdfast.brokers.nats.connection import Connection
    from holdfast.clock import Clock

log = logging.getLogger("holdfast.brokers.nats")

_MOST_OPEN = 20_000  # words not yet confirmed; beyond it settling waits for the server


class AckSender:
    """Tells the server what became of deliveries.

    A consumer hears its words in the order sent, so the confirmation of the last of a batch
    confirms the batch. Words that matter are kept until then and sent again over a new
    connection; hearing them twice changes nothing.
    """

    def __init__(self, connection: Connection, clock: Clock, timeout: float) -> None:
        self._connection = connection
        self._clock = clock
        self._timeout = timeout
        self._queue: deque[tuple[str, bytes, str]] = deque()
        self._is_sending = False
        self._inbox = ""
        self._number = 0
        self._open: dict[int, Sequence[Answer]] = {}
        self._confirmed: deque[int] = deque()
        self._size = 0

    def reconnected(self) -> None:
        """Set up confirmations on the new connection, and repeat what was not confirmed."""
        self._queue.clear()
        self._is_sending = False

        async def listen(client: Client) -> str:
            inbox: str = client.new_inbox()
            await client.subscribe(f"{inbox}.*", cb=self._hear)
            return inbox

        self._inbox = self._connection.run(listen)
        pending, self._open, self._size = self._open, {}, 0
        for answers in pending.values():
            self.tell(answers)

    def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send one message; nobody waits for an answer to it."""
        self._queue.append((subject, data, reply))
        self._connection.soon(self._start)

    def mention(self, answers: Iterable[Answer]) -> None:
        """Say *answers*; it is no loss if they are not heard."""
        self._queue.extend((subject, word, "") for subject, word in answers)
        self._connection.soon(self._start)

    def tell(self, answers: Sequence[Answer]) -> None:
        """Say *answers*, all of one consumer, again and again until they are confirmed."""
        if not answers:
            return
        self._number += 1
        self._open[self._number] = answers
        self._size += len(answers)
        *others, (subject, word) = answers
        self._queue.extend((subject, word, "") for subject, word in others)
        self._queue.append((subject, word, f"{self._inbox}.{self._number}"))
        with suppress(BrokerDown):  # told again by `reconnected`
            self._connection.soon(self._start)
        if self._size > _MOST_OPEN:
            self.flush()

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Give up saying anything to the subjects that are gone: nobody would confirm it."""
        for number, answers in list(self._open.items()):
            left = [answer for answer in answers if not is_gone(answer[0])]
            self._size -= len(answers) - len(left)
            if left:
                self._open[number] = left
            else:
                del self._open[number]

    def flush(self) -> None:
        """Return once everything told is confirmed."""
        until = self._clock.monotonic() + self._timeout
        bell = self._connection.bell
        while True:
            bell.clear()
            while self._confirmed:
                self._size -= len(self._open.pop(self._confirmed.popleft(), ()))
            if not self._open:
                return
            left = until - self._clock.monotonic()
            if left <= 0 or not self._connection.is_up:
                self._connection.drop()
                raise BrokerDown(
                    f"NATS did not confirm {self._size} settled messages; they are told again "
                    "over the next connection"
                )
            self._clock.wait(bell, min(left, 0.1))

    # -- what follows runs on the event loop -------------------------------------------

    async def _hear(self, message: Msg) -> None:
        self._confirmed.append(int(message.subject.rpartition(".")[2]))
        self._connection.bell.set()

    def _start(self, client: Client) -> None:
        if not self._is_sending and self._queue:
            self._is_sending = True
            self._connection.spawn(self._send_all(client))

    async def _send_all(self, client: Client) -> None:
        try:
            while self._queue:
                subject, data, reply = self._queue.popleft()
                await client.publish(subject, data, reply=reply)
        except Exception as error:  # noqa: BLE001 - what matters is told again, or asked again
            log.debug("not sent: %s", error)
        finally:
            self._is_sending = False
