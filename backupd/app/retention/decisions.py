"""Which backups and archived binary logs of one server stay at one destination. Pure: no clock, no file, no catalog.

Backups: the rules decide what each becomes, and so which moments those that stay allow to restore. Only what could be
restored from this destination counts for a rule: sound, unmarked, with everything it builds on, and not of the future.
So a damaged copy never pushes a good one out. A backup stays while anything wants it, and what it builds on stays with
it; whatever the rules say, the newest restorable and the newest proved backup stay too.

Binary logs, file by file: they stay while a backup that needs them does, from the file on that has its position, in
its own branch and in every branch that forks off later. ``binlogs: all`` (the default) says that every kept backup
needs them, ``binlogs: window`` that only those of the recovery window do, and that a backup outside of it is one
moment. What a person keeps, what is being restored or built on, and the newest restorable and newest proved backup need
them in either case. Only the beginning of a branch ever goes, so no hole appears in what stays; of the branch that the
server is on, nothing goes unless a backup on it needs what follows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from typing import NamedTuple

from backupd.app.retention.rules import (
    BinlogRun,
    Decision,
    Decisions,
    Families,
    Ground,
    LogPosition,
    Minimum,
    Recoverable,
    Rule,
    RunDecision,
    Stored,
    View,
    Window,
    families_of,
    family,
    rules_of,
)
from backupd.model.backup_record import BackupKind
from backupd.model.binlog import Branch
from backupd.model.text import few, format_time
from backupd.recovery.restorable import Obstacle, Restorability, Why, here_if
from policies.policy import Keep

SKEW = timedelta(days=1)
"""A log is older than a backup whose position is not known only when it is this much older: two clocks are compared."""

NOTHING = 1 << 62
"""A first file that no log has: none of the branch is needed."""


def decide(runs: Iterable[BinlogRun], needing: Sequence[Stored], branches: Sequence[Branch]) -> list[RunDecision]:
    """``needing``: the backups that logs are kept for; at least one. A run of which a part goes is given as two."""
    by_branch = first_files(needing, branches)
    found: list[RunDecision] = []
    for run in runs:
        if run.log_position is None:
            found.append(_by_time(run, needing))
            continue
        first, why = by_branch.get(run.branch, First(0, "the backups that need it are unknown"))
        uncertain = next(
            (backup for backup in needing if backup.log_position is None and run.last_at >= backup.started_at - SKEW),
            None,
        )
        if uncertain is not None:
            found.append(
                RunDecision(
                    run,
                    keep=True,
                    reason=f"the binary log position of {uncertain.id} is uncertain, so a replay from it may need them",
                )
            )
        elif run.last < first:
            found.append(RunDecision(run, keep=False, reason=_gone(why, first)))
        elif run.first >= first:
            found.append(RunDecision(run, keep=True, reason=why))
        else:
            base = min(
                (b.started_at for b in needing if b.log_position is not None and b.log_position.branch == run.branch),
                default=run.first_at,
            )
            border = min(max(base, run.first_at), run.last_at)
            before = replace(run, last=first - 1, last_at=border, bytes=0)
            after = replace(run, first=first, first_at=border)
            found += [
                RunDecision(before, keep=False, reason=_gone(why, first)),
                RunDecision(after, keep=True, reason=why),
            ]
    return found


def _gone(reason: str, first: int) -> str:
    if first == NOTHING:
        return reason
    return f"file {first} is the first that is still needed: {reason}"


def _by_time(run: BinlogRun, needing: Sequence[Stored]) -> RunDecision:
    base = min(needing, key=lambda backup: (backup.started_at, backup.id))
    since = f"{base.id}, which began at {format_time(base.started_at)}"
    if run.last_at >= base.started_at:
        return RunDecision(run, keep=True, reason=f"it is needed for a replay from {since}")
    return RunDecision(run, keep=False, reason=f"it ended before {since}, the oldest backup that a replay starts from")


class First(NamedTuple):
    """The first file of a branch that is needed, and why."""

    number: int
    reason: str


def first_files(needing: Sequence[Stored], branches: Sequence[Branch]) -> Mapping[str, First]:
    """By id of each branch (oldest first in ``branches``)."""
    found: dict[str, First] = {}
    for branch in branches:
        numbers = [
            (number, backup.id)
            for backup in needing
            if backup.log_position is not None
            and (number := needed(backup.log_position, branch.id, branches)) is not None
        ]
        if numbers:
            number, backup_id = min(numbers)
            found[branch.id] = First(number, f"it is needed for a replay from {backup_id}")
        elif branch is branches[-1]:
            found[branch.id] = First(0, "the server is on this branch, and no backup here begins on it yet")
        else:
            found[branch.id] = First(NOTHING, "no remaining backup is on this branch or on one that it forked from")
    return found


def needed(position: LogPosition, branch_id: str, branches: Sequence[Branch]) -> int | None:
    """The first file of a branch that a backup at ``position`` needs; None where it needs none of it."""
    if position.branch == branch_id:
        return position.number
    by_id = {branch.id: branch for branch in branches}
    home = by_id.get(position.branch)
    if (
        home is not None
        and position.number < home.first_number
        and any(one.parent == branch_id and one.names_go_on for one in _line(home, by_id))
    ):
        return position.number  # the earlier files of its own sequence of names are those of the branch before
    for one in _line(by_id.get(branch_id), by_id):
        if one.fork is None:
            return None  # nothing is replayed across a fork that is not known
        if one.parent == position.branch:
            number = one.fork.file.rpartition(".")[2]
            # A fork of which only the GTID is known may be anywhere.
            return None if number.isdecimal() and int(number) < position.number else 0
    return None


def _line(branch: Branch | None, by_id: Mapping[str, Branch]) -> Iterator[Branch]:
    """A branch and those that it came from, but for the first of all."""
    seen: set[str] = set()
    while branch is not None and branch.parent is not None and branch.id not in seen:
        seen.add(branch.id)
        yield branch
        branch = by_id.get(branch.parent)


_LISTED = 3
_RECENT = timedelta(hours=1)
"""How far what can be restored may end behind now: whether it follows closely enough is no question of retention."""


def recoverable(
    backups: Sequence[Stored], runs: Sequence[BinlogRun], *, since: datetime | None, now: datetime
) -> tuple[Recoverable, ...]:
    """The spans that restorable ``backups`` (oldest first) and ``runs`` (by their beginning) cover, in order; only what
    is between ``since`` and ``now``. A backup outside of every run is a span of its one moment."""
    times = [backup.finished_at for backup in backups]
    found: list[Recoverable] = []
    covered: list[tuple[datetime, datetime]] = []
    for first, last in _merged(runs):
        index = bisect_left(times, first)
        if index < len(times) and times[index] <= last:
            begin = times[index] if since is None else max(times[index], since)
            end = min(last, now)
            covered.append((times[index], last))
            if begin <= end:
                found.append(Recoverable(begin, end, backups[index].id))
    position = 0
    for backup in backups:
        while position < len(covered) and covered[position][1] < backup.finished_at:
            position += 1
        inside = position < len(covered) and covered[position][0] <= backup.finished_at
        if not inside and (since is None or backup.finished_at >= since):
            found.append(Recoverable(backup.finished_at, backup.finished_at, backup.id))
    return tuple(sorted(found, key=lambda span: (span.since, span.until, span.base)))


def gaps(
    spans: Sequence[Recoverable],
    window: Window,
    families: Families,
    now: datetime,
    *,
    has_logs: bool,
    oldest: datetime | None = None,
) -> list[str]:
    """What of the window's promise is not kept, as sentences. ``oldest``: when the first backup that is known here
    ended, whole or not: before that there was nothing to keep."""
    name = f"{window.name} {window.length}"
    if not any(families):
        return [f"{name}: there is no restorable backup here at all"]
    if not has_logs:
        only = f"only the moments of its {len(spans)} backups can be restored, none between them"
        return [f"{name}: no binary logs are stored here, so {only}"]
    missing: list[tuple[datetime, datetime]] = []
    reached = window.start
    for span in spans:
        if span.since > reached and (oldest is None or span.since > oldest):
            missing.append((reached, span.since))
        reached = max(reached, span.until)
    lines = [
        f"{name}: nothing between {format_time(since)} and {format_time(until)} can be restored"
        for since, until in missing[:_LISTED]
    ]
    if len(missing) > _LISTED:
        lines.append(f"{name}: and {len(missing) - _LISTED} more gaps")
    if now - reached > _RECENT:
        lines.append(f"{name}: the newest moment that can be restored is {format_time(reached)}")
    return lines


def _merged(runs: Sequence[BinlogRun]) -> list[tuple[datetime, datetime]]:
    spans: list[tuple[datetime, datetime]] = []
    for run in runs:
        if spans and run.first_at <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], run.last_at))
        else:
            spans.append((run.first_at, run.last_at))
    return spans


_NEEDING = {"recovery_window", "pinned", "read", "building", "newest", "proved", "future", "remains", "awaited"}
"""Why a backup stays that needs binary logs even where only the window keeps them."""
_NEVER = datetime.min.replace(tzinfo=UTC)


def solve(view: View, keep: Keep | None, *, now: datetime, zone: tzinfo) -> Decisions:
    """Decide about everything in ``view``. ``keep`` None: the destination has no rules and keeps everything.

    ``zone``: whose days, weeks and months count. The order of the input does not matter; solving again after the
    decisions were carried out expires nothing more.
    """
    return _Solution(view, keep, now, zone).run()


class _Solution:
    def __init__(self, view: View, keep: Keep | None, now: datetime, zone: tzinfo) -> None:
        self._view, self._now = view, now
        self._backups = sorted(view.backups, key=lambda backup: (backup.finished_at, backup.id), reverse=True)
        self._by_id = {backup.id: backup for backup in reversed(self._backups)}
        self._problems = problems(self._by_id)
        self._counting = [
            backup for backup in self._backups if not self._problems[backup.id] and backup.finished_at <= now
        ]
        self._families: Families = families_of(self._counting)
        self._rules: tuple[Rule, ...] = () if keep is None else rules_of(keep, self._families, now=now, zone=zone)
        self._keep = keep
        self._has_rules = keep is not None
        self._grounds: dict[str, list[Ground]] = {}
        self._paid: frozenset[str] = frozenset()
        self._warnings: list[str] = []

    def run(self) -> Decisions:
        self._wanted()
        self._with_parents()
        firmly = set(self._grounds)
        self._newest_proved()
        self._with_parents()
        stopped = [backup.id for backup in self._backups if backup.id in self._grounds and backup.id not in firmly]
        self._awaited()
        if self._view.hold:
            stopped += self._hold()
        self._minimum()
        self._complain()
        runs = self._runs()
        window = self._window
        kept = [backup for backup in reversed(self._bases) if backup.id in self._grounds]
        spans = recoverable(
            kept, [run.run for run in runs if run.keep], since=window.start if window else None, now=self._now
        )
        if window:
            self._warnings += gaps(
                spans,
                window,
                self._families,
                self._now,
                has_logs=bool(runs),
                oldest=min((backup.finished_at for backup in self._view.backups), default=None),
            )
        return Decisions(
            server=self._view.server,
            destination=self._view.destination,
            at=self._now,
            backups=tuple(
                Decision(backup, tuple(self._grounds.get(backup.id, ())), self._why_not) for backup in self._backups
            ),
            runs=runs,
            recoverable=spans,
            stopped=tuple(stopped),
            hold=self._view.hold,
            warnings=tuple(self._warnings),
        )

    @property
    def _bases(self) -> list[Stored]:
        """Restorable backups that moments begin with, newest first. A dump may leave tables out, and what it holds can
        be rolled forward from a physical backup, too: so dumps count only where there is nothing else."""
        ours = [backup for backup in self._counting if not backup.strange]
        physical = [backup for backup in ours if backup.kind is not BackupKind.LOGICAL]
        return physical or ours

    @property
    def _window(self) -> Window | None:
        return next((rule for rule in self._rules if isinstance(rule, Window)), None)

    def _note(self, backup_id: str, rule: str, text: str) -> None:
        self._grounds.setdefault(backup_id, []).append(Ground(rule, text))

    def _ruled(self) -> None:
        """What the rules want, and what no rule of ours may touch."""
        for rule in self._rules:
            for backup_id, text in rule.kept.items():
                self._note(backup_id, rule.name, text)
        for backup in self._backups:
            if backup.strange and not backup.marked:
                self._note(
                    backup.id,
                    "foreign",
                    f"it was taken from a different server ({backup.lineage}) under this name: retention does not "
                    "apply to it"
                    if backup.lineage
                    else "nothing shows that this installation took it: no rule applies to it before `backupd catalog "
                    f"adopt {backup.id}`",
                )
        for backups in self._families:
            self._note(backups[0].id, "newest", self._newest_words(backups))

    def _wanted(self) -> None:
        """Everything that something wants for its own sake."""
        self._ruled()
        view = self._view
        everything = Ground("everything", view.unconfigured or "this destination has no rules, so it keeps everything")
        newest: dict[str, datetime] = {}
        for backup in self._counting:
            newest.setdefault(family(backup), backup.finished_at)
        for backup in self._backups:
            if backup.pinned:
                self._note(backup.id, "pinned", "it is kept (`backupd backups keep`)")
            if backup.id in view.being_read:
                self._note(backup.id, "read", "a restore is reading it")
            if backup.id in view.built_on:
                self._note(backup.id, "building", "a backup that builds on it is being written")
            if backup.marked:
                continue
            if not self._has_rules:
                self._grounds.setdefault(backup.id, []).append(everything)
            if backup.finished_at > self._now:
                self._note(
                    backup.id,
                    "future",
                    f"it ended in the future ({format_time(backup.finished_at)}), so no rule is applied to it: check "
                    "the clock of this host",
                )
            elif self._problems[backup.id] and backup.finished_at > newest.get(family(backup), _NEVER):
                self._note(
                    backup.id,
                    "remains",
                    f"{self._problems[backup.id]}; it stays, because no newer restorable backup exists at this "
                    "destination",
                )

    def _newest_words(self, backups: Sequence[Stored]) -> str:
        first = backups[0]
        what = "the newest restorable backup here"
        if first.kind is BackupKind.LOGICAL:
            of_set = f" of the set {first.table_set}" if first.table_set else ""
            what = f"the newest restorable dump{of_set} here"
        whole = (
            len(backups) > 1
            and not any(one.missing for one in backups)
            and any(one.missing and family(one) == family(first) for one in self._counting)
        )
        return f"it is {what}{' with all its tables' if whole else ''}: that is never deleted"

    def _newest_proved(self) -> None:
        for backups in self._families:
            proved = next((backup for backup in backups if backup.proved_at is not None), None)
            if proved is not None and proved.proved_at is not None:
                self._note(
                    proved.id,
                    "proved",
                    "it is the newest one here that a test restore proved "
                    f"({format_time(proved.proved_at)}): that is never deleted",
                )
                continue
            # Without a witness nothing is ever proved; then this is the best that is known of any.
            restored = next((backup for backup in backups if backup.restored_at is not None), None)
            if restored is not None and restored.restored_at is not None:
                self._note(
                    restored.id,
                    "proved",
                    "none here is proved, and it is the newest one that a test restore "
                    f"brought back ({format_time(restored.restored_at)}): that is never deleted",
                )

    def _with_parents(self) -> None:
        """What a kept backup builds on is kept, however many steps away."""
        for backup in self._backups:
            if backup.id not in self._grounds:
                continue
            child = backup
            while child.parent is not None and (parent := self._by_id.get(child.parent)) is not None:
                grounds = self._grounds.get(parent.id)
                if grounds is not None:
                    break  # it is kept already; what it builds on follows from itself
                self._note(parent.id, "parent", f"{backup.id} is kept and builds on it")
                child = parent

    def _awaited(self) -> None:
        """What another destination keeps by its own rules goes nowhere before it is there."""
        for backup in self._backups:
            if backup.id in self._view.awaited and backup.id not in self._grounds and not backup.marked:
                self._note(backup.id, "awaited", self._view.awaited[backup.id])
        self._with_parents()

    def _hold(self) -> list[str]:
        held = [backup.id for backup in self._backups if backup.id not in self._grounds]
        for backup_id in held:
            self._note(backup_id, "hold", f"nothing of {self._view.server} is deleted: {self._view.hold}")
        return [backup_id for backup_id in held if not self._by_id[backup_id].marked]

    def _minimum(self) -> None:
        """What is paid for in any case stays for that long, but no binary logs are kept for it."""
        if self._keep is None or self._keep.early_deletion:
            return
        before = frozenset(self._grounds)
        for backup in self._backups:
            if backup.id not in before and not backup.marked and (words := self._early(backup)):
                self._note(backup.id, "minimum", words)
        self._with_parents()
        self._paid = frozenset(self._grounds) - before

    def _early(self, backup: Stored) -> str:
        """What deleting it now would cost; "" where it costs nothing."""
        minimum = backup.minimum
        return minimum.words(self._now) if minimum is not None and minimum.until > self._now else ""

    def _complain(self) -> None:
        future = [b.id for b in self._backups if b.finished_at > self._now]
        if future:
            self._warnings.append(f"{few(future, 3)} ended in the future: check the clock of this host")
        broken = [b.id for b in self._backups if self._problems[b.id] and not b.marked]
        if broken and self._has_rules:
            self._warnings.append(
                f"{few(broken, 3)} cannot be restored from here and no rule counts them: {self._problems[broken[0]]}"
            )
        for backup in self._backups:
            if backup.marked and backup.id in self._grounds and not self._view.hold:
                self._warnings.append(
                    f"{backup.id} is marked deleted here, but {self._grounds[backup.id][0].text}; "
                    f"backupd backups undelete {backup.id} removes the mark"
                )

    def _why_not(self, backup: Stored) -> tuple[str, ...]:
        if backup.marked:
            return ("it is marked deleted here already",)
        problem = self._problems[backup.id]
        if problem:
            return (f"{problem}, so no rule counts it, and a newer restorable backup is here",)
        early = self._early(backup)
        return (*(rule.denied(backup) for rule in self._rules), *([early] if early else []))

    def _runs(self) -> tuple[RunDecision, ...]:
        runs = sorted(self._view.runs, key=lambda run: (run.first_at, run.name))
        needing = self._needing_logs() if self._has_rules and not self._view.hold else []
        if not needing:
            why = (
                self._view.hold
                or self._view.unconfigured
                or (
                    "there is no restorable backup here, so the needed logs are unknown"
                    if self._has_rules
                    else "this destination has no rules, so it keeps everything"
                )
            )
            return tuple(RunDecision(run, keep=True, reason=why) for run in runs)
        return tuple(map(self._priced, decide(runs, needing, self._view.branches)))

    def _priced(self, decision: RunDecision) -> RunDecision:
        """With what letting it go now costs. Logs go from the oldest on, so this is about the youngest of them."""
        if decision.keep or self._view.logs_minimum is None:
            return decision
        storage_class, time = self._view.logs_minimum
        minimum = Minimum(storage_class, decision.run.last_at + time)
        if minimum.until <= self._now:
            return decision
        return replace(decision, reason=f"{decision.reason}; {minimum.words(self._now)}")

    def _needing_logs(self) -> list[Stored]:
        """The kept backups that binary logs are kept for; none when no restorable one is here."""
        if not self._bases:
            return []
        physical = self._bases[0].kind is not BackupKind.LOGICAL
        wanted = self._grounds.keys() - self._paid
        kept = [
            backup
            for backup in self._backups
            if backup.id in wanted and (backup.kind is not BackupKind.LOGICAL) is physical
        ]
        if self._keep is None or self._keep.binlogs == "all":
            return kept
        return [backup for backup in kept if any(ground.rule in _NEEDING for ground in self._grounds[backup.id])]


def problems(by_id: Mapping[str, Stored]) -> dict[str, str]:
    """Of each backup why it could not be restored from here; empty where it could."""
    walk = Restorability(by_id.get, lambda backup: here_if(not _own_problem(backup)))
    return {name: _words(name, walk.of(backup).obstacle, by_id) for name, backup in by_id.items()}


def _own_problem(backup: Stored) -> str:
    if backup.marked:
        return "it is marked deleted here"
    if not backup.usable:
        return "this copy is damaged"
    return "a restore of it is expected to fail" if backup.doubtful else ""


def _words(name: str, obstacle: Obstacle | None, by_id: Mapping[str, Stored]) -> str:
    if obstacle is None:
        return ""
    if obstacle.why is Why.PARENT_MISSING:
        return f"it builds on {obstacle.parent}, which is not here"
    if obstacle.why is Why.CIRCLE:
        return "it builds on itself"
    problem = _own_problem(by_id[obstacle.backup]) or "the parent of this increment is unknown"
    return problem if obstacle.backup == name else f"it builds on {obstacle.backup}: {problem}"
