"""pgoutput and the frames around it are read exactly, and nothing else is taken for them."""

from __future__ import annotations

import struct
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError
from holdfast.outbox.rows import as_row
from holdfast.outbox.wal.catchup import Snapshot
from holdfast.outbox.wal.pgoutput import (
    UNCHANGED,
    Begin,
    Column,
    Commit,
    Delete,
    Emitted,
    Insert,
    Other,
    Relation,
    Truncate,
    Unchanged,
    Update,
    decode,
    reader,
)
from holdfast.outbox.wal.protocol import (
    Keepalive,
    Malformed,
    keepalive,
    position,
    position_text,
    status,
)
from holdfast.outbox.wal.reading import Covered, StreamIntake

VALUES = st.lists(st.one_of(st.none(), st.just(UNCHANGED), st.binary(max_size=40)), max_size=6)
NUMBER = st.integers(0, 2**32 - 1)
LSN = st.integers(0, 2**64 - 1)
NAME = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20
)


REAL = """
4200000000015287f80003035b871ad07b000002d6
52000040007075626c69630074006400030169640000000017ffffffff006e0000000019ffffffff006269670000000019ffffffff
49000040004e00037400000001316e7400000003787878
55000040004b00037400000001316e6e4e00037400000001327400000002c3a97400000003787878
4d0100000000015287b87072650000000004626f6479
44000040004b00037400000001326e6e
430000000000015287f800000000015288280003035b871ad07b
54000000010000004000
"""


