"""One server's binary log stream: a dump over a connection, begun again whenever it ends, and a spool that it fills.

Whatever ends a dump, the next one begins a little before the end of the newest file that is here; only what was shown
to go on from what is here comes into the spool (see ``session`` and ``connection_start``). The server is asked every
few seconds for its position, because a dump does not show everything: a RESET that made a file of the same name,
another server behind the same address.
"""

from __future__ import annotations

import errno
import functools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from backupd.binlog.acknowledgement import OFF, Evidence
from backupd.binlog.acknowledger import Acknowledger
from backupd.binlog.archive_state import Committed
from backupd.binlog.connection_start import Approach, Start
from backupd.binlog.continuity import Comparison, first_moment
from backupd.binlog.purge_alarm import PurgeAlarm, purge_alarm
from backupd.binlog.session import End, Question, Session, Watch, answered, fetch
from backupd.binlog.spool_files import Doubt, Spool, Spooled
from backupd.binlog.spool_repair import Mender
from backupd.binlog.stream_status import NO_ROOM, StreamEvent, StreamEventKind, StreamState, StreamStatus
from backupd.engine.receiver.endings import DamagedDumpError, EndKind, end_kind
from backupd.engine.receiver.receiver import connection_id
from backupd.engine.server.binary_logs import BinlogSource, ListedLog, SourceState, UnloggedError
from backupd.engine.sql.client import is_denied
from backupd.model.binlog import FilePosition
from backupd.model.errors import (
    BackupdError,
    CancelledError,
    ConfigurationError,
    DamagedError,
    RefusedError,
    ServerError,
    StreamError,
    ToolError,
)
from backupd.model.server_facts import Position
from backupd.model.text import Clock, format_size

ArchivedTo = Callable[[], FilePosition | None]
"""Number of the oldest file that is not archived everywhere, and how far into it the archive is; None: not known."""

GivenUp = Callable[[], Sequence[tuple[str, int]]]
"""Branch and number of files that were not archived whole."""

_ROOM_AGAIN = 0.8
_ROOM_SECONDS = 0.5
_SAID = {
    EndKind.LOST: "the connection to the server broke",
    EndKind.NOT_THERE: "the server no longer has the file that was asked for",
    EndKind.UNOPENED: "the server cannot open a file of its binary log",
    EndKind.NO_NEXT: "the server has removed its binary logs",
    EndKind.TORN: "the server cannot read its own binary log",
    EndKind.TWIN: "another program reads this server's binary log with the same server ID",
    EndKind.DENIED: "this account may not read the server's binary log",
    EndKind.ALL: "the server ended the connection",
    EndKind.OTHER: "the server ended the connection with an error",
}
_HINTS = {
    EndKind.TWIN: "check for a second backupd with a copy of this spool: each needs its own spool",
    EndKind.DENIED: "grant REPLICATION SLAVE ON *.* to the account, and check its password file",
}
_NO_ROOM_HINT = "nothing is lost as long as the server keeps its binary logs"
_FAILED = (EndKind.TWIN, EndKind.DENIED)
_UNREADABLE = (EndKind.TORN, EndKind.NOT_THERE, EndKind.NO_NEXT, EndKind.UNOPENED)
_KNOWN_SECONDS = 15.0
"""For so long what is known of a server whose commits wait is gone by: it cannot have written much meanwhile."""
_RESTARTED = timedelta(seconds=2)
"""A server whose start is said to have been so much later was started again."""
_UNOPENED_PAUSES = 5
"""A file that the server cannot open is given up after so many longest pauses: it may only have too many open."""


def _with(state: SourceState, file: Spooled) -> SourceState:
    """With a file that it has sent since."""
    if any(log.number == file.number for log in state.logs):
        return state
    return replace(state, logs=(*state.logs, ListedLog(file.name, file.number, file.size)))


@dataclass(frozen=True, slots=True)
class Pace:
    """In seconds.

    ``tick``: how often the stream looks whether to stop; ``poll``: how often it asks the server; ``purge``: what the
    server will remove. ``stall``: after how long without a byte a connection counts as dead when the server is ahead,
    and without a heartbeat in any case; ``first``, ``most``: pauses before a new attempt, doubled each time. ``away``:
    the most while the server is out of reach or writes no binary log. Whether its data was replaced meanwhile can only
    be seen soon after it is back. While nothing has come for ``quiet``: ``rest`` instead of ``tick``, and ``seldom``
    instead of ``poll``.
    """

    tick: float = 0.1
    poll: float = 2.0
    stall: float = 20.0
    purge: float = 60.0
    first: float = 1.0
    most: float = 60.0
    away: float = 5.0
    quiet: float = 60.0
    rest: float = 2.0
    seldom: float = 30.0


