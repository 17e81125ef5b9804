"""Destinations that do not answer, or are not there any more, are told, once, and when they are well again."""

from __future__ import annotations

from datetime import datetime

from backupd.app.context.incidents import Incidents, Pair
from backupd.app.context.wiring import Wiring
from backupd.app.views.destinations import PlaceView, places
from backupd.model.event import Event, Severity

REACH = Pair("destination-unreachable", "destination-reachable")
_LOOKS = 3
"""So many looks in a row, a minute apart, in which it does not answer: a moment's trouble is none."""


class ReachWatch:
    """From one thread. The looking itself goes on in the background: see ``places``."""

    def __init__(self) -> None:
        self._silent: dict[str, list[datetime]] = {}

    def step(self, wiring: Wiring, now: datetime) -> None:
        """Raises CatalogError."""
        incidents = Incidents(wiring.catalog)
        for place in places(wiring, now):
            self._look(incidents, place, now)

    def _look(self, incidents: Incidents, place: PlaceView, now: datetime) -> None:
        if place.reachable is None:
            return
        if place.reachable and not place.is_lost:
            self._silent.pop(place.name, None)
            incidents.mended(
                REACH,
                Event(now, REACH.mended, Severity.INFO, f"destination {place.name} answers again", subject=place.name),
            )
            return
        looks = self._silent.setdefault(place.name, [])
        if place.checked_at is not None and place.checked_at not in looks:
            looks.append(place.checked_at)
        if len(looks) < _LOOKS and not place.hangs:
            return
        if place.is_lost:
            what = f"should hold {place.backups} backups, but it is empty or not a repository"
            hint = "is the file system mounted? Backups that need it fail until it is there again"
        else:
            what = f"cannot be reached: {place.trouble}"
            hint = "backups that need it fail until it answers; `backupd check` says what is wrong with it"
        incidents.broken(
            REACH,
            Event(now, REACH.broken, Severity.ERROR, f"destination {place.name} {what}", subject=place.name, hint=hint),
        )
