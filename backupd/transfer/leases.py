"""Who is at work at a destination: a small document there, renewed by a thread while its owner lives.

On the same machine a lease lives as long as its process; from elsewhere, as long as its heartbeat is fresh. A holder
that could not renew in time gives up by itself well before anybody else may call it dead.

Three kinds: the pin of a restore, the intent of a backup that is being written, and the lease of whoever removes.

While a pin lives, no sweep removes the backups that the restore reads.

The intent comes before the first object and goes after the commit. While it lives, nothing that the backup stored or
reused is collected. So: write the intent, *then* read what is known (``backupd.transfer.dedup``); in the other order a
sweep in between could take away what the backup counts on.

The same holds for the backups that an increment builds on. A deletion puts its mark first, and a sweep reads the marks
before the intents and removes no backup that a living intent names as one that its own builds on. So a backup that has
written its intent and *then* finds the parents unmarked keeps them until it ends, and from its commit on the manifest
does. Other backups of its server may go meanwhile; the objects that they share with it stay, as above.

One at a time removes at a destination, whichever installation it belongs to. Whoever wants to remove puts a lease and
then looks for others'; when there is one it steps back. So of two that begin together at least one does, maybe both,
never none. That matters where bytes come back under a name that they had (a copy from another destination, a repair): a
second one that is slower would remove them behind the first one's back. Whoever takes a mark away waits for the sweep
that may have read it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

from backupd.model.document import NOTE_LIMIT, Document, parsed
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    BusyError,
    CancelledError,
    LockedError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
)
from backupd.model.text import Clock, format_time, new_id, parse_time
from backupd.process.run_context import utc_now
from backupd.transfer.holds_and_locks import is_marked
from storage import layout
from storage.destination import Destination, exists, is_listed

HEARTBEAT = 15.0
"""Seconds between renewals."""
FRESH = timedelta(minutes=15)
"""A lease of another machine whose heartbeat is older is dead."""
GIVE_UP = timedelta(minutes=10)
"""A holder that could not renew for so long stops: safely before others may count it dead."""

_held: set[str] = set()
"""Keys that this very process holds: a lease whose removal failed must not live as long as a daemon does."""


@dataclass(frozen=True, slots=True)
class Owner(Document):
    """A process, distinguished from every other one that ever was or will be."""

    host: str
    boot: str
    namespace: str
    pid: int
    ticks: int

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        return cls(
            host=socket.gethostname(),
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            # process ids of another container mean other processes, even under the same host name and boot
            namespace=str(Path("/proc/self/ns/pid").readlink()),
            pid=os.getpid(),
            ticks=_start_ticks(os.getpid()) or 0,
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """``key`` is where it is. ``backups``: (server, id) of the backups it is about; ``parents``: ids of those, of the
    same server, that the one being written builds on. ``owner`` None: unreadable."""

    key: str
    backups: tuple[tuple[str, str], ...]
    owner: Owner | None
    started_at: datetime
    heartbeat_at: datetime
    parents: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The id of the backup, restore or sweep that holds the lease."""
        return layout.name_in(self.key)

    def encode(self) -> bytes:
        """The document as it is stored (JSON); ``decode`` reads it."""
        if self.owner is None:
            raise ValueError("a lease needs an owner")
        document = {
            **self.owner.as_json(),
            "id": self.id,
            "backups": [list(backup) for backup in self.backups],
            "server": self.backups[0][0] if self.backups else "",
            "started_at": format_time(self.started_at),
            "heartbeat_at": format_time(self.heartbeat_at),
            "parents": list(self.parents),
        }
        return (json.dumps(document, sort_keys=True) + "\n").encode("ascii")


def decode(key: str, raw: bytes, modified_at: datetime) -> Lease:
    """A stored lease. One that cannot be read counts as somebody's, as of ``modified_at``."""
    try:
        data: dict[str, Any] = parsed(raw, limit=NOTE_LIMIT)
        return Lease(
            key=key,
            backups=tuple((str(server), str(name)) for server, name in data["backups"]),
            owner=Owner.from_json(data),
            started_at=parse_time(data["started_at"]),
            heartbeat_at=parse_time(data["heartbeat_at"]),
            parents=tuple(str(name) for name in data["parents"]),
        )
    except (ValueError, KeyError, TypeError):
        return Lease(key=key, backups=(), owner=None, started_at=modified_at, heartbeat_at=modified_at)


