"""Signed heads of histories at the destinations: renewed while backups are taken, compared when a catalog is
rebuilt.

A rebuild cannot know that the head that it finds is the last one. It says how old each is, and compares them with
each other, with the counter in the last report mail, and with the time at which the operator says that all was lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from backupd.alerts.conditions import Key
from backupd.alerts.rules import ROLLED_BACK
from backupd.app.context.logging_setup import say
from backupd.app.context.trust import signing, wanting
from backupd.app.context.wiring import Wiring
from backupd.app.copies.protection import detail
from backupd.app.runtime.periodic import GuardedLoop
from backupd.model.backup_record import BackupState
from backupd.model.document import Document, json_key
from backupd.model.errors import (
    BackupdError,
    BusyError,
    DamagedError,
    DestinationError,
    ObjectMissingError,
    RefusedError,
)
from backupd.model.event import Severity
from backupd.model.manifest import Header
from backupd.model.text import format_duration, format_time
from backupd.process.folders import write_whole
from backupd.recovery.runs import last_of
from backupd.transfer.deletion import marks
from backupd.transfer.records import authenticity as heads
from backupd.transfer.records.authenticity import Head, Reached, Retired, SignedDestination
from backupd.transfer.records.manifests import backup_ids, read
from storage import layout
from storage.destination import Destination, exists

EVERY = timedelta(minutes=15)
AT_MOST_EVERY = timedelta(minutes=1)
GRACE = timedelta(minutes=5)
"""How much older than ``EVERY`` a head may be before the destination counts as rolled back."""
_NOTE = "heads.json"
_WAIT = 60.0
_NAMED = 5
_LOOKS = 20.0


@dataclass(frozen=True, slots=True)
class Noted(Document):
    """The head that was put last. ``counters``: of the last one that each destination took; ``runbook``: id
    of the newest backup and the SHA-256 of its runbook, "" where that could not be read."""

    counter: int
    at: datetime
    digest: str
    counters: Mapping[str, int] = field(default_factory=dict, metadata=json_key("places", later=True))
    runbook: str = field(default="", metadata=json_key(later=True))


def renew(wiring: Wiring, *, every: timedelta = AT_MOST_EVERY, former: str = "") -> int:
    """Put a new head of each server whose policy is `signed` and whose last one is older than ``every``; gives how
    many. ``former``: a key that signed up to the head before, and counts for nothing now. A destination that fails
    is reported and delays no other; one that was rolled back is an incident. Raises CatalogError, BusyError,
    RefusedError for the spool."""
    now = wiring.clock()
    due = [
        name
        for name in sorted(wanting(wiring.settings))
        if (last := noted(wiring).get(name)) is None or not timedelta() <= now - last.at < every
    ]
    if not due:
        return 0
    with wiring.locked("heads", "another process is already renewing the heads"):
        usable = {one.name: one for one in wiring.usable_destinations()}
        for name in due:
            server = wiring.settings.server(name)
            _renew(
                wiring,
                name,
                [usable[destination] for destination in server.preferred if destination in usable],
                now,
                former,
            )
    return len(due)


def retire(wiring: Wiring, former: str) -> dict[str, Retired]:
    """Say in a new head of each server that ``former`` signed up to the one before; gives what the heads say now. That
    it was said before remains."""
    renew(wiring, every=timedelta(), former=former)
    found = {}
    for server in sorted(wanting(wiring.settings)):
        retirements = [
            one
            for destination in wiring.usable_destinations()
            if (head := _there(destination, server)[0]) is not None
            for one in head.retired
            if one.key == former
        ]
        if retirements:
            found[server] = max(retirements, key=lambda one: one.counter)
    return found


def countersign(wiring: Wiring, destination: SignedDestination) -> None:
    """Put the signature of the key that signs now beside that of the heads which were put last."""
    with wiring.locked("heads", "another process is already renewing the heads", wait=_WAIT):
        for server, last in noted(wiring).items():
            key = layout.head_key(server)
            try:
                document = destination.as_it_lies(key)
                if hashlib.sha256(document).hexdigest() == last.digest and destination.doubt(key, document):
                    destination.sign(key, document, beside=destination.signature(key))
            except ObjectMissingError:
                continue  # the next renewal puts one


def renew_or_log(wiring: Wiring) -> None:
    """After a job: never raises for its sake; the service or the next job tries again."""
    try:
        renew(wiring)
    except BusyError:
        return  # somebody else is just doing it
    except BackupdError as error:
        say("head-not-renewed", str(error), level=logging.WARNING)


def _renew(wiring: Wiring, server: str, destinations: list[Destination], now: datetime, former: str) -> None:
    before = noted(wiring).get(server)
    records = [record for record in wiring.catalog.backups.list(server) if record.state is BackupState.COMPLETE]
    audit = next(iter(wiring.catalog.audit.list(limit=1)), None)
    there = [
        found
        for destination in destinations
        if (found := _compared(wiring, destination, server, before)[0]) is not None
    ]
    counter = max([before.counter if before else 0, *(one.counter for one in there)]) + 1
    retired = max(there, key=lambda head: head.counter).retired if there else ()
    if former and former not in {one.key for one in retired}:
        retired = (*retired, Retired(former, counter - 1, now))
    made = Head(
        server,
        counter,
        now,
        before.digest if before else "",
        max((record.id for record in records), default=""),
        len(records),
        heads.Audited(audit.number, audit.digest) if audit else heads.Audited(),
        retired,
        {
            destination.name: Reached(runs[-1].branch, *last_of(runs[-1]))
            for destination in destinations
            if (runs := wiring.catalog.binlogs.runs(server, destination.name))
        },
    )
    took = dict(before.counters) if before else {}
    for destination in destinations:
        try:
            heads.put(destination, made)
            took[destination.name] = counter
        except BackupdError as error:
            say(
                "head-not-renewed",
                f"the head of {server} cannot be written to {destination.name}: {error.message}",
                level=logging.WARNING,
                server=server,
            )
    runbook = (
        before.runbook if before and made.newest and before.runbook.startswith(made.newest) else _runbook(wiring, made)
    )
    _note(wiring, server, Noted(counter, now, heads.digest(made), took, runbook))


def _runbook(wiring: Wiring, head: Head) -> str:
    try:
        return f"{head.newest}, SHA-256 {detail(wiring, head.newest).runbook_sha256}" if head.newest else ""
    except BackupdError:
        return ""  # whoever reads the backup reports why it cannot be read


def _there(destination: Destination, server: str) -> tuple[Head | None, str]:
    """The head that is there, and why none is believed, "" for one that is not there. Raises DestinationError."""
    try:
        return heads.read(destination, server), ""
    except DamagedError as error:
        return None, " ".join((error.detail or error.message).split())


def is_rolled_back(wiring: Wiring, destination: Destination, server: str) -> bool:
    """Does it hold an older head of ``server`` than it took from here, or none? Then that is an incident. Raises
    CatalogError, DestinationError."""
    return server in wanting(wiring.settings) and _compared(wiring, destination, server, noted(wiring).get(server))[1]


def _compared(wiring: Wiring, destination: Destination, server: str, before: Noted | None) -> tuple[Head | None, bool]:
    """The head that is believed there, and whether the destination was rolled back."""
    try:
        found, why = _there(destination, server)
    except DestinationError as error:
        _unread(destination, server, f"cannot be read: {error.message}")
        return None, False
    if why:
        _unread(destination, server, f"is not trusted: {why}")
    took = before.counters.get(destination.name) if before else None
    if before is None or took is None or (found is not None and found.counter >= took):
        return found, False
    shown = (
        f"it holds the one with counter {found.counter}, of {format_time(found.at)}, with {found.newest or 'none'} "
        "as the newest backup"
        if found is not None
        else why or "it holds none"
    )
    wiring.alert(
        Key(ROLLED_BACK, server, destination.name),
        Severity.ERROR,
        f"possible rollback at {destination.name}: it acknowledged head {took} of {server}; now {shown}",
        detail=f"noted here: counter {before.counter}, of {format_time(before.at)}",
        hint=f"1. find out who writes to {destination.name}; 2. list the missing data: backupd verify {server}; "
        f"3. copy it back: backupd replicate {server} --to {destination.name}. The alert closes after a clean "
        "verification",
    )
    return found, True


def _unread(destination: Destination, server: str, why: str) -> None:
    text = f"the head of {server} at {destination.name} {why}"
    say("head-unread", text, level=logging.WARNING, server=server)


def settle(wiring: Wiring, destination: Destination, server: str) -> None:
    """Everything of ``server`` that the catalog expects there is there."""
    if not is_rolled_back(wiring, destination, server):
        well = f"{destination.name} holds all that it should of {server}, and its newest head"
        wiring.settle(looked={Key(ROLLED_BACK, server, destination.name): well})


def noted(wiring: Wiring) -> Mapping[str, Noted]:
    """The last head of each server, by the spool. What cannot be read there is made again from the destinations."""
    try:
        found = json.loads(_file(wiring).read_text(encoding="utf-8"))
        return {name: Noted.from_json(one) for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _note(wiring: Wiring, server: str, last: Noted) -> None:
    every = {**noted(wiring), server: last}
    try:
        write_whole(
            _file(wiring),
            json.dumps(
                {name: one.as_json() for name, one in every.items()},
                sort_keys=True,
            ).encode(),
        )
    except OSError as error:
        raise RefusedError(
            f"the note {_file(wiring)} of the heads cannot be written: {error.strerror}",
            hint="make room in the spool, and let this user write there",
        ) from error


def _file(wiring: Wiring) -> Path:
    return wiring.settings.spool / _NOTE


@dataclass(frozen=True, slots=True)
class Comparison(Document):
    """``lines``: what each destination's head says; ``suspicions``: why a destination may have been rolled back."""

    lines: tuple[str, ...] = field(metadata=json_key("heads"))
    suspicions: tuple[str, ...]


