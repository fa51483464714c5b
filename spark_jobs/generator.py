"""Synthetic dead letters whose causes are known: what triage is measured against.

Two hundred causes are of kinds that the fingerprint rules know. A dozen more are not: names in
texts, words in any order, tokens, two causes in one place. They are told apart, for how triage
fares with them is another question. There are hot keys, tenants, versions and deploys, bursts,
clocks that are wrong, and payloads that give their poison away. The same seed makes the same
letters, in bounded memory: a chunk is made and written at a time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.errors import ConfigurationError
from holdfast.spark_jobs import records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.random import Generator
    from numpy.typing import NDArray

SCHEMA = records.arrow_schema()
HOUR, DAY = 3600, 86400
UNTIL = 1_793_491_200.0
"""2026-11-01T00:00Z, where the generated time ends unless told otherwise."""
_IN_2099 = 4_080_000_000.0
CHUNK, FILE = 100_000, 500_000
KNOWN_CAUSES = 200

SERVICES = (
    "billing", "shipping", "stock", "loyalty", "search", "mail", "fraud", "tax", "ledger",
    "pricing", "returns", "invoices", "catalog", "carts", "sessions", "reports", "couriers",
    "refunds", "vouchers", "exports",
)  # fmt: skip
COUNTRIES = ("DE", "FR", "IT", "ES", "PL", "NL", "SE", "CH")
CURRENCIES = ("EUR", "EUR", "EUR", "USD", "GBP", "PLN", "SEK", "CHF")
_FIRST = ("Ada", "Bob", "Carla", "Deniz", "Eva", "Farid", "Grete", "Hugo", "Ines", "Jan", "Kim")
_LAST = ("Meyer", "Rossi", "Okafor", "Novak", "Silva", "Tanaka", "Weiss", "Dubois", "Olsen")
_WORDS = ("street", "city", "zip", "country", "name", "phone", "birthday", "vat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason why messages fail, and how its failures look."""

    name: str
    service: str
    type: str
    text: str
    """With the kinds of what varies in braces, e.g. `order {number} is void`."""
    frames: tuple[tuple[str, str, bool], ...] = ()
    wrapped: str = ""
    kind: str = "poison"
    stage: str = "handle"
    known: bool = True
    poison: tuple[str, str] = ("", "")
    """A field and its value in the payloads that fail of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """A time in which a cause fails *factor* times as often."""

    cause: str
    start: float
    hours: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """A version of a service going live; *breaks* names a cause that begins with it."""

    consumer_group: str
    version: str
    at: float
    breaks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to generate."""

    records: int = 100_000
    seed: int = 7
    days: int = 28
    until: float = UNTIL
    entities: int = 20_000
    tenants: int = 40
    hot_share: float = 0.0
    """The share of records that have one and the same key."""
    null_keys: float = 0.01
    wrong_clocks: float = 0.001
    unknown_share: float = 0.06

    def __post_init__(self) -> None:
        for name in ("records", "days", "entities", "tenants"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)}: give at least 1")
        for name in ("hot_share", "null_keys", "wrong_clocks", "unknown_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name}={getattr(self, name)}: a share is from 0 to 1")


@dataclass(frozen=True, slots=True)
class Generated:
    """Where everything is, and what is true of it."""

    folder: Path
    records: int
    causes: dict[str, bool]
    """Names of causes, and whether the rules were written for them."""
    bursts: list[Burst] = field(default_factory=list)
    deploys: list[Deploy] = field(default_factory=list)

    @property
    def letters(self) -> Path:
        """Parquet files of dead letters."""
        return self.folder / "letters"

    @property
    def truth(self) -> Path:
        """Parquet files of `dlq_id` and `cause`."""
        return self.folder / "truth"

    @property
    def customers(self) -> Path:
        """The dimension table: `entity_ref`, `tenant`, `value`."""
        return self.folder / "customers.parquet"

    @property
    def healthy(self) -> Path:
        """A sample of payloads that were handled."""
        return self.folder / "healthy.parquet"

    @property
    def deployed(self) -> Path:
        """The deploys, as `trends --deploys` reads them."""
        return self.folder / "deploys.json"


