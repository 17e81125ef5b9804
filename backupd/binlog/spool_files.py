"""The spool of one server: binary logs as they come, in plain files, until every destination has them.

A folder of ours alone (0700; files 0600)::

    lock             held by the one stream of this server
    leave            there where another process asks for its place, and it shares its own with other streams
    over             why a stream that shared a process has ended, while the others go on
    last.json        the last transactions of the file before the newest one, where that has left the spool
    state.json       branches, gaps, files that ended, what was last seen of the server, and since when it is known to
                     write no binary log; replaced as a whole
    branches/<branch>/<file>
    incoming/        a file whose first events are still on their way, and copies that are only compared

A file comes into ``branches`` by a rename, when its first events are there, and is appended to there. Its end may be
half an event after a kill, which the next start cuts off. It counts as ended when its successor comes or its branch is
over; it is on the disk then (fsync). Whatever happens in between, the next start finds one of the two states.

What lies here may be damaged: by a power cut (the stream waits for no disk), a flipped bit, or, in a log without
checksums, on its way from the server. The archive finds that when it scans, and says so (``doubt``); the
stream fetches the file again (``spool_repair``). Only what it finds then is a verdict; it lasts as long as the process,
and is found again by the next.

``files`` and ``branches`` may be asked from any thread; what changes the spool belongs to the stream, ``remove`` and
``doubt`` to the archive.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from backupd.binlog.continuity import Fingerprint, Seen, ending_of, fingerprint_of
from backupd.model.binlog import Branch, Ending, Gap, Transaction
from backupd.model.document import Document, json_key
from backupd.model.errors import BusyError, DamagedError, RefusedError
from backupd.model.server_facts import Position
from backupd.process.folders import sync_folder, write_whole

_FORMAT = "backupd-spool/1"


@dataclass(frozen=True, slots=True)
class Entry(Document):
    """One file. ``size`` counts once it has ended; ``removed``: the archive is through with it."""

    branch: str
    number: int
    name: str
    ended: Ending | None
    size: int
    removed: bool = False
    fingerprint: Fingerprint | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Its branch and number."""
        return self.branch, self.number


@dataclass(frozen=True, slots=True)
class Left(Document):
    """What a branch was when another one began, so that it can be gone on with where its server answers again.
    ``end``: where it ended, ``fingerprint``: of its last file up to there, ``seen``: of its server."""

    end: Position = field(metadata=json_key("place"))
    fingerprint: Fingerprint
    seen: Seen


@dataclass(frozen=True, slots=True)
class LastOf:
    """The last transactions of a file that has left the spool, without their statements: what shows where the history
    of another server parts from this one, right after a rotation."""

    branch: str
    number: int
    name: str
    transactions: tuple[Transaction, ...]


@dataclass(frozen=True, slots=True)
class State(Document):
    """``files``: in log order. ``seen``: of the server of the newest branch. ``unlogged``: when that was first seen to
    write no binary log, since the branch began; what is there afterwards does not go on from what is here. ``left``: of
    each server that had the spool before, the last branch. ``unsynced``: a file (its branch and name) that a disk once
    refused to take. ``fatal``: files of the newest branch by which the server crashes when it reads them."""

    branches: tuple[Branch, ...] = ()
    gaps: tuple[Gap, ...] = ()
    files: tuple[Entry, ...] = ()
    seen: Seen | None = None
    unlogged: datetime | None = field(default=None, metadata=json_key(later=True))
    left: tuple[Left, ...] = field(default=(), metadata=json_key(later=True))
    unsynced: str = field(default="", metadata=json_key(later=True))
    fatal: tuple[str, ...] = field(default=(), metadata=json_key(later=True))


