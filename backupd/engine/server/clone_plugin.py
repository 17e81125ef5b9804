"""What CLONE needs of the server that copies itself: its plugin, and commits blocked at the moment that it represents.

The plugin is loaded for the backup where it is not, and unloaded afterwards.

``CommitLock`` blocks commits for the moment that a clone represents, so that a witness can be of the same moment.

CLONE copies the files, then the pages that changed meanwhile, and *then* takes the position that it represents, before
it copies the redo log. Nothing reports that moment, and nothing blocks commits then. So a global read lock is taken
shortly before: when little is left to copy. It is held while the clone passes the moment and a little longer, in which
the witness opens its snapshot; then both have the same position, whatever the clients do. The lock is given back when
the clone takes longer than expected: the witness is then of another position, which the proof says.

Measured on 9.7.4 with 2 busy cores, four clients that insert without a pause: 6 of 6 positions equal with 76 MB of
data (locked from the beginning), 8 of 8 with 1.3 GB (locked for its end); the longest statement of a client took 0.31
to 0.42 s, of which 0.3 s are the time given to the witness. Locked only when the clone was nearly over: 0 of 6.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Self

from backupd.engine.server.accounts import read_grants
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.model.errors import RefusedError, ServerError
from backupd.model.server_facts import ServerInfo, Version

FIRST = Version(8, 0, 17)
"""The first release that has it."""
_NOT_LOADED = "the clone plugin is not loaded, and this account may not load it"
_LIBRARY = "mysql_clone.so"
_READ_ONLY = "the clone plugin is not loaded, and this server is read_only: a backup cannot load it"
_FOR_GOOD = (
    f"load it permanently as an administrator: INSTALL PLUGIN clone SONAME '{_LIBRARY}' (set super_read_only to OFF "
    f"while you do so), or write plugin_load_add={_LIBRARY} into its option file and restart it"
)
_IS_READ_ONLY = 1290
_ACTIVE = "SELECT PLUGIN_STATUS = 'ACTIVE' FROM information_schema.PLUGINS WHERE PLUGIN_NAME = 'clone'"
_OUTSIDE = frozenset({"tablespace", "undo", "system", "schema"})


def is_loaded(session: Session) -> bool:
    """Raises ServerError."""
    return bool(session.scalar(_ACTIVE))


def refuse_unfit(session: Session, info: ServerInfo) -> None:
    """Raises RefusedError for a server that cannot be cloned, or not by this account; ServerError."""
    outside = [path for path in info.external if path.kind in _OUTSIDE]
    if outside:
        raise RefusedError(
            f"{len(outside)} files of this server are outside of its data directory: CLONE cannot copy them",
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
    # By what SHOW GRANTS says; the server itself decides when it is tried.
    grants = read_grants(session)
    if not grants.allow("INSERT", "mysql", "plugin"):
        raise RefusedError(_NOT_LOADED, hint=_grant_hint(session))
    may_write = grants.allow("SUPER") or grants.allow("CONNECTION_ADMIN")
    if info.read_only and (session.scalar("SELECT @@GLOBAL.super_read_only") or not may_write):
        raise RefusedError(_READ_ONLY, hint=_FOR_GOOD)


def _grant_hint(session: Session) -> str:
    user, _, host = str(session.scalar("SELECT CURRENT_USER()")).rpartition("@")
    return (
        f"either GRANT INSERT, DELETE ON mysql.plugin TO '{user}'@'{host}' (it is loaded for each backup then), or "
        f"load it permanently as an administrator: INSTALL PLUGIN clone SONAME '{_LIBRARY}'"
    )


@contextlib.contextmanager
def loaded(connection: Connection, report: Callable[[str], None]) -> Iterator[bool]:
    """The plugin is there meanwhile. Gives whether it was loaded for this, and then unloads it again; when that fails
    ``report`` says so. Raises RefusedError when the account may not load it, ServerError."""
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
                report(f"the clone plugin stays loaded: {error.message}: {error.detail}")


ANNOUNCEMENT = "commits are blocked at the moment of the clone"
"""The line that a witness waits for."""
LITTLE = 256 * 1024 * 1024
"""Bytes left to copy when the lock is asked for: some tenths of a second. A server that has no more than that in all is
locked before its clone begins."""
WAIT_SECONDS = 2
"""How long the lock may be waited for; writers queue behind it meanwhile."""
HOLD_SECONDS = 5.0
"""The longest that commits stay blocked before the clone has passed its moment."""
AFTERWARDS_SECONDS = 0.3
"""For the witness to open its snapshot, which takes milliseconds."""

_PROGRESS = "SELECT STAGE, STATE, ESTIMATE, DATA FROM performance_schema.clone_progress"
_LOOK_EVERY = 0.005


class CommitLock:
    """Watches a clone from a connection of its own. A context manager: afterwards nothing is blocked.

    ``size``: bytes that the clone will copy. ``report`` gets the announcement, and why there is none. Call ``look``
    often while the clone runs and ``ended`` when it is over. Nothing here raises: a witness that cannot be had never
    costs the backup.
    """

    def __init__(self, connection: Connection, size: int, report: Callable[[str], None]) -> None:
        self._connection, self._size, self._report = connection, size, report
        self._session: Session | None = None
        self._locker: Session | None = None
        self._locked_at = 0.0
        self._reported_at = 0.0
        self._over = False

    def look(self) -> None:
        """Take the lock when the moment is near, give it back when it does not come."""
        if self._over:
            time.sleep(_LOOK_EVERY)
            return
        try:
            if self._session is None:
                return
            stages = {
                str(stage): (str(state), int(data), int(estimate))
                for stage, state, estimate, data in self._session.query(_PROGRESS)
            }
        except ServerError as error:
            self._give_up(error)
            return
        if not self._locked_at and _is_near(stages):
            self._lock()
        elif self._locked_at:
            passed = stages.get("REDO COPY", ("", 0, 0))[0] in ("In Progress", "Completed")
            if passed:
                self._announce()
            elif time.monotonic() - self._locked_at > HOLD_SECONDS:
                self._over = True
                self._report(f"the clone did not come to its moment within {HOLD_SECONDS:g} s: commits go on")
                self.close()
            if self._reported_at and time.monotonic() - self._reported_at > AFTERWARDS_SECONDS:
                self._over = True
                self.close()
        time.sleep(_LOOK_EVERY)

    def ended(self) -> None:
        """The clone is complete."""
        if self._locked_at and not self._over:
            self._announce()
            time.sleep(max(0.0, self._reported_at + AFTERWARDS_SECONDS - time.monotonic()))
        self.close()

    def close(self) -> None:
        """Close both sessions, which gives the lock back."""
        for session in (self._locker, self._session):
            if session is not None:
                session.close()  # gives the lock back
        self._locker = self._session = None

    def __enter__(self) -> Self:
        try:
            self._session = self._connection.connect()
            self._locker = self._connection.connect()
            self._locker.execute(f"SET SESSION lock_wait_timeout = {WAIT_SECONDS}")
        except ServerError as error:
            self._give_up(error)
        else:
            if self._size < LITTLE:
                self._lock()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _lock(self) -> None:
        if self._locker is None:
            return
        try:
            self._locker.execute("FLUSH TABLES WITH READ LOCK")
        except ServerError as error:
            self._give_up(error)
            return
        self._locked_at = time.monotonic()

    def _announce(self) -> None:
        if not self._reported_at:
            if self._locker is None:
                return
            with contextlib.suppress(ServerError):
                self._locker.ping()
                self._reported_at = time.monotonic()
                self._report(ANNOUNCEMENT)

    def _give_up(self, error: ServerError) -> None:
        self._over = True
        self._report(f"commits were not blocked: {error.message}: {error.detail}")
        self.close()


def _is_near(stages: dict[str, tuple[str, int, int]]) -> bool:
    def left(stage: str) -> int | None:
        state, done, estimate = stages.get(stage, ("", 0, 0))
        return max(0, estimate - done) if state == "In Progress" else None

    files, pages = left("FILE COPY"), left("PAGE COPY")
    if pages is not None:
        return pages < LITTLE
    return files is not None and files < LITTLE
