"""Applies redo and increments to a fetched copy, and believes the tool only after looking."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

from backupd.engine.instance.backup_files import handed, known_options, named, write_known
from backupd.engine.physical.capture import LeftOut, PhysicalTool, nothing
from backupd.engine.physical.streaming import innodb_place, why_unprepared, without_left_out
from backupd.model.errors import ToolError
from backupd.model.job import Progress, Report
from backupd.model.server_facts import Position, Receipts
from backupd.process.pipeline import run
from restore.datadir.ownership import FOLDER_MODE, hand_over, refuse_links, worker_account


def prepare(
    tool: PhysicalTool,
    base: Path,
    increments: Sequence[Path],
    receipts: Receipts,
    *,
    memory: int,
    logs: Path,
    report: Report,
    cancel: Event | None = None,
    left_out: LeftOut = nothing,
    key_files: Sequence[Path] = (),
) -> Position | None:
    """Make ``base`` a data directory that a server can be started on; gives the place in the binary log that InnoDB
    itself names, None where it names none.

    ``receipts``: of the last backup applied; ``memory`` in bytes; ``logs``: folder that keeps each step's
    whole stderr (0600); ``left_out``: is such a file (path in a data directory) missing on purpose? ``key_files``: of
    the configuration. Raises ToolError when a step fails, UnrestorableError where it could not make data of the backup
    or did not get as far as it had to, DamagedError when files are missing, RefusedError for key files of others,
    CancelledError. After an error the files have to be fetched again.
    """
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    steps = tool.prepare(base, increments, memory=memory)
    account = worker_account()
    known = known_options(base)
    for folder in (base, *increments):
        hand_over(folder, account, folder_mode=FOLDER_MODE)
    told: list[str] = []
    with handed(known, key_files, base, (account.uid, account.gid) if os.geteuid() == 0 else None) as options:
        if steps:
            write_known(base, options)
        for number, step in enumerate(steps, start=1):
            report(Progress("prepare", files_done=number - 1, files_total=len(steps), note=step.title))
            log = logs / f"prepare-{number}.log"
            log.unlink(missing_ok=True)
            if step.before is not None:
                for folder in (base, *increments):
                    refuse_links(folder)  # of a program that worked on what may be forged
                step.before()
            try:
                run(step.command, log=log, on_stderr=_teller(report, number, len(steps)), cancel=cancel)
            except ToolError as error:
                raise why_unprepared(error, without_left_out(_text(log), left_out)) from error
            told.append(_text(log))
    if steps:
        write_known(base, named(known, key_files))
    refuse_links(base)
    tool.verify_prepared(base, receipts, told, left_out=left_out)
    return innodb_place(told)


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def _teller(report: Report, number: int, total: int) -> Callable[[str], None]:
    def tell(line: str) -> None:
        report(Progress("prepare", files_done=number - 1, files_total=total, note=line.strip()[:200]))

    return tell
