"""For how long the storage class of a copy has to be paid for."""

from __future__ import annotations

from datetime import timedelta

from backupd.app.context.wiring import Wiring
from backupd.model.backup_record import Copy
from backupd.model.manifest import Stats
from backupd.model.thaw import GIB, MONTH_DAYS
from backupd.retention.decisions import Minimum


def minimum_of(wiring: Wiring, copy: Copy, stats: Stats) -> Minimum | None:
    """Of a copy at a destination whose storage class has a minimum storage time; None for any other.

    It counts from when the copy was stored. Objects that it shares with earlier backups were stored before, and those
    that it shares with later ones stay: so it is over by then at the latest, and costs at most what is told.
    """
    settings = wiring.settings
    if copy.destination not in settings.destinations:
        return None
    storage_class = settings.destinations[copy.destination].kept_in(logs=False)
    prices = settings.configuration.archive.prices.as_prices()
    time = prices.minimum(storage_class)
    if not time:
        return None
    monthly = prices.per_gib_month.get(storage_class)
    per_day = None if monthly is None else stats.bytes_stored / GIB * monthly / MONTH_DAYS
    return Minimum(storage_class, copy.stored_at + time, per_day, prices.currency)


def logs_minimum(wiring: Wiring, place: str) -> tuple[str, timedelta] | None:
    """The storage class that complete binary logs lie in at a destination, and its minimum storage time."""
    settings = wiring.settings
    if place not in settings.destinations:
        return None
    storage_class = settings.destinations[place].kept_in(logs=True)
    time = settings.configuration.archive.prices.as_prices().minimum(storage_class)
    return (storage_class, time) if time else None
