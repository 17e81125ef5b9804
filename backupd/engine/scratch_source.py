"""A scratch source: an empty server whose binary log is copies of archived files, for the applier of a restored copy.

It serves one sequence of names under its original names; where a replay ends is where its last file ends. What servers
do to files they are given (measured, MariaDB 10.11 and MySQL 9.7): truncate a last one that ends inside an event, purge
what is old by its modification time, try to recover after a last one that is marked as in use, or, when such a one was
renamed, refuse to start. So they get copies (or reflinks) of files cut between two transactions, unmarked, with expiry
off, and are asked afterwards what they serve. Nothing of the real source's settings is taken over.

It listens on 127.0.0.1, at a port and with a password of its own, in the private network of the restored copy: a
loopback that the two share with nobody. Where nothing can be confined that is the host's loopback.

A replay is narrowed down to some tables by the servers' own filters: rows of other tables are skipped, and so is a
statement that changes none of the tables; one that changes any of them is executed whole, so all tables that it names
must be there. Statements about accounts are skipped, too. Those about routines, scheduled events and servers are no
filter's business, and fail where what they mean (a schema, say) is not there: they are taken out of the served logs.
Only where data was logged as statements, which may call routines, those of the tables' own schemas stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import secrets
import shutil
import socket
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase

from backupd.engine.binlog import events
from backupd.engine.binlog.hole import copy_without, hole_of
from backupd.engine.binlog.walk import Walk, statement_at
from backupd.engine.server.launch import START_SECONDS, LaunchedServer, Options, ServerConfig, give
from backupd.engine.server.sandbox import DATABASE_USER, confine, is_available, server_options
from backupd.engine.sql.client import Session
from backupd.engine.toolset import NO_PATHS, row_for
from backupd.model.binlog import ReplayMethod, Stop, covers, plus, same
from backupd.model.errors import RefusedError, ToolError
from backupd.model.server_facts import Flavour, Position, ServerInfo, Version
from backupd.model.table import TableName
from backupd.process.command import Command, locate
from backupd.process.folders import PASSABLE, write_anew
from backupd.process.pipeline import run
from backupd.process.run_context import RunContext

NO_OPTIONS: Options = {}


def initialise(
    datadir: Path, *, program: str = "mariadb-install-db", options: Options = NO_OPTIONS, user: str = DATABASE_USER
) -> None:
    """Make ``datadir`` the empty system of a new server: root@localhost without a password, no test schema.

    ``program``: MariaDB's installer, or the server program itself for MySQL from 5.7 on. The folder is made if needed
    and given to ``user``. Raises ToolError, ToolMissingError.
    """
    datadir.mkdir(parents=True, exist_ok=True)
    give(datadir, user, 0o700)
    own = {**server_options(program), **options}
    arguments = [f"--{name.replace('_', '-')}" + ("" if value is None else f"={value}") for name, value in own.items()]
    if "install" in Path(program).name:
        arguments = ["--skip-test-db", "--skip-name-resolve", "--auth-root-authentication-method=normal", *arguments]
    else:
        arguments = ["--initialize-insecure", *arguments]
    # Any server that starts removes what it takes for left over by a crash from the temporary folder that it shares. It
    # is beside the datadir, where we may write for certain: /tmp is read-only for the service.
    temporary = datadir.with_name(f"{datadir.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        give(temporary, user)
        plain = Command(
            (program, "--no-defaults", f"--datadir={datadir}", *arguments),
            cwd=datadir,
            env={"TMPDIR": str(temporary)},
            user=user if os.geteuid() == 0 else None,
        )
        run(confine(plain, writable=[datadir, temporary]) if is_available(plain.user) else plain, timeout=START_SECONDS)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def installer_of(program: str, info: ServerInfo, *, paths: Mapping[str, str] = NO_PATHS) -> str:
    """What makes an empty system for the server ``program``: MySQL's does it itself. ``paths``: of programs that are
    not searched. Raises ToolMissingError."""
    server = Path(program)
    if info.flavour is not Flavour.MARIADB:
        return program
    names = row_for(info.flavour, info.version).install
    beside = [
        str(folder / name)
        for name in names
        for folder in (server.parent, server.parent.parent / "bin", server.parent.parent / "scripts")
    ]
    named = [paths[name] for name in names if paths.get(name)]
    return next((path for path in [*named, *beside] if os.access(path, os.X_OK)), locate(names[0]))


def empty_system(
    data: Path,
    program: str,
    *,
    installer: str,
    user: str = DATABASE_USER,
    templates: Path | None = None,
    options: Options = NO_OPTIONS,
) -> None:
    """Make ``data`` the empty system of the server ``program``, without an identity of its own; as ``initialise``.

    ``templates``: a folder where empty systems are kept for the next time, None to make it anew.
    """
    make = functools.partial(initialise, data, program=installer, options=options, user=user)
    if templates is None:
        make()
    else:
        status = Path(locate(program)).stat()
        mark = (
            f"{program} {status.st_size} {status.st_mtime_ns} {user}{f' {sorted(options.items())}' if options else ''}"
        )
        _from_template(data, templates / f"empty-{hashlib.sha256(mark.encode()).hexdigest()[:16]}", make)
    for name in ("auto.cnf", "binlog.index"):
        (data / name).unlink(missing_ok=True)


def _from_template(data: Path, template: Path, make: Callable[[], None]) -> None:
    """From that of this very program, kept by whoever comes first. It is made in ``data``, so that the server's
    user need not reach the folder of ``template``."""
    template.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    gate = os.open(template.with_name(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        if not template.is_dir():
            making = template.with_name(f"{template.name}.making")
            shutil.rmtree(making, ignore_errors=True)
            make()
            for left in (*data.glob("*.pem"), data / "auto.cnf"):
                left.unlink(missing_ok=True)
            _copy(data, making)
            making.rename(template)
            return
    finally:
        os.close(gate)
    _copy(template, data)


def _copy(source: Path, target: Path) -> None:
    run(Command(("cp", "-a", "--reflink=auto", "--sparse=always", f"{source}/.", str(target))), timeout=600)


_SPECIAL = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_"})
_CALLED = frozenset({"PROCEDURE", "FUNCTION", "PACKAGE"})
_BY_CHANNEL = Version(8, 0)


def patterns(tables: Sequence[TableName]) -> tuple[str, ...]:
    """Wild patterns that fit just these tables, and what is done to their schemas.

    Patterns, because with them statements about other schemas are left out: a server asks for the pattern of a table
    without a name.
    """
    schemas = dict.fromkeys(table.schema for table in tables)
    return (
        *(f"{_escaped(table.schema)}.{_escaped(table.table)}" for table in dict.fromkeys(tables)),
        *(f"{_escaped(schema)}." for schema in schemas),
    )


def mistakable(name: TableName) -> str:
    """The same for two tables that a filter may take for each other. Servers compare without regard to case and
    accents, even where names differ by these."""
    plain = unicodedata.normalize("NFKD", f"{name.schema}.{name.table}").casefold()
    return "".join("_" if char == "," else char for char in plain if not unicodedata.combining(char))


def _escaped(name: str) -> str:
    return name.translate(_SPECIAL)


def left_out(found: Walk, tables: Sequence[TableName]) -> Iterator[tuple[Path, int]]:
    """Statements that must not be executed when only ``tables`` are: path and position of each."""
    schemas = {table.schema for table in tables}
    for path, at, routine in found.routines if tables else ():
        called = found.by_statement and routine.kind in _CALLED and not routine.loaded
        if not (called and routine.schema in schemas):
            yield path, at


def skipped_statement(tables: Sequence[TableName]) -> str:
    """One that the filter skips, as short as the shortest that it may replace (``DROP EVENT e``)."""
    names = (TableName(one, other) for one, other in itertools.product(ascii_lowercase, repeat=2))
    free = next(name for name in names if name not in tables)
    return f"TRUNCATE {free.schema}.{free.table}"


def filter_replication(session: Session, info: ServerInfo, connection: str, tables: Sequence[TableName]) -> None:
    """Let a replication connection, which is there and stopped, apply these tables only; none: no filter."""
    wanted = patterns(tables)
    if info.flavour is Flavour.MARIADB:
        # A comma separates two patterns; "_" fits it, too.
        joined = ",".join(pattern.replace(",", "_") for pattern in wanted)
        session.execute(f"SET GLOBAL `{connection}`.replicate_wild_do_table = %s", joined)
        return
    marks = ", ".join(["%s"] * len(wanted))
    of_channel = f" FOR CHANNEL '{connection}'" if info.version >= _BY_CHANNEL else ""
    session.execute(f"CHANGE REPLICATION FILTER REPLICATE_WILD_DO_TABLE = ({marks}){of_channel}", *wanted)


USER = "replay"
HOST = "127.0.0.1"
_POOL = 16 * 1024 * 1024
"""Bytes: its own tables are empty, and what the logs need it has outside of the pool."""
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
class Leg:
    """What is replayed onto a private copy of a server like ``info``.

    ``files``: plain, original names, in order, the last one cut at the stop; they are copied, never changed. ``start``:
    where the copy is; by GTID alone when its file is not the first of the leg. ``folder``: for the scratch source,
    not there yet, passable for the server's user; it takes the room of the logs. ``transactions``: how many lie between
    the two (with the excluded ones), None where that is not known. ``tables``: only what these need is applied
    (``left_out``), onto a copy that holds no others; empty for all. ``found``: what the files hold from ``start`` on,
    up to ``stop``, once somebody has looked.
    """

    info: ServerInfo
    files: tuple[Path, ...]
    start: Position
    stop: Stop
    method: ReplayMethod
    folder: Path
    context: RunContext
    server_ids: tuple[int, ...] = ()
    transactions: int | None = None
    exclude: tuple[str, ...] = ()
    tables: tuple[TableName, ...] = ()
    found: Walk = field(default_factory=Walk)

    @property
    def mariadb(self) -> bool:
        """Is it one of MariaDB?"""
        return self.info.flavour is Flavour.MARIADB

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Name and bytes of each file."""
        return [(path.name, path.stat().st_size) for path in self.files]

    @property
    def closed(self) -> int:
        """Bytes by which the copy of the first file is shorter than it: its hole is closed."""
        return hole.size if self.files and (hole := hole_of(self.files[0])) else 0


