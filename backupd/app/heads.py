"""Heads of histories at the destinations: renewed while backups are taken, compared when a catalog is made anew.

A rebuild cannot know that the head that it finds is the last one. It says how old each is, and holds them against each
other, against the counter in the last report mail, and against the time at which the operator says that all was lost.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from backupd.app.guard import Guard
from backupd.app.logs import say
from backupd.app.trust import wanting
from backupd.app.wiring import Wiring
from backupd.model.backup import BackupState
from backupd.model.clock import format_time, parse_time
from backupd.model.errors import BackupdError, BusyError, RefusedError
from backupd.model.units import format_duration
from backupd.process.durable import write_whole
from backupd.transfer import head as heads
from backupd.transfer.head import Head
from storage.destination import Destination

EVERY = timedelta(minutes=15)
AT_MOST_EVERY = timedelta(minutes=1)
GRACE = timedelta(minutes=5)
"""How much older than ``EVERY`` a head may be before the place counts as turned back."""
_NOTE = "heads.json"
_LOOKS = 20.0


@dataclass(frozen=True, slots=True)
class Noted:
    """The head that was put last."""

    counter: int
    at: datetime
    digest: str


def renew(wiring: Wiring, *, every: timedelta = AT_MOST_EVERY) -> int:
    """Put a new head of each server whose policy says `signed` and whose last one is older than ``every``; gives how
    many. A destination that fails keeps nobody from the others, and is told. Raises CatalogError, BusyError,
    RefusedError for the spool."""
    now = wiring.clock()
    due = [name for name in sorted(wanting(wiring.settings))
           if (last := noted(wiring).get(name)) is None or not timedelta() <= now - last.at < every]
    if not due:
        return 0
    with wiring.locked("heads", "another process is just renewing the heads"):
        usable = {one.name: one for one in wiring.usable_destinations()}
        for name in due:
            server = wiring.settings.server(name)
            _renew(wiring, name, [usable[place] for place in server.preferred if place in usable], now)
    return len(due)


def renew_or_tell(wiring: Wiring) -> None:
    """After a job: never raises for its sake; the service or the next job tries again."""
    try:
        renew(wiring)
    except BusyError:
        return  # somebody else is just doing it
    except BackupdError as error:
        say("head-not-renewed", str(error), level=logging.WARNING)


def _renew(wiring: Wiring, server: str, places: list[Destination], now: datetime) -> None:
    before = noted(wiring).get(server)
    records = [record for record in wiring.catalog.backups.list(server) if record.state is BackupState.COMPLETE]
    audit = next(iter(wiring.catalog.audit.list(limit=1)), None)
    there = [found for place in places if (found := _there(place, server)) is not None]
    counter = max([before.counter if before else 0, *(one.counter for one in there)]) + 1
    made = Head(server, counter, now, before.digest if before else "",
                max((record.id for record in records), default=""), len(records),
                audit.number if audit else 0, audit.digest if audit else "")
    for place in places:
        try:
            heads.put(place, made)
        except BackupdError as error:
            say("head-not-renewed", f"the head of {server} cannot be put to {place.name}: {error.message}",
                level=logging.WARNING, server=server)
    _note(wiring, server, Noted(counter, now, heads.digest(made)))


def _there(place: Destination, server: str) -> Head | None:
    try:
        return heads.read(place, server)
    except BackupdError as error:
        say("head-unread", f"the head of {server} at {place.name} is replaced: {error.detail or error.message}",
            level=logging.WARNING, server=server)
        return None


def noted(wiring: Wiring) -> Mapping[str, Noted]:
    """The last head of each server, by the spool. What cannot be read there is made anew from the destinations."""
    try:
        found = json.loads(_file(wiring).read_text(encoding="utf-8"))
        return {name: Noted(int(one["counter"]), parse_time(one["at"]), str(one["digest"]))
                for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _note(wiring: Wiring, server: str, last: Noted) -> None:
    every = {**noted(wiring), server: last}
    try:
        write_whole(_file(wiring), json.dumps({
            name: {"counter": one.counter, "at": format_time(one.at), "digest": one.digest}
            for name, one in every.items()}, sort_keys=True).encode())
    except OSError as error:
        raise RefusedError(f"the note {_file(wiring)} of the heads cannot be written: {error.strerror}",
                           hint="make room in the spool, and let this user write there") from error


def _file(wiring: Wiring) -> Path:
    return wiring.settings.spool / _NOTE


@dataclass(frozen=True, slots=True)
class Comparison:
    """``lines``: what each destination's head says; ``suspicions``: why a place may have been turned back."""

    lines: tuple[str, ...]
    suspicions: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"heads": list(self.lines), "suspicions": list(self.suspicions)}