def row(values: list[Any], kind: bytes = b"t") -> bytes:
    """Write *values* as the server does."""
    parts = [struct.pack(">H", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif isinstance(value, Unchanged):
            parts.append(b"u")
        else:
            parts.append(kind + struct.pack(">I", len(value)) + value)
    return b"".join(parts)


def relation(number: int, name: str, columns: list[tuple[str, int]]) -> bytes:
    """Write the relation message of a table."""
    listed = b"".join(
        bytes([place == 0]) + column.encode() + b"\0" + struct.pack(">Ii", kind, -1)
        for place, (column, kind) in enumerate(columns)
    )
    names = b"public\0" + name.encode() + b"\0"
    return (
        b"R" + struct.pack(">I", number) + names + b"d" + struct.pack(">H", len(columns)) + listed
    )


def begin(xid: int, lsn: int = 100) -> bytes:
    """Write the start of a transaction."""
    return b"B" + struct.pack(">QqI", lsn, 0, xid)


def commit(end: int) -> bytes:
    """Write the end of a transaction."""
    return b"C" + struct.pack(">BQQq", 0, end - 8, end, 0)


def test_a_transaction_as_the_server_wrote_it_is_read() -> None:
    """The bytes of a real server (PostgreSQL 15, proto_version 1) decode to what was done."""
    columns = (
        Column("id", 23, -1, key=True),
        Column("n", 25, -1, key=False),
        Column("big", 25, -1, key=False),
    )
    assert [decode(bytes.fromhex(line)) for line in REAL.split()] == [
        Begin(0x15287F8, 0x3035B871AD07B, 726),
        Relation(0x4000, "public", "t", "d", columns),
        Insert(0x4000, [b"1", None, b"xxx"]),
        Update(0x4000, [b"1", None, None], [b"2", "é".encode(), b"xxx"]),
        Emitted(True, 0x15287B8, "pre", b"body"),
        Delete(0x4000, [b"2", None, None]),
        Commit(0x15287F8, 0x1528828, 0x3035B871AD07B),
        Truncate((0x4000,)),
    ]


def test_begin_and_commit_carry_positions_and_the_transaction() -> None:
    """Positions and ids are read in full width."""
    assert decode(b"B" + struct.pack(">QqI", 2**63, -5, 2**32 - 1)) == Begin(2**63, -5, 2**32 - 1)
    assert decode(b"C" + struct.pack(">BQQq", 0, 1, 2**64 - 1, 7)) == Commit(1, 2**64 - 1, 7)


@given(NUMBER, VALUES, st.sampled_from([b"t", b"b"]))
def test_an_inserted_row_is_read_whatever_it_holds(
    number: int, values: list[Any], kind: bytes
) -> None:
    """Nulls, empty values, unchanged columns and arbitrary bytes come out as they went in."""
    data = b"I" + struct.pack(">I", number) + b"N" + row(values, kind)
    assert decode(data) == Insert(number, values)


@given(NUMBER, VALUES, VALUES, st.sampled_from([None, b"K", b"O"]))
def test_an_updated_row_is_read_with_its_old_key_or_row(
    number: int, old: list[Any], new: list[Any], kind: bytes | None
) -> None:
    """The old row is there only when the server sent it."""
    before = b"" if kind is None else kind + row(old)
    data = b"U" + struct.pack(">I", number) + before + b"N" + row(new)
    assert decode(data) == Update(number, None if kind is None else old, new, kind == b"O")


@given(NUMBER, VALUES, st.sampled_from([b"K", b"O"]))
def test_a_deleted_row_is_read(number: int, old: list[Any], kind: bytes) -> None:
    """Its key, or all of it."""
    assert decode(b"D" + struct.pack(">I", number) + kind + row(old)) == Delete(number, old)


@given(NUMBER, NAME, st.lists(st.tuples(NAME, NUMBER), max_size=5))
def test_a_relation_is_read(number: int, name: str, columns: list[tuple[str, int]]) -> None:
    """Names in any script, the types and the key columns."""
    found = decode(relation(number, name, columns))
    expected = tuple(Column(n, kind, -1, place == 0) for place, (n, kind) in enumerate(columns))
    assert found == Relation(number, "public", name, "d", expected)


def test_a_relation_of_the_catalog_has_its_schema() -> None:
    """The protocol leaves pg_catalog out."""
    data = b"R" + struct.pack(">I", 1) + b"\0t\0" + b"n" + struct.pack(">H", 0)
    assert decode(data) == Relation(1, "pg_catalog", "t", "n", ())


@given(st.booleans(), LSN, NAME, st.binary(max_size=50))
def test_an_emitted_message_is_read(flag: bool, lsn: int, prefix: str, content: bytes) -> None:
    """Prefix and content are told apart by the length, whatever bytes they hold."""
    size = struct.pack(">I", len(content))
    head = struct.pack(">BQ", flag, lsn)
    data = b"M" + head + prefix.encode() + b"\0" + size + content
    assert decode(data) == Emitted(flag, lsn, prefix, content)


def test_messages_without_rows_are_read() -> None:
    """Truncate names its tables; origin and type are passed over."""
    assert decode(b"T" + struct.pack(">IBII", 2, 0, 7, 8)) == Truncate((7, 8))
    assert decode(b"O" + struct.pack(">Q", 1) + b"x\0") == Other("O")
    assert decode(b"Y" + struct.pack(">I", 1) + b"public\0mood\0") == Other("Y")


@given(st.binary(max_size=60))
def test_garbage_is_refused_and_nothing_else_happens(data: bytes) -> None:
    """Whatever arrives decodes or raises Malformed."""
    with suppress(Malformed):
        decode(data)


@given(st.data(), VALUES)
def test_a_cut_message_is_refused(data: st.DataObject, values: list[Any]) -> None:
    """No prefix of a row passes for a row."""
    whole = b"I" + struct.pack(">I", 1) + b"N" + row(values)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(Malformed):
        decode(whole[:cut])


@given(LSN)
def test_positions_are_written_as_postgresql_does(number: int) -> None:
    """Text and number say the same."""
    assert position(position_text(number)) == number


def test_a_position_reads_as_in_the_server_views() -> None:
    """The form of pg_lsn."""
    assert position("16/B374D848") == 0x16B374D848
    assert position_text(0x16B374D848) == "16/B374D848"


def test_a_keepalive_tells_the_end_and_whether_to_answer() -> None:
    """A wrong size is refused."""
    assert keepalive(b"k" + struct.pack(">QqB", 77, 0, 1)) == Keepalive(77, True)
    with pytest.raises(Malformed):
        keepalive(b"k" + b"\0" * 5)


def test_a_status_confirms_one_position_at_the_servers_clock() -> None:
    """Written, flushed and applied are the same: what is published."""
    frame = status(99, datetime(2000, 1, 1, 0, 0, 1, tzinfo=UTC))
    assert frame == b"r" + struct.pack(">QQQqB", 99, 99, 99, 1_000_000, 0)


def test_a_snapshot_sees_what_ended_before_it() -> None:
    """Below xmin all, from xmax on nothing, between them what was not running."""
    snapshot = Snapshot.parse("100:110:103,105")
    seen = [xid for xid in range(95, 115) if snapshot.sees(xid)]
    assert seen == [95, 96, 97, 98, 99, 100, 101, 102, 104, 106, 107, 108, 109]
    assert Snapshot.parse("5:5:").sees(4)


@given(st.integers(2**31, 2**40), st.integers(-1000, 1000))
def test_transaction_numbers_wrap_around(xmax: int, distance: int) -> None:
    """The stream has 32 bits of the number, the snapshot 64."""
    snapshot = Snapshot(xmax, xmax, frozenset())
    assert snapshot.sees((xmax + distance) % 2**32) == (distance < 0)


COLUMNS = [
    ("seq", 20), ("id", 2950), ("aggregatetype", 1043), ("aggregateid", 1043), ("type", 1043),
    ("payload", 17), ("headers", 114), ("shard", 21),
]  # fmt: skip


def outbox_row(seq: int, key: bytes | None = b"k") -> bytes:
    """Write an insert into the outbox table in binary format."""
    values = [
        struct.pack(">q", seq), bytes(range(16)), b"orders", key, b"Placed", b"body",
        b"[]", struct.pack(">h", 3),
    ]  # fmt: skip
    return b"I" + struct.pack(">I", 9) + b"N" + row(values, b"b")


EXPECTED = (
    5, 3, "orders", "k", b"body", "[]", "00010203-0405-0607-0809-0a0b0c0d0e0f", "Placed",
)  # fmt: skip


def outbox(columns: list[tuple[str, int]]) -> Relation:
    """Return an outbox table with *columns*."""
    told = decode(relation(9, "holdfast_outbox", columns))
    assert isinstance(told, Relation)
    return told


def test_an_outbox_row_is_found_by_column_names() -> None:
    """A user's own column in between changes nothing."""
    assert reader(outbox(COLUMNS))(outbox_row(5)) == EXPECTED
    assert as_row(reader(outbox(COLUMNS))(outbox_row(5, None))).key is None
    own = [*COLUMNS[:3], ("tenant", 25), *COLUMNS[3:]]
    told = decode(outbox_row(5))
    assert isinstance(told, Insert)
    values = [*told.new[:3], b"acme", *told.new[3:]]
    data = b"I" + struct.pack(">I", 9) + b"N" + row(values, b"b")
    found = as_row(reader(outbox(own))(data))
    assert found._replace(id=EXPECTED[6]) == EXPECTED
    assert found.id == EXPECTED[6].replace("-", "")


def test_headers_kept_as_jsonb_are_read_too() -> None:
    """Its binary form has a version ahead of the text."""
    columns = [(name, 3802 if name == "headers" else kind) for name, kind in COLUMNS]
    told = decode(outbox_row(5))
    assert isinstance(told, Insert)
    values = [b"\x01[]" if value == b"[]" else value for value in told.new]
    data = b"I" + struct.pack(">I", 9) + b"N" + row(values, b"b")
    assert as_row(reader(outbox(columns))(data)).headers == "[]"


@given(st.data())
def test_a_cut_outbox_row_is_refused(data: st.DataObject) -> None:
    """The fast reader is as strict as the general one."""
    whole = outbox_row(5)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(Malformed):
        reader(outbox(COLUMNS))(whole[:cut])
    with pytest.raises(Malformed):
        reader(outbox(COLUMNS))(whole + b"x")


def test_an_outbox_published_without_a_column_is_a_configuration_error() -> None:
    """The message names the column."""
    with pytest.raises(ConfigurationError, match="without headers"):
        reader(outbox(COLUMNS[:6] + COLUMNS[7:]))


def intake(covered: Covered | None = None, most: int = 100) -> StreamIntake:
    """Return an intake that knows the table."""
    taking = StreamIntake(most, covered)
    taking.feed(relation(9, "holdfast_outbox", COLUMNS))
    return taking


def test_a_position_is_confirmed_only_when_all_before_it_is_finished() -> None:
    """The commit of a transaction waits for its rows, and those of the ones before."""
    taking = intake()
    for number, end in ((1, 200), (2, 300)):
        for message in (begin(number), outbox_row(number), commit(end)):
            taking.feed(message)
    assert taking.marks.confirmed() is None
    batch = taking.take()
    assert taking.marks.confirmed() is None
    taking.marks.finish(1)
    assert taking.marks.confirmed() == 200
    taking.marks.finish(batch.upto)
    assert taking.marks.confirmed() == 300
    assert taking.marks.confirmed() is None


def test_a_large_transaction_is_handed_out_in_parts_and_confirmed_at_its_commit() -> None:
    """Its first rows can be published while the rest arrives, but none of it is confirmed."""
    taking = intake(most=2)
    taking.feed(begin(1))
    for seq in (1, 2):
        taking.feed(outbox_row(seq))
    assert taking.full
    first = taking.take()
    taking.marks.finish(first.upto)
    taking.keepalive(10_000)  # inside the transaction: it says nothing about it
    assert taking.marks.confirmed() is None
    taking.feed(outbox_row(3))
    taking.feed(commit(500))
    second = taking.take()
    assert (first.xids, second.xids) == ([1], [1])
    assert taking.marks.confirmed() is None
    taking.marks.finish(second.upto)
    assert taking.marks.confirmed() == 500


def test_a_keepalive_is_confirmed_behind_the_rows_that_came_before_it() -> None:
    """Idle, it counts at once; with rows in hand it waits for them."""
    taking = intake()
    taking.keepalive(50)
    assert taking.marks.confirmed() == 50
    for message in (begin(1), outbox_row(1), commit(200)):
        taking.feed(message)
    taking.keepalive(900)
    assert taking.marks.confirmed() is None
    taking.marks.finish(taking.take().upto)
    assert taking.marks.confirmed() == 900


def test_what_the_table_told_is_not_taken_again() -> None:
    """Transactions that the snapshot sees are skipped, and confirmed as finished."""
    covered = Covered(Snapshot.parse("10:20:15"), until=1000, schema="public")
    taking = intake(covered)
    for xid, lsn in ((9, 100), (15, 200), (16, 300), (20, 400)):
        for message in (begin(xid, lsn), outbox_row(xid), commit(lsn + 50)):
            taking.feed(message)
    assert [as_row(taken).seq for taken in taking.take().rows] == [15, 20]
    assert taking.marks.confirmed() == 150


def test_beyond_the_snapshots_position_nothing_is_skipped() -> None:
    """Transaction numbers wrap; after that position no comparison is made any more."""
    taking = intake(Covered(Snapshot.parse("10:20:"), until=1000, schema="public"))
    for message in (begin(5, 1001), outbox_row(1), commit(1050)):
        taking.feed(message)
    assert len(taking.take().rows) == 1
