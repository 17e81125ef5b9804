"""The time zone in which a source ran, for the copy that its logs are replayed onto.

What NOW() gives depends on it, and a DDL that fills a column with NOW() is logged without its zone. A server tells its
system zone by an abbreviation only, the one of the season in which it was started. So the zone is searched: whatever
fits the abbreviation will do as long as all that fits has the same offsets in the time that is replayed.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

_SYSTEM = "SYSTEM"
_UTC = frozenset({"UTC", "UCT"})
_MOST_MOMENTS = 2000
_NAMED = 6


@dataclass(frozen=True, slots=True)
class Zone:
    """``name``: for the environment (TZ) of the copy's server, "" for this host's own. ``doubt``: why times may be
    wrong, or ""."""

    name: str = ""
    doubt: str = ""


HERE = Zone()


def zone_of(variables: Mapping[str, str], since: datetime, until: datetime) -> Zone:
    """The system zone of the server whose ``variables`` (ServerInfo) these are, good from ``since`` to ``until``."""
    said = variables.get("system_time_zone", "")
    if said in _UTC:
        return Zone("UTC")
    if not said:
        return Zone("UTC", _doubt(variables, "the backup does not tell the source's system time zone"))
    if said in _names(None, until):
        return HERE
    fitting: dict[tuple[timedelta, ...], list[str]] = {}
    moments = list(_moments(since, until))
    for name in sorted(zoneinfo.available_timezones()):
        zone = _zone(name)
        if zone is not None and said in _names(zone, until):
            fitting.setdefault(tuple(_offset(at, zone) for at in moments), []).append(name)
    if len(fitting) == 1:
        return Zone(next(iter(fitting.values()))[0])
    if not fitting:
        why = f"the source's system time zone is {said!r}, and no zone of this host is called so"
    else:
        some = [names[0] for names in fitting.values()]
        why = (
            f"the source's system time zone is {said!r}, which may be {', '.join(some[:_NAMED])}"
            f"{' or another' if len(some) > _NAMED else ''}"
        )
    return Zone("UTC", _doubt(variables, why))


def global_zone(variables: Mapping[str, str]) -> str:
    """What the source's sessions began with when that was not its system zone, else ""."""
    said = variables.get("time_zone", _SYSTEM)
    return "" if said.upper() == _SYSTEM else said


def _doubt(variables: Mapping[str, str], why: str) -> str:
    if global_zone(variables):
        return ""  # only a session that turned back to the system's zone would notice
    return (
        f"{why}: replayed in UTC, so what NOW() and the like gave in statements of the logs (an ALTER TABLE with "
        "DEFAULT NOW(), data changes in STATEMENT format) may be shifted; restore with TZ=<zone of the source> in "
        "backupd's environment to be certain"
    )


def _names(zone: tzinfo | None, until: datetime) -> set[str | None]:
    """What a zone, or this host's own, is called in winter and in summer."""
    return {datetime(until.year, month, 15, 12, tzinfo=UTC).astimezone(zone).tzname() for month in (1, 7)}


def _zone(name: str) -> tzinfo | None:
    """None for one that a server on this host could not read."""
    if not any((Path(folder) / name).is_file() for folder in zoneinfo.TZPATH):
        return None
    return zoneinfo.ZoneInfo(name)


def _offset(at: datetime, zone: tzinfo) -> timedelta:
    return at.astimezone(zone).utcoffset() or timedelta(0)


def _moments(since: datetime, until: datetime) -> Iterator[datetime]:
    """Every hour, or less often over a long time; both ends."""
    step = max(timedelta(hours=1), (until - since) / _MOST_MOMENTS)
    at = since
    while at < until:
        yield at
        at += step
    yield until
