"""The transaction around one attempt: dedup row and handler writes commit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sqlalchemy.orm import Session

from holdfast.layer import Call, Layer, Stage

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine


class Transaction(Layer):
    """A fresh session for each attempt, committed when the handler returns."""

    stage: ClassVar[Stage] = Stage.TRANSACTION
    label: ClassVar[str] = "transaction"

    def __init__(self, engine: Engine, *, inject: bool) -> None:
        self._engine = engine
        self._inject = inject

    def describe(self) -> str:
        """Say which database."""
        return self._engine.url.render_as_string(hide_password=True)

    def enter(self, call: Call) -> None:
        """Begin."""
        call.session = Session(self._engine)
        if self._inject:
            call.kwargs["session"] = call.session

    def leave(self, call: Call) -> None:
        """Commit; only after this may the broker be told."""
        with call.session as session:
            session.commit()

    def fail(self, call: Call, error: BaseException) -> None:
        """Leave nothing behind."""
        call.session.close()
