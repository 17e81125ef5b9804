"""``backupd status``: all servers on one screen, the worst first; and ``backupd proofs``: what test restores showed.

Documents: ``status`` gives a list of servers, each as GET /v1/servers has it, the worst first; ``proofs`` a list of
proofs, as GET /v1/proofs has them, and ``proofs show`` one.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.commands.backups import ListByDefault
from backupd.cli.session import AnyServer, Commands, Labels, Run, one_of, option
from backupd.model.proof import FAILED, INEXACT, PROVED, RESTORED, UNDECIDED, WITHDRAWN, Proof
from backupd.model.text import format_duration, format_time

if TYPE_CHECKING:
    from backupd.app.views.server_status import ServerOverview
    from backupd.cli.output import Screen

SHOWN = 100
"""Proofs of a list unless more are asked for."""
_WORDS = {"bad": ("BAD", "bold red"), "warning": ("warn", "yellow"), "good": ("good", "green")}
_WIDE = 400
_LEAST = 30
"""Characters of a reason that are shown however narrow the terminal is."""


def status(run: Run, server: AnyServer = None, label: Labels = None) -> None:
    """Show all servers on one screen, the worst first: what can be recovered, and what is wrong. Exit status 1 if a
    server cannot be recovered, or not as its objectives promise."""
    service = run.labelled(label, server)
    found = sorted(
        service.servers.overview([server] if server is not None else None), key=lambda one: (-one.status.rank, one.name)
    )
    run.screen.document([one.as_json() for one in found])
    if not run.screen.as_json:
        show_status(run.screen, found, datetime.now(UTC))
    run.ends(well=all(one.status != "bad" for one in found))


def show_status(screen: Screen, servers: Sequence[ServerOverview], now: datetime) -> None:
    """One line for each server, with the gravest reason only; of a single one, all reasons and what to do."""
    counts = Counter(str(one.status) for one in servers)
    summary = ", ".join(f"{counts[status]} {status}" for status in _WORDS if counts[status]) or "none is configured"
    screen.line(f"{len(servers)} server{'s' if len(servers) != 1 else ''}: {summary}", style="bold")
    columns = ("STATUS", "SERVER", "RECOVERABLE TO", "LAST BACKUP", "PROVED", "JOBS")
    rows = [_row(one, now) for one in servers]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    room = max(shutil.get_terminal_size((_WIDE, 0)).columns - sum(widths) - len(widths) - 1, _LEAST)
    screen.line(_line(columns, widths, "WHY"), style="bold")
    for one, row in zip(servers, rows, strict=True):
        screen.line(_line(row, widths, _why(one, room)), style=_WORDS[one.status][1] if one.status != "good" else "")
    if len(servers) == 1:
        for reason in servers[0].reasons:
            screen.line(f"{_WORDS[reason.status][0]}: {reason.text}", style=_WORDS[reason.status][1])
            if reason.hint:
                screen.line(f"      -> {reason.hint}")
    elif counts["bad"] or counts["warning"]:
        screen.line("-> all reasons of one server, and what to do: backupd status SERVER")


def _line(cells: Sequence[str], widths: Sequence[int], last: str) -> str:
    return " ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), last]).rstrip()


def _row(one: ServerOverview, now: datetime) -> tuple[str, ...]:
    proof = one.last_proof
    jobs = f"{len(one.running)} run" if one.running else ""
    waiting = f"{one.waiting} wait" if one.waiting else ""
    return (
        _WORDS[one.status][0],
        one.name,
        _age(one.rpo) if one.latest is not None else "nothing",
        _age(now - one.last_success) if one.last_success is not None else "never",
        _age(now - proof.proved_at) if proof is not None and proof.proved_at is not None else "never",
        ", ".join(filter(None, (jobs, waiting))),
    )


def _age(span: timedelta | None) -> str:
    """``4m ago``, ``3h ago``, ``12d ago``: the largest unit suffices."""
    if span is None:
        return ""
    seconds = max(int(span.total_seconds()), 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit} ago"
    return f"{seconds}s ago"


def _why(one: ServerOverview, room: int) -> str:
    if not one.reasons:
        return ""
    more = f" (+{len(one.reasons) - 1})" if len(one.reasons) > 1 else ""
    text = " ".join(one.reasons[0].text.split())
    return (text if len(text) <= room - len(more) else text[: room - len(more) - 1] + "…") + more


app = Commands(cls=ListByDefault, help="List proofs, the results of test restores; show one.")


@app.command("list")
def list_(
    run: Run,
    server: AnyServer = None,
    label: Labels = None,
    backup_id: Annotated[str | None, option("--backup", "ID", "Only those of this backup.")] = None,
    outcome: Annotated[
        str | None,
        one_of(
            (PROVED, RESTORED, FAILED, UNDECIDED, INEXACT, WITHDRAWN),
            "--outcome",
            "Only those with this outcome.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of rows.")] = SHOWN,
) -> None:
    """List proofs, newest first (also without the word `list`)."""
    service = run.labelled(label, server)
    if backup_id is not None:
        service.listings.backup(backup_id)
    found = service.listings.proofs(server, backup=backup_id, outcome=outcome, limit=limit + 1).items
    columns = ("ID", "SERVER", "OUTCOME", "FINISHED", "TOOK", "EQUAL", "BACKUP", "TARGET")
    run.show_list(
        found, "no proofs: nothing was restored as a test yet", columns, _proof, right=("TOOK", "EQUAL"), limit=limit
    )


def _proof(proof: Proof) -> tuple[str, ...]:
    return (
        proof.id,
        proof.server,
        f"{proof.outcome}, older data" if proof.older and proof.is_good else proof.outcome,
        format_time(proof.finished_at.replace(microsecond=0)),
        format_duration(proof.seconds),
        str(proof.tables_compared),
        proof.backup_id,
        proof.target,
    )


@app.command()
def show(
    run: Run,
    proof_id: Annotated[str, typer.Argument(metavar="ID", help="Id of a proof, as `backupd proofs` lists it.")],
) -> None:
    """Show what a test restore did and found."""
    proof = run.service.listings.proof(proof_id)
    run.screen.document(proof.as_json())
    from backupd.cli.render import show_proof

    show_proof(run.screen, proof)
