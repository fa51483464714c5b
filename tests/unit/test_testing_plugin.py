"""The package is of use without pytest, and with it by fixtures and the kit."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

TESTS = """
import pytest

from holdfast.brokers import connect
from holdfast.message import Message
from holdfast.testing import Crash, Fault, crash_before
from holdfast.testing.conformance import BrokerConformance


def test_the_broker_lives_on_the_virtual_clock(virtual_clock, scripted_broker):
    scripted_broker.create_topic("t")
    scripted_broker.sink().publish([Message.new("t", b"a")])
    source = scripted_broker.source(["t"], group="g")
    [delivery] = source.poll(1, 0)
    source.release(delivery, blame=False, delay=60)
    assert source.poll(1, 0) == []
    virtual_clock.advance(60)
    assert len(source.poll(1, 0)) == 1
    scripted_broker.inject(Fault(point="flush", effect=crash_before))
    with pytest.raises(Crash):
        source.flush()


class TestUrlAsAttribute(BrokerConformance):
    url = "memory:by-attribute"

    @pytest.fixture
    def broker(self):
        return connect(self.url)

    def test_the_stage_knows_it(self, stage):
        assert stage.url == "memory:by-attribute"


class TestUrlAsFixture(BrokerConformance):
    @pytest.fixture
    def url(self):
        return "memory:by-fixture"

    @pytest.fixture
    def broker(self, url):
        return connect(url)

    def test_the_stage_knows_it(self, stage):
        assert stage.url == "memory:by-fixture"


class TestWithoutBroker(BrokerConformance):
    def test_the_error_says_what_to_write(self, request):
        with pytest.raises(NotImplementedError, match="needs a fixture `broker`"):
            request.getfixturevalue("stage")
"""


def test_the_fixtures_and_the_kit_work_in_somebody_elses_suite(tmp_path: Path) -> None:
    """The plugin brings both fixtures; an adapter gives its URL as attribute or fixture."""
    suite = tmp_path / "test_theirs.py"
    suite.write_text(TESTS)
    chosen = "virtual_clock or stage_knows or error_says or (Url and publish_returns_one)"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*pytest, "-p", "holdfast.testing.plugin", "-k", chosen, "-W", "error", str(suite)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 passed" in ended.stdout, ended.stdout


def test_the_package_does_not_need_pytest() -> None:
    """Only the kit and the plugin import it."""
    program = (
        "import sys; sys.modules['pytest'] = None; import holdfast.testing as t; "
        "t.ScriptedBroker(clock=t.VirtualClock()); t.FaultProxy('127.0.0.1', 9).close()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
