"""Where a connection to the server begins, after the spool was compared with the server's files.

``continuity`` decides; here is what it needs (scans, SQL, a file fetched once more) and what follows from it: branches
and gaps in the spool, events for listeners.

Is another MariaDB server's binary log that of a replica of the one before (``is_kin``)? Its GTIDs alone do not show
that: a domain, a server_id and a number, which two unrelated servers give as well. (Those of MySQL hold the uuid of the
server that gave them.) So transactions that both have by their GTIDs are compared: a replica that keeps its log
(log_slave_updates) writes the same tables and the same commit times.

Measured with MariaDB 10.11.19, its replicas with and without parallel threads: the time is the same, but of a
transaction of several statements, for which the replica writes the time of the last one, not of COMMIT; so it may be
earlier there, and is never later. XA transactions and rows of statements are as in the source's log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from backupd.binlog import continuity
from backupd.binlog.continuity import (
    Compared,
    Comparison,
    Fork,
    GoOn,
    Tail,
    ending_of,
    fingerprint_of,
    first_covered,
    head_of,
)
from backupd.binlog.gtid_position import parted_in
from backupd.binlog.spool_files import LastOf, Spool, Spooled
from backupd.binlog.spool_repair import DamagedCopyError, read, read_fresh, scan_to
from backupd.binlog.stream_status import StreamEvent, StreamEventKind
from backupd.engine.binlog.scan import Scan
from backupd.engine.binlog.xids import shared_xid
from backupd.engine.server.binary_logs import BinlogSource, ListedLog, SourceState, UnloggedError
from backupd.model.binlog import FIRST_EVENT, Branch, BranchReason, Ending, Gap, Transaction, covers
from backupd.model.errors import DamagedError, ServerError, StreamError
from backupd.model.server_facts import Position
from backupd.model.text import Clock, new_id
from backupd.recovery.runs import holder_of_each

_FILES = 4
"""At most so many of the other server's files are copied, from the first that begins within what is here backwards."""
_COMMITTING = timedelta(seconds=2)
"""Between the last statement and COMMIT, of the last transaction that both have: where two histories that began alike
have parted, their times are further from each other."""


def history_of(path: Path, has: Callable[[str], bool], *, mariadb: bool) -> tuple[str, Transaction | None]:
    """What is archived up to the end of a file, as ``holder_of_each`` reads it; the first transaction that the
    server (``has``) lacks."""
    head = head_of(path)
    members = {tuple(member.split("-")[:2]): member for member in (head.gtids if head else ())}
    unshared: list[Transaction] = []

    def look(transaction: Transaction) -> None:
        if mariadb and transaction.gtid:
            members[tuple(transaction.gtid.split("-")[:2])] = transaction.gtid
        if not unshared and not has(transaction.gtid):
            unshared.append(transaction)

    found = read(path, look)
    return (",".join(members.values()) if mariadb else found.gtids_after), unshared[0] if unshared else None


def first_shared(ours: Path, state: SourceState, previous: Callable[[str], str | None]) -> int | None:
    """Number of the newest file of another MariaDB server that begins within ``ours``, by its GTIDs; None without one.
    ``previous``: as of ``continuity``. Raises OSError, and what ``previous`` raises."""
    history, _unshared = history_of(ours, holder_of_each(state.history, mariadb=True), mariadb=True)
    return first_covered(state, history, previous)


def shared_until(spool: Spool, newest: Spooled, has: Callable[[str], bool]) -> tuple[Spooled, ...]:
    """The file in which another server's history (``has``) parts from the newest branch's, and the one before it, as
    far as the spool has them: the newest that begins with nothing but what the other server has. Where no such file
    is here any more, or none says with what it begins, the newest of all. Raises OSError."""
    earlier = [file for file in spool.files() if file.branch == newest.branch and file.number < newest.number]
    files = (newest, *reversed(earlier))
    for at, file in enumerate(files):
        before = _previous(file.path)
        if before is not None and all(map(has, before)):
            return files[at : at + 2]
    return files[:1]


def _previous(path: Path) -> list[str] | None:
    """GTIDs that a file of the spool begins after; None where it does not say."""
    head = head_of(path)
    try:
        before = scan_to(path, head.size).gtids_after if head is not None else None
    except (DamagedError, StreamError):
        return None
    return [member for member in before.split(",") if member] if before is not None else None