def causes() -> list[Cause]:
    """Return every cause: 200 that the rules were written for, and those they were not."""
    made: list[Cause] = []
    for number, service in enumerate(SERVICES):
        made += _known(service, number)
    return made + _unknown()


def _known(service: str, number: int) -> Iterator[Cause]:
    module = f"shop.{service}"
    own = ((module, "handle", True), (f"{module}.{_noun(number)}", "apply", True))
    library = (("kafka.consumer", "poll", False), ("json.decoder", "decode", False))

    def cause(short: str, error: str, text: str, **more: Any) -> Cause:
        return Cause(name=f"{service}/{short}", service=service, type=error, text=text, **more)

    yield cause("missing-field", "KeyError", "'{word}'", frames=(*own, (module, "total", True)),
                poison=("vat", ""))  # fmt: skip
    yield cause("negative-total", "ValueError", "order {number} has the total -{decimal}",
                frames=(*own, (module, "charge", True)), poison=("currency", "CHF"))  # fmt: skip
    yield cause("duplicate", "sqlalchemy.exc.IntegrityError",
                "duplicate key value violates unique constraint: Key (id)=({uuid}) exists",
                frames=(*own, (module, "save", True), library[0]),
                wrapped="shop.errors.Rejected")  # fmt: skip
    yield cause("invalid", "pydantic_core.ValidationError",
                "{number} validation errors for Order\ntotal\n  input_value={decimal}",
                frames=(*own, (module, "parse", True)), stage="validate")  # fmt: skip
    yield cause("rounding", "decimal.InvalidOperation", "[<class 'decimal.ConversionSyntax'>]",
                frames=(*own, (module, "rounded", True)), poison=("country", "CH"))  # fmt: skip
    yield cause("not-json", "json.decoder.JSONDecodeError",
                "Expecting value: line {number} column {number} (char {number})",
                frames=library, stage="deserialize")  # fmt: skip
    yield cause("refused", "ConnectionRefusedError",
                f"could not connect to {service}-db at {{ip}}:5432", kind="dependency")  # fmt: skip
    yield cause("timeout", "TimeoutError",
                f"GET https://{service}.example/v1/orders/{{uuid}} took more than {{number}} ms",
                frames=library, kind="timeout")  # fmt: skip
    yield cause("no-schema", "holdfast.errors.SchemaError",
                f"schema {{number}} of subject '{service}-value' is in no registry",
                stage="deserialize")  # fmt: skip
    yield cause("locked", "shop.errors.AccountLocked",
                "account {uuid} of {email} is locked since {time}, trace {hex}")  # fmt: skip


def _unknown() -> list[Cause]:
    """Return causes whose texts the rules were not written for."""
    service, own = "support", (("shop.support", "handle", True), ("shop.support", "charge", True))

    def cause(short: str, error: str, text: str, **more: Any) -> Cause:
        return Cause(name=f"unknown/{short}", service=service, type=error, text=text, known=False,
                     **more)  # fmt: skip

    return [
        cause("name", "LookupError", "customer {first} {last} has no address"),
        cause("german", "LookupError", "Kunde {last} ist nicht angelegt"),
        cause("words", "ValueError", "missing fields: {word}, {word}"),
        cause("token", "PermissionError", "the token {token} has expired"),
        cause("object", "TypeError", "cannot bill Order@{short}"),
        cause("code", "ValueError", "SKU {letters} is not in the catalog"),
        cause("host", "OSError", "no route to {letters}.prod.internal"),
        cause("card-expired", "shop.errors.Declined", "card expired", frames=own),
        cause("no-funds", "shop.errors.Declined", "insufficient funds", frames=own),
        cause("path", "FileNotFoundError", "/var/spool/{letters}/{letters}.xml is gone"),
        cause("hash", "AssertionError", "digest {token}= does not match"),
        cause("quoted", "ValueError", "cannot parse '{letters}' as a country"),
    ]


