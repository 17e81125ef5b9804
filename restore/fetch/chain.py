"""From manifests to a directory that a server can be started on: fetch every backup of a chain, then prepare.

``prepare`` applies redo and increments to a fetched copy, and believes the tool only after looking.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backupd.engine.physical.capture import LeftOut, PhysicalTool, nothing, verify_files
from backupd.engine.physical.datafiles import of_others, rejoin_renamed, remap, remove_dropped_schemas, verify_tables
from backupd.engine.physical.inventory import engines_of
from backupd.engine.physical.streaming import innodb_position, why_unprepared, without_left_out
from backupd.engine.physical.tablefiles import absent
from backupd.engine.server.backup_files import handed, known_options, named, write_known
from backupd.engine.server.launch import options_for_copy
from backupd.engine.server.probe import is_copied
from backupd.engine.server.snapshot import SEQUENCE, TABLE, list_objects
from backupd.engine.server.wsrep import recovered_positions
from backupd.engine.sql.client import Connection
from backupd.engine.sql.dialect import dialect_of
from backupd.model.backup_record import partial_words
from backupd.model.errors import ToolError, UnrestorableError
from backupd.model.job import Progress
from backupd.model.proof import Phase
from backupd.model.server_facts import ClusterPosition, Position, Receipts
from backupd.model.table import BaseTable, TableName
from backupd.process.pipeline import run
from backupd.process.run_context import RunContext
from restore.datadir.occupancy import (
    FOLDER_MODE,
    available_memory,
    choose_memory,
    hand_over,
    refuse_links,
    worker_account,
)
from restore.fetch.objects import fetch
from restore.fetch.sources import Loaded, Sources, read_when_thawed
from restore.planning.plan import bytes_of


def prepare(
    tool: PhysicalTool,
    base: Path,
    increments: Sequence[Path],
    receipts: Receipts,
    context: RunContext,
    *,
    memory: int,
    logs: Path,
    left_out: LeftOut = nothing,
) -> Position | None:
    """Make ``base`` a data directory that a server can be started on; gives the position in the binary log that InnoDB
    itself names, None where it names none.

    ``receipts``: of the last backup applied; ``memory`` in bytes; ``logs``: folder that keeps each step's
    whole stderr (0600); ``left_out``: is such a file (path in a data directory) missing on purpose? Raises ToolError
    when a step fails, UnrestorableError where it could not make data of the backup or did not get as far as it had to,
    DamagedError when files are missing, RefusedError for key files of others, CancelledError. After an error the files
    have to be fetched again.
    """
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    steps = tool.prepare(base, increments, memory=memory)
    account = worker_account()
    known = known_options(base)
    for folder in (base, *increments):
        hand_over(folder, account, folder_mode=FOLDER_MODE)
    texts: list[str] = []
    with handed(known, context.key_files, base, (account.uid, account.gid) if os.geteuid() == 0 else None) as options:
        if steps:
            write_known(base, options)
        for number, step in enumerate(steps, start=1):
            report = partial(_report, context, number, len(steps))
            report(step.title)
            log = logs / f"prepare-{number}.log"
            log.unlink(missing_ok=True)
            if step.before is not None:
                for folder in (base, *increments):
                    refuse_links(folder)  # of a program that worked on what may be forged
                step.before()
            try:
                run(step.command, log=log, on_stderr=report, cancel=context.cancel)
            except ToolError as error:
                raise why_unprepared(error, without_left_out(_text(log), left_out)) from error
            texts.append(_text(log))
    if steps:
        write_known(base, named(known, context.key_files))
    refuse_links(base)
    tool.verify_prepared(base, receipts, texts, left_out=left_out)
    return innodb_position(texts)


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def _report(context: RunContext, number: int, total: int, line: str) -> None:
    context.report(Progress("prepare", files_done=number - 1, files_total=total, note=line.strip()[:200]))


@dataclass(frozen=True, slots=True)
class Built:
    """``options``: what a server needs in its option file to read these files. ``position``: InnoDB's own position in
    the binary log, None where it records none; ``node``: in the history of a Galera cluster."""

    warnings: tuple[str, ...]
    options: Mapping[str, str | None]
    position: Position | None = None
    node: ClusterPosition | None = None


def merged(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Each phase once, with the time and bytes of all its parts, in the order in which they began."""
    found: dict[str, Phase] = {}
    for phase in phases:
        before = found.get(phase.name, Phase(phase.name, 0.0))
        found[phase.name] = Phase(phase.name, before.seconds + phase.seconds, before.bytes + phase.bytes)
    return tuple(found.values())


