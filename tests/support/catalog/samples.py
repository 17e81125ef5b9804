"""Values to record."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, Stats
from backupd.model.job import JobRecord, JobState, RestoreRecord
from backupd.model.proof import Check, Phase, Proof, Witness
from backupd.model.server_facts import Flavour, Position, Role, ServerInfo, Version

NOON = datetime(2026, 11, 21, 12, 0, 0, 123457, tzinfo=UTC)
POSITION = Position("mysql-bin.000042", 5_000_000_000, "0-11-12345678901234")


def backup(
    number: int = 1,
    *,
    server: str = "shop-db1",
    kind: BackupKind = BackupKind.PHYSICAL_FULL,
    state: BackupState = BackupState.COMPLETE,
    copies: tuple[Copy, ...] = (),
) -> BackupRecord:
    start = NOON + timedelta(hours=number)
    return BackupRecord(
        id=f"20261121T120000Z-{number:08x}",
        server=server,
        kind=kind,
        state=state,
        parent=None,
        started_at=start,
        finished_at=start + timedelta(seconds=90),
        stats=Stats(9_000_000_000_000, 3 << 40, 1 << 33, 5_000, 4_900),
        position=POSITION,
        flavour="mariadb",
        server_version="10.11.19-MariaDB",
        tool_version="10.11.19",
        warnings=("a MyISAM table `shöp`.`naïve 🐬` was locked",),
        copies=copies,
        table_set="money" if kind is BackupKind.LOGICAL else "",
        tables_missing=2 if kind is BackupKind.LOGICAL else 0,
    )


def job(number: int = 1, *, server: str = "shop-db1", owner: str = "") -> JobRecord:
    moment = NOON + timedelta(minutes=number)
    return JobRecord(
        id=f"job-{number}",
        kind="physical-full",
        server=server,
        state=JobState.RUNNING,
        queued_at=moment,
        started_at=moment,
        owner=owner,
        token=1,
    )


def restore(number: int = 1) -> RestoreRecord:
    return RestoreRecord(
        id=f"restore-{number}",
        server="shop-db1",
        backup_id="b",
        target="latest",
        datadir="/srv/new",
        state=JobState.RUNNING,
        started_at=NOON + timedelta(minutes=number),
    )


def proof(number: int = 1, *, outcome: str = "proved", seconds: float = 4.0) -> Proof:
    start = NOON + timedelta(days=number)
    return Proof(
        id=f"proof-{number}",
        server="shop-db1",
        backup_id="b",
        target="latest",
        outcome=outcome,
        started_at=start,
        finished_at=start + timedelta(seconds=60),
        phases=(Phase("fetched", seconds, 4_000), Phase("started", 1.23456789, 0)),
        checks=(Check("CHECK TABLE", "passed"), Check("`a`.`b`", "failed", "rows differ")),
        tables_compared=37,
        error="" if outcome != "failed" else "rows differ",
    )


def witness(number: int = 1, *, position: Position = POSITION) -> Witness:
    return Witness(
        server="shop-db1",
        taken_at=NOON + timedelta(minutes=number),
        position=position,
        checksums={"`shop`.`o``rders`": 4_294_967_295, "`shöp`.`🐬`": 7},
        uncovered={"`a`.`b`": "MyISAM"},
        objects={"views": 2},
        seconds=1.0000001,
    )


def server_info(**changes: object) -> ServerInfo:
    """What a probe found of a MariaDB, but for ``changes``."""
    plain = ServerInfo(
        flavour=Flavour.MARIADB,
        version=Version(10, 11, 19),
        version_text="10.11.19-MariaDB",
        datadir="/var/lib/mysql",
        hostname="db1",
        server_id=1,
        server_uuid="",
        role=Role.STANDALONE,
        read_only=False,
        log_bin=True,
        position=Position("bin.000001", 4, "0-1-1"),
        gtid_mode="",
        engines={"InnoDB": 3},
        data_bytes=1,
        tables=3,
        variables={"innodb_page_size": "16384"},
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # the fields are named by each test
