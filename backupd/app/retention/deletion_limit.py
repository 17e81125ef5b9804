"""What keeps rules from letting go of too much at once, and what is told when something keeps them from it.

Two measures: more than half of what one server has at a destination, and more than may go there within a day, whichever
server's and whichever installation's it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from backupd.app.context.run import JobRun
from backupd.app.context.wiring import Wiring
from backupd.app.retention.log_retention import stranded
from backupd.app.retention.mark_provenance import unconfirmed
from backupd.model.errors import RefusedError
from backupd.model.event import Event, Severity
from backupd.retention.decisions import Decisions
from backupd.transfer.records.manifests import backup_ids
from storage.contract.destination import Destination

REFUSED = "retention-refused"
_MANY = 3
_QUIET = timedelta(days=1)
"""The same refusal is told once in this time."""


def refuse_mass(wiring: Wiring, found: Iterable[tuple[Destination, Decisions]], run: JobRun) -> None:
    """Raises RefusedError, with an event, when ``found`` would let go of too much."""
    told = []
    for destination, decisions in found:
        alive = sum(1 for decision in decisions.backups if not decision.backup.marked)
        place = f"at destination {decisions.destination}"
        if len(decisions.expired) > _MANY and 2 * len(decisions.expired) > alive:
            share = f"{len(decisions.expired)} of {alive} backups of {decisions.server}"
            told.append((decisions, f"{share} {place} would expire at once"))
        elif len(points := stranded(decisions)) > _MANY:
            logs = f"the binary logs behind {len(points)} backups of {decisions.server} that stay"
            told.append((decisions, f"{logs} {place} would go at once"))
        elif decisions.expired and (braked := _braked(wiring, destination, decisions)):
            told.append((decisions, braked))
    if not told:
        return
    server = told[0][0].server
    hint = (
        f"look at them: backupd retention {server}; if that is right, backupd retention {server} --apply --really "
        "lets them go"
    )
    for decisions, text in told:
        names = [one.backup.id for one in decisions.expired] or stranded(decisions)
        _refuse(wiring, decisions, run, text, ", ".join(names), hint)
    raise RefusedError(
        "retention was not applied: more than half of what there is, or more than may go in a day, would go at once",
        detail="\n".join(text for _decisions, text in told),
        hint=hint,
    )


def _braked(wiring: Wiring, destination: Destination, decisions: Decisions) -> str:
    """What to say when all that rules let go at this destination within a day, of any server and by any installation,
    would be too much with these; empty when it is not."""
    brake = wiring.settings.brake
    present = backup_ids(destination)
    rules = unconfirmed(wiring, destination)
    rules |= {(decisions.server, one.backup.id): wiring.clock() for one in decisions.expired}
    if not brake.holds(rules, present):
        return ""
    return (
        f"{len(decisions.expired)} backups of {decisions.server} at destination {decisions.destination} would "
        f"expire, and with what other rules marked there within a day that is {brake.most(rules, present)} of "
        f"{len(present)} backups, where {brake.limit(len(present))} may go (retention.brake in the configuration)"
    )


def tell_stopped(wiring: Wiring, decisions: Decisions, run: JobRun) -> None:
    """An event when a hold, or being the newest proved chain, keeps what the rules would expire."""
    if not decisions.stopped:
        return
    count, server = len(decisions.stopped), decisions.server
    if decisions.hold:
        why, hint = f"a hold keeps {count} backups", f"`backupd hold {server} --release` lets the rules go on"
    else:
        why = f"the newest proved chain keeps {count} backups"
        hint = f"prove a newer backup: backupd test-restore {server}"
    _refuse(
        wiring,
        decisions,
        run,
        f"{why} of {server} at destination {decisions.destination} that the rules would expire",
        "\n".join([*([decisions.hold] if decisions.hold else []), ", ".join(decisions.stopped)]),
        hint,
    )


def _refuse(wiring: Wiring, decisions: Decisions, run: JobRun, message: str, detail: str, hint: str) -> None:
    now = wiring.clock()
    for event in wiring.catalog.events.list(server=decisions.server, kind=REFUSED, limit=10):
        if event.at > now - _QUIET and (event.subject, event.message, event.detail) == (
            decisions.destination,
            message,
            detail,
        ):
            return
    wiring.catalog.events.add(
        Event(
            at=now,
            kind=REFUSED,
            severity=Severity.WARNING,
            server=decisions.server,
            subject=decisions.destination,
            message=message,
            detail=detail,
            hint=hint,
            job_id=run.job.id,
        )
    )
