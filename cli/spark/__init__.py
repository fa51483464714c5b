"""`holdfast spark`: jobs for what outgrows one machine, with a local session by default."""

from __future__ import annotations

import typer

from holdfast.cli.exits import TOLD
from holdfast.cli.late import Late, LateGroup, add_late

HELP = (
    "Archive, analyse and replay with Spark what outgrows one machine.\n\n"
    "A job runs on this machine unless --master names a cluster, or --remote a Spark Connect "
    "server. Sources are written as one word: parquet:FOLDER, archive:FOLDER, a database URL, or "
    "a broker URL with ?topic=….\n\n"
    "The usual way: archive first, then ask the archive."
)
COMMANDS = (
    Late("archive", "holdfast.cli.spark.archive:app",
         "Keep dead letters as partitioned files: add, compact, expire, erase, show.",
         "holdfast spark archive add --from postgresql+psycopg://… --to /data/letters"),
    Late("plan", "holdfast.cli.spark.replay:plan",
         "Freeze a replay plan of any size, divided into lanes by key; nothing is sent.",
         "holdfast spark plan 7f3a --lanes 16 --reason 'fixed in 1.4.2'"),
    Late("replay", "holdfast.cli.spark.replay:replay",
         "Send a plan with lanes, or send it on: one task per lane.",
         "holdfast spark replay 9c41 --reason 'fixed in 1.4.2'"),
    Late("verify", "holdfast.cli.spark.replay:verify",
         "Compare a plan with lanes, its ledger, and what the consumers confirmed.",
         "holdfast spark verify 9c41"),
    Late("transform", "holdfast.cli.spark.transform:transform",
         "Bring a whole topic or archive to another, through a versioned transform.",
         "holdfast spark transform --from kafka://host:9092?topic=orders --to "
         "kafka://host:9092?topic=orders.v2 --with shop.fixes:cents@2 --checkpoint /data/cents"),
    Late("stream", "holdfast.cli.spark.stream:stream",
         "Store dead letters from topics of Kafka as they come, each once.",
         "holdfast spark stream --from kafka://host:9092?topic=orders.billing.dlq --checkpoint "
         "/data/offsets --every 10s"),
    Late("triage", "holdfast.cli.spark.triage:triage",
         "Group all dead letters anew, find what is one cause, write groups back.",
         "holdfast spark triage --from archive:/data/letters --report triage.html"),
    Late("trends", "holdfast.cli.spark.trends:trends",
         "Show failures by hour, unusual times, and which deploy changed something.",
         "holdfast spark trends --from archive:/data/letters --since 28d"),
    Late("blast-radius", "holdfast.cli.spark.blast_radius:blast_radius",
         "Show which entities and tenants are hit, and what they are worth.",
         "holdfast spark blast-radius --from archive:/data/letters --dimension customers.parquet"),
    Late("poison-patterns", "holdfast.cli.spark.poison_patterns:poison_patterns",
         "Find the fields and values that failed payloads have and healthy ones have not.",
         "holdfast spark poison-patterns --from archive:/data/letters --healthy parquet:healthy/"),
    Late("schema-usage", "holdfast.cli.spark.schema_usage:schema_usage",
         "Show which types, versions and fields occur, since when and until when.",
         "holdfast spark schema-usage --from archive:/data/letters --unused-for 90d"),
)  # fmt: skip
"""The jobs; one line each. Put options of your own beside `SparkOptions` of `cli.spark.options`."""

app = typer.Typer(cls=LateGroup, help=HELP, epilog=TOLD, no_args_is_help=True, add_completion=False)
add_late(app, COMMANDS)