@dataclass(frozen=True, slots=True)
class LogSource:
    """A running source. ``connection`` is of its own account, for looking; the applier uses ``port`` and
    ``password``. ``closed``: of the leg; positions in the first file are smaller by it here."""

    server: LaunchedServer
    port: int
    password: str
    closed: int = 0


@contextlib.contextmanager
def log_source(copy: LaunchedServer, leg: Leg) -> Iterator[LogSource]:
    """Serve the files of ``leg`` to ``copy``, which runs. Its ``folder`` is made the server's, and removed at the end.
    Raises RefusedError, ToolError when the server does not serve exactly these files, ServerError."""
    config, found = copy.config, leg.found
    data = leg.folder / "data"
    installer = installer_of(config.program, leg.info, paths=leg.context.programs)
    try:
        lay_out(leg.folder, config.user)
        empty_system(data, config.program, installer=installer, user=config.user, templates=leg.context.templates)
        closed = leg.closed
        names = _put(leg, data, config.user, closed)
        for path, at in left_out(found, leg.tables):
            here = at - closed if path == leg.files[0] else at
            _leave_out(data / path.name, here, skipped_statement(leg.tables))
        port, password = _port(), secrets.token_hex(16)
        source = LaunchedServer(
            ServerConfig(
                program=config.program,
                datadir=data,
                directory=leg.folder / "run",
                memory=_POOL,
                user=config.user,
                skip_grants=False,
                own_account=True,
                port=port,
                log_bin=names[0].rpartition(".")[0],
                server_id=_unlike(found.server_ids, config.server_id),
                network_of=copy.pid if copy.sandboxed else None,
                options={**_ALWAYS, **_gtid_options(leg.info, found)},
                statements=(
                    f"CREATE USER {USER}@'{HOST}' IDENTIFIED BY '{password}'",
                    f"GRANT REPLICATION SLAVE ON *.* TO {USER}@'{HOST}'",
                ),
            )
        )
        try:
            source.start()
            _refuse_other_files(source, leg, closed)
            yield LogSource(source, port, password, closed)
        finally:
            source.kill()  # nothing of it is kept
    finally:
        shutil.rmtree(leg.folder, ignore_errors=True)


