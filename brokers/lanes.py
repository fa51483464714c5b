"""Which lane a key belongs to, where the broker does not decide it itself."""

from __future__ import annotations

import itertools
import zlib


class Spread:
    """Gives each key one lane for good, and keyless messages each lane in turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def lane(self, key: bytes | None, lanes: int) -> int:
        """Return the partition of *key* among *lanes*: the same for all processes and times."""
        return (next(self._turns) if key is None else zlib.crc32(key)) % lanes
