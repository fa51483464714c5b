"""Fingerprints of many dead letters at once, as Arrow batches, by the rules of `dlq/capture/`.

No rule is written a second time here: engines that translate expressions disagree about what
a digit is. Instead a batch is brought down to what is different in it. An envelope is not decoded
when all of its failure but the root's text was seen before, and texts that differ in digits or
tokens alone are parameterised once. What is done for each row is done by Arrow, for all rows of
a batch at once. Memory is bounded: a cache that is full is emptied.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
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
from holdfast.spark_jobs.analytics.families import families, has_odd_signs, likeness

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

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
_FAILURE, _TEXT, _BEHIND = '"failure":{', '"text":"', ',"governance":'
_TRACE = ',"trace":"'
_OTHER_TEXT, _ANY_TEXT = re.compile(r'"text":"(?:[^"\\]|\\.)*"'), '"text":""'
"""Only the text of the root has a say."""


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
_ALONE, _BY_TEXT = -1, -2
"""Rows that are looked at by all of their envelope, or by their text."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """A failure but for the text of its root; *stack* if that text has no say."""

    failure: _Failure
    stack: Fingerprint | None


class Fingerprinter:
    """Gives dead letters the fingerprints that the store would give them, many at a time."""

    def __init__(self) -> None:
        self._stacks: dict[Any, Fingerprint | None] = {}
        self._texts: dict[Any, Fingerprint] = {}
        self._masked: dict[bytes | str, str] = {}
        self._outlines: dict[tuple[str, str], _Outline | None] = {}
        self._groups: dict[tuple[str, ...], str] = {}
        self._told: dict[str, str] = {}

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
        return found if found is not None else self.by_text(failure, None)

    def by_text(self, failure: _Failure, text: str | None) -> Fingerprint:
        """Return the fingerprint of *failure* by its texts, with *text* as that of the root."""
        chain = failure.chain[: rules.MOST_RAISED]
        if text is None:
            text = chain[0].text if chain else ""
        key = (_types(chain), _types(failure.also), self.parameterised(text))
        known = self._texts.get(key)
        if known is None:
            texts = [text, *(one.text for one in chain[1:])]
            errors = [rules.Error(one.type, said) for one, said in zip(chain, texts, strict=False)]
            known = rules.fingerprint(errors, also=_types(failure.also))
            _keep(self._texts, key, known)
        return known

    def parameterised(self, text: str) -> str:
        """Return *text* as the rules parameterise it."""
        return self._mask(likeness(text), text)

    def all_parameterised(self, texts: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
        """Return *texts*, as JSON writes them, as the rules parameterise them: places in a list."""
        encoded = families(texts)
        numbers = encoded.indices.to_numpy()
        _, first = np.unique(numbers, return_index=True)
        alike = zip(encoded.dictionary.to_pylist(), texts.take(first).to_pylist(), strict=True)
        said = [self._mask(key, _unescaped(text) or "") for key, text in alike]
        return numbers.astype(np.int64), said

    def _mask(self, alike: bytes | str, text: str) -> str:
        known = self._masked.get(alike)
        if known is None:
            known = rules.parameterised(text)
            _keep(self._masked, alike, known)
        return known

    def outlined(self, head: str, tail: str) -> _Outline | None:
        """Return the failure of all envelopes that have *head* and *tail* about a root's text.

        None unless what stands between them is that text, and only that. If so for two texts, so
        for any: what is a string in JSON stays one, whatever is in it.
        """
        if _TRACE in tail:  # long, and another one each time
            return None
        try:
            return self._outlines[head, tail]
        except KeyError:
            pass
        one, other = (_decoded(f'{{{_FAILURE}{head}{_TEXT}{text}"{tail}}}') for text in ("a", "b"))
        found = None
        if one is not None and other is not None and one.chain and other.chain and (
            one.explicit is None and one.known is None
            and (one.chain[0].text, other.chain[0].text) == ("a", "b")
        ):  # fmt: skip
            whole = self.fingerprint(one)
            found = _Outline(one, whole if whole.by == "stack" else None)
        _keep(self._outlines, (head, tail), found)
        return found

    def batch(self, batch: pa.RecordBatch, keep: Iterable[str]) -> pa.RecordBatch:
        """Return the columns *keep* of *batch* with `group_id` and, once per group, `about`.

        *batch* has the fields of `NEEDED`. `about` is there for the letter with the smallest id
        of its group so far, so that the minimum over all batches is that of all letters.
        """
        numbers, groups = _Rows(self, batch).numbered()
        names = pa.array([name for name, _ in groups], pa.string())
        ids = pc.fill_null(batch.column("dlq_id"), "")
        known: list[dict[str, str]] = []
        places = np.full(batch.num_rows, -1, np.int32)
        for row in _first_of_each(numbers, ids):
            name, found = groups[numbers[row]]
            sample = ids[row].as_py()
            if self._told.get(name, sample) < sample:
                continue  # a smaller one was told
            _keep(self._told, name, sample)
            places[row] = len(known)
            known.append(self._about(batch, row, found))
        kept = {name: _plain(batch.column(name)) for name in keep}
        return pa.RecordBatch.from_pydict({
            **kept,
            "group_id": names.take(pa.array(numbers)),
            "about": pa.array(known, ABOUT).take(pa.array(places, mask=places < 0)),
        })  # fmt: skip

    def _about(self, batch: pa.RecordBatch, row: int, found: Fingerprint) -> dict[str, str]:
        failure = _decoded(batch.column("envelope")[row].as_py()) or _bare(batch, row)
        root = failure.chain[0] if failure.chain else _NOTHING
        title = f"{root.type}: {self.parameterised(root.text)}"
        facts = {name: batch.column(name)[row].as_py() or "" for name in _TOLD}
        facts |= {"sample": batch.column("dlq_id")[row].as_py() or "",
                  "fingerprint": found.value, "by": found.by,
                  "title": cut(title, _MOST_TITLE), "calls": _calls(found)}  # fmt: skip
        return {name: facts[name] for name in ABOUT.names}

    def named(self, found: Fingerprint, where: tuple[str, ...]) -> str:
        """Return the id of the group of *found* at *where*: consumer, topic and handler."""
        key = (found.value, *where)
        name = self._groups.get(key)
        if name is None:
            name = rules.group_id(*key)
            _keep(self._groups, key, name)
        return name


class _Rows:
    """The rows of a batch, each with the number of its group in the batch."""

    def __init__(self, own: Fingerprinter, batch: pa.RecordBatch) -> None:
        self._own = own
        self._batch = batch
        self._places = _Places(batch)
        self._groups: list[tuple[str, Fingerprint]] = []
        self._numbers: dict[str, int] = {}

    def numbered(self) -> tuple[NDArray[np.int64], list[tuple[str, Fingerprint]]]:
        """Return the number of each row's group, and the groups with their fingerprints."""
        envelopes = self._batch.column("envelope")
        heads, texts, tails = _parted(_plain(envelopes).cast(pa.string()))
        kinds, of = self._kinds(heads, _told(tails))
        outlines = [None if head is None else self._own.outlined(head, tail)
                    for head, tail, _ in kinds]  # fmt: skip
        by_kind = np.array([
            self._number(one.stack, where) if one is not None and one.stack is not None
            else _ALONE if one is None else _BY_TEXT
            for one, (_, _, where) in zip(outlines, kinds, strict=True)
        ], np.int64)  # fmt: skip
        numbers = by_kind[of]
        rows = np.flatnonzero(numbers == _BY_TEXT)
        if len(rows):
            numbers[rows] = self._by_texts(texts.take(rows), of[rows], kinds, outlines)
        for row in np.flatnonzero(numbers == _ALONE).tolist():
            numbers[row] = self._alone(row, envelopes[row].as_py(), self._places.of[row])
        return numbers, self._groups

    def _kinds(
        self, heads: pa.Array, tails: pa.Array
    ) -> tuple[list[tuple[str | None, str, int]], NDArray[np.int64]]:
        """Return all that differs in something else than a text, and which of it each row is."""
        encoded = [heads.dictionary_encode("encode"), tails.dictionary_encode("encode"),
                   pa.array(self._places.of).dictionary_encode()]  # fmt: skip
        codes = np.zeros(len(heads), np.int64)
        for one in encoded:
            codes = codes * len(one.dictionary) + one.indices.to_numpy()
        together = pa.array(codes).dictionary_encode()
        found: list[tuple[str | None, str, int]] = []
        for code in together.dictionary.to_pylist():
            words: list[Any] = []
            rest = code
            for one in reversed(encoded):
                rest, place = divmod(rest, len(one.dictionary))
                words.append(one.dictionary[place].as_py())
            found.append((words[2], words[1], words[0]))
        return found, together.indices.to_numpy().astype(np.int64)

    def _by_texts(
        self,
        texts: pa.Array,
        of: NDArray[np.int64],
        kinds: list[tuple[str | None, str, int]],
        outlines: list[_Outline | None],
    ) -> NDArray[np.int64]:
        """Return the groups of rows by their *texts*, each *of* a kind; some may be `_ALONE`."""
        places, said = self._own.all_parameterised(texts)
        codes = of * len(said) + places
        odd = np.flatnonzero(has_odd_signs(texts))
        codes[odd] = -1 - odd  # looked at one by one
        together = pa.array(codes).dictionary_encode()
        distinct = together.dictionary.to_numpy()
        found: NDArray[np.int64] = np.full(len(distinct), _ALONE, np.int64)
        order: NDArray[np.int64] = together.indices.to_numpy()
        _, first = np.unique(order, return_index=True)
        for place, text in enumerate(texts.take(first).to_pylist()):
            kind = of[first[place]]
            outline, whole = outlines[kind], _unescaped(text)
            if outline is not None and whole is not None:
                group = self._own.by_text(outline.failure, whole)
                found[place] = self._number(group, kinds[kind][2])
        return found[order]

    def _alone(self, row: int, envelope: str | None, where: int) -> int:
        """Return the group of one row, by all of its envelope."""
        failure = _decoded(envelope) or _bare(self._batch, row)
        return self._number(self._own.fingerprint(failure), where)

    def _number(self, found: Fingerprint, where: int) -> int:
        name = self._own.named(found, self._places.name(where))
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._groups)
            self._groups.append((name, found))
        return number


