"""Is the history that a backup was taken from still this server's own?

A server that was restored, or whose binary log was thrown away, may bear the same name, port and identity as before.
An increment on a backup of its other life would mix pages of two histories, and no tool would notice. So the server is
asked for whatever contradicts the place where the earlier backup ended: its log sequence number and its binary log.
The absence of a contradiction proves nothing: a copy that was promoted, a volume that was set back to a snapshot or a
datadir made anew writes its own log past every recorded number. So what is asked for besides is evidence: the binary
log must hold, right before the place where the backup ended, the very bytes that it held then (they tell times to the
second). Without a binary log, or where nobody's changes go into it, nothing can show that.

Measured with MariaDB 10.11.19: ``BINLOG_GTID_POS(file, pos)`` is NULL for a place that is not between two events, or
not there; it needs no privilege. ``server_uid`` is made of a network address and the port, so that a restored server
on the same host has the one of its source.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path

from backupd.engine.sql.client import Session, is_denied
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour, Position, Role, ServerInfo
from backupd.process.folders import as_its_owner, open_plain

_LSN_VARIABLES = ("Innodb_lsn_current", "Innodb_redo_log_current_lsn")
"""MariaDB and Percona Server; MySQL from 8.0.30 on."""
_LSN_LINE = "Log sequence number"
_CHECKPOINT_VARIABLES = ("Innodb_lsn_last_checkpoint", "Innodb_redo_log_checkpoint_lsn")
_CHECKPOINT_LINE = "Last checkpoint at"
_HEAD, _TAIL = 256, 16 * 1024
_IN_USE = slice(21, 23)
"""Flags of a binary log's first event: they tell whether the server still writes to the file."""
_LAYOUT = ("innodb_page_size", "innodb_data_file_path", "innodb_undo_tablespaces")
_KEY_PLUGINS = "encryption plugins"


def current_lsn(session: Session) -> int | None:
    """Up to which log sequence number the server has written; None where the account may not know. Raises
    ServerError."""
    return _number(session, _LSN_VARIABLES, _LSN_LINE)


def last_checkpoint(session: Session) -> int | None:
    """Where a recovery of the server would begin; None where the account may not know. Raises ServerError."""
    return _number(session, _CHECKPOINT_VARIABLES, _CHECKPOINT_LINE)


def _number(session: Session, variables: Sequence[str], line: str) -> int | None:
    for name in variables:
        rows = session.query("SHOW GLOBAL STATUS LIKE %s", name)
        if rows:
            return int(rows[0][1])
    try:
        status = str(session.query("SHOW ENGINE INNODB STATUS")[0][2])
    except ServerError as error:
        if is_denied(error):
            return None
        raise
    found = re.search(rf"^{line}\s+(\d+)", status, re.MULTILINE)
    return int(found[1]) if found else None


def log_digest(info: ServerInfo, position: Position) -> str:
    """SHA-256 of the binary log right before ``position``, and of the file's beginning. Raises OSError when it cannot
    be read, ValueError when it does not go so far."""
    path = Path(info.variables.get("log_bin_basename", "")).parent / position.file
    with as_its_owner(Path(info.datadir)):
        opened = open_plain(path, follow=True)
    with open(opened, "rb") as file:  # noqa: PTH123 - a descriptor has no path
        head = bytearray(file.read(min(_HEAD, position.pos)))
        begin = max(position.pos - _TAIL, len(head))
        file.seek(begin)
        tail = file.read(max(position.pos - begin, 0))
    if len(head) + len(tail) < min(position.pos, len(head) + _TAIL):
        raise ValueError(f"{path} ends before {position.pos}")
    head[_IN_USE] = bytes(len(head[_IN_USE]))
    return hashlib.sha256(head + tail).hexdigest()


def mute(info: ServerInfo) -> str:
    """Why the binary log of this server could not show that its history is still the same; "" when it could."""
    if not info.log_bin:
        return "without a binary log (log_bin) nothing shows that the server's history is still the same"
    updates = [info.variables[name] for name in ("log_slave_updates", "log_replica_updates") if name in info.variables]
    if info.role is Role.REPLICA and "ON" not in updates:
        return "of a replica without log_slave_updates nothing shows that its history is still the same"
    return ""


def keyed(digest: str, key: bytes) -> str:
    """What is stored of ``digest``: which key, and HMAC-SHA-256 with it. Who reads the store and holds a copy of the
    log cannot tell by it that they belong together."""
    return f"{_keyed(b'', key)[:8]}:{_keyed(digest.encode(), key)}"


def _keyed(content: bytes, key: bytes) -> str:
    return hmac.new(key, b"binary log" + content, hashlib.sha256).hexdigest()


def missing_evidence(info: ServerInfo, position: Position, stored: str, key: bytes) -> str:
    """Why it is not shown that the server is of the history in which ``position`` had the digest of which ``stored`` is
    the ``keyed`` form, or itself (in backups of earlier versions); "" when it is."""
    silent = mute(info)
    if silent:
        return silent
    if not stored:
        return "the binary log could not be read then, so nothing shows that the server's history is still the same"
    known, colon, _ = stored.partition(":")
    try:
        digest = log_digest(info, position)
        if stored == (keyed(digest, key) if colon else digest):
            return ""
    except OSError as error:
        return (
            f"the binary log {position.file} cannot be read ({error.strerror}), so nothing shows that the server's"
            " history is still the same"
        )
    except ValueError as error:
        return f"the binary log began again: {error}"
    return (
        f"before {position.file}:{position.pos} the binary log holds other events than it did then"
        if not colon or keyed("", key).startswith(f"{known}:")
        else "another identity key was used then, so nothing shows that the server's history is still the same"
    )


def layout_of(info: ServerInfo) -> dict[str, str]:
    """Digests of what decides which files the tool finds and whether it can read them: no increment may follow where it
    changed (measured: prepare fails on an ``ibdata2`` or an encrypted page that the full backup knew nothing of)."""
    # Key plugins have it in their names: file_key_management, keyring_file, hashicorp_key_management ...
    plugins = [plugin.partition("=")[0] for plugin in info.plugins if "key" in plugin.lower()]
    values = {name: info.variables.get(name, "") for name in _LAYOUT} | {_KEY_PLUGINS: ",".join(sorted(plugins))}
    return {name: hashlib.sha256(value.encode()).hexdigest()[:16] for name, value in values.items()}


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
