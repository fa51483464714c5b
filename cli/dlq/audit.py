"""`holdfast dlq audit`: who did what to dead letters and why, and whether the record is whole."""

from holdfast.cli.audit import Check, KeptHead, OnlyActor, OnlySubject, kept_head, show, tell
from holdfast.cli.dlq.opened import dead_letters
from holdfast.cli.dlq.options import Database
from holdfast.cli.options import Config, Json, Limit
from holdfast.database import reading
from holdfast.dlq.audit import entries, verify


def audit(
    *,
    config: Config = None,
    database: Database,
    check: Check = False,
    head: KeptHead = None,
    actor: OnlyActor = None,
    subject: OnlySubject = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Show who did what to dead letters and why; --verify checks the hash chain of all audits."""
    kept = kept_head(head, check=check)
    with dead_letters(database) as engine, reading(engine).connect() as db:
        verdict = verify(db, kept) if check else None
        found = [] if check else entries(db, limit=limit, subject=subject, actor=actor)
    if verdict is not None:
        tell(verdict, as_json=as_json)
        return
    show(found, as_json=as_json, filtered=bool(actor or subject))
