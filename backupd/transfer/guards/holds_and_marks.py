"""What stays and what goes, as the destination itself records it: holds and keeps, and marks of deletion.

Holds and keeps are written at the destination, so every installation that sweeps there sees them, whatever catalog it
has. A hold covers one server, or every server (``*``); a keep covers one backup. A note that cannot be read counts: its
key alone says what it is about.

A mark of deletion is an ordinary file: everybody who may put files can put one with any time in it. So the time in a
mark never makes it count sooner than since it is known here. Where nothing may be deleted a mark cannot be taken away:
a document that takes it back replaces it then, and counts as no mark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from backupd.model.errors import ArchivedError, LockedError, ObjectMissingError
from backupd.model.hold import EVERY_SERVER, Hold, HoldKind, Sighting
from backupd.model.text import format_time, parse_time
from backupd.transfer.guards.lease import exists
from storage.contract import layout
from storage.contract.destination import Destination, ObjectInfo, read_note, write_note

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
        return hold.text if hold is not None else "it is kept on purpose (`backupd backups keep`)"


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
    ``stored``: when that was stored, as the place lists it."""

    at: datetime
    reason: str
    stored: datetime


Sightings = Callable[[Mapping[Backup, Mark]], Mapping[Backup, Sighting]]
"""What an installation knows by itself of each of the marks that it finds at a place."""


def is_due(mark: Mark, known: Sighting, now: datetime, grace: timedelta) -> bool:
    """Is its grace period over? It counts from when the mark is known here; somebody else's may ask for more."""
    since = known.since if known.ours else max(known.since, min(mark.at, now))
    return now - since >= grace


def explaining(
    found: Mapping[Backup, Mark],
    known: Mapping[Backup, Sighting],
    now: datetime,
    grace: timedelta,
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
