"""Shapes of backups, of retention decisions and of proofs, and of the requests about them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from api.schemas.base import Asked, Name, OfServer, Query, Shape, Text, example, of
from api.schemas.jobs import Job
from backupd.app.retention import rules
from backupd.model import backup_record, consistency, proof, server_facts
from backupd.model.backup_record import BackupKind, BackupState


@of(server_facts.Position)
class Position(Shape):
    """A place in a server's binary log; an empty file: it writes none."""

    pos: int = Field(ge=0)


@of(backup_record.Copy)
class Copy(Shape):
    """A backup at one destination."""


@of(server_facts.NodeLoad)
class NodeLoad(Shape):
    """What a backup made of a Galera node, by what was seen while it ran. `desynced_seconds`: for how long it was not
    Synced. `recv_queue`: most write sets that waited there. `flow_control_seconds`: how long flow control stopped the
    cluster meanwhile; `flow_control_sent`: how often this node asked for it."""


@of(server_facts.NodeFacts)
class NodeFacts(Shape):
    """Where a backup of a Galera node is in the history of its cluster: `uuid` and `seqno`, -1 if unknown. `evidence`:
    `lock`, the node's own word under the lock of the backup, or `proof`, what a prepare found in InnoDB."""


@of(backup_record.Member)
class Member(Shape):
    """The member of a group that a backup was taken from."""


@of(backup_record.BackupRecord)
class Backup(Shape):
    """A backup. Sizes are bytes: of the data, as stored, and of it what no earlier backup had stored."""


@of(backup_record.BackupDetail)
class BackupDetail(Shape):
    """A backup with what its manifest adds."""


class BackupsQuery(OfServer):
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

    id: str
    removed: bool = Field(
        description="True if it is removed; false if it is marked and can be undeleted until its removal."
    )
    held: list[str] = Field(description="Reasons why backupd could not remove an object immediately.")
    forgotten: list[str] = Field(description="Remarks on copies at destinations that are no longer configured.")
    job: Job | None = Field(description="Job that removes it immediately; null if nothing is left of it.")


class Kept(Shape):
    """Whether rules may delete it."""

    id: str
    pinned: bool
    problems: list[str] = Field(description="Destinations that could not be updated, with the reason.")


class Undeleted(Shape):
    """The backups that came back: what it builds on comes with it."""

    undeleted: list[str]


class Runbook(Shape):
    """How to do it by hand, as Markdown."""

    id: str
    runbook: str


@of(rules.Decision)
class Decision(Shape):
    """What the rules say of one backup at one destination."""


@of(rules.RunDecision)
class LogDecision(Shape):
    """What the rules say of a run of binary logs."""


@of(rules.Recoverable)
class Span(Shape):
    """What can be restored from what is kept."""


@of(rules.Decisions)
class Decisions(Shape):
    """What the rules say of everything of a server at one destination."""


class ApplyRequest(Asked):
    """Mark what expired; it goes after the grace period."""

    model_config = example({"really": False})

    really: bool = Field(False, description="Apply the rules even if they delete more than half of all backups.")


@of(proof.Check)
class Check(Shape):
    """One question asked of the restored data."""

    outcome: str = Field(pattern="^(passed|failed|skipped)$")


@of(proof.Proof)
class Proof(Shape):
    """A test restore."""

    outcome: str = Field(pattern="^(proved|restored|failed|undecided|inexact|withdrawn)$")


@of(consistency.ConsistencyCheck)
class ConsistencyCheck(Shape):
    """One comparison of a replica with its source."""

    tool: str = Field(pattern="^(witness|pt-table-checksum|)$")


@of(consistency.Consistency)
class Consistency(Shape):
    """What all checks of a replica show now."""

    verdict: str = Field(pattern="^(clean|different|unchecked)$")


@of(consistency.ServerConsistency)
class ServerConsistency(Shape):
    """Whether a server, or each compared member of a group, holds what its source does."""


class ProofsQuery(OfServer):
    backup: Text | None = Field(None, max_length=64, description="Only those of this backup.")
    outcome: Literal["proved", "restored", "failed", "undecided", "inexact", "withdrawn"] | None = Field(
        None, description="Only those with this outcome."
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
