"""``backupd backups``: list, show, keep, delete, undelete.

``backupd retention``, ``hold``, ``pause`` and ``resume``: what is deleted and started by rule, and what is not.

Documents: ``retention`` gives ``{"server", "applied", "destinations": [Decisions]}``, with ``--apply`` also ``marked``
(ids by destination), ``binlogs`` (what went of them, by destination: ``segments``, ``bytes``) and ``held``. Decisions:
``server``, ``destination``, ``at``, ``hold``, ``keep``, ``expire``, ``bytes_expire``, ``note``, ``backups`` (``id``,
``kind``, ``parent``, ``finished_at``, ``bytes``, ``marked``, ``keep``, ``rules``, ``reasons``), ``binlogs`` (``name``,
``from``, ``to``, ``bytes``, ``keep``, ``reasons``), ``recoverable`` (``from``, ``to``, ``base``), ``stopped`` (ids that
only a hold or the newest proof keeps), ``warnings``. ``hold`` and ``pause`` give the hold (``server``, ``kind``,
``reason``, ``by``, ``since``), without a server the list of them; ``hold`` and its ``--release`` also ``problems``:
destinations that could not be notified.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from backupd.cli.output import Screen
from backupd.cli.session import AnyServer, BackupId, Commands, Labels, Run, Server, flag, option
from backupd.model.backup_record import EVERY_SERVER, HoldKind
from backupd.model.text import format_size, format_time

if TYPE_CHECKING:
    from backupd.app.retention.rules import Decisions
    from backupd.app.service.facade import Service


class ListByDefault(TyperGroup):
    """``backups [SERVER]`` means ``backups list [SERVER]``: the first word that is no command is a server."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's own Context
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] != "--":
            if args[position] in ("--help", "-h"):
                return super().parse_args(ctx, args)
            position += 2 if args[position] == "--config" else 1
        if position >= len(args) or args[position] not in self.commands:
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = Commands(cls=ListByDefault, help="List backups; show, keep, delete or undelete one.")


@app.command("list")
def list_(run: Run, server: AnyServer = None, label: Labels = None) -> None:
    """List backups, newest first (also without the word `list`)."""
    from backupd.cli.render import backup_row

    columns = ("ID", "SERVER", "KIND", "STATE", "DATA", "NEW", "AT")
    found = run.labelled(label, server).backups.each(server)
    run.show_list(found, "no backups", columns, backup_row, right=("DATA", "NEW"))


@app.command()
def show(run: Run, backup_id: BackupId) -> None:
    """Show all details of a backup."""
    document = run.service.backups.show(backup_id).as_json()
    run.screen.document(document)
    from backupd.cli.render import show_mapping

    show_mapping(run.screen, document)


@app.command()
def keep(
    run: Run,
    backup_id: BackupId,
    release: Annotated[bool, flag("--release", "Release it: retention applies again.")] = False,
) -> None:
    """Keep a backup: no rule deletes it until it is released."""
    problems = run.service.backups.keep(backup_id, pinned=not release)
    run.screen.done = f"{backup_id} was {'released' if release else 'kept'}"
    run.screen.document({"id": backup_id, "pinned": not release, "problems": list(problems)})
    run.screen.line(f"{backup_id} is {'released' if release else 'kept'}")
    _unreached(run.screen, "NOT recorded at", problems)


def _unreached(screen: Screen, what: str, problems: Sequence[str], ending: str = "") -> None:
    for problem in problems:
        screen.line(f"{what} {problem}; repeat the command when the destination is reachable{ending}", style="bold red")


@app.command()
def delete(
    run: Run,
    backup_id: BackupId,
    now: Annotated[bool, flag("--now", "Delete it without a grace period. Cannot be undone.")] = False,
    with_increments: Annotated[
        bool, flag("--with-increments", "Also delete the increments that depend on it.")
    ] = False,
) -> None:
    """Mark a backup as deleted. backupd removes its data after the grace period."""
    done = run.service.backups.delete(backup_id, now=now, with_increments=with_increments)
    held = done.held
    run.screen.done = f"{backup_id} was {'deleted' if now and not held else 'marked as deleted'}"
    run.screen.document(
        {"id": backup_id, "state": "deleted", "now": now, "held": list(held), "forgotten": list(done.forgotten)}
    )
    for sentence in done.forgotten:
        run.screen.line(sentence, style="yellow")
    if held:
        run.screen.line(f"{backup_id} is marked as deleted, but it was NOT removed yet:")
        for sentence in held:
            run.screen.line(f"  {sentence}")
        raise typer.Exit(1)
    run.screen.line(
        f"{backup_id} is deleted"
        if now
        else f"{backup_id} is marked as deleted; `backupd backups undelete {backup_id}` brings it back"
    )


