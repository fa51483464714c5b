"""`show` and `explain`: one group or one dead letter, whole, save what nobody may read."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import typer
from sqlalchemy.engine import Engine

from holdfast.cli.chains import related_facts, related_lines
from holdfast.cli.display import (
    ago,
    encoded,
    excerpt,
    foreign,
    print_json,
    say,
    say_as_is,
    sparkline,
    when,
)
from holdfast.cli.dlq.options import Correlation, dead_letters
from holdfast.cli.opened import also_databases
from holdfast.cli.options import Also, Config, Database, Json
from holdfast.clock import SYSTEM_CLOCK
from holdfast.dlq.letter import DeadLetter
from holdfast.dlq.operations import DeadLetterAdmin, Diagnosis, PlannedReplay, StoredLetter
from holdfast.dlq.protection.redaction import holds_credentials
from holdfast.dlq.protection.vault import masked
from holdfast.dlq.store.groups import MOST, FailureGroup, Judged
from holdfast.dlq.store.rows import CONFIRMED, PENDING
from holdfast.errors import ConfigurationError, NotFound
from holdfast.scrubbing import REDACTED
from holdfast.tracing.related import Related, related

_MOST_PATHS = 5


def show_letter(kept: StoredLetter) -> None:
    """Print the dead letter *kept*."""
    letter = kept.letter
    made, failures = letter.message, kept.occurrences
    say(f"dead letter {letter.dlq_id}  {kept.state}  message {made.id} ({made.type})")
    _say_whence(kept)
    times = "once" if failures == 1 else f"{failures} times since {when(kept.first_failed_at)}"
    say(f"  failed {times}, last {when(kept.last_failed_at)}; attempts {kept.attempts}, "
        f"timeouts {letter.history.timeouts}, replayed {kept.replay_count} times")  # fmt: skip
    if kept.state != PENDING:
        say(f"  {kept.state} by {kept.closed_by} on {when(kept.closed_at)}: "
            f"{foreign(kept.closed_reason or 'no reason was kept')}")  # fmt: skip
    if made.correlation_id:
        say(f"  correlation {made.correlation_id}  trace {made.traceparent or '–'}")
    if letter.newer is not None:
        say(f"  its envelope is of version {letter.schema_version}, newer than this Holdfast "
            "reads: it is kept whole and not replayed; upgrade first")  # fmt: skip
    _say_protected(letter)
    for place, raised in enumerate(letter.failure.chain):
        text = excerpt(raised.text.encode(), most=500)
        say(foreign(f"  {'led to' if place else 'error'} {raised.type}: {text}"))
    for past in letter.history.failures[-5:] if failures > 1 else ():
        say(foreign(f"  failed {when(past.at)}  {past.error}"))
    if letter.failure.trace:
        say_as_is(foreign(f"  trace:\n{excerpt(letter.failure.trace.encode(), most=4000)}"))
    for name, value in _readable(letter):
        say_as_is(foreign(f"  header {name}: {excerpt(value, most=200)}"))
    say_as_is(foreign(f"  payload:\n{excerpt(masked(made.payload, letter.governance.sealed))}"))


def say_next(kept: StoredLetter) -> None:
    """Say what can be done about one letter."""
    name = kept.letter.dlq_id[:8]
    if kept.state == PENDING:
        say(f"next: holdfast dlq replay --id {name} --dry-run, or edit {name} first, or "
            f"discard --id {name}")  # fmt: skip
    elif kept.state != CONFIRMED:
        say(f"next: holdfast dlq reopen --id {name} --reason …  makes it pending again")


def letter_facts(kept: StoredLetter) -> dict[str, Any]:
    """Return *kept* as scripts get it."""
    letter = kept.letter
    parts = ("coordinates", "culprit", "failure", "history", "lineage")
    made, hidden = letter.message, letter.governance
    names = ("state", "group_id", "tenant", "verdict", "due_at")
    return {
        "dlq_id": letter.dlq_id,
        **{name: getattr(kept, name) for name in names},
        "closed": None if kept.state == PENDING else {
            "at": kept.closed_at, "by": kept.closed_by, "reason": kept.closed_reason
        },
        "message_id": made.id,
        "topic": made.topic,
        "key": encoded(made.key),
        "payload": encoded(masked(made.payload, hidden.sealed)),
        "encrypted": list(hidden.sealed),
        "redacted": list(hidden.redacted),
        "headers": [{"name": name, **encoded(value)} for name, value in _readable(letter)],
        **msgspec.to_builtins({name: getattr(letter, name) for name in parts}),
    }  # fmt: skip


def _say_whence(kept: StoredLetter) -> None:
    letter = kept.letter
    source, made, by = letter.coordinates, letter.message, letter.culprit
    key = "no key" if made.key is None else f"key {made.key_text}"
    place = "" if source.position is None else f"/{source.lane} at {source.position}"
    say(f"  {made.topic}{place}, {key}; event {made.time.isoformat()}")
    code = f" ({by.function})" if by.function and by.function != by.handler else ""
    say(f"  {by.group} with {by.handler}{code}, version {by.service_version or 'unknown'}"
        + (f" ({by.git_sha[:12]})" if by.git_sha else "") + f", on {by.host or 'unknown'}"
        + (f"; tenant {kept.tenant}" if kept.tenant else ""))  # fmt: skip
    say(f"  {letter.failure.kind.value}/{letter.failure.stage.value} in group "
        f"{kept.group_id[:8]}; triage: {kept.verdict or 'not judged'}"
        + ("" if kept.due_at is None else f", retried {when(kept.due_at)}"))  # fmt: skip


def _readable(letter: DeadLetter) -> Iterator[tuple[str, bytes | None]]:
    """Yield the headers; those that hold credentials by their names show stars."""
    for name, value in letter.message.headers:
        yield name, REDACTED.encode() if value and holds_credentials(name) else value


def _say_protected(letter: DeadLetter) -> None:
    """Say what of the payload is not there to be read, and what that means for a replay."""
    sealed, redacted = letter.governance.sealed, letter.governance.redacted
    if sealed:
        say(f"  encrypted for {letter.governance.subject}: {_some(sealed)}; a replay needs "
            "--master-key-file")  # fmt: skip
    if redacted:
        say(f"  removed at capture: {_some(redacted)}; it cannot be replayed before  holdfast dlq "
            f"edit {letter.dlq_id[:8]}  has put them back")  # fmt: skip


def _some(paths: Sequence[str]) -> str:
    more = len(paths) - _MOST_PATHS
    return ", ".join(paths[:_MOST_PATHS]) + (f" and {more:,} more" if more > 0 else "")


_VERDICTS = {
    "hold for code": "hold for a fix of the code",
    "hold for data": "hold for a correction of the data",
    "retry": "retry by itself after a while",
    "alert": "tell somebody: nobody knows this",
    "": "not judged",
}
Name = Annotated[str, typer.Argument(help="A group or a dead letter, or its first characters.")]


def show(
    name: Annotated[
        str | None, typer.Argument(help="A group or a dead letter, or its first characters.")
    ] = None,
    *,
    config: Config = None,
    database: Database,
    correlation: Correlation = None,
    also: Also = None,
    as_json: Json = False,
) -> None:
    """Show a group with a sample, or one dead letter with its whole history and its lineage."""
    with dead_letters(database) as engine, also_databases(also) as others:
        admin = DeadLetterAdmin(engine)
        if (name is None) == (correlation is None):
            raise ConfigurationError("name a group or a letter, or give --correlation")
        if name is None:
            name = admin.correlated(str(correlation))
        group = _group(admin, name)
        found = admin.details(admin.letter_id(name) if group is None else admin.sample(group))
        judged = None if group is None else admin.diagnosis(group)
        relatives = _relatives([engine, *others], found.stored)
    if as_json:
        passed = found.superseded_by
        print_json({"group": None if group is None else asdict(group),
                    "triage": None if judged is None else _triage(judged.triage),
                    "looks_like": None if judged is None else judged.around.verdict,
                    "letter": None if found.stored is None else letter_facts(found.stored),
                    "lineage": None if relatives is None else related_facts(relatives),
                    "superseded_by": None if passed is None else passed.message_id,
                    "revisions": found.revisions,
                    "plans": [asdict(one) for one in found.replays]})  # fmt: skip
        return
    if group is not None:
        _show_group(group)
    if judged is not None:
        _say_judged(judged)
        say("")
    if found.stored is not None:
        show_letter(found.stored)
        _say_relatives(relatives)
    if found.superseded_by is not None:
        newer = found.superseded_by
        say(f"  a newer event of its key was handled {when(newer.handled_at)}: message "
            f"{newer.message_id} at {newer.position}")  # fmt: skip
    for one in found.revisions:
        by = one["transform"] or one["actor"]
        say(f"revision {one['revision']} by {by}, {when(one['made_at'])}: {one['reason']}")
        say_as_is(foreign(one["difference"]))
    for plan in found.replays:
        say(f"plan {plan.plan_id[-8:]}: {_outcome(plan)} {foreign(plan.note or '')}")
    if group is not None and group.pending:
        start = group.group_id[:8]
        say(f"next: holdfast dlq simulate {start} --handler MODULE:FUNCTION, then  holdfast dlq "
            f"replay {start} --dry-run")  # fmt: skip
    elif group is None and found.stored is not None:
        say_next(found.stored)


def _relatives(databases: Sequence[Engine], kept: StoredLetter | None) -> Related | None:
    if kept is None:
        return None
    made, by = kept.letter.message, kept.letter.culprit
    return related(databases, made.id, correlation_id=made.correlation_id, group=by.group)


def _say_relatives(relatives: Related | None) -> None:
    if relatives is None:
        say("  lineage: off, or older than its retention: nothing here is written about this "
            "message; Consumer(lineage=Lineage(SERVICE)) turns it on")  # fmt: skip
        return
    for line in related_lines(relatives):
        say(foreign(f"  {line}"))


def _outcome(plan: PlannedReplay) -> str:
    # A claim that is over, of an aborted plan, was never sent or never confirmed.
    return "not confirmed" if plan.state == "claimed" and not plan.is_live else plan.state


def explain(
    name: Name, *, config: Config = None, database: Database, as_json: Json = False
) -> None:
    """Say why messages are in one group."""
    with dead_letters(database) as engine:
        admin = DeadLetterAdmin(engine)
        group = _group(admin, name)
        if group is None:
            group = admin.group_of(admin.letter_id(name))
        judged = admin.diagnosis(group)
    around = judged.around
    if as_json:
        print_json(
            {"group_id": group.group_id, "algorithm": group.algorithm,
             "fingerprint": group.fingerprint, **group.hints,
             "looks_like": around.verdict, "why": around.why, "triage": _triage(judged.triage)}
        )  # fmt: skip
        return
    say(f"group {group.group_id}: {group.title}")
    say(f"fingerprint {group.fingerprint} by algorithm {group.algorithm}, from the "
        f"{group.hints.get('by', 'failure')} of the error")  # fmt: skip
    for hint in _hints(group.hints.get("hints")):
        say(f"  {hint}")
    _say_judged(judged)
    say("a message is in this group when all of that is the same, and so are the consumer group, "
        "the topic and the handler; line numbers and values do not count")  # fmt: skip


def _group(admin: DeadLetterAdmin, name: str) -> FailureGroup | None:
    try:
        return admin.group(name)
    except NotFound:
        return None


def _say_judged(found: Diagnosis) -> None:
    few = sum(one.pending for one in found.triage.values()) < MOST
    of = "triage" if few else f"triage of the latest {MOST:,}"
    for verdict, one in found.triage.items():
        due = one.next_retry
        told = "" if due is None else f", the next {when(due)} by  holdfast dlq replay --due"
        say(f"  {of}: {_VERDICTS.get(verdict, verdict)}: {one.pending:,}{told}")
    say(f"  looks like: {found.around.verdict} ({found.around.why})")


def _triage(judged: dict[str, Judged]) -> dict[str, Any]:
    return {verdict: one._asdict() for verdict, one in judged.items()}


def _hints(hints: Any) -> list[str]:
    if isinstance(hints, dict):
        return [f"{key}: {value}" for key, value in hints.items()]
    return [str(hint) for hint in hints or ()]


def _show_group(group: FailureGroup) -> None:
    now = SYSTEM_CLOCK.now().timestamp()
    say(f"group {group.group_id}  {group.state}  {group.kind}/{group.stage}")
    say(f"  {group.title}")
    say(f"  {group.consumer_group} on {group.topic}, handler {group.handler}")
    say(f"  pending {group.pending:,} of {group.total:,}; confirmed {group.confirmed:,}, "
        f"discarded {group.discarded:,}, parked {group.parked:,}")  # fmt: skip
    say(f"  hits {group.keys_text} keys, {group.tenants_text} tenants; "
        f"versions {', '.join(group.versions) or 'unknown'}")  # fmt: skip
    say(f"  first {when(group.first_seen)}, last {ago(group.last_seen, now)}  "
        f"24 h {sparkline(group.trend)}")  # fmt: skip
    if group.owner:
        say(f"  owner {group.owner}")
    if group.note:
        say(foreign(f"  note: {group.note}"))
    if group.state == "muted":
        say(f"  muted until {when(group.muted_until)}")
    say("")
