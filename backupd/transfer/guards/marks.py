"""Does a mark of deletion stand, and since when? Where nothing may be deleted a mark cannot be taken away: a document
that takes it back lies in its place then, and counts as none.

A mark is an ordinary file: whoever may put files can put one with any time in it. So what it says of itself never makes
it count sooner than since it is known here.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.model.errors import ArchivedError, LockedError, ObjectMissingError
from backupd.model.hold import Sighting
from backupd.model.text import format_time
from backupd.transfer.guards.holds import Backup
from backupd.transfer.guards.lease import exists
from storage.contract import layout
from storage.contract.destination import Destination, read_note

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
        destination.put(key, io.BytesIO(json.dumps(note, sort_keys=True).encode("ascii")))