@app.command()
def undelete(run: Run, backup_id: BackupId) -> None:
    """Undo a deletion before its grace period ends."""
    back = run.service.backups.undelete(backup_id)
    run.screen.done = f"{backup_id} was brought back"
    run.screen.document({"id": backup_id, "state": "complete", "brought_back": back})
    run.screen.line(f"{', '.join(back)} {'is' if len(back) == 1 else 'are'} back")


@app.command("config")
def kept_configuration(
    run: Run,
    backup_id: BackupId,
    out: Annotated[
        Path | None,
        option("--out", "DIR", "Write it to this new or empty folder."),
    ] = None,
) -> None:
    """List or extract the server configuration and accounts stored with a backup. Requires a private key."""
    found = run.service.backups.configuration(backup_id, out)
    run.screen.done = f"the configuration was written to {out}" if out else ""
    run.screen.document(found.as_json())
    for sentence in found.left_out:
        run.screen.line(sentence, style="yellow")
    if out is not None:
        run.screen.line(f"{len(found.written)} files are in {out}; they hold passwords and hashes")
        return
    rows = [
        (
            one.name + (f" -> {one.target}" if one.target else ""),
            f"{one.mode:04o}",
            one.owner,
            str(one.size) if one.kind == "file" else one.kind,
        )
        for one in found.members
    ]
    run.screen.table(("name", "mode", "owner", "bytes"), rows, right=("bytes",))


MaybeServer = Annotated[str | None, typer.Argument(metavar="[SERVER]", show_default=False, help="Name of a server.")]
Everyone = Annotated[bool, flag("--all", "Every server, also those that are added later.")]
Reason = Annotated[
    str,
    option("--reason", "TEXT", "Reason. Shown with the hold or pause and recorded in the audit log."),
]


def retention(
    run: Run,
    server: Server,
    apply: Annotated[
        bool,
        flag("--apply", "Mark expired backups as deleted. backupd removes their data after the grace period."),
    ] = False,
    really: Annotated[
        bool, flag("--really", "Apply the rules even if they expire more than half of the backups.")
    ] = False,
) -> None:
    """Show which backups the retention rules keep, which they delete, and why. Changes nothing without --apply."""
    if really and not apply:
        raise typer.BadParameter("--really requires --apply")
    extra: dict[str, Any] = {}
    if apply:
        run.follows = ()
        with run.reporting() as report:
            applied = run.service.foreground.apply_retention(server, report, really=really)
        run.screen.done = "the rules were applied"
        found, extra = applied.decisions, applied.as_json()
        for name, cleared in applied.cleared.items():
            if cleared.segments:
                run.screen.line(f"{name}: {cleared.text}")
    else:
        found = run.service.retention.preview(server)
    run.screen.document(
        {"server": server, "applied": apply, "destinations": [decisions.as_json() for decisions in found], **extra}
    )
    for decisions in found:
        _show(run.screen, decisions, applied=apply)
    for sentence in extra.get("held", ()):
        run.screen.line(f"not removed yet: {sentence}", style="yellow")
    if not found:
        run.screen.line("no destination holds backups of this server")
    elif not apply and any(decisions.expired for decisions in found):
        run.screen.line(f"-> nothing was changed; `backupd retention {server} --apply` marks the expired ones")


