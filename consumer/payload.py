"""The payload: brought to its newest version and decoded to what the handler annotates."""

from __future__ import annotations

from typing import Any, ClassVar

from holdfast import upcast
from holdfast.codec import JsonCodec
from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.layer import Call, Layer, Stage
from holdfast.message import Message


class Payload(Layer):
    """Decodes once per run; what cannot be decoded is poison, no attempt is made.

    A handler whose first parameter is annotated `Message` gets the message as it came.
    """

    stage: ClassVar[Stage] = Stage.DECODE
    label: ClassVar[str] = "decode"

    def __init__(self, annotation: Any, *, strict: bool) -> None:
        self._annotation = annotation
        self._takes_message = annotation is Message
        self._decode = JsonCodec().decoder_for(None if self._takes_message else annotation)
        self._strict = strict

    def describe(self) -> str:
        """Say the type."""
        if self._takes_message:
            return "nothing: the handler takes the message" + (", strict" if self._strict else "")
        kind = "JSON" if self._annotation is None else getattr(self._annotation, "__name__", "")
        return (kind or str(self._annotation)) + (", strict" if self._strict else "")

    def enter(self, call: Call) -> None:
        """Put the decoded payload in the place of the first argument."""
        message = call.message
        if message is None:
            raise ConfigurationError("a handler of a Consumer runs with a message: use handle()")
        if self._strict and message.correlation_id is None:
            raise PoisonMessage(
                f"message {message.id} has no correlation id: send one, or use strict=False"
            )
        newest = upcast.default.apply(message)
        call.args = (newest.unmarked() if self._takes_message else self._decode(newest.payload),)
