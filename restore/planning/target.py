"""What to restore to, as operators write it.

    latest                       the newest recoverable moment
    2026-11-21T09:41:03.250Z     a time; the offset (Z or +01:00) is required
    gtid:0-1-100                 after this transaction
    before-gtid:0-1-100          just before this transaction
    mysql-bin.000042:1234        a position in the binary log
    backup:20261121T020000Z-7f3a9c01

Any of them may end in ``@branch``: a server's history forks at every restore, and the same position may exist
twice.

Moments that are behind what is known to be archived, and what is known to exist behind the newest that can be
restored. Pure.

That a transaction with a later time is archived does not show that everything before it is: a session may stamp what it
commits with any time, and whatever came behind that one may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from backupd.model.binlog import Branch, FilePosition, Run
from backupd.model.document import HIDDEN, Document
from backupd.model.errors import RefusedError, UsageError
from backupd.model.text import format_duration, format_time, is_id, is_name, parse_time
from backupd.recovery.runs import Histories, file_position, last_of, same_state
from backupd.recovery.windows import Window, abandoned, complete_until, not_rolled

GRAMMAR = "latest | 2026-11-21T09:41:03.250Z | gtid:... | before-gtid:... | file:pos | backup:ID, any with @branch"
_HINT = f"a target is one of: {GRAMMAR}"

_TIME = re.compile(r"\d{4}-\d\d-\d\d.*", re.DOTALL)
_POSITION = re.compile(r"(?P<file>[^\s/\\:@]+\.\d{1,10}):(?P<pos>\d{1,19})")
_MARIADB_GTID = re.compile(r"\d+-\d+-\d+(?:,\d+-\d+-\d+)*")
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_SEVERAL = r":\d+-\d+$|:\d+:\d+"
_MYSQL_GTID = re.compile(
    rf"{_UUID}(?::[A-Za-z_]\w*)?(?::\d+(?:-\d+)?)+(?:,{_UUID}(?::[A-Za-z_]\w*)?(?::\d+(?:-\d+)?)+)*"
)


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest moment that can be restored."""

    def __str__(self) -> str:
        return "latest"


@dataclass(frozen=True, slots=True)
class AtTime:
    """Everything that was committed up to ``moment`` (aware, UTC), nothing later."""

    moment: datetime

    def __str__(self) -> str:
        return format_time(self.moment)


@dataclass(frozen=True, slots=True)
class AtGtid:
    """After the transactions of ``gtid``, or (``before``) just before the single transaction it names."""

    gtid: str
    before: bool = False

    def __str__(self) -> str:
        return f"{'before-gtid' if self.before else 'gtid'}:{self.gtid}"


@dataclass(frozen=True, slots=True)
class AtPosition:
    """The position in the binary log where the next event would start; ``pos`` in bytes."""

    file: str
    pos: int

    def __str__(self) -> str:
        return f"{self.file}:{self.pos}"


@dataclass(frozen=True, slots=True)
class AtBackup:
    """Exactly what this backup holds."""

    backup_id: str

    def __str__(self) -> str:
        return f"backup:{self.backup_id}"


Goal = Latest | AtTime | AtGtid | AtPosition | AtBackup


@dataclass(frozen=True, slots=True)
class Target:
    """``str(target)`` is its canonical spelling; parsing that gives the same value. No branch: the current
    one."""

    goal: Goal
    branch: str | None = None

    def __str__(self) -> str:
        return f"{self.goal}@{self.branch}" if self.branch else str(self.goal)


def parse_target(text: str) -> Target:
    """Read a target. Raises UsageError saying what is wrong with it and what would be right."""
    written = text.strip()
    goal, at, branch = written.rpartition("@")
    if not at:
        return Target(_parse_goal(written))
    if not is_name(branch):
        raise UsageError(
            f"target {text!r}: {branch!r} after @ is not the name of a branch",
            hint="`backupd timeline SERVER` lists the branches",
        )
    return Target(_parse_goal(goal), branch)


def _parse_goal(text: str) -> Goal:
    if text == "latest":
        return Latest()
    word, colon, rest = text.partition(":")
    if colon and word in ("gtid", "before-gtid"):
        return _gtid(rest, before=word == "before-gtid")
    if colon and word == "backup":
        if not is_id(rest):
            raise UsageError(
                f"target {text!r}: {rest!r} is not a backup id",
                hint="an id looks like 20261121T020000Z-7f3a9c01; `backupd backups` lists them",
            )
        return AtBackup(rest)
    if _TIME.fullmatch(text):
        try:
            return AtTime(parse_time(text))
        except ValueError as error:
            raise UsageError(
                f"target {text!r} is not a time: {error}",
                hint="write 2026-11-21T09:41:03Z, or with an offset: 2026-11-21T10:41:03+01:00",
            ) from error
    position = _POSITION.fullmatch(text)
    if position:
        pos = int(position["pos"])
        if pos < 4:
            raise UsageError(f"target {text!r}: a binary log's first event starts at byte 4", hint=_HINT)
        return AtPosition(position["file"], pos)
    raise UsageError(f"target {text!r} is not understood" if text else "the target is empty", hint=_HINT)