def leases(destination: Destination, prefix: str) -> list[Lease]:
    """Every lease under ``prefix``, living or dead."""
    found: list[Lease] = []
    for info in list(destination.list(prefix)):
        try:
            with destination.get(info.key) as stream:
                found.append(decode(info.key, stream.read(NOTE_LIMIT + 1), info.modified_at))
        except ArchivedError:
            found.append(decode(info.key, b"", info.modified_at))
        except ObjectMissingError:
            if is_listed(destination, info.key):
                found.append(decode(info.key, b"", info.modified_at))
            # else it ended meanwhile
    return found


def is_alive(lease: Lease, now: datetime) -> bool:
    """Is the owner of ``lease`` still at work, or can that not be ruled out?"""
    owner = lease.owner
    here = Owner.current()
    if owner is None or (owner.host, owner.boot, owner.namespace) != (here.host, here.boot, here.namespace):
        return now - lease.heartbeat_at < FRESH
    if (owner.pid, owner.ticks) == (here.pid, here.ticks):
        return lease.key in _held
    return _start_ticks(owner.pid) == owner.ticks


Alive = Callable[[Lease, datetime], bool]
"""Decides whether a lease lives, as ``is_alive`` does."""


class Holder:
    """Holds one lease at several destinations, as a context manager.

    Entering writes it everywhere or nowhere and starts the heartbeat; leaving, well or not, stops it and removes the
    lease. ``unremoved`` then names the destinations where that failed (the lease there is dead all the same).
    """

    def __init__(
        self,
        destinations: Sequence[Destination],
        key: str,
        backups: Sequence[tuple[str, str]],
        *,
        parents: Sequence[str] = (),
        clock: Clock = utc_now,
        interval: float = HEARTBEAT,
    ) -> None:
        self._destinations = tuple(destinations)
        self._clock = clock
        self._interval = interval
        now = clock()
        self.lease = Lease(key, tuple(backups), Owner.current(), now, now, tuple(parents))
        self._renewed: dict[str, datetime] = {}
        self._trouble: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat {key}", daemon=True)
        self.unremoved: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        now = self._clock()
        self.lease = replace(self.lease, started_at=now, heartbeat_at=now)
        _held.add(self.lease.key)
        try:
            for destination in self._destinations:
                destination.put(self.lease.key, io.BytesIO(self.lease.encode()))
                self._renewed[destination.name] = now
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        try:
            self._entered()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _entered(self) -> None:
        """What a kind of lease asks for once it is put; raises where that is not so."""

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._remove()

    def assert_held(self) -> None:
        """Raises CancelledError when somebody may have called us dead and begun to clean up after us.

        Ask right before and right after putting the manifest: whoever cleans up removes our lease first of all, so a
        lease that is still there after the commit proves that nobody counted our objects as garbage before it.
        """
        now = self._clock()
        for destination in self._destinations:
            late = now - self._renewed.get(destination.name, self.lease.started_at)
            if late >= GIVE_UP:
                raise CancelledError(
                    f"{self.lease.key} at destination {destination.name} was not renewed "
                    f"for {late.total_seconds():.0f} s",
                    detail=self._trouble.get(destination.name, "the process was suspended, or its clock was moved"),
                    hint="run the job again",
                )
            try:
                destination.stat(self.lease.key)
            except ObjectMissingError as error:
                raise CancelledError(
                    f"{self.lease.key} at destination {destination.name} was removed by another process",
                    hint="another process took this run for dead; run the job again",
                ) from error

    def beat(self) -> None:
        """Renew once, everywhere; where it fails, the next beat tries again."""
        for destination in self._destinations:
            now = self._clock()
            if now - self._renewed.get(destination.name, now) >= GIVE_UP:
                continue  # given up: renewing now could revive what somebody is just removing
            try:
                destination.stat(self.lease.key)
                renewed = replace(self.lease, heartbeat_at=now)
                destination.put(self.lease.key, io.BytesIO(renewed.encode()))
                self._renewed[destination.name] = now
            except BackupdError as error:
                self._trouble[destination.name] = str(error)

    def _beat(self) -> None:
        while not self._stop.wait(self._interval):
            self.beat()

    def _remove(self) -> None:
        failed: list[str] = []
        try:
            for destination in self._destinations:
                try:
                    destination.delete(self.lease.key)
                except BackupdError as error:
                    failed.append(f"{destination.name}: {error.message}")
                    if isinstance(error, LockedError):
                        self._end_at(destination)
        finally:
            self.unremoved = tuple(failed)
            _held.discard(self.lease.key)

    def _end_at(self, destination: Destination) -> None:
        """Where nothing may be deleted: let the lease be that of a process that is dead, for whoever asks."""
        if (owner := self.lease.owner) is None:
            return
        over = replace(self.lease, owner=replace(owner, pid=0, ticks=-1), heartbeat_at=self._clock() - FRESH)
        with contextlib.suppress(BackupdError):  # then it is alive for others until it is old
            destination.put(self.lease.key, io.BytesIO(over.encode()))


