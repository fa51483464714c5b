"""Analytics: the vectors of the fingerprint rules, and the decisions that every engine shares."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.db.text import document
from holdfast.dlq.capture import fingerprint as rules
from holdfast.dlq.capture.fingerprint import parameterised
from holdfast.dlq.letter import (
    Class,
    Coordinates,
    ExceptionInfo,
    FailedConsumer,
    Failure,
    FailureStage,
    Frame,
    KnownFacts,
)
from holdfast.dlq.store.rows import LetterEnvelope, fingerprint_of
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.analytics import fingerprints, series
from holdfast.spark_jobs.analytics.clusters import Likeness, clusters
from holdfast.spark_jobs.analytics.families import families, likeness
from holdfast.spark_jobs.analytics.fingerprints import NEEDED, Fingerprinter
from holdfast.spark_jobs.analytics.inputs import read_deploys
from holdfast.spark_jobs.analytics.payloads import counted_facts, fields_of
from holdfast.spark_jobs.analytics.results import Deployed, Scope
from holdfast.spark_jobs.analytics.scores import scores

VECTORS = json.loads(files("holdfast.dlq").joinpath("vectors.json").read_text())
WORDS = st.one_of(
    st.sampled_from(["order ", "0x1f", "0x", "12", "-", ".", ":", "@", "a.b", "7f", "deadbeef", "'",
                     '"', " ", "://", "http", "/v1/", "12345678-1234-1234-1234-123456789012",
                     "abc12345678-1234-1234-1234-123456789012", "2026-01-02T03:04:05Z",
                     "2026-01-02 ", "10.0.0.1", "ß", "٣", "\t", "T12:30:01", "<", "x@y.de",
                     "A1B2C3D4-0000-1111-2222-ABCDEFABCDEF", "(", "=", "[", ", ", ";", "+", "_",
                     " bd490011b62bf87a68b0fc88a1bda771", " abcdefabcdefabcdef", "a_b-c@m.example",
                     "https://x/v1/12345678-1234-1234-1234-12345678901f", " 12 ", " 7, ", " 9: ",
                     " 1234567890123 ", "(char 7)", " 1.5 ", " 192.168.10.21:8080 ", " 10.0.0.1",
                     ":22", "12:30", "\\n", "%2", " 7,"]),
    st.integers(0, 10**18).map(str),
    st.uuids().map(str),
    st.text(max_size=4),
)  # fmt: skip


def envelope(vector: dict[str, Any]) -> str:
    """Return the envelope of a failure as the vectors write it."""
    chain = [
        {"type": one["type"], "text": one["text"],
         "frames": [{"module": module, "function": function, "in_app": own}
                    for module, function, own in one.get("frames", [])]}
        for one in vector["chain"]
    ]  # fmt: skip
    also = [{"type": name, "text": ""} for name in vector.get("also", ())]
    failure = {"chain": chain, "also": also, "explicit": vector.get("explicit")}
    return json.dumps({"coordinates": {"topic": "t"}, "failure": failure})


def batch(envelopes: list[str | None], **more: list[Any]) -> pa.RecordBatch:
    """Return records with these envelopes."""
    size = len(envelopes)
    columns: dict[str, list[Any]] = {name: [name] * size for name in NEEDED}
    columns |= {"dlq_id": [f"{number:04}" for number in range(size)], "envelope": envelopes} | more
    return pa.RecordBatch.from_pydict(columns)


def test_arrow_batches_get_the_fingerprints_of_the_vectors() -> None:
    """The vectors are the contract of every engine; DuckDB and Spark run this very function."""
    vectors = VECTORS["fingerprints"]
    found = Fingerprinter().batch(batch([envelope(one) for one in vectors]), ("dlq_id",))
    about = found.column("about").to_pylist()
    for row, vector in enumerate(vectors):
        group = rules.group_id(vector["fingerprint"], "consumer_group", "topic", "handler")
        assert found.column("group_id")[row].as_py() == group, vector["name"]
        assert about[row]["fingerprint"] == vector["fingerprint"], vector["name"]
        assert about[row]["by"] == vector["by"]


HOSTILE_TEXTS = (
    "plain", "", 'say "text":"', '","frames":[', "back\\slash\\", 'ends in a quote"', '{"a":"b"}',
    ',"trace":"', ',"governance":', '"failure":{', "two\nlines", "größer 17", "order 12 of a@b.de",
    'x"},{"type":"y","text":"z"}]',
)  # fmt: skip


@pytest.mark.parametrize("trace", ["", 'Traceback:\n  "text":"\\'])
@pytest.mark.parametrize("frames", [(), ("shop",), ("lib",)])
def test_many_envelopes_get_the_fingerprints_that_the_store_gives_them(
    frames: tuple[str, ...], trace: str
) -> None:
    """Cold or warm, the fingerprint is that of the whole failure, whatever a text says."""
    chains = [[one] for one in HOSTILE_TEXTS] + [["root", "outer"], []]
    failures = [
        Failure(
            stage=FailureStage.HANDLE, kind=Class.POISON, trace=trace,
            chain=tuple(
                ExceptionInfo(type="ValueError", text=text, frames=tuple(
                    Frame(module=name, function="f", line=3, in_app=name == "shop")
                    for name in frames))
                for text in chain
            ),
        )
        for chain in chains
    ]  # fmt: skip
    alone = failures[0]
    failures += [
        msgspec.structs.replace(alone, explicit="by hand"),
        msgspec.structs.replace(alone, also=(ExceptionInfo(type="KeyError", text="k"),)),
        msgspec.structs.replace(alone, known=KnownFacts(value="a" * 64, by="stack", hints=(),
                                                        algorithm=rules.ALGORITHM)),
    ]  # fmt: skip
    envelopes = [
        document(LetterEnvelope(coordinates=Coordinates(topic="t"), failure=one,
                                culprit=FailedConsumer(group="g", handler="h")))
        for one in failures
    ]  # fmt: skip
    own = Fingerprinter()
    for _ in ("cold", "warm"):
        found = own.batch(batch([*envelopes]), ()).column("group_id").to_pylist()
        assert found == [
            rules.group_id(fingerprint_of(one).value, "consumer_group", "topic", "handler")
            for one in failures
        ]


@given(st.lists(st.lists(WORDS, max_size=8).map("".join), min_size=1, max_size=6))
@example(["no cable \u0410", "no cable \u0411"])  # as JSON has them, they differ in a digit
def test_letters_beside_others_get_the_fingerprints_that_the_store_gives_them(
    texts: list[str],
) -> None:
    """What texts have in common is never more than what the rules make of them."""
    chains = [(ExceptionInfo(type="E", text=text),) for text in texts]
    failures = [Failure(stage=FailureStage.HANDLE, kind=Class.POISON, chain=one) for one in chains]
    envelopes = [
        document(LetterEnvelope(coordinates=Coordinates(topic="t"), failure=one,
                                culprit=FailedConsumer(group="g", handler="h")))
        for one in failures
    ]  # fmt: skip
    found = Fingerprinter().batch(batch([*envelopes]), ()).column("group_id").to_pylist()
    assert found == [
        rules.group_id(fingerprint_of(one).value, "consumer_group", "topic", "handler")
        for one in failures
    ]


def test_numbers_that_the_rules_read_in_two_ways_stay_apart() -> None:
    """Eight digits are hexadecimal, so that a comma behind them ends the number."""
    short, long = families(pa.array(["sum 4,12", "sum 1234567890123,12"])).to_pylist()
    assert short != long
    assert parameterised("sum 4,12") != parameterised("sum 1234567890123,12")
    address, product = families(
        pa.array(["read at 0x1f3a failed", "read at 2x1f3a failed"])
    ).to_pylist()
    assert address != product


def test_the_same_is_said_when_the_caches_are_warm() -> None:
    """What was seen before is not decoded again, and must not be mistaken for something else."""
    own = Fingerprinter()
    records = batch([envelope(one) for one in VECTORS["fingerprints"]])
    assert own.batch(records, ()).equals(own.batch(records, ()))


@pytest.mark.parametrize("vector", VECTORS["texts"], ids=lambda v: v["text"][:40])
def test_texts_are_parameterised_as_the_vectors_say(vector: dict[str, str]) -> None:
    """Also after a text that looks alike."""
    own = Fingerprinter()
    own.parameterised(vector["text"].replace("7", "8").replace("3", "4"))
    assert own.parameterised(vector["text"]) == vector["parameterised"]


@given(st.lists(WORDS, max_size=12).map("".join))
def test_what_looks_alike_is_parameterised_alike(text: str) -> None:
    """A likeness, if it can be read as text, has the parameters of the text it stands for."""
    stands_for = likeness(text).decode("utf-8", "surrogatepass")
    assert len(stands_for) == len(text[: rules.MOST_TEXT])
    assert parameterised(stands_for) == parameterised(text)


@given(st.lists(WORDS, max_size=12).map("".join))
def test_texts_of_one_family_are_parameterised_alike(text: str) -> None:
    """What differs in digits and tokens alone, wherever they stand, is one text."""
    (stands_for,) = families(pa.array([text])).to_pylist()
    assert parameterised(stands_for) == parameterised(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("GET https://a.b/v1/{} took 7 ms", "GET https://a.b/v1/{} took 7 ms"),
        ("Key (id)=({}) exists", "Key (id)=({}) exists"),
        ("trace {} of ann@mail.example", "trace {} of bob-2@mail.example"),
        ("7 rows of {}, line 3: byte 81 (char 9)", "12 rows of {}, line 7000: byte 9 (char 10)"),
        ("no answer of 10.0.0.1:80 to 10.0.0.2", "no answer of 192.168.10.21:8080 to 127.0.0.1"),
    ],
)
def test_texts_that_differ_in_tokens_are_parameterised_once(one: str, other: str) -> None:
    """Or each of millions of letters would be looked at by every rule."""
    ids = ("0a1b2c3d-1111-4222-8333-abcdefabcdef", "ffffffff-0000-4000-8000-0123456789ab")
    written = [text.format(name) for text, name in zip((one, other), ids, strict=True)]
    first, second = families(pa.array(written)).to_pylist()
    assert first == second


PIECES = (
    '{"stage":"handle","kind":"poison","chain":[{"type":"E","text":"@"}]}',
    '{"chain":[{"type":"E","text":"@","frames":[]},{"type":"F","text":"outer 1"}]}',
    '{"chain":[{"type":"E","text":"a"},{"type":"F","text":"@"}],"also":[{"type":"A","text":"@"}]}',
    '{"also":[{"type":"A","text":"@"}],"chain":[{"type":"E","text":"root"}]}',
    '{"chain":[{"type":"E","text":"@","text":"last"}]}',
    '{"chain":[{"type":"E","text":"root"}],"also":[{"type":"@","text":"a"}]}',
    '{"chain":[{"type":"E","text":"@"}],"explicit":"by hand"}',
    '{"chain":[{"type":"E","text":"@"}],"trace":"line 1 @"}',
    '{"chain":[{"type":"E","text":"a"}],"trace":"@","known":{"value":"b"}}',
    '{"chain":[{"type":"E","text":"a"}],"trace":"@","chain":[{"type":"F","text":"a"}]}',
    '{"chain":[{"type":"E","text":"a","trace":"@"}]}',
    '{"chain":[{"type":"E","text":"a"}],"trace":"x","explicit":"@"}',
    '{"frames":[{"text":1}],"also":[{"type":"text","text":"@"}],"chain":[{"text":"","type":"@"}]}',
    '{"chain":[{"type":"E","text":"@"}],"chain":[{"type":"G","text":"b"}]}',
    '{"chain":[{"type":"E","text":"@"},"governance":{}]}',
)  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_only_what_is_the_roots_text_may_differ_unread(piece: str) -> None:
    """However a failure is written, warm caches say what its whole envelope says."""
    told = ["one", "two 2", "three", 'quo\\"te', "back\\\\", "\\u00fc", 'a","b":"c']
    written = [f'{{"failure":{piece.replace("@", text)},"governance":{{}}}}' for text in told]
    alone = [Fingerprinter().batch(batch([one]), ()).column("group_id")[0] for one in written]
    spaced = [one.replace('"failure":{', '"failure": {') for one in written]  # taken whole
    by_all = [Fingerprinter().batch(batch([one]), ()).column("group_id")[0] for one in spaced]
    together = Fingerprinter().batch(batch([*written, *written]), ()).column("group_id")
    assert together.to_pylist() == [one.as_py() for one in [*alone, *alone]]
    assert alone == by_all


def test_a_text_that_is_no_string_leaves_type_and_text() -> None:
    """Also where the rest of the failure is known."""
    start, end = '{"failure":{"chain":[{"type":"E","text":"', '"}]},"governance":{}}'
    more = {"error_type": ["E"] * 3, "error_text": ["a", "a", "of the column"]}
    written: list[str | None] = [f"{start}{text}{end}" for text in ("a", "a", "\\x")]
    found = Fingerprinter().batch(batch(written, **more), ()).column("group_id").to_pylist()
    columns = rules.fingerprint([rules.Error("E", "of the column")]).value
    assert found[0] == found[1] != found[2]
    assert found[2] == rules.group_id(columns, "consumer_group", "topic", "handler")


def test_what_has_no_say_does_not_make_a_failure_another_one() -> None:
    """Outer texts and traces differ in each letter: most are not even decoded."""
    own = Fingerprinter()
    written = [
        f'{{"failure":{{"chain":[{{"type":"E","text":"order {n}"}},{{"type":"F","text":"x {n}"}}],'
        f'"trace":"at \\"{n}\\""}},"governance":{{}}}}'
        for n in range(50)
    ]
    found = own.batch(batch([*written]), ()).column("group_id")
    assert (len(found.unique()), len(own._outlines)) == (1, 1)


def test_the_words_of_places_may_be_encoded_or_missing() -> None:
    """Files keep columns of few words as dictionaries; a null is an empty word."""
    whole = json.loads(envelope(VECTORS["fingerprints"][1])) | {"governance": {}}
    same = [json.dumps(whole, separators=(",", ":"))] * 4  # as the store writes it
    words: dict[str, list[str | None]] = {
        "consumer_group": ["a", "b", None, "a"], "topic": ["t", "t", "t", "u"],
        "handler": ["h", "h", None, "h"],
    }  # fmt: skip
    plain = batch([*same], **words)
    encoded = pa.RecordBatch.from_pydict({
        name: plain.column(name).dictionary_encode() if name in words else plain.column(name)
        for name in plain.schema.names
    })  # fmt: skip
    found = Fingerprinter().batch(plain, ("topic",))
    value = VECTORS["fingerprints"][1]["fingerprint"]
    assert found.column("group_id").to_pylist() == [
        rules.group_id(value, who or "", topic or "", handler or "")
        for who, topic, handler in zip(*words.values(), strict=True)
    ]
    assert Fingerprinter().batch(encoded, ("topic",)).equals(found)


def test_one_id_in_two_groups_tells_of_both() -> None:
    """Even if it is the smallest of a batch, and comes twice."""
    kinds = [envelope(VECTORS["fingerprints"][number]) for number in (0, 1, 1)]
    about = Fingerprinter().batch(batch([*kinds], dlq_id=["a"] * 3), ()).column("about")
    assert [one is not None for one in about.to_pylist()] == [True, True, False]


@pytest.mark.parametrize("broken", [None, "", "{", "[]", '{"failure": 1}', '{"failure": {}}'])
def test_an_envelope_that_cannot_be_read_leaves_type_and_text(broken: str | None) -> None:
    """A foreign or broken letter is grouped by what its columns say."""
    more = {"error_type": ["ValueError"], "error_text": ["order 17 is bad"]}
    about = Fingerprinter().batch(batch([broken], **more), ()).column("about")[0].as_py()
    whole = rules.fingerprint([rules.Error("ValueError", "order 17 is bad")])
    assert about["fingerprint"] == whole.value
    assert about["title"] == "ValueError: order <n> is bad"


def test_a_known_fingerprint_counts_only_if_it_is_of_these_rules() -> None:
    """A letter that lost its frames keeps its group; one of older rules is grouped anew."""
    vector = next(one for one in VECTORS["fingerprints"] if one["name"] == "own frames")
    document = json.loads(envelope(vector))
    known = {"value": "a" * 64, "by": "stack", "hints": [], "algorithm": rules.ALGORITHM}
    document["failure"]["known"] = known
    old = json.loads(envelope(vector))
    old["failure"]["known"] = known | {"algorithm": "v0"}
    found = Fingerprinter().batch(batch([json.dumps(document), json.dumps(old)]), ())
    values = [one["fingerprint"] for one in found.column("about").to_pylist()]
    assert values == ["a" * 64, vector["fingerprint"]]


def test_a_group_is_told_by_its_smallest_letter_once_in_a_batch() -> None:
    """So a minimum over all batches is the same in every engine and with any batches."""
    same = envelope(VECTORS["fingerprints"][1])
    about = Fingerprinter().batch(batch([same] * 3, dlq_id=["b", "a", "c"]), ()).column("about")
    assert [one and one["sample"] for one in about.to_pylist()] == [None, "a", None]


def test_the_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters that are all different cost no more memory than so many."""
    monkeypatch.setattr(fingerprints, "_MOST_KNOWN", 10)
    own = Fingerprinter()
    for number in range(100):
        own.parameterised("x" * number)
    assert len(own._masked) <= 10


