"""What a stream tells of itself: a row of status every few seconds, and one event for each incident."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from backupd.app.binlogs.stream_records import CatalogRecorder
from backupd.app.context.incidents import DESTINATION, PURGE, SPOOL, STREAM, Incidents, Pair
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import owner
from backupd.app.runtime.catalog_writer import Scribe
from backupd.binlog.archive.archiver import Behind
from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import NO_ROOM, StreamEvent, StreamEventKind, StreamState, StreamStatus
from backupd.model.errors import BackupdError
from backupd.model.event import Event, Severity
from backupd.model.text import Clock, format_duration, format_size, format_time
from policies.schema import Policy

OUT_OF_REACH = timedelta(minutes=1)
"""A server that cannot be reached for so long is an incident; a restart of it takes less."""
LATE = timedelta(minutes=5)
"""A destination that is behind for so long is an incident, where no objective says less."""
_CHECKPOINTS = 6
SUBJECT = "stream"
SILENT = timedelta(minutes=1)
"""A stream writes a row every few seconds."""
STOPPED = "stopped"
"""The state in the last row of a process that ended well; all others are those of ``StreamState``."""

Told = Callable[[Incidents], object]


class Follower(Protocol):
    """Brings what is stored to ``place``, one of the others. ``standing``: ``behind_since``, ``error``."""

    place: str

    def standing(self) -> Mapping[str, Any]: ...

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


class StreamReport:
    """``heard`` from any thread, everything else from one."""

    def __init__(
        self,
        server: ServerSettings,
        scribe: Scribe,
        recorder: CatalogRecorder,
        spool: Spool,
        clock: Clock,
        followers: Sequence[Follower] = (),
    ) -> None:
        self.followers = tuple(followers)
        self._server, self._scribe, self._recorder, self._spool = server, scribe, recorder, spool
        self._clock = clock
        self._started_at = clock()
        self._incidents = Incidents(scribe.catalog)
        self._limit = behind_limit(server.policy)
        self._purge: StreamEvent | None = None
        self._lock = threading.Lock()

    def heard(self, event: StreamEvent) -> None:
        """Of what happens to the stream: the danger of a purge has no state that could be asked for later."""
        if event.kind in (StreamEventKind.PURGE_ALARM, StreamEventKind.PURGE_OVER):
            with self._lock:
                self._purge = event

    def beat(self, status: StreamStatus, behind: Mapping[str, Behind], troubles: Mapping[str, str]) -> None:
        """Write everything down. A catalog that takes nothing is told in the log, once, by the scribe."""
        now = self._clock()
        told = [*self._of_stream(status, now), *self._of_destinations(behind, now)]
        document = self._document(status, behind, troubles, now)
        try:
            self._recorder.flush()
            self._scribe.ask(lambda catalog: catalog.binlogs.set_stream_state(self._server.name, document, now))
            self._scribe.ask(lambda _catalog: [tell(self._incidents) for tell in told])
        except BackupdError:
            return  # it was told, and the next beat says all of it again

    def over(self, status: StreamStatus, behind: Mapping[str, Behind]) -> None:
        """The process ends."""
        now = self._clock()
        document = {**self._document(status, behind, {}, now), "state": STOPPED, "ended": str(status.state)}
        try:
            self._recorder.flush()
            self._scribe.ask(lambda catalog: catalog.binlogs.set_stream_state(self._server.name, document, now))
        except BackupdError as error:
            say(
                "stream-trouble",
                f"its last row was not written: {error.message}",
                level=logging.WARNING,
                server=self._server.name,
            )

    # -- the row

    def _document(
        self, status: StreamStatus, behind: Mapping[str, Behind], troubles: Mapping[str, str], now: datetime
    ) -> dict[str, Any]:
        standing = self._recorder.standing()
        destinations = {}
        for name in self._server.required:
            one, confirmed = behind.get(name), standing.get(name)
            destinations[name] = {
                "bytes_behind": one.bytes if one else None,
                "behind_since": format_time(one.since) if one and one.since else None,
                "error": (one.error if one else "") or troubles.get(name, ""),
                "confirmed_at": format_time(confirmed.at) if confirmed else None,
                "lag_seconds": round(max(0.0, (now - confirmed.at).total_seconds()), 3) if confirmed else None,
            }
        destinations |= {
            follower.place: {"bytes_behind": None, "confirmed_at": None, "lag_seconds": None, **follower.standing()}
            for follower in self.followers
        }
        return {
            **status.as_json(),
            "pid": os.getpid(),
            "owner": owner(),
            "started_at": format_time(self._started_at),
            "spool_bytes": self._spool.bytes(),
            "max_spool_bytes": self._leg_bytes(),
            "rss_bytes": _resident(),
            "destinations": destinations,
            "trouble": troubles.get("", ""),
        }

    def _leg_bytes(self) -> int:
        leg = self._server.policy.binlog
        return leg.max_spool if leg is not None else 0

    # -- the incidents

    def _of_stream(self, status: StreamStatus, now: datetime) -> list[Told]:
        name = self._server.name
        told: list[Told] = []
        lost = status.state is StreamState.WAITING and now - status.since >= OUT_OF_REACH
        if status.state is StreamState.FAILED or lost:
            told.append(
                self._broken(
                    STREAM,
                    SUBJECT,
                    f"the binary log of {name} is not streamed: {status.error}",
                    now,
                    hint=f"is the server up? `backupd check {name}` names what an account or a host "
                    "lacks. It is tried again all the time, and goes on where it was",
                )
            )
        elif status.state in (StreamState.STREAMING, StreamState.PAUSED):
            told.append(self._mended(STREAM, SUBJECT, f"the binary log of {name} is streamed again", now))
        if status.state is StreamState.PAUSED:
            hint = (
                "make room there: what else lies in it?"
                if status.error == NO_ROOM
                else "see why a destination does not take them (backupd binlog status), or raise binlog.max_spool"
            )
            told.append(
                self._broken(
                    SPOOL,
                    SUBJECT,
                    f"the spool of {name} is full, so its binary log is not copied any more: "
                    f"{format_size(self._spool.bytes())} wait for a destination",
                    now,
                    detail=status.error,
                    hint=f"{hint}; the server must keep its binary log until then, and it goes on by itself",
                )
            )
        elif status.state is StreamState.STREAMING:
            told.append(self._mended(SPOOL, SUBJECT, f"the spool of {name} has room again", now))
        with self._lock:
            purge = self._purge
        if purge is not None and purge.kind is StreamEventKind.PURGE_ALARM:
            told.append(self._broken(PURGE, SUBJECT, purge.message, now, detail=purge.detail, hint=purge.hint))
        elif purge is not None or status.state is StreamState.STREAMING:
            message = purge.message if purge else f"no binary log of {name} is about to be lost"
            told.append(self._mended(PURGE, SUBJECT, message, now))
        return told

    def _of_destinations(self, behind: Mapping[str, Behind], now: datetime) -> list[Told]:
        told: list[Told] = []
        for name, one in behind.items():
            if one.since is None:
                told.append(
                    self._mended(DESTINATION, name, f"{name} has all binary logs of {self._server.name} again", now)
                )
            elif now - one.since >= self._limit:
                late = format_duration((now - one.since).total_seconds())
                told.append(
                    self._broken(
                        DESTINATION,
                        name,
                        f"{name} lacks binary logs of {self._server.name} since {late}: "
                        f"{format_size(one.bytes)} wait in the spool",
                        now,
                        detail=one.error,
                        hint=(
                            "nothing is lost: they are stored when it takes them; until then they are on this host only"
                        ),
                    )
                )
        return told

    def _broken(
        self,
        pair: Pair,
        subject: str,
        message: str,
        now: datetime,
        *,
        detail: str = "",
        hint: str = "",
    ) -> Told:
        event = Event(
            now,
            pair.broken,
            Severity.ERROR,
            message,
            server=self._server.name,
            subject=subject,
            detail=detail,
            hint=hint,
        )
        return lambda incidents: incidents.broken(pair, event)

    def _mended(self, pair: Pair, subject: str, message: str, now: datetime) -> Told:
        event = Event(now, pair.mended, Severity.INFO, message, server=self._server.name, subject=subject)
        return lambda incidents: incidents.mended(pair, event)


def behind_limit(policy: Policy) -> timedelta:
    """How long a destination may lack something before somebody has to know."""
    checkpoint = policy.binlog.checkpoint if policy.binlog is not None else timedelta(0)
    return max(policy.objectives.rpo or LATE, _CHECKPOINTS * checkpoint)


def _resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
