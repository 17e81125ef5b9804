"""``backupd alerts``: what is open, what was sent; test the channels, acknowledge an incident."""

from __future__ import annotations

from typing import Annotated

import typer

from backupd.alerts.message import one_line
from backupd.alerts.rules import title_of
from backupd.cli.commands.backups import ListByDefault
from backupd.cli.session import AnyServer, Commands, Labels, Run, flag, one_of
from backupd.model.event import Incident, Message, MessageState
from backupd.model.text import format_time

SHOWN = 40
"""Rows of a list unless more are asked for."""
_MOST = 1_000_000
_WIDTH = 70

app = Commands(cls=ListByDefault, help="List open incidents and messages; test channels; acknowledge.")


@app.command("list")
def list_(
    run: Run,
    server: AnyServer = None,
    label: Labels = None,
    everything: Annotated[bool, flag("--all", "Also list closed incidents.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=_MOST, help="Maximum number of rows.")] = SHOWN,
) -> None:
    """List open incidents, newest first (also without the word `list`)."""
    alerts = run.labelled(label, server).alerts
    found = alerts.list(server, is_open=None if everything else True, limit=limit + 1)
    nothing = "no incidents" if everything else "no open incidents"
    run.show_list(found, nothing, ("ID", "SINCE", "OVER", "WHAT", "WHY"), _incident, limit=limit)
    for incident in [one for one in found[:limit] if one.is_open and one.hint][:5]:
        run.screen.line(f"{one_line(title_of(incident), _WIDTH)}: {incident.hint}")


@app.command()
def messages(
    run: Run,
    state: Annotated[MessageState | None, one_of(MessageState, "--state", "Only those in this state.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=_MOST, help="Maximum number of rows.")] = SHOWN,
) -> None:
    """List messages, newest first: sent, waiting to be sent (and why), given up."""
    found = run.service.alerts.messages(state=state, limit=limit + 1)
    columns = ("ID", "BY", "STATE", "TRIES", "SUBJECT", "TROUBLE")
    run.show_list(found, "no messages", columns, _message, right=("TRIES",), limit=limit)


@app.command("test")
def send_test(run: Run) -> None:
    """Send a test message through every configured channel and report the result of each."""
    sent = run.service.alerts.test()
    run.screen.document([message.as_json() for message in sent])
    for message in sent:
        to = ", ".join(message.recipients)
        run.screen.line(
            f"{message.channel}: sent to {to}"
            if message.state is MessageState.SENT
            else f"{message.channel}: NOT SENT\n{message.error}"
        )
        if message.state is MessageState.SENT and message.error:
            run.screen.line(f"but not to every recipient:\n{message.error}")
    run.ends(well=all(message.state is MessageState.SENT and not message.error for message in sent))


@app.command()
def acknowledge(
    run: Run,
    incident: Annotated[str, typer.Argument(metavar="ID", help="Id of an incident, as `backupd alerts` lists it.")],
) -> None:
    """Acknowledge an incident. backupd sends no more reminders for it; it still sends the recovery message."""
    found = run.service.alerts.acknowledge(incident)
    run.screen.done = f"{incident} was acknowledged"
    run.screen.document(found.as_json())
    run.screen.line(f"{found.acknowledged_by} acknowledged {title_of(found)}: backupd sends no more reminders for it")


def _incident(one: Incident) -> tuple[str, ...]:
    over = (
        format_time(one.closed_at.replace(microsecond=0))
        if one.closed_at
        else (f"acknowledged by {one.acknowledged_by}" if one.acknowledged_by else "")
    )
    return (
        one.id,
        format_time(one.opened_at.replace(microsecond=0)),
        over,
        f"{str(one.severity).upper()} {one_line(title_of(one), _WIDTH)}",
        one_line(one.message, _WIDTH),
    )


def _message(one: Message) -> tuple[str, ...]:
    trouble = one_line(one.error.partition("\n")[0], _WIDTH)
    if one.next_try is not None and one.attempts:
        trouble += f" (next try {format_time(one.next_try.replace(microsecond=0))})"
    return one.id, one.channel, str(one.state), str(one.attempts), one_line(one.subject, _WIDTH), trouble
