"""``backupd jobs``: list, show, log, cancel; and ``backupd hosts``, which jobs are addressed to: list, forget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.commands.backups import ListByDefault
from backupd.cli.session import AnyServer, Commands, Labels, Run, one_of
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import format_duration, format_size, format_time, progress_text

if TYPE_CHECKING:
    from backupd.catalog.hosts import KnownHost

SHOWN = 40
"""Rows of a list unless more are asked for."""

JobId = Annotated[str, typer.Argument(metavar="ID", help="Id of a job, as `backupd jobs` lists it.")]

app = Commands(cls=ListByDefault, help="List jobs; show one, read its log, cancel it.")


@app.command("list")
def list_(
    run: Run,
    server: AnyServer = None,
    label: Labels = None,
    state: Annotated[JobState | None, one_of(JobState, "--state", "Only those in this state.")] = None,
    kind: Annotated[JobKind | None, one_of(JobKind, "--kind", "Only those of this kind.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of rows.")] = SHOWN,
) -> None:
    """List jobs, newest first (also without the word `list`)."""
    records = run.labelled(label, server).jobs.list(server, kind=kind, state=state, limit=limit + 1)
    columns = ("ID", "SERVER", "KIND", "STATE", "TOOK", "DATA", "WHY")
    run.show_list(records, "no jobs", columns, _row, right=("TOOK", "DATA"), limit=limit)


def _row(record: JobRecord) -> tuple[str, ...]:
    why = record.message
    if record.state is JobState.RUNNING:
        why = progress_text(record.progress)
    return (
        record.id,
        record.server,
        record.kind,
        str(record.state),
        _took(record),
        format_size(record.bytes) if record.bytes else "",
        why,
    )


def _took(record: JobRecord) -> str:
    if record.started_at is None or record.finished_at is None:
        return ""
    return format_duration(max((record.finished_at - record.started_at).total_seconds(), 0.0))


@app.command()
def show(run: Run, job_id: JobId) -> None:
    """Show all details of a job."""
    record = run.service.jobs.get(job_id)
    document = record.as_json()
    run.screen.document(document)
    from backupd.cli.render import show_mapping

    show_mapping(run.screen, {**document, "progress": progress_text(record.progress) or None})


@app.command()
def log(run: Run, job_id: JobId) -> None:
    """Print the log of a job, with the output of its tools."""
    text = run.service.jobs.log(job_id)
    run.screen.document({"id": job_id, "log": text})
    run.screen.text(text)


@app.command()
def cancel(run: Run, job_id: JobId) -> None:
    """Cancel a queued job, or stop a running one. A stopped backup leaves no data behind."""
    record = run.service.jobs.cancel(job_id)
    run.screen.done = f"{job_id} was cancelled"
    run.screen.document(record.as_json())
    run.screen.line(
        f"{job_id} is cancelled"
        if record.state is JobState.CANCELLED
        else f"stop requested for {job_id}; to check whether it has ended: backupd jobs show {job_id}"
    )


hosts_app = Commands(cls=ListByDefault, help="List the hosts that use the catalog; forget one that is no more.")


@hosts_app.command("list")
def list_hosts(run: Run) -> None:
    """List the hosts that use the catalog, and how many jobs wait for each (also without the word `list`)."""
    columns = ("NAME", "SINCE", "SERVICE", "JOBS")
    run.show_list(run.service.installation.hosts(), "no hosts", columns, _host, right=("JOBS",))


def _host(host: KnownHost) -> tuple[str, ...]:
    last = f"none since {format_time(host.served_at)}" if host.served_at is not None else "none"
    return host.name, format_time(host.since), "runs" if host.served else last, str(host.jobs)


@hosts_app.command()
def forget(
    run: Run, name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a host, as `backupd hosts` lists it.")]
) -> None:
    """Forget a host that is no more. Refused while a service runs there or jobs wait for it."""
    run.service.installation.forget_host(name)
    run.screen.done = f"host {name} was forgotten"
    run.screen.document({"name": name, "forgotten": True})
    run.screen.line(f"host {name} is forgotten")
