"""Fingerprints of many dead letters at once, as Arrow batches, by the rules of `dlq/capture/`.

No rule is written a second time here: engines that translate expressions disagree about what
a digit is. Instead a batch is brought down to what is different in it. Frames are not even
decoded when the same bytes were seen before, and texts that differ in digits alone are
parameterised once. Memory is bounded: a cache that is full is emptied.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from holdfast.db.text import cut
from holdfast.dlq.capture import fingerprint as rules
from holdfast.dlq.letter import (
    Class,
    ExceptionInfo,
    Failure,
    FailureStage,
    Frame,
    KnownFacts,
)
from holdfast.dlq.store.rows import fingerprint_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from holdfast.dlq.capture.fingerprint import Fingerprint

NEEDED = (
    "dlq_id", "topic", "consumer_group", "handler", "stage", "error_class", "error_type",
    "error_text", "envelope",
)  # fmt: skip
"""The fields of a record that a fingerprint and the facts of its group are made of."""

ABOUT = pa.struct(
    [(name, pa.string()) for name in ("sample", "fingerprint", "by", "title", "calls",
                                      "error_type", "error_class", "stage", "topic",
                                      "consumer_group", "handler")]
)  # fmt: skip
"""What is known of a group, from the letter with the smallest id: the same in every engine."""
ABOUT_DDL = "struct<" + ",".join(f"{name}:string" for name in ABOUT.names) + ">"

_TOLD = tuple(name for name in NEEDED if name in ABOUT.names)
_MOST_KNOWN = 50_000
_MOST_TITLE, _MOST_CALLS = 300, 1_000
_ANY_DIGIT = bytes.maketrans(b"0123456789", b"1111111111")
_UUID = re.compile(
    rb"(?<![^ \t\"'])[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
)
_ANY_UUID = b"11111111-1111-1111-1111-111111111111"


class _Raised(msgspec.Struct, frozen=True, gc=False):
    type: str
    text: str
    frames: msgspec.Raw = msgspec.Raw(b"[]")


class _Failure(msgspec.Struct, frozen=True):
    chain: list[_Raised]
    also: list[_Raised] = []
    explicit: str | None = None
    known: KnownFacts | None = None


class _Envelope(msgspec.Struct, frozen=True):
    failure: _Failure


_envelope = msgspec.json.Decoder(_Envelope).decode
_frames = msgspec.json.Decoder(tuple[Frame, ...]).decode
_NOTHING = _Raised("unknown", "")


def likeness(text: str) -> bytes:
    """Return what *text* has in common with others that are parameterised exactly as it is.

    The rules look at digits by class alone, except in `0x`, and at a UUID behind a space or a
    quote as a whole. Length is kept, for the rules count characters.
    """
    found = text[: rules.MOST_TEXT].encode("utf-8", "surrogatepass")
    if b"0x" in found:
        return found
    if found.count(b"-") >= 4:
        found = _UUID.sub(_ANY_UUID, found)
    return found.translate(_ANY_DIGIT)


class Fingerprinter:
    """Gives dead letters the fingerprints that the store would give them, many at a time."""

    def __init__(self) -> None:
        self._stacks: dict[Any, Fingerprint | None] = {}
        self._texts: dict[Any, Fingerprint] = {}
        self._masked: dict[bytes, str] = {}
        self._groups: dict[tuple[str, str, str, str], str] = {}

    def fingerprint(self, failure: _Failure) -> Fingerprint:
        """Return the fingerprint of *failure*, as `dlq/store/rows.py` would."""
        if failure.explicit is not None or failure.known is not None:
            return fingerprint_of(_whole(failure))
        chain = failure.chain
        # The usual case is spelled out: one exception, alone.
        if len(chain) == 1 and not failure.also:
            key: Any = (chain[0].type, bytes(chain[0].frames))
        else:
            chain = chain[: rules.MOST_RAISED]
            key = (*((one.type, bytes(one.frames)) for one in chain), _types(failure.also))
        try:
            found = self._stacks[key]
        except KeyError:
            whole = rules.fingerprint([_error(one) for one in chain], also=_types(failure.also))
            found = whole if whole.by == "stack" else None
            _keep(self._stacks, key, found)
        if found is not None:
            return found
        root = chain[0] if chain else _NOTHING
        by_text = (_types(chain), _types(failure.also), self.parameterised(root.text))
        known = self._texts.get(by_text)
        if known is None:
            errors = [rules.Error(one.type, one.text) for one in chain]
            known = rules.fingerprint(errors, also=_types(failure.also))
            _keep(self._texts, by_text, known)
        return known

    def parameterised(self, text: str) -> str:
        """Return *text* as the rules parameterise it."""
        key = likeness(text)
        known = self._masked.get(key)
        if known is None:
            known = rules.parameterised(text)
            _keep(self._masked, key, known)
        return known

    def batch(self, batch: pa.RecordBatch, keep: Iterable[str]) -> pa.RecordBatch:
        """Return the columns *keep* of *batch* with `group_id` and, once per group, `about`.

        *batch* has the fields of `NEEDED`. `about` is there for the letter of the batch with the
        smallest id of its group, so that the minimum over all batches is that of all letters.
        """
        ids, topics, consumers, handlers, envelopes = (
            batch.column(name).to_pylist()
            for name in ("dlq_id", "topic", "consumer_group", "handler", "envelope")
        )
        names: list[str] = []
        best: dict[str, tuple[str, int, Fingerprint, _Raised]] = {}
        for row, envelope in enumerate(envelopes):
            failure = _decoded(envelope) or _bare(batch, row)
            found = self.fingerprint(failure)
            key = (found.value, consumers[row], topics[row], handlers[row])
            name = self._groups.get(key)
            if name is None:
                name = rules.group_id(key[0], *(part or "" for part in key[1:]))
                _keep(self._groups, key, name)
            names.append(name)
            sample = ids[row] or ""
            known = best.get(name)
            if known is None or sample < known[0]:
                root = failure.chain[0] if failure.chain else _NOTHING
                best[name] = (sample, row, found, root)
        about: list[dict[str, str | None] | None] = [None] * len(names)
        for sample, row, found, root in best.values():
            title = f"{root.type}: {self.parameterised(root.text)}"
            facts = {name: batch.column(name)[row].as_py() or "" for name in _TOLD}
            facts |= {"sample": sample, "fingerprint": found.value, "by": found.by,
                      "title": cut(title, _MOST_TITLE), "calls": _calls(found)}  # fmt: skip
            about[row] = {name: facts[name] for name in ABOUT.names}
        kept = {name: batch.column(name) for name in keep}
        return pa.RecordBatch.from_pydict(
            {**kept, "group_id": pa.array(names, pa.string()), "about": pa.array(about, ABOUT)}
        )


def fingerprinted(
    batches: Iterable[pa.RecordBatch], keep: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """Yield *batches* with their groups; what `mapInArrow` and DuckDB's stream both run."""
    own = Fingerprinter()
    for batch in batches:
        if batch.num_rows:
            yield own.batch(batch, keep)


