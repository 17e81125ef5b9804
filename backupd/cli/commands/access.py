"""`backupd token`, `backupd audit`, and the process that offers the REST interface and the web page."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.session import Config, Json, config_path, guarded, remember, session

if TYPE_CHECKING:
    from backupd.cli.output import Screen
    from backupd.model.access import AuditEntry, Token

app = typer.Typer(
    help="Tokens: who may use the REST interface and the web page.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.callback()
def group(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    """Make, list and revoke tokens."""
    remember(context, config, as_json)


@app.command()
def create(
    context: typer.Context,
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="viewer | operator | admin")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Who holds it: a person, or a program.")],
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="SERVER", show_default=False, help="Sees only this one; may be repeated."),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="SPAN|TIME", show_default=False, help="90d, 12h, or 2027-01-01T00:00:00Z."),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Create a token. The secret is displayed only once and cannot be retrieved later."""
    with session(context, config, as_json, opening="works") as run:
        token, secret = run.service.access.create(name, role, servers=server or None, expires=expires)
        run.screen.done = f"token {token.id} was made"
        run.screen.document({**token.as_json(), "token": secret})
        run.screen.line(f"token {token.id} of {token.name}, {token.role} of {_scope(token)}{_until(token)}")
        if token.expires_at is None:
            run.screen.line(
                "it never expires: with --expires 90d it would end by itself; "
                f"`backupd token revoke {token.id}` ends it",
                style="yellow",
            )
        run.screen.line("its secret, shown this once:")
        run.screen.line(secret)


@app.command("list")
def list_(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    """List tokens, those that count no more, too."""
    with session(context, config, as_json) as run:
        found = run.service.access.tokens()
        run.screen.document([token.as_json() for token in found])
        if not found:
            run.screen.line("no tokens; `backupd token create --role viewer|operator|admin --name NAME` makes one")
            return
        run.screen.table(
            ("ID", "NAME", "ROLE", "SERVERS", "STATE", "LAST USED", "MADE BY"),
            [
                (
                    token.id,
                    token.name,
                    str(token.role),
                    _scope(token),
                    _state(token),
                    _short(token.last_used_at),
                    token.created_by,
                )
                for token in found
            ],
        )


@app.command()
def revoke(
    context: typer.Context,
    token: Annotated[str, typer.Argument(metavar="ID", help="As `backupd token list` shows it.")],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Revoke a token and end the web sessions that were opened with it."""
    with session(context, config, as_json) as run:
        gone = run.service.access.revoke(token)
        run.screen.done = f"token {gone.id} was revoked"
        run.screen.document(gone.as_json())
        run.screen.line(f"token {gone.id} of {gone.name} counts no more")


def audit(
    context: typer.Context,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Verify the digest chain of the audit log. Exit status 1 if an entry was altered or removed.",
        ),
    ] = False,
    actor: Annotated[str | None, typer.Option("--actor", metavar="NAME", show_default=False)] = None,
    action: Annotated[
        str | None,
        typer.Option(
            "--action",
            metavar="WORD",
            show_default=False,
            help="Show only entries with this action, for example backup-deleted.",
        ),
    ] = None,
    server: Annotated[str | None, typer.Option("--server", metavar="SERVER", show_default=False)] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many, the newest first.")] = 50,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Who did what: every backup, restore, deletion, token and change that somebody asked for."""
    with session(context, config, as_json) as run:
        if not verify:
            found = run.service.access.audit(actor=actor, action=action, server=server, limit=limit)
            run.screen.document([entry.as_json() for entry in found])
            _show(run.screen, found)
            return
        verified = run.service.access.verify_audit()
        run.screen.document(
            {"entries": verified.entries, "digest": verified.digest, "problems": list(verified.problems)}
        )
        for problem in verified.problems:
            run.screen.line(problem, style="bold red")
        run.screen.line(f"{verified.entries} entries, the newest with digest {verified.digest or '-'}")
        if verified.problems:
            raise typer.Exit(1)
        run.screen.line(
            "each follows from the one before it; that none was cut off at the end shows by this digest, "
            "which the service's log has, too"
        )


def run_api(
    context: typer.Context,
    descriptor: Annotated[int, typer.Option("--fd", metavar="N", min=0, help="The listening socket.")],
    ready: Annotated[
        int | None,
        typer.Option(
            "--ready", metavar="N", min=0, help="File descriptor to notify when the process accepts requests."
        ),
    ] = None,
    settings: Annotated[
        Path | None, typer.Option("--settings", metavar="FILE", help="What the service holds in force.")
    ] = None,
    config: Config = None,
) -> None:
    """Offer the REST interface and the web page on a socket that is given. The service does this by itself."""
    with guarded(context, False):
        from api.server import run
        from backupd.app.context.logging_setup import logging_to

        with logging_to(sys.stderr):
            run(config_path(context, config), descriptor, held=settings, ready=ready)


def _show(screen: Screen, found: tuple[AuditEntry, ...]) -> None:
    if not found:
        screen.line("nothing")
        return
    screen.table(
        ("#", "TIME", "WHO", "VIA", "WHAT", "SERVER", "SUBJECT", "OUTCOME", "DETAIL"),
        [
            (
                str(entry.number),
                f"{entry.at:%Y-%m-%d %H:%M:%SZ}",
                entry.actor,
                f"{entry.via} {entry.address}".strip(),
                entry.action,
                entry.server,
                entry.subject,
                entry.outcome,
                entry.detail,
            )
            for entry in found
        ],
    )


def _scope(token: Token) -> str:
    return "all servers" if token.servers is None else ", ".join(sorted(token.servers))


def _until(token: Token) -> str:
    return f", until {token.expires_at:%Y-%m-%d %H:%MZ}" if token.expires_at else ""


def _state(token: Token) -> str:
    if token.revoked_at is not None:
        return f"revoked {_short(token.revoked_at)}"
    if not token.is_valid(datetime.now(UTC)):
        return f"expired {_short(token.expires_at)}"
    return f"valid{_until(token)}"


def _short(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M}" if moment is not None else "never"
