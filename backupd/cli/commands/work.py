"""Commands that take backups and look after them: check, backup, verify, fsck, replicate; and `server accept`.

``replicate`` gives a list with one entry for each server and destination: ``server``, ``destination``, ``ok``,
``copied`` (``backup``, ``bytes``, ``objects``, ``present``, ``seconds``, ``rate``, ``remarks``), ``declined`` and
``waiting`` (``backup``, ``reason``), ``binlogs`` (``segments``, ``bytes``, ``dropped``, ``lacking``, ``troubles``),
``verified`` (ids), ``troubles``, ``damages``, ``lost`` (ids of copies that had vanished), ``damaged`` (ids of copies
that are not whole), ``error``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.output import Screen, complain_of, error_as_json
from backupd.cli.session import AnyServer, Commands, Labels, NewCatalog, Run, Server, flag, one_of, option
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.errors import BackupdError

if TYPE_CHECKING:
    from backupd.app.copies.replication import Replicated


def check(run: Run, server: AnyServer = None, label: Labels = None) -> None:
    """Check the prerequisites of a backup: tools, privileges, keys, destinations. Lists every problem found."""
    findings = run.service.servers.check(server, label or ())
    run.screen.document([finding.as_json() for finding in findings])
    from backupd.cli.render import show_findings

    show_findings(run.screen, findings)
    run.ends(well=all(str(finding.severity) != "error" for finding in findings))


def backup(
    run: Run,
    server: Annotated[
        str | None,
        typer.Argument(metavar="[SERVER]", show_default=False, help="Name of a server; see also --all and --label."),
    ] = None,
    everyone: Annotated[bool, flag("--all", "Every configured server, one after the other.")] = False,
    label: Labels = None,
    kind: Annotated[
        str | None,
        one_of(
            [kind.word for kind in BackupKind],
            "--kind",
            "Kind of backup. Default: full; with --all or --label, logical for servers whose policies take no physical "
            "backups.",
            show_default=False,
        ),
    ] = None,
    table_set: Annotated[
        str,
        option("--set", "NAME", "With --kind logical: the tables of this set of the policy."),
    ] = "",
    tables: Annotated[
        list[str] | None,
        option(
            "--tables",
            "PATTERN",
            "With --kind logical: these tables, such as shop.orders or 'shop.*'; may be repeated.",
        ),
    ] = None,
    new_catalog: NewCatalog = False,
) -> None:
    """Take a backup now: of one server, or of several, one after the other. With --all or --label the exit status is 1
    unless each backup succeeded; one that fails does not keep the next from being taken."""
    if (table_set or tables) and kind != BackupKind.LOGICAL.word:
        raise typer.BadParameter("only logical backups can be limited to some tables: add --kind logical")
    if server is None and not (everyone or label):
        raise typer.BadParameter("name a server, or give --all or --label")
    if server is not None and (everyone or label):
        raise typer.BadParameter("name a server, or give --all or --label, not both")
    run.new_catalog = new_catalog
    wanted = BackupKind.of(kind) if kind is not None else None
    if server is None:
        _backup_several(run, label, wanted, table_set=table_set, tables=tables or ())
        return
    run.follows = (server,)
    with run.reporting() as report:
        record = run.service.foreground.backup(
            server, wanted or BackupKind.PHYSICAL_FULL, report, table_set=table_set, tables=tables or ()
        )
    run.screen.done = f"the backup {record.id} was taken"
    runbook = run.service.backups.runbook_digest(record.id)
    run.screen.document({**record.as_json(), "runbook_sha256": runbook})
    from backupd.cli.render import show_backup

    show_backup(run.screen, record)
    run.screen.facts((("runbook", f"SHA-256 {runbook}" if runbook else ""),))
    run.ends(well=_is_whole(record))


def _backup_several(
    run: Run, labels: Sequence[str] | None, kind: BackupKind | None, *, table_set: str, tables: Sequence[str]
) -> None:
    """The document has of each server ``server``, ``ok``, and ``backup`` (the record) or ``error``, the other null."""
    names = run.labelled(labels, None).listings.servers()
    run.follows = names
    found: list[tuple[str, BackupRecord | None, BackupdError | None]] = []
    for name in names:
        try:
            planned = kind or run.service.servers.usual_kind(name)
            with run.reporting() as report:
                taken = run.service.foreground.backup(name, planned, report, table_set=table_set, tables=tables)
        except BackupdError as error:
            complain_of(error, name)
            found.append((name, None, error))
        else:
            found.append((name, taken, None))
    good = [_is_whole(record) for _name, record, _error in found]
    run.screen.done = f"{sum(record is not None for _name, record, _error in found)} backups were taken"
    run.screen.document(
        [
            {
                "server": name,
                "ok": ok,
                "backup": record.as_json() if record is not None else None,
                "error": error_as_json(error) if error is not None else None,
            }
            for ok, (name, record, error) in zip(good, found, strict=True)
        ]
    )
    from backupd.cli.render import backup_row

    run.screen.table(
        ("SERVER", "BACKUP", "KIND", "STATE", "DATA", "NEW", "AT"),
        ((name, *_row(record, backup_row)) for name, record, _error in found),
        right=("DATA", "NEW"),
    )
    for name, record, _error in found:
        for warning in record.warnings if record is not None else ():
            run.screen.warn(f"{name}: {warning}")
    run.screen.line(f"{sum(good)} of {len(found)} servers were backed up", style="green" if all(good) else "bold red")
    run.ends(well=all(good))


def _row(record: BackupRecord | None, row: Callable[[BackupRecord], Sequence[str]]) -> Sequence[str]:
    if record is None:
        return ("", "", "FAILED, see above", "", "", "")
    backup_id, _server, *rest = row(record)
    return (backup_id, *rest)


def _is_whole(record: BackupRecord | None) -> bool:
    return record is not None and not (record.tables_missing or record.apart)


def parse_subset(text: str) -> float:
    """``10%`` becomes 0.1. Raises BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not match or not 0 < float(match.group(1)) <= 100:
        raise typer.BadParameter(f"{text!r} is not a percentage: write 10%")
    return float(match.group(1)) / 100


