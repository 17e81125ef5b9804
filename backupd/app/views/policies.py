"""Policies as people look at them: the file, who follows it, what is wrong with it, what could be better.

`backupd policy explain`: a policy in sentences, what it will start, what will be kept, what a change of it costs.

Works from the policy file alone. With an installation it begins with the backups that are there, shows which of them
the rules of the file would expire today, and says when the destinations are full. The coming two weeks are computed
from values alone (``ahead``), clock included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from statistics import median
from zoneinfo import ZoneInfo

from backupd.app.context.wiring import Wiring, gathered
from backupd.app.retention.decisions import solve
from backupd.app.retention.holds import findings
from backupd.app.retention.preview import preview
from backupd.app.retention.rules import BinlogRun, Decisions, Stored, View
from backupd.app.schedule.calendar import Leg, due_times, legs_of, start_of
from backupd.app.views.capacity import Forecast, forecast
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.document import HIDDEN, Document, json_key
from backupd.model.errors import BackupdError, ConfigurationError, Problem, RefusedError, UsageError
from backupd.model.job import JobKind
from backupd.model.text import format_duration, is_name
from policies.fields import SUFFIX
from policies.lint import advice, crowds, explain, not_yet_active, streams
from policies.load import PolicyFile, read_policy, read_policy_text, unknown_destinations
from policies.policy import Keep, Policy

LARGEST_TEXT = 64 * 1024
"""Bytes that anybody may have looked at: reading YAML costs a processor about a second per 100 KiB."""


@dataclass(frozen=True, slots=True)
class PolicyView(Document):
    """``servers``: those that follow it; ``problems``: why it is not in force; ``text``: the file as it is now, which
    may not be what was loaded (``in_force`` False), "" where it cannot be read; ``unread``: the text is another than
    what was loaded or found wrong then; ``wrong_now``: the problems of the text."""

    name: str
    file: str
    servers: tuple[str, ...]
    problems: tuple[Problem, ...]
    """While there are any, it is not followed."""
    advice: tuple[str, ...]
    text: str
    """The file as it is now."""
    in_force: bool
    """The service follows it as it is now."""
    unread: bool = field(metadata=HIDDEN)
    wrong_now: tuple[Problem, ...] = field(metadata=HIDDEN)


@dataclass(frozen=True, slots=True)
class Validation(Document):
    """Of a text that is no file yet."""

    valid: bool
    problems: tuple[Problem, ...]
    advice: tuple[str, ...]


def policies(wiring: Wiring, *, every: bool) -> tuple[PolicyView, ...]:
    """By name. ``every``: also those that none of the configured servers follows."""
    settings = wiring.settings
    followers = gathered((server.policy, name) for name, server in settings.servers.items())
    names = {*followers, *settings.policies, *settings.broken} if every else set(followers)
    return tuple(_view(wiring, name, sorted(followers.get(name, ()))) for name in sorted(names))


def validate(wiring: Wiring, text: str, name: str) -> Validation:
    """Raises UsageError for a name that no policy can have."""
    if not is_name(name):
        raise UsageError(
            f"{name[:80]!r} cannot be the name of a policy", hint="letters, digits, '.', '_' and '-' only, at most 63"
        )
    file = Path(f"{name}{SUFFIX}")
    if len(text.encode("utf-8", "surrogatepass")) > LARGEST_TEXT:
        return Validation(
            False, (Problem(str(file), None, "", f"is larger than {LARGEST_TEXT // 1024} KiB: that is no policy"),), ()
        )
    found = read_policy_text(text, file)
    problems = (*found.problems, *unknown_destinations(found, wiring.settings.destinations))
    return Validation(not problems, problems, _advice(wiring, found))


def _view(wiring: Wiring, name: str, servers: Sequence[str]) -> PolicyView:
    settings = wiring.settings
    path = settings.configuration.policies / f"{name}{SUFFIX}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    now = read_policy_text(text, path)
    wrong_now = (*now.problems, *unknown_destinations(now, settings.destinations))
    known, broken = settings.policies.get(name), settings.broken.get(name, ())
    in_force = known is not None and known == now.policy
    unread = (
        not in_force if known is not None else bool(text) and is_name(name) and _differs(broken, wrong_now, str(path))
    )
    return PolicyView(name, str(path), tuple(servers), broken, _advice(wiring, now), text, in_force, unread, wrong_now)


def _differs(broken: Sequence[Problem], now: Sequence[Problem], file: str) -> bool:
    """Is what was wrong with this file something else now? ``broken`` may also name a server that names a policy
    without a file, which has one now."""
    missed = any(problem.field.startswith("servers.") for problem in broken)
    return missed or {problem for problem in broken if problem.file == file} != set(now)


def _advice(wiring: Wiring, found: PolicyFile) -> tuple[str, ...]:
    if found.policy is None:
        return ()
    return (*advice(found.policy, wiring.settings.configuration), *not_yet_active(found.policy))


RECENT = 10
"""Backups of each kind that show what the next ones will be like."""


@dataclass(frozen=True, slots=True)
class Explanation(Document):
    """``server`` is empty without one. ``ahead``: for each destination what it holds after two weeks. ``today``: what
    the rules make of the backups that are there now, only with an installation."""

    policy: str
    server: str = field(metadata=json_key(or_null=True))
    zone: str = field(metadata=json_key("timezone"))
    at: datetime
    until: datetime
    sentences: tuple[str, ...]
    warnings: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    ahead: tuple[Decisions, ...]
    today: tuple[Decisions, ...] = ()
    forecasts: tuple[Forecast, ...] = ()


def explain_file(path: Path, server: str, *, now: datetime) -> Explanation:
    """The policy file alone, for a server of any name. Raises ConfigurationError with every problem of the file."""
    policy = _policy(path)
    zone = policy.timing.timezone or "UTC"
    empty = {
        name: View(server, name, (), runs=streamed((), now) if streams(policy) else ())
        for name in _destinations(policy)
    }
    texts = (*advice(policy), *not_yet_active(policy))
    return _explained(path.stem, policy, server, zone, now, empty, texts, Typical())


def explain_here(wiring: Wiring, path: Path, server: str | None) -> Explanation:
    """The policy file as it would be for a configured server: the one named, else the only one that follows a policy
    of the file's name. Raises ConfigurationError, NotFoundError, RefusedError."""
    settings = wiring.settings
    policy = _policy(path, known=settings.destinations)
    name = server or _follower(wiring, path.stem)
    config = settings.server(name).config
    changed = replace(wiring, settings=replace(settings, policies={**settings.policies, config.policy: policy}))
    now = wiring.clock()
    zone = policy.timing.timezone or settings.configuration.timezone
    today = {decisions.destination: decisions for decisions in preview(changed, name, now=now)}
    start = {
        destination: View(
            name,
            destination,
            tuple(one.backup for one in today[destination].backups),
            hold=today[destination].hold,
            runs=_logs(policy, today[destination], now),
        )
        for destination in _destinations(policy)
    }
    texts = [
        *advice(policy, settings.configuration),
        *not_yet_active(policy),
        *crowds(settings.configuration, changed.settings.policies),
    ]
    texts += _slow(wiring, name, policy)
    texts += [f"{finding.subject}: {finding.message}" for finding in findings(wiring, [name])]
    forecasts: list[Forecast] = []
    for destination, view in start.items():
        try:
            one = forecast(changed, destination) if view.backups else None
        except BackupdError as error:
            texts.append(f"destinations: cannot determine the free space at {destination}: {error.message}")
        else:
            forecasts += [one] if one is not None else []
    typical = _typical(wiring.catalog.backups.list(name))
    found = _explained(path.stem, policy, name, zone, now, start, tuple(texts), typical)
    return replace(found, today=tuple(one for one in today.values() if one.backups), forecasts=tuple(forecasts))


