"""What the pages about the code name exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PRODUCT = (
    "brokers", "circuit", "cli", "consumer", "core", "dlq", "idempotency", "outbox", "retry",
    "sagas", "spark_jobs", "status", "testing", "tracing",
)  # fmt: skip
ROW = re.compile(r"^\| (?P<word>[^|]+) \| [^|]+ \| (?P<carrier>[^|]+) \|$", re.MULTILINE)


def _words() -> list[tuple[str, str]]:
    found = ROW.findall((DOCS / "glossary.md").read_text())
    return [(word, carrier) for word, carrier in found if word not in {"word", "---"}]


def _exists(dotted: str) -> bool:
    """Tell whether *dotted* is a module, or something that a module holds."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            fields = getattr(thing, "__struct_fields__", ())
            if not hasattr(thing, name) and name not in fields:
                return False
            thing = getattr(thing, name, None)
        return True
    return False


def _tables() -> set[str]:
    return {
        table
        for package in ("outbox", "consumer", "dlq", "idempotency")
        for table in importlib.import_module(f"holdfast.{package}").metadata.tables
    }


@pytest.mark.parametrize(("word", "carrier"), _words(), ids=[word for word, _ in _words()])
def test_a_word_of_the_glossary_is_carried_by_something_that_exists(
    word: str, carrier: str
) -> None:
    """A class, a function, a field or a table."""
    name = carrier.strip("` ")
    assert _exists(name) if name.startswith("holdfast.") else name in _tables(), word


def test_no_word_of_the_glossary_stands_there_twice() -> None:
    """One word for one thing."""
    words = [word for word, _ in _words()]
    assert len(words) > 50
    assert len(words) == len(set(words))


CLASS = re.compile(r"^class ([^\W_]\w*)", re.MULTILINE)
NAMED = re.compile(r"`(?P<path>[a-z_]+/[\w/]*(?:\.py)?)`(?: `(?P<name>[\w.]+)`)?")


def _named() -> list[tuple[str, str]]:
    text = (DOCS / "architecture.md").read_text()
    return sorted(set(NAMED.findall(text)) - {("adr/", "")})


@pytest.mark.parametrize(("path", "name"), _named())
def test_what_the_page_about_the_architecture_names_exists(path: str, name: str) -> None:
    """A file or folder, and the class or function in it."""
    place = ROOT / path
    assert place.is_dir() if path.endswith("/") else place.is_file()
    if name:
        parts = Path(path).with_suffix("").parts
        inside = parts[1:] if parts[0] == "core" else parts
        assert _exists(".".join(["holdfast", *inside, name]))


def test_the_page_about_the_architecture_names_each_walk_in_ten_steps() -> None:
    """Short enough to be read, and each step names what does it."""
    walks = re.findall(r"(?:^\d+\. .*\n)+", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    assert [walk.count("\n") for walk in walks] == [10, 10, 10]
    assert all(NAMED.search(step) for walk in walks for step in walk.splitlines())


def test_no_two_public_classes_share_a_name() -> None:
    """Whoever looks for a class by its name finds one."""
    found: dict[str, list[str]] = {}
    for top in PRODUCT:
        for module in sorted((ROOT / top).rglob("*.py")):
            for name in CLASS.findall(module.read_text()):
                found.setdefault(name, []).append(str(module.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
