"""What the broker will have said to one request.

Requests to the broker and their answers.

One connection, in a thread of its own.

A connection that is made again when it was lost.

Notices a member that has stopped polling.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.backoff import Backoff, Jitter
from holdfast.brokers.rabbitmq.errors import closed, no_connection
from holdfast.brokers.rabbitmq.pika_internals import connection_class, hang_up
from holdfast.errors import BrokerDown, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.clock import Clock


class Reply:
    """Given in the connection's thread, awaited or looked at in the caller's."""

    __slots__ = ("_event", "_notify", "error", "value")

    def __init__(self, notify: Callable[[], None] | None = None) -> None:
        self._event = threading.Event()
        self._notify = notify
        self.value: Any = None
        self.error: HoldfastError | None = None

    @property
    def done(self) -> bool:
        """Whether it was given or has failed."""
        return self._event.is_set()

    def give(self, value: Any = None) -> None:
        """Answer with *value*; only the first answer counts."""
        if not self.done:
            self.value = value
            self._finish()

    def fail(self, error: HoldfastError) -> None:
        """Say that no answer will come."""
        if not self.done:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self._event.set()
        if self._notify is not None:
            self._notify()

    def get(self, clock: Clock, patience: float, what: str) -> Any:
        """Return the value, or raise what failed; `BrokerDown` after *patience* seconds."""
        if not clock.wait(self._event, patience):
            raise BrokerDown(f"RabbitMQ has not answered for {patience:g} s: {what}")
        if self.error is not None:
            raise self.error
        return self.value


_Request = tuple[Reply, str, dict[str, Any]]


class Control:
    """A channel for declaring and asking; one that the broker closes over an error is replaced."""

    def __init__(self, link: ConnectionThread, clock: Clock, patience: float) -> None:
        self._link = link
        self._clock = clock
        self._patience = patience
        self._channel: Any = None
        self._unsent: deque[_Request] = deque()
        self._unanswered: deque[Reply] = deque()

    def call(self, method: str, **arguments: Any) -> Any:
        """Return the broker's answer to pika's channel *method*."""
        what = " ".join([method, *(str(v) for v in arguments.values() if isinstance(v, str))])
        return self.ask(method, **arguments).get(self._clock, self._patience, what)

    def ask(
        self, method: str, *, notify: Callable[[], None] | None = None, **arguments: Any
    ) -> Reply:
        """Send the request of pika's channel *method*; its answer comes in its own time."""
        answer = Reply(notify)
        self._link.post(
            partial(self._send, (answer, method, arguments)), partial(self._lost, answer)
        )
        return answer

    # -- what follows runs in the link's thread -------------------------------------------

    def _lost(self, answer: Reply) -> None:
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


_log = logging.getLogger("holdfast.brokers.rabbitmq")
_SLACK = 5.0
_FAREWELL = 3.0


class ConnectionThread:
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
        self._opened = Reply()
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


_PAUSES = Backoff(first=0.1, ceiling=5.0, jitter=Jitter.EQUAL)


class Reconnector:
    """Gives out the living link, or makes a new one to the next host.

    After each failure the next attempt waits longer, whoever asks and however often.
    """

    def __init__(self, parameters: Sequence[Any], clock: Clock, pauses: Backoff = _PAUSES) -> None:
        self._hosts = itertools.cycle(parameters)
        self._clock = clock
        self._pauses = pauses
        self._link: ConnectionThread | None = None
        self._failures = 0
        self._next = clock.monotonic()

    @property
    def living(self) -> ConnectionThread | None:
        """The link, if there is one and it lives."""
        return self._link if self._link is not None and self._link.is_alive else None

    def link(self, within: float, woken: threading.Event | None = None) -> ConnectionThread:
        """Return a living link, at the latest after waiting *within* seconds to try again.

        `BrokerDown` if it is too early for an attempt, or if the attempt failed.
        """
        if (link := self.living) is not None:
            return link
        self._drop()
        pause = self._next - self._clock.monotonic()
        if pause > 0:
            self._clock.wait(threading.Event() if woken is None else woken, min(pause, within))
            if self._clock.monotonic() < self._next:
                raise BrokerDown("RabbitMQ was lost; the next attempt to connect is not yet due")
        self._link = link = self._attempt()
        return link

    def _attempt(self) -> ConnectionThread:
        parameters = next(self._hosts)
        try:
            link = ConnectionThread(parameters, self._clock)
        except BrokerDown as error:
            self._failures += 1
            pause = self._pauses.delay(self._failures) or 0.0
            self._next = self._clock.monotonic() + pause
            _log.warning("%s; next attempt in %.1f s", error, pause)
            raise
        if self._failures:
            _log.info("connected to RabbitMQ at %s again", link.address)
        self._failures = 0
        return link

    def _drop(self) -> None:
        if self._link is not None:
            _log.warning("lost RabbitMQ at %s: %s", self._link.address, self._link.failure)
            self._link.close()
            self._link = None

    def close(self) -> None:
        """Close the link."""
        if self._link is not None:
            self._link.close()
            self._link = None


_SHORTEST = 0.01


class PollWatchdog:
    """Closes the connection of a member that does not poll, so that others get its lanes.

    The connection answers heartbeats by itself; without this a member that hangs would hold
    its lanes for ever. It comes back with its next poll.
    """

    def __init__(
        self, link: ConnectionThread, session: float, clock: Clock, polled: Callable[[], float]
    ) -> None:
        self._link = link
        self._session = session
        self._clock = clock
        self._polled = polled

    def look(self) -> None:
        """Look again when the session could be over; runs in the link's thread."""
        connection = self._link.connection
        silence = self._clock.monotonic() - self._polled()
        if silence < self._session:
            connection.ioloop.call_later(max(self._session - silence, _SHORTEST), self.look)
        elif connection.is_open:
            _log.warning("no poll for %.0f s: leaving the group, so that others go on", silence)
            self._link.say_goodbye()