def data_bytes(chain: Sequence[Loaded]) -> int:
    """Bytes of the prepared copy."""
    return bytes_of("restored", [loaded.header.stats.bytes_source for loaded in chain])


def backup_folders(chain: Sequence[Loaded], folder: Path) -> list[Path]:
    """Where below ``folder`` each backup of ``chain`` is fetched to."""
    return [folder / "data", *(folder / f"increment-{number}" for number in range(1, len(chain)))]


def fetch_members(chain: Sequence[Loaded], folder: Path, sources: Sources, context: RunContext) -> tuple[str, ...]:
    """Bring every backup of ``chain`` to its place below ``folder``; gives the damage that was got around.

    What an earlier call left there is used as far as its hashes are right, whatever that call was doing when it ended:
    an increment that was half applied, or applied wholly, cannot be applied again, so every attempt begins with all
    members exactly as they were backed up. Each member is fetched when the thaw wait lets it through.
    """
    shutil.rmtree(folder / "external", ignore_errors=True)
    repaired: list[str] = []
    with context.watch.phase("fetched", sum(loaded.header.stats.bytes_source for loaded in chain)):
        for loaded, goal in zip(chain, backup_folders(chain, folder), strict=True):
            fetched = read_when_thawed(
                sources.thaw,
                loaded.header.backup_id,
                partial(fetch, loaded, sources, goal, context, durable=False),
                context,
            )
            repaired += fetched.repaired
            verify_files(goal, {entry.path: entry.size for entry in loaded.body.entries})
    return tuple(repaired)


def compare_listed(base: Path, last: Loaded) -> tuple[str, ...]:
    """Are the tables that the manifest lists in the prepared ``base``, but for those that the backup is known to lack?
    These are reported. Raises UnrestorableError with the names of all others. Of a part of a backup only what is
    there is compared."""
    facts = last.body.facts
    if facts.inventory is None:
        return ()
    files = [path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()]
    known = frozenset(facts.missing)
    nothing_done = "nothing was put in place; "
    if last.whole is None:
        lost = [table.name for table in absent(_copied(last), files, {})]
        _refuse_lost(lost, last, "are not in the prepared copy", nothing_done)
    if dialect_of(facts.server.flavour, facts.server.version).lists_tables_under_lock:
        where = "have the tablespace of another table, or none, in the prepared copy"
        _refuse_lost(of_others(base, files, _copied(last)), last, where, nothing_done)
    if not known or last.whole is not None:
        return ()
    return (partial_words(last.header.backup_id, (name.shown for name in known)),)


def compare_named(connection: Connection, last: Loaded) -> tuple[str, ...]:
    """The same by name, asked of the first server on the copy before anything is replayed: it may have the files of a
    table and know nothing of the table. Gives what to say of tables that it has besides. Raises
    UnrestorableError, ServerError."""
    facts = last.body.facts
    if facts.inventory is None or last.whole is not None:
        return ()
    with connection.connect() as session:
        listed, engines = list_objects(session), engines_of(session)
    there = listed.get(TABLE, frozenset()) | listed.get(SEQUENCE, frozenset())
    _refuse_lost(
        [table.name for table in _copied(last) if str(table.name) not in there],
        last,
        "are unknown to a server on the restored copy",
    )
    # Their tablespaces are not compared: the copy's dictionary has the same numbers whatever its files hold, and what
    # is in them is compared by the witness.
    _refuse_lost(
        [
            table.name
            for table in _copied(last)
            if table.engine and engines.get(table.name, table.engine) != table.engine
        ],
        last,
        "are of another engine in the restored copy, so they are other tables",
    )
    besides = sorted(there - {str(table.name) for table in facts.inventory})
    named = ", ".join(TableName.parse(name).shown for name in besides)
    return (
        (f"{len(besides)} tables of the restored copy are not in the list of {last.header.backup_id}: {named}",)
        if besides
        else ()
    )


