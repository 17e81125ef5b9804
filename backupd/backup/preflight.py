"""Preflight: everything that would spoil a backup, reported at once, before it starts.

Each look is taken whatever the others found; what cannot be looked at because something else is missing is
simply left out. Nothing that a user can cause raises.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from io import BytesIO
from pathlib import Path

from backupd.backup.finding import Finding, error, fine, from_error, warning
from backupd.backup.server_checks import (
    Streaming,
    examine_binary_log,
    examine_coverage,
    examine_location,
    examine_owners,
    recommend,
)
from backupd.engine.dump.selection import dump_tools, try_out
from backupd.engine.server.accounts import Grants, hidden, needs, read_grants, unseen
from backupd.engine.server.backup_files import SETTING
from backupd.engine.server.probe import Probed, examine, has_rocksdb, read_dialect
from backupd.engine.server.replication import unordered
from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.dialect import dialect_of
from backupd.engine.sql.option_files import unreadable
from backupd.engine.sql.tables import SYSTEM_SCHEMAS, hurry, list_tables
from backupd.engine.toolset import physical_tool, refuse_clashes, refuse_unfit, server_program, shortcomings
from backupd.model.errors import BackupdError, KeyUnusableError, RefusedError, ServerError, ToolError
from backupd.model.server_facts import Role, ServerInfo, no_roll_forward
from backupd.model.table import TablePattern
from backupd.model.text import few, format_size, new_id
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.keyring import resolve_recipients, secret_fingerprints
from policies.policy import Logical
from storage.destination import Destination

_DUMPS = "logical backups"
_SHOWN = 10
_SCHEMAS = "SELECT SCHEMA_NAME FROM information_schema.SCHEMATA"
_HINT = "grant it on *.*, or let tables.include name only the schemas that it may see"

SMALLEST_FREE = 256 * 1024 * 1024
"""Bytes below which a destination or the spool counts as full."""
FEWEST_INODES = 10_000
EMPTIED_HINT = (
    "check that its disk is mounted. If it was emptied: restore repository.json as `backupd fsck` shows it; `backupd "
    "replicate` then copies the backups that other destinations hold, and `backupd backups delete ID` removes from the "
    "catalog those that none of them has"
)
"""What to do where a destination should hold backups and is bare."""
USUAL_RATIO = 0.5
"""Stored bytes of a first full backup per byte of data; 0.39 measured on sysbench tables with zstd -3."""


def examine_sight(session: Session, info: ServerInfo, grants: Grants, logical: Logical) -> Iterator[Finding]:
    """Raises ServerError."""
    include = [
        TablePattern.parse(text)
        for text in dict.fromkeys(text for _cadence, tables in logical.selections.values() for text in tables.include)
    ]
    yield from (warning(_DUMPS, sentence, _HINT) for sentence in unseen(grants, include))
    schemas = sorted({str(name) for (name,) in session.query(_SCHEMAS)} - set(SYSTEM_SCHEMAS))
    lacking: dict[tuple[str, str], list[str]] = defaultdict(list)
    for schema in schemas:
        if any(pattern.takes_all_of(schema) for pattern in include):
            for kind in hidden(grants, schema).items():
                lacking[kind].append(schema)
    for (what, lack), where in lacking.items():
        shown = few(where, _SHOWN)
        yield warning(_DUMPS, f"{grants.account} has {lack}: {what} of {shown} may be missing in them", _HINT)
    needed = dialect_of(info.flavour, info.version).xa_privilege
    if info.log_bin and needed and not grants.allow(needed):
        user, _, host = grants.account.rpartition("@")
        yield warning(
            _DUMPS,
            f"{grants.account} lacks {needed}: XA transactions that are prepared when a "
            "dump begins stay unknown, and a dump cannot be rolled forward over their commit",
            f"GRANT {needed} ON *.* TO '{user}'@'{host}'",
        )


@dataclass(frozen=True, slots=True)
class PreflightSpec:
    """What a backup of one server would use.

    ``new_destinations``: names of destinations that never held a backup: they are made ready, which a destination
    that once did and is empty now must never be. ``secret_files``: option and password files that nobody
    else should read. ``expected_new_bytes``: what recent backups stored anew, if there were any.
    ``restore_gnupg_home``: where test restores find decryption keys, and ``key_files``: what key plugins of copies may
    read, if they run on this machine.
    ``programs``: paths of tools that are not searched. ``streaming``: what is asked of the binary log; None without
    a stream. ``physical``: are physical backups taken? ``logical``: the logical leg of the policy.
    """

    server: str
    connection: Connection
    destinations: tuple[Destination, ...]
    gnupg_home: Path
    recipients: tuple[str, ...]
    spool: Path
    new_destinations: frozenset[str] = frozenset()
    restore_gnupg_home: Path | None = None
    key_files: tuple[Path, ...] | None = None
    secret_files: tuple[Path, ...] = ()
    expected_new_bytes: int | None = None
    programs: Mapping[str, str] = field(default_factory=dict)
    streaming: Streaming | None = None
    physical: bool = True
    logical: Logical | None = None


def preflight(spec: PreflightSpec, *, now: datetime) -> list[Finding]:
    """Look at everything. Errors first, then warnings, then what is well."""
    found: list[Finding] = []
    info = _server(spec, found)
    found += _keys(spec, now)
    expected = spec.expected_new_bytes
    if expected is None and info is not None:
        expected = int(info.data_bytes * USUAL_RATIO)
    for destination in spec.destinations:
        found += _destination(spec, destination, expected, now)
    if not spec.destinations:
        found.append(error("destinations", "no destination is configured", "name one under destinations"))
    found += _spool(spec.spool)
    found += _secret_files(spec.secret_files)
    order = {"error": 0, "warning": 1, "ok": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


def _server(spec: PreflightSpec, found: list[Finding]) -> ServerInfo | None:
    try:
        with spec.connection.connect() as session:
            hurry(session)
            grants = _grants(session, found, spec)
            probed = examine(session, tolerant=True)
            found.append(_described(spec, probed))
            found += examine_location(session, probed.info, physical=spec.physical)
            found += recommend(probed.info.engines)
            if spec.physical:
                found += _clashes(session, probed.info)
                found += _tool(spec, session, probed.info)
                found += _key_plugin(spec, probed.info)
            if spec.logical is not None:
                found += _dump_tools(spec, probed.info)
            if spec.logical is not None and grants is not None:
                found += examine_sight(session, probed.info, grants, spec.logical)
            found += _applied(session, probed.info)
            found += _rolled_forward(spec, probed.info)
            if spec.restore_gnupg_home is not None:
                found += _restores(spec, probed.info)
            if spec.streaming is not None:
                found += examine_binary_log(session, probed.info, spec.streaming, programs=spec.programs)
    except ServerError as problem:
        found.append(from_error("server", problem))
        return None
    found += [warning("server", sentence) for sentence in probed.warnings]
    if grants is None and probed.denied:
        found += [warning("privileges", sentence) for sentence in probed.denied]
    return probed.info


def _applied(session: Session, info: ServerInfo) -> Iterator[Finding]:
    if info.role is Role.REPLICA and (why := unordered(session, dialect_of(info.flavour, info.version))):
        yield warning(
            "replication",
            f"this replica cannot be placed in the history of its source: {why}",
            "turn gtid_mode on, or replica_preserve_commit_order (slave_preserve_commit_order); until then no replica "
            "of its source can be made of its backups, and a group takes another member",
        )


def _rolled_forward(spec: PreflightSpec, info: ServerInfo) -> Iterator[Finding]:
    """An error where the policy promises what cannot be had."""
    if why := no_roll_forward(info.flavour, info.version):
        report = error if spec.streaming is not None else warning
        yield report(
            "point in time",
            why,
            "`--to backup:ID` restores the moment of a backup; leave out `binlog` and "
            "objectives.rpo below the interval of backups in the policy of such a server, or upgrade the "
            "server to 5.7",
        )


def _restores(spec: PreflightSpec, info: ServerInfo) -> Iterator[Finding]:
    """Can a restored copy be started on this machine? Physical ones, and any roll-forward, need that."""
    try:
        program = server_program(info.flavour, info.version, paths=spec.programs)
    except ToolError as problem:
        yield warning("restores", f"no restored copy can be started on this machine: {problem.line}", problem.hint)
        return
    yield fine(
        "restores",
        f"{program.name} {program.version} at {program.path} matches the server's series and starts restored copies "
        "(not probed: a test restore runs it)",
    )


def _clashes(session: Session, info: ServerInfo) -> Iterator[Finding]:
    try:
        refuse_clashes(session, info)
    except RefusedError as problem:
        yield from_error("schemas", problem)
    except ToolError:
        return  # no tool for such a server: the look at the tool says so


def _described(spec: PreflightSpec, probed: Probed) -> Finding:
    info = probed.info
    return fine(
        "server",
        f"{spec.server} is {info.flavour} {info.version} ({info.role}), {info.tables} tables, "
        f"{format_size(info.data_bytes)}, at {spec.connection.address}",
    )


def _grants(session: Session, found: list[Finding], spec: PreflightSpec) -> Grants | None:
    try:
        grants = read_grants(session)
    except ServerError as problem:
        found.append(from_error("privileges", problem))
        return None
    wanted = needs(
        read_dialect(session), binlog=spec.streaming is not None, physical=spec.physical, rocksdb=has_rocksdb(session)
    )
    lacking = [need for need in wanted if not grants.allow(need.privilege)]
    if not lacking:
        found.append(fine("privileges", f"{grants.account} has every privilege that is needed"))
    user, _, host = grants.account.rpartition("@")
    for need in lacking:
        hint = f"GRANT {need.privilege} ON *.* TO '{user}'@'{host}'"
        if grants.roles:
            hint += f"; if a role gives it, make that a default role ({', '.join(grants.roles)})"
        report = error if need.required else warning
        found.append(report("privileges", f"{grants.account} lacks {need.privilege} on *.*: {need.purpose}", hint))
    return grants


def _tool(spec: PreflightSpec, session: Session, info: ServerInfo) -> Iterator[Finding]:
    try:
        physical = physical_tool(info, paths=spec.programs)
        refuse_unfit(session, info, physical.tool)
    except BackupdError as problem:
        yield from_error("tool", problem)
    else:
        tool = physical.tool
        yield fine(
            "tool",
            f"{tool.name} {tool.version} at {tool.path} fits {info.flavour} {info.version} (by its "
            "version; not probed: a copy)",
        )
        yield from (warning("tool", sentence) for sentence in shortcomings(physical, info, paths=spec.programs))
        yield from examine_owners(session, info, tool.name)
        yield from examine_coverage(list_tables(session), info.flavour, tool.name, spec.logical)


def _key_plugin(spec: PreflightSpec, info: ServerInfo) -> Iterator[Finding]:
    """MariaDB's: where one is loaded, no copy is prepared without its key files."""
    if spec.key_files == () and any(plugin.startswith("file_key_management") for plugin in info.plugins):
        yield error(
            "key files",
            f"{spec.server} encrypts with file_key_management, and the configuration names no key "
            "files: no physical backup of it can be restored or proved here",
            f"set the values of the server's file_key_management_filename and _filekey: {SETTING}",
        )