def _noun(number: int) -> str:
    return ("orders", "lines", "totals", "rows", "stock")[number % 5]


def generate(
    folder: str | Path, recipe: Recipe, *, observe: Callable[[int], None] = lambda _: None
) -> Generated:
    """Write what *recipe* says below *folder*; *observe* hears how many records there are."""
    target = Path(folder)
    for name in ("letters", "truth"):
        (target / name).mkdir(parents=True, exist_ok=True)
        if any((target / name).iterdir()):
            raise ConfigurationError(f"{target / name} is not empty: name a new folder")
    maker = _Maker(recipe)
    done = 0
    for number, first in enumerate(range(0, recipe.records, FILE)):
        some = min(FILE, recipe.records - first)
        name = f"part-{number:05}.parquet"
        with (
            pq.ParquetWriter(target / "letters" / name, SCHEMA, compression="zstd") as letters,
            pq.ParquetWriter(target / "truth" / name, _TRUTH, compression="zstd") as truth,
        ):
            for start in range(0, some, CHUNK):
                batch, named = maker.chunk(min(CHUNK, some - start))
                letters.write_batch(batch)
                truth.write_batch(named)
                done += batch.num_rows
                observe(done)
    pq.write_table(maker.customers(), target / "customers.parquet")
    pq.write_table(maker.healthy(min(50_000, recipe.records)), target / "healthy.parquet")
    deploys = [asdict(one) for one in maker.deploys]
    (target / "deploys.json").write_text(json.dumps(deploys, indent=1))
    names = {one.name: one.known for one in maker.causes}
    return Generated(target, done, names, maker.bursts, maker.deploys)