def _logs(policy: Policy, today: Decisions, now: datetime) -> tuple[BinlogRun, ...]:
    """The binary logs that stay, and go on where the policy streams them."""
    kept = [one.run for one in today.runs if one.keep]
    return streamed(kept, now) if streams(policy) else untold(kept)


def _policy(path: Path, known: Mapping[str, object] | None = None) -> Policy:
    found = read_policy(path)
    problems = [*found.problems, *(unknown_destinations(found, list(known)) if known is not None else ())]
    if problems or found.policy is None:
        raise ConfigurationError(problems, hint="`backupd policy example` shows a complete policy")
    return found.policy


def _destinations(policy: Policy) -> tuple[str, ...]:
    return (*policy.destinations.required, *policy.destinations.others)


def _follower(wiring: Wiring, name: str) -> str:
    followers = [server for server, config in wiring.settings.servers.items() if config.policy == name]
    if len(followers) == 1:
        return followers[0]
    raise RefusedError(
        f"{len(followers) or 'no'} servers follow a policy called {name}: which one is meant?",
        hint=f"name one with --server: {', '.join(followers or wiring.settings.servers)}",
    )


def _explained(
    name: str,
    policy: Policy,
    server: str,
    zone: str,
    now: datetime,
    start: Mapping[str, View],
    texts: tuple[str, ...],
    typical: Typical,
) -> Explanation:
    until = now + SPAN
    runs = planned_runs(legs_of(policy, server, zone), now, until)
    max_chain = policy.physical.max_chain if policy.physical else 0
    held = tuple(
        ahead(
            view,
            policy.retention.get(destination),
            runs,
            until=until,
            zone=ZoneInfo(zone),
            max_chain=max_chain,
            typical=typical,
        )
        for destination, view in start.items()
    )
    return Explanation(name, server, zone, now, until, tuple(explain(policy)), texts, runs, held)


