"""Many servers, each with very many backups, as rows of a catalog: what each of them has in a working installation. Of
one server the manifests may lie at the destinations, too (``bulk.lay``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Any

from sqlalchemy import Table

from backupd.catalog.alerts import events, incidents
from backupd.catalog.destinations import binlog_lags, marks, replications, scrubs
from backupd.catalog.people import audit, holds
from backupd.catalog.proofs import proofs, witnesses
from backupd.catalog.restores import restores
from backupd.catalog.tables.backups import backups, commits, copies, identities
from backupd.catalog.tables.binlogs import (
    binlog_branches,
    binlog_confirmed,
    binlog_copies,
    binlog_runs,
    binlog_segments,
    binlog_streams,
)
from backupd.catalog.tables.jobs import jobs

LOCAL, OFFSITE = PLACES = ("local", "offsite")
HOUR = timedelta(hours=1)
CHAIN = 24
"""Hourly backups: a full one and its increments each day."""
_SHA = "5f" * 32
_GIB = 2**30

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fleet:
    """``now``: when its newest rows were written. Counts are of each server; ``first``: the number of the first;
    ``asked``: that of the server whose manifests may be laid; ``whole``: every backup lies
    at both destinations, undamaged."""

    now: datetime
    servers: int
    backups: int
    segments: int
    jobs: int = 300
    proofs: int = 40
    events: int = 100
    first: int = 0
    asked: int = -1
    restores: int = 2
    whole: bool = False

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.servers)

    @property
    def names(self) -> list[str]:
        return [name_of(number) for number in self.numbers]

    def finished(self, server: int, number: int) -> datetime:
        """When a backup ended; those of two servers never end at the same moment."""
        return self.now - HOUR * (self.backups - number) + timedelta(microseconds=server) + _MINUTE * (server % 50)

    def backup_id(self, server: int, number: int) -> str:
        return f"{self.finished(server, number):%Y%m%dT%H%M%SZ}-{server:04x}{number:04x}"

    def rows(self) -> Iterator[tuple[Table, Iterator[Row]]]:
        """Every table with its rows, a table after those that it refers to."""
        yield backups, chain.from_iterable(map(self._backups, self.numbers))
        yield copies, chain.from_iterable(map(self._copies, self.numbers))
        yield commits, chain.from_iterable(map(self._commits, self.numbers))
        yield identities, map(self._identity, self.numbers)
        yield binlog_branches, map(self._branch, self.numbers)
        yield binlog_segments, chain.from_iterable(map(self._segments, self.numbers))
        yield binlog_copies, chain.from_iterable(map(self._log_copies, self.numbers))
        yield binlog_runs, chain.from_iterable(map(self._runs, self.numbers))
        yield binlog_confirmed, chain.from_iterable(map(self._confirmed, self.numbers))
        yield binlog_streams, map(self._stream, self.numbers)
        yield binlog_lags, chain.from_iterable(map(self._lags, self.numbers))
        yield jobs, chain.from_iterable(map(self._jobs, self.numbers))
        yield proofs, chain.from_iterable(map(self._proofs, self.numbers))
        yield witnesses, chain.from_iterable(map(self._witnesses, self.numbers))
        yield restores, chain.from_iterable(map(self._restores, self.numbers))
        yield events, chain.from_iterable(map(self._events, range(self.events)))
        yield incidents, chain.from_iterable(map(self._incidents, self.numbers))
        yield marks, chain.from_iterable(map(self._marks, self.numbers))
        yield scrubs, chain.from_iterable(map(self._scrubs, self.numbers))
        yield replications, (self._replication(number) for number in self.numbers if self._is_late(number))
        yield holds, (self._hold(number) for number in self.numbers if number % 50 == 7)
        yield audit, chain.from_iterable(map(self._audit, self.numbers))

    # -- backups

    def is_marked(self, server: int, number: int) -> bool:
        """The oldest chain of some servers is on its way out."""
        return not self.whole and server % 100 == 50 and self.backups > 3 * CHAIN and number < CHAIN

    def is_laid(self, server: int, number: int) -> bool:
        """Does its manifest lie at the destinations?"""
        return self.whole or server == self.asked or self.is_marked(server, number)

    def _is_late(self, server: int) -> bool:
        """Its newest backup is not off-site yet."""
        return not self.whole and server % 10 == 3

    def _backups(self, server: int) -> Iterator[Row]:
        name, own = name_of(server), _uuid(server)
        for number in range(self.backups):
            finished, full = self.finished(server, number), number % CHAIN == 0
            file, pos, gtid = self._position(number)
            size = 80 * _GIB if full else 2 * _GIB
            yield {
                "id": self.backup_id(server, number),
                "server": name,
                "kind": "physical-full" if full else "physical-incremental",
                "state": "deleted" if self.is_marked(server, number) else "complete",
                "parent": None if full else self.backup_id(server, number - 1),
                "started_at": finished - _MINUTE * 4,
                "finished_at": finished,
                "bytes_source": size,
                "bytes_stored": size // 4,
                "bytes_new": size // 6,
                "files": 1800,
                "files_linked": 1700,
                "position_file": file,
                "position_pos": pos,
                "position_gtid": gtid,
                "flavour": "mariadb",
                "server_version": "10.11.14-MariaDB-log",
                "tool_version": "10.11.14",
                "pinned": server % 5 == 0 and number == self.backups // 2,
                "from_lsn": 0 if full else number * 10**6,
                "to_lsn": (number + 1) * 10**6,
                "server_uuid": own,
                "reason": "no full backup of this day" if full else "",
                "manifest": "" if self.is_laid(server, number) else _SHA,
                "missing": [],
            }

    def _copies(self, server: int) -> Iterator[Row]:
        for number in range(self.backups):
            finished = self.finished(server, number)
            for place in PLACES:
                last = number == self.backups - 1
                if last and place == OFFSITE and self._is_late(server):
                    continue
                damaged = not self.whole and place == OFFSITE and (server * 31 + number) % 997 == 500
                yield {
                    "backup_id": self.backup_id(server, number),
                    "destination": place,
                    "state": "deleted" if self.is_marked(server, number) else "damaged" if damaged else "complete",
                    "stored_at": finished,
                    "verified_at": None if last else finished + _MINUTE * 30,
                }

    def _commits(self, server: int) -> Iterator[Row]:
        for number in range(self.backups):
            if not self.is_laid(server, number):
                yield {"backup_id": self.backup_id(server, number), "manifest": _SHA}

    def _identity(self, server: int) -> Row:
        return {
            "server": name_of(server),
            "uuid": _uuid(server),
            "verdict": "own",
            "server_id": 1,
            "address": f"{name_of(server)}.example.com",
            "since": self.finished(server, 0),
            "seen_at": self.now,
        }

    # -- binary logs

    def _position(self, number: int) -> tuple[str, int, str]:
        """Of a backup: inside the file that was written when it ended."""
        file = min(self.segments, number * self.segments // max(self.backups, 1) + 1)
        return f"bin.{file:06d}", 500, f"0-1-{file * 100 - 50}"

    def _moment(self, server: int, file: float) -> datetime:
        """When the file began."""
        first = self.finished(server, 0) - HOUR
        return first + (self.now - first) * ((file - 1) / self.segments)

    def _branch_id(self, server: int) -> str:
        return f"{self._moment(server, 1):%Y%m%dT%H%M%SZ}-{server:08x}"

    def _branch(self, server: int) -> Row:
        return {
            "number": server + 1,
            "server": name_of(server),
            "id": self._branch_id(server),
            "noticed_at": self._moment(server, 1) - _MINUTE,
            "reason": "first",
            "server_uuid": _uuid(server),
            "flavour": "mariadb",
            "basename": "bin",
            "first_number": 1,
        }

    def _segments(self, server: int) -> Iterator[Row]:
        for number in range(1, self.segments + 1):
            growing = number == self.segments
            yield {
                "branch": server + 1,
                "number": number,
                "start_pos": 0,
                "end_pos": 5000 if growing else 2**20,
                "file": f"bin.{number:06d}",
                "ending": "open" if growing else "rotated",
                "gtids_before": f"0-1-{(number - 1) * 100}",
                "gtids_after": f"0-1-{number * 100}",
                "transactions": 100,
                "first_at": self._moment(server, number),
                "last_at": self._moment(server, number + 0.999),
                "server_ids": [1],
                "flavour": "mariadb",
                "server_version": "10.11.14-MariaDB-log",
                "sha256": _SHA,
            }

    def _log_copies(self, server: int) -> Iterator[Row]:
        for number in range(1, self.segments + 1):
            for place in PLACES:
                yield {
                    "branch": server + 1,
                    "number": number,
                    "start_pos": 0,
                    "end_pos": 5000 if number == self.segments else 2**20,
                    "destination": place,
                    "state": "complete",
                    "stored": 2**18,
                    "stored_at": self._moment(server, number + 1),
                    "verified_at": self._moment(server, number + 1),
                }

    def _runs(self, server: int) -> Iterator[Row]:
        whole = self.segments - 1
        if not whole:
            return
        for place in PLACES:
            yield {
                "branch": server + 1,
                "destination": place,
                "first_number": 1,
                "last_number": whole,
                "last_pos": 2**20,
                "gtids_before": "0-1-0",
                "gtids_after": f"0-1-{whole * 100}",
                "first_at": self._moment(server, 1),
                "last_at": self._moment(server, whole + 0.999),
                "size": whole * 2**20,
                "stored": whole * 2**18,
                "segments": whole,
                "transactions": whole * 100,
                "ending": "rotated",
            }

    def _confirmed(self, server: int) -> Iterator[Row]:
        for place in PLACES:
            yield {
                "branch": server + 1,
                "destination": place,
                "number": self.segments,
                "pos": 5000,
                "at": self.now - timedelta(seconds=5 + server % 20),
            }

    def _stream(self, server: int) -> Row:
        status = {
            "state": "streaming",
            "since": self._moment(server, 1).isoformat(),
            "branch": self._branch_id(server),
            "file": f"bin.{self.segments:06d}",
            "pos": 5000,
            "spool_bytes": 2**22,
            "max_spool_bytes": 2**30,
            "destinations": {place: {"behind_since": None, "error": ""} for place in PLACES},
        }
        return {"server": name_of(server), "status": status, "updated_at": self.now}

    def _lags(self, server: int) -> Iterator[Row]:
        for hour in range(min(self.backups, 24)):
            for place in PLACES:
                at = self.now.replace(minute=0, second=0, microsecond=0) - HOUR * hour
                yield {"server": name_of(server), "destination": place, "hour": at, "seconds": 4.5, "at": at}

    # -- jobs and what came of them

    def _jobs(self, server: int) -> Iterator[Row]:
        name = name_of(server)
        for number in range(self.jobs):
            kind, leg = _KINDS[number % len(_KINDS)]
            queued = self.now - HOUR * ((self.jobs - number) / len(_KINDS)) + timedelta(microseconds=server)
            failed = (server + number) % 53 == 0
            yield {
                "id": f"{queued:%Y%m%dT%H%M%SZ}-{server:04x}{number:04x}",
                "kind": kind,
                "server": name,
                "state": "failed" if failed else "succeeded",
                "queued_at": queued,
                "started_at": queued + _SECOND,
                "finished_at": queued + _SECOND * 200,
                "due_at": queued if leg else None,
                "message": "destination offsite does not answer" if failed else "",
                "hint": "is it running?" if failed else "",
                "bytes": _GIB,
                "phases": [{"name": "copied", "seconds": 180.5, "bytes": _GIB}],
                "owner": f"backup1 4f1c 4026531836 {number} 17",
                "attempt": 1,
                "leg": leg,
                "token": 1,
                "heartbeat_at": queued + _SECOND * 195,
                "progress": {"phase": "copied", "bytes_done": _GIB, "bytes_total": _GIB},
            }

    def _proofs(self, server: int) -> Iterator[Row]:
        for number in range(self.proofs):
            backup = self.backups - 1 - (self.proofs - number) * CHAIN % self.backups
            at = self.now - HOUR * 24 * (self.proofs - number) + timedelta(microseconds=server)
            good = (server + number) % 40 != 0
            yield {
                "id": f"{at:%Y%m%dT%H%M%SZ}-{server:04x}{number:04x}",
                "server": name_of(server),
                "backup_id": self.backup_id(server, backup),
                "target": "latest",
                "outcome": "proved" if good else "undecided",
                "started_at": at - HOUR / 2,
                "finished_at": at,
                "phases": [{"name": "fetched", "seconds": 400.0, "bytes": 20 * _GIB}],
                "checks": [{"name": "CHECK TABLE", "outcome": "passed", "detail": ""}],
                "tables_compared": 37,
                "warnings": [],
                "older": False,
            }

    def _witnesses(self, server: int) -> Iterator[Row]:
        for number in range(0, self.backups, CHAIN):
            at = self.finished(server, number)
            file, pos, gtid = self._position(number)
            yield {
                "id": f"{at:%Y%m%dT%H%M%SZ}-{server:04x}{number:04x}",
                "server": name_of(server),
                "backup_id": self.backup_id(server, number),
                "taken_at": at,
                "position_file": file,
                "position_pos": pos,
                "position_gtid": gtid,
                "seconds": 12.5,
                "payload": {"checksums": {f"`shop`.`t{table}`": table for table in range(10)}},
            }

    def _restores(self, server: int) -> Iterator[Row]:
        for number in range(self.restores):
            at = self.now - HOUR * 24 * (10 * number + 3) + timedelta(microseconds=server)
            yield {
                "id": f"{at:%Y%m%dT%H%M%SZ}-{server:04x}{number:04x}",
                "server": name_of(server),
                "backup_id": self.backup_id(server, self.backups - 1),
                "target": "latest",
                "datadir": f"/srv/restored/{name_of(server)}-{number}",
                "state": "succeeded",
                "started_at": at,
                "finished_at": at + HOUR,
                "phases": [{"name": "fetched", "seconds": 400.0, "bytes": 20 * _GIB}],
            }

    # -- what is told

    def _events(self, number: int) -> Iterator[Row]:
        """In the order of time over all servers, as their numbers are."""
        for server in self.numbers:
            at = self.now - HOUR * (self.events - number) + timedelta(microseconds=server)
            kind = ("backup-taken", "retention-applied", "replicated", "test-restored")[number % 4]
            yield {
                "at": at,
                "kind": kind,
                "severity": "info",
                "server": name_of(server),
                "subject": self.backup_id(server, number % self.backups),
                "message": f"{kind.replace('-', ' ')} in 3m 20s",
            }

    def _incidents(self, server: int) -> Iterator[Row]:
        for number in range(3):
            at = self.now - HOUR * 24 * (number * 9 + 1) + timedelta(microseconds=server)
            is_open = number == 0 and server % 20 == 11
            yield {
                "id": f"{at:%Y%m%dT%H%M%SZ}-{server:04x}{number:04x}",
                "kind": "replication-failing",
                "server": name_of(server),
                "subject": OFFSITE,
                "severity": "error",
                "message": f"1 backups of {name_of(server)} are not at offsite",
                "opened_at": at,
                "last_at": at + HOUR,
                "count": 2,
                "closed_at": None if is_open else at + HOUR,
            }

    def _marks(self, server: int) -> Iterator[Row]:
        marked = [number for number in range(self.backups) if self.is_marked(server, number)]
        for number in marked:
            for place in PLACES:
                yield {
                    "destination": place,
                    "server": name_of(server),
                    "backup_id": self.backup_id(server, number),
                    "since": self.now - HOUR,
                    "stored_at": self.now - HOUR,
                    "ours": True,
                }

    def _scrubs(self, server: int) -> Iterator[Row]:
        for place in PLACES:
            for share in range(0, 256, 8):
                yield {
                    "server": name_of(server),
                    "destination": place,
                    "share": share,
                    "done_at": self.now - HOUR * 24 * (share % 28),
                }

    def _replication(self, server: int) -> Row:
        return {
            "backup_id": self.backup_id(server, self.backups - 1),
            "destination": OFFSITE,
            "state": "waiting",
            "since": self.now - HOUR,
            "updated_at": self.now - HOUR,
            "bytes_total": _GIB,
        }

    def _hold(self, server: int) -> Row:
        return {
            "server": name_of(server),
            "kind": "hold",
            "reason": "audit of the year",
            "set_by": "ops",
            "since": self.now - HOUR * 100,
        }

    def _audit(self, server: int) -> Iterator[Row]:
        for number in range(2):
            yield {
                "at": self.now - HOUR * (server % 100) - HOUR * number,
                "actor": "ops",
                "role": "operator",
                "via": "api",
                "address": "192.0.2.7",
                "action": "restore-planned",
                "server": name_of(server),
                "outcome": "ok",
                "digest": _SHA,
            }


_MINUTE, _SECOND = timedelta(minutes=1), timedelta(seconds=1)
_KINDS = (
    ("physical-incremental", "physical.incremental"),
    ("replicate", ""),
    ("retention", "retention"),
    ("physical-incremental", "physical.incremental"),
    ("replicate", ""),
    ("physical-full", "physical.full"),
    ("verify", "verify"),
    ("test-restore", "test_restore"),
)


def name_of(server: int) -> str:
    """``db0500``"""
    return f"db{server:04}"


def _uuid(server: int) -> str:
    return f"{server:08x}-0000-4000-8000-000000000000"