def compare(
    wiring: Wiring, *, failed_at: datetime | None = None, counters: Mapping[str, int] | None = None
) -> Comparison:
    """Of every server whose manifests are signed, at every destination that answers. ``failed_at``: when the operator
    says that the last good moment was; ``counters``: of each server, what the last report said."""
    lines: list[str] = []
    suspicions: list[str] = []
    now = wiring.clock()
    for server in sorted(wanting(wiring.settings)):
        found: dict[str, Head] = {}
        for destination in wiring.usable_destinations():
            try:
                head = heads.read(destination, server)
                lacking = _lacking(destination, server, head) if head is not None else []
            except BackupdError as error:
                suspicions.append(
                    f"the head of {server} at {destination.name} is not trusted: "
                    f"{' '.join((error.detail or error.message).split())}"
                    f"{_outdated(wiring, destination, server)}"
                )
                continue
            if head is None:
                lines.append(f"{destination.name} holds no head of {server}")
                if _had_heads(destination, server):
                    suspicions.append(
                        f"possible rollback at {destination.name}: it holds backups of {server}, but their signed "
                        "head is missing"
                    )
                continue
            found[destination.name] = head
            lines.append(
                f"head of {server} at {destination.name}: counter {head.counter}, of {format_time(head.at)}, "
                f"{format_duration(max((now - head.at).total_seconds(), 0.0))} ago; {head.backups} backups, "
                f"the newest {head.newest or 'none'}"
                + "".join(
                    f"; {one.key} signed until counter {one.counter}, {format_time(one.at)}" for one in head.retired
                )
            )
            suspicions += lacking
        if found:
            suspicions += _suspicions(server, found, failed_at, (counters or {}).get(server))
    return Comparison(tuple(lines), tuple(suspicions))