def verify(
    run: Run,
    server: AnyServer = None,
    subset: Annotated[
        float | None,
        option(
            "--subset",
            "N%",
            "Percentage of the objects to read, for example 10%. The selection changes daily. Default: all objects.",
            parser=parse_subset,
        ),
    ] = None,
    label: Labels = None,
) -> None:
    """Read stored objects again and compare them with their hashes."""
    with run.reporting() as report:
        outcome = run.service.foreground.verify(server, subset, report, label or ())
    document = outcome.as_json()
    run.screen.document(document)
    from backupd.cli.render import show_damages

    show_damages(run.screen, document)
    run.ends(well=outcome.ok)


def consistency(
    run: Run,
    server: Server,
    check: Annotated[bool, flag("--check", "Compare all tables now; source and replica each read them once.")] = False,
) -> None:
    """Show whether a replica holds what its source does. Exit status 1 unless every table was compared and is equal."""
    from backupd.cli.render import show_consistency

    if check:
        with run.reporting() as report:
            run.service.foreground.check_consistency(server, report)
    found = run.service.servers.consistency(server)
    run.screen.document(found.as_json())
    show_consistency(run.screen, found)
    run.ends(well=found.is_clean)


def fsck(
    run: Run,
    repair: Annotated[
        bool,
        flag("--repair", "Remove leftover files and repair the inconsistencies that are marked as repairable."),
    ] = False,
) -> None:
    """Check that the catalog, the manifests and the stored objects are consistent. Lists every violated invariant."""
    outcome = run.service.maintenance.fsck(repair=repair)
    document = outcome.as_json()
    run.screen.document(document)
    from backupd.cli.render import show_disagreements

    show_disagreements(run.screen, document, repaired=repair)
    run.ends(well=outcome.ok)


def replicate(
    run: Run,
    server: AnyServer = None,
    label: Labels = None,
    to: Annotated[
        str | None,
        option("--to", "DESTINATION", "Destination to bring up to date. Default: all destinations of the policy."),
    ] = None,
) -> None:
    """Copy missing backups and binary logs to the destinations, then read the copies back to verify them."""
    run.follows = ()
    with run.reporting() as report:
        found = run.service.foreground.replicate(server, to, report, label or ())
    run.screen.document([one.as_json() for one in found])
    for one in found:
        _show(run.screen, one)
    if not found:
        run.screen.line("no server's policy names this destination" if to else "no servers")
    run.ends(well=all(one.ok for one in found))


def _show(screen: Screen, one: Replicated) -> None:
    from backupd.app.copies.replication import rate_text
    from backupd.model.text import format_size

    screen.line(
        f"{one.server} at {one.destination}: " + ("up to date" if one.ok else "NOT up to date"),
        style="bold" if one.ok else "bold red",
    )
    if one.lost:
        screen.line(f"  missing at {one.destination}, not deleted by backupd: {', '.join(one.lost)}", style="yellow")
    for copied in one.copied:
        screen.line(f"  copied {copied.header.backup_id}: {rate_text(copied)}")
        for remark in copied.remarks:
            screen.line(f"    read elsewhere: {remark}", style="yellow")
    if one.logs.segments or one.logs.dropped:
        screen.line(
            f"  binary logs: {one.logs.segments} segments copied ({format_size(one.logs.bytes)}), "
            f"{one.logs.dropped} pieces removed"
        )
    if one.examined.verified:
        screen.line(f"  verified: {', '.join(one.examined.verified)} ({format_size(one.examined.bytes)} read)")
    for damage in one.examined.damages:
        if damage.repaired_from:
            screen.line(f"  repaired from {damage.repaired_from}: {damage}", style="yellow")
    for name, why in one.declined:
        screen.line(f"  not copied to {one.destination}: {name}: {why}")
    for name, why in one.waiting.items():
        screen.line(f"  waits: {name}: {why}", style="yellow")
    for text in one.examined.troubles:
        screen.line(f"  not verified: {text}", style="yellow")
    error = one.trouble
    if error is not None:
        for line in str(error).splitlines():
            screen.line(f"  {line}", style="red")


server_app = Commands(help="Identity of the database servers.", no_args_is_help=True)


@server_app.command()
def accept(run: Run, server: Server) -> None:
    """Accept the other database server that now answers under this name as the right one.

    backupd keeps its backups and binary logs separate until then. Afterwards they count as those of this server, and so
    do those of the server before it.
    """
    found = run.service.servers.accept(server)
    run.screen.done = f"{found.uuid} was accepted as {server}"
    run.screen.document(found.as_json())
    run.screen.line(
        f"{found.uuid} at {found.address} is {server} from now on; take a full backup now: "
        f"backupd backup {server} --kind full"
    )
