"""Whom a part of the servers is all there is: for them the others do not exist."""

from __future__ import annotations

from backupd.app.context.wiring import Wiring
from backupd.model.access import Actor
from backupd.model.errors import ForbiddenError, NotFoundError, UnknownNameError
from policies.problems import suggestion


def scoped(wiring: Wiring, actor: Actor) -> Wiring:
    """With the settings of those servers only that ``actor`` sees."""
    return wiring if actor.servers is None else wiring.of(actor.servers)


def see(actor: Actor, server: str, what: str) -> None:
    """Raises NotFoundError where ``what``, which belongs to ``server``, is not there for ``actor``."""
    if not actor.sees(server):
        raise NotFoundError(f"there is no {what}")


def require_all(actor: Actor) -> None:
    """Raises ForbiddenError for whom there are only some servers."""
    if actor.servers is not None:
        raise ForbiddenError("this is for those who see every server", hint="name one of yours")


def require_known(wiring: Wiring, server: str) -> None:
    """Raises UnknownNameError for a server that is neither configured nor in the catalog with backups, binary logs or
    jobs: it was typed wrong. Those that were configured once are known."""
    if server in wiring.settings.servers:
        return
    catalog = wiring.catalog
    if not (
        catalog.backups.list(server, limit=1)
        or server in catalog.binlogs.servers()
        or catalog.jobs.list(server, limit=1)
    ):
        wiring.settings.server(server)


def require_target(wiring: Wiring, server: str, text: str) -> None:
    """Raises UnknownNameError where a target names a backup or a branch that the catalog does not have of ``server``,
    UsageError for what is no target."""
    from restore.planning.starting_backup import unknown_backup
    from restore.planning.target import AtBackup, parse_target

    target = parse_target(text)
    branches = [branch.id for branch in wiring.catalog.binlogs.branches(server)] if target.branch else []
    if target.branch and target.branch not in branches:
        raise UnknownNameError(
            f"server {server} has no branch {target.branch!r}{suggestion(target.branch, branches)}",
            hint=f"`backupd timeline {server}` shows those that there are",
        )
    if isinstance(target.goal, AtBackup):
        backup = target.goal.backup_id
        if not any(record.id == backup for record in wiring.catalog.backups.list(server, foreign=True)):
            raise unknown_backup(server, backup)


def seen(actor: Actor, server: str | None) -> tuple[str, ...] | None:
    """The servers whose rows a list may have: ``server``, or every one (None). Raises NotFoundError."""
    if server is None:
        return None if actor.servers is None else tuple(sorted(actor.servers))
    see(actor, server, f"server {server!r}")
    return (server,)
