"""The Lua scripts: each is one atomic step, and none acts for a member that lost the lane.

Every script is a file beside this one, with its KEYS and ARGV told at its top.

Answers are packed by cmsgpack into one string, which is decoded in C here; a reply of
nested arrays would be taken apart piece by piece in Python. Commands that need free memory
come before those that do not, so that a full server refuses a step before it has begun.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple


class Script(NamedTuple):
    """A script, and the name by which a server that has loaded it knows it."""

    text: str
    sha: str


def _script(name: str, *, owned: bool = False) -> Script:
    """Return the script in *name*.lua; one for *owned* lanes begins with that check."""
    text = (_text("owned") if owned else "") + _text(name)
    # Redis names a script by its SHA-1; nothing here relies on it for safety.
    return Script(text, hashlib.sha1(text.encode()).hexdigest())  # noqa: S324


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(f"{name}.lua").read_text(encoding="utf-8")


PUBLISH = _script("publish")
READ = _script("read")
AGAIN = _script("again", owned=True)
PENDING = _script("pending", owned=True)
PARK = _script("park", owned=True)
ACCEPT = _script("accept", owned=True)
SEEK = _script("seek", owned=True)
TAKE = _script("take")
INTRODUCE = _script("introduce")
RENEW = _script("renew", owned=True)
FREE = _script("free", owned=True)
OWNERS = _script("owners")
LOOK = _script("look")
LEAVE = _script("leave")
GROUP = _script("group")
COUNT = _script("count")
OLDEST = _script("oldest")
PRUNE = _script("prune")

ALL = (
    PUBLISH, READ, AGAIN, PENDING, PARK, ACCEPT, SEEK, TAKE, INTRODUCE, RENEW, FREE, OWNERS,
    LOOK, LEAVE, GROUP, COUNT, OLDEST, PRUNE,
)  # fmt: skip
