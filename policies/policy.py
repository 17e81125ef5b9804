"""A policy: what is backed up when, where it is kept and how it is proved. One YAML file each."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from policies.fields import (
    Cadence,
    Duration,
    LocalPath,
    Name,
    Percent,
    Section,
    Size,
    TablePattern,
    Target,
    TimeZone,
    Window,
    Words,
    optional,
    section,
    written,
)

_PLACEHOLDER = re.compile(r"\{([a-zA-Z_]+)\}")


def _sql(text: str) -> str:
    if strange := sorted(set(_PLACEHOLDER.findall(text)) - {"target"}):
        raise ValueError(f"{{{strange[0]}}} is not known: only {{target}}, the moment restored to, is filled in")
    return text


class SqlCheck(Section):
    """A question to the restored server."""

    name: Words | None = optional(
        description="What reports call it; by default the SQL itself.", examples=["orders of the last day"]
    )
    sql: Annotated[Words, AfterValidator(_sql)] = Field(
        description="One statement that gives one value; the check is passed when that is true (not 0, not NULL). "
        "`{target}` becomes the moment restored to, as a quoted time in UTC.",
        examples=["SELECT COUNT(*) > 0 FROM shop.orders WHERE created_at > {target} - INTERVAL 1 DAY"],
    )


class TestRestore(Section):
    """Backups are restored on a private server, looked at, and thrown away again."""

    schedule: Cadence | None = optional(description="When a backup is restored for a test.", examples=["0 6 * * *"])
    target: Target = Field(
        "latest",
        description="To where: `latest`, `random` (another moment each time, anywhere that the server can be "
        "recovered to), or any target that `backupd restore --to` takes.",
        examples=["random"],
    )
    checks: tuple[SqlCheck, ...] = Field((), description="Questions to the restored server, besides CHECK TABLE.")


class Witness(Section):
    """Checksums of the source's tables, read in one snapshot, for a test restore to compare with.

    Reading them costs the source one full read of its tables, and purge lag while the snapshot is open.
    """

    enabled: bool = Field(True, description="Read them with each full backup.", examples=[True])
    schedule: Cadence | None = optional(
        description="When they are read besides, so that test restores compare moments between two backups, too.",
        examples=["0 */6 * * *"],
    )
    max_duration: Duration = written(
        "10m", description="Stop after this time; the tables not read are named in the proof."
    )


NO_LOGICAL_INCREMENTS = (
    "logical backups have no increments: take a full one each week and let the binary log fill the days between; "
    "`backupd policy example weekly-logical` is such a policy"
)

SHORTEST_CHECKPOINT = timedelta(seconds=1)
LONGEST_CHECKPOINT = timedelta(hours=1)
SMALLEST_SPOOL = 64 * 1024 * 1024

LONGEST_SET_NAME = 48
SMALLEST_CHUNK = 1024 * 1024
LONGEST_LOCK = timedelta(seconds=30)
"""That anybody's commits may wait for a dump."""

LONGEST_WAIT = timedelta(days=1)
"""Between two attempts of a run: whoever waits longer has given up."""


class Physical(Section):
    """Copies of the data files: the way back for a whole server."""

    full: Cadence = Field(description="When full backups are taken.", examples=["0 2 * * sun", "every 24h"])
    incremental: Cadence | None = optional(
        description="When backups of what changed since the one before are taken.", examples=["0 2 * * mon-sat"]
    )
    parallel: int = Field(2, ge=1, le=64, description="Files that the tool copies at once.", examples=[4])
    max_chain: int = Field(
        14,
        ge=0,
        le=1000,
        examples=[7],
        description="The most increments that build on one full backup; then a full one is taken when an incremental "
        "one is due.",
    )


class Tables(Section):
    """Which tables: those that any `include` fits and no `exclude` does."""

    include: tuple[TablePattern, ...] = Field(
        ("*.*",),
        min_length=1,
        examples=[["shop.*"]],
        description="Patterns of tables to take; `*` stands for any text. Names that hold dots or spaces are quoted "
        "with backticks.",
    )
    exclude: tuple[TablePattern, ...] = Field(
        (), description="Patterns of tables to leave out.", examples=[["shop.audit_*"]]
    )
    max_size: Size | None = optional(
        description="Larger tables are left out, and reported as left out.", examples=["2GiB"]
    )


