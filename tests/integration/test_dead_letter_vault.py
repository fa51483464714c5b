"""Fields of a data subject are readable with its key only, and erased with it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from holdfast.db.audit import Operator, entries, verify
from holdfast.dlq import CaptureSettings, DeadLetterStore
from holdfast.dlq.protection.vault import Forgotten, NotReplayable, Vault, masked, restored
from holdfast.errors import ConfigurationError, MissingExtra
from holdfast.testing import VirtualClock
from tests.dead_letters import KINDS, emptied, letter, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

BODY = b'{"customer": "c-1", "name": "Ada", "cards": [{"pan": "4111"}], "n": 1}'
FIELDS = ("name", "cards.*.pan")
OPERATOR = Operator(actor="dpo", reason="erasure request 7")
MASTER = bytes(range(32))


@pytest.fixture(scope="module", params=KINDS)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a database of each kind."""
    made = opened(request, tmp_path_factory.mktemp("vault"))
    yield made
    made.dispose()


@pytest.fixture
def vault(database: Engine) -> Vault:
    """Return a vault in an empty database."""
    return Vault(emptied(database), MASTER)


def origin(vault: Vault) -> CaptureSettings:
    """Return what seals the fields."""
    return CaptureSettings(vault=vault, fields=FIELDS, subject="$.customer")


def test_sealed_fields_are_stored_unreadable_and_replayed_as_they_were(
    vault: Vault, database: Engine
) -> None:
    """People see stars, the handler gets the original values."""
    home = DeadLetterStore(database)
    put = letter(payload=BODY, origin=origin(vault))
    home.put(put)
    stored = home.get(put.dlq_id)
    assert stored is not None
    kept = stored.message.payload or b""
    assert b"Ada" not in kept
    assert b"4111" not in kept
    assert b'"n": 1' in kept
    assert stored.governance.sealed == ("name", "cards.0.pan")
    shown = masked(stored.message.payload, stored.governance.sealed) or b""
    assert shown.count(b"***") == 2
    assert b"sealed" not in shown
    back = restored(stored, vault)
    assert back.payload == BODY
    with pytest.raises(NotReplayable, match="master key"):
        restored(stored)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b'{"customer": "c-1", "contacts": {"ada@example.com": "+49"}}', ("contacts.*",)),
        (b'{"customer":"c-1","card":{"number":"4111","a.b*\\\\":1}}', ("card.number", "card")),
        (b'{"customer":"c-1","card":{"number":"4111","":"4112"}}', ("card.*", "card")),
        (b'{ "customer":"c-1",\n"total": 1234567890123456.78, "n":1.10}', ("total",)),
        (b'{"customer":"c-1","pan":"4111","pan":"4112"}', ("pan",)),
        (b'{"customer":"c-1","rate":NaN,"name":"4111"}', ("name", "rate")),
    ],
    ids=["dotted", "overlapping", "empty name", "numbers and space", "twice", "not a number"],
)
def test_what_was_sealed_is_sent_again_byte_by_byte(
    vault: Vault, body: bytes, fields: tuple[str, ...]
) -> None:
    """Signatures hold, amounts keep their cents, and no cipher text is ever sent."""
    sealing = CaptureSettings(vault=vault, fields=fields, subject="$.customer")
    kept = letter(payload=body, origin=sealing)
    assert b"4111" not in (kept.message.payload or b"")
    assert b"4112" not in (kept.message.payload or b"")
    assert restored(kept, vault).payload == body
    with pytest.raises(NotReplayable, match="master key"):
        restored(kept)


@pytest.mark.parametrize(
    "body", [b'{"name": "Ada-1815', b"\xffAda-1815", b"[" * 5_000 + b"Ada-1815"]
)
def test_a_payload_whose_fields_cannot_be_told_apart_is_sealed_whole(
    vault: Vault, body: bytes
) -> None:
    """A broken message is just the kind that ends here: its secrets are secrets too."""
    kept = letter(payload=body, error=ValueError("cannot read Ada-1815"), origin=origin(vault))
    assert kept.governance.sealed == ("$",)
    assert b"Ada-1815" not in (kept.message.payload or b"")
    assert "Ada-1815" not in repr(kept.failure)
    assert masked(kept.message.payload, kept.governance.sealed) == b'"***"'
    assert restored(kept, vault).payload == body


def test_cipher_text_that_nothing_opens_is_never_sent(vault: Vault) -> None:
    """A field that was sealed under a name that is not known any more stops the message."""
    kept = letter(payload=BODY, origin=origin(vault))
    known = msgspec.structs.replace(kept.governance, sealed=("name",))
    with pytest.raises(NotReplayable, match="not every encrypted field"):
        restored(msgspec.structs.replace(kept, governance=known), vault)


def test_forgetting_a_subject_erases_its_fields_and_nobody_elses(
    vault: Vault, database: Engine
) -> None:
    """The key is gone, so every copy is noise; the act is audited without the name."""
    ours = letter(1, payload=BODY, origin=origin(vault))
    other = letter(2, payload=BODY.replace(b"c-1", b"c-2"), origin=origin(vault))
    assert vault.forget("c-1", OPERATOR)
    assert not vault.forget("c-1", OPERATOR)
    with pytest.raises(Forgotten, match="forgotten"):
        restored(ours, vault)
    assert b"Ada" in (restored(other, vault).payload or b"")
    with database.connect() as db:
        assert verify(db).is_whole
        assert all("c-1" not in repr(entry) for entry in entries(db))


