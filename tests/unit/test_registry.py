"""Brokers are found by URL, and bad ones are refused with the fix."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from holdfast import ConfigurationError, InvalidUrl, MissingExtra, UnknownScheme
from holdfast.brokers import connect, schemes
from holdfast.extras import driver

if TYPE_CHECKING:
    from pathlib import Path


def test_the_embedded_brokers_are_always_there() -> None:
    """No extra is needed for the default."""
    assert {"memory", "sqlite"} <= set(schemes())


def test_an_unknown_scheme_names_the_known_ones() -> None:
    """A typo is answered with the list."""
    with pytest.raises(UnknownScheme, match=r"'kafak'.*memory.*sqlite"):
        connect("kafak://localhost")


@pytest.mark.parametrize("url", ["", "orders.db", "://x", "sqlite:", "sqlite://", "sqlite://host"])
def test_a_malformed_url_is_refused_with_an_example(url: str) -> None:
    """The error shows how a URL is written."""
    with pytest.raises((InvalidUrl, UnknownScheme), match=r"://"):
        connect(url)


def test_a_plain_name_before_the_plus_is_enough() -> None:
    """`scheme+driver` falls back to the adapter of `scheme`."""
    assert connect("memory+anything:").name == "memory+anything:"


def test_a_missing_driver_names_the_extra() -> None:
    """The error is a command to copy."""
    with pytest.raises(MissingExtra, match=r"pip install 'holdfast\[kafka\]'"):
        driver("no_such_module_here", extra="kafka")


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    """A misspelt setting never passes in silence."""
    with pytest.raises(ConfigurationError, match=r"'partition'.*partitions"):
        connect("memory:?partition=3")


@pytest.mark.parametrize("query", ["partitions=0", "lease=-1", "partitions=many", "adopt=maybe"])
def test_a_nonsensical_setting_is_refused(query: str) -> None:
    """The error names the setting and what to write."""
    with pytest.raises(ConfigurationError, match=query.partition("=")[0]):
        connect(f"memory:?{query}")


def test_a_file_of_another_application_is_refused(tmp_path: Path) -> None:
    """Holdfast does not put its tables into a stranger's file unasked."""
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE customers (id)")
    db.close()
    with pytest.raises(ConfigurationError, match=r"customers.*adopt=true"):
        connect(f"sqlite:///{path}")
    connect(f"sqlite:///{path}?adopt=true").close()
    connect(f"sqlite:///{path}?adopt=true").close()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """The error says what is wrong with the file."""
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, and quite a lot of them" * 50)
    with pytest.raises(ConfigurationError, match="not a database"):
        connect(f"sqlite:///{path}")


def test_a_file_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """The error points at the folder."""
    with pytest.raises(ConfigurationError, match="folder"):
        connect(f"sqlite:///{tmp_path}/none/here.db")


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    """An old program does not touch a newer file."""
    path = tmp_path / "future.db"
    connect(f"sqlite:///{path}").close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigurationError, match=r"newer Holdfast.*upgrade"):
        connect(f"sqlite:///{path}")
