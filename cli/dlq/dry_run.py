"""What a dry run says, for people and for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from sqlalchemy import select

from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.dlq.shown import age
from holdfast.database import reading
from holdfast.dlq.schema import group

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay.dry_run import DryRun

_MOST_GROUPS, _MOST_TITLE = 10, 60


def report(engine: Engine, found: DryRun, *, as_json: bool) -> None:
    """Say what the replay would do, and how to send exactly that."""
    if as_json:
        print_json(asdict(found))
        return
    say(f"would replay {found.count:,} messages of {found.keys:,} keys, canary {found.canary}; "
        "nothing was sent")  # fmt: skip
    titles = _titles(engine, found)
    rows = [("to", topic, count) for topic, count in found.targets.items()]
    rows += [("group", f"{name[:8]} {title[:_MOST_TITLE]}", found.by_group[name])
             for name, title in titles.items()]  # fmt: skip
    if len(titles) < len(found.by_group):
        rest = sum(found.by_group.values()) - sum(found.by_group[name] for name in titles)
        rows.append(("group", f"({len(found.by_group) - len(titles)} more)", rest))
    rows += [("version", version, count) for version, count in found.by_version.items()]
    rows += [("tenant", tenant, count) for tenant, count in found.by_tenant.items()]
    rows += [("set aside", state, count) for state, count in found.aside.items()]
    rows += [("claimed by plan", plan[-8:], n) for plan, n in found.claimed_elsewhere.items()]
    print_table(("", "", "messages"), rows)
    window = "for ever or unknown" if found.dedup_window is None else age(found.dedup_window)
    say(f"oldest event {age(found.oldest_seconds)}; dedup window {window}: "
        + (f"{found.beyond_window:,} are older, the consumer could not tell a duplicate of them"
           if found.beyond_window else "all inside"))  # fmt: skip
    if found.valid is not None:
        say(f"payloads: {found.valid:,} valid, {found.invalid:,} invalid"
            + (f", {found.unread:,} with encrypted fields not read: give --master-key-file"
               if found.unread else "")
            + (f", e.g. {found.invalid_example}" if found.invalid_example else ""))  # fmt: skip
    say(f"order: {found.conflicts:,} held, an earlier one of their key is open or a newer one was "
        "handled" if found.conflicts else "order: no conflicts")  # fmt: skip
    for dlq_id, why in found.aside_examples[:5]:
        say(f"  {dlq_id[:8]}: {why}")
    eta = age(found.seconds)
    if found.assumed_rate is not None:
        eta = f"{eta} at {found.assumed_rate:g}/s, say; without --rate the consumer decides"
    say(f"time: {eta}; manifest {found.hash[:12]} up to number {found.high_water}")
    if found.needs_approval:
        say("a second person must approve it")
    if found.count:
        say(f"next: the same command without --dry-run, with --manifest {found.hash[:12]} and "
            "--reason, sends exactly this")  # fmt: skip


def _titles(engine: Engine, found: DryRun) -> dict[str, str]:
    """Return what the largest of the failure groups are called."""
    largest = list(found.by_group)[:_MOST_GROUPS]
    query = select(group.c.group_id, group.c.title).where(group.c.group_id.in_(largest))
    with reading(engine).connect() as db:
        titles = {name: title for name, title in db.execute(query)}  # noqa: C416 - Rows
    return {name: titles.get(name, "") for name in largest}
