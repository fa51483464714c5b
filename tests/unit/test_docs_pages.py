"""The pages can be read: short sentences, links that lead somewhere, commands that exist."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Backoff, Batches, Budget, CircuitPolicy, Settings, idempotent
from holdfast.cli.app import COMMANDS
from holdfast.cli.config import SHARED
from holdfast.cli.late import LateGroup
from holdfast.outbox.relay.monitoring import CdcMetrics
from holdfast.outbox.relay.relay import Health

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "adr").glob("*.md"))]
PRODUCT = (
    "brokers", "circuit", "cli", "consumer", "core", "dlq", "idempotency", "outbox", "retry",
    "sagas", "spark_jobs", "testing", "tracing",
)  # fmt: skip
LONGEST_LINE = 400
LONGEST_BLOCK = 600
"""Characters of a paragraph or a point of a list, however it is wrapped."""
LONGEST_SENTENCE = 30
LONGEST_AVERAGE = 13.0
"""Words, where a piece of code counts as one."""
DIAGRAMS = ("flowchart", "sequenceDiagram", "stateDiagram-v2", "classDiagram", "erDiagram")
PAIRS = {")": "(", "]": "[", "}": "{"}
RESERVED = {"call", "class", "click", "default", "end", "graph", "href", "style", "subgraph"}
"""What no node of a flowchart may be called: the diagram would not be drawn."""

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)

by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of *page* in one of *languages*."""
    return [code for language, code in FENCE.findall(page.read_text()) if language in languages]


def lines(page: Path) -> Iterator[str]:
    """Yield the lines of *page* that are prose, and an empty one where something else stands."""
    for line in FENCE.sub("\n", page.read_text()).splitlines():
        yield "" if line.startswith(("|", "#", "<!--")) else line


def prose(page: Path) -> list[str]:
    """Return the paragraphs of *page*, and each point of its lists by itself."""
    text = "\n".join(lines(page))
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def sentences(page: Path) -> Iterator[list[str]]:
    """Yield the words of each sentence."""
    for part in prose(page):
        plain = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", part))
        for sentence in re.split(r"(?<=[.!?:])[*_)]*\s+", plain):
            words = re.findall(r"[^\W_][\w'’%./-]*", sentence)
            if len(words) > 1:
                yield words


@by_name
def test_no_prose_runs_on(page: Path) -> None:
    """A list or a table is read at once; a wall of text is not."""
    assert [line for line in lines(page) if len(line) > LONGEST_LINE] == []
    assert [part for part in prose(page) if len(part) > LONGEST_BLOCK] == []


@by_name
def test_sentences_are_short(page: Path) -> None:
    """One idea per sentence."""
    found = list(sentences(page))
    assert [" ".join(words) for words in found if len(words) > LONGEST_SENTENCE] == []
    average = sum(map(len, found)) / max(1, len(found))
    assert average <= LONGEST_AVERAGE, f"{average:.1f} words"


def anchor(heading: str) -> str:
    """Return the name under which a *heading* is linked."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return what can be linked within *page*."""
    return {anchor(heading) for heading in HEADING.findall(FENCE.sub("", page.read_text()))}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading in it; other sites are not followed."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, name = link.partition("#")
        target = page if not path else (page.parent / path)
        if "://" not in link and (
            not target.exists() or (name and name not in anchors(target.resolve()))
        ):
            broken.append(link)
    assert broken == []


