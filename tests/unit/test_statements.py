"""SQL of handlers: what would end their transaction is seen wherever it stands."""

from __future__ import annotations

import pytest

from holdfast.statements import ends_transaction


@pytest.mark.parametrize(
    "sql",
    [
        "commit",
        "/* a */ " * 40 + "COMMIT",
        "-- why\n /* x */;; COMMIT",
        "SELECT 1; /* then */ COMMIT",
        "SELECT 'it''s; fine'; -- done\nROLLBACK",
        "SELECT $$;$$; COMMIT",
        "SELECT $a$ $$ ; $a$; COMMIT",
        "/* outer /* inner */ still */ COMMIT",
        "SELECT E'\\''; COMMIT",
        "SELECT 1; END",
        "start  transaction",
        "SET @@session.autocommit=0",
        "rollback work",
    ],
)
def test_what_ends_the_transaction_is_seen_behind_comments_and_texts(sql: str) -> None:
    """In any position, in one pass."""
    assert ends_transaction(sql) is not None


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "INSERT INTO note VALUES ('; COMMIT')",
        'SELECT "; COMMIT" FROM t',
        "SELECT 1 -- ; COMMIT",
        "SELECT 1 /* ; COMMIT",
        "SELECT 1; /* /* */ COMMIT */ SELECT 2",
        "DO $do$ BEGIN PERFORM 1; END $do$",
        "CREATE TRIGGER t AFTER INSERT ON a BEGIN UPDATE b SET n = 1; END",
        "ROLLBACK TO SAVEPOINT a",
        "ROLLBACK /* only */ WORK TO a",
        "UPDATE t SET commit = 1",
        "SELECT a # b; ",
    ],
)
def test_a_word_in_a_text_or_comment_ends_nothing(sql: str) -> None:
    """Nor does a savepoint, or the body of what is being created."""
    assert ends_transaction(sql) is None


def test_mysql_has_words_of_its_own() -> None:
    """DDL commits there, # begins a comment, and a backslash takes a quote's meaning."""
    assert ends_transaction("# why\nALTER TABLE t ADD n INT", mysql=True) == "ALTER"
    assert ends_transaction("/*!50000 COMMIT */", mysql=True) == "COMMIT"
    assert ends_transaction("SELECT 'it\\'; COMMIT'", mysql=True) is None
    assert ends_transaction("CREATE TEMPORARY TABLE t (n INT)", mysql=True) is None
    assert ends_transaction("ALTER TABLE t ADD n INT") is None