def is_kin(
    ours: Iterable[Path],
    state: SourceState,
    number: int,
    fetch: Callable[[str], Path],
    before: Iterable[Transaction] = (),
) -> bool:
    """Does the other server's log (``state``) hold transactions of the files ``ours``, or those of ``before``, and are
    all of these the same? ``number``: its newest file that begins within what is here; ``fetch``: copies one. Raises
    OSError, and what ``fetch`` raises."""
    here = {one.gtid: one for one in before if one.gtid}
    there: list[Transaction] = []

    def keep(one: Transaction) -> None:
        if one.gtid:
            here[one.gtid] = one

    def find(one: Transaction) -> None:
        if one.gtid in here:
            there.append(one)

    for path in ours:
        read(path, keep)
    for log in [log for log in reversed(state.logs) if log.number <= number][:_FILES]:
        read(fetch(log.name), find)
        if there:
            break  # the ones before it are older
    pairs = [(here[one.gtid], one) for one in there]
    return (
        bool(pairs)
        and all(_is_same(*pair) for pair in pairs)
        and any(_second(mine) == _second(other) for mine, other in pairs)
        and _second(pairs[-1][0]) - _second(pairs[-1][1]) <= _COMMITTING
    )


def _is_same(here: Transaction, there: Transaction) -> bool:
    return here.server_id == there.server_id and _tables(here) == _tables(there) and _second(there) <= _second(here)


def _tables(one: Transaction) -> set[tuple[str, str]]:
    return {(change.schema, change.name) for change in one.changes}


def _second(one: Transaction) -> datetime:
    return one.at.replace(microsecond=0)


_LOOKS_BACK = 3
"""How many earlier files are fetched once more to find where a history forked."""


@dataclass(frozen=True, slots=True)
class Start:
    """A connection begins with the server's file ``name`` of ``branch``; ``kept``: what is here of it already."""

    branch: Branch
    number: int
    name: str
    kept: Spooled | None