@dataclass
class Streamer:
    """Fills ``spool`` from ``source`` until it has to stop.

    ``server``: its name. ``installation``: what distinguishes this backupd from others that stream the same server.
    ``wanted``: where the oldest restorable physical backup stands; a first stream begins there. ``max_spool_bytes``: it
    pauses beyond that. ``on_event``: hears what happens. ``archived_to``: up to where all destinations have the log.
    ``acknowledge``: what commits wait for, as of the policy: OFF, SPOOL or DESTINATION; ``evidence``: what was shown of
    that before. ``committed``: up to where every required destination holds the log, asked again after ``rouse``;
    ``on_asked``: hears that a commit waits for that.
    ``given_up``: files of a branch behind which a gap is recorded; asked once, and brought back where the server has
    them. ``ours``: uuids of the servers that are known to be the one that is meant. ``known``: the server a moment ago;
    where its commits wait, it is not asked for all of that again before the dump begins.
    """

    server: str
    source: BinlogSource
    spool: Spool
    _: KW_ONLY
    installation: str
    wanted: Position | None
    max_spool_bytes: int
    clock: Clock
    on_event: Callable[[StreamEvent], None]
    archived_to: ArchivedTo = lambda: None
    given_up: GivenUp | None = lambda: ()
    ours: Callable[[], Collection[str]] = lambda: ()
    pace: Pace = Pace()
    acknowledge: str = OFF
    evidence: Evidence | None = None
    committed: Callable[[], Committed | None] = lambda: None
    on_asked: Callable[[], None] = lambda: None
    known: SourceState | None = None
    _known_at: float = field(default_factory=time.monotonic)
    _id: int = 0
    _dump: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _began: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)
    _purge_due: float = 0.0
    _torn: tuple[tuple[str, int, int], bool] | None = None
    _torn_since: float = 0.0
    _damaged_at: tuple[str, int, int] | None = None
    _begun: tuple[tuple[str, int, int], datetime | None] | None = None
    """Behind what the last dump was to go on, and when its server had started, where that was asked."""
    _crashes: bool = False
    _damage: str = ""
    _mend_due: float = 0.0
    _lost_files: list[int] = field(default_factory=list)
    _lives: int = 0
    _copied: int = 0
    """Bytes of the log that was last copied as a whole, until all of it is here."""
    _alarm: PurgeAlarm | None = None

    def __post_init__(self) -> None:
        self._pause = self._mend_pause = self.pace.first
        self._status = StreamStatus(StreamState.WAITING, self.clock())
        self._approach = Approach(
            self.server, self.source, self.spool, self._fetch, self.wanted, self.ours, self.clock, self.on_event
        )
        self._acknowledger = Acknowledger(
            self.server,
            self.acknowledge,
            self.spool,
            self.evidence,
            committed=self.committed,
            on_asked=self.on_asked,
            clock=self.clock,
            report=self.on_event,
        )
        self._mender = Mender(
            self.server, self.source, self.spool, self._fetch, self._approach.look, self.clock, self.on_event
        )

    def run(self, stop: threading.Event) -> None:
        """Stream until ``stop`` is set. Raises BusyError when another process streams this server, RefusedError when
        the spool cannot be used, DamagedError when its state cannot be read."""
        self._stop = stop
        with self.spool.locked(), self._acknowledger:
            while not stop.is_set():
                wait = self._attempt(stop)
                if wait:
                    stop.wait(wait)
            self._set(StreamState.WAITING, "")

    def rouse(self) -> None:
        """From any thread: ``committed`` has more."""
        self._acknowledger.rouse()

    def status(self) -> StreamStatus:
        """From any thread."""
        with self._guard:
            status = replace(self._status, acknowledgement=self._acknowledger.evidence)
        newest = self.spool.newest()
        if newest is None:
            return replace(status, branch="", server_position=None, server_time=None)
        if newest.branch != status.branch:  # the server was last looked at when it had another history
            status = replace(status, server_position=None, server_time=None)
        return replace(status, branch=newest.branch, file=newest.name, pos=newest.size)

    # --- one attempt after the other

    def _attempt(self, stop: threading.Event) -> float:
        """Gives the seconds to wait before the next one."""
        try:
            return self._full() if self._is_full() else self._life(stop)
        except CancelledError:
            return 0
        except (ServerError, ToolError, StreamError) as error:
            if isinstance(error, ServerError) and is_denied(error):
                return self._failed(error)
            return self._lost(error.message, error.detail, error.hint, away=isinstance(error, ServerError))
        except (ConfigurationError, RefusedError, DamagedError) as error:
            pause = self._failed(error)
            return self._backoff(away=True) if isinstance(error, UnloggedError) else pause
        except OSError as error:
            return self._unwritable(error)

    def _unwritable(self, error: OSError) -> float:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._no_room(str(error))
        return self._failed(
            RefusedError(
                f"the spool {self.spool.folder} cannot be used: {error.strerror}",
                detail=str(error.filename or ""),
                hint="the spool must belong to the user that runs backupd",
            )
        )

    def _life(self, stop: threading.Event) -> float:
        begun = self._look_for_crash()
        again = self._as_before()
        state = again[0] if again is not None else self._approach.look()
        self._end_last_dump()
        self.spool.write_anew()
        self._id = connection_id(self.server, self.installation, self.source.connected_ids() - {self._id})
        if again is not None:
            start = again[1]
        else:
            self._mend_files(newest=True)
            start = self._past_torn(state) or self._approach.back(state) or self._approach.where(state)
        self._look_for_given_up(start, state)
        self._lives += 1
        acknowledging = self._acknowledger.how(start, state.logs)
        written = state.position.pos if again is None and state.position.file == start.name else None
        with self._guard:
            self._status = replace(self._status, server_position=None, server_time=None)
        had = (start.kept.number, start.kept.size) if start.kept else (0, 0)
        self._begun, since = begun, time.monotonic()
        try:
            with Session(
                self.spool,
                self.source.connection,
                start,
                connection_id=self._id,
                written=written,
                stall=self.pace.stall,
                is_whole=self._approach.is_whole,
                follows=self._approach.follows,
                source_id=state.server_id,
                acknowledging=acknowledging,
            ) as session:
                self._dump = session.thread_id
                watch = Watch(
                    state,
                    poll=self.pace.poll,
                    stall=self.pace.stall,
                    clock=self.clock,
                    quiet=self.pace.quiet,
                    seldom=self.pace.seldom,
                )
                why = self._follow(session, watch, stop)
                if session.current is not None:  # how it was last is what it is compared with when it is back
                    self.spool.note(watch.seen)
                    if session.acknowledges and not why:
                        last = replace(state, position=watch.position)
                        self.known, self._known_at = _with(last, session.current), time.monotonic()
        except DamagedDumpError:
            self._look_into_damage(session.dumped)
            raise
        torn = session.end is not None and session.end.kind is EndKind.TORN and session.current is None
        if (session.diverged or torn) and start.kept is not None and self._compare(start):
            return self._backoff(away=False)
        if session.current is not None and self._is_mending_due():
            self._bring_back()
            self._mend_files(newest=False)
            return self._backoff(away=False)
        if session.received > had or time.monotonic() - since > self.pace.most:
            self._pause = self.pace.first
        if session.end is not None:
            return self._ended(session.end)
        return self._lost(why, "", "", away=False) if why else 0

    def _as_before(self) -> tuple[SourceState, Start] | None:
        """Where a server's commits wait: as of Approach, once. Raises ServerError."""
        known = self.known
        if self.acknowledge == OFF or known is None or time.monotonic() - self._known_at > _KNOWN_SECONDS:
            return None
        if self._torn is not None or self._crashes or self.spool.doubts():
            return None
        found = self._approach.as_before(known)
        self.known = None
        return found

    def _look_for_crash(self) -> tuple[tuple[str, int, int], datetime | None]:
        """Was the server started again since two dumps in a row ended before anything came? Then reading on is what it
        crashes by, and it would for ever. Gives what the next dump is to be compared by. Raises ServerError."""
        newest = self.spool.newest()
        coordinate = (*newest.key, newest.size) if newest is not None else ("", 0, 0)
        if self._begun is None or self._begun[0] != coordinate:
            return coordinate, None
        before, started = self._begun[1], self.source.started()
        self._crashes = before is not None and started - before >= _RESTARTED
        return coordinate, started

    def _end_last_dump(self) -> None:
        """Its server may not have noticed yet that nobody receives it any more. Raises ServerError."""
        dump, self._dump = self._dump, 0
        if dump:
            self.source.end_dump(dump)

    def _compare(self, start: Start) -> bool:
        """The server does not go on from what is here: what it has is fetched as a whole, and compared. False: the
        server itself cannot read it."""
        if start.kept is None:
            raise ValueError("nothing is here to compare")
        torn = False
        try:
            path = self._fetch(start.name)
        except ToolError as error:
            path = self.spool.incoming / start.name
            if end_kind(error.detail) is not EndKind.TORN or not path.exists():
                raise
            torn = True
        with start.kept.path.open("rb") as kept, path.open("rb") as fresh:
            comparison = Comparison(kept, fresh)
            equal = comparison.go_on()
        if torn and not comparison.differs:
            return False
        if equal >= start.kept.path.stat().st_size:
            raise ToolError(
                f"two copies of {start.name} from {self.source.address} differ",
                hint="backupd requests it again; if this recurs, check the network between the hosts",
            )
        self._approach.differs(start, equal)
        return True

    def _follow(self, session: Session, watch: Watch, stop: threading.Event) -> str:
        """Until something ends it. Gives why the connection is given up, "" when that is reported elsewhere."""
        question: Question | None = None
        while not stop.is_set():
            session.receive(self.pace.rest if watch.is_quiet() else self.pace.tick)
            if session.diverged or session.end is not None:
                return ""
            self._acknowledger.acknowledge(session)
            if session.current is not None and self._set(StreamState.STREAMING, ""):
                self._notify(
                    StreamEventKind.CONNECTED,
                    f"the binary log of {self.server} is streamed from"
                    f" {self.source.address}, file {session.current.name}",
                )
            watch.moved(session.moved)
            if session.silent_for > self.pace.stall:
                return f"no data was received for {self.pace.stall:.0f} s: the connection is dead"
            if question is None and watch.is_due():
                question = self._ask(session)
            if question is not None and question.state.done():
                watch.asked()
                why, question = self._heed(question, session, watch), None
                if why or self._acknowledger.may_begin(session, watch):
                    return why
            if watch.is_room_due() and self._is_full():
                return ""
            if session.current is not None and self._is_mending_due():
                return ""
        return ""

    # --- damage in the spool, or on the way

    def _is_mending_due(self) -> bool:
        return time.monotonic() >= self._mend_due and bool(self._lost_files or self.spool.doubts())

    def _mend_files(self, *, newest: bool) -> None:
        """Mend the newest file, or the others. The newest one comes first: the server's file is compared with it. The
        others follow once the server's history was seen to continue what is here."""
        last = self.spool.newest()
        for doubt in self.spool.doubts():
            if (last is not None and doubt.key == last.key) is newest:
                self._mend(doubt)

    def _bring_back(self) -> None:
        """Each once: what was given up, by a process that knew less or when the server's answer was another."""
        while self._lost_files:
            self._mender.bring_back(self._lost_files.pop())

    def _look_for_given_up(self, start: Start, state: SourceState) -> None:
        """Once in each process: of the present branch, and listed at the server."""
        if self.given_up is None:
            return
        asked, self.given_up = self.given_up, None
        here = {file.number for file in self.spool.files() if file.branch == start.branch.id}
        listed = {log.number for log in state.logs}
        self._lost_files = [
            number
            for branch, number in asked()
            if branch == start.branch.id
            and number < start.number
            and number in listed
            and number not in here
            and not self.spool.is_fatal(start.branch.file(number))
        ]

    def _mend(self, doubt: Doubt) -> None:
        self._mend_due = time.monotonic() + self._mend_pause
        self._mend_pause = min(self._mend_pause * 2, self.pace.most)
        self._mender.mend(doubt)
        self._mend_pause, self._mend_due = self.pace.first, 0.0

    def _look_into_damage(self, name: str) -> None:
        """What came of a file is damaged. When that happens twice at the same position, is the server's own file
        damaged? Then the stream goes on behind it: raises ToolError. Raises as ``damaged_there``."""
        newest = self.spool.newest()
        if newest is None:
            return
        coordinate = (*newest.key, newest.size)
        before, self._damaged_at = self._damaged_at, coordinate
        if coordinate != before or not (why := self._mender.damaged_there(name)):
            return
        self._torn = (coordinate, True)
        self._damage = why
        error = ToolError(
            f"{name} is damaged at {self.source.address}, and nothing behind that can be archived before the server "
            "begins its next file",
            detail=why,
            hint="run FLUSH BINARY LOGS there, and take a full backup",
        )
        if self._status.state is StreamState.WAITING:  # else it is reported as the reason of the interruption
            self._notify(StreamEventKind.LOST, f"{self.server}: {error.message}", error.detail, error.hint)
        raise error

    def _ask(self, session: Session) -> Question:
        """Ask the server for its position."""
        files = time.monotonic() >= self._purge_due
        look = functools.partial(self._approach.look, files=files, dump=session.thread_id)
        return Question(self.clock(), session.received, answered(look))

    def _heed(self, question: Question, session: Session, watch: Watch) -> str:
        """Why the connection cannot go on, by the server's answer; "" when it can."""
        number, size = question.received
        try:
            state = question.state.result()
        except ServerError as error:
            if watch.is_stalled():
                return f"{error.message}, and no data was received for {self.pace.stall:.0f} s"
            with self._guard:
                self._status = replace(self._status, error=error.message)
            return ""
        if why := watch.contradiction(state, number, size):
            return why
        self._acknowledger.saw(state, session)
        session.is_written(state.position)
        at = state.position
        ahead = (int(at.file.rpartition(".")[2]), at.pos) > (number, size)
        if ahead and watch.is_stalled():
            return (
                f"no data was received for {self.pace.stall:.0f} s although the server is at {at.file}:{at.pos}:"
                " the connection is dead"
            )
        if number:
            with self._guard:
                branch, moment = session.start.branch.id, min(state.server_time, question.asked_at)
                self._status = replace(self._status, branch=branch, server_position=at, server_time=moment, error="")
            if watch.is_note_due():
                self.spool.note(watch.seen)
            if state.logs:
                self._look_for_purge(state)
        return ""

    def _ended(self, end: End) -> float:
        said = _SAID[end.kind]
        newest = self.spool.newest()
        if end.kind in _UNREADABLE and newest is not None:
            coordinate, now = (*newest.key, newest.size), time.monotonic()
            again = self._torn is not None and self._torn[0] == coordinate
            self._torn_since = self._torn_since if again else now
            waited = end.kind is not EndKind.UNOPENED or now - self._torn_since >= self.pace.most * _UNOPENED_PAUSES
            self._torn = (coordinate, again and waited)
        if end.kind in _FAILED:
            return self._failed(ServerError(f"{said} ({self.server})", detail=end.said, hint=_HINTS[end.kind]))
        # The server can be asked, or this life had not begun: each new one costs it a connection, so they get rarer.
        return self._lost(said, end.said, _HINTS.get(end.kind, ""), away=False)

    def _past_torn(self, state: SourceState) -> Start | None:
        """Behind a position where the server could not go on, twice: the next file that it may be able to read."""
        newest, crashes, self._crashes = self.spool.newest(), self._crashes, False
        if newest is None and crashes:
            return self._approach.skip_first(state)
        if newest is None or not (crashes or self._torn == ((*newest.key, newest.size), True)):
            return None
        self._torn = None
        start = self._approach.skip(newest, state, self._damage, fatal=crashes)
        if start is not None:
            self._damage = ""
        return start

    def _fetch(self, name: str) -> Path:
        if self.spool.is_fatal(name):
            raise ToolError(f"{name} is not copied from {self.source.address}: the server crashes when it reads it")
        self._copied = self.source.size_of(name)
        path = fetch(
            self.source.connection,
            self.spool,
            name,
            connection_id=self._id,
            stall=self.pace.stall,
            cancel=self._stop,
            at_least=self._copied,
        )
        self._copied = 0
        return path

    # --- room

    def _is_full(self) -> bool:
        """Over its bound (or still nearly so), with files whose archiving will make room."""
        paused = self._status.state is StreamState.PAUSED
        limit = self.max_spool_bytes * _ROOM_AGAIN if paused else self.max_spool_bytes
        return any(file.ended for file in self.spool.files()) and self.spool.bytes() > limit

    def _full(self) -> float:
        self._acknowledger.interrupted("the spool is full")
        if self._set(StreamState.PAUSED, "the spool is full"):
            self._notify(
                StreamEventKind.PAUSED,
                f"the stream of {self.server} pauses: the spool holds more than {self.max_spool_bytes} bytes",
                hint="a destination is slow or down; the stream continues when there is room. Nothing is lost as long"
                " as the server keeps its binary logs",
            )
        if time.monotonic() >= self._purge_due:
            self._look_for_purge(self._approach.look())
        return _ROOM_SECONDS

    def _no_room(self, detail: str) -> float:
        self._acknowledger.interrupted(NO_ROOM)
        room, self._copied = self._copied, 0
        if self._set(StreamState.PAUSED, NO_ROOM):
            words = f"the stream of {self.server} pauses: {NO_ROOM}"
            needed = (
                f"a log is copied again as a whole, which needs {format_size(room)} beside what is there, whatever "
                "`max_spool` is: free as much"
                if room
                else "free space there"
            )
            self._notify(StreamEventKind.PAUSED, words, detail, f"{needed}; {_NO_ROOM_HINT}")
        self.spool.clear_incoming()
        return self._backoff(away=False)

    # --- purge

    def _look_for_purge(self, state: SourceState) -> None:
        self._purge_due = time.monotonic() + self.pace.purge
        archived, alarm = self.archived_to(), None
        if archived is not None:
            alarm = purge_alarm(archived[0], self._written_until(archived[0]), state, self.source.expiry())
        before, self._alarm = self._alarm, alarm
        if alarm is not None and (before is None or (before.file, before.gone) != (alarm.file, alarm.gone)):
            self._notify(
                StreamEventKind.PURGE_ALARM,
                f"{self.server}: {alarm.message}",
                hint="find out why a destination is behind (`backupd binlog status`), or let the server keep its"
                " binary logs longer: SET GLOBAL binlog_expire_logs_seconds = ...",
            )
        elif alarm is None and before is not None:
            self._notify(StreamEventKind.PURGE_OVER, f"{self.server}: {before.file} is archived, or kept long enough")

    def _written_until(self, number: int) -> datetime | None:
        """When the file was finished: when the next one that is here began; else it was, at the earliest, when the
        stream was last whole."""
        files = self.spool.files()
        later = next((file for file in files if file.number > number and file.branch == files[-1].branch), None)
        if later is not None:
            return first_moment(later.path)
        seen = self.spool.seen()
        return seen.at if seen is not None else None

    # --- reports

    def _lost(self, why: str, detail: str, hint: str, *, away: bool) -> float:
        self._acknowledger.interrupted(why)
        if self._set(StreamState.WAITING, why, away=away):
            self._notify(StreamEventKind.LOST, f"the stream of {self.server} is interrupted: {why}", detail, hint)
        return self._backoff(away=away)

    def _failed(self, error: BackupdError) -> float:
        self._acknowledger.interrupted(error.message)
        if self._set(StreamState.FAILED, error.message):
            words = f"the stream of {self.server} has stopped: {error.message}"
            self._notify(StreamEventKind.FAILED, words, error.detail, error.hint)
        return self.pace.most

    def _backoff(self, *, away: bool) -> float:
        most = min(self.pace.away, self.pace.most) if away else self.pace.most
        pause = min(self._pause, most)
        self._pause = min(pause * 2, most)
        return pause

    def _set(self, state: StreamState, error: str, *, away: bool = False) -> bool:
        """Is it another state than before?"""
        with self._guard:
            before = self._status
            changed = before.state is not state or not self._began
            self._began = True
            restarts, since = max(0, self._lives - 1), self.clock() if changed else before.since
            self._status = replace(before, state=state, error=error, away=away, restarts=restarts, since=since)
        return changed

    def _notify(self, kind: StreamEventKind, message: str, detail: str = "", hint: str = "") -> None:
        self.on_event(StreamEvent(kind, self.clock(), message, detail, hint))
