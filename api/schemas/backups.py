"""Backups, as they are told, asked for, kept and deleted."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.base import Asked, Dated, Name, Query, Shape, Text, Time, example
from api.schemas.jobs import Job
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


class Position(Shape):
    """A place in a server's binary log; an empty file: it writes none."""

    file: str
    pos: int = Field(ge=0)
    gtid: str


class Copy(Shape):
    """A backup at one destination. `verified_at`: when it was last read again and found good."""

    destination: str
    state: str
    stored_at: Time
    verified_at: Time | None


class Backup(Shape):
    """A backup. Sizes are bytes: of the data, as stored, and of it what no earlier backup had stored."""

    model_config = example(_BACKUP)

    id: str
    server: str
    kind: BackupKind
    state: BackupState
    parent: str | None = Field(description="What an increment builds on.")
    started_at: Time
    finished_at: Time
    bytes_source: int
    bytes_stored: int
    bytes_new: int
    files: int
    files_linked: int = Field(description="Files that were the same as in earlier backups.")
    position: Position
    flavour: str
    server_version: str
    tool_version: str
    pinned: bool = Field(description="No rule deletes it.")
    warnings: list[str]
    from_lsn: int
    to_lsn: int
    reason: str = Field(description="Why this kind was taken when another one was due.")
    set: str = Field(description="Of a logical backup: the set of tables of the policy.")
    tables_missing: int = Field(
        description="Of a logical backup: tables that could not be dumped. Of a physical one: tables that its tool "
        "leaves out and no logical backup takes, or that it lost because they were changed meanwhile."
    )
    partial: bool = Field(description="It lacks tables that other backups of its kind have.")
    missing: list[str] = Field(description="Of a physical backup: tables of which files are not in it.")
    doubtful: str = Field(
        description="Why nobody should count on it before a test restore has shown that it works; empty as a rule."
    )
    protected: bool = Field(description="It has as many verified copies as the policy wants.")
    apart: bool = Field(
        description="It is of another server, which answered under this name and which nobody has "
        "accepted: no rule, no proof and no target but its own id means it."
    )
    foreign: bool = Field(
        description="It lies at a destination, nothing shows that this installation took it, and "
        "nobody has adopted it: no rule, no proof and no target but its own id means it, "
        "and nothing removes it."
    )
    copies: list[Copy]


class BackupDetail(Backup):
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

    objects: int = Field(description="Stored objects that it consists of.")
    recipients: list[str] = Field(description="Fingerprints of the keys that open it.")
    codec: str
    bound: bool = Field(
        description="What it tells in the clear (server, kind, times, sizes) is compared with what was "
        "sealed. False in backups of format 1: nothing in them shows that it was changed."
    )
    runbook_sha256: str = Field(description="Of RUNBOOK.md beside it: what is followed by hand is compared with it.")


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
    held: list[str] = Field(description="Why something is still there that was to go at once.")
    forgotten: list[str] = Field(description="What is to be said of copies that nobody can touch from here.")
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
