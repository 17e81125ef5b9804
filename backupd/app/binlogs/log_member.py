"""Of a group: the member whose binary log is streamed. The first one is the source, whose log holds everything; it
stays the one until it has been gone for ``failover_after``. Then the next one is compared with what is archived before
the stream goes on with it: one whose log reaches back to that comes before one that has purged the logs between.

How far a replica's log shows what was committed is not known from its clock: it is behind its source. What is confirmed
by it is older by so much. Nothing is confirmed by a member that has been left behind: after a failover the former
source answers, its log is at its end, and what the group commits is in another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from backupd.app.context.logging_setup import say
from backupd.app.context.members import candidates, none_left, rules_of
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.binlog.connection_start import history_of
from backupd.binlog.continuity import first_covered
from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import StreamState, StreamStatus
from backupd.engine.member_probe import lag_of_member
from backupd.engine.server.binary_logs import BinlogSource
from backupd.engine.sql.client import Connection
from backupd.model.errors import BackupdError, ServerError
from backupd.model.event import Severity
from backupd.model.server_facts import Identity
from backupd.model.text import Clock
from backupd.recovery.members import Choice, Following, Preference, apart, choose, follow

SWITCHED = "stream-member"
"""The event of a stream that goes on with another member."""
_EVERY = 30.0
"""Seconds between two looks for another member."""
_ASKED = 2.0
"""Seconds between two questions how far a member is behind."""
_OLD = 20.0
"""Seconds after which an answer to that says nothing any more."""


@dataclass(frozen=True, slots=True)
class Switch:
    """That the stream goes on with another member. ``gap``: what is missing between, "" for nothing."""

    group: str
    member: str
    reason: str
    gap: str

    def note(self, wiring: Wiring) -> None:
        """Raises CatalogError."""
        wiring.note(
            SWITCHED,
            Severity.ERROR if self.gap else Severity.WARNING,
            f"the binary log of {self.group} is streamed from its member {self.member} from now on",
            server=self.group,
            subject=self.member,
            detail="\n".join(filter(None, (self.reason, self.gap))),
            hint="take a full backup now: recovery across the gap is not possible" if self.gap else "",
        )


def log_member(
    server: ServerSettings, spool: Spool, known: Sequence[Identity], now: datetime
) -> tuple[ServerSettings, Switch | None]:
    """The group through the member whose binary log is to be streamed now. ``known``: who answered for the group
    before. Raises RefusedError where there is none."""
    found, following = _found(server, spool, known, now)
    if not following.name:
        raise none_left(server, found)
    say("stream-through", f"{following.name}: {following.reason}", server=server.name)
    member = server.through(following.name, following.reason)
    if not following.switched:
        return member, None
    return member, Switch(server.name, following.name, following.reason, _gap(member, spool))


class MemberWatch:
    """Of a stream that goes through ``server``, a member of ``group``. ``trouble``: why what is committed in the group
    may not be in its log, although it answers; "" for nothing."""

    def __init__(self, group: ServerSettings, server: ServerSettings, spool: Spool, clock: Clock) -> None:
        self._group, self._server, self._spool, self._clock = group, server, spool, clock
        self._due = 0.0
        self._compared: float | None = None
        self._behind: tuple[float, float] | None = None
        self.trouble = ""
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(server.connection(),), name="lag", daemon=True)

    def __enter__(self) -> MemberWatch:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._halt.set()

    def sure_until(self, moment: datetime) -> datetime | None:
        """What is committed in the group by then is in the member's log, where that is at its end at ``moment``. None
        where nobody knows."""
        known = self._behind
        if known is None:
            return None
        seconds, at = known
        age = time.monotonic() - at
        return None if age > _OLD else moment - timedelta(seconds=seconds + (age if seconds else 0.0))

    def is_due(self, status: StreamStatus) -> bool:
        """Is it time to look for another member?"""
        if not (status.state is StreamState.WAITING and status.away) or time.monotonic() < self._due:
            return False
        seen = self._spool.seen()
        return seen is not None and self._clock() - seen.at >= self._group.config.failover_after

    def look(self, known: Sequence[Identity]) -> None:
        """Raises ServerError where the stream is to go on with another member: the next process does that."""
        self._due = time.monotonic() + _EVERY
        _choices, following = _found(self._group, self._spool, known, self._clock())
        if following.switched and following.name:
            name = self._group.name
            raise ServerError(
                f"{self._server.member} is gone; the binary log of {name} is streamed from {following.name}",
                detail=following.reason,
            )

    def _ask(self, connection: Connection) -> None:
        asked = replace(connection, connect_timeout=_OLD / 4, answer_timeout=_OLD / 4)
        while not self._halt.wait(_ASKED if self._behind is not None else 0.1):
            try:
                with asked.connect() as session:
                    while not self._halt.is_set():
                        self._compare()
                        seconds = lag_of_member(session) if not self.trouble else None
                        self._behind = (seconds, time.monotonic()) if seconds is not None else None
                        self._halt.wait(_ASKED)
            except BackupdError as error:
                self._behind = None
                say("stream-lag", str(error), level=logging.DEBUG, server=self._server.name)
                self._halt.wait(_ASKED)

    def _compare(self) -> None:
        """Is it still the one whose log the group's history goes to, as far as the members that answer show?"""
        now = time.monotonic()
        if self._compared is not None and now - self._compared < _EVERY:
            return
        why = apart(candidates(self._group)).get(self._server.member, "")
        trouble = f"what the group commits may not be in the log of {self._server.member}: {why}" if why else ""
        if trouble and trouble != self.trouble:
            say("stream-left-behind", trouble, level=logging.ERROR, server=self._server.name)
        self.trouble, self._compared = trouble, now