def refuse_other_end(source: LaunchedServer, info: ServerInfo, gtids: str, *, start: str) -> None:
    """Raises RefusedError when the served files do not end where ``gtids`` are executed. ``start``: what the copy has
    executed; the files of a MySQL server that was made from a backup do not record all that is in its data. Raises
    ServerError."""
    with source.connection.connect() as session:
        if info.flavour is Flavour.MARIADB:
            last = str(session.scalar("SELECT @@GLOBAL.gtid_binlog_pos") or "")
            fits = same(last, gtids, mariadb=True)
        else:
            last = "".join(str(session.scalar("SELECT @@GLOBAL.gtid_executed") or "").split())
            fits = covers(gtids, last, mariadb=False) and covers(plus(start, last, mariadb=False), gtids, mariadb=False)
    if not fits:
        raise RefusedError(
            "the logs do not end at the stop position of the replay",
            detail=f"they end at {last or 'no GTID'}, the stop is at {gtids or 'no GTID'}",
            hint="fetch the logs again; `backupd timeline` lists the recoverable moments",
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

    def checkpoint(body: bytes) -> bytes:
        room = len(body) - 4
        return room.to_bytes(4, "little") + path.name.encode()[:room].ljust(room, b"0")

    _rewrite(path, at, events.CHECKPOINT, checkpoint)


def _leave_out(path: Path, at: int, statement: str) -> None:
    """Put ``statement``, which nothing comes of, into the place of the one in the event at ``at``."""

    def other(body: bytes) -> bytes:
        begin = statement_at(body)
        return body[:begin] + statement.encode().ljust(len(body) - begin)

    _rewrite(path, at, events.QUERY, other)


def _rewrite(path: Path, at: int, kind: int, new: Callable[[bytes], bytes]) -> None:
    """Make the event at ``at`` one of ``kind``, with the body, as long, that ``new`` makes of its own."""
    with path.open("r+b") as stream:
        checksum = events.CRC_SIZE if events.read_format(stream).checksums else 0
        stream.seek(at)
        when, _kind, server_id, length, end, flags = events.HEADER.unpack(stream.read(events.HEADER.size))
        body = new(stream.read(length - events.HEADER.size - checksum))
        event = events.HEADER.pack(when, kind, server_id, length, end, flags) + body
        stream.seek(at)
        stream.write(event + zlib.crc32(event).to_bytes(events.CRC_SIZE, "little")[:checksum])


def _gtid_options(info: ServerInfo, found: Walk) -> Options:
    if info.flavour is Flavour.MARIADB:
        return {}
    if not found.is_by_gtid:
        return {"gtid_mode": "OFF_PERMISSIVE"}
    return {"gtid_mode": "ON", "enforce_gtid_consistency": "ON"}


def lay_out(folder: Path, user: str) -> None:
    """The folder, the user's and empty: what a killed process left in it is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=PASSABLE, parents=True)
    give(folder, user, PASSABLE)


def _put(leg: Leg, data: Path, user: str, closed: int) -> list[str]:
    names = [path.name for path in leg.files]
    for path in leg.files:
        copy_log(path, data / path.name)
        clear_in_use(data / path.name)
        for marked, at in leg.found.marks:
            if marked == path:
                _unmark(data / path.name, at - closed if path == leg.files[0] else at)
        give(data / path.name, user)
    index = data / f"{names[0].rpartition('.')[0]}.index"
    write_anew(index, "".join(f"./{name}\n" for name in names).encode())
    give(index, user)
    return names


def copy_log(source: Path, target: Path) -> None:
    """A copy that shares its blocks where the filesystem can do that; without its hole where it has one."""
    if hole := hole_of(source):
        copy_without(hole, source, target)
        target.chmod(0o640)
        return
    with source.open("rb") as one, target.open("xb") as other:
        try:
            fcntl.ioctl(other.fileno(), _FICLONE, one.fileno())
        except OSError:
            shutil.copyfileobj(one, other, 8 * 1024 * 1024)
    target.chmod(0o640)


def _refuse_other_files(source: LaunchedServer, leg: Leg, closed: int) -> None:
    """Does it serve what it was given, byte for byte as long? Behind that it has opened a new file of its own."""
    with source.connection.connect() as session:
        served = [(str(row[0]), int(row[1])) for row in session.query("SHOW BINARY LOGS")]
    given = leg.sizes
    if given:
        given[0] = (given[0][0], given[0][1] - closed)
    if served[:-1] != given:
        missing = ", ".join(f"{name} ({size:,} bytes)" for name, size in given if (name, size) not in served)
        raise ToolError(
            "the scratch source does not serve all of its logs",
            detail=f"missing or changed: {missing or 'none'}\n{source.log_tail()}",
        )


def _unlike(taken: set[int], other: int) -> int:
    number = other
    while number in taken or number == other:
        number = secrets.randbelow(2**31) + 2**30
    return number


def _port() -> int:
    """One that is free on the host, where it may be needed; in a private network any is."""
    with socket.socket() as probe:
        for port in secrets.SystemRandom().sample(_PORTS, 50):
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                return port
    raise ToolError("no port of 127.0.0.1 is free", hint="list the listening programs: ss -lnt")