def test_an_old_message_of_a_forgotten_subject_keeps_nothing_of_it(database: Engine) -> None:
    """However late it fails: its fields are removed, and it cannot be replayed as it was."""
    clock = VirtualClock()
    vault = Vault(emptied(database), MASTER, clock=clock)
    letter(1, payload=BODY, origin=origin(vault), clock=clock)
    clock.advance(10)
    vault.forget("c-1", OPERATOR)
    late = letter(1, payload=BODY, origin=origin(vault), clock=VirtualClock())
    assert b"Ada" not in (late.message.payload or b"")
    assert not late.is_replayable
    with pytest.raises(NotReplayable, match="redacted"):
        restored(late, vault)


def test_a_subject_that_comes_back_has_a_key_of_its_own_again(database: Engine) -> None:
    """A new order is kept and replayed as it was; what was forgotten stays so, old or late."""
    clock = VirtualClock()
    vault = Vault(emptied(database), MASTER, clock=clock)
    before = letter(1, payload=BODY, origin=origin(vault), clock=clock)
    clock.advance(10)
    assert vault.forget("c-1", OPERATOR)
    clock.advance(10)
    after = letter(2, payload=BODY, origin=origin(vault), clock=clock)
    assert after.is_replayable
    assert b"Ada" not in (after.message.payload or b"")
    assert b"Ada" in (restored(after, vault).payload or b"")
    with pytest.raises(Forgotten, match="forgotten"):
        restored(before, vault)
    late = letter(3, payload=BODY, origin=origin(vault), clock=VirtualClock())
    assert late.governance.sealed == ()
    assert vault.forget("c-1", OPERATOR)
    with pytest.raises(Forgotten, match="forgotten"):
        restored(after, vault)


def test_fields_of_a_message_without_its_subject_are_sealed_all_the_same(
    vault: Vault, caplog: pytest.LogCaptureFixture
) -> None:
    """It is replayed as it was, and `(unknown)` can be forgotten as a subject is."""
    body = BODY.replace(b"customer", b"custmer")
    put = letter(payload=body, origin=origin(vault))
    assert b"Ada" not in (put.message.payload or b"")
    assert "does not say whose it is" in caplog.text
    assert put.governance.subject == "(unknown)"
    assert b"Ada" in (restored(put, vault).payload or b"")
    assert vault.forget("(unknown)", OPERATOR)
    with pytest.raises(Forgotten):
        restored(put, vault)


def test_another_master_key_opens_nothing(vault: Vault, database: Engine) -> None:
    """And says so."""
    put = letter(payload=BODY, origin=origin(vault))
    with pytest.raises(ConfigurationError, match="master key"):
        restored(put, Vault(database, b"x" * 32))


def test_fields_of_one_subject_do_not_open_under_another(vault: Vault) -> None:
    """A sealed text that is moved to another message stays closed."""
    put = letter(payload=BODY, origin=origin(vault))
    letter(2, payload=BODY.replace(b"c-1", b"c-2"), origin=origin(vault))
    with pytest.raises(ConfigurationError, match="not the subject"):
        vault.open(put.message.payload, put.governance.sealed, "c-2")


def test_a_sealed_value_opens_only_as_its_own_field_of_its_own_message(vault: Vault) -> None:
    """Who may write to the store cannot have one field shown as another, or that of another."""
    body = (
        b'{"customer": "c-1", "name": "Ada", "note": "hi", "cards": [{"pan": "1"}, {"pan": "2"}]}'
    )
    sealing = CaptureSettings(
        vault=vault, fields=("name", "note", "cards.*.pan"), subject="$.customer"
    )
    first, second = (letter(number, payload=body, origin=sealing) for number in (1, 2))
    mine, other = (msgspec.json.decode(one.message.payload or b"") for one in (first, second))
    swaps = [{**mine, "name": mine["note"]}, {**mine, "name": other["name"]}]
    for swapped in swaps:
        message = first.message.with_(payload=msgspec.json.encode(swapped))
        with pytest.raises(ConfigurationError, match="the field or the message,"):
            restored(msgspec.structs.replace(first, message=message), vault)
    mine["cards"].reverse()  # an edit may move the items of a list
    message = first.message.with_(payload=msgspec.json.encode(mine))
    moved = restored(msgspec.structs.replace(first, message=message), vault).payload
    assert msgspec.json.decode(moved or b"")["cards"] == [{"pan": "2"}, {"pan": "1"}]
    assert restored(second, vault).payload == body


def test_values_that_an_older_version_sealed_stay_readable(vault: Vault) -> None:
    """They are bound to their subject alone."""
    from base64 import b64encode

    vault.seal(b'{"name": "Ada"}', ("name",), "c-1")
    key = vault._aead.AESGCM(vault._known_key("c-1"))
    packed = b64encode(bytes(12) + key.encrypt(bytes(12), b'"Ada"', b"c-1")).decode()
    stored = msgspec.json.encode({"name": f"sealed:v1:{packed}"})
    assert vault.open(stored, ("name",), "c-1", message_id="any") == b'{"name":"Ada"}'


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_master_key_of_another_size_is_refused(size: int, database: Engine) -> None:
    """The error says how to make one."""
    with pytest.raises(ConfigurationError, match="32"):
        Vault(database, b"x" * size)


def test_without_the_extra_it_says_what_to_install(
    database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who seals needs it."""
    for name in list(sys.modules):
        if name.split(".")[0] == "cryptography":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtra, match=r"holdfast\[crypto\]"):
        Vault(database, MASTER)


def test_sealing_without_a_vault_or_a_subject_is_refused(vault: Vault) -> None:
    """When the origin is made."""
    with pytest.raises(ConfigurationError, match="vault"):
        CaptureSettings(fields=("name",), subject="$.customer")
    with pytest.raises(ConfigurationError, match="subject"):
        CaptureSettings(fields=("name",), vault=vault)