def _show(screen: Screen, decisions: Decisions, *, applied: bool) -> None:
    if screen.as_json:
        return
    gone = "are marked as deleted now" if applied else "would expire"
    screen.line(
        f"{decisions.destination}: {len(decisions.kept)} stay, {len(decisions.expired)} {gone} "
        f"({format_size(decisions.bytes_expired)} named by them, shared objects counted too)",
        style="bold",
    )
    rows = []
    for decision in decisions.backups:
        backup = decision.backup
        word = "keep" if decision.keep else "deleted" if backup.marked else "EXPIRE"
        finished = format_time(backup.finished_at)[:16]
        rows.append((word, backup.id, backup.kind.word, finished, "; ".join(decision.reasons)))
    screen.table(("", "ID", "KIND", "FINISHED", "WHY"), rows)
    for one in decisions.runs:
        files = one.run.name if not one.run.branch else f"{one.run.name} ({format_size(one.run.bytes)})"
        screen.line(f"{'keep' if one.keep else 'EXPIRE'} binary logs {files}: {one.reason}")
    if decisions.hold:
        screen.line(f"on hold: {decisions.hold}", style="yellow")
    for text in decisions.warnings:
        screen.line(f"warning: {text}", style="yellow")
    screen.line()


def hold(
    run: Run,
    server: MaybeServer = None,
    everyone: Everyone = False,
    reason: Reason = "",
    release: Annotated[bool, flag("--release", "Release the hold. Retention applies again.")] = False,
) -> None:
    """Suspend every deletion of a server's backups and binary logs until the hold is released. Without SERVER and
    --all: list holds and pauses."""
    whom = _whom(server, everyone, needed=False)
    if whom is None and (release or reason):
        raise typer.BadParameter("name a server, or give --all")
    if whom is None:
        run.show_list(
            run.service.retention.holds(),
            "no holds and no pauses",
            ("SERVER", "WHAT", "REASON", "BY", "SINCE"),
            lambda one: (one.server, str(one.kind), one.reason, one.set_by, format_time(one.since)),
        )
    elif release:
        _release(run.service, run.screen, whom, HoldKind.HOLD)
    else:
        found = run.service.retention.hold(whom, reason)
        run.screen.document(found.as_json())
        run.screen.line(f"nothing of {_named(whom)} is deleted from now on: {found.hold.reason}")
        _unreached(run.screen, "NOT recorded at", found.problems, ", or others may delete there")


def pause(
    run: Run,
    server: MaybeServer = None,
    everyone: Everyone = False,
    reason: Reason = "",
    stop_running: Annotated[bool, flag("--stop-running", "Also cancel the server's running and queued jobs.")] = False,
) -> None:
    """Suspend a server's scheduled jobs and its binary log stream until it is resumed."""
    whom = _whom(server, everyone, needed=True) or ""
    found = run.service.retention.pause(whom, reason, stop_running=stop_running)
    run.screen.done = f"{_named(whom)} was paused"
    run.screen.document(found.as_json())
    run.screen.line(f"scheduled jobs and the binary log stream of {_named(whom)} are suspended: {found.pause.reason}")
    for job in found.stopped:
        run.screen.line(f"asked to stop: job {job}")
    for problem in found.problems:
        run.screen.line(f"NOT asked to stop: job {problem}", style="bold red")
    run.ends(well=not found.problems)


def resume(run: Run, server: MaybeServer = None, everyone: Everyone = False) -> None:
    """Resume a paused server's scheduled jobs and its binary log stream."""
    whom = _whom(server, everyone, needed=True) or ""
    _release(run.service, run.screen, whom, HoldKind.PAUSE)


def _whom(server: str | None, everyone: bool, *, needed: bool) -> str | None:
    if server is not None and everyone:
        raise typer.BadParameter("name a server or give --all, not both")
    if needed and server is None and not everyone:
        raise typer.BadParameter("name a server, or give --all")
    return EVERY_SERVER if everyone else server


def _release(service: Service, screen: Screen, whom: str, kind: HoldKind) -> None:
    problems = service.retention.release(whom, kind)
    word = "released" if kind is HoldKind.HOLD else "resumed"
    screen.document({"server": whom, "kind": str(kind), "released": True, "problems": list(problems)})
    screen.line(f"{_named(whom)} is {word}")
    _unreached(screen, "it may still be recorded at", problems)


def _named(server: str) -> str:
    return "every server" if server == EVERY_SERVER else server