_LOCK = "lock"
_LEAVE = "leave"
_OVER = "over"
_STATE = "state.json"
_LAST = "last.json"
_BRANCHES = "branches"
_INCOMING = "incoming"
_LONGEST_NOTE = 65536
_NOBODY = "{}"
"""Left in the lock's file, so that the next note needs no new block of a disk that is full by then."""
_TRIES = 5
_MOMENT = 0.01
_REMEMBERED = 8
"""Removed files of which it is remembered what they were."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """A file of the spool. ``size``: what it has now; only an ended file never grows. ``ended``: None while its branch
    may still write to it."""

    branch: str
    number: int
    name: str
    path: Path
    size: int
    ended: Ending | None

    @property
    def key(self) -> tuple[str, int]:
        """Its branch and number."""
        return self.branch, self.number


@dataclass(frozen=True, slots=True)
class Doubt:
    """A file that cannot be read behind ``good``, the end of its last whole transaction (0: of none). ``why``: in
    words. ``verdict``: why no new copy of it can mend that, "" as long as one may."""

    key: tuple[str, int]
    good: int
    why: str
    verdict: str = ""


def _say(descriptor: int, note: str) -> None:
    """In the lock's file. Without space it is left out, and the stream goes on: archiving is what makes room."""
    content = note.encode()
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, min(os.fstat(descriptor).st_size, len(content)))
        os.pwrite(descriptor, content, 0)


