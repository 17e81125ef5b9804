"""A stream whose whole world is disturbed, and what its server really wrote: the archive is held against that."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from backupd.binlog.continuity import without_flag
from backupd.catalog.session import Catalog
from backupd.engine.binlog.scan import scan
from backupd.engine.sql.client import Connection
from backupd.model.binlog import Branch, FilePosition, Gap, Transaction
from backupd.model.errors import ServerError
from backupd.transfer import log_segments
from backupd.transfer.records.encryption import Unsealer
from storage.destination import Destination
from tests.support.e2e.house import BACKUPD, LONGEST, SERVER, House
from tests.support.oracle import DataDiffersError
from tests.support.servers import warm
from tests.support.servers.server import Server

MOVED = "moved"
"""The table that is written with another clock."""
_BLOCK = 1 << 20
_HEAD = 64


class Longest:
    """The longest of some statements: one that began at some second was committed by then and so much."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """However it ends: the server may have committed what it could not answer any more."""
        begun = time.monotonic()
        try:
            yield
        finally:
            taken = time.monotonic() - begun
            with self._lock:
                self.seconds = max(self.seconds, taken)


class Clients:
    """Write all the time, and bear it when the server is gone. ``server``: the present one."""

    def __init__(self, server: Callable[[], Server], dice: random.Random, count: int, longest: Longest) -> None:
        self._server, self._longest = server, longest
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(dice.random()),), daemon=True) for _ in range(count)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_args: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, dice: random.Random) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(ServerError):
                with Connection(socket=str(self._server().socket), user="root").connect() as session:
                    while not self._stop.wait(dice.random() * 0.02):
                        with self._longest.measured():
                            session.execute(
                                "INSERT INTO shop.t (t) VALUES (REPEAT('y', %s))",
                                dice.choice([10, 200, 200, 20_000, 300_000]),
                            )
            self._stop.wait(0.05)


class Witness:
    """Keeps every binary log that the server ever wrote: by hard links, so that they are the files themselves, whole.

    ``lives``: from one RESET to the next, each a folder with the files of that life.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self.lives: list[Path] = []
        self.new_life()

    def new_life(self, server: Server | None = None) -> None:
        """The server begins its binary logs anew, or another ``server`` replaces it. All of the life before must
        have been looked at."""
        self._server = server or self._server
        life = self._folder / f"life-{len(self.lives)}"
        life.mkdir(parents=True)
        self.lives.append(life)

    def look(self) -> None:
        """Keep what is there now; before anything is removed, and after each new file."""
        for path in self._server.datadir.glob("binlog.[0-9]*"):
            if not (self.lives[-1] / path.name).exists():
                os.link(path, self.lives[-1] / path.name)

    def files(self, life: int) -> dict[int, Path]:
        return {int(path.suffix[1:]): path for path in sorted(self.lives[life].iterdir())}


