"""Whether a replica holds what its source does: what each check found, and what all of them together show. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from backupd.model.document import HIDDEN, Document, computed
from backupd.model.text import format_time


@dataclass(frozen=True, slots=True)
class ComparedServer:
    """Which server with which data: ``uuid``, which a MySQL server keeps in its data directory; MariaDB's is that of
    host and port, so ``made`` is when a file of the data directory was put there that no restart touches. "" for what
    is not known."""

    uuid: str = ""
    made: str = ""

    def may_be(self, other: ComparedServer) -> bool:
        """Are both one server with the same data, as far as both say?"""
        return all(one == two or not one or not two for one, two in ((self.uuid, other.uuid), (self.made, other.made)))


NOBODY = ComparedServer()


@dataclass(frozen=True, slots=True)
class ConsistencyCheck(Document):
    """One comparison of a replica with its source. Tables are named with backticks, as ``TableName`` writes them."""

    id: str
    server: str
    replica: str
    """The server that was compared: a member of a group, or the server itself."""
    source: str
    """The configured server that it replicates from."""
    tool: str
    """``pt-table-checksum``, or ``witness``: checksums of both servers at one GTID."""
    started_at: datetime
    finished_at: datetime
    equal: tuple[str, ...] = field(default=(), metadata=HIDDEN)
    different: Mapping[str, str] = field(default_factory=dict)
    """Tables that differ, and in which way."""
    unchecked: Mapping[str, str] = field(default_factory=dict)
    """Tables that were not compared, and why."""
    errant: tuple[str, ...] = ()
    """Transactions that the replica has executed and its source has not, with what they did where its log says so."""
    errant_unchecked: str = ""
    """Why its transactions could not be compared; empty where they were."""
    replica_uuid: str = ""
    """Of the server that was compared; "" for checks of earlier versions."""
    trouble: str = ""
    """Why nothing could be compared; empty where something was."""
    replica_made: str = field(default="", metadata=HIDDEN)
    """When its data was put in place, where its uuid does not tell that: see ``ComparedServer``."""

    @property
    @computed(after="tool")
    def tables(self) -> int:
        """Of our list."""
        return len(self.equal) + len(self.different) + len(self.unchecked)

    @property
    @computed(after="tables")
    def tables_equal(self) -> int:
        return len(self.equal)

    @property
    def of(self) -> ComparedServer:
        """The server that was compared."""
        return ComparedServer(self.replica_uuid, self.replica_made)

    @property
    @computed(after="finished_at", digits=3)
    def seconds(self) -> float:
        return (self.finished_at - self.started_at).total_seconds()


class ConsistencyVerdict(StrEnum):
    """``clean``: every table was compared within the time that the policy allows, and is equal; ``different``: one is
    not; ``unchecked``: anything less."""

    CLEAN = "clean"
    DIFFERENT = "different"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class Consistency(Document):
    """What all checks of a replica show now. ``why``: what is missing to ``clean``; ``checked_at``: when the last check
    ended, None without one."""

    replica: str
    verdict: ConsistencyVerdict
    why: str = ""
    checked_at: datetime | None = None
    different: Mapping[str, str] = field(default_factory=dict)
    unchecked: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """One sentence."""
        return f"{self.replica} is {self.verdict}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class ServerConsistency(Document):
    """A server, or each member of a group that was ever compared, and the newest checks, newest first."""

    server: str
    replicas: tuple[Consistency, ...]
    checks: tuple[ConsistencyCheck, ...] = ()

    @property
    @computed("clean", after="server")
    def is_clean(self) -> bool:
        """Is every one of them clean?"""
        return bool(self.replicas) and all(one.verdict is ConsistencyVerdict.CLEAN for one in self.replicas)


def consistency_of(
    replica: str,
    checks: Iterable[ConsistencyCheck],
    max_age: timedelta,
    now: datetime,
    since: datetime | None = None,
    present: ComparedServer = NOBODY,
) -> Consistency:
    """``checks``: of this replica, in any order. A table that was found to differ does so until a later check finds it
    equal, or it is gone, however long ago that was; one that was equal counts for ``max_age``, and only where that was
    found of the server that is there now: ``present``, as far as that is known, which answered first at ``since``.
    Nothing is clean as long as the last try could compare nothing."""
    tried = sorted(checks, key=lambda one: one.finished_at, reverse=True)
    known = [one for one in tried if not one.trouble]
    if not known:
        why = f": {tried[0].trouble}" if tried else ""
        return Consistency(replica, ConsistencyVerdict.UNCHECKED, f"it was never compared with its source{why}")
    newest = known[0]
    equal = [frozenset(one.equal) for one in known]
    different: dict[str, str] = {}
    unchecked: dict[str, str] = {}
    for name in (*newest.equal, *newest.different, *newest.unchecked):
        found = next(
            (one for one, same in zip(known, equal, strict=True) if name in one.different or name in same), None
        )
        if found is not None and name in found.different:
            different[name] = found.different[name]
        elif found is None:
            unchecked[name] = newest.unchecked[name]
        elif now - found.finished_at > max_age:
            unchecked[name] = f"last compared at {format_time(found.finished_at)}"
        elif not found.of.may_be(present) or (since is not None and found.started_at < since):
            unchecked[name] = f"it was another server that was compared, at {format_time(found.finished_at)}"
    if different:
        verdict, why = ConsistencyVerdict.DIFFERENT, f"{_tables(len(different))} from its source: {_few(different)}"
    elif trouble := tried[0].trouble:
        ended = format_time(tried[0].finished_at)
        verdict, why = ConsistencyVerdict.UNCHECKED, f"it could not be compared at {ended}: {trouble}"
    elif unchecked:
        many = "1 table was" if len(unchecked) == 1 else f"{len(unchecked)} tables were"
        verdict, why = ConsistencyVerdict.UNCHECKED, f"{many} not compared in time: {_few(unchecked)}"
    elif not newest.tables:
        verdict, why = ConsistencyVerdict.UNCHECKED, "there was no table to compare"
    else:
        verdict, why = ConsistencyVerdict.CLEAN, ""
    return Consistency(replica, verdict, why, newest.finished_at, different, unchecked)


_NAMED = 10


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more


def _tables(count: int) -> str:
    return "1 table differs" if count == 1 else f"{count} tables differ"
