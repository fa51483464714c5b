"""Spark's errors as Holdfast's: what is wrong in one sentence, and whether to try again.

Spark wraps what went wrong in an executor into pages of stack. The first line that names the
cause is looked for; the rest stays in Spark's own log.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError, NotFound
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST = 400
_DOWN = (
    "Connection refused", "connection attempt failed", "CommunicationsException",
    "PSQLException: This connection has been closed", "I/O error occurred while sending",
    "the database system is", "TimeoutException", "BrokerDown", "DependencyDown",
    "OperationalError", "UnknownHostException", "Connection reset", "SQLNonTransientConnection",
    "terminating connection", "An I/O error", "EOFException", "DisconnectException",
)  # fmt: skip
_DISK = ("No space left on device", "File too large", "Disk quota exceeded", "DiskErrorException")
_CORRUPT = ("CANNOT_READ_FILE_FOOTER", "is not a Parquet file", "FAILED_READ_FILE",
            "Could not read footer", "ParquetDecodingException")  # fmt: skip
_OURS = re.compile(r"holdfast\.errors\.(\w+): (.+)")
_FILE = re.compile(r"(?:file|path)[ :]+((?:file:|s3a:|hdfs:|/)\S+?)[.,]?(?:\s|$)", re.IGNORECASE)


class DiskFull(HoldfastError):
    """There is no room for what a job writes; nothing of it is part of the archive."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise what Spark raises inside as a `HoldfastError`, where its cause is known."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        found = translation(error)
        if found is None:
            raise
        raise found from error


def translation(error: BaseException) -> HoldfastError | None:
    """Return what *error* of Spark means, None where this is no error of Spark's."""
    module = type(error).__module__
    if not module.startswith(("pyspark", "py4j", "grpc")):
        return None
    text = str(error)
    if ours := _OURS.search(text):
        return _as_raised(ours[1], ours[2])
    line = cause(text)
    if any(sign in text for sign in _DISK):
        return DiskFull(f"no room on the disk: {line}; make room and run it again")
    if "PATH_NOT_FOUND" in text:
        return NotFound(f"nothing is there: {line}")
    if any(sign in text for sign in _CORRUPT):
        found = _FILE.search(text)
        where = found[1] if found else line
        return ConfigurationError(f"a file cannot be read as Parquet: {where}; remove or mend it")
    if any(sign in text for sign in _DOWN):
        return DependencyDown(f"a server went away while the job ran: {line}")
    return ConfigurationError(f"Spark says: {line}")


def _as_raised(name: str, text: str) -> HoldfastError:
    down = name in ("BrokerDown", "DependencyDown", "Transient")
    return (DependencyDown if down else ConfigurationError)(mask(text.strip()[:_MOST]))


def cause(text: str) -> str:
    """Return the line of *text* that says most: the innermost cause if it names one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    chosen = causes[-1] if causes else lines[0] if lines else "nothing"
    return mask(chosen[:_MOST])
