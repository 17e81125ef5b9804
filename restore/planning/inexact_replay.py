"""Replays that may give other rows than the source had, or that the asked-for method cannot do, found in the index of
what is replayed, before a byte moves. Pure.

A temporary table is in no backup. A session that had one open at the backup's position goes on to use it in the log
that is replayed: ``CREATE TEMPORARY TABLE IF NOT EXISTS`` then makes an empty one where the source kept its rows, and a
statement that reads it gives fewer rows, without an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from backupd.model.binlog import STATEMENT_SIZE, Transaction
from backupd.model.errors import RefusedError
from backupd.model.text import format_time

ACCEPT = "--accept-inexact"
_NAME = r"(?:`(?:[^`]|``)+`|[\w$]+)"
_QUALIFIED = rf"(?:{_NAME}\s*\.\s*)?{_NAME}"
_DEED = re.compile(
    rf"(?P<made>CREATE\s+(?:OR\s+REPLACE\s+)?TEMPORARY\s+TABLE\s+)(?P<unless>IF\s+NOT\s+EXISTS\s+)?(?P<name>{_QUALIFIED})"
    rf"|DROP\s+(?:/\*!\d+\s*)?TEMPORARY(?:\s*\*/)?\s+TABLE\s+(?:IF\s+EXISTS\s+)?"
    rf"(?P<gone>{_QUALIFIED}(?:\s*,\s*{_QUALIFIED})*)",
    re.IGNORECASE,
)
_SHOWN = 200
_WORD = re.compile(_NAME)
_READS = re.compile(r"\b(?:INSERT|REPLACE|UPDATE|DELETE|SELECT|LOAD)\b", re.IGNORECASE)


class InexactError(RefusedError):
    """The replay may give other rows than the source had."""

    problem_type = "inexact"

    def __init__(self, why: str) -> None:
        super().__init__(
            "inexact replay: the restored rows may differ from the source",
            detail=why,
            hint="choose a target before it, or after a backup that was taken when no temporary table was open; ROW as "
            f"binlog_format is exact; to restore it anyway: {ACCEPT}",
        )
        self.why = why


def open_before(statements: Iterable[str]) -> Counter[str]:
    """Of the statements before a position, in log order: how many sessions may have a temporary table of each name
    open there."""
    found: Counter[str] = Counter()
    for text in statements:
        for name, made, _unless in _deeds(text):
            found[name] = found[name] + 1 if made else max(found[name] - 1, 0)
    return +found


def over_temporary(replayed: Iterable[Transaction], before: Counter[str], *, known: bool, backup: str) -> str:
    """Why what is replayed onto ``backup`` may give other rows; "" where nothing says so.

    ``before``: of ``open_before`` at the backup's position; ``known``: does the archive cover all of the time
    before it, since the server started? Sessions are not distinguished: of several that have a table of one name it
    counts as the one that was open.
    """
    doubted: dict[str, str] = {}
    inside: Counter[str] = Counter()
    for one in replayed:
        if not one.statement:
            continue
        for name, made, unless in _deeds(one.statement):
            if made and unless and not inside[name] and (before[name] or not known):
                doubted.setdefault(name, "was open" if before[name] else "may have been open")
            if not made and not inside[name] and not before[name]:
                doubted.setdefault(name, "was open")
            inside[name] = inside[name] + 1 if made else max(inside[name] - 1, 0)
        rest = _DEED.sub(" ", one.statement)
        if not _READS.search(rest):
            continue
        cut = len(one.statement) >= STATEMENT_SIZE
        words = {_plain(word) for word in _WORD.findall(rest)}
        outside = [*doubted, *(name for name in before if not inside[name])]
        used = next((name for name in outside if name in words or (cut and name in doubted)), "")
        if used:
            return (
                f"{_named(one)} uses the temporary table {used}, which {doubted.get(used, 'was open')} at the position "
                f"of backup {backup} and is in no backup"
            )
    return ""


def refuse_pipe(replayed: Iterable[Transaction], *, exclude: bool) -> None:
    """Raises RefusedError for what mariadb-binlog cannot replay through a pipe."""
    hint = "replay by the server's applier (--replay-with applier)"
    if exclude:
        raise RefusedError(
            "this replay cannot go through the pipe: mariadb-binlog cannot leave out single transactions", hint=hint
        )
    found = next((one for one in replayed if one.state or one.xid), None)
    if found is not None:
        raise RefusedError(
            "this replay cannot go through the pipe: the logs hold XA transactions, and one session cannot hold a "
            "prepared one and go on",
            hint=hint,
            detail=f"{_named(found)} is one",
        )


def beyond_replay(replayed: Iterable[Transaction]) -> RefusedError | None:
    """The error for a statement that a private server cannot execute, since it makes files where the server that it
    came from has its own; None without one."""
    from backupd.engine.server.definition_text import makes_elsewhere

    found = next((one for one in replayed if one.statement and makes_elsewhere(one.statement)), None)
    if found is None:
        return None
    return RefusedError(
        "this replay would stop at a statement that creates files outside the data directory",
        detail=f"{_named(found)}: {found.statement[:_SHOWN]}",
        hint="choose a target before it, or after the next backup; single tables that it does not name can be restored "
        "with --tables; for later targets take a full backup now",
    )


def _named(one: Transaction) -> str:
    return f"{one.gtid or f'the transaction at byte {one.start}'} of {format_time(one.at)}"


def _deeds(text: str) -> Iterator[tuple[str, bool, bool]]:
    """The temporary tables that a statement makes and drops: name, is it made, and only if there is none."""
    for match in _DEED.finditer(text):
        if match["made"]:
            yield _last(match["name"]), True, bool(match["unless"])
        else:
            yield from ((_last(name), False, False) for name in re.findall(_QUALIFIED, match["gone"]))


def _last(qualified: str) -> str:
    return _plain(_WORD.findall(qualified)[-1])


def _plain(name: str) -> str:
    return (name[1:-1].replace("``", "`") if name.startswith("`") else name).lower()
