"""Requests to the broker and their answers."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.brokers.rabbitmq.answer import Answer
from holdfast.brokers.rabbitmq.failures import closed
from holdfast.errors import BrokerDown

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.brokers.rabbitmq.link import Link
    from holdfast.clock import Clock

_Request = tuple[Answer, str, dict[str, Any]]


class Control:
    """A channel for declaring and asking; one that the broker closes over an error is replaced."""

    def __init__(self, link: Link, clock: Clock, patience: float) -> None:
        self._link = link
        self._clock = clock
        self._patience = patience
        self._channel: Any = None
        self._unsent: deque[_Request] = deque()
        self._unanswered: deque[Answer] = deque()

    def call(self, method: str, **arguments: Any) -> Any:
        """Return the broker's answer to pika's channel *method*."""
        what = " ".join([method, *(str(v) for v in arguments.values() if isinstance(v, str))])
        return self.ask(method, **arguments).get(self._clock, self._patience, what)

    def ask(
        self, method: str, *, notify: Callable[[], None] | None = None, **arguments: Any
    ) -> Answer:
        """Send the request of pika's channel *method*; its answer comes in its own time."""
        answer = Answer(notify)
        self._link.post(
            partial(self._send, (answer, method, arguments)), partial(self._lost, answer)
        )
        return answer

    # -- what follows runs in the link's thread -------------------------------------------

    def _lost(self, answer: Answer) -> None:
        answer.fail(self._link.failure or BrokerDown("the connection to RabbitMQ is closed"))

    def _send(self, request: _Request) -> None:
        if self._channel is None:
            self._channel = self._link.connection.channel(on_open_callback=self._opened)
            self._channel.add_on_close_callback(self._closed)
        if self._channel.is_open:
            answer, method, arguments = request
            self._unanswered.append(answer)
            getattr(self._channel, method)(callback=self._answered, **arguments)
        else:
            self._unsent.append(request)

    def _opened(self, _: Any) -> None:
        unsent, self._unsent = self._unsent, deque()
        for request in unsent:
            self._send(request)

    def _answered(self, frame: Any) -> None:
        self._unanswered.popleft().give(frame.method)  # a channel answers in order

    def _closed(self, _: Any, reason: BaseException) -> None:
        self._channel = None
        failure = closed(reason)
        unanswered, self._unanswered = self._unanswered, deque()
        unsent, self._unsent = self._unsent, deque()
        for answer in (*unanswered, *(request[0] for request in unsent)):
            answer.fail(failure)
