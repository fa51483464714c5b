"""The `holdfast` command: the composition root, and the only reader of the environment.

A command gets a line in COMMANDS; its module is imported when it is called.
"""

from __future__ import annotations

from typing import Any

import typer

from holdfast.cli.late import Late, LateGroup, add_late

COMMANDS = (
    Late("relay", "holdfast.cli.relay:relay",
         "Publish committed outbox events to the broker, in order per key, at least once."),
    Late("cdc", "holdfast.cli.cdc:cdc",
         "Publish the rows of tables, then every change of them, as Debezium's change events."),
    Late("consume", "holdfast.cli.consume:consume",
         "Run the handlers of a consumer until SIGTERM or Ctrl-C."),
    Late("keys", "holdfast.cli.keys:app",
         "Keys that a consumer holds back, and what to do about them."),
    Late("circuits", "holdfast.cli.circuits:app",
         "Circuits that consumers share, and turning them by hand."),
    Late("dlq", "holdfast.cli.dlq:app", "See what failed and why, try the fix, replay it safely."),
    Late("outbox", "holdfast.cli.outbox:app", "Look into the outbox and handle parked keys."),
    Late("inbox", "holdfast.cli.inbox:app",
         "See and prune what consumers remember of handled messages."),
    Late("audit", "holdfast.cli.audit:audit",
         "Show who did what and why, to events, keys, circuits and dead letters; newest first.",
         "holdfast audit --verify --head 17:9f2c…"),
    Late("db", "holdfast.cli.db:app", "Create and upgrade Holdfast's tables."),
    Late("doctor", "holdfast.cli.doctor:doctor",
         "Examine the outbox and name each trouble with its fix; nothing is changed."),
    Late("group", "holdfast.cli.group:app", "Make consumer groups before the first producer."),
    Late("topics", "holdfast.cli.topics:app", "Make topics, and see which there are."),
    Late("lag", "holdfast.cli.brokers:lag",
         "Show how many messages a group has not yet settled, by lane.",
         "holdfast lag orders --broker sqlite:///b.db --group billing"),
    Late("brokers", "holdfast.cli.brokers:app",
         "List the URL schemes that an installed adapter answers for; prune topics."),
    Late("version", "holdfast.cli.version:version", "Print the version."),
)  # fmt: skip

app = typer.Typer(
    name="holdfast",
    cls=LateGroup,
    help="Reliability middleware for message producers and consumers, around any broker.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
add_late(app, COMMANDS)


def main(args: list[str] | None = None) -> Any:
    """Run the command; an expected failure is one clear sentence, never a traceback."""
    from holdfast.cli import logs

    logs.configure(logs.LogFormat.TEXT, logs.LogLevel.WARNING)
    try:
        return app(args=args)
    except KeyboardInterrupt:
        from holdfast.cli.failures import EXIT_INTERRUPTED

        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception as error:
        from holdfast.cli.failures import fail, is_expected  # needs SQLAlchemy, which is slow

        if not is_expected(error):
            raise
        fail(error)
