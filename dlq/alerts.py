"""Alerts: each new or returned problem that nobody knows is told once, at least.

Where alerts go: a webhook, or a command that is run without a shell.
"""

from __future__ import annotations

import http.client
import logging
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from sqlalchemy import or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.transactions import committed
from holdfast.dlq.store.closing import look_around
from holdfast.dlq.store.counters import fold
from holdfast.dlq.store.groups import FailureGroup, FailureGroups, GroupFilter, verdicts
from holdfast.dlq.store.rows import PENDING
from holdfast.dlq.store.schema import group, message
from holdfast.dlq.triage import TriageVerdict
from holdfast.errors import ConfigurationError, Transient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine


log = logging.getLogger("holdfast.dlq")
_CLAIM_SECONDS = 120.0
_LOUD = GroupFilter(states=("new", "regressed"))


class Alerts:
    """Tells hooks about problems that wait for a person; acknowledged and muted ones are quiet.

    What is tried again by itself is told once it has used up its retries. A group is claimed
    for two minutes while it is told, so several processes do not all tell it; who dies in
    between leaves it to the next. A hook that fails is asked again, the others are not.
    """

    def __init__(
        self, engine: Engine, hooks: Sequence[Hook], *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._engine = engine
        self._hooks = hooks
        self._clock = clock
        self._taken: dict[str, set[int]] = {}
        """The hooks that took the alert of a group while another one did not."""

    def run_once(self) -> int:
        """Tell what is to be told now; return how many groups were told to every hook."""
        fold(self._engine, clock=self._clock)
        told = 0
        groups = FailureGroups(self._engine, clock=self._clock)
        # All of them: among a hundred large problems that are known, a small new one is news.
        loud = {one.group_id for one in groups.figures(_LOUD, limit=None)}
        for name in self._untold():
            if name in loud and self._claim(name) and self._tell(groups.find(name)):
                told += 1
        return told

    def _untold(self) -> list[str]:
        # Any of its messages: the first may be closed, and others have used up their retries.
        alarming = select(message.c.seq).where(
            message.c.group_id == group.c.group_id,
            message.c.state == PENDING,
            message.c.verdict != TriageVerdict.RETRY.value,
        )
        query = (
            select(group.c.group_id)
            .where(_is_free(self._clock.now().timestamp()), alarming.exists())
            .order_by(group.c.first_seen)
        )
        with self._engine.connect() as db:
            return list(db.execute(query).scalars())

    def _claim(self, name: str) -> bool:
        now = self._clock.now().timestamp()
        return self._mark(name, -(now + _CLAIM_SECONDS), _is_free(now))

    def _tell(self, one: FailureGroup) -> bool:
        alert = alert_of(self._engine, one)
        taken = self._taken.setdefault(one.group_id, set())
        for number, hook in enumerate(self._hooks):
            if number in taken:
                continue
            try:
                hook.tell(alert)
                taken.add(number)
            except Exception as error:  # noqa: BLE001 - one hook's trouble is not the others'
                log.warning("group %s is told again later: %s", one.group_id, error)
        if len(taken) < len(self._hooks):
            self._mark(one.group_id, None)
            return False
        del self._taken[one.group_id]
        return self._mark(one.group_id, self._clock.now().timestamp())

    def _mark(self, name: str, value: float | None, *conditions: Any) -> bool:
        def work(db: Connection) -> bool:
            where = (group.c.group_id == name, *conditions)
            return db.execute(update(group).where(*where).values(alerted_at=value)).rowcount == 1

        return committed(self._engine, work, clock=self._clock)


def alert_of(engine: Engine, one: FailureGroup) -> dict[str, Any]:
    """Return what hooks are told: the problem, never a payload."""
    with engine.connect() as db:
        around = look_around(db, one.group_id)
        judged = verdicts(db, one.group_id)
    return {
        "group": one.group_id,
        "state": one.state,
        "title": one.title,
        "class": one.kind,
        "verdicts": list(judged),
        "topic": one.topic,
        "consumer_group": one.consumer_group,
        "handler": one.handler,
        "pending": one.pending,
        "keys": one.keys_text,
        "tenants": one.tenants_text,
        "versions": one.versions,
        "first_seen": one.first_seen,
        "last_seen": one.last_seen,
        "looks_like": around.verdict,
        "why": around.why,
        "see": f"holdfast dlq show {one.group_id}",
    }


def _is_free(now: float) -> Any:
    """Return the condition that a group is untold, or its claim is over."""
    claimed = group.c.alerted_at
    return or_(claimed.is_(None), (claimed < 0) & (claimed > -now))


_SCHEMES = ("http://", "https://")


class Hook(Protocol):
    """Somebody who wants to know."""

    def tell(self, alert: dict[str, Any]) -> None:
        """Return once the alert was taken; any error means that it was not."""
        ...


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow nobody: the answer stays what it is, an error."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def _apart(url: str) -> tuple[str, dict[str, str]]:
    """Return *url* without its user info, and that as a header."""
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    name, _, password = user.partition(":")
    both = f"{urllib.parse.unquote(name)}:{urllib.parse.unquote(password)}"
    basic = f"Basic {b64encode(both.encode()).decode()}"
    return parts._replace(netloc=host).geturl(), {"authorization": basic}


def _said(error: Exception) -> str:
    """Return what went wrong, in words that hold nothing of the address."""
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered {error.code}"
    reason = getattr(error, "reason", error)
    told = getattr(reason, "strerror", None)
    return f"{type(reason).__name__}: {told}" if isinstance(told, str) else type(reason).__name__


@dataclass(frozen=True, slots=True, repr=False)
class Webhook:
    """Posts the alert as JSON; an answer of 2xx means taken, anything else that it was not.

    A redirect is not followed: it would turn the POST into a GET, whose answer says nothing.
    Path, query and user info of the address are often the secret, so only its host is shown.
    """

    url: str
    timeout: float = 10.0

    def __post_init__(self) -> None:
        if not self.url.startswith(_SCHEMES):
            raise ConfigurationError("the webhook is no address: write http:// or https://")
        try:
            parts = urllib.parse.urlsplit(self.url)
            known = parts.hostname is not None and (parts.port is None or parts.port > 0)
        except ValueError:
            known = False
        if not known:
            raise ConfigurationError("the webhook is no address: write http://host:port/path")
        if self.timeout <= 0:
            raise ConfigurationError(f"webhook timeout {self.timeout:g}: use seconds above 0")

    def tell(self, alert: dict[str, Any]) -> None:
        """Post *alert*."""
        address, headers = _apart(self.url)
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            address,
            data=msgspec.json.encode(alert),
            headers={"content-type": "application/json", "user-agent": "holdfast", **headers},
            method="POST",
        )
        try:
            with _OPENER.open(request, timeout=self.timeout):
                return
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            # Not from it: its text may hold the address.
            said = _said(error)
        raise Transient(f"the webhook at {self.host} did not take the alert: {said}")

    @property
    def host(self) -> str:
        """The part of the address that may be shown."""
        parts = urllib.parse.urlsplit(self.url)
        port = "" if parts.port is None else f":{parts.port}"
        return f"{parts.scheme}://{parts.hostname}{port}"

    def __repr__(self) -> str:
        return f"Webhook({self.host!r})"


@dataclass(frozen=True, slots=True)
class Command:
    """Runs a program with the alert as JSON on its standard input; 0 means taken.

    No shell is involved and nothing of the alert gets into the arguments, so no text of an
    error can become a command.
    """

    arguments: Sequence[str]
    timeout: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str) or not self.arguments:
            raise ConfigurationError(
                f"command {self.arguments!r}: give program and arguments as a list, e.g. "
                '["/usr/bin/notify", "--urgent"]'
            )

    def tell(self, alert: dict[str, Any]) -> None:
        """Run the program."""
        name = self.arguments[0]
        try:
            done = subprocess.run(  # noqa: S603 - a list, without a shell
                list(self.arguments),
                input=msgspec.json.encode(alert),
                timeout=self.timeout,
                capture_output=True,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Transient(f"command {name} did not take the alert: {error}") from error
        if done.returncode != 0:
            said = done.stderr[:200].decode("utf-8", "replace")
            raise Transient(f"command {name} ended with {done.returncode}: {said}")
