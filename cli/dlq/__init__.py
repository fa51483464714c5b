"""`holdfast dlq`: problems instead of messages, and replay without fear."""

from __future__ import annotations

import typer

from holdfast.cli.late import Late, LateGroup, add_late

HELP = (
    "See what failed and why, try the fix, replay it safely.\n\n"
    "The usual way: stats, groups, show, simulate, replay --dry-run, replay, audit --verify."
)
EXITS = (
    "Exit codes: 0 done · 1 nothing found, or the answer is no · 2 fix the command or its "
    "settings · 3 database or broker down, try again · 5 the replay was stopped by a stop "
    "condition · 6 sent but not all confirmed · 7 done, but some failed again or were set aside "
    "· 8 paused or aborted · 130 interrupted, resumable"
)

COMMANDS = (
    Late("stats", "holdfast.cli.dlq.stats:stats_",
         "Show how many wait, since when, of what, and whether the outflow keeps up.",
         "holdfast dlq stats --database sqlite:///shop.db"),
    Late("groups", "holdfast.cli.dlq.look:groups", "List the problems, the most urgent first.",
         "holdfast dlq groups --topic orders"),
    Late("show", "holdfast.cli.dlq.show:show",
         "Show a group with a sample, or one dead letter with its whole history.",
         "holdfast dlq show 7f3a"),
    Late("list", "holdfast.cli.dlq.look:list_", "List dead letters by filters.",
         "holdfast dlq list --group 7f3a --limit 20"),
    Late("explain", "holdfast.cli.dlq.show:explain", "Say why messages are in one group.",
         "holdfast dlq explain 7f3a"),
    Late("simulate", "holdfast.cli.dlq.simulate:simulate",
         "Run a handler on a group in a rolled-back transaction and predict the replay.",
         "holdfast dlq simulate 7f3a --handler shop.handlers:bill"),
    Late("replay", "holdfast.cli.dlq.replay:replay",
         "Send dead letters again to the group that failed: canary, ramp, then the rest.",
         "holdfast dlq replay 7f3a --canary 20 --rate 500/s --reason 'fixed in 1.4.2'"),
    Late("plans", "holdfast.cli.dlq.plans:app", "Watch and steer replay plans.",
         "holdfast dlq plans list --open"),
    Late("verify", "holdfast.cli.dlq.verify:verify",
         "Check a plan's manifest against what the consumer confirmed.",
         "holdfast dlq verify 9c41"),
    Late("discard", "holdfast.cli.dlq.acts:discard",
         "Close dead letters for good without replaying them.",
         "holdfast dlq discard 7f3a --reason 'test data'"),
    Late("reopen", "holdfast.cli.dlq.acts:reopen",
         "Make parked or discarded letters pending again, with all their replays.",
         "holdfast dlq reopen --id 1b2c --reason 'fixed in 1.4.2'"),
    Late("ack", "holdfast.cli.dlq.care:ack", "Say that somebody looks after a group.",
         "holdfast dlq ack 7f3a --reason 'OPS-12' --owner ada"),
    Late("mute", "holdfast.cli.dlq.care:mute", "Keep a group out of alerts for a while.",
         "holdfast dlq mute 7f3a --for 4h --reason 'deploy at noon'"),
    Late("note", "holdfast.cli.dlq.care:note",
         "Keep a note with a group, for whoever looks next.",
         "holdfast dlq note 7f3a 'the supplier sends no VAT since Monday'"),
    Late("resolve", "holdfast.cli.dlq.care:resolve",
         "Say that a problem is over; refused while a message of it is pending.",
         "holdfast dlq resolve 7f3a --reason 'fixed in 1.4.2'"),
    Late("alerts", "holdfast.cli.dlq.alerts:alerts",
         "Tell each new or returned problem once, to a webhook or a command.",
         "holdfast dlq alerts --webhook https://chat.example/hook"),
    Late("regroup", "holdfast.cli.dlq.regroup:regroup",
         "Group all dead letters anew after an upgrade of the algorithm; the map is kept.",
         "holdfast dlq regroup --reason 'upgrade to 2.0'"),
    Late("edit", "holdfast.cli.dlq.edit:edit",
         "Make a new revision of a dead letter, or of a whole group by a function.",
         "holdfast dlq edit 1b2c --payload-file fixed.json --reason 'OPS-12'"),
    Late("export", "holdfast.cli.dlq.export:export",
         "Write dead letters as JSON lines or Parquet.",
         "holdfast dlq export --group 7f3a --to letters.jsonl"),
    Late("collect", "holdfast.cli.dlq.collect:collect",
         "Move dead letters from broker topics into the store, again and again.",
         "holdfast dlq collect orders.billing.dlq --broker kafka://host:9092"),
    Late("prune", "holdfast.cli.dlq.acts:prune",
         "Delete closed dead letters that are old enough; open ones are never deleted.",
         "holdfast dlq prune --older-than 30d"),
    Late("audit", "holdfast.cli.dlq.audit:audit",
         "Show who did what and why; --verify checks the hash chain.",
         "holdfast dlq audit --verify"),
    Late("forget", "holdfast.cli.dlq.acts:forget",
         "Destroy the key of a data subject: its encrypted fields are gone for good.",
         "holdfast dlq forget customer-17 --reason 'erasure request 4711'"),
)  # fmt: skip

app = typer.Typer(
    cls=LateGroup, help=HELP, epilog=EXITS, no_args_is_help=True, add_completion=False
)
add_late(app, COMMANDS)
