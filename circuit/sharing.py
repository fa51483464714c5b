"""One circuit for many processes: what they tell each other, and how a breaker follows it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from holdfast.circuit.events import Event, StateChanged
from holdfast.circuit.state import Closed, HalfOpen, Open
from holdfast.clock import SYSTEM_CLOCK, Clock

_PAUSES = 3
"""How many looks a process that probed in vain leaves the probe to others."""

if TYPE_CHECKING:
    from holdfast.circuit.breaker import Breaker


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedVerdict:
    """The last that was said about a circuit; later words have a higher *version*."""

    version: int
    is_open: bool
    seconds: float = 0.0
    """How long from now until it may be probed, 0 when it is time."""


class SharedState(Protocol):
    """Where processes read and say what a dependency is like; times are durations only.

    No clock of one process is ever compared with that of another: the store counts.
    """

    def read(self, name: str) -> SharedVerdict | None:
        """Return the last word about *name*, None if nobody said anything."""
        ...

    def say_open(self, name: str, seconds: float) -> SharedVerdict:
        """Declare *name* open for *seconds*; return the word that holds now."""
        ...

    def say_closed(self, name: str) -> SharedVerdict:
        """Declare *name* closed."""
        ...

    def claim_probe(self, name: str, seconds: float) -> bool:
        """Return True to one caller at a time, for *seconds*, once *name* may be probed."""
        ...


class MemorySharedState:
    """A `SharedState` within one process, for tests and as the reference."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._words: dict[str, tuple[int, float | None]] = {}

    def read(self, name: str) -> SharedVerdict | None:
        """Return the last word about *name*."""
        with self._lock:
            return self._word(name) if name in self._words else None

    def say_open(self, name: str, seconds: float) -> SharedVerdict:
        """Declare *name* open for *seconds*."""
        return self._say(name, self._clock.monotonic() + seconds)

    def say_closed(self, name: str) -> SharedVerdict:
        """Declare *name* closed."""
        return self._say(name, None)

    def claim_probe(self, name: str, seconds: float) -> bool:
        """Give the probe to one caller; it comes back if nothing is said for *seconds*."""
        with self._lock:
            version, until = self._words.get(name, (0, None))
            now = self._clock.monotonic()
            if until is None or now < until:
                return False
            self._words[name] = version + 1, now + seconds
            return True

    def _say(self, name: str, until: float | None) -> SharedVerdict:
        with self._lock:
            version, _ = self._words.get(name, (0, None))
            self._words[name] = version + 1, until
            return self._word(name)

    def _word(self, name: str) -> SharedVerdict:
        version, until = self._words[name]
        left = 0.0 if until is None else max(0.0, until - self._clock.monotonic())
        return SharedVerdict(version=version, is_open=until is not None, seconds=left)


class Sharing:
    """Ties a breaker to what other processes say about its dependency.

    What this breaker finds out is said by `refresh`, and what others say is taken up by it.
    Somebody calls it every second or so, off the path of the calls: the calls never wait
    for the store. One process at a time probes. If nobody refreshes any more, the breaker
    probes by itself after twice its open time: it never stays open because of us.
    """

    def __init__(self, breaker: Breaker, shared: SharedState) -> None:
        self._breaker, self._shared = breaker, shared
        self._claimed = 0
        """The version of the word that gave the probe to us."""
        self._pauses = 0
        self._unsaid: StateChanged | None = None
        self._lock = threading.Lock()
        self.end = breaker.listen(self._heard)

    def refresh(self) -> None:
        """Say what was found out, take up what others said, and claim the probe when it is time.

        A circuit held open by hand is left alone. To close it everywhere by hand, say so in
        the store: `shared.say_closed(name)`.
        """
        self._say()
        breaker, state = self._breaker, self._breaker.state
        word = self._shared.read(breaker.name)
        if self._unsaid is not None:
            return  # the word is older than what was found out meanwhile
        match state:
            case _ if word is None:
                return
            case Open(until=None):
                return
            case Open() | HalfOpen() if not word.is_open:
                breaker.close()
            case Open() if not word.seconds and self._claim(word):
                breaker.half_open()
            case HalfOpen(permits=permits) if permits == breaker.policy.permits:
                self._probe_in_vain(word)
            case Closed() if word.is_open:
                self._hold(word.seconds)

    def _probe_in_vain(self, word: SharedVerdict) -> None:
        """Give the probe up once its time is over: others may have a message to try it with."""
        if word.version == self._claimed and word.seconds:
            return
        self._pauses = _PAUSES
        self._hold(word.seconds)

    def _claim(self, word: SharedVerdict) -> bool:
        if self._pauses:
            self._pauses -= 1
            return False
        self._claimed = word.version + 1
        policy = self._breaker.policy
        return self._shared.claim_probe(self._breaker.name, policy.probe_seconds)

    def _heard(self, event: Event) -> None:
        """Keep the last word for the next `refresh`: whoever makes a call must not wait."""
        if not isinstance(event, StateChanged) or event.told or isinstance(event.after, HalfOpen):
            return
        self._keep(event)
        if isinstance(event.after, Open):
            self._hold(self._breaker.policy.open_seconds)

    def _say(self) -> None:
        with self._lock:
            event, self._unsaid = self._unsaid, None
        if event is None:
            return
        try:
            if isinstance(event.after, Open):
                self._shared.say_open(event.name, self._breaker.policy.open_seconds)
            else:
                self._shared.say_closed(event.name)
        except BaseException:
            self._keep(event)
            raise

    def _keep(self, event: StateChanged) -> None:
        with self._lock:
            known = self._unsaid
            if known is None or known.after.generation < event.after.generation:
                self._unsaid = event

    def _hold(self, seconds: float) -> None:
        """Stay open beyond the others' probe: whoever claims it goes first."""
        self._breaker.open(seconds + self._breaker.policy.open_seconds)
