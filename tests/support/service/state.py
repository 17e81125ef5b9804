"""What a catalog of some weeks holds: something of everything, in every state."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from api.openapi import operations
from api.routes import ROUTERS
from api.server import create_app
from backupd.app.context.settings import Settings
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Service
from backupd.model.backup_record import BackupKind, BackupState, Copy, HoldKind
from backupd.model.event import Event, Incident, Message, MessageKind, MessageState, Severity
from backupd.model.job import JobKind, JobRecord, JobState, RestoreRecord
from backupd.model.proof import Check, Phase, Proof
from tests.support.catalog import samples
from tests.support.service.house import Office

BEGUN = datetime(2026, 11, 1, 2, tzinfo=UTC)
PHASES = (Phase("fetched", 12.5, 4_000_000), Phase("prepared", 3.25, 0))


def two_servers(base: Path) -> Settings:
    """``db1`` with the labels env=prod and site=a, ``db2`` with env=test and site=a."""
    labels = {"db1": "{env: prod, site: a}", "db2": "{env: test, site: a}"}
    return Office(base, servers={name: f"gold, labels: {each}" for name, each in labels.items()}).write()


def number(text: str, count: int) -> str:
    return f"{text}-{count:08x}"


def fill(wiring: Wiring) -> None:
    """For the servers db1 (nearly everything) and db2."""
    fill_work(wiring, "db1")
    catalog = wiring.catalog
    for count, kind in enumerate((BackupKind.PHYSICAL_FULL, BackupKind.PHYSICAL_INCREMENTAL, BackupKind.LOGICAL) * 2):
        catalog.backups.add(
            samples.backup(
                count,
                server="db1" if count < 5 else "db2",
                kind=kind,
                state=BackupState.COMPLETE,
                copies=(Copy("local", "complete", BEGUN + timedelta(hours=count)),),
            )
        )
    catalog.jobs.enqueue(
        JobRecord(
            id=number("20261101T030000Z", 99), kind=JobKind.FULL, server="db2", state=JobState.QUEUED, queued_at=BEGUN
        )
    )
    catalog.events.add(Event(BEGUN, "job-failed", Severity.ERROR, "it did not work", server="db2", hint="try again"))


def fill_work(wiring: Wiring, server: str) -> None:
    """All but backups."""
    catalog = wiring.catalog
    for count, state in enumerate(JobState):
        job_id = number("20261101T020000Z", count)
        first = (
            state
            if state in (JobState.QUEUED, JobState.WAITING, JobState.MISSED, JobState.SKIPPED)
            else (JobState.RUNNING)
        )
        catalog.jobs.add(
            JobRecord(
                id=job_id,
                kind=JobKind.THAW if state is JobState.WAITING else list(JobKind)[count % 3],
                server=server,
                state=first,
                queued_at=BEGUN + timedelta(minutes=count),
                token=1,
                leg="physical.full",
                started_at=BEGUN + timedelta(minutes=count) if first is JobState.RUNNING else None,
                not_before=datetime(2100, 1, 1, tzinfo=UTC),
                owner="elsewhere:1",
                arguments={"target": "latest", "tier": "standard", "days": 7, "parts": [], "tables": ""},
                heartbeat_at=datetime.now(UTC),
            )
        )
        if first is JobState.RUNNING:
            catalog.jobs.heartbeat(
                job_id,
                1,
                datetime.now(UTC),
                {
                    "phase": "copy",
                    "bytes": 10,
                    "bytes_total": None,
                    "files": 1,
                    "files_total": 7,
                    "note": "`ő`.`1`",
                    "seconds_left": 1.5,
                },
            )
        if first is not state:
            catalog.jobs.finish(
                job_id,
                state,
                BEGUN + timedelta(hours=1),
                token=1,
                result="x",
                phases=PHASES,
                events=[Event(BEGUN, f"job-{state}", Severity.INFO, "over", server=server, job_id=job_id)],
            )
    for count in range(3):
        catalog.restores.start(
            RestoreRecord(
                id=number("20261102T020000Z", count),
                server=server,
                backup_id=number("20261121T120000Z", 0),
                target="latest",
                datadir=f"/srv/r{count}",
                state=JobState.RUNNING,
                owner="elsewhere:1",
                started_at=BEGUN + timedelta(hours=count),
                request=None
                if count
                else {"server": server, "target": "latest", "mode": "new-server", "datadir": "/srv/r0"},
            )
        )
        if count:
            catalog.restores.finish(
                number("20261102T020000Z", count), list(JobState)[2 + count], BEGUN, phases=PHASES, error="x"
            )
        catalog.proofs.add(
            Proof(
                id=number("20261103T020000Z", count),
                server=server,
                backup_id=number("20261121T120000Z", count),
                target="latest",
                outcome=("proved", "failed", "undecided")[count],
                started_at=BEGUN + timedelta(days=count),
                finished_at=BEGUN + timedelta(days=count, minutes=1),
                phases=PHASES,
                checks=(Check("checksums", "failed", "`a`.`b`"),),
                tables_compared=3,
                error="" if count else "x",
            )
        )
    catalog.holds.set(server, HoldKind.HOLD, "audit", "anna", BEGUN)
    catalog.holds.set("*", HoldKind.PAUSE, "moving", "anna", BEGUN)
    incidents = [
        Incident(
            id=number("20261104T020000Z", count),
            kind="job-failed",
            server=server,
            subject="physical.full",
            severity=Severity.ERROR,
            message="it did not work",
            detail="no",
            hint="try again",
            opened_at=BEGUN,
            last_at=BEGUN,
            closed_at=BEGUN if count == 2 else None,
        )
        for count in range(3)
    ]
    messages = [
        Message(
            id=number("20261105T020000Z", count),
            channel="email",
            kind=MessageKind.ALERT,
            state=state,
            subject="it failed",
            recipients=("dba@example.com",),
            content="",
            created_at=BEGUN,
            incident_id=incidents[0].id,
            attempts=count,
        )
        for count, state in enumerate(MessageState)
    ]
    catalog.incidents.record(incidents, messages, {})


def reference(wiring: Wiring) -> dict[str, Any]:
    """The OpenAPI document."""
    described: dict[str, Any] = create_app(Service(wiring, ""), wiring, reload=lambda: None).openapi()
    return described


def shapes() -> dict[str, TypeAdapter[Any]]:
    """What each operation of ours answers when all is well, by its id."""
    return {
        route.name: TypeAdapter(route.response_model)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
    }


def documented(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The operations below /v1."""
    return ((path, method, operation) for path, method, operation in operations(document) if path.startswith("/v1/"))
