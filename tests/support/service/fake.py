"""A Service that answers from memory, records what it was asked, and fails on demand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from backupd.app.restores.request import RestoreRequest
from backupd.app.retention.deletion import Deleted
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, Stats
from backupd.model.errors import BackupdError
from backupd.model.job import JobRecord, Progress, Report
from backupd.model.proof import Check, Phase, Proof
from backupd.model.server_facts import Position
from restore.planning.plan import Plan, Step

START = datetime(2026, 11, 21, 4, 25, 12, tzinfo=UTC)
POSITION = Position("binlog.000003", 4711, "0-1-99")


def record(number: int = 1, **changes: Any) -> BackupRecord:
    return dataclasses.replace(
        BackupRecord(
            id=f"20261121T04251{number}Z-7f3a9c01",
            server="shop-db1",
            kind=BackupKind.PHYSICAL_FULL,
            state=BackupState.COMPLETE,
            parent=None,
            started_at=START,
            finished_at=START + timedelta(seconds=64),
            stats=Stats(bytes_source=5 * 2**30, bytes_stored=2**30, bytes_new=3 * 2**20, files=1200, files_linked=1197),
            position=POSITION,
            flavour="mariadb",
            server_version="10.11.19",
            tool_version="10.11.19",
            copies=(Copy("local", "complete", START),),
        ),
        **changes,
    )


@dataclass(frozen=True)
class Document:
    """Anything with ``as_json`` and ``ok``."""

    content: dict[str, Any]
    ok: bool = True

    @property
    def is_good(self) -> bool:
        return self.ok

    def as_json(self) -> dict[str, Any]:
        return self.content


@dataclass(frozen=True)
class FakeFinding:
    severity: str
    subject: str
    message: str
    hint: str = ""
    server: str = ""

    def as_json(self) -> dict[str, Any]:
        document = dataclasses.asdict(self)
        del document["server"]
        return document


@dataclass
class FakeService:
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    failure: BaseException | None = None
    records: list[BackupRecord] = field(default_factory=lambda: [record(1), record(2)])
    findings: list[FakeFinding] = field(default_factory=lambda: [FakeFinding("ok", "tool", "mariadb-backup 10.11.19")])
    outcome: str = "proved"
    sound: bool = True
    held: list[str] = field(default_factory=list)
    followed: list[tuple[str, ...]] = field(default_factory=list)
    following: list[tuple[JobRecord, BackupdError] | BaseException] = field(default_factory=list)

    def open(
        self, path: Path, _held: Path | None = None, _opening: str = "reads", *, new_catalog: bool = False
    ) -> Self:
        assert not new_catalog
        self._note("open", path)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append(("close",))

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.failure is not None and call[0] != "open":
            raise self.failure

    @property
    def foreground(self) -> Self:
        return self

    @property
    def follow_ups(self) -> SimpleNamespace:
        return SimpleNamespace(run=self._follow_up)

    def _follow_up(self, servers: Sequence[str]) -> Iterator[tuple[JobRecord, BackupdError]]:
        self.followed.append(tuple(servers))
        for outcome in self.following:
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome

    @property
    def maintenance(self) -> Self:
        return self

    @property
    def installation(self) -> SimpleNamespace:
        return SimpleNamespace(zone=lambda: None)

    @property
    def listings(self) -> SimpleNamespace:
        return SimpleNamespace(backup=lambda _backup_id: record())

    @property
    def restores(self) -> Self:
        return self

    @property
    def retention(self) -> Self:
        return self

    @property
    def servers(self) -> Self:
        return self

    @property
    def backups(self) -> SimpleNamespace:
        return SimpleNamespace(
            each=self._backups,
            show=self.show,
            keep=self.keep,
            delete=self.delete,
            undelete=self.undelete,
            runbook=self.runbook,
            runbook_digest=self.runbook_digest,
        )

    def check(self, server: str | None, labels: Sequence[str] = ()) -> list[FakeFinding]:
        self._note("check", server, *labels)
        return self.findings

    def backup(
        self, server: str, kind: BackupKind, report: Report, *, table_set: str = "", tables: Sequence[str] = ()
    ) -> BackupRecord:
        for done in (0, 512, 1024):
            report(Progress("copy", bytes_done=done, bytes_total=1024, files_done=done // 512, files_total=2))
        self._note("backup", server, kind, *([table_set] if table_set else []), *tables)
        return record(warnings=("table shop.x is MyISAM",))

    def _backups(self, server: str | None) -> list[BackupRecord]:
        self._note("backups", server)
        return sorted(self.records, key=lambda one: one.id, reverse=True)

    def show(self, backup_id: str) -> Document:
        self._note("show", backup_id)
        return Document(record().as_json() | {"objects": 812, "entries": 1200})

    def keep(self, backup_id: str, pinned: bool) -> tuple[str, ...]:
        self._note("keep", backup_id, pinned)
        return ()

    def delete(self, backup_id: str, now: bool = False, with_increments: bool = False) -> Deleted:
        self._note("delete", backup_id, now, *(["with increments"] if with_increments else []))
        return Deleted(tuple(self.held))

    def undelete(self, backup_id: str) -> list[str]:
        self._note("undelete", backup_id)
        return [backup_id]

    def runbook_digest(self, backup_id: str) -> str:
        return "9f" * 32 if backup_id else ""

    def plan(self, request: RestoreRequest) -> Plan:
        self._note("plan", request.server, request.target, Path(request.datadir) if request.datadir else None)
        return Plan(
            server=request.server,
            target=request.target,
            chain=(record().id,),
            destinations=("local",),
            position=POSITION,
            reason="the newest complete backup",
            bytes_stored=2**30,
            bytes_source=5 * 2**30,
            steps=(
                Step("fetched", "fetch, open and verify 812 objects", 5 * 2**30, 51.2, "assumed: 100 MB/s"),
                Step(
                    "prepared",
                    "apply the redo log",
                    2**20,
                    3.0,
                    "measured here: 300 MB/s over 2 runs",
                    ("mariadb-backup --prepare",),
                ),
            ),
        )

    def restore(self, request: RestoreRequest, report: Report) -> Document:
        report(Progress("fetched", bytes_done=5, bytes_total=10))
        self._note("restore", request.server, request.target, Path(request.datadir), request.start, request.mode)
        return Document(
            {
                "id": "r1",
                "backup": record().id,
                "datadir": request.datadir,
                "phases": [{"name": "fetched", "seconds": 3.25, "bytes": 1024}],
                "started": {"socket": "/run/x.sock", "pid": 4242} if request.start else None,
            }
        )

    def test_restore(self, server: str, target: str, report: Report) -> Proof:
        report(Progress("fetched", bytes_done=10, bytes_total=10))
        self._note("test_restore", server, target)
        failed = self.outcome == "failed"
        return Proof(
            id="p1",
            server=server,
            backup_id=record().id,
            target=target,
            outcome=self.outcome,
            started_at=START,
            finished_at=START + timedelta(seconds=30),
            phases=(Phase("fetched", 3.2, 1024),),
            checks=(Check("CHECK TABLE", "failed" if failed else "passed", "14 tables"),),
            tables_compared=14,
            error="shop.orders differs" if failed else "",
        )

    def verify(self, server: str | None, subset: float | None, report: Report, labels: Sequence[str] = ()) -> Document:
        self._note("verify", server, subset, *labels)
        damage = {
            "destination": "local", "key": "objects/ab/abcd", "problem": "its SHA-256 differs",
            "backups": [record().id], "repaired_from": None, "trouble": "no other copy",
        }  # fmt: skip
        content = {
            "ok": self.sound,
            "backups": [record().id],
            "objects": 812,
            "bytes": 2**30,
            "cold": 0,
            "unseen": 0,
            "samples": [],
        }
        return Document(content | {"damages": [] if self.sound else [damage]}, ok=self.sound)

    def fsck(self, repair: bool) -> Document:
        self._note("fsck", repair)
        finding = {
            "destination": "local", "invariant": "no-orphan-object", "subject": "objects/ab/abcd",
            "message": "no manifest names it", "repairable": True,
        }  # fmt: skip
        content = {"ok": self.sound, "findings": [] if self.sound else [finding], "repaired": []}
        return Document(content, ok=self.sound)

    def runbook(self, backup_id: str) -> str:
        self._note("runbook", backup_id)
        return "# Restore by hand\n\n1. gpg -d ...\n"

    @property
    def revision(self) -> str:
        self._note("upgrade_catalog")
        return "0001"
