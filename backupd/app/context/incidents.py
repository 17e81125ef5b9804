"""Incidents: what is open is read here, and what opens, restates or closes one is written here.

Whether one is open is in the catalog's events, so that a restart neither repeats nor forgets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from backupd.alerts.conditions import NOTHING, Condition, Key, Settled, settle
from backupd.catalog.session import Catalog


class Incidents:
    """Of one process; from one thread."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._closed: set[Key] = set()

    def is_open(self, key: Key) -> bool:
        """Raises CatalogError."""
        if key in self._closed:  # only one that is open may have been ended by others: nobody looked at it any more
            return False
        kind = key.kind
        last = self._catalog.events.last(key.server, (kind.broken, kind.mended, kind.unwatched), key.subject)
        if last is None or last.kind != kind.broken:
            self._closed.add(key)
        return key not in self._closed

    def settle(
        self,
        at: datetime,
        *holds: Condition,
        looked: Mapping[Key, str] = NOTHING,
        gone: Mapping[Key, str] = NOTHING,
        job_id: str = "",
    ) -> Settled:
        """Record what a look found (see ``conditions.settle``). Raises CatalogError."""
        keys = dict.fromkeys([*(one.key for one in holds), *looked, *gone])
        found = settle(at, [key for key in keys if self.is_open(key)], holds, looked, gone, job_id)
        self._catalog.events.add(*found.opened, *found.closed)
        for event in found.restated:
            self._catalog.incidents.restate(event)
        self._closed -= {one.key for one in holds}
        return found