def _dump_tools(spec: PreflightSpec, info: ServerInfo) -> Iterator[Finding]:
    (best, *others), missing = dump_tools(info, paths=spec.programs)
    tool = best.tool
    for why in missing:
        yield warning(
            "dump tool",
            f"{why}; {tool.name} dumps the tables instead, which is slower",
            "install a supported version, or name the program under programs: in the configuration",
        )
    try:
        with tempfile.TemporaryDirectory(dir=spec.spool if spec.spool.is_dir() else None) as folder:
            try_out(best, spec.connection, Path(folder))
    except (BackupdError, OSError) as problem:
        reason = from_error("", problem) if isinstance(problem, BackupdError) else error("", str(problem))
        if others:
            yield warning(
                "dump tool",
                f"{tool.name} {tool.version} at {tool.path} cannot dump from this server, and "
                f"{others[0].tool.name} dumps the tables instead, which is slower: {reason.message}",
                reason.hint,
            )
        else:
            yield error("dump tool", f"no table can be dumped: {reason.message}", reason.hint)
    else:
        if not missing:
            yield fine(
                "dump tool",
                f"{tool.name} {tool.version} at {tool.path} connects and begins a dump; it writes the rows of tables",
            )


def _keys(spec: PreflightSpec, now: datetime) -> Iterator[Finding]:
    if not spec.recipients:
        yield error("keys", "no recipient is configured", "name one under encryption.recipients")
        return
    try:
        keys = resolve_recipients(spec.gnupg_home, spec.recipients, now=now)
        secret = secret_fingerprints(spec.gnupg_home)
    except (KeyUnusableError, ToolError) as problem:
        yield from_error("keys", problem)
        return
    for key in keys:
        if key.problem:
            yield error("keys", key.problem)
        elif key.warning:
            yield warning("keys", key.warning)
        else:
            until = f", until {key.expires_at:%Y-%m-%d}" if key.expires_at else ""
            yield fine("keys", f"{key.name} is {key.fingerprint}{until}")
    ours = {key.fingerprint for key in keys if key.fingerprint}
    if not any(key.problem for key in keys):
        try:
            Sealer(sorted(ours), spec.gnupg_home).seal(b"a check")
        except (KeyUnusableError, ToolError) as problem:
            yield from_error("keys", problem)
    yield from _decryption(spec, ours, secret)


