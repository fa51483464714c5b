"""The `holdfast` command: the composition root, and the only reader of the environment.

A command gets a line in COMMANDS; its module is imported when it is called.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.exits import TOLD
from holdfast.cli.late import Late, LateGroup, add_late

_FIRST, _REPAIR, _REST = "Start with these", "Look closer, and repair", "Set up, and the rest"
_NEXT = (
    "Each command has --help with an example. Settings come from flags, from HOLDFAST_* and from a "
    "TOML file (--config); --json prints for scripts. Completion in your shell: holdfast "
    "--install-completion"
)

COMMANDS = (
    Late("status", "holdfast.cli.doctor:status",
         "Show the whole on one screen, the most urgent first; nothing is changed.",
         "holdfast status --database sqlite:///shop.db --broker sqlite:///broker.db",
         panel=_FIRST),
    Late("db", "holdfast.cli.db:app", "Create and upgrade Holdfast's tables.", panel=_FIRST),
    Late("relay", "holdfast.cli.relay:relay",
         "Publish committed outbox events to the broker, in order per key, at least once.",
         panel=_FIRST),
    Late("consume", "holdfast.cli.consume:consume",
         "Run the handlers of a consumer until SIGTERM or Ctrl-C.", panel=_FIRST),
    Late("dlq", "holdfast.cli.dlq:app", "See what failed and why, try the fix, replay it safely.",
         panel=_FIRST),
    Late("doctor", "holdfast.cli.doctor:doctor",
         "Name each trouble with its fix; nothing is changed.", panel=_FIRST),
    Late("outbox", "holdfast.cli.outbox:app", "Look into the outbox and handle parked keys.",
         panel=_REPAIR),
    Late("keys", "holdfast.cli.keys:app",
         "Keys that a consumer holds back, and what to do about them.", panel=_REPAIR),
    Late("circuits", "holdfast.cli.circuits:app",
         "Circuits that consumers share, and turning them by hand.", panel=_REPAIR),
    Late("saga", "holdfast.cli.saga:app",
         "Run sagas, see where they are, and help those that are parked.", panel=_REPAIR),
    Late("inbox", "holdfast.cli.inbox:app",
         "See and prune what consumers remember of handled messages.", panel=_REPAIR),
    Late("lineage", "holdfast.cli.lineage:app",
         "See which event came of which, what is missing, and who publishes what to whom.",
         panel=_REPAIR),
    Late("lag", "holdfast.cli.lag:lag",
         "Show how far behind a group is in its topics, and whether it moves.",
         "holdfast lag --broker kafka://localhost:9092 --group billing --watch", panel=_REPAIR),
    Late("audit", "holdfast.cli.audit:audit",
         "Show who did what and why, to events, keys, circuits and dead letters; newest first.",
         "holdfast audit --verify --head 17:9f2c…", panel=_REPAIR),
    Late("spark", "holdfast.cli.spark:app",
         "Archive, analyse and replay with Spark what outgrows one machine.", panel=_REPAIR),
    Late("topics", "holdfast.cli.topics:app", "Make topics, and see which there are.",
         panel=_REST),
    Late("group", "holdfast.cli.group:app", "Make consumer groups before the first producer.",
         panel=_REST),
    Late("brokers", "holdfast.cli.brokers:app",
         "List the URL schemes that an installed adapter answers for; prune topics.", panel=_REST),
    Late("cdc", "holdfast.cli.cdc:cdc",
         "Publish the rows of tables, then every change of them, as Debezium's change events.",
         panel=_REST),
    Late("version", "holdfast.cli.version:version", "Print the version.", panel=_REST),
)  # fmt: skip

app = typer.Typer(
    name="holdfast",
    cls=LateGroup,
    epilog=f"{_NEXT}\n\n{TOLD}",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
add_late(app, COMMANDS)


def _tell_version(asked: bool) -> None:
    if asked:
        from holdfast.cli.version import installed

        typer.echo(installed())
        raise typer.Exit


@app.callback()
def holdfast(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_tell_version,
                     help="Print the version and end."),
    ] = False,
) -> None:  # fmt: skip
    """Reliability middleware for message producers and consumers, around any broker."""


def main(args: list[str] | None = None) -> Any:
    """Run the command; an expected failure is one clear sentence, never a traceback."""
    from holdfast.cli import logs

    logs.configure(logs.LogFormat.TEXT, logs.LogLevel.WARNING)
    try:
        return app(args=args)
    except KeyboardInterrupt:
        from holdfast.cli.exits import EXIT_INTERRUPTED

        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception as error:
        from holdfast.cli.failures import fail, is_expected  # needs SQLAlchemy, which is slow

        if not is_expected(error):
            raise
        fail(error)