def _start_ticks(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks since boot (proc(5), field 22 of stat), None when there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


PATIENCE = 120.0
"""Seconds that taking a mark away waits for somebody's sweep."""
_LOOK = 0.2


def sweeps(destination: Destination) -> list[Lease]:
    """Every sweep at ``destination``, living or dead."""
    return leases(destination, layout.SWEEPS)


@contextmanager
def sweeping(destination: Destination, *, clock: Clock, alive: Alive = is_alive) -> Iterator[Holder]:
    """While the block runs nobody else removes here; ask ``assert_held`` before each step. Leases of the dead go.

    Raises BusyError when somebody is at it, LockedError where not even a lease may be removed: then nothing may.
    """
    _clear(destination, clock, alive)
    with Holder([destination], layout.sweep_key(new_id(clock())), (), clock=clock) as holder:
        _clear(destination, clock, alive, ours=holder.lease.key)
        yield holder


@contextmanager
def unswept(destination: Destination, *, clock: Clock) -> Iterator[Holder]:
    """While the block runs nobody removes here, whoever runs it may not remove anything either. Raises BusyError when
    somebody is at it."""
    with Holder([destination], layout.sweep_key(new_id(clock())), (), clock=clock) as holder:
        _dead(destination, clock, is_alive, ours=holder.lease.key)
        yield holder


def _clear(destination: Destination, clock: Clock, alive: Alive, *, ours: str = "") -> None:
    """Remove the leases of the dead. Raises BusyError when one lives that is not ``ours``."""
    for lease in _dead(destination, clock, alive, ours=ours):
        destination.delete(lease.key)


def _dead(destination: Destination, clock: Clock, alive: Alive, *, ours: str) -> list[Lease]:
    """Leases of the dead. Raises BusyError when one lives that is not ``ours``."""
    others = [lease for lease in sweeps(destination) if lease.key != ours]
    for lease in others:
        if alive(lease, clock()):
            who = "another process" if lease.owner is None else f"process {lease.owner.pid} on {lease.owner.host}"
            raise BusyError(
                f"{who} holds the clean-up lease at destination {destination.name}",
                hint="the next removal deletes the due files",
            )
    return others


def await_sweeps(destination: Destination, *, clock: Clock, patience: float = PATIENCE) -> None:
    """Wait for everybody who began to remove here before now. Raises BusyError after ``patience`` seconds."""
    began = {lease.key for lease in sweeps(destination) if is_alive(lease, clock())}
    deadline = time.monotonic() + patience
    pause = threading.Event()
    while began:
        if time.monotonic() >= deadline:
            raise BusyError(
                f"another process has held the clean-up lease at {destination.name} for {patience:g} s",
                detail=", ".join(sorted(began)),
                hint="run the command again when that has ended",
            )
        pause.wait(_LOOK)
        began &= {lease.key for lease in sweeps(destination) if is_alive(lease, clock())}


class Pin(Holder):
    """``with Pin(destination, restore_id, [(server, backup_id), ...]): ...``

    Entering raises NotFoundError when a backup is not at ``destination`` and RefusedError when it is marked deleted:
    a sweep reads the marks first and the pins after, so whoever pins first and then finds no mark is safe. ``some``: it
    is enough that one of them is there; ``absent`` then shows why each other one is not.
    """

    def __init__(
        self,
        destination: Destination,
        restore_id: str,
        backups: Sequence[tuple[str, str]],
        *,
        clock: Clock = utc_now,
        some: bool = False,
    ) -> None:
        super().__init__([destination], layout.pin_key(restore_id), backups, clock=clock)
        self._some = some
        self.absent: dict[tuple[str, str], BackupdError] = {}

    def _entered(self) -> None:
        for server, backup_id in self.lease.backups:
            try:
                self._require(server, backup_id)
            except (NotFoundError, RefusedError) as error:
                self.absent[server, backup_id] = error
                if not self._some or len(self.absent) == len(self.lease.backups):
                    raise

    def _require(self, server: str, backup_id: str) -> None:
        (destination,) = self._destinations
        name = destination.name
        if is_marked(destination, server, backup_id):
            raise RefusedError(
                f"backup {backup_id} of {server} at destination {name} is marked deleted",
                hint=f"backupd backups undelete {backup_id} removes the mark until the grace period ends",
            )
        if not exists(destination, layout.manifest_key(server, backup_id)):
            raise NotFoundError(f"destination {name} has no backup {backup_id} of {server}")


def pins(destination: Destination) -> list[Lease]:
    """Every pin at ``destination``, living or dead."""
    return leases(destination, layout.PINS)


class Intent(Holder):
    """``with Intent(destinations, server, backup_id) as intent: ...``

    ``parents``: ids of everything that the backup builds on. Entering and ``assert_held`` raise RefusedError unless
    all of them are at every destination, and not marked deleted.
    """

    def __init__(
        self,
        destinations: Sequence[Destination],
        server: str,
        backup_id: str,
        *,
        parents: Sequence[str] = (),
        clock: Clock = utc_now,
        interval: float = HEARTBEAT,
    ) -> None:
        key = layout.intent_key(backup_id)
        super().__init__(destinations, key, [(server, backup_id)], parents=parents, clock=clock, interval=interval)
        self._server = server

    def assert_held(self) -> None:
        """Raises what ``Holder.assert_held`` does, and RefusedError when something that the backup builds on is gone or
        marked."""
        super().assert_held()
        self._entered()

    def _entered(self) -> None:
        gone = [
            f"{name} at destination {destination.name} {trouble}"
            for destination in self._destinations
            for name in self.lease.parents
            if (trouble := _trouble(destination, self._server, name))
        ]
        if gone:
            raise RefusedError(
                "a backup that this one builds on was deleted meanwhile",
                detail="\n".join(gone),
                hint="run the backup again: it will be a full one",
            )


def _trouble(destination: Destination, server: str, backup_id: str) -> str:
    if is_marked(destination, server, backup_id):
        return "is marked deleted"
    return "" if exists(destination, layout.manifest_key(server, backup_id)) else "has no manifest"


def intents(destination: Destination) -> list[Lease]:
    """Every intent at ``destination``, living or dead."""
    return leases(destination, layout.INTENTS)


def living_intents(destination: Destination, now: datetime, alive: Alive = is_alive) -> list[Lease]:
    """The intents of backups that are running (or may be, where nobody can tell) at ``now``."""
    return [lease for lease in intents(destination) if alive(lease, now)]


def living_pins(destination: Destination, now: datetime, alive: Alive = is_alive) -> list[Lease]:
    """The pins of restores that are running (or may be, where nobody can tell) at ``now``."""
    return [lease for lease in pins(destination) if alive(lease, now)]