def _outdated(wiring: Wiring, destination: Destination, server: str) -> str:
    """Of a head that is not believed: does it say that a key which counts here was replaced? Then it may be the
    configuration that is old. Anybody could write that, so nothing follows from it but these words."""
    if not isinstance(destination, SignedDestination):
        return ""
    try:
        retired = heads.decode(destination.as_it_lies(layout.head_key(server)), server).retired
    except (DamagedError, ObjectMissingError):
        return ""
    trusted = signing(wiring.settings).trusted
    return "".join(
        f". It reports that key {one.key} was replaced at {format_time(one.at)}, but this configuration still trusts "
        "it. Compare with the newest recovery page; if the report is true, remove the key from "
        "encryption.trusted_signers"
        for one in retired
        if one.key in trusted
    )


def _lacking(destination: Destination, server: str, head: Head) -> list[str]:
    """What its own head names and is missing: somebody may take away the newest, and leave the head."""
    said, source = [], f"its head of {format_time(head.at)}"
    if head.newest and not _is_there(destination, server, head.newest):
        said.append(
            f"{destination.name} does not hold backup {head.newest} of {server}, the newest by {source}, or it is "
            "marked deleted there: if no other destination has it, somebody deleted it"
        )
    reached = head.logs.get(destination.name)
    if reached is not None:
        ends = [
            (owner[1].number, owner[1].end)
            for info in destination.list(layout.branch_folder(server, reached.branch))
            if (owner := layout.segment_of(info.key)) is not None and owner[2] == layout.SEGMENT
        ]
        number, end = max(ends, default=(0, 0))
        if (number, end) < (reached.number, reached.end):
            said.append(
                f"binary logs of {server} at {destination.name} end at byte {end} of file {number} of branch "
                f"{reached.branch}, and by {source} they reached byte {reached.end} of file {reached.number}: "
                "if no other destination has more, somebody deleted them"
            )
    return said


