"""The map of the code holds: no import cycles, and commands that only parse, ask and print."""

from __future__ import annotations

import ast
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
ALLOWED = {"sqlalchemy.engine", "sqlalchemy.exc"}
"""What a command may know of SQLAlchemy: how a database is named and held, and what it raises."""
ABOUT_CONNECTIONS = {("cli/opened.py", "sqlalchemy.event")}
"""Says what is waited for while a server does not answer."""


def test_no_module_imports_what_imports_it() -> None:
    """Whatever holds a cycle open, also inside a function, would show here."""
    graph = grimp.build_graph("holdfast", exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert _cycles(imports) == []


def test_commands_hold_no_sql() -> None:
    """An act that only a command can do is closed to programs and to a web page."""
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in sorted((ROOT / "cli").rglob("*.py"))
        if "migrations" not in path.parts  # Alembic's environment
        for name in _sqlalchemy(ast.parse(path.read_text()))
        if name not in ALLOWED
    }
    assert found <= ABOUT_CONNECTIONS


def _sqlalchemy(tree: ast.AST) -> set[str]:
    """Return what of SQLAlchemy a module imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = node.module == "sqlalchemy"
            found |= {f"{node.module}.{one.name}" if whole else node.module for one in node.names}
    return {name for name in found if name.split(".")[0] == "sqlalchemy"}


def _cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, one way or another."""
    left = {name: set(others) for name, others in imports.items()}
    back: dict[str, set[str]] = {name: set() for name in left}
    for name, others in left.items():
        for one in others & back.keys():
            back[one].add(name)
    found: list[list[str]] = []
    while left:
        name = min(left)
        group = _reached(name, left) & _reached(name, {one: back[one] for one in left})
        if len(group) > 1:
            found.append(sorted(group))
        left = {one: others - group for one, others in left.items() if one not in group}
    return found


def _reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    found, ahead = {start}, [start]
    while ahead:
        fresh = (graph[ahead.pop()] & graph.keys()) - found
        found |= fresh
        ahead += fresh
    return found