class _Places:
    """Where the letters of a batch failed: consumer, topic and handler as one number."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._words: list[list[str | None]] = []
        numbers = np.zeros(batch.num_rows, np.int64)
        for name in ("consumer_group", "topic", "handler"):
            column = batch.column(name)
            if not pa.types.is_dictionary(column.type):
                column = column.dictionary_encode()
            words = [*column.dictionary.to_pylist(), None]
            own = pc.fill_null(column.indices, len(words) - 1).to_numpy(zero_copy_only=False)
            numbers = numbers * len(words) + own
            self._words.append(words)
        self.of: NDArray[np.int64] = numbers

    def name(self, number: int) -> tuple[str, ...]:
        """Return the words of a place."""
        found: list[str] = []
        for words in reversed(self._words):
            number, own = divmod(number, len(words))
            found.append(words[own] or "")
        return tuple(reversed(found))


def _first_of_each(numbers: NDArray[np.int64], ids: pa.Array) -> list[int]:
    """Return, of each number, the row with the smallest id, the first one if several have it."""
    rows = pa.table({"number": pa.array(numbers), "id": ids})
    smallest = rows.group_by("number").aggregate([("id", "min")]).sort_by("number")
    least = smallest.column("id_min").combine_chunks().take(rows.column("number").combine_chunks())
    (found,) = np.nonzero(pc.equal(ids, least).to_numpy(zero_copy_only=False))
    first: dict[int, int] = {}
    for row, number in zip(found.tolist(), numbers[found].tolist(), strict=True):
        first.setdefault(number, row)
    return list(first.values())


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _parted(envelopes: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Return what stands before the text of each root, that text, and what stands behind it.

    All of a failure; null where it is written in another way than Holdfast writes it.
    """
    rest = _half(envelopes, _FAILURE, 1)
    heads, rest = _halves(rest, _TEXT)
    rest = _half(rest, _BEHIND, 0)
    texts, tails = _halves(rest, '"')
    if pc.any(pc.ends_with(texts, "\\")).as_py():  # that quote was part of the text
        same = pc.replace_substring(rest, '\\"', "\\u0022")
        rest = pc.if_else(pc.match_substring(rest, "\\\\"), rest, same)
        texts, tails = _halves(rest, '"')
        is_odd = pc.ends_with(texts, "\\")
        texts, tails = (pc.if_else(is_odd, None, one) for one in (texts, tails))
    heads = pc.if_else(pc.is_valid(tails), heads, None)
    return heads, texts, tails


