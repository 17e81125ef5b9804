"""What stays and what goes, as the destination itself records it: holds and keeps, and marks of deletion.

Holds and keeps are written at the destination, so every installation that sweeps there sees them, whatever catalog it
has. A hold covers one server, or every server (``*``); a keep covers one backup. A note that cannot be read counts: its
key alone says what it is about.

A mark of deletion is an ordinary file: everybody who may put files can put one with any time in it. So the time in a
mark never makes it count sooner than since it is known here. Where nothing may be deleted a mark cannot be taken away:
a document that takes it back replaces it then, and counts as no mark.

Object locks: removing many keys past those that are locked, and keeping locked what a backup builds on.

A locked key is no failure of the caller that removes: it is reported, and the next caller tries again.

A destination locks an object when it is stored. Without ``lengthen``, objects that a backup names again, and everything
that an increment builds on, would be locked until the first backup's date only, and could be deleted under the last
one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from backupd.model.backup_record import EVERY_SERVER, Hold, HoldKind, Sighting
from backupd.model.errors import ArchivedError, LockedError, MissingRightsError, ObjectMissingError
from backupd.model.text import format_time, parse_time
from storage import layout
from storage.destination import Destination, LockingDestination, ObjectInfo, as_locking, exists, read_note, write_note

if TYPE_CHECKING:
    from backupd.model.manifest import Header

Backup = tuple[str, str]
"""(server, backup id)"""


@dataclass(frozen=True, slots=True)
class Kept:
    """``holds`` by server (``*``: every one); ``backups``: those that somebody keeps one by one; ``foreign``: those
    that nobody here took or adopted."""

    holds: Mapping[str, Hold] = field(default_factory=dict)
    backups: frozenset[Backup] = frozenset()
    foreign: frozenset[Backup] = frozenset()

    def covers(self, backup: Backup) -> bool:
        """Must ``backup`` stay, for whatever reason?"""
        return backup in self.backups or backup in self.foreign or backup[0] in self.holds or EVERY_SERVER in self.holds

    def reason(self, backup: Backup) -> str:
        """Why ``backup``, which is covered, stays."""
        hold = self.holds.get(backup[0]) or self.holds.get(EVERY_SERVER)
        if hold is None and backup in self.foreign:
            return (
                "it is foreign: nothing shows that this installation took it, and `backupd catalog adopt "
                f"{backup[1]}` was not run"
            )
        return hold.text if hold is not None else "it is kept (`backupd backups keep`)"


def kept_at(destination: Destination) -> Kept:
    """Everything that is kept on purpose by what ``destination`` itself says."""
    holds: dict[str, Hold] = {}
    backups: set[Backup] = set()
    for info in list(destination.list(layout.HELD)):
        server = layout.held_server(info.key)
        owner = layout.backup_of(info.key)
        if server is not None:
            hold = _read(destination, info, server)
            if hold is not None:
                holds[server] = hold
        elif owner is not None:
            backups.add(owner)
    return Kept(holds, frozenset(backups))


def put_hold(destination: Destination, hold: Hold) -> None:
    """Write (again) that nothing of ``hold.server`` is deleted here."""
    note = {"server": hold.server, "reason": hold.reason, "by": hold.set_by, "since": format_time(hold.since)}
    write_note(destination, layout.hold_key(hold.server), note)


def remove_hold(destination: Destination, server: str) -> bool:
    """Was there one of exactly this name?"""
    there = server in kept_at(destination).holds
    destination.delete(layout.hold_key(server))
    return there


def put_keep(destination: Destination, server: str, backup_id: str, now: datetime) -> None:
    """Write at the destination that this backup is not deleted; again is harmless."""
    note = {"server": server, "backup": backup_id, "since": format_time(now)}
    write_note(destination, layout.keep_key(server, backup_id), note)


def remove_keep(destination: Destination, server: str, backup_id: str) -> None:
    """End the keep of one backup; nothing happens where there is none."""
    destination.delete(layout.keep_key(server, backup_id))


def _read(destination: Destination, info: ObjectInfo, server: str) -> Hold | None:
    try:
        note = read_note(destination, info.key)
        return Hold(server, HoldKind.HOLD, str(note["reason"]), str(note["by"]), parse_time(note["since"]))
    except ObjectMissingError:
        return None  # released in this moment
    except (ArchivedError, ValueError, KeyError, TypeError, AttributeError):
        return Hold(server, HoldKind.HOLD, "a hold whose reason cannot be read", "an unknown person", info.modified_at)


_WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Mark:
    """Since when a backup is marked deleted, and why, by its own words; ``reason`` is empty where nobody said.
    ``stored``: when that was stored, as the destination lists it."""

    at: datetime
    reason: str
    stored: datetime


Sightings = Callable[[Mapping[Backup, Mark]], Mapping[Backup, Sighting]]
"""What an installation knows by itself of each of the marks that it finds at a destination."""


def is_due(mark: Mark, known: Sighting, now: datetime, grace: timedelta) -> bool:
    """Is its grace period over? It counts from when the mark is known here; somebody else's may ask for more."""
    since = known.since if known.ours else max(known.since, min(mark.at, now))
    return now - since >= grace


def explaining(
    found: Mapping[Backup, Mark], known: Mapping[Backup, Sighting], now: datetime, grace: timedelta
) -> set[Backup]:
    """Of the marks that were ``found``, those that explain a missing manifest: this installation put them, or their
    grace period is over, so that somebody may have been removing the backup."""
    return {
        owner
        for owner, mark in found.items()
        if owner in known and (known[owner].ours or is_due(mark, known[owner], now, grace))
    }


