"""Incidents: one event when something breaks, one when it is well again, however often anybody looks.

Whether one is open stands in the catalog's events, so that a restart neither repeats nor forgets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from backupd.alerts.rules import unwatched
from backupd.catalog.session import Catalog
from backupd.model.event import Event, Severity


@dataclass(frozen=True, slots=True)
class Pair:
    """The kinds of the two events."""

    broken: str
    mended: str

    @property
    def unwatched(self) -> str:
        """The kind of the event that ends it because nobody looks any more."""
        return unwatched(self.broken)

    def over(self, at: datetime, message: str, *, server: str = "", subject: str = "") -> Event:
        """The event that ends an incident."""
        return Event(at, self.mended, Severity.INFO, message, server=server, subject=subject)


STREAM = Pair("stream-failed", "stream-recovered")
SPOOL = Pair("spool-full", "spool-has-room")
PURGE = Pair("purge-alarm", "purge-over")
DESTINATION = Pair("destination-behind", "destination-caught-up")
RPO = Pair("rpo-broken", "rpo-kept")
RTO = Pair("rto-broken", "rto-kept")
API = Pair("api-failed", "api-recovered")
TLS = Pair("tls-unset", "tls-set")
POLICY = Pair("policy-broken", "policy-mended")
SLOW = Pair("destination-slow", "destination-keeps-up")
PLACE_RPO = Pair("destination-rpo-broken", "destination-rpo-kept")


class Incidents:
    """Of one process; from one thread. An incident is told apart by its pair and its event's server and subject."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._open: dict[tuple[Pair, str, str], bool] = {}

    def is_open(self, pair: Pair, server: str, subject: str) -> bool:
        """Raises CatalogError."""
        key = (pair, server, subject)
        if self._open.get(key, True):  # one that is open may have been ended by others: by now nobody looked after it
            last = self._catalog.events.last(server, (pair.broken, pair.mended, pair.unwatched), subject)
            self._open[key] = last is not None and last.kind == pair.broken
        return self._open[key]

    def broken(self, pair: Pair, event: Event) -> bool:
        """``event`` is of the pair's first kind. Recorded, True, unless the incident is open: then that says from now
        on what ``event`` does. Raises CatalogError."""
        if self._turn(pair, event, to=True):
            return True
        self.restate(pair, event)
        return False

    def restate(self, pair: Pair, event: Event) -> None:
        """If the incident is open it says from now on what ``event`` does. Raises CatalogError."""
        if self.is_open(pair, event.server, event.subject):
            self._catalog.incidents.restate(event)

    def mended(self, pair: Pair, event: Event) -> bool:
        """``event`` is of the pair's second kind. Recorded, True, if the incident was open. Raises CatalogError."""
        return self._turn(pair, event, to=False)

    def _turn(self, pair: Pair, event: Event, *, to: bool) -> bool:
        if self.is_open(pair, event.server, event.subject) is to:
            return False
        self._catalog.events.add(event)
        self._open[pair, event.server, event.subject] = to
        return True
