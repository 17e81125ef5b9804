"""How far a restore is, phase by phase; and the runbook of one restore: what was requested, how far it came, and how
to do the rest by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backupd.app.context.wiring import Wiring
from backupd.app.copies.protection import runbook as backup_runbook
from backupd.app.restores.request import RestoreRequest
from backupd.model.document import Document
from backupd.model.errors import BackupdError
from backupd.model.job import JobRecord, JobState, RestoreRecord
from backupd.model.text import format_duration, format_time
from restore.planning.plan import TABLE_STEP_NAMES

WHOLE = ("fetched", "prepared", "restored", "rolled_forward", "verified")
"""Phases that every restore of a whole server reports. ``fetched``: also opened, and compared with what was stored;
``prepared``: transactions applied; ``restored``: put in place."""
_ORDER = ("thawed", "fetched", "prepared", "restored", "rolled_forward", "started", "verified", "replicated")
_DONE_IN = ("thawed", "fetched", "prepared", "rolled_forward", "restored", "started", "verified", "replicated")
"""A copy is rolled forward before it is put in place."""
_REPORTED = {
    "thaw": "thawed",
    "fetch": "fetched",
    "prepare": "prepared",
    "logs": "rolled_forward",
    "replay": "rolled_forward",
    "place": "restored",
    "start": "started",
    "verify": "verified",
    "load": "loaded",
    "hand over": "handed_over",
    "replicate": "replicated",
}
"""Which phase the work is in that reports its progress under another name."""
_TITLES = {
    "fetched": "fetched, opened and compared with what was stored",
    "prepared": "transactions applied",
    "restored": "files put in place",
    "rolled_forward": "binary logs replayed to the target",
    "started": "server started",
    "verified": "data checked",
    "thawed": "archived objects thawed",
    "replicated": "replicated until it had caught up",
}
"""What each phase did."""
OVER = (JobState.FAILED, JobState.CANCELLED, JobState.ABANDONED)
"""States of a restore that can be continued."""


@dataclass(frozen=True, slots=True)
class PhaseView(Document):
    """``state``: ``done``, ``running``, ``failed`` (it was in it when it ended), ``waiting``, or ``skipped`` where this
    restore has no such phase. ``seconds`` and ``bytes`` are measured, ``estimate`` is the plan's, in seconds."""

    name: str
    state: str
    seconds: float | None = None
    bytes: int | None = None
    estimate: float | None = None


@dataclass(frozen=True, slots=True)
class RestoreView:
    """``job`` None: none does it (it was begun before there were any), or it is forgotten."""

    record: RestoreRecord
    job: JobRecord | None
    phases: tuple[PhaseView, ...]

    @classmethod
    def of(cls, record: RestoreRecord, job: JobRecord | None) -> RestoreView:
        """The view of ``record``, with the progress of ``job``."""
        return cls(record, job, _phases(record, _state(record, job), job))

    @property
    def state(self) -> JobState:
        """Of the restore; where its job is over and could not say so, that of the job."""
        return _state(self.record, self.job)

    @property
    def resumable(self) -> bool:
        """Does the same request go on with what it has left?"""
        return self.state in OVER

    @property
    def progress(self) -> Mapping[str, Any] | None:
        """The last report, while it runs."""
        return self.job.progress if self.job is not None and self.state is JobState.RUNNING else None

    def as_json(self) -> dict[str, Any]:
        """As REST gives it; times in seconds."""
        record = self.record
        progress = self.progress
        return {
            "id": record.id,
            "server": record.server,
            "backup": record.backup_id,
            "target": record.target,
            "datadir": record.datadir,
            "state": str(self.state),
            "started_at": format_time(record.started_at),
            "finished_at": format_time(record.finished_at) if record.finished_at else None,
            "error": record.error,
            "job": record.job_id or None,
            "request": request_of(record),
            "resumable": self.resumable,
            "phases": [phase.as_json() for phase in self.phases],
            "progress": dict(progress) if progress else None,
            "outcome": (record.request or {}).get("outcome"),
        }


def view(wiring: Wiring, record: RestoreRecord) -> RestoreView:
    """How far a restore is by now."""
    return RestoreView.of(record, wiring.catalog.jobs.find(record.job_id) if record.job_id else None)


def request_of(record: RestoreRecord) -> dict[str, Any] | None:
    """What was asked for, as JSON of a request; None for what was begun without one."""
    found = (record.request or {}).get("request")
    return dict(found) if found else None


def _state(record: RestoreRecord, job: JobRecord | None) -> JobState:
    still = record.state in (JobState.QUEUED, JobState.RUNNING)
    return job.state if still and job is not None and job.state in OVER else record.state