def _set_name(value: str) -> str:
    if len(value) > LONGEST_SET_NAME:
        raise ValueError(f"is too long for the name of a set: at most {LONGEST_SET_NAME} characters")
    return value


SetName = Annotated[Name, AfterValidator(_set_name)]


class TableSet(Section):
    """Tables with a schedule of their own: small important ones each hour, say, the archive once a month."""

    refused: ClassVar = {"incremental": NO_LOGICAL_INCREMENTS, "incrementals": NO_LOGICAL_INCREMENTS}

    schedule: Cadence = Field(description="When the tables of the set are dumped.", examples=["every 1h"])
    tables: Tables = Field(description="Which tables.", examples=[{"include": ["shop.customers", "shop.orders"]}])


class Logical(Section):
    """Dumps table by table: the way back for one table, and onto another version."""

    refused: ClassVar = {"incremental": NO_LOGICAL_INCREMENTS, "incrementals": NO_LOGICAL_INCREMENTS}

    schedule: Cadence | None = optional(
        description="When the tables are dumped. May be left out where there are sets.", examples=["0 4 * * *"]
    )
    tables: Tables = section("Which tables.")
    sets: dict[SetName, TableSet] = Field(
        default_factory=dict,
        description="More dumps, each of other tables at other times, by name. Retention keeps backups of each set by "
        "themselves.",
        examples=[{"money": {"schedule": "every 1h", "tables": {"include": ["shop.orders", "shop.pay_*"]}}}],
    )
    threads: int = written(
        4,
        ge=1,
        le=64,
        description="Maximum number of tables that a program reads in parallel; small dumps use fewer. A "
        "table is read in one go; only mydumper 0.16 and later may read pieces of a large one at once.",
    )
    chunk: Size = written(
        "64MiB",
        ge=SMALLEST_CHUNK,
        description="The rows of tables larger than this are written into files of about this size.",
    )
    partial: Literal["failed", "accepted"] = Field(
        "failed",
        examples=["accepted"],
        description="A dump in which single tables could not be read is kept either way. `failed`: it counts as a "
        "failure, so it is tried again and reported as an error. `accepted`: it is reported as a warning.",
    )
    repair: bool = Field(
        False,
        examples=[True],
        description="Whether damaged MyISAM and Aria tables are repaired before they are dumped. A repair may throw "
        "rows away; without it the damaged table is named and the others are dumped.",
    )
    max_lock: Duration = written(
        "1s",
        le=LONGEST_LOCK,
        description="Maximum time for which commits are blocked while the snapshots are opened. If it is exceeded, "
        "backupd releases the locks and retries.",
    )
    long_queries: Duration = written(
        "60s",
        description="Maximum runtime of other statements when the dump requests its locks. A longer statement would "
        "block the locks and all sessions behind them; `on_long_queries` defines what happens then. On servers "
        "without BACKUP STAGE (all but MariaDB 10.4 and later) the maximum is 1s.",
    )
    on_long_queries: Literal["wait", "fail"] = Field(
        "wait",
        examples=["fail"],
        description="`wait`: the dump waits for such statements to end, up to `limits.max_pause`. `fail`: it fails at "
        "once and names them. They are never killed.",
    )
    count_rows: bool = Field(
        True,
        examples=[False],
        description="Whether the rows of each table are counted in the same snapshot and compared with what was "
        "dumped. It reads an index of each table once more.",
    )

    @model_validator(mode="after")
    def _some_time(self) -> Logical:
        if self.schedule is None and not self.sets:
            raise ValueError("is never done: give it a schedule, or sets")
        if self.schedule is None and "tables" in self.model_fields_set:
            raise ValueError("tables: no schedule says when these are dumped: give one, or move them into a set")
        return self

    @property
    def selections(self) -> dict[str, tuple[Cadence, Tables]]:
        """Cadence and tables by name of the set; that of the leg without a set has the empty name."""
        whole = {"": (self.schedule, self.tables)} if self.schedule is not None else {}
        return whole | {name: (one.schedule, one.tables) for name, one in self.sets.items()}


