"""Proofs: what test restores showed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.base import Asked, Dated, Name, Shape, Text, Time, example
from api.schemas.jobs import Phase

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


class Check(Shape):
    """One question asked of the restored data."""

    name: str
    outcome: str = Field(pattern="^(passed|failed|skipped)$")
    detail: str


class Proof(Shape):
    """A test restore. `proved`: equal to the source; `restored`: there was nothing to compare with; `undecided`:
    something kept the test from its end, which says nothing about the data; `inexact`: the replay may have given other
    rows. `older`: the target was the newest moment, and something later is known to exist, or may (see `warnings`)."""

    model_config = example(PROOF)

    id: str
    server: str
    backup: str
    target: str
    outcome: str = Field(pattern="^(proved|restored|failed|undecided|inexact|withdrawn)$")
    started_at: Time
    finished_at: Time
    seconds: float
    phases: list[Phase]
    checks: list[Check]
    tables_compared: int = Field(description="Tables whose rows are equal to the witness.")
    tables_present: int = Field(
        description="Tables that are there, defined as at the source, of whose rows nothing is known."
    )
    not_looked_at: int = Field(
        description="Tables and other objects of the witness that could not be looked at; "
        "more than 0 is never `proved`."
    )
    withdrawn: str = Field(description="Why this proof does not count any more; empty as a rule.")
    error: str
    warnings: list[str]
    older: bool


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
