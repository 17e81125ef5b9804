"""What a restore of a server would do; and what each restore is given: destinations, archives, checks, rates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from backupd.app.binlogs.status import stream_of
from backupd.app.binlogs.targets import Targets, history
from backupd.app.context.server_identity import own_branches
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.restores.request import DEFAULT_OPTIONS, RestoreOptions, RestoreRequest
from backupd.app.restores.thaw_wait import with_thaw
from backupd.app.restores.usable_backups import measured_rates, not_believed, within_reach
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.binlog import ReplayMethod
from backupd.model.errors import (
    ConfigurationError,
    KeyUnusableError,
    NotFoundError,
    RefusedError,
)
from restore.planning.inexact_replay import InexactError, refuse_pipe
from restore.planning.plan import Plan
from restore.planning.planner import Preferences, make_plan
from restore.planning.target import AtBackup, AtTime, parse_target

if TYPE_CHECKING:
    from restore.fetch.sources import Sources, ThawWait
    from storage.destination import Destination


def plan(
    wiring: Wiring,
    server_name: str,
    target: str,
    datadir: Path | None,
    *,
    start: bool = False,
    verify: bool = False,
    options: RestoreOptions = DEFAULT_OPTIONS,
    base: str | None = None,
    dumps: Collection[str] | None = None,
    cold: bool = True,
    narrowed: bool = False,
) -> Plan:
    """What a restore to ``target`` would do, from the backup ``base`` where one is given. With ``dumps`` from a logical
    backup, which then counts as a full one with its position in the binary log, and none of these ids. Moves nothing.
    ``cold`` False: whether something has to be thawed first is not asked. ``narrowed``: only changes of some tables
    will be replayed.
    Raises UsageError, NotFoundError, RefusedError (OlderError, see ``make_plan``); and where a sealed index has to be
    read, KeyUnusableError, DamagedError."""
    server = wiring.settings.server(server_name)
    if datadir is not None:
        from restore.datadir.occupancy import find_account, refuse_closed
        from restore.datadir.staging import choose_site

        refuse_closed(choose_site(datadir).datadir, find_account(server.owner))
    records = wiring.catalog.backups.list(server_name, foreign=isinstance(parse_target(target).goal, AtBackup))
    if dumps is not None:
        records = tuple(
            replace(record, kind=BackupKind.PHYSICAL_FULL)
            for record in records
            if record.kind is BackupKind.LOGICAL and record.id not in dumps
        )
    objectives = server.policy.objectives if server.usable else None
    reachable, past = within_reach(wiring, records), history(wiring, server)
    preferences = Preferences(
        destinations=(*server.required, *server.others),
        rates=measured_rates(wiring, server_name),
        datadir=datadir,
        start=start,
        verify=verify,
        rto=objectives.rto if objectives else None,
        replay_with=options.replay_with,
        exclude=options.exclude,
        base=base,
        stream=stream_of(wiring, server),
        accept_older=options.accept_older,
    )

    def made(base: str | None) -> Plan:
        return make_plan(
            server_name,
            reachable,
            parse_target(target),
            replace(preferences, base=base),
            now=wiring.clock(),
            history=past,
        )

    try:
        found = made(base)
        if found.replay is not None:
            found = _replayable(
                wiring, server, found, options, lambda: () if base else _newer(records, found, made), narrowed=narrowed
            )
    except NotFoundError as error:
        error.detail = "\n".join(
            [*([error.detail] if error.detail else []), *_left_out(wiring, records), *not_believed(wiring, server_name)]
        )
        raise
    left_out = _left_out(wiring, [record for record in records if record.id in found.chain])
    left_out += not_believed(
        wiring, server_name, since=next(record.finished_at for record in records if record.id == found.backup_id)
    )
    found = replace(found, warnings=(*found.warnings, *left_out))
    return with_thaw(wiring, found, records, options) if cold else found


def _newer(records: Sequence[BackupRecord], found: Plan, made: Callable[[str], Plan]) -> Iterator[Plan]:
    """Plans to the same target from backups that are newer than that of ``found``, from the newest one on."""
    chosen = next(record for record in records if record.id == found.backup_id)
    newer = (
        record
        for record in records
        if record.kind is not BackupKind.LOGICAL and record.finished_at > chosen.finished_at
    )
    for record in sorted(newer, key=lambda one: one.finished_at, reverse=True):
        with contextlib.suppress(NotFoundError, RefusedError):
            yield made(record.id)


def _replayable(
    wiring: Wiring,
    server: ServerSettings,
    found: Plan,
    options: RestoreOptions,
    newer: Callable[[], Iterable[Plan]],
    *,
    narrowed: bool,
) -> Plan:
    """The plan, with what is inexact about its replay; one of ``newer`` instead where that is possible and exact.
    Raises RefusedError for one that cannot be done, or not by the asked-for method, InexactError where one that may
    give other rows was not accepted."""
    replay = found.replay
    if replay is None:
        return found
    targets = Targets(wiring, server.name, own_branches(wiring, server.name), prefer=server.preferred)
    record = wiring.catalog.backups.get(found.backup_id)
    impossible: RefusedError | None = None
    try:
        if replay.method is ReplayMethod.PIPE:
            from backupd.engine.sql.dialect import pipes_everything

            if not pipes_everything(record.flavour):
                refuse_pipe((one for leg in replay.legs for one in targets.within(leg)), exclude=bool(replay.exclude))
        why = targets.over_temporary(replay.legs, found.backup_id)
        if not narrowed:
            impossible = targets.beyond_replay(replay.legs, replay.exclude)
        for other in newer() if why or impossible else ():
            with contextlib.suppress(RefusedError):
                return _replayable(
                    wiring, server, other, replace(options, accept_inexact=False), tuple, narrowed=narrowed
                )
    except (ConfigurationError, KeyUnusableError) as error:
        unseen = (
            "could not check whether statements use temporary tables from before the backup or create files outside "
            f"the data directory: {error.message}"
        )
        return replace(found, warnings=(*found.warnings, unseen))
    if impossible is not None:
        raise impossible
    if not why:
        return found
    if not options.accept_inexact:
        raise InexactError(why)
    return replace(found, inexact=why, warnings=(f"the restored data is inexact: {why}", *found.warnings))


def foresee(wiring: Wiring, request: RestoreRequest, base: str | None = None) -> Plan:
    """The plan that ``restore`` makes: where an interrupted one waits in the folder, to go on with that. ``base``: the
    backup to begin from otherwise."""
    datadir = Path(request.datadir)
    wanted, earlier = _going_on(request.server, request.target, datadir)
    return plan(
        wiring, request.server, wanted, datadir, start=request.start, options=request.options, base=earlier or base
    )


def _going_on(server: str, target: str, datadir: Path) -> tuple[str, str | None]:
    """The target, and the backup to begin from. Where an interrupted restore to the very same target waits in
    ``datadir``, its backup: a newer one that came meanwhile must not keep it from being finished."""
    from restore.datadir.staging import unfinished

    earlier = unfinished(datadir)
    if earlier is None or (earlier.server, earlier.target) != (server, target):
        return target, None
    return (target, earlier.chain[-1]) if earlier.goal else (f"backup:{earlier.chain[-1]}", None)


def moment_of(chosen: Plan, record: BackupRecord) -> datetime:
    """The moment that the restored data is of."""
    goal = parse_target(chosen.target).goal
    if isinstance(goal, AtTime):
        return goal.moment
    return (chosen.until.at if chosen.until else None) or record.finished_at


def _archives(wiring: Wiring, chosen: Plan) -> list[Destination]:
    """Destinations that may hold binary logs of the plan, those with the backup first, those where they are archived
    last."""
    holding = [run.destination for run in wiring.catalog.binlogs.runs(chosen.server)] if chosen.replay else []
    configured = wiring.settings.destinations
    names = [*chosen.destinations, *(name for name in holding if name in configured)]
    retrieval = wiring.settings.configuration.archive.prices.as_prices.retrieval
    ordered = sorted(
        dict.fromkeys(names),
        key=lambda name: (
            configured[name].kept_in(logs=True) in retrieval and bool(retrieval[configured[name].kept_in(logs=True)])
        ),
    )
    return [wiring.destination(name) for name in ordered]


def statements(server: ServerSettings) -> tuple[str, ...]:
    """SQL of the policy's checks, which a test restore and a restore with a started server run."""
    tests = server.policy.test_restore if server.usable else None  # a broken policy must not keep from restoring
    return tuple(check.sql for check in tests.checks) if tests else ()


def sources(wiring: Wiring, chosen: Plan, thaw: ThawWait | None = None) -> Sources:
    """What a restore of ``chosen`` reads from, the best destination first. ``thaw`` is waited for; None: nothing is."""
    from restore.fetch.sources import NO_THAW_WAIT, Sources

    return Sources(
        [wiring.destination(name) for name in chosen.destinations],
        wiring.unsealer(),
        _archives(wiring, chosen),
        thaw or NO_THAW_WAIT,
    )


def _left_out(wiring: Wiring, records: Iterable[BackupRecord]) -> tuple[str, ...]:
    names = {copy.destination for record in records for copy in record.copies}
    return tuple(
        f"destination {name} is no longer configured, so its copies are not used"
        for name in sorted(names - set(wiring.settings.destinations))
    )
