"""What the rules keep and what they let go, with reasons."""

from __future__ import annotations

from pydantic import Field

from api.schemas.base import Asked, Shape, Time, example
from backupd.model.backup_record import BackupKind


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


class Span(Shape):
    """What can be restored from what is kept."""

    from_: Time = Field(alias="from")
    to: Time
    base: str


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
