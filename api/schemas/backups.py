"""Shapes of backups, of retention decisions and of proofs, and of the requests about them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.base import Asked, Dated, Name, Query, Shape, Text, Time, example, of
from api.schemas.jobs import Job
from backupd.app.retention import rules
from backupd.model import backup_record, proof, server_facts
from backupd.model.backup_record import BackupKind, BackupState

_BACKUP: dict[str, Any] = {
    "id": "20261121T020000Z-7f3a9c01",
    "server": "shop-db1",
    "kind": "physical-full",
    "state": "complete",
    "parent": None,
    "started_at": "2026-11-21T02:00:00Z",
    "finished_at": "2026-11-21T02:07:12Z",
    "bytes_source": 2147483648,
    "bytes_stored": 734003200,
    "bytes_new": 52428800,
    "files": 412,
    "files_linked": 377,
    "position": {"file": "mysql-bin.000042", "pos": 4711, "gtid": "0-1-1099"},
    "flavour": "mariadb",
    "server_version": "10.11.19",
    "tool_version": "10.11.19",
    "pinned": False,
    "warnings": [],
    "from_lsn": 0,
    "to_lsn": 48211022,
    "reason": "",
    "set": "",
    "tables_missing": 0,
    "protected": True,
    "apart": False,
    "partial": False,
    "missing": [],
    "doubtful": "",
    "foreign": False,
    "copies": [
        {
            "destination": "local",
            "state": "complete",
            "stored_at": "2026-11-21T02:07:12Z",
            "verified_at": "2026-11-21T05:00:00Z",
        }
    ],
}


@of(server_facts.Position)
class Position(Shape):
    """A place in a server's binary log; an empty file: it writes none."""

    pos: int = Field(ge=0)


@of(backup_record.Copy)
class Copy(Shape):
    """A backup at one destination."""


@of(backup_record.BackupRecord)
class Backup(Shape):
    """A backup. Sizes are bytes: of the data, as stored, and of it what no earlier backup had stored."""

    model_config = example(_BACKUP)


@of(backup_record.BackupDetail)
class BackupDetail(Shape):
    """A backup with what its manifest adds."""

    model_config = example(
        {
            **_BACKUP,
            "objects": 431,
            "codec": "zstd",
            "recipients": ["6D2A9C1E4B7F00112233445566778899AABBCCDD"],
            "bound": True,
            "runbook_sha256": "9f" * 32,
        }
    )


class BackupsQuery(Dated):
    server: Name | None = Field(None, description="Only those of this server.")
    kind: BackupKind | None = Field(None, description="Only those of this kind.")
    state: BackupState | None = Field(None, description="Only those in this state.")


class BackupRequest(Asked):
    """Take a backup as soon as it can begin."""

    model_config = example(
        {"server": "shop-db1", "kind": "full"}, {"server": "shop-db1", "kind": "logical", "tables": ["shop.orders"]}
    )

    server: Name
    kind: Literal["full", "incremental", "logical"]
    set: Name | None = Field(None, description="Of a logical one: a set of tables that the policy names.")
    tables: list[Text] = Field(
        [],
        max_length=1000,
        examples=[["shop.*"]],
        description="Of a logical one: only these tables, in place of what the policy says.",
    )


class DeleteQuery(Query):
    now: bool = Field(False, description="Remove it at once, without the grace period.")
    with_increments: bool = Field(False, description="And every backup that builds on it.")


class Deleted(Shape):
    """What became of a deletion."""

    model_config = example(
        {"id": "20261121T020000Z-7f3a9c01", "removed": False, "held": [], "forgotten": [], "job": None}
    )

    id: str
    removed: bool = Field(description="It is gone; else it is marked, and can be undeleted until it is removed.")
    held: list[str] = Field(description="Reasons why backupd could not remove an object immediately.")
    forgotten: list[str] = Field(description="Remarks on copies at destinations that are no longer configured.")
    job: Job | None = Field(description="What removes it, where it is to go at once; null where nothing is left of it.")


class Kept(Shape):
    """Whether rules may delete it."""

    model_config = example({"id": "20261121T020000Z-7f3a9c01", "pinned": True, "problems": []})

    id: str
    pinned: bool
    problems: list[str] = Field(description="Destinations that could not be told, with why.")


class Undeleted(Shape):
    """The backups that came back: what it builds on comes with it."""

    model_config = example({"undeleted": ["20261121T020000Z-7f3a9c01"]})

    undeleted: list[str]


class Runbook(Shape):
    """How to do it by hand, as Markdown."""

    model_config = example({"id": "20261121T020000Z-7f3a9c01", "runbook": "# Restoring shop-db1 by hand\n"})

    id: str
    runbook: str