class Binlog(Section):
    """A continuous copy of the binary log: the way to any moment."""

    stream: bool = Field(True, description="Follow the binary log as it is written.", examples=[True])
    checkpoint: Duration = written(
        "10s",
        ge=SHORTEST_CHECKPOINT,
        le=LONGEST_CHECKPOINT,
        description="Interval at which received binary log is stored at each destination, 1s to 1h: the maximum data "
        "loss if the host is lost.",
    )
    max_spool: Size = written(
        "10GiB",
        ge=SMALLEST_SPOOL,
        examples=["50GiB"],
        description=(
            "Maximum size of the spool for binary log that is not stored at every destination yet. When it is full, "
            "streaming stops; the server must then retain its binary logs (binlog_expire_logs_seconds). A log that has "
            "to be copied again as a whole is copied beyond this size: the spool's file system needs room for one more "
            "of the server's largest logs."
        ),
    )
    acknowledge: Literal["off", "spool", "destination"] = Field(
        "off",
        examples=["spool"],
        description="Whether the server waits with each commit until backupd has it (semi-synchronous replication, "
        "which must be on at the server: `backupd check` names the statements). `spool`: until it is synced to the "
        "spool's disk. `destination`: until every required destination has it. `off`: commits never wait.",
    )


class Destinations(Section):
    """Names of destinations from the configuration."""

    required: tuple[Name, ...] = Field(
        min_length=1, description="A backup succeeds only when it is stored at all of these.", examples=[["local"]]
    )
    others: tuple[Name, ...] = Field(
        (), description="It is copied to these afterwards.", examples=[["offsite", "vault"]]
    )

    @model_validator(mode="after")
    def _once(self) -> Destinations:
        names = (*self.required, *self.others)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)}: named more than once")
        return self


class Timing(Section):
    """What holds for all schedules of the policy."""

    timezone: TimeZone | None = optional(
        description="The time zone of its schedules; by default that of the configuration.",
        examples=["Europe/Berlin"],
    )
    jitter: Duration | None = optional(
        description="Each run starts up to this much later, always the same for one server, so that not all of "
        "them start at once.",
        examples=["10m"],
    )
    blackout: tuple[Window, ...] = Field(
        (),
        description="Times in which no run starts, `DAYS HH:MM-HH:MM`; a run that is due then starts at their end.",
        examples=[["mon-fri 08:00-18:00"]],
    )
    catch_up: bool = written(
        True, description="Whether a run that was missed because the service was down is made up for, once."
    )


class Retry(Section):
    """What happens after a failure that may pass."""

    attempts: int = Field(3, ge=1, le=20, description="Maximum number of attempts per run.", examples=[3])
    pause: Duration = written(
        "5m",
        le=LONGEST_WAIT,
        description="How long to wait before the second try; each further wait is twice as long, at most a day.",
    )

    def wait(self, attempt: int) -> timedelta:
        """How long to wait after the failure of this attempt, counted from 1."""
        return min(self.pause * (1 << attempt - 1), LONGEST_WAIT)

    @property
    def longest(self) -> timedelta:
        """The wait before the last attempt; none without one."""
        return self.wait(self.attempts - 1) if self.attempts > 1 else timedelta(0)


class Limits(Section):
    """What backups of a server may take from it. Nothing is limited by default."""

    read: Size | None = optional(description="Bytes a second that are read from its disks.", examples=["200MiB"])
    send: Size | None = optional(description="Bytes a second that are written to each destination.", examples=["50MiB"])
    nice: int | None = optional(
        ge=0, le=19, description="Processor priority as of nice(1); 19 is the lowest.", examples=[10]
    )
    replica_lag: Duration | None = optional(
        examples=["60s"],
        description="Pause while the server, as a replica, is further behind, or one of its own replicas that is a "
        "server of the configuration and tells its address (`report_host`); go on below half of it. A lag "
        "that cannot be known counts as too much.",
    )
    disk_latency: Duration | None = optional(
        examples=["50ms"],
        description="Pause while the disk under the server's datadir takes longer than this for a request, on average "
        "of two seconds; go on below half of it.",
    )
    long_queries: Duration | None = optional(
        examples=["2m"],
        description="Pause while a statement of another account than the service's has been running for longer than "
        "this; go on when it has ended. Statements are never killed.",
    )
    recv_queue: int | None = optional(
        ge=1,
        examples=[500],
        description="Pause while more write sets than this wait on the server, as a node of a Galera cluster that "
        "takes part in it (Synced); go on below half of it. While the backup blocks commits the node is desynced, and "
        "what waits then does not count.",
    )
    flow_control: Percent | None = optional(
        examples=["10%"],
        description="Pause while flow control has stopped the server's Galera cluster for more than this share of the "
        "last two seconds; go on below half of it.",
    )
    max_pause: Duration = written(
        "30m",
        description="Give up when the pauses of one run add up to more than this. In a pause the redo log is not "
        "copied either; a server that writes its whole redo log meanwhile makes the backup fail.",
    )
    hang: Duration = written(
        "30m", description="A run without any progress for this long is stopped and counts as failed."
    )


