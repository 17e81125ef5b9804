"""What to restore to, as operators write it.

    latest                       the newest recoverable moment
    2026-11-21T09:41:03.250Z     a time; the offset (Z or +01:00) is required
    gtid:0-1-100                 after this transaction
    before-gtid:0-1-100          just before this transaction
    mysql-bin.000042:1234        a place in the binary log
    backup:20261121T020000Z-7f3a9c01

Any of them may end in ``@branch``: a server's history forks at every restore, and the same place may exist
twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from backupd.model.errors import UsageError
from backupd.model.text import format_time, is_id, is_name, parse_time

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
    """The place in the binary log where the next event would start; ``pos`` in bytes."""

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