class _Maker:
    """Makes chunks of letters of one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.causes = causes()
        self._random = np.random.default_rng(recipe.seed)
        self._since = recipe.until - recipe.days * DAY
        self._shares = self._weights()
        self.bursts = self._planned_bursts()
        self.deploys = self._planned_deploys()
        self._hours = [self._hour_weights(cause) for cause in self.causes]
        keys = [f"cust-{number:06}" for number in range(recipe.entities)]
        self._keys = pa.array(keys)
        self._hashes = pa.array([hashlib.sha256(k.encode()).hexdigest()[:32] for k in keys])
        owners = self._random.zipf(1.6, recipe.entities) % recipe.tenants
        self._tenants = pa.array([f"tenant-{owner:02}" for owner in owners])

    def _weights(self) -> NDArray[np.float64]:
        known = np.array([one.known for one in self.causes])
        sizes = 1 / (5 + self._random.permutation(len(self.causes)))
        sizes[known] *= (1 - self.recipe.unknown_share) / sizes[known].sum()
        sizes[~known] *= self.recipe.unknown_share / sizes[~known].sum()
        return np.asarray(sizes / sizes.sum())

    def _planned_bursts(self) -> list[Burst]:
        return [
            Burst(cause=f"{service}/{what}",
                  start=self._since + (self.recipe.days * (0.5 + 0.05 * number) // 1) * DAY
                  + (9 + number) * HOUR, hours=3 + number % 3, factor=40.0)
            for number, (service, what) in enumerate(
                (("billing", "timeout"), ("stock", "refused"), ("tax", "negative-total"),
                 ("ledger", "duplicate"), ("fraud", "locked")))
        ]  # fmt: skip

    def _planned_deploys(self) -> list[Deploy]:
        breaks = {"shipping": "shipping/missing-field", "mail": "mail/rounding",
                  "pricing": "pricing/invalid"}  # fmt: skip
        return [
            Deploy(consumer_group=service, version=f"2.{minor}.0",
                   at=self._since + self.recipe.days * DAY * (0.3 * minor) // HOUR * HOUR,
                   breaks=breaks.get(service, "") if minor == 2 else "")
            for service in SERVICES
            for minor in (1, 2)
        ]  # fmt: skip

    def _hour_weights(self, cause: Cause) -> NDArray[np.float64]:
        """Return how the failures of *cause* are spread over the hours, summed up."""
        hours = np.arange(self.recipe.days * 24)
        weights = 1 + 0.6 * np.sin((hours % 24 - 8) * np.pi / 12)
        weights[(hours // 24 + 3) % 7 >= 5] *= 0.5
        for burst in self.bursts:
            if burst.cause == cause.name:
                first = int((burst.start - self._since) // HOUR)
                weights[first : first + burst.hours] *= burst.factor
        for deploy in self.deploys:
            if deploy.breaks == cause.name:
                weights[: int((deploy.at - self._since) // HOUR)] *= 0.04
        return np.asarray(np.cumsum(weights) / weights.sum())

    def chunk(self, size: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return *size* records and the causes of them, in no order."""
        counts = self._random.multinomial(size, self._shares)
        parts = [self._of(number, int(count)) for number, count in enumerate(counts) if count]
        order = pa.array(self._random.permutation(size))
        table = pa.Table.from_batches([one for one, _ in parts]).take(order).combine_chunks()
        truth = pa.Table.from_batches([one for _, one in parts]).take(order).combine_chunks()
        return table.to_batches()[0], truth.to_batches()[0]

    def _of(self, number: int, size: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        cause, random, recipe = self.causes[number], self._random, self.recipe
        at = self._since + HOUR * (
            np.searchsorted(self._hours[number], random.random(size)) + random.random(size)
        )
        version = self._versions(cause.service, at)
        wrong = random.random(size) < recipe.wrong_clocks
        told = np.where(wrong, np.where(random.random(size) < 0.5, 0.0, _IN_2099), at)
        entity = random.integers(0, recipe.entities, size)
        entity = np.where(random.random(size) < recipe.hot_share, 0, entity)
        keyless = pa.array(random.random(size) < recipe.null_keys)
        keys = pc.if_else(keyless, None, self._keys.take(pa.array(entity)))
        tenants = self._tenants.take(pa.array(entity))
        text, quoted = _texts(cause.text, random, size)
        ids = _uuids(random, size)
        places = pa.array(random.integers(0, 10**9, size)).cast(pa.string())
        payload = self._payloads(random, size, self._keys.take(pa.array(entity)), cause.poison)
        columns: dict[str, Any] = {
            "seq": pa.nulls(size, pa.int64()), "dlq_id": ids, "message_id": _uuids(random, size),
            "key": keys.cast(pa.binary()), "payload": payload.cast(pa.binary()),
            "key_hash": pc.if_else(keyless, None, self._hashes.take(pa.array(entity))),
            "event_at": _moments(told), "first_failed_at": _moments(told),
            "last_failed_at": _moments(told), "stored_at": _moments(at), "failed_at": _moments(at),
            "clock_outlier": pa.array(wrong), "position": places,
            "lane": pa.array(entity % 12), "service_version": version, "error_text": text,
            "tenant": tenants, "entity_ref": keys,
            "envelope": _envelope(cause, version, quoted, places, tenants),
        }  # fmt: skip
        for name, value in _constants(cause).items():
            columns[name] = pa.repeat(pa.scalar(value, SCHEMA.field(name).type), size)
        ordered = [columns[name].cast(SCHEMA.field(name).type)
                   if name in columns else pa.nulls(size, SCHEMA.field(name).type)
                   for name in SCHEMA.names]  # fmt: skip
        truth = pa.RecordBatch.from_arrays([ids, pa.repeat(cause.name, size)], schema=_TRUTH)
        return pa.RecordBatch.from_arrays(ordered, schema=SCHEMA), truth

    def _versions(self, service: str, at: NDArray[np.float64]) -> pa.Array:
        moments = [one.at for one in self.deploys if one.consumer_group == service]
        names = pa.array([f"2.{minor}.0" for minor in range(len(moments) + 1)])
        return names.take(pa.array(np.searchsorted(moments, at, side="right")))

    def _payloads(
        self, random: Generator, size: int, keys: pa.Array, poison: tuple[str, str]
    ) -> pa.Array:
        name, value = poison
        country = _choice(random, COUNTRIES, size)
        currency = _choice(random, CURRENCIES, size)
        if name == "country":
            country = pa.repeat(value, size)
        if name == "currency":
            currency = pa.repeat(value, size)
        cents = pa.array(random.integers(100, 99_999, size)).cast(pa.string())
        vat = "" if name == "vat" else ',"vat":19'
        return pc.binary_join_element_wise(
            '{"customer":"', keys, '","country":"', country, '","currency":"', currency,
            '","cents":', cents, vat, ',"lines":[{"sku":"A1","n":1}]}', "",
        )  # fmt: skip

    def customers(self) -> pa.Table:
        """Return the dimension table."""
        random = np.random.default_rng(self.recipe.seed + 1)
        value = np.round(random.gamma(2.0, 120.0, self.recipe.entities), 2)
        return pa.table({"entity_ref": self._keys, "tenant": self._tenants, "value": value})

    def healthy(self, size: int) -> pa.Table:
        """Return a sample of what was handled."""
        random = np.random.default_rng(self.recipe.seed + 2)
        keys = self._keys.take(pa.array(random.integers(0, self.recipe.entities, size)))
        payload = self._payloads(random, size, keys, ("", "")).cast(pa.binary())
        return pa.table({"topic": pa.repeat("orders", size), "payload": payload})


def _constants(cause: Cause) -> dict[str, object]:
    return {
        "group_id": "", "state": "pending", "topic": f"{cause.service}.orders",
        "type": "shop.OrderPlaced", "source": "/shop", "headers": "[]", "broker": "kafka",
        "content_type": "application/json", "schema_ref": "orders/2",
        "consumer_group": cause.service, "handler": f"shop.{cause.service}.handle",
        "stage": cause.stage, "error_class": cause.kind, "error_type": cause.type,
        "fingerprint": "", "shape": "", "record_version": records.SCHEMA_VERSION,
        "envelope_version": 1, "origin": "captured", "attempts": 3, "occurrences": 1,
        "history": "[]", "replay_count": 0, "revision": 0, "replayable": True, "verdict": "",
        "retries": 0,
    }  # fmt: skip


def _envelope(
    cause: Cause, version: pa.Array, text: pa.Array, places: pa.Array, tenants: pa.Array
) -> pa.Array:
    """Return the envelopes as the store writes them."""
    topic = f"{cause.service}.orders"
    frames = json.dumps(
        [{"module": module, "function": name, "line": 17 + len(name), "in_app": is_own}
         for module, name, is_own in cause.frames]
    )  # fmt: skip
    outer = json.dumps({"type": cause.wrapped, "text": "the order is rejected"})
    behind = f',"frames":{frames}}}' + (f",{outer}]" if cause.wrapped else "]")
    return pc.binary_join_element_wise(
        f'{{"coordinates":{{"broker":"kafka","topic":"{topic}","position":', places,
        f'}},"culprit":{{"group":"{cause.service}","handler":"shop.{cause.service}.handle",'
        '"service_version":"', version, f'"}},"failure":{{"stage":"{cause.stage}",'
        f'"kind":"{cause.kind}","chain":[{{"type":"{cause.type}","text":"', text, f'"{behind}}},'
        '"governance":{"tenant":"', tenants, '"},"timeouts":0,"newer":null}', "",
    )  # fmt: skip


def _texts(template: str, random: Generator, size: int) -> tuple[pa.Array, pa.Array]:
    """Return the texts of a template as they are, and as they stand in JSON."""
    plain: list[Any] = []
    quoted: list[Any] = []
    for piece in template.replace("}", "{").split("{"):
        if piece in _SLOTS:
            made = _SLOTS[piece](random, size)
            plain.append(made)
            quoted.append(made)
        elif piece:
            plain.append(piece)
            quoted.append(json.dumps(piece)[1:-1])
    return _joined(plain, size), _joined(quoted, size)


def _joined(pieces: list[Any], size: int) -> pa.Array:
    if all(isinstance(piece, str) for piece in pieces):
        return pa.repeat("".join(pieces), size)
    return pc.binary_join_element_wise(*pieces, "")


def _moments(seconds: NDArray[np.float64]) -> pa.Array:
    return pa.array((seconds * 1_000_000).astype(np.int64)).cast(pa.timestamp("us", tz="UTC"))


def _choice(random: Generator, words: tuple[str, ...], size: int) -> pa.Array:
    return pa.array(words).take(pa.array(random.integers(0, len(words), size)))


def _numbers(random: Generator, size: int) -> pa.Array:
    exponents = random.integers(1, 8, size)
    return pa.array(10**exponents + random.integers(0, 10**9, size) % 10**exponents).cast(
        pa.string()
    )


_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
_TOKEN = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", np.uint8)


def _drawn(random: Generator, size: int, length: int, alphabet: NDArray[np.uint8]) -> pa.Array:
    """Return words of *length* letters."""
    letters = alphabet[random.integers(0, len(alphabet), (size, length))]
    return _fixed(np.ascontiguousarray(letters), size, length)


def _fixed(letters: NDArray[np.uint8], size: int, length: int) -> pa.Array:
    offsets = pa.py_buffer(np.arange(size + 1, dtype=np.int32) * np.int32(length))
    return pa.Array.from_buffers(pa.string(), size, [None, offsets, pa.py_buffer(letters)])


def _uuids(random: Generator, size: int) -> pa.Array:
    digits = _DIGITS[random.integers(0, 16, (size, 36))]
    digits[:, [8, 13, 18, 23]] = ord("-")
    return _fixed(np.ascontiguousarray(digits), size, 36)


def _parts(joint: str, *parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, joint)


def _bytes(random: Generator, size: int) -> pa.Array:
    return pa.array(random.integers(1, 255, size)).cast(pa.string())


def _time(random: Generator, size: int) -> pa.Array:
    two = [pa.array(random.integers(10, 28, size)).cast(pa.string()) for _ in range(3)]
    return pc.binary_join_element_wise("2026-10-", two[0], "T", two[1], ":", two[2], ":07Z", "")


_SLOTS: dict[str, Callable[[Generator, int], pa.Array]] = {
    "number": _numbers,
    "decimal": lambda random, size: _parts(".", _numbers(random, size), _bytes(random, size)),
    "uuid": _uuids,
    "ip": lambda random, size: _parts(".", *(_bytes(random, size) for _ in range(4))),
    "hex": lambda random, size: _drawn(random, size, 32, _DIGITS),
    "short": lambda random, size: _drawn(random, size, 6, _DIGITS),
    "token": lambda random, size: _drawn(random, size, 24, _TOKEN),
    "letters": lambda random, size: _drawn(random, size, 7, _LETTERS),
    "email": lambda random, size: _parts("@", _drawn(random, size, 8, _LETTERS),
                                         pa.repeat("mail.example", size)),
    "time": _time,
    "word": lambda random, size: _choice(random, _WORDS, size),
    "first": lambda random, size: _choice(random, _FIRST, size),
    "last": lambda random, size: _choice(random, _LAST, size),
}  # fmt: skip
_TRUTH = pa.schema([("dlq_id", pa.string()), ("cause", pa.string())])
