"""``backupd token`` and ``backupd audit``: who may use the REST interface and the web page, and who did what."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.session import Commands, Run, flag, option

if TYPE_CHECKING:
    from backupd.model.access import Token

app = Commands(help="Tokens for the REST interface and the web page.", no_args_is_help=True)


@app.command(opening="works")
def create(
    run: Run,
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="viewer | operator | admin")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Holder of the token: a person or a program.")],
    server: Annotated[
        list[str] | None,
        option("--server", "SERVER", "Restrict the token to this server. May be repeated."),
    ] = None,
    expires: Annotated[
        str | None,
        option("--expires", "SPAN|TIME", "90d, 12h, or 2027-01-01T00:00:00Z."),
    ] = None,
) -> None:
    """Create a token. The secret is displayed only once and cannot be retrieved later."""
    token, secret = run.service.access.create(name, role, servers=server or None, expires=expires)
    run.screen.done = f"token {token.id} was created"
    run.screen.document({**token.as_json(), "token": secret})
    run.screen.line(f"token {token.id} of {token.name}, {token.role} of {_scope(token)}{_until(token)}")
    if token.expires_at is None:
        run.screen.line(
            f"the token does not expire; to revoke it: backupd token revoke {token.id}; to set a lifetime, create it "
            "with --expires 90d",
            style="yellow",
        )
    run.screen.line("secret (shown only once):")
    run.screen.line(secret)


@app.command("list")
def list_(run: Run) -> None:
    """List tokens, including expired and revoked ones."""
    run.show_list(
        run.service.access.tokens(),
        "no tokens; `backupd token create --role viewer|operator|admin --name NAME` creates one",
        ("ID", "NAME", "ROLE", "SERVERS", "STATE", "LAST USED", "MADE BY"),
        lambda token: (
            token.id,
            token.name,
            str(token.role),
            _scope(token),
            _state(token),
            _short(token.last_used_at),
            token.created_by,
        ),
    )


@app.command()
def revoke(
    run: Run, token: Annotated[str, typer.Argument(metavar="ID", help="As `backupd token list` shows it.")]
) -> None:
    """Revoke a token and end the web sessions that were opened with it."""
    gone = run.service.access.revoke(token)
    run.screen.done = f"token {gone.id} was revoked"
    run.screen.document(gone.as_json())
    run.screen.line(f"token {gone.id} of {gone.name} is revoked")


def audit(
    run: Run,
    verify: Annotated[
        bool,
        flag("--verify", "Verify the digest chain of the audit log. Exit status 1 if an entry was altered or removed."),
    ] = False,
    actor: Annotated[str | None, option("--actor", "NAME", "Show only entries of this actor.")] = None,
    action: Annotated[
        str | None,
        option("--action", "WORD", "Show only entries with this action, for example backup-deleted."),
    ] = None,
    server: Annotated[str | None, option("--server", "SERVER", "Show only entries about this server.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Maximum number, newest first.")] = 50,
) -> None:
    """Show the audit log: every requested backup, restore, deletion, token and change, and who requested it."""
    if not verify:
        found = run.service.access.audit(actor=actor, action=action, server=server, limit=limit + 1)
        run.show_list(
            found,
            "nothing",
            ("#", "TIME", "WHO", "VIA", "WHAT", "SERVER", "SUBJECT", "OUTCOME", "DETAIL"),
            lambda entry: (
                str(entry.number),
                f"{entry.at:%Y-%m-%d %H:%M:%SZ}",
                entry.actor,
                f"{entry.via} {entry.address}".strip(),
                entry.action,
                entry.server,
                entry.subject,
                entry.outcome,
                entry.detail,
            ),
            limit=limit,
        )
        return
    verified = run.service.access.verify_audit()
    run.screen.document({"entries": verified.entries, "digest": verified.digest, "problems": list(verified.problems)})
    for problem in verified.problems:
        run.screen.line(problem, style="bold red")
    run.screen.line(f"{verified.entries} entries, the newest with digest {verified.digest or '-'}")
    run.ends(well=not verified.problems)
    run.screen.line(
        "the digest chain is unbroken; to rule out removed entries at the end, compare the newest digest with the "
        "service's log"
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
