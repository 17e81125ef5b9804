"""From backups and a target to a plan. Pure: no clock, no file, no destination; what it decides carries its
reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, partial_words
from backupd.model.binlog import BranchReason, ReplayMethod, ReplaySpec, Stop
from backupd.model.errors import NotFoundError, RefusedError, UnknownNameError
from backupd.model.text import format_duration, format_size, format_time
from backupd.recovery.chains import Strange, chain_of, restorable, standing_aside
from backupd.recovery.restorable import members_of
from backupd.recovery.runs import Histories, file_position, last_of
from backupd.recovery.windows import Window, not_rolled
from restore.planning.plan import (
    DEFAULT_RATES,
    PIPE_RATE,
    Plan,
    Rate,
    Step,
    bytes_of,
    estimated,
    over_objective,
    replay_text,
)
from restore.planning.starting_backup import (
    Choice,
    Manner,
    choose,
    choose_point,
    disorder,
    is_exactly,
    none_restorable,
    refuse_deleted,
    with_doubts,
)
from restore.planning.target import AtBackup, AtTime, Goal, Latest, Older, OlderError, Stream, Target, behind_the_stream
from restore.planning.target_resolution import Archive, History

_STALE = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Preferences:
    """What the operator and the configuration say about how.

    ``destinations``: names, the one to read from first; those not named come after, those that a backup does
    does not exist at are left out. ``datadir``: where the server will live, None for a throw-away copy.
    ``rto``: what the policy allows. ``replay_with``: how binary logs are replayed, None for the planner's choice;
    ``exclude``: GTIDs to leave out. ``base``: the only backup to begin from, None for the planner's choice. ``stream``:
    the state of the server's stream, None where its policy asks for none. ``accept_older``: plan ``latest`` although
    something later is known to exist.
    """

    destinations: tuple[str, ...] = ()
    rates: Mapping[str, Rate] = field(default_factory=dict)
    datadir: Path | None = None
    start: bool = False
    verify: bool = False
    rto: timedelta | None = None
    replay_with: ReplayMethod | None = None
    exclude: tuple[str, ...] = ()
    base: str | None = None
    stream: Stream | None = None
    accept_older: bool = False

    @property
    def every_rate(self) -> Mapping[str, Rate]:
        """With what is assumed of phases that were not measured."""
        return {**DEFAULT_RATES, **self.rates}


def make_plan(
    server: str,
    backups: Sequence[BackupRecord],
    target: Target,
    preferences: Preferences,
    *,
    now: datetime,
    history: History | None = None,
) -> Plan:
    """Choose the backup (and its chain) and the binary logs that ``target`` means, and say what restoring it takes.

    Raises NotFoundError (unknown backup, branch, GTID, or nothing to restore from) and RefusedError (the target cannot
    be reached; names the places around the gap and the nearest moments that can; OlderError where ``latest`` would end
    before something that is known to exist), and what the resolver raises.
    """
    own = sorted((b for b in backups if b.server == server), key=lambda b: (b.finished_at, b.id))
    streamed = history if history is not None and history.branches else None
    usable = [] if isinstance(target.goal, AtBackup) else restorable(own)
    aside = () if isinstance(target.goal, AtBackup) else standing_aside(own, latest=isinstance(target.goal, Latest))
    not_meant = {name for one in aside for name in one.backups}
    left = [b for b in usable if b.id in not_meant]
    usable = [b for b in usable if b.id not in not_meant]
    if left and not usable:
        raise _only_of_others(server, left, aside)
    if streamed is None or isinstance(target.goal, AtBackup):
        _refuse_branch(server, own, target, streamed)
        found = _by_backups(server, own, usable, target.goal, preferences)
    else:
        found = _by_logs(server, own, usable, target, preferences, streamed, now)
    older, line = (
        _older(server, found, target, preferences, streamed, now) if isinstance(target.goal, Latest) else (None, "")
    )
    if preferences.exclude and found.choice.replay is None:
        why = not_rolled(found.choice.base) or "the backup is the target, and no binary logs are replayed onto it"
        raise RefusedError(
            f"{', '.join(preferences.exclude)} cannot be left out: {why}",
            hint="choose a later target, or leave out --exclude-gtid",
        )
    if older is not None and not preferences.accept_older:
        raise OlderError(server, older)
    ends = _two_ends(server, found, target, streamed)
    if ends is not None and not preferences.accept_older:
        raise ends
    chain = chain_of(found.choice.base.id, own)
    refuse_deleted(chain)
    destinations, warnings = _destinations(chain, preferences.destinations)
    warnings = [*([str(older)] if older else []), *warnings, *found.warnings, *([line] if line else [])]
    warnings += [f"{one.words(server)}: used only if named: --to backup:{one.backups[-1]}" for one in aside]
    if ends is not None:
        warnings.append(f"{ends.message}: {ends.hint}")
    if isinstance(target.goal, Latest):
        warnings += _about_latest(found, own, usable, now)
    by_text = {text: b.id for b in chain for text in b.warnings}  # once, of the last backup that has it
    warnings += [f"{of}: {text}" for text, of in by_text.items()]
    if chain[-1].missing:
        warnings.append(partial_words(chain[-1].id, chain[-1].missing))
    warnings += [words for one in chain for words in one.flag_words]
    replay = found.choice.replay
    plan = Plan(
        server=server,
        target=str(target),
        chain=tuple(b.id for b in chain),
        destinations=destinations,
        position=found.choice.base.position,
        reason=found.choice.reason,
        bytes_stored=sum(b.stats.bytes_stored for b in chain),
        bytes_source=sum(b.stats.bytes_source for b in chain),
        steps=tuple(_steps(chain, destinations[0], preferences, replay)),
        warnings=tuple(warnings),
        replay=replay,
        until=found.stop,
        rto=preferences.rto.total_seconds() if preferences.rto is not None else None,
        older=older,
    )
    return replace(plan, warnings=(*plan.warnings, *over_objective(plan.steps, plan.rto)))


def _steps(
    chain: Sequence[BackupRecord], destination: str, preferences: Preferences, replay: ReplaySpec | None
) -> Iterator[Step]:
    source = sum(b.stats.bytes_source for b in chain)
    stored = sum(b.stats.bytes_stored for b in chain)
    files = sum(b.stats.files for b in chain)
    several = f" of {len(chain)} backups" if len(chain) > 1 else ""
    titles = {
        "fetched": f"fetch {format_size(stored)} from {destination}, unseal to {format_size(source)} "
        f"in {files} files{several}",
        "prepared": "prepare: apply redo" + (f", then {_increments(chain)} in order" if len(chain) > 1 else ""),
        "restored": f"put the files in place: {preferences.datadir or 'a throw-away directory'}",
        "started": "start the server, socket only",
        "rolled_forward": replay_text(replay) if replay is not None else "",
        "verified": "check every table, run the checks, compare with the witness",
    }
    wanted = {"started": preferences.start, "verified": preferences.verify}
    sizes = [b.stats.bytes_source for b in chain]
    work = {name: (title, bytes_of(name, sizes)) for name, title in titles.items() if wanted.get(name, True)}
    return estimated(work, preferences.every_rate, replay)


def _increments(chain: Sequence[BackupRecord]) -> str:
    count = len(chain) - 1
    return f"{count} increment{'s' if count != 1 else ''} ({format_size(sum(b.stats.bytes_source for b in chain[1:]))})"


@dataclass(frozen=True, slots=True)
class _Found:
    """``stop``: where the copy is in the end, None where it is the backup alone. ``older``, ``ends``: of a
    Resolution."""

    choice: Choice
    stop: Stop | None = None
    warnings: tuple[str, ...] = ()
    older: Older | None = None
    ends: datetime | None = None


def _older(
    server: str, found: _Found, target: Target, preferences: Preferences, history: History | None, now: datetime
) -> tuple[Older | None, str]:
    """Why ``latest`` is older than it could be, or what is to be said of it all the same."""
    if found.older is not None or preferences.stream is None:
        return found.older, ""
    current = Histories(history.branches, ()).current if history is not None else None
    if target.branch is not None and (current is None or current.id != target.branch):
        return None, ""
    return behind_the_stream(
        server,
        preferences.stream,
        found.ends or found.choice.base.finished_at,
        is_archived=found.stop is not None,
        now=now,
    )


def _two_ends(server: str, found: _Found, target: Target, history: History | None) -> RefusedError | None:
    """The server came back with less than what is archived of it, and no backup of it was taken since: is the end of
    what clients were told of meant, or that of the server as it is?"""
    if history is None or target.branch is not None or not isinstance(target.goal, Latest):
        return None
    histories = Histories(history.branches, history.runs)
    now = histories.current
    if now is None or now.reason is not BranchReason.LOST_TAIL or now.parent is None or now.fork is None:
        return None
    fork = file_position(now.fork)
    beyond = [run for run in histories.runs(now.parent) if fork is not None and last_of(run) > fork]
    if not beyond or histories.branch_of(found.choice.base) is now:
        return None
    before = histories.branch(now.parent)
    end = f"{before.file(beyond[-1].last_number)}:{beyond[-1].last_pos}"
    return RefusedError(
        f"latest may mean two ends of {server}: the server has lost the end of its binary log, which is archived up to "
        f"{end}",
        detail=now.note,
        hint=f"--to latest@{before.id} has everything that was archived before the loss; --to latest@{now.id} is the "
        "server as it went on without that",
    )


def _only_of_others(server: str, left: Sequence[BackupRecord], aside: Sequence[Strange]) -> NotFoundError:
    return NotFoundError(
        f"server {server} has no restorable backup of its own",
        detail="\n".join(one.words(server) for one in aside),
        hint=f"if that other server is meant: --to backup:{left[-1].id}",
    )


def _refuse_branch(server: str, own: Sequence[BackupRecord], target: Target, history: History | None) -> None:
    """A backup alone is on one branch; raises NotFoundError or RefusedError where another one is asked for."""
    if target.branch is None:
        return
    if history is None:
        raise UnknownNameError(
            f"server {server} has no branch {target.branch!r}",
            hint="leave out @branch: the history of this server has not forked",
        )
    histories = Histories(history.branches, history.runs)
    wanted = histories.branch(target.branch)
    backup = next((b for b in own if isinstance(target.goal, AtBackup) and b.id == target.goal.backup_id), None)
    if backup is not None and (home := histories.branch_of(backup)) is not None and home is not wanted:
        raise RefusedError(f"backup {backup.id} is of branch {home.id}, not of {wanted.id}", hint="leave out @branch")


def _by_backups(
    server: str, own: Sequence[BackupRecord], usable: Sequence[BackupRecord], goal: Goal, preferences: Preferences
) -> _Found:
    allowed = [b for b in usable if preferences.base in (None, b.id)]
    chosen, reason = choose_point(server, own, allowed, goal)
    warnings = disorder(chosen, allowed) if isinstance(goal, Latest) else []
    return _Found(Choice(chosen, None, reason), None, tuple(warnings))


def _by_logs(
    server: str,
    own: Sequence[BackupRecord],
    usable: Sequence[BackupRecord],
    target: Target,
    preferences: Preferences,
    history: History,
    now: datetime,
) -> _Found:
    if not usable:
        raise none_restorable(server, own)
    archive = Archive(history, usable, now=now, only=preferences.base)
    by_id = {b.id: b for b in own}

    def cost(base: BackupRecord) -> float:
        return sum(step.seconds for step in _steps(members_of(base, by_id), "", preferences, None))

    try:
        resolution = archive.resolve(target)
        choice = choose(resolution, archive, history.resolver, _manner(preferences), cost)
        if isinstance(target.goal, AtTime) and resolution.stop is not None:
            choice = with_doubts(choice, resolution, history.resolver, target.goal.moment)
    except (NotFoundError, RefusedError) as error:
        exact = _exactly(archive, usable, target, preferences.base)
        if exact is None:
            raise _with_moments(error, archive, target.goal) from error
        return _Found(Choice(exact, None, f"the backup's position is exactly {target.goal}"))
    doubts = [f"not certain: {text}" for text in (choice.replay.doubtful if choice.replay else ())]
    return _Found(
        choice,
        choice.replay.stop if choice.replay else resolution.stop,
        (*resolution.remarks, *choice.remarks, *doubts),
        resolution.older,
        resolution.ends,
    )


def _manner(preferences: Preferences) -> Manner:
    if preferences.replay_with is ReplayMethod.PIPE:
        return Manner(ReplayMethod.PIPE, "asked for", PIPE_RATE, preferences.exclude)
    why = "the server's own applier, in parallel where it can"
    return Manner(ReplayMethod.APPLIER, why, preferences.every_rate["rolled_forward"], preferences.exclude)


def _exactly(archive: Archive, usable: Sequence[BackupRecord], target: Target, only: str | None) -> BackupRecord | None:
    """A backup that is the target without any replay. A position means it only where no other history has the same."""
    goal = target.goal
    if isinstance(goal, Latest | AtBackup):
        return None
    histories = archive.histories
    line = histories.descent(histories.branch(target.branch) if target.branch else histories.branches[-1])
    for backup in reversed(usable):
        if only in (None, backup.id) and is_exactly(backup, goal):
            home = histories.branch_of(backup)
            if home in line or (target.branch is None and (isinstance(goal, AtTime) or len(histories.branches) == 1)):
                return backup
    return None


def _with_moments(error: NotFoundError | RefusedError, archive: Archive, goal: Goal) -> NotFoundError | RefusedError:
    """The refusal, with what is recoverable near the target."""
    found = archive.windows()
    lines = []
    if isinstance(goal, AtTime):
        before = [w for w in found if w.end < goal.moment]
        after = [w for w in found if w.begin > goal.moment]
        if before:
            near = max(before, key=lambda w: w.end)
            lines.append(f"nearest recoverable before: {_moment(near.end, near, archive)} ({near.reason_end})")
        if after:
            near = min(after, key=lambda w: w.begin)
            lines.append(f"nearest recoverable after:  {_moment(near.begin, near, archive)}")
    if not lines:
        lines = [f"recoverable: {format_time(w.begin)} to {_moment(w.end, w, archive)}" for w in found[-3:]]
    detail = "\n".join([*([error.detail] if error.detail else []), *lines])
    return type(error)(error.message, detail=detail, hint=error.hint)


def _moment(moment: datetime, window: Window, archive: Archive) -> str:
    present = archive.histories.branches[-1].id
    return format_time(moment) + (f"@{window.branch}" if window.branch not in ("", present) else "")


def _about_latest(
    found: _Found, own: Sequence[BackupRecord], usable: Sequence[BackupRecord], now: datetime
) -> list[str]:
    warnings = []
    chosen = found.choice.base
    age = now - chosen.finished_at
    if age > _STALE and found.stop is None:
        warnings.append(f"the newest restorable backup is {format_duration(age.total_seconds())} old")
    good = {b.id for b in usable}
    newer = [b for b in own if b.finished_at > chosen.finished_at and b.state is not BackupState.DELETED]
    damaged = [b.id for b in newer if b.state is BackupState.DAMAGED]
    torn = [
        b.id
        for b in newer
        if b.state is BackupState.COMPLETE and b.kind is BackupKind.PHYSICAL_INCREMENTAL and b.id not in good
    ]
    if damaged:
        warnings.append(f"newer but damaged, not used: {', '.join(damaged)}")
    if torn:
        warnings.append(f"newer, but their parent backup is damaged or missing, not used: {', '.join(torn)}")
    return warnings


def _destinations(chain: Sequence[BackupRecord], preferred: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Where the whole chain is, good copies first, and what there is to say about the others."""
    by_backup = [{copy.destination: copy.state for copy in b.copies if copy.state != "deleted"} for b in chain]
    everywhere = [name for name in by_backup[0] if all(name in states for states in by_backup)]
    if not everywhere:
        raise NotFoundError(
            f"no destination holds all of {', '.join(b.id for b in chain)}",
            hint="`backupd backups show ID` lists the copies of a backup",
        )
    rank = {name: number for number, name in enumerate(preferred)}
    damaged = {name for name in everywhere if any(states[name] != "complete" for states in by_backup)}
    ordered = sorted(everywhere, key=lambda name: (name in damaged, rank.get(name, len(rank))))
    warnings = [
        f"the copy at {name} is damaged; it is used only for objects that the others lack"
        for name in ordered
        if name in damaged
    ]
    if len(damaged) == len(everywhere):
        warnings = ["every copy of this backup is known to be damaged; the restore lists the unreadable files"]
    return tuple(ordered), warnings
