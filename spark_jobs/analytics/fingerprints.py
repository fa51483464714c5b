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
import pyarrow.compute as pc

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
_BETWEEN = "\x1f"
_ABOVE = "\U0010ffff"
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
_string = msgspec.json.Decoder(str).decode
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
        self._groups: dict[tuple[str, str], str] = {}
        self._forms: dict[tuple[str, str], Fingerprint | str | None] = {}

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
        return self._by_text(_types(chain), _types(failure.also), root.text)

    def _by_text(self, types: tuple[str, ...], also: tuple[str, ...], text: str) -> Fingerprint:
        """Return the fingerprint of exceptions of *types*, whose root says *text*."""
        key = (types, also, self.parameterised(text))
        known = self._texts.get(key)
        if known is None:
            known = rules.fingerprint([rules.Error(one, text) for one in types], also=also)
            _keep(self._texts, key, known)
        return known

    def parameterised(self, text: str) -> str:
        """Return *text* as the rules parameterise it."""
        key = likeness(text)
        known = self._masked.get(key)
        if known is None:
            known = rules.parameterised(text)
            _keep(self._masked, key, known)
        return known

    def batch(
        self, batch: pa.RecordBatch, keep: Iterable[str], told: dict[str, str] | None = None
    ) -> pa.RecordBatch:
        """Return the columns *keep* of *batch* with `group_id` and, once per group, `about`.

        *batch* has the fields of `NEEDED`. `about` is there for the letter of the batch with the
        smallest id of its group, so that the minimum over all batches is that of all letters.
        *told* are the smallest ids so far: then what does not go below them is left out.
        """
        ids, envelopes = (batch.column(name).to_pylist() for name in ("dlq_id", "envelope"))
        places = _places(batch)
        codes = places.indices.to_pylist()
        wheres = places.dictionary.to_pylist()
        quick, known_groups = self._quick, self._groups
        names: list[str] = []
        best: dict[str, tuple[str, int, Fingerprint]] = {}
        for row, (sample, envelope, code) in enumerate(zip(ids, envelopes, codes, strict=True)):
            found = quick(envelope)
            if found is None:
                found = self.fingerprint(_decoded(envelope) or _bare(batch, row))
            key = (found.value, wheres[code])
            name = known_groups.get(key)
            if name is None:
                name = rules.group_id(found.value, *wheres[code].split(_BETWEEN, 2))
                _keep(known_groups, key, name)
            names.append(name)
            known = best.get(name)
            if known is None or (sample or "") < known[0]:
                best[name] = (sample or "", row, found)
        about: list[dict[str, str | None] | None] = [None] * len(names)
        for name, (sample, row, found) in best.items():
            if told is not None:
                if sample >= told.get(name, _ABOVE):
                    continue
                _keep(told, name, sample)
            failure = _decoded(envelopes[row]) or _bare(batch, row)
            root = failure.chain[0] if failure.chain else _NOTHING
            title = f"{root.type}: {self.parameterised(root.text)}"
            facts = {name: batch.column(name)[row].as_py() or "" for name in _TOLD}
            facts |= {"sample": sample, "fingerprint": found.value, "by": found.by,
                      "title": cut(title, _MOST_TITLE), "calls": _calls(found)}  # fmt: skip
            about[row] = {name: facts[name] for name in ABOUT.names}
        kept = {name: batch.column(name) for name in keep}
        return pa.RecordBatch.from_pydict(
            {**kept, "group_id": pa.array(names, pa.string()), "about": pa.array(about, ABOUT)}
        )

    def _quick(self, envelope: str | None) -> Fingerprint | None:
        """Return the fingerprint of an envelope as the store writes it, without decoding it.

        Of one exception alone, everything but its text and trace is the same for the same
        problem at the same lines, so that is looked up as it stands. In JSON no quote inside of a
        text stands without its backslash, so what is looked for cannot be part of a text.
        None: this takes more than a look.
        """
        if not envelope:
            return None
        start = envelope.find('"failure":{')
        text = envelope.find('"text":"', start) + 8
        end = envelope.find(',"governance":', text)
        if start < 0 or text < 8 or end < 0 or envelope.find('"text":"', text, end) >= 0:
            return None
        stop = envelope.find('","frames":', text, end)
        if stop < 0:
            stop = envelope.find('"}', text, end)
            if stop < 0 or envelope[stop - 1] == "\\":
                return None
        trace = envelope.find(',"trace":"', stop, end)
        if trace >= 0:
            if envelope.find('","known":', trace, end) >= 0:
                return None
            end = trace
        form = (envelope[start:text], envelope[stop:end])
        try:
            found = self._forms[form]
        except KeyError:
            found = self._learn(envelope)
            _keep(self._forms, form, found)
        if found is None or not isinstance(found, str):
            return found
        words = envelope[text:stop]
        if "\\" in words:
            try:
                words = _string(f'"{words}"')
            except (msgspec.MsgspecError, UnicodeError):
                return None
        return self._by_text((found,), (), words)

    def _learn(self, envelope: str) -> Fingerprint | str | None:
        """Return what all failures of the form of this one have in common.

        Their fingerprint if it is by stack, their type if it is by text; None if they must be
        looked at one by one.
        """
        failure = _decoded(envelope)
        if (
            failure is None
            or failure.explicit is not None
            or failure.known is not None
            or failure.also
            or len(failure.chain) != 1
        ):
            return None
        found = self.fingerprint(failure)
        return found if found.by == "stack" else failure.chain[0].type


def _places(batch: pa.RecordBatch) -> pa.DictionaryArray:
    """Return whose problem each letter is: consumer group, topic and handler, as one text."""
    parts = (batch.column(name) for name in ("consumer_group", "topic", "handler"))
    texts = (pc.fill_null(one.cast(pa.string()), "") for one in parts)
    return pc.binary_join_element_wise(*texts, _BETWEEN).dictionary_encode()


def fingerprinted(
    batches: Iterable[pa.RecordBatch], keep: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """Yield *batches* with their groups; what `mapInArrow` and DuckDB's stream both run."""
    own = Fingerprinter()
    told: dict[str, str] = {}
    for batch in batches:
        if batch.num_rows:
            yield own.batch(batch, keep, told)


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
