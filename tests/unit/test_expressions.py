"""Regular expressions meet foreign text: each of them takes time that is linear in its length.

The patterns are found, not listed: every compiled one in every module of the package, with the
methods that its module calls on it. Texts of 1 MB are made of what each pattern looks for. Time
is process CPU time, so that a loaded machine changes nothing.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import logging
import pkgutil
import re
import signal
import time
from functools import cache
from re import _constants as words  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import holdfast
from holdfast.cli.display import plain
from holdfast.dlq.capture.fingerprint import _expression, parameterised
from holdfast.dlq.protection.redaction import Redaction
from holdfast.scrubbing import clean, scrubbed, text_of, without_sql
from holdfast.statements import ends_transaction
from holdfast.tracing import JsonFormatter
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, ModuleType

LARGE = 1_000_000
SMALL = 3_000
SECONDS = 8.0
"""CPU time for 1 MB; what is quadratic takes minutes, what is exponential never ends."""
QUICK = 50
"""By so much less is tried in a quick run, and in an eighth of the time."""
_METHODS = frozenset(
    {"search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer"}
)
_MAKES = _METHODS | {"compile"}
_MAKING = re.compile(rf"\bre\.(?:{'|'.join(sorted(_MAKES))})\b")
_NOT_OURS = {"holdfast.db.sql._NAME"}
"""Patterns that meet our own files alone."""


@pytest.fixture(autouse=True)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Try smaller texts in a quick run."""
    if request.config.getoption("quick"):
        monkeypatch.setitem(globals(), "LARGE", LARGE // QUICK)
        monkeypatch.setitem(globals(), "SECONDS", SECONDS / 8)


class Use(NamedTuple):
    """A pattern, its name, and how the module asks it."""

    name: str
    pattern: re.Pattern[str]
    method: str


class TooSlow(BaseException):
    """The deadline in CPU time is over."""


def modules() -> Iterator[ModuleType]:
    """Yield every module of the package."""
    for found in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        if ".migrations." not in found.name and not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def uses() -> list[Use]:
    """Return each pattern once for each way in which it is asked."""
    found: list[Use] = []
    for module in modules():
        for name, value in vars(module).items():
            for pattern in _patterns(value):
                whole = f"{module.__name__}.{name}"
                if not isinstance(pattern.pattern, str) or whole in _NOT_OURS:
                    continue
                asked = _asked(module, name)
                if not asked and _is_made_elsewhere(module, name):
                    continue
                found += (Use(whole, pattern, way) for way in sorted(asked or {"search"}))
    everything = ("url", "email", "uuid", "time", "ip", "ip6", "hex", "number")
    return [
        *found,
        Use("holdfast.dlq.capture.fingerprint._expression", _expression(*everything), "sub"),
    ]


def _patterns(value: Any) -> list[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        return [value]
    if isinstance(value, (tuple, list)):
        return [one for item in value for one in _patterns(item)]
    if isinstance(value, dict):
        return [one for item in value.values() for one in _patterns(item)]
    return []


def _asked(module: ModuleType, name: str) -> set[str]:
    """Return the methods that *module* calls on its pattern *name*, or hands on."""
    return {method for one, method in _calls(module) if one == name} & _METHODS


# What is kept for the whole run is small: trees of every module would slow each collection
# of garbage in all tests after this one.
@cache
def _calls(module: ModuleType) -> frozenset[tuple[str, str]]:
    """Return each name in *module* with what is asked of it."""
    return frozenset(
        (node.value.id, node.attr)
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )


@cache
def _made(module: ModuleType) -> frozenset[str]:
    """Return the names that the body of *module* gives a value."""
    return frozenset(
        target.id
        for node in _tree(module).body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in ast.walk(node)
        if isinstance(target, ast.Name)
    )


def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_made_elsewhere(module: ModuleType, name: str) -> bool:
    """Whether *name* is only imported, and asked where it is made."""
    return name not in _made(module)


USES = uses()


def fragments(pattern: re.Pattern[str]) -> list[str]:
    """Return what *pattern* looks for: its letters, runs of letters and one of each class."""
    found: dict[str, None] = {}

    def walk(tree: Any) -> None:
        run = ""
        for kind, value in tree:
            if kind is words.LITERAL:
                run += chr(value)
                continue
            if run:
                found.setdefault(run)
            run = ""
            if kind is words.IN:
                found.setdefault(_member(value))
            elif kind in (words.NOT_LITERAL, words.ANY):
                found.setdefault("x")
            else:
                _inside(value, walk)
        if run:
            found.setdefault(run)

    walk(parser.parse(pattern.pattern, pattern.flags))
    return list(found)


def _member(choices: Any) -> str:
    for kind, value in choices:
        if kind is words.LITERAL:
            return chr(value)
        if kind is words.RANGE:
            return chr(value[0])
        if kind is words.CATEGORY:
            return {words.CATEGORY_DIGIT: "1", words.CATEGORY_SPACE: " "}.get(value, "a")
    return "x"


def _inside(value: Any, walk: Callable[[Any], None]) -> None:
    if isinstance(value, parser.SubPattern):
        walk(value)
    elif isinstance(value, (tuple, list)):
        for one in value:
            _inside(one, walk)


def attacks(pattern: re.Pattern[str]) -> Iterator[Callable[[int], str]]:
    """Yield makers of texts: each fragment and each pair over and over, with a bad end."""
    own = fragments(pattern)[:14]
    whole = "".join(own)
    repeated = [*own, whole, *map("".join, itertools.permutations(own, 2)), "\x00", "a", " ", "1"]
    for one, head in itertools.product(dict.fromkeys(repeated), ("", *own[:2])):
        yield lambda size, one=one, head=head: (head + one * (size // len(one) + 1))[:size] + "\x00"


def spent(work: Callable[[], object]) -> float:
    """Return the CPU time of *work*; it is ended when it takes too long."""

    def late(_: int, __: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    begin = time.process_time()
    try:
        work()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return time.process_time() - begin


def asked(use: Use, text: str) -> Callable[[], object]:
    """Return how *use* is put to *text*."""
    if use.method in ("sub", "subn"):
        return lambda: getattr(use.pattern, use.method)("", text)
    if use.method == "finditer":
        return lambda: sum(1 for _ in use.pattern.finditer(text))
    return lambda: getattr(use.pattern, use.method)(text)


@pytest.mark.parametrize("use", USES, ids=[f"{use.name}.{use.method}" for use in USES])
def test_an_expression_takes_linear_time_on_its_worst_text(use: Use) -> None:
    """The slowest of its attacks at 3 KB are tried at 1 MB, within a bound of CPU time."""
    try:
        ranked = sorted(attacks(use.pattern), key=lambda make: -spent(asked(use, make(SMALL))))
        for make in ranked[:2]:
            spent(asked(use, make(LARGE)))
    except TooSlow:
        pytest.fail(f"{use.pattern.pattern!r} takes more than linear time")


def test_every_expression_is_found_by_this_test() -> None:
    """None is made in passing, where no test would see it."""
    made = []
    for module in modules():
        if not _MAKING.search(inspect.getsource(module)):
            continue
        for function in ast.walk(_tree(module)):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and _is_name(node.value, "re"):
                    made += [f"{module.__name__}.{function.name}"] * (node.attr in _MAKES)
    assert made == ["holdfast.dlq.capture.fingerprint._expression"]
    assert len(USES) > 40


WORST = [
    *("a", "a://b:", "a://b:c@", "nats://a@", "?pass", "?key=", "&a=", "x=?token", "token-"),
    *("eyJ-", "password='", "bearer ", "/*", "/**/", "--\n", "'", "$a$", "\\'", ";", "; "),
    *("E'\\", "\x1b", "\n[SQL: "),
]


def logged(text: str) -> str:
    """Return the line of *text* as the command writes it."""
    return JsonFormatter().format(logging.makeLogRecord({"msg": text, "payload": text}))


@pytest.mark.parametrize(
    "reads",
    [mask, scrubbed, without_sql, clean, plain, logged, parameterised, Redaction().scrub,
     ends_transaction, lambda text: ends_transaction(text, mysql=True),
     lambda text: text_of(ValueError(text))],
    ids=["mask", "scrubbed", "without_sql", "clean", "plain", "log line", "parameterised",
         "Redaction.scrub", "ends_transaction", "ends_transaction on MySQL", "text_of"],
)  # fmt: skip
def test_what_reads_foreign_text_takes_linear_time(reads: Callable[[str], object]) -> None:
    """Each function with 1 MB of the worst that is known, whole."""
    for one in WORST:
        text = (one * (LARGE // len(one) + 1))[:LARGE]
        for whole in (text, f"x://y:{text}@=", f"/*{text}"):
            try:
                spent(lambda whole=whole: reads(whole))
            except TooSlow:
                pytest.fail(f"1 MB of {one!r} takes more than linear time")


def test_a_log_line_is_bounded_and_keeps_both_its_ends() -> None:
    """What a payload of 1 MB says is cut in its middle, and the line says so."""
    line = logged(f"begin {'x' * LARGE} kafka://u:hunter2@h end")
    assert len(line) < 40_000
    assert "hunter2" not in line
    assert line.count("begin") == line.count("end") + 0 == 2
    assert "characters left out" in line
