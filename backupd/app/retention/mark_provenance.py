"""Marks of deletion, with what this installation knows of them by itself: which are its own, which a person here wants,
and since when somebody else's are seen here. The marks themselves could say anything."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from backupd.app.context.wiring import GRACE, Wiring
from backupd.model.hold import Sighting
from backupd.transfer.guards.holds_and_marks import Backup, Mark, Sightings, explaining, is_due
from backupd.transfer.sweep.deletion import marked
from storage.contract.destination import Destination


def sightings_at(wiring: Wiring, destination: Destination) -> Sightings:
    """Of every mark there is at ``destination``."""

    def look(found: Mapping[Backup, Mark]) -> Mapping[Backup, Sighting]:
        return wiring.catalog.marks.look(
            destination.name, {owner: note.stored for owner, note in found.items()}, wiring.clock()
        )

    return look


def own(wiring: Wiring, destination: Destination) -> dict[Backup, Mark]:
    """The marks that the rules, or somebody, of this installation put."""
    found = marked(destination)
    known = sightings_at(wiring, destination)(found)
    return {owner: note for owner, note in found.items() if known[owner].ours}


def believed(wiring: Wiring, destination: Destination) -> tuple[set[Backup], set[Backup]]:
    """The backups that are marked at ``destination``, and those of them whose mark explains that they are gone."""
    found = marked(destination)
    known = sightings_at(wiring, destination)(found)
    return set(found), explaining(found, known, wiring.clock(), GRACE)


def unconfirmed(wiring: Wiring, destination: Destination) -> dict[Backup, datetime]:
    """The marks that no person of this installation has confirmed, and the moment for which the brake counts each."""
    found = marked(destination)
    known = sightings_at(wiring, destination)(found)
    return {owner: known[owner].since for owner in found if not known[owner].confirmed}


def confirm(wiring: Wiring, destination: Destination, server: str) -> None:
    """A person says that what is marked of ``server`` may go: what this installation marked, and somebody else's marks
    whose grace period is over, so that the brake had time to tell of them. Those that are younger are not meant."""
    found = marked(destination)
    known = sightings_at(wiring, destination)(found)
    now = wiring.clock()
    for owner, note in found.items():
        if (
            owner[0] == server
            and not known[owner].confirmed
            and (known[owner].ours or is_due(note, known[owner], now, GRACE))
        ):
            wiring.catalog.marks.take(destination.name, owner, now, stored=note.stored, confirmed=True)
