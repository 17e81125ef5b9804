"""What the tools' prepare runs have in common: their command line, and what is looked at before and after."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from backupd.engine.instance.receipts import BACKUP_CNF, read_receipts
from backupd.engine.instance.sandbox import can_confine, confine, worker
from backupd.engine.physical.capture import LeftOut, PrepareStep
from backupd.engine.physical.streaming import COMPLETED, LEFT_OPEN
from backupd.model.errors import OTHER_BACKUP, BackupdError, DamagedError, StreamError, ToolError, UnrestorableError
from backupd.model.server_facts import Position, Receipts, Tool
from backupd.process.command import Command

_MIB = 1024 * 1024


def prepare_step(
    tool: Tool, title: str, base: Path, increment: Path | None, *, memory: int, switches: Sequence[str] = ()
) -> PrepareStep:
    """One run of ``--prepare`` as ``worker``; ``memory`` in bytes. backup-my.cnf is named, because page size and layout
    of the system tablespace stand in it, and nothing but it may be read: ``write_known`` has made it ours."""
    argv = [
        tool.path,
        f"--defaults-file={base / BACKUP_CNF}",
        "--prepare",
        *switches,
        f"--target-dir={base}",
        f"--use-memory={max(memory // _MIB, 1)}M",
    ]
    if increment is not None:
        argv.append(f"--incremental-dir={increment}")
    plain = Command(tuple(argv), cwd=base, user=worker())
    # The tool renames files from the increment to the base, which two mounts of their own would forbid.
    writable = [base] if increment is None else sorted({base.parent, increment.parent})
    command = confine(plain, writable=writable) if can_confine(tool.path) else plain
    return PrepareStep(title, command, plain)


def check_chain(base: Path, increments: Sequence[Path], *, redo: str, startable: Sequence[str]) -> None:
    """Does each backup of a chain continue the one before it, with its receipts and its redo (a file called
    ``redo``)? ``startable``: what the backup_type of ``base`` may be. Raises DamagedError naming everything that is
    wrong: the tools prepare a backup without its tables, and some apply increments in any order."""
    damages: list[str] = []
    previous: Receipts | None = None
    for folder in (base, *increments):
        wanted = ("incremental",) if previous is not None or folder is not base else tuple(startable)
        try:
            receipts = read_receipts(folder)
        except (StreamError, OSError) as error:
            damages.append(f"{folder}: {error.message if isinstance(error, StreamError) else error}")
            continue
        if receipts.backup_type not in wanted:
            damages.append(f"{folder}: backup_type is {receipts.backup_type}, not {' or '.join(wanted)}")
        if previous is not None and receipts.from_lsn != previous.to_lsn:
            damages.append(f"{folder} continues at {receipts.from_lsn}, the backup before it ends at {previous.to_lsn}")
        if not (folder / redo).is_file():
            damages.append(f"{folder / redo} is missing")
        previous = receipts
    if damages:
        raise DamagedError("this is not a backup that can be prepared", damages, hint=OTHER_BACKUP)


_MISSING = re.compile(r"(?:was not found at|valid tablespace file for) (?P<path>\S+)")
_TWO_NAMES = re.compile(r"`?(?P<schema>[^`/]+)`?[./]`?(?P<file>[^`/]+)`?")


def without_left_out(log: str, left_out: LeftOut) -> str:
    """``log`` of a prepare without the lines that miss a file which was ``left_out``. They name its path, or the table
    as ``schema/table``; a path of another folder stands for the one in the data directory."""
    return "\n".join(line for line in log.splitlines() if not _misses(line, left_out))


def _misses(line: str, left_out: LeftOut) -> bool:
    match = _MISSING.search(line)
    names = _TWO_NAMES.fullmatch("/".join(match["path"].rstrip(".").split("/")[-2:])) if match else None
    return names is not None and left_out(f"{names['schema']}/{names['file']}")


def check_logs(tool: Tool, base: Path, logs: Sequence[str], *, silent: Sequence[str]) -> None:
    """Did every step of a prepare end well by its own words? ``silent``: texts that tell of trouble over which the
    tool still says "completed OK!". Raises ToolError, UnrestorableError."""
    for log in logs:
        lines = [line for line in log.splitlines() if line.strip() and not LEFT_OPEN.search(line)]
        if not lines or not lines[-1].rstrip().endswith(COMPLETED):
            tail = "\n".join(lines[-20:])
            raise ToolError(f"{tool.name} did not end its work on {base} with {COMPLETED!r}", detail=tail)
        bad = [line for line in lines if any(mark in line for mark in silent)]
        if bad:
            raise UnrestorableError(f"{tool.name} prepared {base}, but not completely", bad[:20], hint=OTHER_BACKUP)


_BAD_DATA = re.compile(r"corrupt|Can't rename|was not found at|may be crashed", re.IGNORECASE)
_ELSEWHERE = re.compile(
    "No space left|errno: 28|allocate|out of memory|Too many open files|Permission denied|crypt|plugin", re.IGNORECASE
)
"""Of a full disk, too little memory, missing rights; without its keys encrypted data looks corrupted, too."""
_COPIED = re.compile(r"\b(?:Copying|Renaming|Removing|Applying) ")


def why_unprepared(error: ToolError, log: str) -> BackupdError:
    """What ``error``, with which a prepare ended, comes to by what the tool has said: UnrestorableError where its data
    was bad, ``error`` itself where something else may have been in the way."""
    lines = [line for line in log.splitlines() if not _COPIED.search(line)]
    bad = [line for line in lines if _BAD_DATA.search(line)]
    if not bad or any(map(_ELSEWHERE.search, lines)):
        return error
    return UnrestorableError(error.message, [*bad[:20], *error.detail.splitlines()], hint=OTHER_BACKUP)


_LAST_BINLOG = re.compile(
    r"Last (?:MySQL )?binlog file (?:(?P<first>\S+), position (?P<pos>\d+)$|position (?:\d+ )?(?P<at>\d+), "
    r"file name (?P<name>\S+))",
    re.MULTILINE,
)


def innodb_place(logs: Sequence[str]) -> Position | None:
    """Up to where in the binary log InnoDB has applied transactions, as the last of ``logs`` (a prepare's) that tells
    it says; None where none does. The tools print what InnoDB keeps in its own pages: "Last binlog file
    ./binlog.000001, position 5102864" (MariaDB 10.11), "Last MySQL binlog file position 1234, file name bin.000001"."""
    for log in reversed(logs):
        found = list(_LAST_BINLOG.finditer(log))
        if found:
            last = found[-1]
            return Position(Path(last["first"] or last["name"]).name, int(last["pos"] or last["at"]))
    return None


def size_of_redo(base: Path, redo: str) -> int:
    """Bytes of the file called ``redo``. Raises ToolError when it is not there."""
    try:
        return (base / redo).stat().st_size
    except FileNotFoundError:
        raise no_redo(base, redo) from None


def no_redo(base: Path, redo: str) -> ToolError:
    return ToolError(f"{base / redo} is missing: this is not a complete backup", hint=OTHER_BACKUP)