def _calls(found: Fingerprint) -> str:
    """Return the calls by which a group by stack is compared; empty for one by text."""
    if found.by != "stack":
        return ""
    lines = found.text.split("\n")[2:] or [found.value]  # one that is only known by its digest
    return cut(">".join(lines), _MOST_CALLS)


def _types(raised: Iterable[_Raised]) -> tuple[str, ...]:
    return tuple(one.type for one in raised)


def _decoded(envelope: str | None) -> _Failure | None:
    """Return the failure of an envelope; None if there is none, or one that cannot be read."""
    if not envelope:
        return None
    try:
        return _envelope(envelope).failure
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _bare(batch: pa.RecordBatch, row: int) -> _Failure:
    """Return the failure of a record without an envelope: its type and its text."""
    kind, text = (batch.column(name)[row].as_py() for name in ("error_type", "error_text"))
    return _Failure([_Raised(kind or "unknown", text or "")])


def _error(raised: _Raised) -> rules.Error:
    calls = [
        rules.FrameCall(frame.module, frame.function, frame.in_app)
        for frame in _decoded_frames(raised)
    ]
    return rules.Error(raised.type, raised.text, calls)


def _whole(failure: _Failure) -> Failure:
    """Return *failure* as the store has it: one that knows its fingerprint may need its frames."""
    return Failure(
        stage=FailureStage.HANDLE,
        kind=Class.UNKNOWN,
        chain=tuple(_info(one) for one in failure.chain),
        also=tuple(_info(one) for one in failure.also),
        explicit=failure.explicit,
        known=failure.known,
    )


def _info(raised: _Raised) -> ExceptionInfo:
    return ExceptionInfo(type=raised.type, text=raised.text, frames=_decoded_frames(raised))


def _decoded_frames(raised: _Raised) -> tuple[Frame, ...]:
    try:
        return _frames(raised.frames)
    except msgspec.MsgspecError:  # of a newer version: its types and text say enough
        return ()


def _keep(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= _MOST_KNOWN:
        cache.clear()
    cache[key] = value