def flat(days: int, level: float = 10) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return hours that follow the day."""
    hours = np.arange(days * 24)
    return np.round(level * (1 + 0.5 * np.sin((hours % 24) * np.pi / 12)))


def test_a_burst_is_an_anomaly_and_the_season_is_none() -> None:
    """Ten times the usual for three hours is found, with its hours and its size."""
    usual = flat(28)
    assert list(series.anomalies("g", usual, 0)) == []
    odd = usual.copy()
    odd[400:403] *= 10
    (found,) = series.anomalies("g", odd, 1000)
    assert (found.start, found.hours, found.level) == (1400 * 3600, 3, "critical")
    assert found.observed == int(odd[400:403].sum())
    assert found.expected == pytest.approx(usual[400:403].sum(), rel=0.2)


@pytest.mark.parametrize("days", [0, 1, 2, 4, 22])
def test_a_short_history_has_a_baseline_too(days: int) -> None:
    """From nothing to three weeks: no warning, no error, and a burst is seen from two days on."""
    hours = flat(days)
    assert list(series.anomalies("g", hours, 0)) == []
    if days >= 2:
        hours[-1] = 500
        assert [one.level for one in series.anomalies("g", hours, 0)] == ["critical"]


def test_few_failures_are_no_anomaly() -> None:
    """Four in an hour after weeks of silence are told by alerts, not by trends; five are one."""
    quiet = np.zeros(28 * 24)
    quiet[300] = 4
    assert list(series.anomalies("g", quiet, 0)) == []
    quiet[300] = 5
    assert [one.observed for one in series.anomalies("g", quiet, 0)] == [5]


@pytest.mark.parametrize(("a_day", "told"), [(4, []), (5, ["worse"])])
def test_few_failures_a_day_are_no_effect_of_a_deploy(a_day: int, told: list[str]) -> None:
    """Four a day since a deploy, where there was none, may be chance; five are told."""
    hours = np.zeros(28 * 24)
    hours[14 * 24 :: 24] = a_day
    deploy = Deployed(consumer_group="g", version="2", at=14 * 86400.0)
    assert [one.verdict for one in series.deploy_effects("x", hours, 0, [deploy])] == told


def test_a_burst_before_a_deploy_does_not_hide_what_it_broke() -> None:
    """The median day before counts, not the mean: one day of an outage is not the old rate."""
    hours = np.zeros(28 * 24)
    hours[: 14 * 24 : 24] = 10
    hours[14 * 24 :: 24] = 40
    hours[10 * 24] = 500
    deploy = Deployed(consumer_group="g", version="2", at=14 * 86400.0)
    (found,) = series.deploy_effects("x", hours, 0, [deploy])
    assert (found.before, found.after, found.verdict) == (10, 40, "worse")


def test_a_deploy_that_breaks_or_mends_is_told_and_one_that_does_neither_is_not() -> None:
    """The rate of the days before is held against that of the days after."""
    hours = flat(28)
    hours[: 14 * 24] = np.round(hours[: 14 * 24] * 0.1)
    deploys = [Deployed(consumer_group="g", version=f"{day}", at=day * 86400.0) for day in (7, 14)]
    worse = list(series.deploy_effects("x", hours, 0, deploys))
    assert [(one.version, one.verdict) for one in worse] == [("14", "worse")]
    better = list(series.deploy_effects("x", hours[::-1], 0, deploys))
    assert [(one.version, one.verdict) for one in better] == [("14", "better")]


def test_a_burst_after_a_deploy_is_not_blamed_on_it() -> None:
    """The median day counts: three bad hours in a week are no new rate."""
    hours = flat(28)
    hours[15 * 24 : 15 * 24 + 3] *= 60
    deploy = Deployed(consumer_group="g", version="2", at=14 * 86400.0)
    assert list(series.deploy_effects("x", hours, 0, [deploy])) == []


def test_hours_outside_of_the_series_are_left_out() -> None:
    """Two clocks may disagree about where the series ends."""
    found = series.dense(np.array([1, 5, 9]), np.array([1, 2, 4]), 4, 6)
    assert found.tolist() == [0, 2, 0]


def group(name: str, title: str, *, kind: str = "E", calls: str = "") -> Likeness:
    """Return what a group is compared by."""
    return Likeness(group_id=name, error_type=kind, title=title, calls=calls)


def test_groups_that_differ_in_a_name_are_one_cluster() -> None:
    """Fourteen groups are one cause; another type, or other words, are another."""
    names = [
        "Ada",
        "Bob",
        "Carla",
        "Deniz",
        "Eva",
        "Farid",
        "Grete",
        "Hugo",
        "Ines",
        "Jan",
        "Kim",
        "Lea",
        "Max",
        "Nils",
    ]
    groups = [group(f"g{n:02}", f"E: customer {name} has no address") for n, name in
              enumerate(names)]  # fmt: skip
    others = [group("x1", "E: the card of the order has expired long ago"),
              group("x2", "F: customer Ada has no address", kind="F")]  # fmt: skip
    found = clusters([*groups, *others])
    assert found == {f"g{n:02}": "g00" for n in range(14)}
    assert clusters([*others, *groups[::-1]]) == found


def test_groups_by_stack_are_compared_by_their_calls_not_by_their_texts() -> None:
    """The same text from two places is two causes; nearly the same way to one place is one."""
    here = "E@shop:run>shop.a:handle>shop.lib:parse>shop.lib:check"
    groups = [
        group("a", "E: same", calls=here),
        group("b", "E: same", calls="E@shop:run>mail.x:send>mail.y:open>mail.z:dial"),
        group("c", "E: other", calls=here + ">shop.lib:deeper"),
    ]
    assert clusters(groups) == {"a": "a", "c": "a"}


def test_fields_of_payloads_are_bounded_and_never_fail() -> None:
    """Nested, wide, deep, broken: each gives fields, and values of secrets are stars."""
    assert fields_of(None) == [("$", "nothing", "")]
    assert fields_of(b"\xff{") == [("$", "not JSON", "")]
    assert ("$.a[].b", "number", "1") in fields_of(b'{"a": [{"b": 1}]}')
    assert len(fields_of(json.dumps({f"f{n}": n for n in range(5000)}))) <= 201
    deep = "[" * 500 + "]" * 500
    assert len(fields_of(deep)) < 20
    record = pa.RecordBatch.from_pydict(
        {"payload": [b'{"password": "s3cret", "iban": "DE1", "plan": "pro"}']}
    )
    (facts,) = counted_facts([record], hidden=frozenset({"iban"}))
    values = {(row["path"], row["value"]) for row in facts.to_pylist() if row["what"] == "value"}
    assert ("$.plan", "pro") in values
    assert {"s3cret", "DE1"}.isdisjoint(value for _, value in values)


def test_scores_see_groups_that_are_mixed_and_causes_that_are_split() -> None:
    """A mixed group costs precision, a split cause recall; the unknown are counted apart."""
    confusion = {("g1", "a"): 90, ("g1", "b"): 10, ("g2", "b"): 60, ("g3", "b"): 30, ("g4", "z"): 5}
    known, unknown = scores(confusion, {"a": True, "b": True, "z": False})
    assert (known.precision, known.recall) == (180 / 190, 150 / 190)
    assert (unknown.causes, unknown.records, unknown.recall) == (1, 5, 1.0)


def test_a_list_of_deploys_is_read_and_nonsense_is_refused(tmp_path: Any) -> None:
    """Seconds or moments; what is wrong names the file and shows how it is written."""
    path = tmp_path / "deploys.json"
    path.write_text('[{"consumer_group": "g", "version": "1", "at": "1970-01-02T00:00"},'
                    ' {"consumer_group": "g", "version": "2", "at": 7}]')  # fmt: skip
    assert [one.at for one in read_deploys(path)] == [86400.0, 7.0]
    path.write_text('[{"version": 1}]')
    with pytest.raises(ConfigurationError, match=r"deploys.json: write a JSON list of deploys"):
        read_deploys(path)


def test_a_scope_that_holds_nothing_is_refused() -> None:
    """A mistyped time must not look like peace."""
    with pytest.raises(ConfigurationError, match="--since is not before --until"):
        Scope(since=2.0, until=1.0)