def compare(wiring: Wiring, *, failed_at: datetime | None = None, counters: Mapping[str, int] | None = None,
            ) -> Comparison:
    """Of every server whose manifests are signed, at every destination that answers. ``failed_at``: when the operator
    says that the last good moment was; ``counters``: of each server, what the last report said."""
    lines: list[str] = []
    suspicions: list[str] = []
    now = wiring.clock()
    for server in sorted(wanting(wiring.settings)):
        found: dict[str, Head] = {}
        for place in wiring.usable_destinations():
            try:
                head = heads.read(place, server)
            except BackupdError as error:
                suspicions.append(f"the head of {server} at {place.name} is not believed: "
                                  f"{' '.join((error.detail or error.message).split())}")
                continue
            if head is None:
                lines.append(f"{place.name} holds no head of {server}")
                continue
            found[place.name] = head
            lines.append(f"head of {server} at {place.name}: counter {head.counter}, of {format_time(head.at)}, "
                         f"{format_duration(max((now - head.at).total_seconds(), 0.0))} ago; {head.backups} backups, "
                         f"the newest {head.newest or 'none'}")
        if found:
            suspicions += _suspicions(server, found, failed_at, (counters or {}).get(server))
    return Comparison(tuple(lines), tuple(suspicions))


def _suspicions(server: str, found: Mapping[str, Head], failed_at: datetime | None, told: int | None) -> list[str]:
    best = max(found.values(), key=lambda head: head.counter)
    ahead = next(name for name, head in found.items() if head == best)
    said = [f"{name} was possibly rolled back to {format_time(head.at)}: its head of {server} has counter "
            f"{head.counter}, that of {ahead} {best.counter} with {best.newest or 'no backup'} as the newest: rebuild "
            f"from {ahead}" for name, head in sorted(found.items()) if head.counter < best.counter]
    if told is not None and best.counter < told:
        said.append(f"the store was possibly rolled back to {format_time(best.at)}: the last report told counter "
                    f"{told} of {server}, and the newest head has {best.counter}")
    if failed_at is not None and best.at < failed_at - EVERY - GRACE:
        said.append(f"the store was possibly rolled back to {format_time(best.at)}: the newest head of {server} is of "
                    f"then, and until {format_time(failed_at)} one was due every {EVERY.seconds // 60} minutes")
    return said


class HeadWatch:
    """Renews them while the service runs: a thread, because a place that hangs must not hold up the rounds."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._ending = threading.Event()
        self._guarded = Guard("heads-trouble")
        self._thread = threading.Thread(target=self._loop, name="heads", daemon=True)

    def __enter__(self) -> HeadWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join(_LOOKS)

    def reload(self, wiring: Wiring) -> None:
        self._wiring = wiring

    def _loop(self) -> None:
        while not self._ending.wait(_LOOKS):
            self._guarded(self.step)

    def step(self) -> None:
        """Renew what would be too old at the next look. Raises CatalogError, BusyError."""
        renew(self._wiring, every=EVERY - timedelta(seconds=2 * _LOOKS))
