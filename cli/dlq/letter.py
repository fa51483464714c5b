"""One dead letter, for people and for scripts: whole, save what nobody may read."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from holdfast.cli.display import encoded, excerpt, foreign, say
from holdfast.cli.dlq.shown import when
from holdfast.dlq.letter import DeadLetter
from holdfast.dlq.redaction import holds_credentials
from holdfast.dlq.rows import CONFIRMED, PENDING
from holdfast.dlq.vault import masked
from holdfast.scrubbing import REDACTED

_MOST_PATHS = 5


def show_letter(letter: DeadLetter, row: Any) -> None:
    """Print *letter*, which is kept in *row*."""
    made, failures = letter.message, row["occurrences"]
    say(f"dead letter {letter.dlq_id}  {row['state']}  message {made.id} ({made.type})")
    _say_whence(letter, row)
    times = "once" if failures == 1 else f"{failures} times since {when(row['first_failed_at'])}"
    say(f"  failed {times}, last {when(row['last_failed_at'])}; attempts {row['attempts']}, "
        f"timeouts {letter.history.timeouts}, replayed {row['replay_count']} times")  # fmt: skip
    if row["state"] != PENDING:
        say(f"  {row['state']} by {row['closed_by']} on {when(row['closed_at'])}: "
            f"{foreign(row['closed_reason'] or 'no reason was kept')}")  # fmt: skip
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
        say(foreign(f"  trace:\n{excerpt(letter.failure.trace.encode(), most=4000)}"))
    for name, value in _readable(letter):
        say(foreign(f"  header {name}: {excerpt(value, most=200)}"))
    say(foreign(f"  payload:\n{excerpt(masked(made.payload, letter.governance.sealed))}"))


def say_next(letter: DeadLetter, state: str) -> None:
    """Say what can be done about one *letter*."""
    name = letter.dlq_id[:8]
    if state == PENDING:
        say(f"next: holdfast dlq replay --id {name} --dry-run, or edit {name} first, or "
            f"discard --id {name}")  # fmt: skip
    elif state != CONFIRMED:
        say(f"next: holdfast dlq reopen --id {name} --reason …  makes it pending again")


def letter_facts(letter: DeadLetter, row: Any) -> dict[str, Any]:
    """Return *letter*, which is kept in *row*, as scripts get it."""
    parts = ("coordinates", "culprit", "failure", "history", "lineage")
    made, hidden = letter.message, letter.governance
    names = ("state", "group_id", "tenant", "verdict", "due_at")
    return {
        "dlq_id": letter.dlq_id,
        **{name: row[name] for name in names},
        "closed": None if row["state"] == PENDING else {
            "at": row["closed_at"], "by": row["closed_by"], "reason": row["closed_reason"]
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


def _say_whence(letter: DeadLetter, row: Any) -> None:
    source, made, by = letter.coordinates, letter.message, letter.culprit
    key = "no key" if made.key is None else f"key {made.key_text}"
    place = "" if source.position is None else f"/{source.lane} at {source.position}"
    say(f"  {made.topic}{place}, {key}; event {made.time.isoformat()}")
    code = f" ({by.function})" if by.function and by.function != by.handler else ""
    say(f"  {by.group} with {by.handler}{code}, version {by.service_version or 'unknown'}"
        + (f" ({by.git_sha[:12]})" if by.git_sha else "") + f", on {by.host or 'unknown'}"
        + (f"; tenant {row['tenant']}" if row["tenant"] else ""))  # fmt: skip
    say(f"  {letter.failure.kind.value}/{letter.failure.stage.value} in group "
        f"{row['group_id'][:8]}; triage: {row['verdict'] or 'not judged'}"
        + ("" if row["due_at"] is None else f", retried {when(row['due_at'])}"))  # fmt: skip


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
