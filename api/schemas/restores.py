"""The way back: plans, restores and how far they are."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.backups import Position, Runbook
from api.schemas.base import Asked, Folder, Id, Name, OfServer, Problem, Shape, Text, Time, example, of
from api.schemas.jobs import Job, Progress
from backupd.app.restores import progress
from backupd.model import binlog, thaw
from backupd.model.job import JobState
from restore.planning import plan, target
from storage.destination import Tier

_WHOLE: dict[str, Any] = {
    "server": "shop-db1",
    "target": "2026-11-21T09:41:03.250Z",
    "mode": "new-server",
    "datadir": "/srv/restored",
    "start": True,
}
_TABLES: dict[str, Any] = {
    "server": "shop-db1",
    "target": "before-gtid:0-1-1100",
    "mode": "tables",
    "tables": ["shop.orders"],
    "into": "shop-db1",
    "as": "*_restored",
}


class RestoreRequest(Asked):
    """What to restore, to which moment, and where to: a whole server into an empty folder (`new-server`, `replica`),
    a node of a Galera cluster that comes back to it (`galera`), or tables into a running server or SQL files
    (`tables`)."""

    model_config = example(_WHOLE, _TABLES)

    server: Name
    target: Text = Field(
        max_length=1000,
        examples=["latest", "2026-11-21T09:41:03.250Z", "before-gtid:0-1-1100"],
        description="latest | a time with its offset | gtid:... | before-gtid:... | FILE:POS | "
        "backup:ID; any of them may end in @BRANCH.",
    )
    mode: Literal["new-server", "replica", "galera", "tables"] = Field(
        "new-server",
        description="`new-server` forgets the replication of the source; `replica` resets nothing, or with "
        "`replicate_from` makes the copy a replica of that server; `galera`: a node that comes back to its "
        "`cluster` by IST.",
    )
    cluster: Text | None = Field(
        None,
        max_length=200,
        examples=["shop"],
        description="Of a node: its cluster, a configured group of servers or the wsrep_cluster_name of configured "
        "ones.",
    )
    allow_sst: bool = Field(
        False,
        description="Of a node that is started: also where no member can send what it lacks by IST, so that it takes a "
        "full copy of a donor.",
    )
    node: Text | None = Field(
        None,
        max_length=200,
        examples=["shop-db1"],
        description="Of a node of a group: the member that comes back. Default: the only one that does not run.",
    )
    datadir: Folder | None = Field(None, description="Of a whole restore: an empty folder, or one that does not exist.")
    start: bool = Field(False, description="Of a whole restore: start a database server on it afterwards.")
    tables: list[Text] = Field(
        [],
        max_length=1000,
        examples=[["shop.orders"]],
        description="Patterns of tables: schema.table, where * stands for any text.",
    )
    into: Name | None = Field(None, description="Of tables: the running server that gets them.")
    as_: Text | None = Field(
        None,
        alias="as",
        min_length=1,
        max_length=200,
        examples=["*_restored"],
        description="Of tables: other names. Without it they take the place of the live tables.",
    )
    sql: Folder | None = Field(None, description="Of tables: write them as SQL files into this new folder.")
    compare: bool = Field(False, description="Of tables: only show how they differ from the live ones.")
    triggers: Literal["backup", "live", "none"] = Field("backup", description="Of tables: whose triggers they get.")
    exclude_gtid: list[Text] = Field(
        [], max_length=1000, examples=[["0-1-1100"]], description="Transactions that are left out of the replay."
    )
    replay_with: Literal["applier", "pipe"] | None = Field(None, description="How binary logs are replayed.")
    thaw: Tier | None = Field(
        None, strict=False, examples=["standard"], description="Thaw what is archived at this tier, and wait for it."
    )
    source: Literal["logical", "physical"] | None = Field(None, description="Of tables: what they are taken out of.")
    accept_older: bool = Field(
        False,
        description="Of `latest`: restore the newest moment that can be restored, though "
        "something later is known to exist (a problem `older` without it).",
    )
    accept_inexact: bool = Field(
        False, description="Replay what may give other rows than the source had (a problem `inexact` without it)."
    )
    replicate_from: Text | None = Field(
        None,
        min_length=1,
        max_length=300,
        examples=["shop-db1", "db1.example.com:3306"],
        description="Of mode `replica`: the source that it replicates from: a server of the configuration.",
    )
    delay: Text | None = Field(
        None,
        min_length=1,
        max_length=20,
        examples=["1h"],
        description="Of mode `replica`: how long it stays behind its source.",
    )
    server_id: int | None = Field(
        None, ge=1, le=2**32 - 1, description="Of mode `replica`: its server_id; without it one that is free."
    )


class PlanRequest(RestoreRequest):
    """What would be restored; where to may be left open."""

    model_config = example({"server": "shop-db1", "target": "2026-11-21T09:41:03.250Z"}, _TABLES)


class StartRequest(Asked):
    """Start a plan that was made before."""

    model_config = example(
        {"plan": "20261121T094300Z-5e6f7a8b"}, {"plan": "20261121T094300Z-5e6f7a8b", "confirm": "shop-db1"}
    )

    plan: Id = Field(description="Of `POST /v1/restores/plan`.")
    confirm: Text | None = Field(None, max_length=200, description="The name of the server whose data may be replaced.")


class RestoreAtOnce(RestoreRequest):
    """Plan and start in one step."""

    model_config = example(_WHOLE, {**_TABLES, "confirm": "shop-db1"})

    confirm: Text | None = Field(None, max_length=200, description="The name of the server whose data may be replaced.")


class KeptRequest(Shape):
    """A request as it is kept: what was left out is empty."""

    server: str
    target: str
    mode: Literal["new-server", "replica", "galera", "tables"] = "new-server"
    cluster: str = ""
    allow_sst: bool = False
    node: str = ""
    datadir: str = ""
    start: bool = False
    tables: list[str] = Field([])
    into: str = ""
    as_: str = Field("", alias="as")
    sql: str = ""
    compare: bool = False
    triggers: str = "backup"
    exclude_gtid: list[str] = Field([])
    replay_with: str = ""
    thaw: str = ""
    source: str = ""
    accept_older: bool = False
    accept_inexact: bool = False
    replicate_from: str = ""
    delay: str = ""
    server_id: int = 0


@of(plan.Step)
class Step(Shape):
    """One step of a plan, and what its time was estimated from."""


@of(binlog.Stop)
class Stop(Shape):
    """Where the replay ends, and the first transaction that the copy will not hold."""

    next_gtid: str | None


@of(binlog.ReplayLeg)
class ReplayLeg(Shape):
    pass


@of(binlog.ReplaySpec)
class Replay(Shape):
    """How binary logs are replayed. `doubtful`: transactions whose effect may differ."""

    method: str


class Promise(Shape):
    """What the policy allows, in seconds, and whether the plan keeps to it."""

    objective: float | None
    kept: bool | None


@of(thaw.Offer)
class ThawOffer(Shape):
    pass


class ThawClass(Shape):
    class_: str = Field(alias="class")
    count: int
    bytes: int
    thawing: int


@of(thaw.ColdObject)
class ColdObject(Shape):
    pass


class ThawNeed(Shape):
    """What has to be thawed before everything can be read; `cost` is an estimate in `currency`."""

    destinations: list[str]
    count: int
    bytes: int
    days: int
    tier: str
    hours: float | None
    cost: float | None
    currency: str
    prices_of: str
    offers: list[ThawOffer]
    classes: list[ThawClass]
    objects: list[ColdObject]


@of(target.Older)
class Older(Shape):
    """The restored data ends at `ends`, and the server's history goes on up to `known`; `certain`: something of that is
    known to exist, else it may."""


@of(plan.ReplicaPlan)
class ReplicaPlan(Shape):
    """The replica that the copy becomes, and where it begins."""


class TableGoal(Shape):
    """A table and what it will be called."""

    source: str
    target: str


class Plan(Shape):
    """What a restore does, how many bytes it moves, and how long it takes. Its id starts it, until it expires."""

    id: str
    made_at: Time
    made_by: str
    expires_at: Time
    request: KeptRequest
    server: str
    target: str
    backup: str
    chain: list[str] = Field(description="Backups in the order in which they are applied.")
    destinations: list[str] = Field(description="Where to read, best first.")
    position: Position
    reason: str
    bytes: int = Field(description="To be fetched.")
    bytes_stored: int
    bytes_source: int
    seconds: float
    steps: list[Step]
    warnings: list[str]
    replay: Replay | None
    until: Stop | None
    thaw: ThawNeed | None
    older: Older | None = Field(None, description="Of `latest`, where something later exists: what was accepted.")
    inexact: str = Field("", description="Why the replay may give other rows than the source had, where accepted.")
    replica: ReplicaPlan | None = None
    rto: Promise
    way: str | None = Field(None, description="Of tables: out of a `logical` or a `physical` backup.")
    tables: list[TableGoal] | None = None
    needed: list[str] | None = Field(None, description="Tables that are needed besides.")
    others: list[str] | None = Field(None, description="The other ways, and why not.")


class RefusedRestore(Problem):
    """A restore that is not started: `plan` is what it would be now, where the one that was asked for has changed;
    `confirm` is the name to repeat, where data would be replaced and nobody confirmed that."""

    model_config = example(
        {
            "type": "urn:backupd:problem:unconfirmed",
            "title": "unconfirmed",
            "status": 409,
            "message": "tables go into the running server shop-db1, and nobody confirmed that",
            "detail": "",
            "hint": "look at the plan; then send it again with confirm",
            "errors": [],
            "confirm": "shop-db1",
        }
    )

    plan: Plan | None = None
    confirm: str | None = None


@of(progress.PhaseView)
class RestorePhase(Shape):
    """A phase of a restore; `estimate`: seconds that the plan counted with."""

    state: Literal["done", "running", "waiting", "skipped", "failed"]


class Restore(Shape):
    """A restore, and how far it is."""

    id: str
    server: str
    backup: str
    target: str
    datadir: str = Field(description="Where to: a folder, or which tables of which server.")
    state: JobState
    started_at: Time
    finished_at: Time | None
    error: str
    job: str | None
    request: KeptRequest | None
    resumable: bool = Field(description="Repeat the same request: the restore continues with the fetched files.")
    phases: list[RestorePhase]
    progress: Progress | dict[str, Any] | None
    outcome: dict[str, Any] | None = Field(
        description="Result, as `backupd restore --json` prints it: a started server, checks, tables."
    )


class RestoresQuery(OfServer):
    state: JobState | None = Field(None, description="Only those in this state.")


class RestoreStarted(Shape):
    """A restore was begun."""

    job: Job
    restore: Restore


class ThawRequest(Asked):
    """Ask for what a restore needs out of archives."""

    model_config = example({"server": "shop-db1", "target": "latest", "tier": "bulk", "days": 7})

    server: Name
    target: Text = Field(max_length=1000, description="As of a restore.")
    tables: list[Text] = Field([], max_length=1000, description="Only what these tables need.")
    tier: Tier | None = Field(None, strict=False, description="How fast; without it what is configured.")
    days: int | None = Field(None, ge=1, le=365, description="How long it is to stay thawed.")


class ThawState(Shape):
    """How far a thaw is."""

    objects: int
    bytes: int
    ready: int
    bytes_ready: int
    failed: int
    not_asked_yet: int
    expected_at: Time | None
    ready_until: Time | None
    destinations: list[str]


class Thaw(Shape):
    """A thaw and its job."""

    job: Job
    thaw: ThawState


class Thawed(Shape):
    """What a thaw was asked for; without a job nothing has to be thawed that is not on its way already."""

    server: str
    target: str
    chain: list[str]
    needed: ThawNeed | None
    job: Job | None
    thaw: ThawState | None


class RestoreRunbook(Runbook):
    """How to do this restore by hand, as Markdown."""