def one_gtid(text: str) -> str:
    """The GTID of a single transaction, without blanks. Raises UsageError."""
    compact = re.sub(r"\s+", "", text)
    is_gtid = _MARIADB_GTID.fullmatch(compact) or _MYSQL_GTID.fullmatch(compact)
    if not is_gtid or "," in compact or re.search(_SEVERAL, compact):
        raise UsageError(
            f"{text!r} is not the GTID of one transaction",
            hint="MariaDB: 0-1-100 (domain-server-sequence), MySQL: <uuid>:100; `backupd binlog search` finds them",
        )
    return compact.lower()


def _gtid(text: str, *, before: bool) -> AtGtid:
    compact = re.sub(r"\s+", "", text)
    if not (_MARIADB_GTID.fullmatch(compact) or _MYSQL_GTID.fullmatch(compact)):
        raise UsageError(
            f"target: {text!r} is not a GTID",
            hint="MariaDB: gtid:0-1-100 (domain-server-sequence), MySQL: gtid:<uuid>:1-100",
        )
    if before and ("," in compact or re.search(_SEVERAL, compact)):
        raise UsageError(
            f"target before-gtid: {text!r} names more than one transaction",
            hint="before-gtid: takes one transaction, the one that must not be applied",
        )
    return AtGtid(compact, before)


LIMIT = timedelta(hours=1)
"""How old the newest recoverable moment of a streamed server may be where no objective says it."""
_WORTH_A_LINE = timedelta(minutes=1)
ACCEPT = "--accept-older"


@dataclass(frozen=True, slots=True)
class Stream:
    """The state of a server's stream when a plan is made. ``trouble``: why it does not go on as it should, "" where
    it does; ``failed``: somebody has to change something before it does. ``unseen_since``: since when the server does
    not answer, so that nobody knows of anything that it committed later; None where it does, or where nobody looks.
    ``limit``: how old the newest moment may be, None where nobody can tell what is missing; ``promised``: is that
    objectives.rpo? ``missed``: what the server itself says that it has committed since the stream ended, where no
    objective says that so much may be lost."""

    trouble: str = ""
    failed: bool = False
    unseen_since: datetime | None = None
    limit: timedelta | None = LIMIT
    promised: bool = False
    missed: str = ""


@dataclass(frozen=True, slots=True)
class Older(Document):
    """The newest moment that can be restored is ``ends``, and the server's history goes on up to ``known``. ``why``:
    what keeps that from being restored; ``hint``: what to do about it. ``certain``: is something of it known to exist?
    Else the server may have committed something by then."""

    ends: datetime
    known: datetime
    certain: bool = field(default=True, kw_only=True)
    why: str
    hint: str = field(metadata=HIDDEN)

    def __str__(self) -> str:
        later = "are known to exist" if self.certain else "may exist"
        return (
            f"not the newest data: the restore ends at {format_time(self.ends)}; later transactions {later}, up to "
            f"{format_time(self.known)}: {self.why}"
        )


class OlderError(RefusedError):
    """``latest`` would restore something older than what is known to exist. ``older``: how much, and why."""

    problem_type = "older"

    def __init__(self, server: str, older: Older) -> None:
        exists = "are known to exist" if older.certain else "may exist"
        super().__init__(
            f"--to latest would end at {format_time(older.ends)}, but later transactions {exists}, up to "
            f"{format_time(older.known)}",
            detail=f"{server}: {older.why}",
            hint=f"{older.hint}; to restore up to {format_time(older.ends)} anyway: {ACCEPT}",
        )
        self.older = older


def later_known(histories: Histories, window: Window, *, named: bool, now: datetime) -> Older | None:
    """What is archived, or was noticed, behind the end of ``window``, the newest one, and cannot be restored.
    ``named``: the branch was asked for, so what came on others does not count."""
    ends = end_of(window, now)
    present = histories.current
    take = f"take a full backup now: backupd backup {histories.server} --kind full"
    if not named and present is not None and (why := abandoned(histories, window)):
        known = _newest(histories.runs(present.id), now, present.noticed_at)
        return Older(ends, max(known, ends), why.partition("; take a full backup")[0], take)
    later = () if not_rolled(window.base) else _behind(histories, window)  # nothing but backups is promised of these
    if not later:
        return None
    known = _newest(later, now, min((run.first_at for run in later if run.first_at), default=ends))
    why = (
        window.reason_end
        if window.run is not None
        else f"{window.reason_end}, and what was committed since is archived, but cannot be replayed on it"
    )
    return Older(ends, max(known, ends), why, take)


