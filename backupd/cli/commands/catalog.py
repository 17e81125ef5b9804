"""``backupd catalog``: its upgrade, its copies at the destinations, and making it anew from one of them.

``backupd bring-back``: what was deleted or overwritten at a destination that keeps versions is what is seen again.

Document: ``destination``, ``since``, ``returns`` (each ``key``, ``kind``, ``bytes``, ``since``, ``was``, ``version``),
``lost`` and ``left`` (by key: why), ``hidden_before``, ``marks`` (marks of deletion that are withdrawn, each
``server``, ``backup``, ``since``), and ``done`` (``keys``, ``failed``, ``unmarked``: each ``server``, ``backup``; null
without ``--yes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.output import Screen
from backupd.cli.session import Commands, Destination, Run, Written, flag, option, written
from backupd.model.errors import UsageError
from backupd.model.text import format_size, format_time

if TYPE_CHECKING:
    from backupd.app.restores.catalog_rebuild import Rebuilt, RecoveredVersions


app = Commands(help="Catalog maintenance.", no_args_is_help=True)


@app.command(opening="makes")
def upgrade(run: Run) -> None:
    """Upgrade the catalog's tables to this version (also done automatically at first use)."""
    revision = run.service.revision
    run.screen.document({"revision": revision})
    run.screen.line(f"the catalog is at {revision}")


@app.command(opening="makes")
def rebuild(
    run: Run,
    destination: Annotated[str, option("--from", "DESTINATION", "Destination that holds the backups.")],
    into_existing: Annotated[bool, flag("--into-existing", "Add to a catalog that is not empty.")] = False,
    adopt_all: Annotated[
        bool,
        flag(
            "--adopt",
            "With --into-existing: backups that the catalog did not know count as taken "
            "by this installation. Without it they are foreign.",
        ),
    ] = False,
    failed_at: Annotated[
        Written | None,
        option(
            "--failed-at",
            "TIME",
            "Time up to which the installation is known to have worked. backupd reports a possible rollback if the "
            "destination ends earlier.",
            parser=written,
        ),
    ] = None,
    counter: Annotated[
        list[str] | None,
        option(
            "--counter",
            "SERVER=N",
            "Head counter of a server from the last report mail, as SERVER=N. backupd reports a rollback if the "
            "destination has a lower one. May be repeated.",
        ),
    ] = None,
) -> None:
    """Rebuild the catalog from the backups and binary logs at a destination.

    It works without a private key. With one, it also restores positions, proofs and the history of the lost catalog,
    and compares the clear manifest of each backup with the encrypted one.
    """
    with run.reporting() as report:
        done = run.service.maintenance.rebuild(
            destination,
            report,
            merge=into_existing,
            adopt=adopt_all,
            failed_at=run.moment(failed_at),
            counters=_counters(counter or []),
        )
    run.screen.done = "the catalog was rebuilt"
    run.screen.document(done.as_json())
    _show(run.screen, done)
    run.ends(well=not done.problems)


@app.command()
def adopt(
    run: Run,
    names: Annotated[
        list[str],
        typer.Argument(metavar="ID|SERVER...", help="Ids of foreign backups, or a server: all of its foreign backups."),
    ],
) -> None:
    """Adopt foreign backups. Retention, test restores and restores then use them like backups of this installation.

    A backup is foreign if it is at a destination and no record shows that this installation took it.
    """
    done = run.service.maintenance.adopt(names)
    run.screen.document([one.as_json() for one in done])
    for one in done:
        result = {
            True: "its clear manifest agrees with the encrypted one",
            False: "unbound (format 1): nothing in it shows whether its server, times or sizes were changed",
            None: "its clear manifest was not compared with the encrypted one: no private key is available",
        }[one.bound]
        run.screen.line(f"{one.id} of {one.server} is adopted: {result}", style="" if one.bound else "yellow")
    if not done:
        run.screen.line("no foreign backup was found")


@app.command()
def copy(run: Run) -> None:
    """Copy catalog, configuration and proofs, sealed, and RECOVER.md to every destination now.

    Jobs do this automatically: the catalog at most once per hour, the rest after each change.
    """
    result = run.service.maintenance.copy()
    run.screen.document([one.as_json() for one in result])
    for one in result:
        new = [key for key in (one.catalog, one.configuration, "RECOVER.md" if one.recover else "") if key]
        new += [f"{one.proofs} proofs and witnesses"] if one.proofs else []
        text = f"{one.destination}: {', '.join(new) or 'nothing has changed'}"
        run.screen.line(f"{text}; {one.problem}" if one.problem else text, style="yellow" if one.problem else "")
    run.ends(well=not any(one.problem for one in result))


@app.command()
def sign(
    run: Run,
    destination: Destination,
    unproven: Annotated[
        bool,
        flag(
            "--unproven",
            "Also sign documents that agree with the catalog although it holds no digest of them. Use this only "
            "if you are certain that this destination was not tampered with.",
        ),
    ] = False,
) -> None:
    """Sign the documents at a destination that were stored before a signing key was configured.

    It signs only documents that are byte by byte what this installation stored, and lists the others.
    """
    done = run.service.maintenance.sign(destination, unproven=unproven)
    run.screen.document(done.as_json())
    run.screen.line(f"{done.signed} documents were signed")
    for text in done.left:
        run.screen.line(f"not signed: {text}", style="yellow")
    run.ends(well=not done.left)