def _is_there(destination: Destination, server: str, backup_id: str) -> bool:
    manifest = layout.manifest_key(server, backup_id)
    return exists(destination, manifest) and (server, backup_id) not in marks(destination)


def _had_heads(destination: Destination, server: str) -> bool:
    """Is its newest backup of the time since when heads are put?"""
    newest = next(reversed(backup_ids(destination, server)), None)
    found = read(destination, *newest) if newest is not None else None
    return found is not None and isinstance(found.header, Header) and found.header.is_bound


def _suspicions(
    server: str, found: Mapping[str, Head], failed_at: datetime | None, noted_counter: int | None
) -> list[str]:
    best = max(found.values(), key=lambda head: head.counter)
    ahead = next(name for name, head in found.items() if head == best)
    said = [
        f"{name} was possibly rolled back to {format_time(head.at)}: its head of {server} has counter "
        f"{head.counter}, that of {ahead} {best.counter} with {best.newest or 'no backup'} as the newest: rebuild "
        f"from {ahead}"
        for name, head in sorted(found.items())
        if head.counter < best.counter
    ]
    if noted_counter is not None and best.counter < noted_counter:
        said.append(
            f"the store was possibly rolled back to {format_time(best.at)}: the last report has counter "
            f"{noted_counter} of {server}, and the newest head has {best.counter}"
        )
    if failed_at is not None and best.at < failed_at - EVERY - GRACE:
        said.append(
            f"the store was possibly rolled back to {format_time(best.at)}: the newest head of {server} has that time, "
            f"although until {format_time(failed_at)} one was due every {EVERY.seconds // 60} minutes"
        )
    return said


def lists_compared(wiring: Wiring) -> tuple[str, ...]:
    """What each destination that answers has more of than another one, in words: of each server the backups that are
    not marked deleted there. Not each has to hold all: policies and retention say which."""
    there = {destination.name: _listed(destination) for destination in wiring.usable_destinations()}
    return tuple(
        f"{one} holds {len(more)} backup{'s' if len(more) > 1 else ''} of {server} that {other} does not: "
        f"{', '.join(sorted(more, reverse=True)[:_NAMED])}{', ...' if len(more) > _NAMED else ''}"
        for one, found in sorted(there.items())
        for other in sorted(there)
        if other != one
        for server in sorted(found)
        if (more := found[server] - there[other].get(server, set()))
    )


def _listed(destination: Destination) -> dict[str, set[str]]:
    dying = marks(destination)
    found: dict[str, set[str]] = {}
    for server, backup_id in backup_ids(destination):
        if (server, backup_id) not in dying:
            found.setdefault(server, set()).add(backup_id)
    return found


class HeadWatch:
    """Renews them while the service runs: in a thread, because a destination that hangs must not delay the service's
    rounds."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._ending = threading.Event()
        self._guarded = GuardedLoop("heads-trouble")
        self._thread = threading.Thread(target=self._loop, name="heads", daemon=True)

    def __enter__(self) -> HeadWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread; waits for a renewal that is going on, for 20 s at most."""
        self._ending.set()
        self._thread.join(_LOOKS)

    def reload(self, wiring: Wiring) -> None:
        """Go by other settings from the next look on."""
        self._wiring = wiring

    def _loop(self) -> None:
        while not self._ending.wait(_LOOKS):
            self._guarded(self.step)

    def step(self) -> None:
        """Renew what would be too old at the next look. Raises CatalogError, BusyError."""
        renew(self._wiring, every=EVERY - timedelta(seconds=2 * _LOOKS))