def behind_the_stream(
    server: str, stream: Stream, ends: datetime, *, is_archived: bool, now: datetime
) -> tuple[Older | None, str]:
    """Whether the newest recoverable moment of a streamed server is too old, and the line to say where it is not.
    ``is_archived``: Is it in archived binary logs? A backup alone says nothing of a stream that is well."""
    until = min(stream.unseen_since or now, now)
    lag = until - ends
    age = f"the newest recoverable moment is {format_duration(max((now - ends).total_seconds(), 0.0))} old"
    late = (is_archived or bool(stream.trouble)) and stream.limit is not None and lag > stream.limit
    if stream.failed or late or stream.missed:
        why = "; ".join(filter(None, (stream.missed, stream.trouble))) or age
        if late and stream.limit is not None:
            limit = format_duration(stream.limit.total_seconds())
            why += (
                f"; objectives.rpo is {limit}"
                if stream.promised
                else f"; the limit is {limit}, as the policy has no objectives.rpo"
            )
        return Older(
            ends,
            max(until, ends),
            why,
            f"to find the cause: backupd binlog status {server}",
            certain=bool(stream.missed),
        ), ""
    if stream.trouble:
        return None, f"{stream.trouble}; {age}"
    return None, age if is_archived and lag > _WORTH_A_LINE else ""


def end_of(window: Window, now: datetime) -> datetime:
    """Up to when a restore to the end of ``window`` goes. A stamp of a commit counts where nothing was confirmed."""
    last = window.run.last_at if window.run is not None else None
    unasked = window.run is not None and complete_until(window.run, now) is None
    return max(window.end, last) if unasked and last is not None and last <= now else window.end


def _behind(histories: Histories, window: Window) -> Sequence[Run]:
    """Archived runs that a replay from ``window`` does not reach, where something was committed behind its end: by
    GTIDs, else by what the runs hold."""
    if window.run is not None:
        branch, coordinate, state = window.branch, last_of(window.run), window.run.gtids_after
    else:
        current = histories.current
        branch = window.branch or (current.id if current is not None else "")
        state = window.base.start.gtid
        at: FilePosition | None = file_position(window.base.start)
        if at is None or not branch:
            return ()
        coordinate = at
    if window.branch:
        found = [run for run in histories.runs(branch) if last_of(run) > coordinate]
    else:  # positions say nothing where the branch is not known
        found = [run for run in histories.runs(branch) if run.last_at is not None and run.last_at > window.end]
    if state and found and found[-1].gtids_after:
        return () if same_state(found[-1].gtids_after, state) else found
    return [run for run in found if run.transactions]


def _newest(runs: Iterable[Run], now: datetime, least: datetime) -> datetime:
    moments = [at for run in runs for at in (run.last_at, run.confirmed_at) if at is not None and at <= now]
    return max([least, *moments])


def refuse_past_end(
    histories: Histories,
    branch: Branch,
    run: Run,
    others: Iterable[Run | None],
    moment: datetime,
    *,
    later: datetime | None,
    now: datetime,
) -> None:
    """Raises RefusedError where nothing shows that all that was committed by ``moment`` is in ``run``, which is of
    ``branch``, and in ``others`` that a replay goes through.

    ``later``: the stamp of an archived transaction behind the target. It has to do where the server was never asked,
    if it is not in the future.
    """
    asked = [one for one in (run, *others) if one is not None and one.confirmed_at is not None]
    known = [at for one in asked if (at := complete_until(one, now)) is not None]
    stamped = run.confirmed_at is None and later is not None and moment < later <= now
    if not stamped and all(moment > at for at in known):
        raise past_end(histories, branch, run, moment, max(known, default=None))


def past_end(histories: Histories, branch: Branch, run: Run, moment: datetime, known: datetime | None) -> RefusedError:
    """The refusal of a moment that is behind ``known``, up to which everything is in ``run``."""
    following = histories.run_after(branch.id, last_of(run))
    there = f"{branch.file(run.last_number)}:{run.last_pos}"
    resumes = f"{branch.file(following.first_number)}:{following.first_pos}" if following else ""
    certain = f"; everything up to {format_time(known)} is there" if known else ""
    latest = "--to latest" + ("" if branch is histories.current else f"@{branch.id}")
    return RefusedError(
        f"{format_time(moment)} is not recoverable: branch {branch.id} is archived up to {there}"
        f"{f' and goes on at {resumes}' if resumes else ''}, and more may have been committed by then{certain}",
        detail=f"gap: after {there}" + (f", before {resumes}" if resumes else ""),
        hint=(f"--to {format_time(known)} is the last certain moment, " if known else "")
        + f"{latest} all that is archived; `backupd timeline {histories.server}` shows the others",
    )
