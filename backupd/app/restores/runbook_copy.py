"""The runbook of one restore: what it was asked for, how far it came, and how to do the rest by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backupd.app.context.wiring import Wiring
from backupd.app.copies.protection import runbook as backup_runbook
from backupd.app.restores.jobs import view
from backupd.app.restores.progress import request_of
from backupd.app.restores.request import RestoreRequest
from backupd.model.errors import BackupdError
from backupd.model.job import RestoreRecord
from backupd.model.text import format_duration, format_time

_WORDS = {
    "fetched": "fetched, opened and compared with what was stored",
    "prepared": "transactions applied",
    "restored": "files put in place",
    "rolled_forward": "binary logs replayed to the target",
    "started": "server started",
    "verified": "data checked",
    "thawed": "archived objects thawed",
}


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
        words = _WORDS.get(phase.name, phase.name.replace("_", " "))
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
