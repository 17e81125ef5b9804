"""A scratch source: an empty server whose binary log is copies of archived files, for the applier of a restored copy.

It serves one sequence of names under its original names; where a replay ends is where its last file ends. What servers
do to files they are given (measured, MariaDB 10.11 and MySQL 9.7): truncate a last one that ends inside an event, purge
what is old by its modification time, try to recover after a last one that is marked as in use, or, when such a one was
renamed, refuse to start. So they get copies (or reflinks) of files cut between two transactions, unmarked, with expiry
off, and are asked afterwards what they serve. Nothing of the real source's settings is taken over.

It listens on 127.0.0.1, at a port and with a password of its own, in the private network of the restored copy: a
loopback that the two share with nobody. Where nothing can be confined that is the host's loopback.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import shutil
import socket
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.binlog import events
from backupd.engine.binlog.walk import Walk, statement_at
from backupd.engine.instance.launch import LaunchedServer, Options, ServerConfig, give
from backupd.engine.replay.empty_system import empty_system
from backupd.engine.replay.table_filter import left_out, skipped_statement
from backupd.model.errors import RefusedError, ToolError
from backupd.model.gtid import covers, plus, same
from backupd.model.server_facts import Flavour, ServerInfo
from backupd.model.table import TableName
from backupd.process.folders import PASSABLE, write_anew

USER = "replay"
HOST = "127.0.0.1"
_LEAST_POOL, _MOST_POOL = 16 * 1024 * 1024, 64 * 1024 * 1024
_MOST_PACKET = "1G"
_FICLONE = 0x40049409
_PORTS = range(20_000, 60_000)

_ALWAYS: Options = {
    "max_allowed_packet": _MOST_PACKET,
    "max_binlog_size": "1G",
    "sync_binlog": "0",
    "innodb_flush_log_at_trx_commit": "0",
    "loose_expire_logs_days": "0",
    "loose_binlog_expire_logs_seconds": "0",
    "loose_binlog_expire_logs_auto_purge": "OFF",
    "loose_encrypt_binlog": "OFF",
    "loose_binlog_encryption": "OFF",
    "loose_gtid_strict_mode": "OFF",
}


@dataclass(frozen=True, slots=True)
class LogSource:
    """A running source. ``connection`` is of its own account, for looking; the applier uses ``port`` and
    ``password``."""

    server: LaunchedServer
    port: int
    password: str


@contextlib.contextmanager
def log_source(
    copy: LaunchedServer,
    info: ServerInfo,
    files: Sequence[Path],
    found: Walk,
    *,
    folder: Path,
    installer: str,
    memory: int = 0,
    templates: Path | None = None,
    tables: Sequence[TableName] = (),
) -> Iterator[LogSource]:
    """Serve ``files`` (plain, original names, in order; ``found`` is what they hold) to ``copy``, which runs.

    ``folder``: private and empty or not there yet, made the server's; removed at the end. ``installer``: what makes an
    empty system. ``memory``: bytes it may use, 0 for the least. ``templates``: a folder where empty systems are kept
    for the next time. ``tables``: the replay is narrowed down to these (see tablefilter). Raises RefusedError,
    ToolError when the server does not serve exactly these files, ServerError.
    """
    config = copy.config
    data = folder / "data"
    try:
        lay_out(folder, config.user)
        empty_system(data, config.program, installer=installer, user=config.user, templates=templates)
        names = _put(files, found, data, config.user)
        for path, at in left_out(found, tables):
            _leave_out(data / path.name, at, skipped_statement(tables))
        port, password = _port(), secrets.token_hex(16)
        basename = names[0].rpartition(".")[0]
        source = LaunchedServer(
            ServerConfig(
                program=config.program,
                datadir=data,
                directory=folder / "run",
                memory=_pool(memory),
                user=config.user,
                skip_grants=False,
                own_account=True,
                port=port,
                log_bin=basename,
                server_id=_unlike(found.server_ids, copy.config.server_id),
                network_of=copy.pid if copy.sandboxed else None,
                options={**_ALWAYS, **_gtid_options(info, found)},
                statements=(
                    f"CREATE USER {USER}@'{HOST}' IDENTIFIED BY '{password}'",
                    f"GRANT REPLICATION SLAVE ON *.* TO {USER}@'{HOST}'",
                ),
            )
        )
        try:
            source.start()
            _refuse_other_files(source, files)
            yield LogSource(source, port, password)
        finally:
            source.kill()  # nothing of it is kept
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def served_gtids(source: LaunchedServer, info: ServerInfo) -> tuple[str, str]:
    """Executed before the first served event, and after the last, as the source itself found in the files. MariaDB
    tells the second only. Raises ServerError."""
    with source.connection.connect() as session:
        if info.flavour is Flavour.MARIADB:
            return "", str(session.scalar("SELECT @@GLOBAL.gtid_binlog_pos") or "")
        first, last = session.query("SELECT @@GLOBAL.gtid_purged, @@GLOBAL.gtid_executed")[0]
        return _flat(first), _flat(last)


def refuse_other_end(source: LaunchedServer, info: ServerInfo, gtids: str, *, start: str) -> None:
    """Raises RefusedError when the served files do not end where ``gtids`` are executed. ``start``: what the copy has
    executed; the files of a MySQL server that was made from a backup do not tell of all that is in its data."""
    mariadb = info.flavour is Flavour.MARIADB
    _first, last = served_gtids(source, info)
    fits = (
        same(last, gtids, mariadb=True)
        if mariadb
        else (covers(gtids, last, mariadb=False) and covers(plus(start, last, mariadb=False), gtids, mariadb=False))
    )
    if not fits:
        raise RefusedError(
            "the logs do not end where the replay is to stop",
            detail=f"they end at {last or 'no GTID'}, the stop is at {gtids or 'no GTID'}",
            hint="`backupd timeline` names the recoverable moments; fetch the logs again",
        )


def clear_in_use(path: Path) -> None:
    """Unmark a log that its server had open: the format description's checksum is computed without the mark."""
    with path.open("r+b") as stream:
        stream.seek(events.FLAGS_AT)
        flags = stream.read(1)
        if flags and flags[0] & events.IN_USE:
            stream.seek(events.FLAGS_AT)
            stream.write(bytes([flags[0] & ~events.IN_USE]))