def shown(page: Path) -> Iterator[str]:
    """Yield the `holdfast` commands that *page* shows, in blocks and within sentences."""
    for code in blocks(page, "console", "sh", "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            yield line.removeprefix("$ ").strip()
    yield from re.findall(r"`(holdfast [^`]+)`", FENCE.sub("", page.read_text()))


def parsed(command: Any, words: list[str]) -> str | None:
    """Say why *words* are no call of *command*; None if they are."""
    context = command.context_class(command)
    try:
        options, left, _ = command.make_parser(context).parse_args([*words])
    except Exception as error:  # noqa: BLE001 - click's own errors, from wherever it is imported
        return str(error)
    if left:
        return f"nobody reads {left}"
    missing = [
        one.name
        for one in command.params
        if one.param_type_name == "argument" and one.required and not options.get(one.name)
    ]
    return f"it wants {missing}" if missing else None


def found(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that *words* name, and what is left of them."""
    known = [one for one in COMMANDS if one.name == words[0]]
    if not known:
        raise LookupError(f"no command {words[0]}")
    command, rest = known[0].load(), words[1:]
    while hasattr(command, "commands") and rest and rest[0] in command.commands:
        inner = command.commands[rest[0]]
        own = getattr(inner.callback, "late", None) if isinstance(command, LateGroup) else None
        command, rest = (inner if own is None else own.load()), rest[1:]
    return command, rest


def wrong(line: str) -> str | None:
    """Say what is wrong with a command as it is shown."""
    words = shlex.split(line.split(" || ")[0], comments=True)
    if words[:1] != ["holdfast"] or words[1:2] in ([], ["--help"], ["--version"]):
        return None
    if words[1].startswith("--") or words[1].isupper():
        return None  # of the whole, as --install-completion; or a placeholder
    try:
        command, rest = found(words[1:])
    except LookupError as error:
        return str(error)
    return None if rest in ([], ["--help"]) else parsed(command, rest)


@by_name
def test_every_command_that_is_shown_exists(page: Path) -> None:
    """With the arguments and flags it is shown with."""
    told = {line: wrong(line) for line in shown(page)}
    assert {line: why for line, why in told.items() if why} == {}


def test_a_wrong_command_is_seen() -> None:
    """The test above can fail."""
    assert wrong("holdfast dlq groups --group billing") is None
    assert wrong("holdfast inbox prune") is None
    for line in (
        "holdfast nonsense",
        "holdfast dlq nonsense",
        "holdfast relay --nonsense",
        "holdfast dlq plans rate 9c41",
        "holdfast outbox parked show 17 18 --nonsense 4",
    ):
        assert wrong(line), line


def diagram_fault(code: str) -> str | None:
    """Say what is wrong with a Mermaid diagram; None if nothing is seen."""
    if code.split(maxsplit=1)[0] not in DIAGRAMS:
        return "no kind of diagram"
    if any(line.count('"') % 2 for line in code.splitlines()):
        return "a quote is open"
    nodes = set(re.findall(r"^\s*(\w+)(?=\[|\(|\{| --)|> (\w+)\b", code, re.MULTILINE))
    if reserved := {name for pair in nodes for name in pair} & RESERVED:
        return f"{reserved} cannot be a name"
    opened: list[str] = []
    for sign in re.sub(r'"[^"]*"', "", code):
        if sign in PAIRS.values():
            opened.append(sign)
        elif sign in PAIRS and (not opened or opened.pop() != PAIRS[sign]):
            return f"{sign} closes nothing"
    return f"{opened} stay open" if opened else None


@by_name
def test_every_diagram_can_be_drawn(page: Path) -> None:
    """As far as its kind, brackets and quotes tell."""
    assert [fault for code in blocks(page, "mermaid") if (fault := diagram_fault(code))] == []


def test_a_broken_diagram_is_seen() -> None:
    """The test above can fail."""
    assert diagram_fault('flowchart LR\n    a["x (y"] --> b((c))\n') is None
    for code in (
        "graphic LR\n",
        "flowchart LR\n a[b --> c\n",
        'flowchart LR\n a["b] --> c\n',
        "flowchart LR\n a --> call\n",
        'flowchart LR\n end["b"] --> c\n',
    ):
        assert diagram_fault(code), code


def table(page: str, title: str) -> dict[str, str]:
    """Return names and defaults of the table whose first column is headed *title*."""
    text = (ROOT / "docs" / page).read_text()
    head = rf"^\| {re.escape(title)} \| default \|.*\n\|.*\n"
    (rows,) = re.findall(head + r"((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows.splitlines()]
    return {name: row[2] for row in cells for name in re.findall(r"`([^`]+)`", row[1])}


def differs(shown: str, default: object) -> bool:
    """Whether a default that is *shown* plainly is another one than *default*."""
    match default:
        case None | bool():
            plain = {"none": False, "None": False, "off": False, "False": False, "True": True}
            return shown in plain and plain[shown] is not bool(default)
        case int() | float():
            number = re.match(r"[\d.,]+", shown)
            return number is None or float(number[0].replace(",", "")) != default
        case str():
            return shown.startswith("`") and f"`{default}`" not in shown
    return False


@pytest.mark.parametrize(
    ("page", "title", "thing", "own"),
    [
        ("consumer.md", "setting", Settings, ()),
        ("consumer.md", "setting of `Batches`", Batches, ()),
        ("retry.md", "setting of `Backoff`", Backoff, ("randomness",)),
        ("retry.md", "setting of `Budget`", Budget, ("name", "clock")),
        ("circuit.md", "setting of `CircuitPolicy`", CircuitPolicy, ()),
        ("idempotency.md", "setting of `@idempotent`", idempotent, ("function",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_setting_is_on_its_page_with_its_default(
    page: str, title: str, thing: Any, own: tuple[str, ...]
) -> None:
    """No setting is missing, and none is left that is gone."""
    shown = table(page, title)
    known = {name: one.default for name, one in inspect.signature(thing).parameters.items()}
    assert set(shown) == set(known) - set(own)
    assert {name: known[name] for name in shown if differs(shown[name], known[name])} == {}


@pytest.mark.parametrize(
    ("page", "title", "words"),
    [
        ("outbox.md", "flag", ["relay"]),
        ("cdc.md", "flag", ["cdc"]),
        ("replay.md", "flag of `holdfast dlq replay`", ["dlq", "replay"]),
    ],
)
def test_every_flag_is_on_its_page_with_its_default(
    page: str, title: str, words: list[str]
) -> None:
    """What can be set is told where it is explained."""
    shown = table(page, title)
    command, _ = found(words)
    known = {one.opts[0]: one for one in command.params if one.opts[0].startswith("--")}
    flags = {name for name in shown if name.startswith("--")}
    assert flags <= set(known)
    text = (ROOT / "docs" / page).read_text()
    untold = [name for name, one in known.items() if not one.hidden and name not in text]
    assert set(untold) <= {f"--{name}" for name in SHARED} | {"--config", "--help"}
    wrong_ones = {name: known[name].default for name in flags
                  if differs(shown[name], known[name].default)}  # fmt: skip
    assert wrong_ones == {}


def words(pattern: str, page: Path) -> set[str]:
    """Return what matches *pattern* anywhere in *page*, code and diagrams included."""
    return set(re.findall(pattern, page.read_text()))


@cache
def source() -> str:
    """Return all of the product as text, and what is deployed with it."""
    folders = [*PRODUCT, "deploy"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    kept = [path for path in files if path.suffix in {".py", ".sql", ".yaml", ".json"}]
    put_together = CdcMetrics(Health(), lambda: 0).text().decode()  # names that no file spells out
    texts = [path.read_text() for path in kept if "__pycache__" not in path.parts]
    return "\n".join([*texts, put_together])


@by_name
def test_every_metric_table_and_variable_exists(page: Path) -> None:
    """Somebody who greps for one finds it."""
    made = re.compile(r"^holdfast_(cdc|outbox)_(shop|<?(server|database)>?)$|_$")
    names = {name.removesuffix("_total") for name in words(r"\bholdfast_[a-z0-9_]+", page)}
    assert {name for name in names if name not in source() and not made.search(name)} == set()
    assert words(r"\bHOLDFAST_[A-Z_]*[A-Z]\b", page) <= variables()


@cache
def variables() -> set[str]:
    """Return the variables that set an option of some command."""
    return {name for command in commands() for one in command.params for name in known_by(one)}


def commands() -> Iterator[Any]:
    """Yield every command."""
    waiting = [late.load() for late in COMMANDS]
    while waiting:
        command = waiting.pop()
        yield command
        for inner in getattr(command, "commands", {}).values():
            own = getattr(inner.callback, "late", None) if isinstance(command, LateGroup) else None
            waiting.append(inner if own is None else own.load())


def known_by(option: Any) -> list[str]:
    """Return the variables that set *option*."""
    named = option.envvar
    return [named] if isinstance(named, str) else list(named or ())


@by_name
def test_every_dotted_name_exists(page: Path) -> None:
    """Modules, classes and functions, wherever they have moved."""
    text = re.sub(r"holdfast\.(?:toml|brokers` |db\b(?!\.))", "", page.read_text())
    names = set(re.findall(r"`(holdfast(?:\.[A-Za-z_]\w*)+)", text))
    assert {name for name in names if not exists(name)} == set()


def exists(dotted: str) -> bool:
    """Tell whether *dotted* is a module, or something in one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            if name not in getattr(thing, "__struct_fields__", ()) and not hasattr(thing, name):
                return False
            thing = getattr(thing, name, None)
        return True
    return False


@by_name
def test_every_settings_file_that_is_shown_can_be_read(page: Path) -> None:
    """Its tables are commands, and their keys are flags of them."""
    for code in blocks(page, "toml"):
        assert list(unknown(tomllib.loads(code))) == []


def unknown(settings: dict[str, Any], *path: str) -> Iterator[str]:
    """Yield the keys of *settings* that no command reads."""
    flags = SHARED if not path else [name for one in found([*path])[0].params for name in one.opts]
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from unknown(value, *path, name)
        elif name not in flags and f"--{name}" not in flags:
            yield ".".join((*path, name))
