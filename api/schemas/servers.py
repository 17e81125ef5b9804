"""Shapes of servers and destinations at a glance, of a timeline, holds and pauses, and a search in binary logs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from api.schemas.backups import Position, Proof
from api.schemas.base import MOST, Asked, Line, Moment, Page, Query, Shape, Text, Time, example, of
from backupd.app.retention import holds
from backupd.app.views import clusters, destinations, server_status
from backupd.model import acknowledged, backup_record, server_facts
from backupd.model.binlog import ChangeKind
from backupd.recovery import ist, timeline, windows


@of(windows.Window)
class Window(Shape):
    """Every moment from one to the other can be restored; one moment where both are the same."""


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


@of(acknowledged.AcknowledgedWindow)
class AcknowledgedWindow(Shape):
    """A time in which no commit was answered before backupd had it."""


@of(acknowledged.Acknowledged)
class Acknowledgement(Shape):
    """Since when RPO 0 holds: each commit is answered when backupd has it (`binlog.acknowledge`)."""


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
    acknowledgement: Acknowledgement | None
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


@of(backup_record.Hold)
class Hold(Shape):
    """A hold (nothing of the server is deleted) or a pause (no job of it starts by itself)."""

    kind: str = Field(pattern="^(hold|pause)$")


class HoldRequest(Asked):
    model_config = example({"server": "shop-db1", "reason": "audit until March"})

    server: Whom
    reason: Line


class PauseRequest(HoldRequest):
    model_config = example({"server": "shop-db1", "reason": "moving the data centre", "stop_running": False})

    stop_running: bool = Field(False, description="Also cancel running and queued jobs.")


@of(holds.Held)
class Held(Shape):
    """`problems`: destinations that could not be told, with why."""

    kind: str = Field(pattern="^(hold|pause)$")


@of(holds.Paused)
class Paused(Shape):
    """`stopped`: jobs that were asked to stop; `problems`: those that could not be."""

    kind: str = Field(pattern="^(hold|pause)$")


class ReleaseQuery(Query):
    server: Whom


class Released(Shape):
    """`problems`: destinations where it may still be written."""

    server: str
    kind: str
    released: bool
    problems: list[str]


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

    status: str = Field(pattern="^(good|warning|bad)$")


@of(destinations.Shortfall)
class Behind(Shape):
    """What belongs there and is not there yet."""


@of(destinations.DestinationView)
class Destination(Shape):
    """A destination at a glance, as it was when somebody looked last (`checked_at`)."""

    status: str = Field(pattern="^(good|warning|bad)$")


@of(server_facts.ClusterPosition)
class ClusterPosition(Shape):
    """A position in the history of a Galera cluster."""


@of(ist.Forecast)
class Forecast(Shape):
    """How a node comes back that is restored to this position. `ist`: incremental state transfer; `late`: possible now,
    and not any more when the restore has ended; `sst`: a donor copies all its data; `foreign`: it must not join, its
    history is another one. `until`: null if unknown, or as good as for ever; `seconds`: of the restore, predicted."""

    outcome: str = Field(pattern="^(ist|late|sst|foreign)$")


@of(ist.NodeSample)
class NodeSample(Shape):
    """A node of a Galera cluster, as it was seen."""


@of(ist.Donor)
class Donor(Shape):
    """A node of a Galera cluster as a source of IST. `downto`: the oldest seqno in its gcache; `room`: bytes that it
    holds; `window_seconds`: for how long it holds what is written now, null if nothing was measured."""


@of(clusters.BackupForecast)
class BackupForecast(Shape):
    """How a node comes back that is restored from this backup now."""


@of(ist.Rejoin)
class Rejoin(Shape):
    """What was predicted of a node that joined its cluster again, and what came."""


@of(clusters.Cluster)
class Cluster(Shape):
    """A Galera cluster, and whether backups of it let a node come back without a copy of all data. `advice`: what has
    to be otherwise for the newest one; empty if nothing."""


@of(server_facts.Identity)
class Identity(Shape):
    """A database server that answered under a name of the configuration. `verdict`: `own`, `failover` (another one that
    holds what was archived last), or `stranger`; `evidence`: why."""

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
