"""Shapes of servers and destinations at a glance, of a timeline, holds and pauses, and a search in binary logs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from api.schemas.backups import PROOF, Position, Proof
from api.schemas.base import MOST, Asked, Line, Moment, Page, Query, Shape, Text, Time, example, of
from backupd.app.retention import holds
from backupd.app.views import destinations, server_status
from backupd.model import backup_record, server_facts
from backupd.model.binlog import ChangeKind
from backupd.recovery import timeline

_PLACE: dict[str, Any] = {"file": "mysql-bin.000042", "pos": 4711, "gtid": "0-1-1099"}
TIMELINE: dict[str, Any] = {
    "server": "shop-db1",
    "at": "2026-11-21T09:41:10Z",
    "windows": [
        {
            "from": "2026-11-14T02:07:12Z",
            "to": "2026-11-21T09:41:03Z",
            "reason_end": "the newest that is there",
            "branch": "20261101T000000Z-11223344",
            "base": "20261114T020000Z-99887766",
            "destinations": ["local"],
            "conditions": [],
        }
    ],
    "gaps": [
        {
            "after": _PLACE,
            "before": {**_PLACE, "pos": 9000},
            "reason": "the server had purged it",
            "from": "2026-11-10T01:00:00Z",
            "to": "2026-11-10T03:00:00Z",
            "branch": "20261101T000000Z-11223344",
            "destination": "",
        }
    ],
    "latest": "2026-11-21T09:41:03Z",
    "tables_only": False,
    "first_due": None,
    "warnings": [],
    "destinations": [
        {"name": "local", "latest": "2026-11-21T09:41:03Z", "behind_seconds": 0.0, "rpo_seconds": 7.0, "trouble": ""}
    ],
    "branches": [
        {
            "id": "20261101T000000Z-11223344",
            "reason": "first",
            "from": "2026-11-01T00:00:00Z",
            "to": None,
            "parent": "",
            "fork": None,
        }
    ],
    "last_proof": PROOF,
    "objectives": {
        "rpo": 60.0,
        "rto": 7200.0,
        "achieved_rpo": 7.0,
        "predicted_rto": 340.0,
        "rpo_kept": True,
        "rto_kept": True,
        "kept": True,
    },
}


class Window(Shape):
    """Every moment from one to the other can be restored; one moment where both are the same."""

    from_: Time = Field(alias="from")
    to: Time
    reason_end: str
    branch: str
    base: str = Field(description="The backup that a restore to it begins with.")
    destinations: list[str]
    conditions: list[str] = Field(description="What makes it doubtful.")


class Gap(Shape):
    """Binary logs that are not there: nothing inside can be replayed."""

    after: Position
    before: Position | None
    reason: str
    from_: Time | None = Field(alias="from")
    to: Time | None
    branch: str
    destination: str = Field(description="Empty: at no destination.")


@of(timeline.Reach)
class Reach(Shape):
    """How far the copies of one destination reach."""


class Branch(Shape):
    """A server's history forks at each restore."""

    id: str
    reason: str
    from_: Time = Field(alias="from")
    to: Time | None
    parent: str | None
    fork: Position | None


class Objectives(Shape):
    """Seconds: what the policy allows and what is so; null where nobody knows, or nothing was asked for."""

    rpo: float | None
    rto: float | None
    achieved_rpo: float | None
    predicted_rto: float | None
    rpo_kept: bool | None
    rto_kept: bool | None
    kept: bool


class Timeline(Shape):
    """What of a server can be had again, what interrupts it, and whether its objectives are kept."""

    model_config = example(TIMELINE)

    server: str
    at: Time
    windows: list[Window]
    gaps: list[Gap]
    latest: Time | None
    tables_only: bool = Field(
        description="Only dumps are taken of it: the moments are those of tables, and the server "
        "as a whole cannot be restored."
    )
    first_due: Time | None = Field(description="There is no backup, and none was due yet: the first one starts then.")
    warnings: list[str]
    destinations: list[Reach]
    branches: list[Branch]
    last_proof: Proof | None
    objectives: Objectives


Whom = Annotated[
    str,
    Field(
        pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,62})$",
        examples=["shop-db1"],
        description="A server; `*` for every one.",
    ),
]
_HOLD: dict[str, Any] = {
    "server": "shop-db1",
    "kind": "hold",
    "reason": "audit until March",
    "by": "anna",
    "since": "2026-11-21T12:00:00Z",
}