def _found(
    server: ServerSettings, spool: Spool, known: Sequence[Identity], now: datetime
) -> tuple[tuple[Choice, ...], Following]:
    branches, seen = spool.branches(), spool.seen()
    current = branches[-1].server_uuid if branches else ""
    rules = replace(rules_of(server, needs_log=True, stay=current), prefer=Preference.SOURCE)
    found = choose(candidates(server), rules)
    following = follow(
        found,
        current=current,
        name=_name_of(server, current, known),
        gone_since=seen.at if seen is not None else None,
        patience=server.config.failover_after,
        now=now,
    )
    if following.switched:  # one that reaches back to what is archived comes first
        tried = [one.name for one in found if not one.left]
        whole = next((name for name in tried if not _gap(server.through(name), spool)), following.name)
        if whole != following.name:
            passed = f"{following.name} has purged binary logs that are not archived"
            following = replace(following, name=whole, reason=f"{following.reason}; {passed}")
    return found, following


def _name_of(server: ServerSettings, uuid: str, known: Sequence[Identity]) -> str:
    """The member that answered as this server last, where it does not answer now."""
    address = next((one.address for one in known if one.uuid == uuid and not one.is_stranger), "")
    for name in server.ways:
        try:
            if address and server.through(name).connection().address == address:
                return name
        except BackupdError:
            continue
    return ""


def _gap(server: ServerSettings, spool: Spool) -> str:
    """What a member has purged that is not archived; "" where its binary logs begin within what is, or nothing is."""
    newest = spool.newest()
    if newest is None:
        return ""
    source = BinlogSource(server.connection())
    try:
        state = source.look()
        history, _unshared = history_of(newest.path, lambda _gtid: True, mariadb=state.mariadb)
        if first_covered(state, history, source.previous_gtids) is not None:
            return ""
    except (BackupdError, OSError) as error:
        return f"the binary logs of {server.member} cannot be compared with what is archived: {error}"
    return (
        f"gap: the binary logs of {server.member} begin with {state.logs[0].name}, after the end of what is archived "
        f"({newest.name}:{newest.size})"
    )
