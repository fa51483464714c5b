"""One connection, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from holdfast.brokers.rabbitmq.answer import Answer
from holdfast.brokers.rabbitmq.failures import closed, no_connection
from holdfast.brokers.rabbitmq.frames import connection_class, hang_up
from holdfast.errors import BrokerDown, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.clock import Clock

_log = logging.getLogger("holdfast.brokers.rabbitmq")
_SLACK = 5.0
_FAREWELL = 3.0


class Link:
    """A connection that answers heartbeats whatever its user's thread is busy with.

    All of pika is used in the link's own thread; others hand it work with `post`.
    """

    def __init__(self, parameters: Any, clock: Clock) -> None:
        self.address = f"{parameters.host}:{parameters.port}"
        self.blocked: str | None = None
        """Why the server takes no messages at the moment, in its own words."""
        self.failure: HoldfastError | None = None
        """Why the link has ended; None while it lives."""
        self.connection: Any = None
        self.farewells: set[Callable[[], None]] = set()
        """What is to be done before the connection is closed; the link's thread alone uses it."""
        self._parameters = parameters
        self._jobs: deque[tuple[Callable[[], None], Callable[[], None] | None]] = deque()
        self._soon: set[Callable[[], None]] = set()
        self._lock = threading.Lock()
        self._is_over = False
        self._opened = Answer()
        self._thread = threading.Thread(
            target=self._serve, name=f"holdfast amqp {self.address}", daemon=True
        )
        self._thread.start()
        # pika bounds each attempt itself; this is for a pika that does not.
        bound = parameters.stack_timeout * parameters.connection_attempts + _SLACK
        try:
            self._opened.get(clock, bound, f"a connection to {self.address}")
        except HoldfastError:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return not self._is_over

    def post(self, action: Callable[[], None], lost: Callable[[], None] | None = None) -> None:
        """Run *action* in the link's thread, or *lost* if the link ends before."""
        with self._lock:
            if not self._is_over:
                self._jobs.append((action, lost))
                if len(self._jobs) == 1:
                    self.connection.ioloop.add_callback_threadsafe(self._work)
                return
        if lost is not None:
            lost()

    def close(self) -> None:
        """Close the connection in order, or at once if the server does not answer."""
        if self.connection is not None and self.is_alive:
            self.post(self.say_goodbye)
            self._thread.join(_FAREWELL)
            self.post(self._hang_up)
        self._thread.join(_FAREWELL)
        if self._thread.is_alive():
            _log.warning("the connection to %s does not end; it is left behind", self.address)

    # -- what follows runs in the link's own thread -------------------------------------

    def soon(self, action: Callable[[], None]) -> None:
        """Run *action* once, after everything that has arrived by now has been read."""
        if action not in self._soon:
            self._soon.add(action)
            if len(self._soon) == 1:
                self.connection.ioloop.add_callback(self._after_reading)

    def _after_reading(self) -> None:
        actions, self._soon = self._soon, set()
        for action in actions:
            action()

    def _serve(self) -> None:
        connection: Any = None
        try:
            connection = connection_class()(
                self._parameters,
                on_open_callback=self._on_open,
                on_open_error_callback=self._on_open_error,
                on_close_callback=self._on_close,
            )
            connection.ioloop.start()
        except Exception as error:  # noqa: BLE001 - whatever ends the loop ends the link
            _log.debug("the connection to %s broke off", self.address, exc_info=True)
            self._note(BrokerDown(f"the connection to RabbitMQ broke off: {error!r}"))
        finally:
            self._finish()
            if connection is not None:
                connection.ioloop.close()

    def _on_open(self, connection: Any) -> None:
        connection.add_on_connection_blocked_callback(self._on_blocked)
        connection.add_on_connection_unblocked_callback(self._on_unblocked)
        self.connection = connection
        self._opened.give()

    def _on_open_error(self, connection: Any, error: BaseException) -> None:
        self._note(no_connection(error, self._parameters))
        connection.ioloop.stop()

    def _on_close(self, connection: Any, reason: BaseException) -> None:
        self._note(closed(reason))
        connection.ioloop.stop()

    def _on_blocked(self, _: Any, frame: Any) -> None:
        self.blocked = frame.method.reason or "a resource alarm"
        _log.warning("RabbitMQ at %s takes no messages: %s", self.address, self.blocked)

    def _on_unblocked(self, *_: Any) -> None:
        self.blocked = None
        _log.info("RabbitMQ at %s takes messages again", self.address)

    def _work(self) -> None:
        with self._lock:
            jobs, self._jobs = self._jobs, deque()
        for action, lost in jobs:
            try:
                action()
            except Exception:  # noqa: BLE001 - the thread must go on to serve the others
                _log.exception("a request to RabbitMQ at %s failed", self.address)
                if lost is not None:
                    lost()

    def say_goodbye(self) -> None:
        """Close the connection, and before that what wants to be closed in a way of its own."""
        if self.connection.is_open:
            for farewell in tuple(self.farewells):
                farewell()
            self.connection.close()

    def _hang_up(self) -> None:
        hang_up(self.connection)

    def _note(self, failure: HoldfastError) -> None:
        if self.failure is None:
            self.failure = failure

    def _finish(self) -> None:
        self._note(BrokerDown("the connection to RabbitMQ is closed"))
        with self._lock:
            self._is_over = True
            jobs, self._jobs = self._jobs, deque()
        for _, lost in jobs:
            if lost is not None:
                lost()
        if self.failure is not None:
            self._opened.fail(self.failure)