@dataclass(slots=True)
class Approach:
    """``fetch``: copies one of the server's files as it is now, and says where. ``wanted``, ``ours``: as of
    Streamer."""

    server: str
    source: BinlogSource
    spool: Spool
    fetch: Callable[[str], Path]
    wanted: Position | None
    ours: Callable[[], Collection[str]]
    clock: Clock
    report: Callable[[StreamEvent], None]
    _unlogged: datetime | None = None
    _skipped: tuple[tuple[str, int], int] | None = None
    """The newest file that was here, and the number of the one that was gone on with behind what cannot be read."""

    def look(self, *, files: bool = True, dump: int = 0) -> SourceState:
        """The server as it is; ``dump``: as of ``read_semi_sync``. Where it writes no binary log, that is kept before
        UnloggedError is raised: nobody can see it afterwards. Raises ServerError, OSError."""
        try:
            return self.source.look(files=files, dump=dump)
        except UnloggedError:
            self._unlogged = self._unlogged or self.clock()
            self.spool.note_unlogged(self._unlogged)
            raise

    def as_before(self, known: SourceState) -> tuple[SourceState, Start] | None:
        """Where it goes on with the server that was as ``known`` says a moment ago, without any question that a commit
        holds up which waits for an acknowledgement. None where anything is otherwise: then only ``look`` shows it.
        Raises ServerError."""
        newest, seen = self.spool.newest(), self.spool.seen()
        if newest is None or self.spool.unlogged() or self._unlogged:
            return None
        branch = self.spool.branches()[-1]
        state = self.source.look_again(known)
        if (
            state is None
            or (branch.basename, branch.server_uuid) != (state.basename, state.server_uuid)
            or _listed(state, newest.number) is None
            or continuity.another(seen, state)
            or continuity.restored(seen, state)
        ):
            return None
        return state, Start(branch, newest.number, newest.name, newest)

    def is_whole(self, number: int, size: int) -> bool:
        """Is nothing missing behind ``size`` bytes of the server's file? Raises as ``look``."""
        return continuity.is_whole(self.look(), number, size)

    def follows(self, number: int, following: int) -> bool:
        """Has the server no file between both? Raises as ``look``."""
        return all(not number < log.number < following for log in self.look().logs)

    def where(self, state: SourceState) -> Start:
        """Raises ServerError, ToolError, OSError."""
        newest = self.spool.newest()
        unlogged = self.spool.unlogged() or self._unlogged
        if unlogged is not None:
            found = continuity.after_silence(self.spool.seen(), unlogged, state, self.clock())
            return self._begin(
                found if self.spool.branches() else replace(found, reason=BranchReason.FIRST), state, newest
            )
        if newest is None:
            return self._first(state)
        branch = self.spool.branches()[-1]
        if branch.basename != state.basename:
            return self._renamed(newest, state)
        if _listed(state, newest.number) is None:
            tail = self._tail(newest)
            known = continuity.without_file(tail, self.spool.seen(), state, self.source.previous_gtids)
            return self._follow(known if known is not None else self._look_back(tail, branch, state), newest, state)
        if why := continuity.restored(self.spool.seen(), state):
            return self._was_restored(newest, state, why)
        return Start(branch, newest.number, newest.name, newest)

    def back(self, state: SourceState) -> Start | None:
        """Where it goes on with the server whose stream another one interrupted that was not meant (a wrong port, say).
        None: no such server answers, or its log does not hold what was archived of it, byte for byte. Raises as
        ``where``."""
        found = self._goes_on(state)
        if found is None:
            return None
        self._make_sure(state)
        return self._begin(found, state, self.spool.newest())

    def differs(self, start: Start, equal: int) -> Start | None:
        """The server's file is the same as ``start.kept`` for ``equal`` bytes only: shorter, or another one then.

        None: nothing that counts is different, and the spool was put right: begin there again. Raises DamagedCopyError
        where what came is damaged: that shows nothing.
        """
        if start.kept is None:
            raise ValueError("nothing was compared")
        here = read(start.kept.path)
        if here.damage and not here.end and not self.spool.doubt(start.kept, 0, here.damage).verdict:
            return None  # not even its head shows what it is: that is looked into first
        if here.damage and here.end and equal >= here.end:
            self.spool.cut(start.kept, here.end)
            words = (
                f"{start.kept.name} of {self.server} was damaged in the spool"
                f" behind byte {here.end}, and is fetched from the server again from there"
            )
            self.report(StreamEvent(StreamEventKind.MENDED, self.clock(), words, detail=here.damage))
            return None
        fresh = read_fresh(self.spool.incoming / start.name, self.source.address)
        if fresh.context.checksum == "none":  # then only another copy shows that it came as it is at the server
            with start.kept.path.open("rb") as kept, self.fetch(start.name).open("rb") as again:
                if Comparison(kept, again).go_on() != equal:
                    raise DamagedCopyError(start.name, self.source.address, "two copies of it differ")
        state = self.look()
        tail = self._tail(start.kept)
        found = continuity.with_file(
            tail, self._compared(start.kept, equal, tail), self.spool.seen(), state, self.source.previous_gtids
        )
        if isinstance(found, GoOn):
            self.spool.cut(start.kept, tail.end)
            return None
        return self._follow(found or self._look_back(tail, start.branch, state), start.kept, state)

    def skip(self, newest: Spooled, state: SourceState, damage: str = "", *, fatal: bool = False) -> Start | None:
        """The server cannot read on behind ``newest``: in the rest of it, or in the file after it; ``damage``: what it
        sends is damaged, as this says; ``fatal``: it crashes when it reads on. None: no file follows yet with which it
        can go on."""
        tail = self._tail(newest)
        bad = newest.number if tail.ended is None else newest.number + 1
        begins = bad
        if self._skipped is not None and self._skipped[0] == newest.key:
            bad = max(bad, self._skipped[1])  # nor the file that it went on with
        following = next((log for log in state.logs if log.number > bad), None)
        if following is None:
            return None
        name = self.spool.branches()[-1].file(bad)
        if fatal:
            self.spool.note_fatal(name)
            damage = f"the server crashes when it reads {name}"
            words = f"the stream of {self.server} is interrupted: {damage}, and is not asked for that file any more"
            hint = "the server's error log names the cause; send the file to the makers of the server"
            self.report(StreamEvent(StreamEventKind.LOST, self.clock(), words, hint=hint))
        before = self.source.previous_gtids(following.name)
        whole = bool(before and tail.after) and covers(tail.after, before or "", mariadb=state.mariadb)
        if begins == newest.number:
            gap = "" if whole else damage or f"the server itself cannot read {newest.name} behind {tail.end}"
        else:
            gap = damage or f"the server itself cannot read the file after {newest.name}"
        if bad > begins:
            gap = damage or f"the server itself cannot read the files after {newest.name} up to {name}"
        self._skipped = (newest.key, following.number)
        return self._follow(GoOn(following.number, gap), newest, state)

    def skip_first(self, state: SourceState) -> Start | None:
        """The server crashes when it reads the first file of the newest branch, of which nothing is here. None: no file
        follows yet."""
        branch = self.spool.branches()[-1]
        following = next((log for log in state.logs if log.number > branch.first_number), None)
        if following is None:
            return None
        note = f"the server crashes when it reads {branch.file(branch.first_number)}"
        return self._begin(Fork(BranchReason.UNKNOWN, following.number, note), state)

    # --- what follows

    def _first(self, state: SourceState) -> Start:
        """Nothing is here of the newest branch."""
        branches = self.spool.branches()
        if not branches:
            names = {log.name: log.number for log in state.logs}
            wanted = self.wanted.file if self.wanted else ""
            number = names.get(wanted, state.logs[-1].number)
            return self._begin(Fork(BranchReason.FIRST, number, "the stream of this server begins"), state)
        branch, log = branches[-1], _listed(state, branches[-1].first_number)
        if branch.basename == state.basename and log is not None and not continuity.another(self.spool.seen(), state):
            return Start(branch, log.number, log.name, None)
        note = "the first file of the previous branch was never copied"
        return self._begin(Fork(BranchReason.UNKNOWN, state.logs[-1].number, note), state)

    def _follow(self, found: GoOn | Fork, newest: Spooled, state: SourceState) -> Start:
        self._make_sure(state)
        if isinstance(found, Fork):
            return self._begin(self._placed(found, newest, state), state, newest)
        branch = self.spool.branches()[-1]
        tail = self._close(newest)
        log = _listed(state, found.number)
        if log is None:
            raise ValueError(f"the server does not list a file {found.number}")
        if found.gap:
            before = Position(log.name, FIRST_EVENT, self.source.previous_gtids(log.name) or "")
            last_at = read(newest.path).last_at
            gap = Gap(self.server, branch.id, "", tail.position, before, last_at, None, found.gap, self.clock())
            self.spool.add_gap(gap)
            self.report(
                StreamEvent(
                    StreamEventKind.GAP,
                    self.clock(),
                    f"binary logs of {self.server} are missing: {found.gap}",
                    detail=f"nothing is archived between {tail.name}:{tail.end} and {log.name}",
                    hint="take a full backup now: recovery across the gap is not possible; and let the server keep its"
                    " binary logs longer (binlog_expire_logs_seconds)",
                    branch=branch,
                    gap=gap,
                )
            )
        return Start(branch, log.number, log.name, None)

    def _begin(self, fork: Fork, state: SourceState, newest: Spooled | None = None) -> Start:
        end = self._close(newest).position if newest is not None else None
        before = self.spool.branches()
        parent = next((one for one in before if one.id == fork.parent), before[-1] if before else None)
        seen = self.spool.seen()
        now = self.clock()
        named = max(now, before[-1].noticed_at + timedelta(seconds=1)) if before else now  # ids sort by seconds
        log = _listed(state, fork.number) or next(
            (log for log in state.logs if log.number > fork.number), state.logs[-1]
        )
        branch = Branch(
            server=self.server,
            id=new_id(named),
            noticed_at=named,
            reason=fork.reason,
            server_uuid=state.server_uuid,
            flavour=str(state.flavour),
            basename=state.basename,
            first_number=log.number,
            since=fork.since or (seen.at if seen else parent.noticed_at if parent else None),
            parent=parent.id if parent else None,
            fork=fork.fork,
            entry=fork.entry,
            names_go_on=fork.names_go_on,
            note=fork.note,
            baseline="" if state.mariadb else self.source.previous_gtids(log.name) or "",
        )
        self.spool.begin(branch, end)
        self._unlogged = None
        self.spool.note(continuity.seen_now(state, now))
        across = f"its fork position: {_shown(fork.fork)}" if fork.fork else "its fork position is unknown"
        self.report(
            StreamEvent(
                StreamEventKind.BRANCH,
                now,
                f"a branch of {self.server} begins with {log.name}: {fork.note}",
                detail="" if parent is None else across,
                hint=""
                if parent is None or fork.parent
                else "take a full backup now: the earlier archive stays recoverable; a restore crosses the fork only "
                "if its position is known",
                branch=branch,
            )
        )
        return Start(branch, log.number, log.name, None)

    def _make_sure(self, state: SourceState) -> None:
        """A history that ends, and a gap, are for ever: not because of one answer, which may have been altered on its
        way. Raises as ``look``, and ServerError where the server says something else now."""
        again = self.look()
        there, oldest = {log.name for log in again.logs}, again.logs[0].number
        same = (
            (state.server_uuid, state.server_id, state.flavour, state.basename, state.marker)
            == (again.server_uuid, again.server_id, again.flavour, again.basename, again.marker)
            and all(log.name in there or log.number < oldest for log in state.logs)
            and (not state.position.gtid or covers(again.position.gtid, state.position.gtid, mariadb=state.mariadb))
            and (state.durable_lsn or 0) <= (again.durable_lsn or 0)
        )
        if not same:
            raise ServerError(
                f"{self.source.address} contradicts its previous answer",
                hint="backupd repeats the query before it acts",
            )

    def _close(self, newest: Spooled) -> Tail:
        """Nothing more comes to it: half a transaction at its end leaves it."""
        tail = self._tail(newest)
        if newest.ended is None:
            if tail.end < newest.size:
                newest = self.spool.cut(newest, tail.end)
            self.spool.end(newest, ending_of(newest.path, newest.size))
        return tail

    def _renamed(self, newest: Spooled, state: SourceState) -> Start:
        """The server calls its files otherwise now."""
        tail = self._tail(newest)
        seen = self.spool.seen()
        found = continuity.without_file(tail, seen, state, self.source.previous_gtids)
        if not isinstance(found, Fork):
            found = Fork(
                BranchReason.UNKNOWN, state.logs[0].number, f"the server's binary logs are called {state.basename} now"
            )
        return self._follow(found, newest, state)

    def _was_restored(self, newest: Spooled, state: SourceState, why: str) -> Start:
        """Is the file that is here at the server as it was, so that the history ends with it?"""
        branch = self.spool.branches()[-1]
        path = self.fetch(newest.name)
        with newest.path.open("rb") as kept, path.open("rb") as fresh:
            equal = Comparison(kept, fresh).go_on()
        if equal < newest.size:
            start = self.differs(Start(branch, newest.number, newest.name, newest), equal)
            return start or Start(branch, newest.number, newest.name, self.spool.newest())
        if _listed(state, newest.number + 1) is None:
            return Start(branch, newest.number, newest.name, newest)
        if newest.ended is None:
            newest = self.spool.take(branch, newest.number, newest.name)
        return self._follow(continuity.after_restore(self._tail(newest), why), newest, state)

    # --- evidence

    def _goes_on(self, state: SourceState) -> Fork | None:
        branches = self.spool.branches()
        left = self.spool.left(state.server_uuid) if state.server_uuid else None
        if left is None or branches[-1].server_uuid == state.server_uuid or continuity.restored(left.seen, state):
            return None
        ours = self.ours()
        if branches[-1].server_uuid in ours or state.server_uuid not in ours:
            return None  # a failover there and back is one
        mark, log = left.fingerprint, _listed(state, left.fingerprint.number)
        if log is None or log.name != left.end.file or log.size < mark.size:
            return None
        path = self.fetch(log.name)
        read_fresh(path, self.source.address)
        if path.stat().st_size < mark.size or fingerprint_of(path, mark.branch, mark.number, mark.size) != mark:
            return None
        position = f"{left.end.file}:{left.end.pos}"
        note = f"the known server responds again after an unaccepted server; its binary log continues at {position}"
        found = Fork(BranchReason.UNKNOWN, mark.number, note, fork=left.end, names_go_on=True)
        return replace(found, parent=mark.branch, since=left.seen.at)

    def _tail(self, file: Spooled) -> Tail:
        found = read(file.path)
        branch = self.spool.branches()[-1]
        ended = Ending.CUT if found.damage else file.ended
        if ended is None and (ending := ending_of(file.path, file.size)) is not Ending.CUT:
            ended = ending
        before, after = branch.executed(found.gtids_before), branch.executed(found.gtids_after)
        return Tail(file.name, file.number, found.end, before, after, ended)

    def _with_baseline(self, found: Scan) -> Scan:
        branch = self.spool.branches()[-1]
        return replace(
            found, gtids_before=branch.executed(found.gtids_before), gtids_after=branch.executed(found.gtids_after)
        )

    def _compared(self, kept: Spooled, equal: int, tail: Tail) -> Compared:
        head = head_of(kept.path)
        if head is None or equal < head.size:
            return Compared(None, 0, lost=True)
        same = self._with_baseline(scan_to(kept.path, equal))
        return Compared(Position(kept.name, same.end, same.gtids_after), same.transactions, lost=tail.end > same.end)

    def _look_back(self, tail: Tail, branch: Branch, state: SourceState) -> Fork:
        """Is a file before it still the same at the server?"""
        fetched = 0
        after = tail.before
        for mark in reversed(self.spool.fingerprints()):
            if mark.number >= tail.number or fetched == _LOOKS_BACK:
                continue
            log = _listed(state, mark.number)
            if log is not None and log.size >= mark.size:
                fetched += 1
                path = self.fetch(log.name)
                found = read_fresh(path, self.source.address)
                same = (
                    path.stat().st_size == mark.size and fingerprint_of(path, branch.id, mark.number, mark.size) == mark
                )
                if same:
                    gtid = after if mark.number == tail.number - 1 else self._with_baseline(found).gtids_after
                    return continuity.looked_back(tail, state, Position(log.name, mark.size, gtid))
        return continuity.looked_back(tail, state, None)

    def _by_xid(self, fork: Fork, newest: Spooled, state: SourceState) -> Fork:
        """For another node of a cluster whose nodes give GTIDs of their own, and for one that was restored and is in
        its cluster again: the history goes on behind the last transaction of rows of the one, where the other's log has
        it, too, and the same ones before it."""
        files = {one.path: one for one in self._files_of(newest)}
        newest_logs = [log.name for log in reversed(state.logs)][:_FILES]
        found = shared_xid(files, newest_logs, self.fetch)
        ours = files[found.ours].name if found is not None else ""
        return continuity.behind_xid(fork, found, state, ours, lambda path, end: scan_to(path, end).gtids_after)

    def _files_of(self, newest: Spooled) -> tuple[Spooled, ...]:
        """The newest file, and those of its branch before it that the spool has, newest first."""
        earlier = (one for one in self.spool.files() if one.branch == newest.branch and one.number < newest.number)
        return newest, *reversed([*earlier])

    def _placed(self, fork: Fork, newest: Spooled, state: SourceState) -> Fork:
        """For another server: with which of its files the branch begins, and what both share."""
        seen = self.spool.seen()
        same_cluster = seen is not None and bool(state.cluster) and seen.cluster == state.cluster
        by_xid = fork.reason in (BranchReason.NODE_CHANGED, BranchReason.RESTORE) and not state.cluster_gtids
        if same_cluster and by_xid:
            return self._by_xid(fork, newest, state)
        if fork.reason not in (BranchReason.FAILOVER, BranchReason.NODE_CHANGED):
            return fork
        tail = self._tail(newest)
        if not tail.after or not state.history:
            return replace(fork, number=state.logs[-1].number)
        has = holder_of_each(state.history, mariadb=state.mariadb)
        history, unshared = history_of(newest.path, has, mariadb=state.mariadb)
        number = continuity.first_covered(state, history, self.source.previous_gtids)
        if number is None:
            return fork
        shared = shared_until(self.spool, newest, has)
        parted = shared[0]
        if parted.key != newest.key:
            _history, unshared = history_of(parted.path, has, mariadb=state.mariadb)
        position = tail.position
        if unshared is not None:
            until = self._with_baseline(scan_to(parted.path, unshared.start))
            position = Position(parted.name, unshared.start, until.gtids_after)
        gone, after = self._gone_before(newest)
        position = (parted_in(gone, after, has, mariadb=state.mariadb) if gone else None) or position
        members = [member for member in position.gtid.split(",") if member]
        before = gone.transactions if gone else ()
        agreed = (
            bool(members)
            and all(map(has, members))
            and (not state.mariadb or is_kin([file.path for file in shared], state, number, self.fetch, before))
        )
        lost = "; it lacks transactions that were archived" if position != tail.position else ""
        return replace(fork, number=number, fork=position if agreed else None, note=fork.note + lost)

    def _gone_before(self, newest: Spooled) -> tuple[LastOf | None, str]:
        """The last transactions of the file before the oldest that is here of the newest branch, and what was executed
        behind them."""
        files = [file for file in self.spool.files() if file.branch == newest.branch]
        oldest = min((newest, *files), key=lambda file: file.number)
        gone, head = self.spool.last_removed(), head_of(oldest.path)
        if gone is None or head is None or (gone.branch, gone.number + 1) != oldest.key:
            return None, ""
        return gone, self._with_baseline(scan_to(oldest.path, head.size)).gtids_after


def _listed(state: SourceState, number: int) -> ListedLog | None:
    return next((log for log in state.logs if log.number == number), None)


def _shown(position: Position) -> str:
    where = f"{position.file}:{position.pos}" if position.file else ""
    return " ".join(filter(None, [where, f"GTID {position.gtid[:300]}" if position.gtid else ""]))
