"""CLONE on the server's side: may and can this server be cloned, and its plugin for as long as it is needed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from backupd.engine.server.grants import read_grants
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.model.errors import RefusedError, ServerError
from backupd.model.server_facts import ServerInfo, Version

FIRST = Version(8, 0, 17)
"""The first release that has it."""
_NOT_LOADED = "the clone plugin is not loaded, and this account may not load it"
_LIBRARY = "mysql_clone.so"
_READ_ONLY = "the clone plugin is not loaded, and this server is read_only: a backup cannot load it"
_FOR_GOOD = (
    f"load it for good as an administrator: INSTALL PLUGIN clone SONAME '{_LIBRARY}' (super_read_only has to "
    f"be OFF for that moment), or write plugin_load_add={_LIBRARY} into its option file and restart it"
)
_IS_READ_ONLY = 1290
_ACTIVE = "SELECT PLUGIN_STATUS = 'ACTIVE' FROM information_schema.PLUGINS WHERE PLUGIN_NAME = 'clone'"
_OUTSIDE = frozenset({"tablespace", "undo", "system", "schema"})
_MAY_INSERT = re.compile(
    r"GRANT (?:[A-Z ,]*\bINSERT\b[A-Z ,]*|ALL PRIVILEGES) ON `mysql`\.(?:`plugin`|\*) TO ", re.IGNORECASE
)


def is_loaded(session: Session) -> bool:
    """Raises ServerError."""
    return bool(session.scalar(_ACTIVE))


def refuse_unfit(session: Session, info: ServerInfo) -> None:
    """Raises RefusedError for a server that cannot be cloned, or not by this account; ServerError."""
    outside = [path for path in info.external if path.kind in _OUTSIDE]
    if outside:
        raise RefusedError(
            f"{len(outside)} files of this server lie outside its data directory: CLONE cannot copy them",
            detail="\n".join(f"{path.kind} {path.name}: {path.path}" for path in outside[:20]),
            hint="move them into the data directory, or install Percona XtraBackup of the server's series",
        )
    if info.encrypted:
        raise RefusedError(
            f"{len(info.encrypted)} tablespaces are encrypted: a clone of them cannot be started without their keyring",
            detail=", ".join(info.encrypted[:20]),
            hint="take logical backups of this server, or ALTER TABLE ... ENCRYPTION='N'",
        )
    if is_loaded(session):
        return
    if not _may_load(session):
        raise RefusedError(_NOT_LOADED, hint=_grant_hint(session))
    if info.read_only and not _may_write(session):
        raise RefusedError(_READ_ONLY, hint=_FOR_GOOD)


def _may_load(session: Session) -> bool:
    """By what SHOW GRANTS says; the server itself decides when it is tried."""
    if read_grants(session).allow("INSERT"):
        return True
    return any(_MAY_INSERT.match(str(row[0])) for row in session.query("SHOW GRANTS"))


def _may_write(session: Session) -> bool:
    """On a server that is read_only."""
    grants = read_grants(session)
    return not session.scalar("SELECT @@GLOBAL.super_read_only") and (
        grants.allow("SUPER") or grants.allow("CONNECTION_ADMIN")
    )


def _grant_hint(session: Session) -> str:
    user, _, host = str(session.scalar("SELECT CURRENT_USER()")).rpartition("@")
    return (
        f"either GRANT INSERT, DELETE ON mysql.plugin TO '{user}'@'{host}' (it is loaded for each backup then),"
        f" or load it for good as an administrator: INSTALL PLUGIN clone SONAME '{_LIBRARY}'"
    )


@contextlib.contextmanager
def loaded(connection: Connection, tell: Callable[[str], None]) -> Iterator[bool]:
    """The plugin is there meanwhile. Gives whether it was loaded for this, and then unloads it again; when that fails
    ``tell`` says so. Raises RefusedError when the account may not load it, ServerError."""
    with connection.connect() as session:
        ours = not is_loaded(session)
        if ours:
            try:
                session.execute(f"INSTALL PLUGIN clone SONAME '{_LIBRARY}'")
            except ServerError as error:
                if is_denied(error):
                    raise RefusedError(_NOT_LOADED, detail=error.detail, hint=_grant_hint(session)) from error
                if error_code(error) == _IS_READ_ONLY:  # by now
                    raise RefusedError(_READ_ONLY, detail=error.detail, hint=_FOR_GOOD) from error
                raise
    try:
        yield ours
    finally:
        if ours:
            try:
                # A connection of its own: the other one would idle for as long as the backup takes.
                with connection.connect() as session:
                    session.execute("UNINSTALL PLUGIN clone")
            except ServerError as error:
                tell(f"the clone plugin stays loaded: {error.message}: {error.detail}")