def _phases(record: RestoreRecord, state: JobState, job: JobRecord | None) -> tuple[PhaseView, ...]:
    kept = record.request or {}
    planned = {str(step["name"]): step.get("seconds") for step in kept.get("steps", ())}
    of_tables = "tables" in (kept.get("request") or {}) or any(phase.name == "handed_over" for phase in record.phases)
    done = {phase.name: phase for phase in record.phases}
    # Without a plan nobody knows what is still to come: all of them may be.
    wanted = {*planned, *done} if planned else {*done, *(() if of_tables else WHOLE)}
    order = TABLE_STEP_NAMES if of_tables else _ORDER
    names = [name for name in order if name in wanted or (not of_tables and name in WHOLE)]
    names += [name for name in done if name not in names]
    at = _at(names, wanted, done, state, job)
    found = []
    for name in names:
        phase = done.get(name)
        if name == at:
            word = "running" if state is JobState.RUNNING else "failed"
        elif phase is not None:
            word = "done"
        elif name not in wanted or state is JobState.SUCCEEDED:
            word = "skipped"
        else:
            word = "waiting"
        seconds = round(phase.seconds, 1) if phase is not None else None
        found.append(PhaseView(name, word, seconds, phase.bytes if phase is not None else None, planned.get(name)))
    return tuple(found)


def _at(names: list[str], wanted: set[str], done: Mapping[str, object], state: JobState, job: JobRecord | None) -> str:
    """The phase that it is in, or was in when it ended; "" for none."""
    if state is not JobState.RUNNING and state not in OVER:
        return ""
    if job is not None and job.started_at is None:
        return ""  # its job never began
    reported = str((job.progress or {}).get("phase", "")) if job is not None else ""
    name = _REPORTED.get(reported, reported)
    if name in names and (name not in done or state is JobState.RUNNING):
        return name
    in_turn = sorted(names, key=_DONE_IN.index) if set(names) <= set(_DONE_IN) else names
    return next((name for name in in_turn if name in wanted and name not in done), "")


# -- the runbook


def runbook(wiring: Wiring, record: RestoreRecord) -> str:
    """Markdown: this restore first, then the runbook of its backup. Raises NotFoundError where the backup is
    forgotten."""
    text = "\n".join(_this_one(wiring, record))
    try:
        by_hand = backup_runbook(wiring, record.backup_id)
    except BackupdError as error:
        by_hand = f"The runbook of backup {record.backup_id} could not be read: {error.message}\n"
    return f"{text}\n---\n\n{by_hand}"


def _this_one(wiring: Wiring, record: RestoreRecord) -> Iterator[str]:
    found = view(wiring, record)
    request = request_of(record)
    yield f"# Restore {record.id} of {record.server}"
    yield ""
    yield f"* Target: `{record.target}`, from backup `{record.backup_id}`"
    yield f"* Into: `{record.datadir}`"
    yield f"* State: {found.state}, requested at {format_time(record.started_at)}"
    if record.error:
        yield f"* Last error: {record.error.splitlines()[0]}"
    promised = (record.request or {}).get("promise") or {}
    yield from _chain(promised)
    yield ""
    yield "## Progress"
    yield ""
    for phase in found.phases:
        measured = f", {format_duration(phase.seconds)}" if phase.seconds is not None else ""
        expected = f", expected to take {format_duration(phase.estimate)}" if phase.estimate and not measured else ""
        words = _TITLES.get(phase.name, phase.name.replace("_", " "))
        yield f"* `{phase.name}` ({words}): {phase.state}{measured}{expected}"
    yield ""
    yield "## The same with backupd, on this host"
    yield ""
    if found.resumable:
        yield "The same command continues where the restore stopped:"
        yield ""
    yield f"    {_command(record, request)}"
    yield ""
    yield "## By hand"
    yield ""
    yield "Below are the steps for its backup. They need no backupd."
    if until := promised.get("until"):
        yield (
            f"Then replay the binary logs of branch `{until['branch']}` from the position of the backup up to "
            f"`{until['file']}:{until['pos']}`"
            + (f" (GTID `{until['gtid']}`)" if until["gtid"] else "")
            + ", and not further."
        )
    yield ""


def _chain(promised: dict[str, Any]) -> Iterator[str]:
    chain = promised.get("chain") or []
    if len(chain) > 1:
        yield f"* Chain, in the order in which it is applied: {', '.join(f'`{one}`' for one in chain)}"


def _command(record: RestoreRecord, document: dict[str, Any] | None) -> str:
    if document is None:  # begun without a request
        return RestoreRequest(record.server, record.target, datadir=record.datadir).command()
    return RestoreRequest.from_json(document).command()