class Verify(Section):
    """Stored objects are read again and compared with what was written."""

    schedule: Cadence = Field(description="When a share of what is stored is read again.", examples=["0 12 * * *"])
    subset: Percent | None = optional(
        examples=["10%"],
        description=(
            "Fraction of the stored objects to read per run, least recently read first. Default: all, unless "
            "`period` is set."
        ),
    )
    period: Duration | None = optional(
        ge=timedelta(days=1),
        examples=["30d"],
        description="Everything is read again within this time: each run reads as much as that takes, and more after "
        "one that was missed. Archived objects are verified by the checksum that the destination stored "
        "with them.",
    )
    cold_sample: int = written(
        1,
        ge=0,
        le=365,
        description="How many objects of an archive class are thawed and read in a year, at each destination. Thawing "
        "costs, a little.",
    )


class Keep(Section):
    """What a destination keeps. A backup stays while any rule wants it; what it builds on stays with it."""

    recovery_window: Duration | None = optional(
        description="Every moment of this time up to now stays recoverable.", examples=["7d"]
    )
    keep_fulls: int | None = optional(ge=1, description="The newest full backups to keep.", examples=[2])
    hourly: int | None = optional(ge=1, description="Hours of which the last backup is kept.", examples=[24])
    daily: int | None = optional(ge=1, description="Days of which the last backup is kept.", examples=[7])
    weekly: int | None = optional(ge=1, description="Weeks of which the last backup is kept.", examples=[5])
    monthly: int | None = optional(ge=1, description="Months of which the last backup is kept.", examples=[12])
    yearly: int | None = optional(ge=1, description="Years of which the last backup is kept.", examples=[7])
    binlogs: Literal["all", "window"] = Field(
        "all",
        examples=["window"],
        description="`all`: the binary logs since the oldest kept backup stay, so every moment since then can be "
        "restored. `window`: only those that the recovery window needs; a backup outside of it is one "
        "moment.",
    )
    early_deletion: bool = Field(
        False,
        examples=[True],
        description="Whether retention may delete backups before the end of the minimum storage duration of their "
        "storage class. Default: false, because that duration is charged anyway.",
    )

    @model_validator(mode="after")
    def _something(self) -> Keep:
        manners = {"binlogs", "early_deletion"}
        if all(getattr(self, name) is None for name in type(self).model_fields if name not in manners):
            raise ValueError("keeps nothing: give at least one rule, or leave the destination out to keep everything")
        if self.binlogs == "window" and self.recovery_window is None:
            raise ValueError("binlogs: window needs a recovery_window")
        return self


class Objectives(Section):
    """Recovery point objective and recovery time objective."""

    rpo: Duration | None = optional(description="Recovery point objective: maximum data loss.", examples=["60s"])
    rto: Duration | None = optional(
        description="Recovery time objective: maximum duration of a restore.", examples=["2h"]
    )


class Protection(Section):
    """What makes a backup one that survives what happens to a single destination."""

    copies: int = written(
        2,
        ge=1,
        le=16,
        description=(
            "Number of destinations that must hold a complete copy, verified by backupd or by the storage itself. "
            "`copies: 1` with `off_site: 0` says that one destination is enough; `backupd check` then does not advise "
            "a second one."
        ),
    )
    off_site: int = Field(1, ge=0, le=16, description="How many of them must be away from the site.", examples=[1])
    within: Duration = written(
        "24h",
        description="Deadline for protection, counted from the end of the backup. backupd sends an alert after it.",
    )


