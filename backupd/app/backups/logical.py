"""Taking a logical backup: resolve which tables, with what and how; execute without the catalog; record what came."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from backupd.app.backup_records import add_row, behind, clock_warning, record_of
from backupd.app.backups.limits import throttled
from backupd.app.context.server_identity import meet, problem_of, reason_of, refuse_strange_member
from backupd.app.context.settings import ServerSettings, spool_unusable
from backupd.app.context.trust import require_signing, signed_servers
from backupd.app.context.wiring import JobRun, Wiring, worker_count
from backupd.app.verify.consistency import pass_gate
from backupd.backup.commit import Documents
from backupd.backup.host_configuration import collect
from backupd.backup.logical import LogicalSpec, execute
from backupd.engine.dump.selection import dump_tools, select
from backupd.engine.server.probe import examine, uncovered
from backupd.engine.sql.tables import hurry
from backupd.engine.toolset import physical_tool
from backupd.model.backup_record import BackupKind, BackupRecord, Member
from backupd.model.errors import BackupdError, RefusedError, ToolError, UnknownNameError, UsageError
from backupd.model.manifest import Body, Header
from backupd.model.server_facts import Identity, Position, ServerInfo, no_roll_forward
from backupd.model.table import DumpedTable, TablePattern
from policies.document import suggestion
from policies.policy import Logical, Tables
from restore.runbook.backup_runbook import render_logical_runbook
from restore.runbook.shared_steps import render_unpack
from storage.destination import Destination

BY_HAND = "by hand"
"""The set of tables that somebody named for one run. No set of a policy can have a name with a space."""
_DEFAULTS = Logical.model_validate({"schedule": "every 24h"})
_NAMED = 50
"""Tables that a record names one by one."""
_MISSING = ("is missing", "are missing")


def dump_tables(
    wiring: Wiring,
    server: ServerSettings,
    run: JobRun,
    destinations: tuple[Destination, ...],
    begun: Callable[[], None],
) -> tuple[BackupRecord, BackupdError | None]:
    """Take one logical backup now, as ``run``; whose arguments may name a ``set`` of the policy, or patterns of
    ``tables``. Gives its record, and what is missing in it, if anything is. ``begun`` is called before anything is
    stored.

    Raises UnknownNameError for a set that the policy does not have, UsageError for a pattern that is none, and whatever
    made the backup fail; then nothing of it is left.
    """
    with _folder(wiring, server) as folder:
        spec, met = resolve(wiring, server, run, destinations, folder)
        with throttled(wiring, server, spec.connection, run) as throttle:
            begun()
            outcome = execute(
                replace(spec, throttle=throttle, send=throttle.send, pressure=throttle.pressure),
                run.context(wiring),
            )
    record = record_of(
        spec,
        outcome.header,
        outcome.facts,
        (
            *outcome.facts.warnings,
            *throttle.warnings,
            *_lines(outcome.dump.failed, *_MISSING),
            *_lines(outcome.dump.skipped, "was skipped", "were skipped"),
        ),
    )
    add_row(wiring, spec, record)
    record = replace(record, apart=met is not None and met.is_stranger)
    return record, problem_of(met, record) or _problem(record, outcome.dump.failed)


def resolve(
    wiring: Wiring, server: ServerSettings, run: JobRun, destinations: tuple[Destination, ...], folder: Path
) -> tuple[LogicalSpec, Identity | None]:
    """Freeze every decision about this backup, and who answers. Reads the server, the keyring and the tools; changes
    nothing."""
    policy = server.policy
    logical = policy.logical or _DEFAULTS
    table_set, tables = chosen_tables(server, run.job.arguments)
    include, exclude = _patterns(tables.include), _patterns(tables.exclude)
    keys, fingerprints = wiring.recipients()
    require_signing(wiring.settings, server.name)
    connection = server.connection()
    with connection.connect() as session:
        hurry(session)
        probed = examine(session)
        if why := no_roll_forward(probed.info.flavour, probed.info.version):
            raise RefusedError(
                f"logical backups of {probed.info.flavour} {probed.info.version} are not supported",
                detail=why,
                hint="take physical backups of such a server; leave out `logical` in its policy",
            )
        met = meet(wiring, server.name, session, probed.info, member=server.member)
        refuse_strange_member(server, met)
        gate = pass_gate(wiring, server, session, probed.info.role, run)
    tools, shortcomings = dump_tools(probed.info, paths=wiring.settings.programs)
    artefact = collect(connection, probed.info, policy.config_files)
    shared = shared_fields(wiring, server, run, destinations, render_logical_runbook)

    spec = LogicalSpec(
        **shared,
        connection=connection,
        info=probed.info,
        recipients=fingerprints,
        warnings=(
            *shortcomings,
            *artefact.warnings,
            *(f"{key.name}: {key.warning}" for key in keys if key.warning),
            *clock_warning(shared["behind"]),
            *filter(None, [reason_of(met)]),
            *gate.warnings,
        ),
        reason=reason_of(met),
        flags=gate.flags,
        config=lambda: artefact.content,
        select=partial(
            select,
            include=include,
            exclude=exclude,
            max_size=tables.max_size,
            always=_only_here(wiring, server, probed.info),
            unasked=not table_set,
        ),
        whole=_whole(include, exclude),
        include=include,
        tools=tools,
        folder=folder,
        table_set=table_set,
        threads=logical.threads,
        by_hand=table_set == BY_HAND,
        chunk_bytes=logical.chunk,
        max_lock=logical.max_lock.total_seconds(),
        long_queries=logical.long_queries.total_seconds(),
        patience=policy.limits.max_pause.total_seconds() if logical.on_long_queries == "wait" else 0.0,
        repair=logical.repair,
        count_rows=logical.count_rows,
    )
    return spec, met


def accepts_missing(server: ServerSettings) -> bool:
    """Does the policy take a backup for good enough in which tables are missing?"""
    return server.policy.logical is not None and server.policy.logical.partial == "accepted"


def chosen_tables(server: ServerSettings, arguments: Mapping[str, Any]) -> tuple[str, Tables]:
    """The name of the set that a job's arguments ask for, and its tables. Raises UnknownNameError for a set that the
    policy does not have, UsageError for a pattern that is none."""
    logical = server.policy.logical or _DEFAULTS
    named = str(arguments.get("set") or "")
    patterns = [str(pattern) for pattern in arguments.get("tables") or ()]
    if named and patterns:
        raise UsageError("--set and --tables cannot be given together", hint="a set of the policy names its tables")
    if patterns:
        _patterns(patterns)
        return BY_HAND, Tables.model_construct(include=tuple(patterns), exclude=(), max_size=None)
    if not named:
        return "", logical.tables
    if named not in logical.sets:
        raise UnknownNameError(
            f"the policy {server.policy_name} has no set {named!r} of tables{suggestion(named, logical.sets)}",
            hint=f"it has: {', '.join(logical.sets) or 'none'} (logical.sets)",
        )
    return named, logical.sets[named].tables


def backup_arguments(server: ServerSettings, kind: BackupKind, table_set: str, tables: Sequence[str]) -> dict[str, Any]:
    """What a job says of the tables that its backup takes. Raises UsageError, UnknownNameError for what no backup of
    this kind takes."""
    asked = {"set": table_set, "tables": list(tables)}
    if kind is BackupKind.LOGICAL:
        chosen_tables(server, asked)
    elif table_set or tables:
        raise UsageError("only logical backups can be limited to some tables", hint=f"kind: {BackupKind.LOGICAL}")
    return {name: value for name, value in asked.items() if value}


def _patterns(texts: Iterable[str]) -> tuple[TablePattern, ...]:
    try:
        return tuple(TablePattern.parse(text) for text in texts)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _only_here(wiring: Wiring, server: ServerSettings, info: ServerInfo) -> frozenset[str]:
    """Engines that the server's physical backups leave out, so that no table of them may be left out here for its
    size, and the set without a name takes all of them."""
    if server.policy.physical is None:
        return frozenset()
    try:
        name = physical_tool(info, paths=wiring.settings.programs).tool.name
    except ToolError:
        name = ""  # none is installed now; the one of the flavour will be
    return uncovered(info.engines, info.flavour, name)


def _whole(include: Sequence[TablePattern], exclude: Sequence[TablePattern]) -> Callable[[str], bool]:
    """Are all tables of a schema wanted, so that its views, routines and events are, too?"""

    def wanted(schema: str, patterns: Sequence[TablePattern]) -> bool:
        return any(pattern.takes_all_of(schema) for pattern in patterns)

    return lambda schema: wanted(schema, include) and not wanted(schema, exclude)


@contextmanager
def _folder(wiring: Wiring, server: ServerSettings) -> Iterator[Path]:
    """An empty private folder on the spool's disk, gone afterwards. Nobody else uses it: the server is locked; so what
    is in it is of a run that was killed."""
    path = wiring.settings.spool / "dump" / server.name
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise spool_unusable(wiring.settings.spool, error) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _lines(tables: Sequence[DumpedTable], one: str, many: str) -> tuple[str, ...]:
    lines = tuple(f"{table.name.shown} {one}: {table.reason}" for table in tables[:_NAMED])
    return lines if len(tables) <= _NAMED else (*lines, f"and {len(tables) - _NAMED} tables more {many}")


def _problem(record: BackupRecord, failed: Sequence[DumpedTable]) -> BackupdError | None:
    if not failed:
        return None
    count = "1 table is" if len(failed) == 1 else f"{len(failed)} tables are"
    return BackupdError(
        f"{count} missing in the logical backup {record.id}; the others can be restored",
        detail="\n".join(_lines(failed, *_MISSING)),
        hint="repair what is named (CHECK TABLE, REPAIR TABLE, a restore of that table from an older backup), "
        "then take "
        "the backup again",
    )


class SharedFields(TypedDict):
    """What is decided alike about a backup of any kind: these fields of its ``BackupSpec``."""

    backup_id: str
    server: str
    destinations: tuple[Destination, ...]
    gnupg_home: Path
    identity_key: bytes
    started_at: datetime
    documents: Callable[[Body, Header], Documents]
    behind: timedelta
    level: int
    workers: int
    member: Callable[[Position], Member | None]
    announce: Callable[[str], None]


def shared_fields(
    wiring: Wiring,
    server: ServerSettings,
    run: JobRun,
    destinations: tuple[Destination, ...],
    render: Callable[..., str],
) -> SharedFields:
    """``render`` makes the runbook of this kind. Raises RefusedError for an
    identity key that cannot be used, CatalogError."""
    encryption = wiring.settings.encryption
    late = behind(wiring, server.name)

    def documents(body: Body, header: Header) -> Documents:
        runbook = render(
            header,
            body,
            destinations=[d.name for d in destinations],
            configs={**server.required, **server.others},
            signed=server.name in signed_servers(wiring.settings),
        )
        return Documents(runbook=runbook.encode(), unpack=render_unpack(header.backup_id, body.entries, header.objects))

    return {
        "backup_id": run.job.id,
        "server": server.name,
        "destinations": destinations,
        "gnupg_home": encryption.gnupg_home,
        "identity_key": wiring.identity_key(),
        "started_at": wiring.clock() + late,
        "documents": documents,
        "behind": late,
        "level": encryption.compression_level,
        "workers": worker_count(),
        "member": lambda _position: Member(server.member, server.because) if server.member else None,
        "announce": partial(wiring.catalog.backups.announce, run.job.id),
    }
