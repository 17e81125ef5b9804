"""``backupd setup``: from a server that runs on this host to a backup of it that is proved.

With --json the document has ``server``, ``socket``, ``config``, ``policy``, ``account_file``, ``destination``,
``steps``, ``restore_key``, ``signing_key``, ``backup``, ``proof`` and ``left``; with --print-sql ``server``,
``version`` and ``statements``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.output import explained
from backupd.cli.session import Run, flag, option
from backupd.model.backup_record import BackupKind
from backupd.model.errors import BackupdError, RefusedError, UsageError

if TYPE_CHECKING:
    from backupd.app.setup.installation import Installation
    from backupd.app.setup.request import Request

_ASKS = "answer its questions on a terminal, or give --yes; --dry-run shows what would be done"


def setup(
    run: Run,
    *,
    name: Annotated[str, option("--server", "NAME", "Name of the server. Default: the name of this host.")] = "",
    socket: Annotated[
        str, option("--socket", "PATH", "Its socket. Default: that of the only server that runs on this host.")
    ] = "",
    admin_file: Annotated[
        Path | None,
        option(
            "--admin-file",
            "FILE",
            "Option file of an account that may create accounts. Default: root at the socket, without a password.",
        ),
    ] = None,
    account_file: Annotated[
        Path | None,
        option("--account-file", "FILE", "Option file of an account for backupd that exists; none is created then."),
    ] = None,
    folder: Annotated[
        Path, option("--destination", "DIR", "Folder for the backups. Default: /srv/backups/repository.")
    ] = Path("/srv/backups/repository"),
    state: Annotated[
        Path,
        option("--state", "DIR", "Folder for the catalog, the spool and test restores. Default: /var/lib/backupd."),
    ] = Path("/var/lib/backupd"),
    restores: Annotated[
        Path, option("--restores", "DIR", "Folder for restored servers. Default: /srv/restores.")
    ] = Path("/srv/restores"),
    recipient_files: Annotated[
        list[Path] | None,
        option("--recipient", "FILE", "Also encrypt the backups for the public keys in this file. May be repeated."),
    ] = None,
    mail_to: Annotated[str, option("--mail-to", "ADDRESS", "Who receives mail about failures. Default: nobody.")] = "",
    smtp: Annotated[str, option("--smtp", "URL", "Mail server. Default: smtp://localhost:25.")] = "smtp://localhost:25",
    without_binlog: Annotated[
        bool, flag("--without-binlog", "Do not follow the binary log: only the moments of backups can be restored.")
    ] = False,
    print_sql: Annotated[
        bool, flag("--print-sql", "Only print the SQL statements that create the account for backupd.")
    ] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Only show what would be done.")] = False,
    yes: Annotated[bool, flag("--yes", "Do it without asking.")] = False,
) -> None:
    """Set up backups of a server on this host: keys, account, configuration, policy, and a first backup that is proved.

    Shows first what it will do. Overwrites nothing. Run it as root.
    """
    from backupd.app.setup.installation import carry_out, outline
    from backupd.app.setup.request import Request, account_of, look

    if print_sql:
        found_server, account = account_of(socket)
        run.screen.document(
            {"socket": found_server.socket, "version": found_server.version, "statements": account.statements()}
        )
        for statement in account.statements():
            run.screen.line(f"{statement};")
        return
    request = Request(
        run.config.absolute(),
        state,
        folder,
        restores,
        server=name,
        socket=socket,
        admin_file=admin_file,
        account_file=account_file,
        recipients=tuple(recipient_files or ()),
        mail=mail_to,
        smtp=smtp,
        binlog=not without_binlog,
    )
    asks = sys.stdin.isatty() and not (yes or dry_run or run.screen.as_json)
    if asks:
        request = _asked(request)
    elif not (yes or dry_run):
        raise UsageError("setup changes this host, and nobody can be asked", hint=_ASKS)
    found = look(request, {})
    planned = outline(found)
    if dry_run or not run.screen.as_json:
        _show(run, planned)
    if dry_run:
        run.screen.document(planned.as_json())
        return
    if asks and not typer.confirm("Do this?", err=True):
        raise RefusedError("nothing was changed")
    made = carry_out(found, lambda what: typer.echo(f"setup: {what}", err=True))
    run.named, run.opening = request.config, "works"
    try:
        proved = _proved(run, made)
    except (BackupdError, OSError) as error:
        run.screen.warn(
            f"the configuration {made.config} is complete; the first backup is not proved yet. When the cause below is "
            f"removed: backupd backup {made.server}, then backupd test-restore {made.server}"
        )
        raise explained(error, "the first backup") from error
    run.screen.done = f"{made.config} was written, and the backup {proved.backup} taken"
    run.screen.document(proved.as_json())
    run.screen.line()
    run.screen.line(f"{proved.server} is backed up by policy {proved.policy}. Left for you:", style="bold")
    for text in (*proved.left, "start the service: systemctl enable --now backupd (without systemd: backupd serve)"):
        run.screen.line(f"- {text}")
    run.ends(well=proved.proof in ("proved", "restored"))


def _asked(request: Request) -> Request:
    """The same with the answers of somebody at the terminal; an empty answer leaves what is in brackets."""
    return replace(
        request,
        server=request.server or typer.prompt("Name of the server", default=request.name, err=True),
        destination=Path(typer.prompt("Folder for the backups", default=str(request.destination), err=True)),
        mail=request.mail
        or typer.prompt("Mail address for failures (empty: none)", default="", show_default=False, err=True),
    )


def _show(run: Run, planned: Installation) -> None:
    run.screen.line("setup will do this:", style="bold")
    for step in planned.steps:
        run.screen.line(step if step.startswith(" ") else f"- {step}")


def _proved(run: Run, made: Installation) -> Installation:
    from backupd.cli.progress import reporting
    from backupd.cli.render import show_backup, show_proof

    with reporting() as report:
        record = run.service.foreground.backup(made.server, BackupKind.PHYSICAL_FULL, report)
    show_backup(run.screen, record)
    with reporting() as report:
        proof = run.service.foreground.test_restore(made.server, f"backup:{record.id}", report)
    show_proof(run.screen, proof)
    return replace(made, backup=record.id, proof=str(proof.outcome))