@of(backup_record.Hold)
class Hold(Shape):
    """A hold (nothing of the server is deleted) or a pause (no job of it starts by itself)."""

    model_config = example(_HOLD)

    kind: str = Field(pattern="^(hold|pause)$")


class HoldRequest(Asked):
    model_config = example({"server": "shop-db1", "reason": "audit until March"})

    server: Whom
    reason: Line


class PauseRequest(HoldRequest):
    model_config = example({"server": "shop-db1", "reason": "moving the data centre", "stop_running": False})

    stop_running: bool = Field(False, description="And stop what runs or waits.")


@of(holds.Held)
class Held(Shape):
    """`problems`: destinations that could not be told, with why."""

    model_config = example({**_HOLD, "problems": []})

    kind: str = Field(pattern="^(hold|pause)$")


@of(holds.Paused)
class Paused(Shape):
    """`stopped`: jobs that were asked to stop; `problems`: those that could not be."""

    model_config = example({**_HOLD, "kind": "pause", "stopped": [], "problems": []})

    kind: str = Field(pattern="^(hold|pause)$")


class ReleaseQuery(Query):
    server: Whom


class Released(Shape):
    """`problems`: destinations where it may still be written."""

    model_config = example({"server": "shop-db1", "kind": "hold", "released": True, "problems": []})

    server: str
    kind: str
    released: bool
    problems: list[str]


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


@of(server_status.Reason)
class Reason(Shape):
    """Why something is not `good`, and the next step."""

    status: str = Field(pattern="^(good|warning|bad)$")


@of(server_status.StreamView)
class Stream(Shape):
    """The continuous copy of the binary log. `spool_bytes` wait on this host, `spool_limit` may."""


@of(server_status.LastBackup)
class LastBackup(Shape):
    pass


@of(server_status.NextRun)
class NextRun(Shape):
    pass


@of(server_status.LastProof)
class LastProof(Shape):
    """The newest test restore; `proved_at`: when the data was last found good, and as new as it was asked for."""


@of(server_status.ServerOverview)
class Server(Shape):
    """A server at a glance; spans are seconds."""

    model_config = example(_SERVER)

    status: str = Field(pattern="^(good|warning|bad)$")


@of(destinations.Shortfall)
class Behind(Shape):
    """What belongs there and is not there yet."""


@of(destinations.DestinationView)
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

    status: str = Field(pattern="^(good|warning|bad)$")


@of(server_facts.Identity)
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

    verdict: str = Field(pattern="^(own|failover|stranger)$")


class SearchQuery(Page):
    """A transaction is found when it fits everything that is given."""

    table: list[Text] = Field(
        [], max_length=100, examples=[["shop.orders"]], description="Patterns of tables: schema.table, with * and ?."
    )
    kind: list[ChangeKind] = Field([], max_length=20, description="What was done to them.")
    since: Moment | None = Field(None, examples=["2026-11-21T09:00:00Z"])
    until: Moment | None = Field(None, examples=["2026-11-21T10:00:00Z"])
    gtid: Text | None = Field(None, max_length=200, examples=["0-1-1100"])
    branch: Text | None = Field(None, max_length=64, description="Only this branch of the server's history.")
    limit: int = Field(50, ge=1, le=MOST, description="Maximum number of rows.")


class Change(Shape):
    schema_: str = Field(alias="schema")
    table: str
    kind: ChangeKind
    rows: int


class Found(Shape):
    """A transaction. `restore_before`: the target of a restore to the moment right before it."""

    model_config = example(
        {
            "at": "2026-11-21T09:41:03.401000Z",
            "precise": True,
            "gtid": "0-1-1181",
            "file": "mysql-bin.000042",
            "pos": 91823,
            "end": 92110,
            "branch": "20261101T000000Z-11223344",
            "server_id": 1,
            "changes": [{"schema": "shop", "table": "orders", "kind": "delete", "rows": 4112}],
            "statement": None,
            "state": None,
            "restore_before": "before-gtid:0-1-1181",
        }
    )

    at: Time
    precise: bool
    gtid: str
    file: str
    pos: int
    end: int
    branch: str
    server_id: int
    changes: list[Change]
    statement: str | None
    state: str | None
    restore_before: str
