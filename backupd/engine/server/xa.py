"""XA transactions that are prepared: they wait for their coordinator, through a restart and on a restored copy.

Their rows are in no snapshot, yet the binary log holds them in front of the place that belongs to the snapshot; behind
it stands their XA COMMIT alone. So what was read in the snapshot cannot be rolled forward over that.
"""

from __future__ import annotations

from collections.abc import Collection

from backupd.engine.sql.client import Session, error_code, is_denied
from backupd.model.errors import ServerError

_REFUSED = (1401, 1064)
"""How MySQL 8 refuses who has not XA_RECOVER_ADMIN; and a server to which these words mean nothing."""


def prepared_xa(session: Session, *, mariadb: bool) -> tuple[str, ...]:
    """In the words of XA statements (``X'6731',X'',1``). Raises ServerError, also when the account may not ask (MySQL
    wants XA_RECOVER_ADMIN)."""
    if mariadb:
        return tuple(str(row[3]) for row in session.query("XA RECOVER FORMAT='SQL'"))
    told = []
    for number, first, _second, data in session.query("XA RECOVER CONVERT XID"):
        name = str(data).removeprefix("0x")
        told.append(f"X'{name[: 2 * int(first)]}',X'{name[2 * int(first) :]}',{number}")
    return tuple(told)


def visible_xa(session: Session, *, mariadb: bool) -> tuple[str, ...]:
    """The same; none where the account may not ask. Raises ServerError."""
    try:
        return prepared_xa(session, mariadb=mariadb)
    except ServerError as error:
        if not is_denied(error) and error_code(error) not in _REFUSED:
            raise
        return ()


def not_a_base(prepared: Collection[str]) -> str:
    """What they mean for a dump, as a sentence."""
    return (
        f"{len(prepared)} XA transactions were prepared when the snapshots were taken, so that this backup cannot "
        f"be rolled forward: {'; '.join(prepared)}"
    )