def is_marked(destination: Destination, server: str, backup_id: str) -> bool:
    """Is the backup marked deleted? One request where there is no mark. One that cannot be read counts."""
    key = layout.mark_key(server, backup_id)
    return exists(destination, key) and not is_withdrawn(destination, key)


def is_withdrawn(destination: Destination, key: str) -> bool:
    """Was the mark under ``key`` taken back, or away?"""
    try:
        return takes_back(read_note(destination, key))
    except ObjectMissingError:
        return True
    except (ArchivedError, ValueError):
        return False


def takes_back(note: object) -> bool:
    """Does this document stand for a mark that was taken back?"""
    return isinstance(note, dict) and isinstance(note.get(_WITHDRAWN), str)


def withdraw(destination: Destination, server: str, backup_id: str, now: datetime) -> None:
    """Take the mark away, or back; nothing happens where there is none."""
    key = layout.mark_key(server, backup_id)
    try:
        destination.delete(key)
    except LockedError:
        note = {"server": server, "backup": backup_id, _WITHDRAWN: format_time(now)}
        write_note(destination, key, note)


WORKERS = 16
_FEW = 4
"""So many are done one after the other: a pool would cost more than it saves."""

Item = TypeVar("Item")
Found = TypeVar("Found")


def each(act: Callable[[Item], Found], items: Iterable[Item], *, workers: int = WORKERS) -> list[Found]:
    """``act`` of every item, several at once, in their order. The first error is raised, once the others have ended."""
    todo = list(items)
    if len(todo) <= _FEW:
        return [act(item) for item in todo]
    with ThreadPoolExecutor(max_workers=min(workers, len(todo)), thread_name_prefix="each") as pool:
        return list(pool.map(act, todo))


class Locks:
    """What may not be removed yet, by key: for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, LockedError] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def delete(self, destination: Destination, key: str) -> bool:
        """Remove ``key``; False when that may not be. Raises DestinationError for every other failure."""
        try:
            destination.delete(key)
        except LockedError as error:
            with self._lock:
                self._found[key] = error
            return False
        return True

    def delete_all(self, destination: Destination, keys: Sequence[str]) -> int:
        """How many of ``keys`` went."""
        return sum(each(lambda key: self.delete(destination, key), keys))

    @property
    def keys(self) -> tuple[str, ...]:
        """All that may not be removed yet."""
        return tuple(self._found)

    @property
    def missing_rights(self) -> str:
        """Which rights are missing for some of them, "" where none are."""
        return next((error.hint for error in self._found.values() if isinstance(error, MissingRightsError)), "")

    @property
    def text(self) -> str:
        """What to say of all of them: how many, and the words of one; empty when there are none."""
        if not self._found:
            return ""
        key, error = min(self._found.items())
        more = f" and {len(self._found) - 1} more" if len(self._found) > 1 else ""
        reason = error.line
        return f"{len(self._found)} files may not be removed yet: {key}{more}: {reason}"


def lengthen(destination: Destination, keys: Iterable[str], since: datetime) -> int:
    """Lock each of ``keys`` that is there as if it had been stored at ``since``; for how many that had to be asked for.
    Nothing happens where nothing is locked. Raises DestinationError."""
    locking = as_locking(destination)
    return 0 if locking is None else sum(each(lambda key: _extend(locking, key, since), keys))


def lengthen_all(
    destination: Destination, header: Header, above: Collection[str], since: datetime, *, stored: Collection[str]
) -> int:
    """The same for everything at ``destination`` that the backup ``header`` counts on, but for the keys ``stored``,
    which are locked already. ``above``: ids of what it builds on."""
    from backupd.model.manifest import Header
    from backupd.transfer.records.manifests import read

    if as_locking(destination) is None:
        return 0
    keys = dict.fromkeys(_names(header))
    for backup_id in above:
        found = read(destination, header.server, backup_id)
        if found is not None and isinstance(found.header, Header):
            keys |= dict.fromkeys((*_names(found.header), *_described(layout.manifest_key(header.server, backup_id))))
    keys |= dict.fromkeys(_of_the_destination(destination))
    return lengthen(destination, [key for key in keys if key not in stored], since)


def lengthen_branch(destination: Destination, server: str, branch: str, since: datetime) -> int:
    """The same for what describes a branch of binary logs: it is stored once, and all its logs count on it."""
    return lengthen(destination, _described(layout.branch_key(server, branch)), since)


def _extend(locking: LockingDestination, key: str, since: datetime) -> bool:
    try:
        return locking.extend(key, since)
    except ObjectMissingError:
        return False


def _names(header: Header) -> Iterator[str]:
    folder = layout.backup_folder(header.server, header.backup_id)
    yield from (layout.object_key(item.name) for item in header.objects)
    yield from (folder + item.name for item in header.side_files)


def _of_the_destination(destination: Destination) -> Iterator[str]:
    """The marker, and of each installation the newest copy of its configuration: both are stored once."""
    yield layout.REPOSITORY
    newest = {
        made[1]: info.key
        for info in destination.list(layout.CONFIGURATIONS)
        if (made := layout.copy_of(info.key)) is not None
    }
    for key in newest.values():
        yield from _described(key)


def _described(key: str) -> tuple[str, str]:
    return key, layout.signature_key(key)