def _typical(records: tuple[BackupRecord, ...]) -> Typical:
    """Medians of the newest backups of each kind."""
    fulls = [record for record in records if record.kind is BackupKind.PHYSICAL_FULL][:RECENT]
    increments = [record for record in records if record.kind is BackupKind.PHYSICAL_INCREMENTAL][:RECENT]
    logical = [record for record in records if record.kind is BackupKind.LOGICAL]
    dumps = gathered((record.table_set, record.stats.bytes_stored) for record in logical)
    seconds = [(record.finished_at - record.started_at).total_seconds() for record in fulls]
    return Typical(
        full_bytes=round(median(record.stats.bytes_stored for record in fulls)) if fulls else 0,
        increment_bytes=round(median(record.stats.bytes_stored for record in increments)) if increments else 0,
        dump_bytes={name: round(median(sizes[:RECENT])) for name, sizes in dumps.items()},
        duration=timedelta(seconds=median(seconds)) if seconds else timedelta(0),
    )


def _slow(wiring: Wiring, server: str, policy: Policy) -> list[str]:
    """Is the promised restore time one that a restore was ever seen to keep?"""
    rto = policy.objectives.rto
    proof = wiring.catalog.proofs.latest(server) if rto else None
    if rto is None or proof is None or proof.seconds <= rto.total_seconds():
        return []
    promised, took = format_duration(rto.total_seconds()), format_duration(proof.seconds)
    return [f"objectives.rto: {promised} cannot be met: the last test restore took {took}"]


SPAN = timedelta(days=14)

SOLVED = 500
"""The most times that retention is looked at on the way; with more runs not after each, which changes no rule's end."""

_BACKUPS = {
    JobKind.FULL: BackupKind.PHYSICAL_FULL,
    JobKind.INCREMENTAL: BackupKind.PHYSICAL_INCREMENTAL,
    JobKind.LOGICAL: BackupKind.LOGICAL,
}


@dataclass(frozen=True, slots=True)
class PlannedRun(Document):
    """``at``: when it starts, jitter and blackout applied; ``due``: when the schedule says."""

    at: datetime
    due: datetime
    leg: str
    kind: JobKind


@dataclass(frozen=True, slots=True)
class Typical:
    """What a planned backup is taken to be like: its bytes and how long it runs. Nothing is known without history.
    ``dump_bytes``: of a logical one, by its set of tables."""

    full_bytes: int = 0
    increment_bytes: int = 0
    duration: timedelta = timedelta(0)
    dump_bytes: Mapping[str, int] = field(default_factory=dict)


