"""Is the history that a backup was taken from still this server's own?

A server that was restored, or whose binary log was thrown away, may bear the same name, port and identity as before.
An increment on a backup of its other life would mix pages of two histories, and no tool would notice. So the server is
asked for whatever contradicts the place where the earlier backup ended: its log sequence number and its binary log.
Silence proves nothing (old binary logs are purged in due course), a contradiction does.

Measured with MariaDB 10.11.19: ``BINLOG_GTID_POS(file, pos)`` is NULL for a place that is not between two events, or
not there; it needs no privilege. ``server_uid`` is made of a network address and the port, so that a restored server
on the same host has the one of its source.
"""

from __future__ import annotations

import re

from backupd.engine.client import Session, is_denied
from backupd.model.errors import ServerError
from backupd.model.server import Flavour, Position, Role, ServerInfo

_LSN_VARIABLES = ("Innodb_lsn_current", "Innodb_redo_log_current_lsn")
"""MariaDB and Percona Server; MySQL from 8.0.30 on."""
_LSN_LINE = re.compile(r"^Log sequence number\s+(\d+)", re.MULTILINE)


def current_lsn(session: Session) -> int | None:
    """Up to which log sequence number the server has written; None where the account may not know. Raises
    ServerError."""
    for name in _LSN_VARIABLES:
        rows = session.query("SHOW GLOBAL STATUS LIKE %s", name)
        if rows:
            return int(rows[0][1])
    try:
        status = str(session.query("SHOW ENGINE INNODB STATUS")[0][2])
    except ServerError as error:
        if is_denied(error):
            return None
        raise
    found = _LSN_LINE.search(status)
    return int(found[1]) if found else None


def contradiction(session: Session, info: ServerInfo, position: Position, lsn: int) -> str:
    """What speaks against the server having been at ``position`` and ``lsn`` earlier; "" when nothing does.

    Raises ServerError.
    """
    now = current_lsn(session)
    if now is not None and now < lsn:
        return f"the server's log sequence number is {now}, before the backup's {lsn}: it was restored or made anew"
    return _of_log(session, info, position) or _of_gtids(session, info, position)


def _of_log(session: Session, info: ServerInfo, position: Position) -> str:
    """Is the place in the binary log there, or purged, or contradicted?"""
    base, number = _split(position.file)
    if not base or not info.log_bin:
        return ""
    try:
        sizes = {str(row[0]): int(row[1]) for row in session.query("SHOW BINARY LOGS")}
    except ServerError as error:
        if is_denied(error):
            return ""
        raise
    if position.file in sizes:
        return _of_place(session, info, position, size=sizes[position.file])
    numbers = [found for name in sizes for stem, found in [_split(name)] if stem == base]
    if numbers and max(numbers) < number:
        return f"the server's binary log has not come to {position.file} (yet again): it began again"
    return ""


def _of_place(session: Session, info: ServerInfo, position: Position, *, size: int) -> str:
    where = f"{position.file}:{position.pos}"
    if size < position.pos:
        return f"the server's binary log {position.file} has {size} bytes, the backup ended at {where}: it began again"
    if info.flavour is not Flavour.MARIADB or info.role is Role.REPLICA or not position.gtid:
        return ""  # a replica's own log may know other GTIDs than those that it has reached
    found = session.scalar("SELECT BINLOG_GTID_POS(%s, %s)", position.file, position.pos)
    if found is not None and _members(position.gtid) - _replicated(session) <= _members(str(found)):
        return ""
    told = "no event begins" if found is None else f"is GTID {str(found)[:200] or '(none)'}"
    return f"at {where} of the server's binary log {told}, the backup ended there at {position.gtid[:200]}"


def _of_gtids(session: Session, info: ServerInfo, position: Position) -> str:
    if not position.gtid or not info.position.gtid:
        return ""
    behind = f"the server is at GTID {info.position.gtid[:200]}, the backup ended at {position.gtid[:200]}"
    if info.flavour is not Flavour.MARIADB:
        contained = session.scalar("SELECT GTID_SUBSET(%s, %s)", position.gtid, info.position.gtid)
        return "" if contained else behind
    if info.role is Role.REPLICA:
        return ""
    reached = dict(map(_domain, [*_members(info.position.gtid), *_replicated(session)]))
    lost = any(reached.get(domain, 0) < sequence for domain, sequence in map(_domain, _members(position.gtid)))
    return behind if lost else ""


def _replicated(session: Session) -> frozenset[str]:
    """What a MariaDB server that was a replica once got from its source, and need not have in its own log."""
    return _members(str(session.scalar("SELECT @@GLOBAL.gtid_slave_pos") or ""))


def _split(file: str) -> tuple[str, int]:
    """(base name, number) of a binary log file; ("", 0) for anything else."""
    base, _, number = file.rpartition(".")
    return (base, int(number)) if base and number.isdecimal() else ("", 0)


def _members(gtid: str) -> frozenset[str]:
    return frozenset(member.strip() for member in gtid.split(",") if member.strip())


def _domain(member: str) -> tuple[str, int]:
    """Domain and sequence of one MariaDB GTID."""
    fields = member.split("-")
    return fields[0], int(fields[2]) if len(fields) == 3 and fields[2].isdecimal() else 0