def _counters(given: list[str]) -> dict[str, int]:
    found = {}
    for text in given:
        server, _, number = text.rpartition("=")
        if not server or not number.isascii() or not number.isdigit():
            raise UsageError(
                f"--counter {text}: expected SERVER=N", hint="the last report mail contains the counter of each server"
            )
        found[server] = int(number)
    return found


def _show(screen: Screen, done: Rebuilt) -> None:
    screen.line(
        f"{done.backups} backups, {done.segments} binary logs in {done.branches} branches, {done.proofs} "
        f"proofs, {done.witnesses} witnesses, {done.holds} holds"
    )
    if done.bound or done.unbound:
        screen.line(
            f"{done.bound} backups: the clear manifests agree with the encrypted ones"
            + (
                f"; {done.unbound} are unbound (format 1): nothing in them shows whether their server, times or "
                "sizes were changed"
                if done.unbound
                else ""
            ),
            style="yellow" if done.unbound else "",
        )
    if done.foreign:
        screen.line(
            f"foreign, not used by rules, proofs or restores: {', '.join(done.foreign)}; if they "
            "are yours: backupd catalog adopt ID",
            style="yellow",
        )
    if done.damaged:
        screen.line(f"incomplete there: {', '.join(done.damaged)}", style="yellow")
    if done.closed:
        screen.line(
            f"{done.closed} backups have no position, because no private key was available: set restore.gnupg_home in "
            "the configuration and repeat with --into-existing",
            style="yellow",
        )
    for copied in done.catalog_of:
        screen.line(f"jobs, events and schedules are from the copy of {copied:%Y-%m-%d %H:%M:%S} UTC")
    for line in done.heads:
        screen.line(line)
    for line in done.elsewhere:
        screen.line(line, style="yellow")
    for problem in done.problems:
        screen.line(problem, style="yellow")


_SHOWN = 20


def bring_back(
    run: Run,
    destination: Destination,
    *,
    since: Annotated[
        Written,
        option("--since", "TIME", "Undo deletions and overwrites made after this time.", parser=written),
    ],
    yes: Annotated[bool, flag("--yes", "Apply the changes. Without this option, the command only lists them.")] = False,
) -> None:
    """Restore objects that were deleted or overwritten in a versioned bucket after a given time.

    Objects that were already deleted, or marked as deleted, before that time are not restored.
    """
    begin = since.moment or run.service.installation.moment(since.text)
    if yes:
        with run.reporting() as report:
            result = run.service.maintenance.bring_back(destination, begin, report)
    else:
        result = run.service.maintenance.look_back(destination, begin)
    run.screen.document(result.as_json())
    _recover_versions_show(run.screen, result)
    run.ends(well=result.ok)


def _recover_versions_show(screen: Screen, result: RecoveredVersions) -> None:
    found, done = result.found, result.done
    begin = format_time(found.since)
    if not found.returns:
        screen.line(f"no required object was deleted or overwritten at {result.destination} since {begin}")
    else:
        screen.table(
            ("WHAT", "HIDDEN", "OVERWRITTEN", "BYTES", "FIRST", "LAST"),
            (
                (
                    kind,
                    str(sum(one.hidden for one in group)),
                    str(sum(not one.hidden for one in group)),
                    format_size(sum(one.size for one in group)),
                    format_time(min(one.since for one in group)),
                    format_time(max(one.since for one in group)),
                )
                for kind, group in found.kinds().items()
            ),
            right=("HIDDEN", "OVERWRITTEN", "BYTES"),
        )
    if backups := found.backups():
        screen.line()
        screen.table(("SERVER", "BACKUP"), backups)
    if found.marks:
        screen.line()
        screen.line(f"marked as deleted only since {begin}, so these marks are removed:")
        screen.table(
            ("SERVER", "BACKUP", "MARKED"),
            ((server, backup_id, format_time(at)) for (server, backup_id), at in sorted(found.marks.items())),
        )
    _list(screen, "no intact version", found.lost, style="yellow")
    _list(screen, "stays away", found.left)
    if found.before:
        screen.line(f"{found.before} more files were hidden before {begin}, and stay hidden")
    if done is None:
        if not found.is_nothing:
            what = [f"these {len(found.returns)} files are restored"] if found.returns else []
            what += [f"these {len(found.marks)} marks are removed"] if found.marks else []
            screen.line()
            screen.line(f"-> nothing was changed; with --yes {' and '.join(what)}")
        return
    _list(screen, "not restored", done.failed, style="yellow")
    screen.line()
    screen.line(
        f"{len(done.keys)} objects restored"
        + (f"; {len(done.unmarked)} deletion marks removed" if done.unmarked else "")
    )
    screen.line(
        "-> first revoke the credentials that deleted the objects; then run `backupd fsck --repair` (updates the "
        "catalog) and `backupd verify` (reads every object)"
    )


def _list(screen: Screen, what: str, keys: Mapping[str, str], *, style: str = "") -> None:
    for key, why in list(keys.items())[:_SHOWN]:
        screen.line(f"{what}: {key}: {why}", style=style)
    if len(keys) > _SHOWN:
        screen.line(f"{what}: and {len(keys) - _SHOWN} more; --json names all", style=style)
