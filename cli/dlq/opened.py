"""Opening the dead-letter store for a command, and finding what a short name means."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import inspect, or_, select

from holdfast.cli.opened import existing_database, warranted
from holdfast.database import reading
from holdfast.dlq.groups import Groups, NoSuchGroup
from holdfast.dlq.schema import message, metadata
from holdfast.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from holdfast.dlq.audit import Warrant
    from holdfast.dlq.groups import Group

_SHORTEST = 4


@contextmanager
def dead_letters(url: str) -> Iterator[Engine]:
    """Yield the store at *url* if it has the tables; say so if it lacks them."""
    engine = existing_database(url)
    try:
        with reading(engine).connect() as db:
            inspector = inspect(db)
            missing = [name for name in sorted(metadata.tables) if not inspector.has_table(name)]
        if missing:
            raise ConfigurationError(
                f"the database lacks {', '.join(missing)}: run  holdfast db upgrade  with the "
                "same --database"
            )
        yield engine
    finally:
        engine.dispose()


def one_group(engine: Engine, name: str) -> Group:
    """Return the group whose id begins with *name*."""
    try:
        return Groups(engine).find(name)
    except NoSuchGroup as error:
        if "several" in str(error):
            raise
        raise NotFound(str(error)) from error


def one_letter(engine: Engine, name: str) -> str:
    """Return the full id of the dead letter whose id begins with *name*."""
    text = name.strip()
    if len(text) < _SHORTEST:
        raise ConfigurationError(f"{name!r} is too short: write at least {_SHORTEST} characters")
    own = message.c.dlq_id  # ours are lower case, those of other writers are as they are
    forms = (own.startswith(one, autoescape=True) for one in {text, text.lower()})
    query = select(own).where(or_(*forms))
    with reading(engine).connect() as db:
        found = db.execute(query.order_by(message.c.dlq_id).limit(3)).scalars().all()
    if not found:
        raise NotFound(f"no dead letter begins with {name!r}: see  holdfast dlq list")
    if len(found) > 1:
        raise ConfigurationError(f"{name!r} begins {', '.join(found)}: write more of it")
    return str(found[0])


def warrant(actor: str | None, reason: str) -> Warrant:
    """Return who acts and why."""
    return warranted(actor, reason)
