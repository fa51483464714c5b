"""When Kafka refuses a message, others fail with it: who is to blame, and what follows.

A record batch is refused whole, and what is on its way behind it fails as well. The clients
do not tell for certain whose fault it was, so what failed is tried alone. Nor do they tell why
a connection fails: `unreachable` finds out.
"""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError, Remedy, Transient
from holdfast.ports import Published

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.message import Message

_SECONDS = 2.0  # that a server may take to answer when it is asked why it does not

UNSENT = Published(error=Transient("not sent: another message of the batch was refused"))
_BEHIND = Published(error=Transient("not sent: an earlier message of its key was refused"))


def is_refused(result: Published) -> bool:
    """Whether the message itself is to blame: sending it again cannot help."""
    return result.error is not None and result.error.remedy is Remedy.FIX


def is_open(result: Published) -> bool:
    """Whether the message is neither stored nor refused."""
    return result.error is not None and result.error.remedy is not Remedy.FIX


def check_outage(results: Sequence[Published]) -> None:
    """Raise what hit *results* if nobody among them is to blame for it."""
    if any(map(is_refused, results)):
        return
    for result in results:
        if result.error is not None:
            raise result.error


class Rejections:
    """What was refused of a batch so far, and what that means for the messages behind."""

    def __init__(self) -> None:
        self._keys: set[tuple[str, bytes]] = set()
        self._topics: dict[str, Published] = {}

    def note(self, message: Message, result: Published) -> None:
        """Remember what became of *message*, if it was refused."""
        if not is_refused(result):
            return
        if message.key is not None:
            self._keys.add((message.topic, message.key))
        if isinstance(result.error, ConfigurationError):  # about the topic, not this message
            self._topics[message.topic] = result

    def foretold(self, message: Message) -> Published | None:
        """Return what is known of *message* without sending it.

        The others of a topic that takes nothing are refused, too. One behind a refused
        message of its key is not sent, so that it does not overtake it.
        """
        if message.topic in self._topics:
            return self._topics[message.topic]
        is_behind = message.key is not None and (message.topic, message.key) in self._keys
        return _BEHIND if is_behind else None


def try_alone(
    messages: Sequence[Message],
    places: Sequence[int],
    results: list[Published],
    send: Callable[[Message], Published],
) -> None:
    """Send those of *messages* at *places* one by one, in order, and put down what became of each.

    With the first that can be neither stored nor refused, the rest is left unsent.
    """
    refusals = Rejections()
    for number, place in enumerate(places):
        message = messages[place]
        known = refusals.foretold(message)
        results[place] = send(message) if known is None else known
        if known is None and is_open(results[place]):
            for later in places[number + 1 :]:
                results[later] = UNSENT
            return
        refusals.note(message, results[place])


def unreachable(servers: Iterable[str], reason: str, *, tls: bool) -> HoldfastError:
    """Return the error for *servers* that do not answer a client which speaks TLS or not.

    The wrong one of plain text and TLS never gets better, so it is a `ConfigurationError`.
    """
    if "certificate" in reason.lower():
        return ConfigurationError(f"no trust between client and server: {reason}")
    findings = []
    for server in servers:
        host, _, port = server.rpartition(":")
        finding = _refusal(host.strip("[]"), int(port))
        if finding is None:
            if _speaks_tls(host.strip("[]"), int(port)) is not tls:
                other = "plain text" if tls else "TLS"
                return ConfigurationError(
                    f"{server} speaks {other}: set the security protocol "
                    f"{'PLAINTEXT or SASL_PLAINTEXT' if tls else 'SSL or SASL_SSL'}"
                )
            finding = "the port is open, but nothing answers as Kafka does"
        findings.append(f"{server}: {finding}")
    return BrokerDown(f"Kafka does not answer ({'; '.join(findings)}): {reason}")


def _refusal(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except OSError as error:
        return str(error)
    return None


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: this only asks for the language
    try:
        with socket.create_connection((host, port), _SECONDS) as plain:
            context.wrap_socket(plain).close()
    except ssl.SSLError as error:
        # An alert is an answer in TLS, e.g. to the missing client certificate.
        return "alert" in str(error).lower()
    except OSError:
        return False
    return True
