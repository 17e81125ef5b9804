"""Servers and destinations at a glance."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from api.schemas.alerts import Incident
from api.schemas.base import Shape, Time, example
from api.schemas.holds import Hold
from api.schemas.jobs import Job
from api.schemas.timeline import Reach
from backupd.model.backup_record import BackupKind
from backupd.model.job import JobKind

_SERVER: dict[str, Any] = {
    "name": "shop-db1",
    "policy": "gold",
    "status": "good",
    "reasons": [],
    "latest": "2026-11-21T09:41:03Z",
    "tables_only": False,
    "first": "2026-11-14T02:07:12Z",
    "rpo_seconds": 7.0,
    "rpo_objective_seconds": 60.0,
    "rpo_kept": True,
    "rto_seconds": 340.0,
    "rto_objective_seconds": 7200.0,
    "rto_kept": True,
    "windows": 1,
    "gaps": 0,
    "destinations": [
        {"name": "local", "latest": "2026-11-21T09:41:03Z", "behind_seconds": 0.0, "rpo_seconds": 7.0, "trouble": ""}
    ],
    "stream": {
        "state": "streaming",
        "told_at": "2026-11-21T09:41:05Z",
        "spool_bytes": 4096,
        "spool_limit": 10737418240,
        "error": "",
    },
    "last_success": "2026-11-21T02:07:12Z",
    "last_backups": [
        {
            "id": "20261121T020000Z-7f3a9c01",
            "kind": "physical-full",
            "set": "",
            "started_at": "2026-11-21T02:00:00Z",
            "finished_at": "2026-11-21T02:07:12Z",
            "seconds": 432.0,
            "bytes_source": 2147483648,
            "bytes_stored": 734003200,
            "bytes_new": 52428800,
            "tables_missing": 0,
        }
    ],
    "next_runs": [{"leg": "physical.full", "kind": "physical-full", "at": "2026-11-22T02:00:00Z"}],
    "last_proof": {
        "id": "20261121T060000Z-0a1b2c3d",
        "backup": "20261121T020000Z-7f3a9c01",
        "outcome": "proved",
        "finished_at": "2026-11-21T06:04:31Z",
        "tables_compared": 37,
        "error": "",
        "proved_at": "2026-11-21T06:04:31Z",
        "warnings": [],
        "older": False,
    },
    "running": [],
    "jobs_waiting": 0,
    "incidents": [],
    "backups": 7,
    "protected": 6,
    "bytes_stored": 5138022400,
    "held": None,
    "paused": None,
    "absent_since": None,
    "looked_at": "2026-11-21T09:41:10Z",
}


class Reason(Shape):
    """Why something is not `good`, and the next step."""

    status: str = Field(pattern="^(good|warning|bad)$")
    text: str
    hint: str


class Stream(Shape):
    """The continuous copy of the binary log. `spool_bytes` wait on this host, `spool_limit` may."""

    state: str
    told_at: Time | None
    spool_bytes: int
    spool_limit: int
    error: str


class LastBackup(Shape):
    id: str
    kind: BackupKind
    set: str
    started_at: Time
    finished_at: Time
    seconds: float
    bytes_source: int
    bytes_stored: int
    bytes_new: int
    tables_missing: int


class NextRun(Shape):
    leg: str
    kind: JobKind
    at: Time


class LastProof(Shape):
    """The newest test restore; `proved_at`: when the data was last found good, and as new as it was asked for."""

    id: str
    backup: str
    outcome: str
    finished_at: Time
    tables_compared: int
    error: str
    proved_at: Time | None
    warnings: list[str]
    older: bool


class Server(Shape):
    """A server at a glance; spans are seconds."""

    model_config = example(_SERVER)

    name: str
    policy: str
    status: str = Field(pattern="^(good|warning|bad)$")
    reasons: list[Reason] = Field(description="Why it is not good, the worst first.")
    latest: Time | None = Field(description="The newest moment that can be restored.")
    tables_only: bool = Field(
        description="Only dumps are taken of it: the moments are those of tables, and the server "
        "as a whole cannot be restored."
    )
    first: Time | None
    rpo_seconds: float | None = Field(description="What would be lost were the server lost now.")
    rpo_objective_seconds: float | None
    rpo_kept: bool | None
    rto_seconds: float | None = Field(description="How long a restore to the newest moment would take.")
    rto_objective_seconds: float | None
    rto_kept: bool | None
    windows: int
    gaps: int
    destinations: list[Reach]
    stream: Stream | None
    last_success: Time | None
    last_backups: list[LastBackup]
    next_runs: list[NextRun]
    last_proof: LastProof | None
    running: list[Job]
    jobs_waiting: int
    incidents: list[Incident] = Field(description="Those that are open.")
    backups: int
    protected: int
    bytes_stored: int
    held: Hold | None
    paused: Hold | None
    absent_since: Time | None = Field(description="Since when a backup keeps it out of rotation.")
    looked_at: Time | None = Field(description="When all this was found out; null: not yet.")


class Behind(Shape):
    """What belongs there and is not there yet."""

    backups: int
    bytes: int
    seconds: float | None
    error: str


class Destination(Shape):
    """A destination at a glance, as it was when somebody looked last (`checked_at`)."""

    model_config = example(
        {
            "name": "local",
            "type": "filesystem",
            "off_site": False,
            "status": "good",
            "reasons": [],
            "reachable": True,
            "initialised": True,
            "trouble": "",
            "checked_at": "2026-11-21T09:41:00Z",
            "bytes_free": 500000000000,
            "bytes_total": 1000000000000,
            "forecast": "full in about 200 days",
            "full_on": None,
            "earliest_full_on": None,
            "servers": 1,
            "backups": 7,
            "bytes_stored": 5138022400,
            "behind": {"backups": 0, "bytes": 0, "seconds": None, "error": ""},
            "worst_lag_seconds_of_a_day": 4.0,
            "lock_seconds": None,
        }
    )

    name: str
    type: str
    off_site: bool
    status: str = Field(pattern="^(good|warning|bad)$")
    reasons: list[Reason]
    reachable: bool | None
    initialised: bool | None
    trouble: str
    checked_at: Time | None
    bytes_free: int | None
    bytes_total: int | None
    forecast: str
    full_on: Time | None
    earliest_full_on: Time | None
    servers: int
    backups: int
    bytes_stored: int
    behind: Behind
    worst_lag_seconds_of_a_day: float | None
    lock_seconds: float | None


class Identity(Shape):
    """A database server that answered under a name of the configuration. `verdict`: `own`, `failover` (another one that
    holds what was archived last), or `stranger`; `evidence`: why."""

    model_config = example(
        {
            "server": "shop-db1",
            "uuid": "8nG7mZ2r5yHkq0xWcVvP1sTzJ4E=",
            "verdict": "own",
            "server_id": 2,
            "evidence": "accepted by anna at 2026-11-22T21:40:03Z: it has no GTIDs by which its history could be known "
            "again",
            "address": "10.0.0.7:3306",
            "since": "2026-11-22T21:25:21Z",
            "seen_at": "2026-11-22T21:31:00Z",
            "accepted_by": "anna",
        }
    )

    server: str
    uuid: str
    verdict: str = Field(pattern="^(own|failover|stranger)$")
    server_id: int
    evidence: str
    address: str
    since: Time
    seen_at: Time
    accepted_by: str