def _unmark(path: Path, at: int) -> None:
    """Make the event at ``at``, which says that the rest is encrypted, a checkpoint event, which means nothing in a log
    that is not recovered from. A server that encrypts its logs sends that event along with those that it has decrypted
    (measured, MariaDB 10.11), and whoever reads it from a file asks for the key."""
    with path.open("r+b") as stream:
        checksums = events.read_format(stream).checksums
        stream.seek(at)
        when, _kind, server_id, length, end, flags = events.HEADER.unpack(stream.read(events.HEADER.size))
        room = length - events.HEADER.size - 4 - (events.CRC_SIZE if checksums else 0)
        body = room.to_bytes(4, "little") + path.name.encode()[:room].ljust(room, b"0")
        event = events.HEADER.pack(when, events.CHECKPOINT, server_id, length, end, flags) + body
        stream.seek(at)
        stream.write(event + (zlib.crc32(event).to_bytes(events.CRC_SIZE, "little") if checksums else b""))


def _leave_out(path: Path, at: int, statement: str) -> None:
    """Put ``statement``, which nothing comes of, into the place of the one in the event at ``at``."""
    with path.open("r+b") as stream:
        checksums = events.read_format(stream).checksums
        stream.seek(at)
        header = stream.read(events.HEADER.size)
        when, _kind, server_id, length, end, flags = events.HEADER.unpack(header)
        body = stream.read(length - events.HEADER.size - (events.CRC_SIZE if checksums else 0))
        begin = statement_at(body)
        text = statement.encode().ljust(len(body) - begin)
        event = events.HEADER.pack(when, events.QUERY, server_id, length, end, flags) + body[:begin] + text
        stream.seek(at)
        stream.write(event + (zlib.crc32(event).to_bytes(events.CRC_SIZE, "little") if checksums else b""))


def _gtid_options(info: ServerInfo, found: Walk) -> Options:
    if info.flavour is Flavour.MARIADB:
        return {}
    if not found.is_by_gtid:
        return {"gtid_mode": "OFF_PERMISSIVE"}
    return {"gtid_mode": "ON", "enforce_gtid_consistency": "ON"}


def _pool(memory: int) -> int:
    """Its own tables are empty: little is enough, and what the logs need it has outside of the pool."""
    return max(_LEAST_POOL, min(memory // 4, _MOST_POOL))


def lay_out(folder: Path, user: str) -> None:
    """The folder, the user's and empty: what a killed process left in it is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=PASSABLE, parents=True)
    give(folder, user, PASSABLE)


def _put(files: Sequence[Path], found: Walk, data: Path, user: str) -> list[str]:
    names = [path.name for path in files]
    for path in files:
        copy_log(path, data / path.name)
        clear_in_use(data / path.name)
        for marked, at in found.marks:
            if marked == path:
                _unmark(data / path.name, at)
        give(data / path.name, user)
    index = data / f"{names[0].rpartition('.')[0]}.index"
    write_anew(index, "".join(f"./{name}\n" for name in names).encode())
    give(index, user)
    return names


def copy_log(source: Path, target: Path) -> None:
    """A copy that shares its blocks where the filesystem can do that."""
    with source.open("rb") as one, target.open("xb") as other:
        try:
            fcntl.ioctl(other.fileno(), _FICLONE, one.fileno())
        except OSError:
            shutil.copyfileobj(one, other, 8 * 1024 * 1024)
    target.chmod(0o640)


def _refuse_other_files(source: LaunchedServer, files: Sequence[Path]) -> None:
    """Does it serve what it was given, byte for byte as long? Behind that it has opened a new file of its own."""
    with source.connection.connect() as session:
        served = [(str(row[0]), int(row[1])) for row in session.query("SHOW BINARY LOGS")]
    wanted = [(path.name, path.stat().st_size) for path in files]
    if served[:-1] != wanted:
        missing = ", ".join(f"{name} ({size:,} bytes)" for name, size in wanted if (name, size) not in served)
        raise ToolError(
            "the scratch source does not serve the logs that it was given",
            detail=f"missing or changed: {missing or 'none'}\n{source.log_tail()}",
        )


def _unlike(taken: set[int], other: int) -> int:
    return next(
        number
        for number in iter(lambda: secrets.randbelow(2**31) + 2**30, 0)
        if number not in taken and number != other
    )


def _port() -> int:
    """One that is free on the host, where it may be needed; in a private network any is."""
    with socket.socket() as probe:
        for port in secrets.SystemRandom().sample(_PORTS, 50):
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                return port
    raise ToolError("no port of 127.0.0.1 is free", hint="look at what listens there: ss -lnt")


def _flat(gtid: object) -> str:
    return "".join(str(gtid or "").split())
