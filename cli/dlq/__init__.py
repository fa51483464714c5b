"""`holdfast dlq`: problems instead of messages, and replay without fear."""

from __future__ import annotations

import typer

from holdfast.cli.exits import TOLD
from holdfast.cli.late import Late, LateGroup, add_late

HELP = (
    "See what failed and why, try the fix, replay it safely.\n\n"
    "The usual way: stats, groups, show, simulate, replay --dry-run, replay, audit --verify."
)
COMMANDS = (
    Late("stats", "holdfast.cli.dlq.look:stats_",
         "Show how many wait, since when, of what, and whether the outflow keeps up.",
         "holdfast dlq stats --database sqlite:///shop.db"),
    Late("groups", "holdfast.cli.dlq.look:groups", "List the problems, the most urgent first.",
         "holdfast dlq groups --topic orders"),
    Late("triage", "holdfast.cli.dlq.analytics:triage",
         "Group all dead letters anew, of the store or of files, and find what is one cause.",
         "holdfast dlq triage --from parquet:letters/ --report triage.html"),
    Late("trends", "holdfast.cli.dlq.analytics:trends",
         "Show failures by hour, unusual times, and which deploy changed something.",
         "holdfast dlq trends --since 28d --report trends.html"),
    Late("blast-radius", "holdfast.cli.dlq.analytics:blast_radius",
         "Show which entities and tenants are hit, and what they are worth.",
         "holdfast dlq blast-radius --dimension customers.parquet"),
    Late("show", "holdfast.cli.dlq.show:show",
         "Show a group with a sample, or one dead letter with its whole history.",
         "holdfast dlq show 7f3a"),
    Late("list", "holdfast.cli.dlq.look:list_", "List dead letters by filters.",
         "holdfast dlq list --problem 7f3a --limit 20"),
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
    Late("verify", "holdfast.cli.dlq.plans:verify",
         "Check a plan's manifest against what the consumer confirmed.",
         "holdfast dlq verify 9c41"),
    Late("discard", "holdfast.cli.dlq.letters:discard",
         "Close dead letters for good without replaying them.",
         "holdfast dlq discard 7f3a --reason 'test data'"),
    Late("reopen", "holdfast.cli.dlq.letters:reopen",
         "Make parked or discarded letters pending again, with all their replays.",
         "holdfast dlq reopen --id 1b2c --reason 'fixed in 1.4.2'"),
    Late("ack", "holdfast.cli.dlq.problems:ack", "Say that somebody looks after a group.",
         "holdfast dlq ack 7f3a --reason 'OPS-12' --owner ada"),
    Late("mute", "holdfast.cli.dlq.problems:mute", "Keep a group out of alerts for a while.",
         "holdfast dlq mute 7f3a --for 4h --reason 'deploy at noon'"),
    Late("note", "holdfast.cli.dlq.problems:note",
         "Keep a note with a group, for whoever looks next.",
         "holdfast dlq note 7f3a 'the supplier sends no VAT since Monday'"),
    Late("resolve", "holdfast.cli.dlq.problems:resolve",
         "Say that a problem is over; refused while a message of it is pending.",
         "holdfast dlq resolve 7f3a --reason 'fixed in 1.4.2'"),
    Late("alerts", "holdfast.cli.dlq.problems:alerts",
         "Tell each new or returned problem once, to a webhook or a command.",
         "holdfast dlq alerts --webhook https://chat.example/hook"),
    Late("regroup", "holdfast.cli.dlq.problems:regroup",
         "Group all dead letters anew after an upgrade of the algorithm; the map is kept.",
         "holdfast dlq regroup --reason 'upgrade to 2.0'"),
    Late("edit", "holdfast.cli.dlq.letters:edit",
         "Make a new revision of a dead letter, or of a whole group by a function.",
         "holdfast dlq edit 1b2c --payload-file fixed.json --reason 'OPS-12'"),
    Late("export", "holdfast.cli.dlq.export:export",
         "Write dead letters as JSON lines or Parquet.",
         "holdfast dlq export --problem 7f3a --to letters.jsonl"),
    Late("collect", "holdfast.cli.dlq.collect:collect",
         "Move dead letters from broker topics into the store, again and again.",
         "holdfast dlq collect orders.billing.dlq --broker kafka://host:9092"),
    Late("prune", "holdfast.cli.dlq.letters:prune",
         "Delete closed dead letters that are old enough; open ones are never deleted.",
         "holdfast dlq prune --older-than 30d --yes"),
    Late("audit", "holdfast.cli.audit:letters",
         "Show who did what and why; --verify checks the hash chain.",
         "holdfast dlq audit --verify"),
    Late("forget", "holdfast.cli.dlq.letters:forget",
         "Destroy the key of a data subject: its encrypted fields are gone for good.",
         "holdfast dlq forget customer-17 --reason 'erasure request 4711'"),
)  # fmt: skip

app = typer.Typer(cls=LateGroup, help=HELP, epilog=TOLD, no_args_is_help=True, add_completion=False)
add_late(app, COMMANDS)
