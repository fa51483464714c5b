"""The log of an archive: numbered states, each written whole and never changed.

A state names every file that belongs to the archive, and how far each source was read. The
newest one counts. A job that was killed has written files that no state names: nobody reads
them, and a later job removes them. Two jobs that commit the same number: one of them fails, and
nothing of it is kept.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from holdfast.errors import ConfigurationError, Transient
from holdfast.spark_jobs.errors import DiskFull

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

FORMAT = 1
"""The version of the log that this version writes."""
_LOG = "_holdfast"
_KEPT = 20
"""How many states stay, for readers that began with an older one."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ArchiveBusy(Transient):
    """Another job has changed the archive meanwhile; nothing of this one is kept."""


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of records, never changed."""

    path: str
    day: str
    rows: int
    bytes: int
    first: float | None = None
    """The earliest failure in it, in POSIX seconds; None where all clocks were wrong."""
    last: float | None = None


class Dropped(msgspec.Struct, frozen=True):
    """A file that belongs to the archive no more; readers of an older state may still use it."""

    path: str
    at: float


class Erased(msgspec.Struct, frozen=True):
    """A subject that was erased, as a digest: older records of it are not taken in again."""

    digest: str
    at: float


class ArchiveState(msgspec.Struct, frozen=True, kw_only=True):
    """The archive at one moment."""

    number: int = 0
    run: str = ""
    at: float = 0.0
    operation: str = "none"
    reason: str = ""
    files: tuple[DataFile, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    marks: dict[str, dict[str, Any]] = {}
    erased: tuple[Erased, ...] = ()
    salt: str = ""
    format: int = FORMAT

    @property
    def rows(self) -> int:
        """How many records it holds."""
        return sum(file.rows for file in self.files)


class Folder(Protocol):
    """A folder that Spark can reach, as far as a log needs one."""

    def names(self, path: str) -> list[str]:
        """Return the names in the folder *path*; none where there is no such folder."""
        ...

    def files(self, path: str) -> list[tuple[str, int]]:
        """Return every file below *path* with its size; paths are relative to the root."""
        ...

    def read(self, path: str) -> bytes:
        """Return the content of the file at *path*."""
        ...

    def put_new(self, path: str, content: bytes) -> None:
        """Make the file at *path*, whole or not at all; `FileExistsError` when it is there."""
        ...

    def delete(self, path: str) -> None:
        """Delete the file or folder at *path*, if there is one."""
        ...

    def age(self, path: str, now: float) -> float:
        """Return how many seconds ago *path* was last changed."""
        ...


class LocalFolder:
    """A folder of this machine, or one that is mounted on all of them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self, path: str) -> list[str]:
        """Return the names in *path*."""
        try:
            return sorted(os.listdir(self._root / path))
        except FileNotFoundError:
            return []

    def files(self, path: str) -> list[tuple[str, int]]:
        """Return the files below *path*."""
        found = (one for one in (self._root / path).rglob("*") if one.is_file())
        return sorted((one.relative_to(self._root).as_posix(), one.stat().st_size) for one in found)

    def read(self, path: str) -> bytes:
        """Return the content of *path*."""
        return (self._root / path).read_bytes()

    def put_new(self, path: str, content: bytes) -> None:
        """Write beside, force to disk, then link: the name appears with the whole content."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, target)
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()

    def delete(self, path: str) -> None:
        """Delete *path*, a file or a folder with all that is in it."""
        target = self._root / path
        if target.is_dir():
            for inner in sorted(target.rglob("*"), key=lambda one: len(one.parts), reverse=True):
                with contextlib.suppress(FileNotFoundError):
                    inner.rmdir() if inner.is_dir() else inner.unlink()
            with contextlib.suppress(FileNotFoundError):
                target.rmdir()
        else:
            with contextlib.suppress(FileNotFoundError):
                target.unlink()

    def age(self, path: str, now: float) -> float:
        """Return the age of the newest thing in *path*."""
        target = self._root / path
        inside = [one.stat().st_mtime for one in [target, *target.rglob("*")] if one.exists()]
        return now - max(inside, default=now)


class HadoopFolder:
    """A folder of any file system that Spark knows: HDFS, S3, Azure, Google Cloud Storage.

    `put_new` needs a file system that renames atomically and onto nothing, as HDFS does. On an
    object store run one job at a time.
    """

    def __init__(self, spark: Any, root: str) -> None:
        self._jvm = spark._jvm
        self._root = root.rstrip("/")
        conf = spark._jsc.hadoopConfiguration()
        self._fs = self._jvm.org.apache.hadoop.fs.Path(self._root).getFileSystem(conf)

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._root}/{path}" if path else self._root)

    def names(self, path: str) -> list[str]:
        """Return the names in *path*."""
        where = self._path(path)
        if not self._fs.exists(where):
            return []
        return sorted(one.getPath().getName() for one in self._fs.listStatus(where))

    def files(self, path: str) -> list[tuple[str, int]]:
        """Return the files below *path*."""
        where = self._path(path)
        if not self._fs.exists(where):
            return []
        start = len(self._fs.makeQualified(self._path("")).toString().rstrip("/")) + 1
        found, listed = [], self._fs.listFiles(where, True)
        while listed.hasNext():
            one = listed.next()
            found.append((one.getPath().toString()[start:], int(one.getLen())))
        return sorted(found)

    def read(self, path: str) -> bytes:
        """Return the content of *path*."""
        stream = self._fs.open(self._path(path))
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def put_new(self, path: str, content: bytes) -> None:
        """Write a draft, then rename it, which fails where the name is taken."""
        target = self._path(path)
        draft = self._path(f"{path}.{os.getpid()}.draft")
        stream = self._fs.create(draft, True)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()
        try:
            if self._fs.exists(target) or not self._fs.rename(draft, target):
                raise FileExistsError(path)
        finally:
            self._fs.delete(draft, False)

    def delete(self, path: str) -> None:
        """Delete *path*, a file or a folder with all that is in it."""
        self._fs.delete(self._path(path), True)

    def age(self, path: str, now: float) -> float:
        """Return the age of the newest file in *path*."""
        where, newest = self._path(path), 0
        if not self._fs.exists(where):
            return 0.0
        listed = self._fs.listFiles(where, True)
        while listed.hasNext():
            newest = max(newest, int(listed.next().getModificationTime()))
        newest = newest or int(self._fs.getFileStatus(where).getModificationTime())
        return now - newest / 1000


def folder(spark: SparkSession, place: str) -> Folder:
    """Return the folder at *place*: of this machine, or of a file system with a scheme."""
    local = place.removeprefix("file://")
    if local.startswith("/"):
        return LocalFolder(Path(local))
    if not hasattr(spark, "_jvm"):
        raise ConfigurationError(
            f"{place}: over Spark Connect an archive must be on a path of this machine; use "
            "--master, or spark-submit"
        )
    return HadoopFolder(spark, place)


class NumberedState(Protocol):
    """A state as a log keeps it: msgspec writes and reads it, and all fields have defaults."""

    @property
    def number(self) -> int:
        """Which one it is."""
        ...

    @property
    def format(self) -> int:
        """The version of the log that wrote it."""
        ...


S = TypeVar("S", bound=NumberedState)


class NumberedLog(Generic[S]):
    """Finds the newest state of what a folder holds, and commits the next."""

    def __init__(self, where: Folder, of: type[S], *, called: str) -> None:
        self._where = where
        self._of = of
        self._called = called

    def newest(self) -> S:
        """Return the state that counts; an empty one where there is none yet."""
        for name in reversed(list(self._numbered())):
            try:
                content = self._where.read(f"{_LOG}/{name}")
            except (FileNotFoundError, OSError):
                continue  # removed just now: there is a newer one, or we begin anew
            return self._decoded(content, name)
        return self._of()

    def commit(self, state: S) -> None:
        """Make *state* the newest; `ArchiveBusy` when another job was faster."""
        try:
            self._where.put_new(_name(state.number), msgspec.json.encode(state))
        except FileExistsError as error:
            raise ArchiveBusy(
                f"another job has changed the {self._called} meanwhile: nothing of this one is "
                "kept, run it again"
            ) from error
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise DiskFull(
                f"no room on the disk for the log of the {self._called}: nothing of this job is "
                "kept; make room and run it again"
            ) from error
        for name in list(self._numbered())[:-_KEPT]:
            self._where.delete(f"{_LOG}/{name}")

    def _numbered(self) -> Iterator[str]:
        for name in self._where.names(_LOG):
            if name.endswith(".json") and name[:-5].isdigit():
                yield name

    def _decoded(self, content: bytes, name: str) -> S:
        try:
            state = msgspec.json.decode(content, type=self._of)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(
                f"{_LOG}/{name} is damaged ({error}): restore it, or remove it to go back to the "
                "state before"
            ) from error
        if state.format > FORMAT:
            raise ConfigurationError(
                f"the {self._called} is of version {state.format}: upgrade Holdfast to read it"
            )
        return state


class StateLog(NumberedLog[ArchiveState]):
    """The log of an archive."""

    def __init__(self, where: Folder) -> None:
        super().__init__(where, ArchiveState, called="archive")


def _name(number: int) -> str:
    return f"{_LOG}/{number:012d}.json"
