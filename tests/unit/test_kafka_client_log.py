"""What kafka-python says of an outage is one line when it begins and one when it ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.brokers.kafka.client_log import ClientLog, spoken_to
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    import pytest

MANAGER = logging.getLogger("kafka.net.manager")
REFUSED = "Connection failed: KafkaConnectionError: 111 ECONNREFUSED"


def test_an_outage_is_one_line_when_it_begins_and_one_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The end tells how many were left out; the next outage is news again."""
    log = ClientLog(VirtualClock())
    with caplog.at_level(logging.INFO), spoken_to(log):
        for _ in range(100):
            MANAGER.error(REFUSED)
        log.fell()
        log.answered()
        MANAGER.error(REFUSED)
    ended = "Kafka answers again; 99 reports of failed tries were left out"
    assert [record.getMessage() for record in caplog.records] == [REFUSED, ended, REFUSED]


def test_what_is_left_out_can_be_had_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever looks for the cause of an outage turns it on."""
    with caplog.at_level(logging.DEBUG), spoken_to(ClientLog(VirtualClock())):
        MANAGER.error(REFUSED)
        MANAGER.error(REFUSED)
    assert [record.levelname for record in caplog.records] == ["ERROR", "DEBUG"]


def test_an_outage_whose_end_nobody_notices_is_said_again_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One server of several may be away for days."""
    clock = VirtualClock()
    with caplog.at_level(logging.INFO), spoken_to(ClientLog(clock)):
        for _ in range(4):
            MANAGER.error(REFUSED)
            clock.advance(200)
    assert len(caplog.records) == 2


def test_what_is_no_failed_try_is_always_written(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong password or a missing right is no outage."""
    texts = ["SaslHandshake failed: SaslAuthenticationFailedError", "Topic t is not authorized"]
    with caplog.at_level(logging.INFO), spoken_to(ClientLog(VirtualClock())):
        for text in texts * 3:
            MANAGER.error(text)
    assert [record.getMessage() for record in caplog.records] == texts * 3


def test_other_clients_of_the_program_speak_as_they_like(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The filter is for the threads of our clients; it knows no others."""
    with caplog.at_level(logging.INFO):
        with spoken_to(ClientLog(VirtualClock())):
            pass
        for _ in range(3):
            MANAGER.error(REFUSED)
    assert [record.getMessage() for record in caplog.records] == [REFUSED] * 3