def planned_runs(legs: Iterable[Leg], after: datetime, until: datetime) -> tuple[PlannedRun, ...]:
    """Every run that is due in that time, by its start."""
    runs = [
        PlannedRun(start_of(leg, due), due, leg.leg, leg.kind)
        for leg in legs
        for due in due_times(leg, after, until=until)
    ]
    return tuple(sorted(runs, key=lambda run: (run.at, run.leg)))


def ahead(
    view: View,
    keep: Keep | None,
    runs: Sequence[PlannedRun],
    *,
    until: datetime,
    zone: tzinfo,
    max_chain: int,
    typical: Typical | None = None,
) -> Decisions:
    """What ``view`` has become by ``until``, when every run succeeds and retention follows each, as it does."""
    typical = typical or Typical()
    step = len(runs) // SOLVED + 1
    for number, run in enumerate(runs):
        if run.kind in _BACKUPS:
            taken = _backup(view, run, max_chain, typical)
            view = replace(view, backups=(*view.backups, taken))
            if number % step == 0:
                view = _expired(view, solve(view, keep, now=taken.finished_at, zone=zone))
        elif run.kind is JobKind.RETENTION:
            view = _expired(view, solve(view, keep, now=run.at, zone=zone))
    return solve(view, keep, now=until + typical.duration, zone=zone)


def untold(runs: Iterable[BinlogRun]) -> tuple[BinlogRun, ...]:
    """Binary logs by their times alone: of backups that do not exist yet nobody knows the position in them."""
    return tuple(replace(run, branch="", first=0, last=0) for run in runs)


def streamed(runs: Iterable[BinlogRun], now: datetime) -> tuple[BinlogRun, ...]:
    """The same when the binary log is streamed all the time: the newest goes on, and where there is none one begins."""
    *older, newest = sorted(untold(runs), key=lambda run: run.last_at) or [BinlogRun("the binary log", now, now)]
    return (*older, replace(newest, last_at=now + 2 * SPAN))


def _expired(view: View, decisions: Decisions) -> View:
    gone = {decision.backup.id for decision in decisions.expired}
    return replace(view, backups=tuple(backup for backup in view.backups if backup.id not in gone)) if gone else view


def _backup(view: View, run: PlannedRun, max_chain: int, typical: Typical) -> Stored:
    """The backup that the run will take; an increment that has nothing to build on, or too much, becomes a full one."""
    kind, parent = _BACKUPS[run.kind], None
    if kind is BackupKind.PHYSICAL_INCREMENTAL:
        parent, length = _newest_chain(view)
        if parent is None or length >= max_chain:
            kind, parent = BackupKind.PHYSICAL_FULL, None
    table_set = run.leg.partition("/")[2] if kind is BackupKind.LOGICAL else ""
    if kind is BackupKind.LOGICAL:
        word, size = "dump", typical.dump_bytes.get(table_set, 0)
    else:
        word, size = ("increment", typical.increment_bytes) if parent else ("full", typical.full_bytes)
    name = "-".join(filter(None, (f"{run.at:%Y%m%dT%H%M%SZ}", word, table_set)))
    return Stored(name, kind, parent, run.at, run.at + typical.duration, table_set=table_set, bytes=size)


def _newest_chain(view: View) -> tuple[str | None, int]:
    """The newest physical backup that can be built on, and how many increments it is away from its full one."""
    by_id = {backup.id: backup for backup in view.backups if backup.usable and not backup.marked}
    physical = [backup for backup in by_id.values() if backup.kind is not BackupKind.LOGICAL]
    for newest in sorted(physical, key=lambda backup: (backup.finished_at, backup.id), reverse=True):
        length, backup = 0, newest
        while backup.parent is not None and backup.parent in by_id:
            backup, length = by_id[backup.parent], length + 1
        if backup.parent is None:
            return newest.id, length
    return None, 0