@dataclass
class Stream:
    """`backupd run-stream` as the service runs it: started again whenever it ended. ``ended``: how it ended when nobody
    had asked it to."""

    house: House
    process: warm.Begun | None = None
    ended: list[int] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.house.base / "stream.log"

    def ensure(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        if self.process is not None and self.process.returncode is not None:
            self.ended.append(self.process.returncode)
        self.process = warm.begin([BACKUPD, "run-stream", SERVER], self.house.environment(), self.log)

    def kill(self) -> None:
        """Nothing of it may stay."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """It stands still while the block lasts, where it runs."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            if self.process is not None:
                self.process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(LONGEST)
            self.process = None


# -- what is archived, against what was written


@dataclass
class Archived:
    """What a destination holds of one branch: by number of a file, a path with its bytes from the beginning on."""

    branch: Branch
    files: dict[int, Path]

    def size(self, number: int) -> int:
        return self.files[number].stat().st_size if number in self.files else 0


def fetched(destination: Destination, unsealer: Unsealer, branch: Branch, folder: Path) -> Archived:
    """Unseal all of a branch, asking only the destination. A hole inside a file ends what is told of the file."""
    found = Archived(branch, {})
    headers = [
        header
        for header in log_segments.headers(destination, SERVER)
        if not isinstance(header, log_segments.DamagedSegment) and header.segment.branch == branch.id
    ]
    for header in sorted(headers, key=lambda one: (one.segment.number, one.segment.start, -one.segment.end)):
        segment = header.segment
        target = folder / f"{branch.id}.{segment.number}"
        if segment.start == found.size(segment.number):
            log_segments.fetch(destination, header, unsealer, target, append=segment.start > 0)
            found.files[segment.number] = target
        else:
            if segment.end > found.size(segment.number):
                raise DataDiffersError(f"a hole before {segment.key}")
    return found


def is_beginning_of(part: Path, whole: Path) -> bool:
    """Byte for byte, but for the in-use flag."""
    if part.stat().st_size > whole.stat().st_size:
        return False
    with part.open("rb") as one, whole.open("rb") as other:
        if without_flag(one.read(_HEAD)) != without_flag(other.read(_HEAD))[: part.stat().st_size]:
            return False
        return all(block == other.read(len(block)) for block in _blocks(one))


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    while block := stream.read(_BLOCK):
        yield block


def life_of(branch: Branch, files: dict[int, Path], witness: Witness, first: int) -> int:
    """Which of the server's lives, from ``first`` on, has exactly what was archived."""
    for life in range(first, len(witness.lives)):
        theirs = witness.files(life)
        if all(number in theirs and is_beginning_of(path, theirs[number]) for number, path in files.items()):
            return life
    sizes = {number: path.stat().st_size for number, path in files.items()}
    raise AssertionError(f"{branch} is none of the server's lives {first} and later: {sizes}")


def between_gaps(archived: Archived, gaps: Sequence[Gap]) -> list[dict[int, Path]]:
    """The branch's files, parted where a gap says that something is missing: behind it may be a later life, because
    who removed files may have begun them anew, too."""
    behind = {_file_position(gap.before.file, 0)[0] for gap in gaps if gap.before is not None}
    parts: list[dict[int, Path]] = []
    for number, path in sorted(archived.files.items()):
        if not parts or number in behind:
            parts.append({})
        parts[-1][number] = path
    return parts


def unnamed(part: dict[int, Path], theirs: dict[int, Path], gaps: Sequence[Gap], *, until_now: bool) -> list[str]:
    """What is missing of a part without a word. What comes behind its end is named by the gap or the branch that
    follows; ``until_now``: nothing does."""
    last = max(theirs) if until_now else max(part)
    missing = []
    for number in range(min(part), last + 1):
        size = part[number].stat().st_size if number in part else 0
        if number not in theirs or not (is_whole(size, theirs[number]) or (number == last and not until_now)):
            named = any(
                _file_position(gap.after.file, gap.after.pos) <= (number, size) and gap.before is None for gap in gaps
            )
            missing += [] if named else [f"file {number} behind {size}"]
    return missing


def is_whole(size: int, theirs: Path) -> bool:
    """Does no transaction of the file lie behind its first ``size`` bytes? There may be half of one, of a crash; and
    where a server removed a file early, GTIDs may show that only its last event (to rotate) was not copied."""
    return size == theirs.stat().st_size or all(one.end <= size for one in _transactions(theirs))


def is_told(after: dict[int, Path], before: dict[int, Path], gaps: Sequence[Gap]) -> bool:
    """Does a gap name everything between two parts?"""
    end = (max(after), after[max(after)].stat().st_size)
    return any(
        _file_position(gap.after.file, gap.after.pos) <= end
        and gap.before is not None
        and _file_position(gap.before.file, 0)[0] == min(before)
        for gap in gaps
    )


def claimed_in_vain(
    part: dict[int, Path], theirs: dict[int, Path], confirmed: datetime | None, longest: Longest
) -> list[str]:
    """What was committed behind the part's end, although all that was committed by then is said to be in it. Times
    are whole seconds, and of the statement's beginning: one second, and the longest that a statement took, are doubt
    in favour of the archive."""
    if confirmed is None:
        return []
    late = confirmed - timedelta(seconds=1 + longest.seconds)
    end = (max(part), part[max(part)].stat().st_size)
    return [
        f"{one.gtid} of {one.at}, confirmed {confirmed}"
        for number, path in theirs.items()
        if number >= end[0]
        for one in _transactions(path)
        if (number, one.start) >= end and one.at < late and not any(change.name == MOVED for change in one.changes)
    ]


def fork_is_true(branch: Branch, parent: Archived, theirs: dict[int, Path]) -> bool:
    """Do both really share the parent's log up to the fork?"""
    if branch.fork is None:
        return True
    number, pos = _file_position(branch.fork.file, branch.fork.pos)
    if not branch.names_go_on or number not in theirs or number not in parent.files:
        return False
    with parent.files[number].open("rb") as one, theirs[number].open("rb") as other:
        return without_flag(one.read(pos)) == without_flag(other.read(pos))


def missing_before(branch: Branch, parent: Archived, theirs: dict[int, Path]) -> set[str]:
    """What the other server wrote before the branch's first file and is not archived in the parent, by GTID."""
    before = {one.gtid for number in theirs if number < branch.first_number for one in _transactions(theirs[number])}
    return before - {one.gtid for path in parent.files.values() for one in _transactions(path)}


def confirmed_until(catalog: Catalog, branch: str) -> datetime | None:
    moments = [
        run.confirmed_at
        for run in catalog.binlogs.runs(SERVER)
        if run.branch == branch and run.confirmed_at is not None
    ]
    return max(moments, default=None)


def wait_for_all(catalog: Catalog, stream: Stream, moment: datetime, seconds: float) -> None:
    """Until the newest branch is confirmed to hold all that was committed by ``moment``."""

    def reached() -> bool:
        stream.ensure()
        branches = catalog.binlogs.branches(SERVER)
        at = confirmed_until(catalog, branches[-1].id) if branches else None
        return at is not None and at >= moment

    deadline = time.monotonic() + seconds
    while not reached():
        told = catalog.binlogs.stream_state(SERVER)
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {told}\n{stream.log.read_text()[-5000:]}"
        time.sleep(0.2)


def _transactions(path: Path) -> list[Transaction]:
    found: list[Transaction] = []
    with path.open("rb") as stream:
        scan(stream, on_transaction=found.append)
    return found


def _file_position(file: str, pos: int) -> FilePosition:
    return int(file.rpartition(".")[2]), pos