class Decision(Shape):
    """What the rules say of one backup at one destination."""

    id: str
    kind: BackupKind
    parent: str | None
    finished_at: Time
    bytes: int
    marked: bool = Field(description="It is marked as deleted already.")
    keep: bool
    rules: list[str]
    reasons: list[str]


class LogDecision(Shape):
    """What the rules say of a run of binary logs."""

    name: str
    from_: Time = Field(alias="from")
    to: Time
    bytes: int
    keep: bool
    reasons: list[str]


@of(rules.Recoverable)
class Span(Shape):
    """What can be restored from what is kept."""


class Decisions(Shape):
    """What the rules say of everything of a server at one destination."""

    model_config = example(
        {
            "server": "shop-db1",
            "destination": "local",
            "at": "2026-11-21T09:41:10Z",
            "hold": None,
            "keep": 1,
            "expire": 0,
            "bytes_expire": 0,
            "note": "bytes that they name; what others share stays",
            "backups": [
                {
                    "id": "20261121T020000Z-7f3a9c01",
                    "kind": "physical-full",
                    "parent": None,
                    "finished_at": "2026-11-21T02:07:12Z",
                    "bytes": 734003200,
                    "marked": False,
                    "keep": True,
                    "rules": ["keep_fulls"],
                    "reasons": ["one of the 2 newest full backups"],
                }
            ],
            "binlogs": [
                {
                    "name": "mysql-bin.000001 .. mysql-bin.000042",
                    "from": "2026-11-14T00:00:00Z",
                    "to": "2026-11-21T09:41:03Z",
                    "bytes": 104857600,
                    "keep": True,
                    "reasons": ["a kept backup can be rolled forward with it"],
                }
            ],
            "recoverable": [
                {"from": "2026-11-21T02:07:12Z", "to": "2026-11-21T09:41:03Z", "base": "20261121T020000Z-7f3a9c01"}
            ],
            "stopped": [],
            "warnings": [],
        }
    )

    server: str
    destination: str
    at: Time
    hold: str | None = Field(description="Why nothing of it is deleted now, whatever the rules say.")
    keep: int
    expire: int
    bytes_expire: int
    note: str
    backups: list[Decision]
    binlogs: list[LogDecision]
    recoverable: list[Span]
    stopped: list[str] = Field(description="Backups that only a hold, or being the newest proved chain, keeps.")
    warnings: list[str]


class ApplyRequest(Asked):
    """Mark what expired; it goes after the grace period."""

    model_config = example({"really": False})

    really: bool = Field(False, description="Even when more than half of all backups would go.")


PROOF: dict[str, Any] = {
    "id": "20261121T060000Z-0a1b2c3d",
    "server": "shop-db1",
    "backup": "20261121T020000Z-7f3a9c01",
    "target": "2026-11-21T05:12:44Z",
    "outcome": "proved",
    "started_at": "2026-11-21T06:00:00Z",
    "finished_at": "2026-11-21T06:04:31Z",
    "seconds": 271.4,
    "phases": [{"name": "fetch", "seconds": 61.2, "bytes": 734003200}],
    "checks": [{"name": "checksums", "outcome": "passed", "detail": "37 tables are equal to the source's"}],
    "tables_compared": 37,
    "tables_present": 2,
    "not_looked_at": 0,
    "withdrawn": "",
    "error": "",
    "warnings": [],
    "older": False,
}


@of(proof.Check)
class Check(Shape):
    """One question asked of the restored data."""

    outcome: str = Field(pattern="^(passed|failed|skipped)$")


@of(proof.Proof)
class Proof(Shape):
    """A test restore."""

    model_config = example(PROOF)

    outcome: str = Field(pattern="^(proved|restored|failed|undecided|inexact|withdrawn)$")


class ProofsQuery(Dated):
    server: Name | None = Field(None, description="Only those of this server.")
    backup: Text | None = Field(None, max_length=64, description="Only those of this backup.")
    outcome: Literal["proved", "restored", "failed", "undecided", "inexact", "withdrawn"] | None = Field(
        None, description="Only those that ended so."
    )


class TestRestoreRequest(Asked):
    """Restore onto a throw-away server, check the data, keep the proof."""

    model_config = example({"server": "shop-db1", "target": "random"})

    server: Name
    target: Text = Field("latest", max_length=1000, description="What to restore to; also `random`.")


class VerificationRequest(Asked):
    """Read stored objects again and compare them with their hashes."""

    model_config = example({"server": "shop-db1", "subset": 0.1}, {})

    server: Name | None = Field(None, description="Only its backups; those of all without it.")
    subset: float | None = Field(None, gt=0, le=1, strict=False, description="Only this part of the objects.")


class ReplicationRequest(Asked):
    """Bring destinations up to date."""

    model_config = example({"server": "shop-db1", "destination": "offsite"})

    server: Name | None = Field(None, description="Only its backups; those of all without it.")
    destination: Name | None = Field(None, description="Only this one; without it all that the policies name.")
