"""Tables without the rest of their server: the ways there are, and which of them is taken. Pure.

A table comes out of a logical backup, or out of a physical one of which only its files and what the server itself needs
are fetched. Either can be rolled forward with the binary logs before the rows are handed over.

What ``--as`` means for each table (``Renaming``) is here, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from backupd.model.errors import BackupdError, NotFoundError, RefusedError, UsageError
from backupd.model.table import TableName
from backupd.model.text import format_duration, format_size
from restore.planning.inexact_replay import InexactError
from restore.planning.plan import (
    DEFAULT_RATES,
    Plan,
    Rate,
    Step,
    estimated,
    over_objective,
    replay_text,
)
from restore.planning.target import OlderError

_HOW = (
    "write TABLE, SCHEMA.TABLE, or with one `*` for the old name: `*_restored`, `SCHEMA.*`; quote names that hold "
    "dots: `my.shop`.`or der`"
)

_LONGEST = 64
"""Characters of an identifier, on every flavour."""
_RATES: Mapping[str, Rate] = {
    **DEFAULT_RATES,
    "extracted": Rate(40e6, 0.5),
    "loaded": Rate(10e6, 1.0),
    "handed_over": Rate(1e12, 0.5),
}
_NAMED = 5
_SERVER = 256 * 1024 * 1024
"""Bytes that a server which holds next to nothing is taken to start with."""


@dataclass(frozen=True, slots=True)
class TableGoal:
    """``source``: its name at the target of the restore; ``target``: the one it gets on the server."""

    source: TableName
    target: TableName

    def as_json(self) -> dict[str, str]:
        """Keys: source, target; quoted where necessary."""
        return {"source": self.source.shown, "target": self.target.shown}


@dataclass(frozen=True, slots=True)
class Renaming:
    """``schema`` "": the old one. ``table``: with ``*`` where the old name goes."""

    schema: str
    table: str

    @classmethod
    def parse(cls, text: str) -> Renaming:
        """Raises UsageError, saying how to write it."""
        if text.startswith("`"):
            try:
                name = TableName.parse(text)
            except ValueError as error:
                raise UsageError(str(error), hint=_HOW) from error
            return cls(name.schema, name.table)
        schema, dot, table = text.rpartition(".")
        if not table or (dot and not schema) or "." in schema or "*" in schema or table.count("*") > 1:
            raise UsageError(f"--as {text!r} names no table", hint=_HOW)
        return cls(schema, table)

    def of(self, name: TableName) -> TableName:
        """What the table ``name`` becomes."""
        return TableName(self.schema or name.schema, self.table.replace("*", name.table))


def goals(tables: Sequence[TableName], renaming: Renaming | None) -> tuple[TableGoal, ...]:
    """A goal for each of ``tables``; without ``renaming`` each gets its own name.

    Raises RefusedError when two would get the same name, or one a name that no server takes.
    """
    found = tuple(TableGoal(name, renaming.of(name) if renaming else name) for name in tables)
    wanted = Counter(goal.target for goal in found)
    if twice := [goal for goal in found if wanted[goal.target] > 1]:
        raise RefusedError(
            f"{len(twice)} tables would all become {twice[0].target.shown}",
            detail=", ".join(goal.source.shown for goal in twice[:20]),
            hint="with more than one table --as needs a `*` in place of the old name: --as '*_restored'",
        )
    for goal in found:
        for half in (goal.target.schema, goal.target.table):
            if not 0 < len(half) <= _LONGEST or half.endswith(" ") or "\0" in half:
                raise RefusedError(
                    f"{goal.target.shown} is not a valid name: a table name has 1 to {_LONGEST} characters, the last "
                    "no space",
                    hint="choose another name with --as",
                )
    return found


class Source(StrEnum):
    """What the tables come out of."""

    LOGICAL = "logical"
    PHYSICAL = "physical"


class Triggers(StrEnum):
    """Which triggers a restored table gets: those it had in the backup, those of the table that it replaces, none."""

    BACKUP = "backup"
    LIVE = "live"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way. ``base``: the plan that leads to the target from its backups, as if for the whole server. ``needed``:
    tables that must be in the copy, with those that a replay of the others depends on; ``stored`` and ``source``: bytes
    to fetch for them, and what they are opened; ``rows``: bytes of the tables that are wanted, as far as known.
    ``missing``: tables that are wanted and that its backup lacks."""

    way: Source
    base: Plan
    needed: tuple[TableName, ...]
    stored: int
    source: int
    rows: int
    warnings: tuple[str, ...] = ()
    missing: tuple[TableName, ...] = ()

    @property
    def title(self) -> str:
        """In words, what the tables come out of."""
        kind = "the logical backup" if self.way is Source.LOGICAL else "the table's own files of the physical backup"
        return f"{kind} {self.base.backup_id}" + (" and the binary logs" if self.base.replay is not None else "")


