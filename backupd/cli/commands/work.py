"""Commands that take backups and look after them: check, backup, verify, fsck."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from backupd.cli.options import AnyServer, Config, Json, NewCatalog, Server, one_of
from backupd.cli.session import session
from backupd.model.backup_record import BackupKind


class Kind(StrEnum):
    FULL = "full"
    INCREMENTAL = "incremental"
    LOGICAL = "logical"

    def as_kind(self) -> BackupKind:
        return {
            "full": BackupKind.PHYSICAL_FULL,
            "incremental": BackupKind.PHYSICAL_INCREMENTAL,
            "logical": BackupKind.LOGICAL,
        }[self.value]


def check(context: typer.Context, server: AnyServer = None, config: Config = None, as_json: Json = False) -> None:
    """Tell everything that would make a backup fail: tools, privileges, keys, destinations."""
    with session(context, config, as_json, opening="looks") as run:
        findings = run.service.servers.check(server)
        run.screen.document([finding.as_json() for finding in findings])
        from backupd.cli.screen.render import show_findings

        show_findings(run.screen, findings)
        if any(str(finding.severity) == "error" for finding in findings):
            raise typer.Exit(1)


def backup(
    context: typer.Context,
    server: Server,
    kind: Annotated[Kind, one_of(Kind, "--kind", "What to take.")] = Kind.FULL,
    table_set: Annotated[
        str,
        typer.Option(
            "--set",
            metavar="NAME",
            show_default=False,
            help="With --kind logical: the tables of this set of the policy.",
        ),
    ] = "",
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--tables",
            metavar="PATTERN",
            show_default=False,
            help="With --kind logical: these tables, such as shop.orders or 'shop.*'; may be repeated.",
        ),
    ] = None,
    new_catalog: NewCatalog = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Take a backup now."""
    from backupd.cli.screen.progress import reporting

    if (table_set or tables) and kind is not Kind.LOGICAL:
        raise typer.BadParameter("only logical backups take some of the tables: add --kind logical")
    with session(context, config, as_json, opening="works", new_catalog=new_catalog) as run:
        with reporting() as report:
            record = run.service.foreground.backup(
                server, kind.as_kind(), report, table_set=table_set, tables=tables or ()
            )
        run.screen.done = f"the backup {record.id} was taken"
        runbook = run.service.backups.runbook_digest(record.id)
        run.screen.document({**record.as_json(), "runbook_sha256": runbook})
        from backupd.cli.screen.render import show_backup

        show_backup(run.screen, record)
        run.screen.facts((("runbook", f"SHA-256 {runbook}" if runbook else ""),))
        if record.tables_missing or record.apart:
            raise typer.Exit(1)


def parse_subset(text: str) -> float:
    """``10%`` becomes 0.1. Raises BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not match or not 0 < float(match.group(1)) <= 100:
        raise typer.BadParameter(f"{text!r} is not a share: write 10%")
    return float(match.group(1)) / 100


def verify(
    context: typer.Context,
    server: AnyServer = None,
    subset: Annotated[
        float | None,
        typer.Option(
            "--subset",
            metavar="N%",
            parser=parse_subset,
            show_default=False,
            help="Read this share of the objects, such as 10%, another one each day; all without it.",
        ),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Read stored objects again and compare them with their hashes."""
    from backupd.cli.screen.progress import reporting

    with session(context, config, as_json) as run:
        with reporting() as report:
            outcome = run.service.foreground.verify(server, subset, report)
        document = outcome.as_json()
        run.screen.document(document)
        from backupd.cli.screen.render import show_damages

        show_damages(run.screen, document)
        if not outcome.ok:
            raise typer.Exit(1)


def fsck(
    context: typer.Context,
    repair: Annotated[bool, typer.Option("--repair", help="Remove leftovers and mend what can be.")] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Do catalog, manifests and objects agree? Names each rule that is broken."""
    with session(context, config, as_json) as run:
        outcome = run.service.maintenance.fsck(repair=repair)
        document = outcome.as_json()
        run.screen.document(document)
        from backupd.cli.screen.render import show_disagreements

        show_disagreements(run.screen, document, repaired=repair)
        if not outcome.ok:
            raise typer.Exit(1)