class Spool:
    """Raises RefusedError where the folder is not usable, DamagedError where its state cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.incoming = folder / _INCOMING
        self._guard = threading.RLock()
        self._state: State | None = None
        self._doubts: dict[tuple[str, int], Doubt] = {}
        self._locked = False
        self._held: tuple[int, os.stat_result] | None = None
        """The lock's file, while it is held: a descriptor, and which file it is."""
        self._unsynced: str | None = None
        self._written_anew = ""

    # --- for everybody

    def branches(self) -> tuple[Branch, ...]:
        """All that this spool knows of, newest last."""
        return self._now().branches

    def gaps(self) -> tuple[Gap, ...]:
        """All gaps that were noticed, oldest first."""
        return self._now().gaps

    def files(self) -> tuple[Spooled, ...]:
        """What is here and was not removed, in log order."""
        with self._guard:
            return tuple(self._spooled(entry) for entry in self._now().files if not entry.removed)

    def bytes(self) -> int:
        """What the spool takes on the disk, with what has not been compared yet."""
        total = 0
        for folder, _folders, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += (Path(folder) / name).lstat().st_size
        return total

    def sync(self, file: Spooled) -> int:
        """Bring what the file has now to the disk, and give its size. Raises OSError, FileNotFoundError included."""
        with file.path.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            try:
                os.fsync(opened.fileno())
            except OSError:
                self.distrust(file)
                raise
        sync_folder(file.path.parent)
        return size

    def remove(self, file: Spooled, last: Sequence[Transaction] = ()) -> None:
        """The archive needs this file no longer. Raises RefusedError for one that has not ended.

        The newest one of all stays on the disk, unseen, because a later connection is compared with it. ``last``: of
        the one before it, the last transactions.
        """
        with self._guard:
            found = next((entry for entry in self._now().files if entry.key == file.key), None)
            if found is None or found.removed:
                return
            if found.ended is None:
                raise RefusedError(f"{file.name} is still being written: it cannot leave the spool")
            if last:
                lines = [replace(one, statement="").as_json() for one in last]
                document = {"branch": file.branch, "number": file.number, "name": file.name, "transactions": lines}
                write_whole(self.folder / _LAST, json.dumps(document, separators=(",", ":")).encode())
            self._change(file, removed=True)
            self._sweep()

    def last_removed(self) -> LastOf | None:
        """Of the file before the newest one, where that was removed and its transactions are known."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads((self.folder / _LAST).read_bytes())
            found = tuple(map(Transaction.from_json, data["transactions"]))
            return LastOf(data["branch"], data["number"], data["name"], found)
        return None

    # --- what cannot be read

    def doubt(self, file: Spooled, good: int, why: str) -> Doubt:
        """The file cannot be read behind ``good``: it is to be fetched again, unless that was done with this result."""
        with self._guard:
            known = self._doubts.get(file.key)
            if known is None or not known.verdict or known.good != good:
                known = self._doubts[file.key] = Doubt(file.key, good, why)
            return known

    def doubted(self, file: Spooled) -> Doubt | None:
        """What is said against a file; None for one that was not found to be damaged, or was mended."""
        with self._guard:
            return self._doubts.get(file.key)

    def doubts(self) -> tuple[Doubt, ...]:
        """Those that a new copy may still mend, in log order."""
        with self._guard:
            found = (self._doubts.get(entry.key) for entry in self._now().files)
            return tuple(one for one in found if one is not None and not one.verdict)

    def judge(self, doubt: Doubt, verdict: str = "") -> None:
        """``verdict``: why the damage stays; "" for what was mended."""
        with self._guard:
            if verdict:
                self._doubts[doubt.key] = replace(doubt, verdict=verdict)
            else:
                self._doubts.pop(doubt.key, None)

    # --- what a disk refused

    def distrust(self, file: Spooled) -> None:
        """The disk has refused to take what was written to ``file``. The kernel reports that once, and may drop the
        bytes then: the next sync succeeds without them."""
        with self._guard:
            self._unsynced, self._written_anew = f"{file.branch}/{file.name}", ""
            with contextlib.suppress(OSError):  # it may not take that either
                self._save(unsynced=self._unsynced)

    def trust(self, file: Spooled) -> None:
        """All of ``file``, as it was written anew, is what the server has."""
        with self._guard:
            if self.is_distrusted(file):
                self._save(unsynced="")
                self._unsynced = None

    def is_distrusted(self, file: Spooled) -> bool:
        """Is it to be compared with the server's as a whole, before anything of it counts as durable?"""
        return self._refused() == f"{file.branch}/{file.name}"

    def write_anew(self) -> None:
        """A file that the disk has refused once is another one now, with the same bytes as far as they are still
        known. Raises OSError."""
        with self._guard:
            refused = self._refused()
            if not refused or refused == self._written_anew:
                return
            path = self.folder / _BRANCHES / refused
            if path.is_file():
                self.clear_incoming()
                fresh = self.incoming / path.name
                shutil.copyfile(path, fresh)
                fresh.chmod(0o600)
                with fresh.open("rb") as opened:
                    os.fsync(opened.fileno())
                fresh.replace(path)
                sync_folder(path.parent)
            self._written_anew = refused
            last = self.newest()
            if last is None or not self.is_distrusted(last):  # the archive reads it to its end
                self._save(unsynced="")
                self._unsynced = None

    def _refused(self) -> str:
        return self._unsynced if self._unsynced is not None else self._now().unsynced

    # --- for the stream

    @contextlib.contextmanager
    def locked(self, note: str = "") -> Iterator[None]:
        """Be the one stream of this server. Raises BusyError when another process is. ``note``: who that is, for
        ``holder``. It may be entered again within."""
        if self._locked:
            yield
            return
        descriptor = self._lock()
        try:
            self._held = descriptor, os.fstat(descriptor)
            self.check_lock()  # it may have been opened before another one took its place
            for name in (_LEAVE, _OVER):
                (self.folder / name).unlink(missing_ok=True)
            _say(descriptor, note)
            with self._guard:
                self._state = None
                self._reconcile()
            self._locked = True
            yield
        finally:
            self._locked, self._held = False, None
            _say(descriptor, _NOBODY)
            os.close(descriptor)

    def check_lock(self) -> None:
        """Raises RefusedError where the lock's file, which this process holds, is not the spool's any more: another
        stream may have begun there, and nothing may be written beside it. Where nothing can be asked, nothing is
        known."""
        held = self._held
        if held is None:
            return
        try:
            there = (self.folder / _LOCK).lstat()
        except FileNotFoundError:
            what = "removed or moved away"
        except OSError:
            return
        else:
            if os.path.samestat(held[1], there):
                return
            what = "replaced"
        raise RefusedError(
            f"the spool {self.folder} was {what} while a stream wrote to it",
            hint="end a stream before its spool is moved (`backupd pause`); a stream that finds no spool begins a new"
            " branch",
        )

    def say(self, note: str) -> None:
        """Who holds the lock has something else to say of itself."""
        if self._held is not None:
            _say(self._held[0], note)

    def ask_to_leave(self) -> None:
        """The stream that holds the lock in a process of several is to end. Raises OSError."""
        os.close(os.open(self.folder / _LEAVE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def is_asked_to_leave(self) -> bool:
        """Is another process to have the place?"""
        return (self.folder / _LEAVE).exists()

    def is_over(self, pid: int, why: str) -> None:
        """The stream of process ``pid``, which holds the lock no longer, has ended, and the process goes on. Without
        room nobody is told."""
        with contextlib.suppress(OSError):
            write_whole(self.folder / _OVER, json.dumps({"pid": pid, "why": why}).encode())

    def why_over(self, pid: int) -> str | None:
        """Why the stream of process ``pid`` has ended, as that has said; None where it has said nothing."""
        try:
            said = json.loads((self.folder / _OVER).read_bytes())
            return str(said["why"]) if said["pid"] == pid else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def holder(self) -> str | None:
        """What the process that holds the lock has said of itself; None when nobody holds it."""
        try:
            descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(descriptor, _LONGEST_NOTE, 0).decode("utf-8", "replace")
        else:
            return None
        finally:
            os.close(descriptor)

    def _lock(self) -> int:
        """Gives the descriptor that holds the lock. Raises as ``locked``."""
        try:
            for folder in (self.folder, self.folder / _BRANCHES, self.incoming):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.chmod(0o700)
            sync_folder(self.folder)  # names that were just made outlive a power cut
            with contextlib.suppress(PermissionError):
                sync_folder(self.folder.parent)
            shutil.rmtree(self.folder / "intake", ignore_errors=True)  # of versions that copied with a program
            descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RefusedError(
                f"the spool {self.folder} cannot be used: {error.strerror}",
                hint="the spool must belong to the user that runs backupd",
            ) from error
        for left in reversed(range(_TRIES)):  # who asks for the holder has it for a moment
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if left:
                    time.sleep(_MOMENT)
            else:
                return descriptor
        os.close(descriptor)
        raise BusyError(
            f"another stream already writes to {self.folder}",
            hint="one stream per server: stop the other process, or do not start this one",
        )

    def seen(self) -> Seen | None:
        """What was last known of the server that the newest branch is of."""
        return self._now().seen

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """Of the newest branch's ended files, as far as they are remembered, in log order."""
        with self._guard:
            state = self._now()
            if not state.branches:
                return ()
            newest = state.branches[-1].id
            return tuple(
                entry.fingerprint for entry in state.files if entry.branch == newest and entry.fingerprint is not None
            )

    def newest(self) -> Spooled | None:
        """The newest file of the newest branch, removed or not; it is on the disk."""
        with self._guard:
            state = self._now()
            entry = state.files[-1] if state.files else None
            if entry is None or entry.branch != state.branches[-1].id:
                return None
            return self._spooled(entry)

    def left(self, server_uuid: str) -> Left | None:
        """The last branch of a server that another one replaced."""
        return next((one for one in self._now().left if one.seen.server_uuid == server_uuid), None)

    def begin(self, branch: Branch, end: Position | None = None) -> None:
        """A branch begins; nothing more comes to the one before, which ends at ``end`` where any of it is here."""
        with self._guard:
            last = self.newest()
            if last is not None and last.ended is None:
                self.end(last, Ending.CUT)
            left, seen = self._now().left, self.seen()
            if last is not None and end is not None and seen is not None:
                was = Left(end, fingerprint_of(last.path, *last.key, end.pos), seen)
                left = (*(one for one in left if one.seen.server_uuid != seen.server_uuid), was)
            (self.folder / _BRANCHES / branch.id).mkdir(mode=0o700, exist_ok=True)
            sync_folder(self.folder / _BRANCHES)
            self._save(branches=(*self._now().branches, branch), seen=None, unlogged=None, left=left, fatal=())
            self._sweep()

    def add_gap(self, gap: Gap) -> None:
        """Remember a gap, instead of one that is known after the same position, but for when that was noticed."""
        with self._guard:
            gaps = self._now().gaps
            known = next((one for one in gaps if (one.branch, one.after) == (gap.branch, gap.after)), gap)
            if known.before != gap.before or known not in gaps:
                self._save(gaps=(*(one for one in gaps if one is not known), replace(gap, noticed_at=known.noticed_at)))

    def take(self, branch: Branch, number: int, name: str) -> Spooled:
        """``incoming/name`` goes on from what is here: it becomes the branch's file (again). The file before it must
        have ended."""
        with self._guard:
            path = self._path(branch.id, name)
            (self.incoming / name).replace(path)
            path.chmod(0o600)
            sync_folder(path.parent)
            key = (branch.id, number)
            entries = [entry for entry in self._now().files if entry.key != key]
            # One that had been removed was archived whole: it is compared again, and stays removed.
            removed = any(entry.removed for entry in self._now().files if entry.key == key)
            entry = Entry(*key, name, None, 0, removed=removed)
            self._save(files=(*entries, entry))
            self._sweep()
            return self._spooled(entry)

    def end(self, file: Spooled, ending: Ending) -> Spooled:
        """Nothing more comes to ``file``. It is on the disk afterwards."""
        with self._guard:
            size = self.sync(file)
            self._change(file, ended=ending, size=size, fingerprint=fingerprint_of(file.path, *file.key, size))
            return replace(file, size=size, ended=ending)

    def cut(self, file: Spooled, end: int) -> Spooled:
        """Throw away what is behind ``end``: half a transaction that its server never finished, or what is damaged. A
        file that had ended may be written to again."""
        with self._guard:
            os.truncate(file.path, end)
            if file.ended is not None:  # where the archive was through with it, it has to archive the rest
                self._change(file, ended=None, size=0, fingerprint=None, removed=False)
            return replace(file, size=end, ended=None)

    def renew(self, file: Spooled, fresh: Path, ending: Ending) -> Spooled:
        """``fresh`` replaces a file that has ended. It is on the disk afterwards."""
        with self._guard:
            fresh.chmod(0o600)
            with fresh.open("rb") as opened:
                os.fsync(opened.fileno())
            fresh.replace(file.path)
            return self.end(file, ending)

    def bring_back(self, branch: Branch, number: int, fresh: Path, ending: Ending) -> Spooled:
        """``fresh`` is a file of ``branch`` that has ended and was lost before it was archived whole: it is to be
        archived now, and no gap is behind it."""
        with self._guard:
            name = branch.file(number)
            path = self._path(branch.id, name)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            fresh.chmod(0o600)
            fresh.replace(path)
            state = self._now()
            order = {one.id: turn for turn, one in enumerate(state.branches)}
            entries = [entry for entry in state.files if entry.key != (branch.id, number)]
            entry = Entry(branch.id, number, name, None, 0)
            self._save(
                files=tuple(sorted((*entries, entry), key=lambda one: (order[one.branch], one.number))),
                gaps=tuple(gap for gap in state.gaps if (gap.branch, gap.after.file) != (branch.id, name)),
            )
            return self.end(self._spooled(entry), ending)

    def note(self, seen: Seen) -> None:
        """Remember what the server looked like when all was well."""
        with self._guard:
            if self._now().seen != seen:
                self._save(seen=seen)

    def unlogged(self) -> datetime | None:
        """When the server was first seen to write no binary log, since the newest branch began; None: never."""
        return self._now().unlogged

    def note_unlogged(self, at: datetime) -> None:
        """The server writes no binary log: it is on the disk when this returns. Raises OSError."""
        with self._guard:
            if self._now().unlogged is None:
                self._save(unlogged=at)

    def is_fatal(self, name: str) -> bool:
        """Did the server crash when it read its file ``name`` of the newest branch? Then nobody asks it for that."""
        return name in self._now().fatal

    def note_fatal(self, name: str) -> None:
        """Raises OSError."""
        with self._guard:
            if not self.is_fatal(name):
                self._save(fatal=(*self._now().fatal, name))

    def clear_incoming(self) -> None:
        """Nothing of an earlier connection is of use. Raises OSError."""
        shutil.rmtree(self.incoming, ignore_errors=True)
        self.incoming.mkdir(mode=0o700, exist_ok=True)

    # --- how

    def _path(self, branch: str, name: str) -> Path:
        return self.folder / _BRANCHES / branch / name

    def _spooled(self, entry: Entry) -> Spooled:
        path = self._path(entry.branch, entry.name)
        size = entry.size
        if entry.ended is None:
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_size
        return Spooled(entry.branch, entry.number, entry.name, path, size, entry.ended)

    def _now(self) -> State:
        with self._guard:
            if self._state is None:
                self._state = self._read()
            return self._state

    def _read(self) -> State:
        path = self.folder / _STATE
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return State()
        except OSError as error:
            raise RefusedError(
                f"the spool {self.folder} cannot be read: {error.strerror}",
                hint="the spool must belong to the user that runs backupd",
            ) from error
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise ValueError(f"its format is {data['format']!r}, this version reads {_FORMAT}")
            return State.from_json(data)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(
                f"{path} cannot be read", [str(error)], hint=f"move {self.folder} away: a new one begins a new branch"
            ) from error

    def _change(self, file: Spooled, **changes: Any) -> None:
        """Write down something else of one file."""
        files = (replace(entry, **changes) if entry.key == file.key else entry for entry in self._now().files)
        self._save(files=tuple(files))

    def _save(self, **changes: Any) -> None:
        """Raises RefusedError as ``check_lock``."""
        self.check_lock()
        state = replace(self._now(), **changes)
        document = {"format": _FORMAT, **state.as_json()}
        write_whole(self.folder / _STATE, json.dumps(document, separators=(",", ":")).encode())
        self._state = state

    def _reconcile(self) -> None:
        """After a kill: files that were taken and not written down yet; files that others followed."""
        state = self._now()
        known = {entry.key for entry in state.files}
        found = list(state.files)
        for branch in state.branches:
            folder = self.folder / _BRANCHES / branch.id
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                number = branch.number(path.name)
                if number and (branch.id, number) not in known:
                    found.append(Entry(branch.id, number, path.name, None, 0))
        order = {branch.id: index for index, branch in enumerate(state.branches)}
        found.sort(key=lambda entry: (order[entry.branch], entry.number))
        kept = (entry for index, entry in enumerate(found) if not entry.removed or index + 1 == len(found))
        paths = (self._path(entry.branch, entry.name) for entry in kept)
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise DamagedError(
                f"a binary log is missing from the spool {self.folder}",
                [str(path) for path in missing],
                hint=f"restore the file, or move {self.folder} away: a new spool begins a new branch",
            )
        for index, entry in enumerate(found[:-1]):
            if entry.ended is None:
                path = self._path(entry.branch, entry.name)
                size = self.sync(self._spooled(entry))
                same_branch = found[index + 1].branch == entry.branch
                ended, mark = (
                    ending_of(path, size) if same_branch else Ending.CUT,
                    fingerprint_of(path, *entry.key, size),
                )
                found[index] = replace(entry, ended=ended, size=size, fingerprint=mark)
        if tuple(found) != state.files:
            self._save(files=tuple(found))
        self._sweep()

    def _sweep(self) -> None:
        """Removed files leave the disk, all but the newest of all; of the last ones it is remembered what they were."""
        state = self._now()
        for entry in state.files[:-1]:
            if entry.removed:
                self._path(entry.branch, entry.name).unlink(missing_ok=True)
        gone = [entry for entry in state.files[:-1] if entry.removed]
        forgotten = {entry.key for entry in gone[:-_REMEMBERED]}
        if forgotten:
            self._save(files=tuple(entry for entry in state.files if entry.key not in forgotten))