def _decryption(spec: PreflightSpec, ours: set[str], secret: frozenset[str]) -> Iterator[Finding]:
    """Whoever takes over a machine that only takes backups must not be able to read the old ones."""
    if ours & secret:
        yield warning(
            "keys",
            f"the decryption key {', '.join(sorted(ours & secret))} is in {spec.gnupg_home}, on the host that takes "
            "backups: whoever takes over this host can read every backup",
            "keep only public keys there; decryption keys belong where restores run",
        )
    home = spec.restore_gnupg_home
    if home is None or (ours & secret and _same(home, spec.gnupg_home)):
        return
    try:
        here = secret_fingerprints(home) & ours
    except (KeyUnusableError, ToolError) as problem:
        yield from_error("restore keys", problem)
        return
    if here:
        yield warning(
            "restore keys",
            f"the decryption key {', '.join(sorted(here))} is also on this host ({home}): restores work here, but "
            "whoever takes over this host can read every backup",
            "run restores on another machine if that matters",
        )
    else:
        yield warning(
            "restore keys",
            f"{home} holds no decryption key of the recipients: nothing can be restored on this machine",
            "import the decryption key there, or run restores elsewhere",
        )


def _destination(
    spec: PreflightSpec, destination: Destination, expected: int | None, now: datetime
) -> Iterator[Finding]:
    subject = f"destination {destination.name}"
    try:
        if not destination.is_initialised():
            if destination.name not in spec.new_destinations:
                yield error(subject, "it held backups, and is now empty or missing", EMPTIED_HINT)
                return
            destination.initialise(now)
        key = f"check/{new_id(now)}"
        destination.put(key, BytesIO(b"written by a check, may be removed\n"))
        destination.delete(key)
        space = destination.space()
    except BackupdError as problem:
        yield from_error(subject, problem)
        return
    if space is None:
        yield fine(subject, "it can be written")
        return
    room = f"{format_size(space.free)} of {format_size(space.total)} are free"
    hint = "make room there, or let retention expire old backups"
    if space.free < max(SMALLEST_FREE, (expected or 0) // 4):
        yield error(subject, f"it is full: {room}{_wanted(expected)}", hint)
    elif space.free_inodes is not None and space.free_inodes < FEWEST_INODES:
        yield error(subject, f"only {space.free_inodes} more files can be created there", hint)
    elif space.free < 2 * (expected or 0):
        yield warning(subject, f"it is nearly full: {room}{_wanted(expected)}", hint)
    else:
        yield fine(subject, f"it can be written, {room}")


def _wanted(expected: int | None) -> str:
    return f"; the next backup may need {format_size(expected)}" if expected else ""


def _spool(spool: Path) -> Iterator[Finding]:
    try:
        spool.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=spool) as file:
            file.write(b"written by a check")
        free = shutil.disk_usage(spool).free
    except OSError as problem:
        hint = f"make it a folder that belongs to user id {os.geteuid()} on {socket.gethostname()}"
        yield error("spool", f"{spool} cannot be written: {problem.strerror}", hint)
        return
    if free < SMALLEST_FREE:
        yield error("spool", f"{spool} has only {format_size(free)} left", "make room there")
    else:
        yield fine("spool", f"{spool} can be written")


def _secret_files(paths: Iterable[Path]) -> Iterator[Finding]:
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError as problem:
            words, hint = unreadable(path, problem)
            yield error("secrets", f"{path} {words}", hint)
            continue
        if mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
            yield warning(
                "secrets",
                f"{path} holds a password and is open to others (mode {stat.S_IMODE(mode):04o})",
                f"chmod 600 {path}",
            )


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one == other
