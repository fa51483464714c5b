"""How a plan is to be sent: options that `holdfast dlq replay` and `holdfast spark plan` share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.dlq.options import share
from holdfast.cli.options import seconds
from holdfast.dlq.replay.plan import Memory, Rate, ReplayOptions, StopPolicy
from holdfast.errors import ConfigurationError
from holdfast.idempotency.inbox import windows

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

_APPROVE_ABOVE = "HOLDFAST_APPROVE_ABOVE"


def _lowered(given: int) -> int:
    """Return *given*, or what the environment says if that is less: a flag only lowers it."""
    ceiling = os.environ.get(_APPROVE_ABOVE, "")
    if not ceiling:
        return given
    if not (ceiling.isascii() and ceiling.isdecimal()):
        raise ConfigurationError(f"{_APPROVE_ABOVE}={ceiling!r}: write digits alone, e.g. 1000")
    return min(given, int(ceiling))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTerms:
    """Canary, ramp, rate and stop conditions; where to; whose approval."""

    canary: Annotated[
        int, typer.Option(min=0, help="So many go first, and all must be confirmed.")
    ] = 20
    ramp: Annotated[str, typer.Option(help="Shares after which confirmations are waited for.")] = (
        "10%,50%"
    )
    rate: Annotated[str | None, typer.Option(help="At most, e.g. 500/s or 30/m.")] = None
    stop_at: Annotated[str, typer.Option(help="Stop when more than this share failed again.")] = (
        "5%"
    )
    patience: Annotated[
        str, typer.Option(help="How long to wait for confirmations that do not come.")
    ] = "60s"
    commutative: Annotated[
        bool, typer.Option("--commutative", help="Order does not matter to the handler.")
    ] = False
    to_topic: Annotated[
        str | None,
        typer.Option(
            help="'shared' for the original topic, or a topic that exists; the group's "
            "private replay topic unless given."
        ),
    ] = None
    dedup_window: Annotated[
        str | None,
        typer.Option(
            help="How long consumers remember what they handled, e.g. 14d, where this database "
            "does not know: their inbox is elsewhere."
        ),
    ] = None
    beyond_window: Annotated[
        bool,
        typer.Option(
            "--beyond-window",
            help="Send also what is older than its consumer remembers: an effect may happen twice.",
        ),
    ] = False
    approve_above: Annotated[
        int,
        typer.Option(
            envvar=_APPROVE_ABOVE,
            min=0,
            callback=_lowered,
            help="Larger plans wait for the approval of somebody else; above the environment's "
            "number always.",
        ),
    ] = 10_000

    def options(self, engine: Engine, *, due: bool = False) -> ReplayOptions:
        """Return them for the store in *engine*, which may know how long consumers remember."""
        window = self.dedup_window
        otherwise = None if window is None else seconds(window, "--dedup-window")
        return ReplayOptions(
            policy=StopPolicy(
                canary=self.canary,
                ramp=tuple(share(text) for text in self.ramp.split(",") if text.strip()),
                failure_ratio=share(self.stop_at),
                patience=seconds(self.patience, "--patience"),
                commutative=self.commutative,
            ),
            rate=Rate.parse(self.rate),
            to_topic=self.to_topic,
            approve_above=self.approve_above,
            # An automatic retry comes soon after the failure, at which dedup knew nothing of it.
            memory=None if due else Memory(windows=windows(engine), otherwise=otherwise),
            beyond_window=self.beyond_window,
        )