def _copied(last: Loaded) -> list[BaseTable]:
    """What the tool copies of the tables that the backup lists."""
    facts = last.body.facts
    return [table for table in facts.inventory or () if is_copied(table.engine, facts.server.flavour, facts.tool.name)]


def _refuse_lost(tables: Iterable[TableName], last: Loaded, where: str, done: str = "") -> None:
    lost = [table.shown for table in tables if table not in last.body.facts.missing]
    if lost:
        raise UnrestorableError(
            f"{len(lost)} tables that backup {last.header.backup_id} lists {where}",
            lost,
            hint=f"{done}restore another backup, or these tables from another",
        )


def assemble(
    chain: Sequence[Loaded],
    folder: Path,
    tool: PhysicalTool,
    context: RunContext,
    *,
    final_store: Path | None = None,
    left_out: LeftOut = nothing,
) -> Built:
    """Make ``folder/data`` a prepared copy of the last backup of the fetched ``chain``. Nothing is synced.

    Tablespaces that lay outside the source's data directory come to ``folder/external``, and the links to them
    name ``final_store``, where they will be when a server is started (None: where they are).
    ``left_out``: is such a file (path in a data directory) missing on purpose?
    """
    warnings: list[str] = []
    store = folder / "external"
    base, *increments = backup_folders(chain, folder)
    with context.watch.phase("prepared", sum(loaded.header.stats.bytes_source for loaded in chain)):
        redo = sum(tool.redo_bytes(goal) for goal in (base, *increments))
        memory = choose_memory(redo=redo, available=available_memory(), cap=context.memory)
        position = prepare(
            tool,
            base,
            increments,
            chain[-1].body.facts.receipts,
            context,
            memory=memory,
            logs=folder / "logs",
            left_out=left_out,
        )
        body = chain[-1].body
        listed = [entry.path for entry in body.entries]
        verify_tables(base, listed, tables=body.facts.inventory, partial=left_out is not nothing)
        remove_dropped_schemas(base, listed)
        warnings += compare_listed(base, chain[-1])
        for increment in increments:
            shutil.rmtree(increment)
        rejoined = rejoin_renamed(base)
        moved = remap(base, store=store, final=final_store)
    if moved:
        warnings.append(f"{len(moved)} tablespaces with a DATA DIRECTORY are now in {final_store or store}")
        info = chain[-1].body.facts.server
        if dialect_of(info.flavour, info.version).refuses_second_copy:
            warnings.append(
                "where the source's own files of these are there, too, a server of MySQL before 8.0 opens "
                "neither (error 1812): restore with --start, whose first start does not see the source's"
            )
    if rejoined:
        warnings.append(
            "renamed into another schema at the source, where the server may not find their data after its"
            f" next restart (RENAME TABLE back, before that, mends it): {', '.join(rejoined)}"
        )
    return Built(
        tuple(warnings),
        options_for_copy(base, chain[-1].body.facts.server.variables),
        position,
        _of_node(folder / "logs", 1 + len(increments)),
    )


def _of_node(logs: Path, steps: int) -> ClusterPosition | None:
    """What the last step of a prepare found, whose outputs are in ``logs``."""
    found = recovered_positions(_text(logs / f"prepare-{steps}.log"))
    return found[-1] if found else None