def _halves(texts: pa.Array, sign: str) -> tuple[pa.Array, pa.Array]:
    """Return what is before and behind the first *sign* of each of *texts*; null without it."""
    parts = pc.split_pattern(texts, sign, max_splits=1)
    return _taken(parts, 0), _taken(parts, 1)


def _half(texts: pa.Array, sign: str, which: int) -> pa.Array:
    """Return one of the two halves alone: each is a copy."""
    return _taken(pc.split_pattern(texts, sign, max_splits=1), which)


def _taken(parts: pa.ListArray, which: int) -> pa.Array:
    ends = parts.offsets.to_numpy()
    is_whole = np.diff(ends) != 2
    places = pa.array(ends[:-1] + which, mask=is_whole if is_whole.any() else None)
    return parts.values.take(places)


def _told(tails: pa.Array) -> pa.Array:
    """Return *tails* without what has no say: traces, and the texts of exceptions but the root."""
    encoded = tails.dictionary_encode()
    has_more = pc.or_(*(pc.match_substring(encoded.dictionary, one) for one in (_TRACE, _TEXT)))
    if not pc.any(has_more).as_py():
        return tails
    told = [_OTHER_TEXT.sub(_ANY_TEXT, _untraced(one)) for one in encoded.dictionary.to_pylist()]
    return pa.array(told, pa.string()).take(encoded.indices)


def _untraced(tail: str) -> str:
    """Return *tail* without the trace at its end, which has no say; all of it if in doubt."""
    before, sign, said = tail.partition(_TRACE)
    body = said[:-2]
    is_string = body.count('"') == body.count('\\"') and '\\\\"' not in body
    return before + "}" if sign and is_string and said.endswith('"}') else tail


def _unescaped(text: str) -> str | None:
    """Return what stands in JSON as *text*; None if that is no string."""
    if "\\" not in text:
        return text
    try:
        return _string(f'"{text}"')
    except (msgspec.MsgspecError, UnicodeError):
        return None


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