class Hooks(Section):
    """Takes the server out of a load balancer's rotation around each backup: `/healthz/servers/NAME` answers 503, and
    these programs are run, if there are any. They are started without a shell, with BACKUPD_SERVER, BACKUPD_JOB,
    BACKUPD_KIND and BACKUPD_MOMENT in their environment. Written `hooks: {}`, load balancers are only answered.

    They run as the user of the service, which is root: whoever may write a policy is root on this host."""

    before: LocalPath | None = optional(
        examples=["/usr/local/bin/drain"],
        description="Run before the backup. When it fails, or takes longer than `timeout`, no backup is taken.",
    )
    after: LocalPath | None = optional(
        examples=["/usr/local/bin/undrain"],
        description="Run after the backup, whatever became of it; when its process was killed the service runs it. "
        "When it fails it is run again until it succeeds.",
    )
    timeout: Duration = written("5m", description="How long each may take before it is ended.")


SHORTEST_CHECK_AGE = timedelta(hours=1)


class Checksum(Section):
    """Every table of a replica is compared with its source's, by pt-table-checksum where that runs."""

    schedule: Cadence | None = optional(
        description="When the tables are compared. Reading them costs source and replica one full read each.",
        examples=["0 1 * * sat"],
    )
    max_age: Duration = written(
        "7d",
        ge=SHORTEST_CHECK_AGE,
        description="How long a comparison counts. A replica of which any table was not compared within this time is "
        "`unchecked`.",
    )
    action: Literal["flag", "refuse"] = Field(
        "flag",
        examples=["refuse"],
        description="What becomes of a backup of a replica whose tables differ from its source's. `flag`: it is taken, "
        "and marked `inconsistent-source`. `refuse`: it is not taken.",
    )
    max_duration: Duration = written("12h", description="A comparison that takes longer is ended, and has failed.")


class Consistency(Section):
    """Whether a server that replicates from another one holds what its source does."""

    checksum: Checksum = section("Comparison of all tables.")


class Policy(Section):
    """The whole of a policy file."""

    refused: ClassVar = {
        "password": "secrets do not belong in a policy",
        "schedule": "each leg has its own: physical.full, physical.incremental, logical.schedule, "
        "logical.sets, witness.schedule, consistency.checksum.schedule",
        "include": "belongs under logical.tables",
        "exclude": "belongs under logical.tables",
        "sets": "belongs under logical",
        "owner": "belongs to the server in the configuration file",
    }

    physical: Physical | None = optional(description="Backups of the data files.")
    logical: Logical | None = optional(description="Backups table by table.")
    binlog: Binlog | None = optional(description="The binary log.")
    config_files: tuple[LocalPath, ...] = Field(
        (),
        description="Files and folders of the server's host that are kept with each backup.",
        examples=[["/etc/mysql", "/usr/local/bin/rotate-audit"]],
    )
    destinations: Destinations = Field(description="Where backups go.")
    retention: dict[Name, Keep] = Field(
        default_factory=dict, description="What each destination keeps. One that is not named here keeps everything."
    )
    objectives: Objectives = section("Recovery objectives.")
    test_restore: TestRestore | None = optional(description="How backups are proved.")
    verify: Verify | None = optional(description="How stored objects are read again.")
    protection: Protection = section("Conditions of a protected backup.")
    signed: bool | None = optional(
        examples=[True],
        description="Manifests of backups and of binary logs, proofs, and copies of catalog and configuration are "
        "signed with encryption.signing_key, and backupd rejects unsigned or altered ones. Default: true "
        "if encryption.signing_key is set.",
    )
    timing: Timing = section("Settings for all schedules.")
    retry: Retry = section("Retries after a failure.")
    hooks: Hooks | None = optional(
        description="Commands that take the server out of rotation before a backup and return it afterwards."
    )
    limits: Limits = section("Limits on the load of backups on the server.")
    witness: Witness = section("Checksums of the source that restored tables are compared with.")
    consistency: Consistency = section("Comparison of a replica with its source.")

    @model_validator(mode="after")
    def _does_something(self) -> Policy:
        if self.physical is None and self.logical is None and self.binlog is None:
            raise ValueError("backs up nothing: give physical, logical or binlog")
        return self