@dataclass(frozen=True, slots=True)
class Impossible:
    """A way that does not lead there, and why."""

    way: Source
    error: BackupdError


@dataclass(frozen=True, slots=True)
class TablePlan:
    """``goals``: the tables by their names at the target, and what they become. ``steps``, bytes and seconds are those
    of the tables, where ``base`` speaks of the whole server. ``others``: the ways that are not taken, with why."""

    chosen: Candidate
    goals: tuple[TableGoal, ...]
    steps: tuple[Step, ...]
    reason: str
    others: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def base(self) -> Plan:
        """The plan of the whole server that the chosen way follows."""
        return self.chosen.base

    @property
    def seconds(self) -> float:
        """Estimated restore time of the tables."""
        return sum(step.seconds for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        """The JSON of a plan, with ``way``, ``tables`` and ``others``."""
        of_tables = replace(
            self.base,
            reason=self.reason,
            bytes_stored=self.chosen.stored,
            bytes_source=self.chosen.source,
            steps=self.steps,
            warnings=self.warnings,
        )
        return {
            **of_tables.as_json(),
            "way": str(self.chosen.way),
            "tables": [goal.as_json() for goal in self.goals],
            "needed": [name.shown for name in self.chosen.needed],
            "others": list(self.others),
        }


class NoTableError(NotFoundError):
    """No table has the name that was asked for: whatever else keeps a way from being taken matters less."""


def no_table(asked: str, known: Iterable[TableName], backup_id: str) -> NoTableError:
    """No table of ``known``, those of the backup, is what was ``asked`` for; the nearest name is proposed."""
    shown = {name.shown.lower(): name.shown for name in known}
    near = get_close_matches(asked.replace("`", "").lower(), shown, n=1)
    return NoTableError(
        f"no table fits {asked} in backup {backup_id}",
        hint=f"did you mean {shown[near[0]]}? Names are case-sensitive"
        if near
        else "names are case-sensitive: schema.table, with * for any text; if it was made after this "
        "backup, restore from a later one (backupd backups), or the whole server",
    )


def choose(
    candidates: Sequence[Candidate],
    impossible: Sequence[Impossible],
    goals: Sequence[TableGoal],
    rates: Mapping[str, Rate],
) -> TablePlan:
    """The quickest way among those that come nearest to the target and, of these, have most of the tables.

    Raises the reason why there is none: RefusedError or NotFoundError with the reasons of all ways.
    """
    if not candidates:
        raise _nowhere(impossible)
    every = {**_RATES, **rates}
    found = [(candidate, steps_of(candidate, every)) for candidate in candidates]
    newest = max(candidates, key=_reach)
    near = [item for item in found if _is_as_near(item[0], newest)]
    fewest = min(len(candidate.missing) for candidate, _ in near)
    whole = [item for item in near if len(item[0].missing) == fewest]
    chosen, steps = min(whole, key=lambda item: _seconds(item[1]))
    others = [
        _against(other, its, steps, as_near=_is_as_near(other, newest), fewest=fewest)
        for other, its in found
        if other is not chosen
    ]
    others += [f"not {one.way}: {one.error.message}" for one in impossible]
    reason = f"{chosen.title}: " + (
        "the only possible source"
        if len(candidates) == 1
        else (
            "the fastest"
            if len(whole) > 1
            else "it holds more of the tables"
            if len(near) > 1
            else "it comes nearest to the target"
        )
    )
    late = over_objective(steps, chosen.base.rto)
    return TablePlan(chosen, tuple(goals), steps, reason, tuple(others), (*chosen.warnings, *late))


def steps_of(candidate: Candidate, rates: Mapping[str, Rate]) -> tuple[Step, ...]:
    """What one way takes. ``rates``: of every phase."""
    replay = candidate.base.replay
    logical = candidate.way is Source.LOGICAL
    count = len(candidate.needed)
    tables = f"{count} table{'s' if count != 1 else ''}"
    rows = format_size(candidate.rows)
    work = {
        "fetched": (
            f"fetch {format_size(candidate.stored)} for {tables} from {candidate.base.destinations[0]}, unseal",
            candidate.source,
        ),
        "prepared": ("prepare only these files: apply redo and increments", candidate.source),
        "started": (
            "start a private server on them" if not logical else "start an empty private server",
            _SERVER if logical else candidate.source,
        ),
        "rolled_forward": (f"{replay_text(replay)}, of these tables only" if replay else "", 0),
        "extracted": (f"read {rows} of rows from the copy", candidate.rows),
        "loaded": (f"load {rows} of rows beside the live tables", candidate.rows),
        "handed_over": ("compare with the live tables, then rename them into place in one step", 0),
    }
    if logical:
        del work["prepared"]
    if logical and replay is None:
        del work["started"], work["extracted"]
    found = estimated(work, rates, replay)
    if not logical:
        return tuple(found)
    filling = rates["loaded"].estimate(candidate.rows)  # the private server has to be loaded, too
    return tuple(replace(step, seconds=step.seconds + filling) if step.name == "started" else step for step in found)


def _reach(candidate: Candidate) -> tuple[bool, str]:
    """What is nearer to the target sorts higher. With a position in the binary log it is the target itself; without one
    the backup is all there is, and the newer one (ids sort by time) is nearer."""
    exact = candidate.base.until is not None
    return exact, "" if exact else candidate.base.backup_id


def _is_as_near(candidate: Candidate, newest: Candidate) -> bool:
    """The same reach, or two backups of one position: nothing was committed between them."""
    if _reach(candidate) == _reach(newest):
        return True
    position = candidate.base.position
    return (
        candidate.base.until is newest.base.until is None and bool(position.file) and position == newest.base.position
    )


def _seconds(steps: Sequence[Step]) -> float:
    return sum(step.seconds for step in steps)


def _against(other: Candidate, its: Sequence[Step], steps: Sequence[Step], *, as_near: bool, fewest: int) -> str:
    cost = f"{format_size(other.stored)} to fetch, {format_duration(_seconds(its))}"
    if not as_near:
        return f"not {other.title}: it ends before the target ({cost})"
    if len(other.missing) > fewest:
        return f"not {other.title}: it lacks {', '.join(name.shown for name in other.missing[:_NAMED])} ({cost})"
    return f"not {other.title}: {cost}, longer than {format_duration(_seconds(steps))}"


def _nowhere(impossible: Sequence[Impossible]) -> BackupdError:
    if len(impossible) == 1:
        return impossible[0].error
    refused = any(isinstance(one.error, RefusedError) for one in impossible)
    for one in impossible:
        if isinstance(one.error, OlderError | InexactError):
            rest = [
                f"{other.way}: {' '.join(str(other.error).split())}"
                for other in impossible
                if other is not one and not isinstance(other.error, type(one.error))
            ]
            one.error.detail = "\n".join([one.error.detail, *rest])
            return one.error
    for one in impossible:
        if isinstance(one.error, NoTableError):
            return one.error
    lines = [f"{one.way}: {' '.join(str(one.error).split())}" for one in impossible]
    return (RefusedError if refused else NotFoundError)(
        "these tables cannot be restored to this target",
        detail="\n".join(lines),
        hint=next((one.error.hint for one in impossible if one.error.hint), ""),
    )
