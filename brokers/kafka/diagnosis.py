"""Why a connection fails: the clients only say that it does."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Iterable

_SECONDS = 2.0


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
