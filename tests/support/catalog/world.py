"""A server's life, thrown at random, of which every single transaction is known; and what an archive holds of it.

It knows nothing of runs, windows and routes: states are lists of transactions, an archive is a set of byte ranges.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, Stats
from backupd.model.binlog import Branch, BranchReason, Ending, Gap, MysqlGtids, Run, Segment, SegmentKey
from backupd.model.server_facts import Position
from backupd.recovery.runs import follows, linked, run_of

START = datetime(2026, 11, 1, tzinfo=UTC)
HEADER = 100
DESTINATIONS = ("local", "offsite")
UUIDS = tuple(f"{digit * 8}-0000-0000-0000-000000000000" for digit in "123456789")


@dataclass(frozen=True)
class Tx:
    uid: int
    gtid: str
    at: datetime


@dataclass
class File:
    number: int
    before: str
    txs: list[tuple[int, int, Tx]] = field(default_factory=list)
    size: int = HEADER
    ending: Ending = Ending.OPEN
    known: int | None = None
    """How much of it could be archived before it was removed; None for all."""


@dataclass
class Life:
    """One branch: ``log`` is everything that ever happened to its data, what it shares with its parent included."""

    branch: Branch
    log: list[Tx]
    files: list[File]

    @property
    def file(self) -> File:
        return self.files[-1]

    @property
    def place(self) -> Position:
        return Position(self.branch.file(self.file.number), self.file.size, state_of(self.log, self.branch.flavour))


def state_of(log: Iterable[Tx], flavour: str) -> str:
    """What is executed after ``log``."""
    gtids = [tx.gtid for tx in log if tx.gtid]
    if flavour == "mariadb":
        return gtids[-1] if gtids else ""
    found: dict[str, list[tuple[int, int]]] = {}
    for gtid in gtids:
        uuid, _, number = gtid.partition(":")
        found.setdefault(uuid, []).append((int(number), int(number)))
    return str(MysqlGtids.parse(",".join(f"{uuid}:{a}" for uuid, parts in found.items() for a, _b in parts)))


class World:
    """``flavour``: mariadb, mysql (with GTIDs) or plain (MySQL without). ``clocks``: does the server's clock jump?
    ``lossy``: how likely a segment is missing. ``nodes``: is the server (of MariaDB) a node of a cluster whose nodes
    give GTIDs of their own?"""

    def __init__(
        self,
        dice: random.Random,
        *,
        flavour: str,
        clocks: bool,
        forks: bool,
        lossy: float,
        steps: int,
        nodes: bool = False,
    ) -> None:
        self.dice = dice
        self.nodes = nodes
        self.flavour = flavour
        self.now = START
        self.offset = timedelta()
        self.uid = 0
        self.server = 1
        self.lives: list[Life] = []
        self.backups: list[tuple[BackupRecord, int, int]] = []
        self.confirmed: list[tuple[str, Position, datetime]] = []
        self.gaps: list[Gap] = []
        self._begin(None, BranchReason.FIRST, [], first=dice.choice((1, 1, 7)), fork=None, goes_on=False, since=None)
        for _ in range(steps):
            self._step(clocks, forks, lossy)
        self.now += timedelta(seconds=dice.randint(1, 30))
        self.segments = dict(self._archive(lossy))

    # -- life

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def _step(self, clocks: bool, forks: bool, lossy: float) -> None:
        self.now += timedelta(seconds=self.dice.randint(1, 20))
        kind = self.dice.choices(
            ("write", "rotate", "backup", "confirm", "purge", "jump", "fork"),
            (10, 3, 2, 4, 0.5 if lossy else 0, 1 if clocks else 0, 1.2 if forks else 0),
        )[0]
        if kind == "write":
            for _ in range(self.dice.randint(1, 4)):
                self._write(self._new())
                self.now += timedelta(seconds=self.dice.choice((0, 0, 1, 3)))
            self.now += timedelta(seconds=1)
        elif kind == "rotate":
            self._rotate(self.dice.choice((Ending.ROTATED, Ending.ROTATED, Ending.STOPPED, Ending.CRASHED)))
        elif kind == "backup":
            self._backup()
        elif kind == "purge":
            self._purge()
        elif kind == "confirm":
            self.confirmed.append((self.life.branch.id, self.life.place, self.now + min(self.offset, timedelta())))
        elif kind == "jump":
            self.offset += timedelta(seconds=self.dice.choice((-300, -60, -40, 40, 60, 300)))
        elif self.life.files[-1].txs or (len(self.life.files) > 1 and not self.nodes):
            self._fork()

    def _new(self) -> Tx:
        self.uid += 1
        number = 1
        if self.flavour == "mariadb":
            last = state_of(self.life.log, "mariadb")
            number = int(last.split("-")[2]) + 1 if last else 1
            gtid = self._own_gtid(number)
        elif self.flavour == "mysql":
            own = UUIDS[self.server]
            number += sum(tx.gtid.startswith(own) for tx in self.life.log)
            gtid = f"{own}:{number}"
        else:
            gtid = ""
        return Tx(self.uid, gtid, self.now + self.offset)

    def _own_gtid(self, number: int) -> str:
        return f"0-{100 if self.nodes else self.server}-{number}"

    def _write(self, tx: Tx) -> None:
        file, size = self.life.file, self.dice.randint(30, 90)
        file.txs.append((file.size, file.size + size, tx))
        file.size += size
        self.life.log.append(tx)

    def _rotate(self, ending: Ending) -> None:
        life = self.life
        life.file.ending = ending
        life.file.size += {Ending.ROTATED: 20, Ending.STOPPED: 10}.get(ending, 0)
        before = self.state_in(life, life.file.number, life.file.size)
        life.files.append(File(life.file.number + 1, before))

    def _purge(self) -> None:
        """The server removed the file before its end was copied."""
        life, file = self.life, self.life.file
        if not file.txs:
            return
        index = self.dice.randint(0, len(file.txs))
        file.known = file.txs[index - 1][1] if index else HEADER
        after = Position(life.branch.file(file.number), file.known, self.state_in(life, file.number, file.known))
        self._rotate(Ending.CUT)
        before = Position(life.branch.file(life.file.number), 4, life.file.before)
        self.gaps.append(Gap("shop", life.branch.id, "", after, before, None, None, "removed too early", self.now))

    def _backup(self) -> None:
        started = self.now
        self.now += timedelta(seconds=self.dice.randint(0, 8))
        life = self.life
        identity = f"uuid{self.server}" if self.dice.random() < 0.8 else ""
        held = self.dice.choice((DESTINATIONS, DESTINATIONS, DESTINATIONS[:1], DESTINATIONS[1:]))
        size = self.dice.randint(10**6, 10**9)
        number = len(self.backups)
        record = BackupRecord(
            id=f"{self.now:%Y%m%dT%H%M%SZ}-{number:08x}",
            server="shop",
            kind=BackupKind.PHYSICAL_FULL,
            state=BackupState.COMPLETE,
            parent=None,
            started_at=started,
            finished_at=self.now,
            stats=Stats(size, size, size, 10, 0),
            position=life.place,
            flavour=self.flavour,
            server_version="12.0.1",
            tool_version="1",
            copies=tuple(Copy(name, "complete", self.now) for name in held),
            server_uuid=identity,
        )
        self.backups.append((record, len(self.lives) - 1, len(life.log)))

    # -- forks

    def _begin(
        self,
        parent: str | None,
        reason: BranchReason,
        log: list[Tx],
        *,
        first: int,
        fork: Position | None,
        goes_on: bool,
        since: datetime | None,
        basename: str = "bin",
    ) -> None:
        noticed = self.now
        branch = Branch(
            "shop",
            f"{noticed:%Y%m%dT%H%M%SZ}-{len(self.lives):08x}",
            noticed,
            reason,
            f"uuid{self.server}",
            "mariadb" if self.flavour == "mariadb" else "mysql",
            basename,
            first,
            since,
            parent,
            fork,
            goes_on,
        )
        self.lives.append(Life(branch, list(log), [File(first, state_of(log, self.flavour))]))

    def _fork(self) -> None:
        old = self.life
        since = self.now - timedelta(seconds=self.dice.randint(0, 3))
        if self.dice.random() < 0.3:
            self._backup()  # nobody knows yet that this is another history, or that it still is the old one
        usual = ("tail", "tail", "failover", "restore", "reset")
        kind = self.dice.choice(("tail", "node", "node", "restore") if self.nodes else usual)
        if kind == "tail":
            self._lose_tail(old, since)
        elif kind == "node":
            self._change_node(old, since)
        elif kind == "failover" and self.flavour != "plain":
            self._fail_over(old, since)
        else:
            kept = self.dice.randint(0, len(old.log)) if kind == "restore" else len(old.log)
            log = old.log[:kept]
            known = kind == "restore" and self.flavour == "mysql" and bool(log) and self.dice.random() < 0.7
            fork = Position("", 0, state_of(log, self.flavour)) if known else None
            self._noticed_later()
            self._begin(
                old.branch.id,
                BranchReason.RESTORE if kind == "restore" else BranchReason.RESET,
                log,
                first=1,
                fork=fork,
                goes_on=False,
                since=since,
            )
            if kind == "reset" or self.flavour != "mysql":
                self.life.file.before = ""
            if kind == "reset":  # GTIDs begin anew; only the data goes on
                self.life.log[:] = [replace(tx, gtid="") for tx in self.life.log]

    def _noticed_later(self) -> None:
        self.now += timedelta(seconds=self.dice.randint(1, 10))

    def _lose_tail(self, old: Life, since: datetime) -> None:
        file = old.file
        kept = self.dice.randint(0, len(file.txs))
        own = len(old.log) - len(file.txs) if len(file.txs) <= len(old.log) else 0
        log = old.log[: own + kept]
        state = state_of(log, self.flavour)
        goes_back = kept == 0 and len(old.files) > 1 and self.dice.random() < 0.7
        self._noticed_later()
        if goes_back:
            before = old.files[-2]
            fork = Position(old.branch.file(before.number), before.size, state)
            self._begin(
                old.branch.id,
                BranchReason.LOST_TAIL,
                log,
                first=file.number,
                fork=fork,
                goes_on=True,
                since=since,
                basename=old.branch.basename,
            )
            return
        end = file.txs[kept - 1][1] if kept else HEADER
        self._begin(
            old.branch.id,
            BranchReason.LOST_TAIL,
            log,
            first=file.number,
            fork=Position(old.branch.file(file.number), end, state),
            goes_on=True,
            since=since,
            basename=old.branch.basename,
        )
        self.life.files = [
            File(file.number, file.before, file.txs[:kept], end, Ending.CRASHED),
            File(file.number + 1, state),
        ]

    def _fail_over(self, old: Life, since: datetime) -> None:
        """The new source has a log of its own, which begins somewhere in what both share."""
        lost = self.dice.randint(0, min(2, len(old.file.txs)))
        shared = old.log[: len(old.log) - lost]
        begin = self.dice.randint(max(0, len(shared) - 6), len(shared))
        place = old.file.txs[-lost][0] if lost else old.file.size
        fork = Position(old.branch.file(old.file.number), place, state_of(shared, self.flavour))
        self.server += 1
        self._noticed_later()
        self._begin(
            old.branch.id,
            BranchReason.FAILOVER,
            shared[:begin],
            first=self.dice.choice((1, 3)),
            fork=fork if fork.gtid else None,
            goes_on=False,
            since=since,
            basename=self.dice.choice(("bin", "replica")),
        )
        for tx in shared[begin:]:
            self._write(tx)
            if self.dice.random() < 0.2:
                self._rotate(Ending.ROTATED)

    def _change_node(self, old: Life, since: datetime) -> None:
        """Another node's log: the same transactions in the same order, under GTIDs that mean others in the old one's.
        What follows the last row of the old one are definitions, which no Xid shows."""
        ends = [(file.number, end, tx) for file in old.files for _start, end, tx in file.txs][-3:]
        number, end, last = self.dice.choice(ends)
        fork = Position(old.branch.file(number), end, self.state_in(old, number, end))
        at = next(index for index, tx in enumerate(old.log) if tx.uid == last.uid)
        begin = self.dice.randint(max(0, at - 5), at)
        gtid = self.dice.choice((0, begin, begin + 7)) if begin else 0
        before = [replace(tx, gtid="") for tx in old.log[:begin]]
        if gtid:
            before[-1] = replace(before[-1], gtid=self._own_gtid(gtid))
        self.server += 1
        self._noticed_later()
        self._begin(
            old.branch.id,
            BranchReason.NODE_CHANGED,
            before,
            first=self.dice.choice((1, 3)),
            fork=fork,
            goes_on=False,
            since=since,
            basename=self.dice.choice(("bin", "other")),
        )
        life = self.life
        for number, tx in enumerate(old.log[begin:], start=gtid + 1):
            self._write(replace(tx, gtid=self._own_gtid(number)))
            if tx.uid == last.uid:
                life.branch = replace(life.branch, entry=life.place)
            if self.dice.random() < 0.2:
                self._rotate(Ending.ROTATED)

    # -- archive

    def _archive(self, lossy: float) -> Iterator[tuple[Segment, frozenset[str]]]:
        for life in self.lives:
            reach = {name: self._reach(life) for name in DESTINATIONS}
            for file in life.files:
                for segment in self._cut(life, file):
                    held = frozenset(
                        name
                        for name in DESTINATIONS
                        if (segment.number, segment.end) <= reach[name] and self.dice.random() >= lossy
                    )
                    if held:
                        yield segment, held

    def _reach(self, life: Life) -> tuple[int, int]:
        if self.dice.random() < 0.5:
            return life.file.number, life.file.size
        file = self.dice.choice(life.files[-2:])
        return file.number, self.dice.choice([HEADER, *(end for _start, end, _tx in file.txs), file.size])

    def _cut(self, life: Life, file: File) -> Iterator[Segment]:
        size = file.size if file.known is None else file.known
        ends = [end for _start, end, _tx in file.txs if end <= size] or [HEADER]
        marks = sorted({0, *(self.dice.sample(ends, self.dice.randint(0, len(ends)))), ends[-1]})
        final = file.ending is not Ending.OPEN
        if final:
            yield self._segment(life, file, 0, size, file.ending)
        if not final or self.dice.random() < 0.4:
            for start, end in pairwise(marks):
                yield self._segment(life, file, start, end, Ending.OPEN)

    def _segment(self, life: Life, file: File, start: int, end: int, ending: Ending) -> Segment:
        inside = [tx for a, b, tx in file.txs if start <= a and b <= end]
        times = [tx.at for tx in inside]
        return Segment(
            server="shop",
            branch=life.branch.id,
            file=life.branch.file(file.number),
            number=file.number,
            start=start,
            end=end,
            ending=ending,
            gtids_before=self.state_in(life, file.number, start, entering=True),
            gtids_after=self.state_in(life, file.number, end),
            transactions=len(inside),
            first_at=min(times, default=None),
            last_at=max(times, default=None),
            precise=True,
            server_ids=(1,),
            flavour=life.branch.flavour,
            server_version="1",
            sha256="",
        )

    def state_in(self, life: Life, number: int, pos: int, *, entering: bool = False) -> str:
        """What the log itself tells as executed at a place of a file."""
        file = next(file for file in life.files if file.number == number)
        if entering and pos == 0:
            return file.before
        done = [tx for _start, end, tx in file.txs if end <= pos]
        if self.flavour == "mariadb":
            return done[-1].gtid if done else file.before
        if self.flavour == "mysql":
            return str(MysqlGtids.parse(file.before).plus(MysqlGtids.parse(state_of(done, "mysql"))))
        return ""

    def runs(self) -> tuple[Run, ...]:
        found: list[Run] = []
        for name in DESTINATIONS:
            for run in runs_of([s for s, held in self.segments.items() if name in held], name):
                at = max(
                    (
                        at
                        for where, place, at in self.confirmed
                        if where == run.branch
                        and (run.first_number, run.first_pos)
                        <= (_number(place.file), place.pos)
                        <= (run.last_number, run.last_pos)
                    ),
                    default=None,
                )
                found.append(replace(run, confirmed_at=at))
        return tuple(found)

    # -- truth

    def life_of(self, branch: str) -> Life:
        return next(life for life in self.lives if life.branch.id == branch)

    def log_at(self, branch: str, number: int, pos: int) -> list[Tx]:
        """All that has happened to the data at a place of a branch."""
        life = self.life_of(branch)
        own = {tx.uid for file in life.files for _start, _end, tx in file.txs}
        before = [tx for tx in life.log if tx.uid not in own]
        inside = [tx for file in life.files for _start, end, tx in file.txs if (file.number, end) <= (number, pos)]
        return before + inside

    def txs(self, key: SegmentKey) -> list[tuple[int, int, Tx]]:
        """The transactions in a segment."""
        file = next(file for file in self.life_of(key.branch).files if file.number == key.number)
        return [(start, end, tx) for start, end, tx in file.txs if key.start <= start and end <= key.end]


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])


def runs_of(
    segments: Iterable[Segment], destination: str, stored: Mapping[SegmentKey, int] | None = None
) -> tuple[Run, ...]:
    """The runs of what one destination holds, by branch and in log order. What lies within a longer segment of the
    same file counts as that."""
    sizes = stored or {}
    found: list[Run] = []
    for segment in _outermost(sorted(segments, key=lambda s: (s.branch, s.number, s.start, -s.end, not s.is_final))):
        one = run_of(segment, destination, sizes.get(segment.key, 0))
        if found and follows(found[-1], one):
            found[-1] = linked(found[-1], one)
        else:
            found.append(one)
    return tuple(found)


def _outermost(ordered: Iterable[Segment]) -> Iterator[Segment]:
    last: Segment | None = None
    for segment in ordered:
        inside = (
            last is not None
            and (last.branch, last.number) == (segment.branch, segment.number)
            and (segment.end < last.end or (segment.end == last.end and (last.is_final or not segment.is_final)))
        )
        if not inside:
            last = segment
            yield segment
