"""A desk from which a catalog is looked at: configured servers, and rows of what happened to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from backupd.app.context.wiring import Wiring, owner
from backupd.app.views.overview import overview
from backupd.app.views.server_status import ServerOverview
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.backup_record import BackupKind, BackupRecord, Copy
from backupd.model.binlog import Branch, BranchReason, Ending, Segment
from backupd.model.errors import BackupdError
from backupd.model.job import JobRecord, JobState
from backupd.model.proof import Proof
from backupd.model.server_facts import Position
from tests.support.catalog import samples
from tests.support.service.house import GOLD, Clock, Office

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
BRANCH = "20261101T000000Z-00000001"
STREAMED = GOLD + "binlog: {stream: true}\nobjectives: {rpo: 2m, rto: 1h}\nprotection: {copies: 1, off_site: 0}\n"


@dataclass
class Desk:
    office: Office
    wiring: Wiring
    clock: Clock

    @property
    def catalog(self) -> Catalog:
        return self.wiring.catalog

    def look(self, after: timedelta = timedelta(0), name: str = "db1") -> ServerOverview:
        self.clock.now += after
        (found,) = overview(self.wiring, self.clock.now, [name])
        return found

    def why(self, after: timedelta = timedelta(0)) -> list[tuple[str, str]]:
        return [(str(reason.status), reason.text) for reason in self.look(after).reasons]

    def backup(
        self,
        number: int = 1,
        *,
        server: str = "db1",
        ago: timedelta = HOUR,
        pos: int = 100,
        kind: BackupKind = BackupKind.PHYSICAL_FULL,
    ) -> BackupRecord:
        at = self.clock.now - ago
        record = replace(
            samples.backup(number, server=server, kind=kind, copies=(Copy("local", "complete", at, at),)),
            started_at=at - 5 * MINUTE,
            finished_at=at,
            server_uuid="uuid",
            position=Position("binlog.000001", pos, "0-1-100"),
        )
        self.catalog.backups.add(record)
        return record

    def logs(self, until: datetime, *, pos: int = 1000, at: str = "local") -> None:
        """Binary logs of db1 to ``pos``, of which all until then are stored."""
        self.catalog.binlogs.add_branch(
            Branch("db1", BRANCH, NOW - 30 * 24 * HOUR, BranchReason.FIRST, "uuid", "mariadb", "binlog", 1)
        )
        self.catalog.binlogs.add_segment(
            Segment(
                "db1",
                BRANCH,
                "binlog.000001",
                1,
                0,
                pos,
                Ending.OPEN,
                "",
                "0-1-500",
                500,
                NOW - 9 * HOUR,
                NOW - MINUTE,
                False,
                (1,),
                "mariadb",
                "10.11.19",
                "0" * 64,
            ),
            at,
            500,
            NOW,
        )
        self.catalog.binlogs.confirm("db1", at, BRANCH, (1, pos), until)

    def stream(self, state: str = "streaming", *, ago: timedelta = timedelta(0)) -> None:
        self.catalog.binlogs.set_stream_state(
            "db1",
            {
                "state": state,
                "since": "2026-11-21T10:00:00Z",
                "trouble": "",
                "error": "" if state == "streaming" else "no route to host\nhint: x",
                "destinations": {},
                "owner": owner(),
                "spool_bytes": 7,
                "max_spool_bytes": 9,
            },
            self.clock.now - ago,
        )

    def job(self, number: int, state: JobState, *, leg: str = "physical.full", message: str = "") -> JobRecord:
        first = state if state in (JobState.QUEUED, JobState.MISSED) else JobState.RUNNING
        record = replace(
            samples.job(number, server="db1"), id=f"20261121T12{number:02}00Z-00000001", state=first, leg=leg
        )
        self.catalog.jobs.add(record)
        if first is not state:
            error = BackupdError(message, hint="look at the log") if message else None
            self.catalog.jobs.finish(record.id, state, self.clock.now, token=record.token, error=error)
        return record

    def proof(self, number: int, outcome: str, *, ago: timedelta) -> Proof:
        at = self.clock.now - ago
        proof = replace(samples.proof(number, outcome=outcome), server="db1", started_at=at - MINUTE, finished_at=at)
        self.catalog.proofs.add(proof)
        return proof


@contextmanager
def desk_of(base: Path, policy: str, servers: dict[str, str] | None = None) -> Iterator[Desk]:
    office, clock = Office(base, servers or {"db1": "gold"}), Clock(NOW)
    settings = office.write(gold=policy)
    with open_catalog(settings.catalog) as catalog:
        yield Desk(office, Wiring(settings, catalog, clock), clock)
