"""Sets of global transaction ids, in the two families' own writing.

MySQL: ``<uuid>[:<tag>]:<first>[-<last>]...``, a set with holes (manual, "GTID sets"; tags since 8.3). MariaDB: one
``<domain>-<server>-<sequence>`` per domain, which stands for everything of the domain up to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_MARIADB = re.compile(r"(\d+)-(\d+)-(\d+)")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TAG = re.compile(r"[a-z_]\w{0,31}")
_INTERVAL = re.compile(r"(\d+)(?:-(\d+))?")

Intervals = tuple[tuple[int, int], ...]
"""First and last number of each run, both included, in order and never touching each other."""


@dataclass(frozen=True, slots=True)
class MariadbGtids:
    """The last transaction of each replication domain: ``last[domain] == (server id, sequence)``."""

    last: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MariadbGtids:
        """Where a domain is named twice (a Gtid_list event does), the last one counts. Raises ValueError."""
        last: dict[int, tuple[int, int]] = {}
        for member in _members(text):
            match = _MARIADB.fullmatch(member)
            if match is None:
                raise ValueError(f"{member!r} is not a GTID of MariaDB")
            last[int(match[1])] = (int(match[2]), int(match[3]))
        return cls(last)

    def covers(self, other: MariadbGtids) -> bool:
        """Is every domain of ``other`` here, as far or further?"""
        return all(
            domain in self.last and self.last[domain][1] >= sequence
            for domain, (_server, sequence) in other.last.items()
        )

    def plus(self, other: MariadbGtids) -> MariadbGtids:
        """After ``other``, too: the later writing of a domain counts, as in the binary log."""
        return MariadbGtids({**self.last, **other.last})

    @property
    def is_empty(self) -> bool:
        return not self.last

    def __str__(self) -> str:
        return ",".join(f"{domain}-{server}-{sequence}" for domain, (server, sequence) in sorted(self.last.items()))


@dataclass(frozen=True, slots=True)
class MysqlGtids:
    """``runs[source] == intervals``; a source is a UUID in lower case, with ``:tag`` where there is one."""

    runs: Mapping[str, Intervals] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MysqlGtids:
        """Raises ValueError."""
        found: dict[str, list[tuple[int, int]]] = {}
        for member in _members(text.lower()):
            uuid, *rest = member.split(":")
            if not _UUID.fullmatch(uuid) or not rest:
                raise ValueError(f"{member!r} is not a GTID of MySQL")
            source = uuid
            for word in rest:
                if interval := _INTERVAL.fullmatch(word):
                    first, last = int(interval[1]), int(interval[2] or interval[1])
                    if not 0 < first <= last:
                        raise ValueError(f"{word!r} in {member!r} is not an interval")
                    found.setdefault(source, []).append((first, last))
                elif _TAG.fullmatch(word):
                    source = f"{uuid}:{word}"
                else:
                    raise ValueError(f"{word!r} in {member!r} is neither an interval nor a tag")
        return cls({source: _joined(intervals) for source, intervals in found.items()})

    def covers(self, other: MysqlGtids) -> bool:
        """Is ``other`` a subset?"""
        return other.minus(self).is_empty

    def plus(self, other: MysqlGtids) -> MysqlGtids:
        sources = {*self.runs, *other.runs}
        return MysqlGtids(
            {source: _joined([*self.runs.get(source, ()), *other.runs.get(source, ())]) for source in sources}
        )

    def minus(self, other: MysqlGtids) -> MysqlGtids:
        """What is here and not in ``other``."""
        left = {source: _without(intervals, other.runs.get(source, ())) for source, intervals in self.runs.items()}
        return MysqlGtids({source: intervals for source, intervals in left.items() if intervals})

    @property
    def count(self) -> int:
        """How many transactions."""
        return sum(last - first + 1 for intervals in self.runs.values() for first, last in intervals)

    def each(self) -> Iterator[str]:
        """One transaction after the other."""
        for source, intervals in self.runs.items():
            for first, last in intervals:
                yield from (f"{source}:{number}" for number in range(first, last + 1))

    @property
    def is_empty(self) -> bool:
        return not self.runs

    def __str__(self) -> str:
        return ",".join(
            f"{source}:" + ":".join(f"{first}" if first == last else f"{first}-{last}" for first, last in intervals)
            for source, intervals in sorted(self.runs.items())
        )


def covers(one: str, other: str, *, mariadb: bool) -> bool:
    """Does ``one`` hold everything of ``other``? Raises ValueError for what is neither."""
    if mariadb:
        return MariadbGtids.parse(one).covers(MariadbGtids.parse(other))
    return MysqlGtids.parse(one).covers(MysqlGtids.parse(other))


def plus(one: str, other: str, *, mariadb: bool) -> str:
    """The state after both. Raises ValueError."""
    if mariadb:
        return str(MariadbGtids.parse(one).plus(MariadbGtids.parse(other)))
    return str(MysqlGtids.parse(one).plus(MysqlGtids.parse(other)))


def same(one: str, other: str, *, mariadb: bool) -> bool:
    """Do both stand for the same transactions? Raises ValueError."""
    return covers(one, other, mariadb=mariadb) and covers(other, one, mariadb=mariadb)


def _members(text: str) -> Iterable[str]:
    return (member for word in text.split(",") if (member := re.sub(r"\s+", "", word)))


def _joined(intervals: Iterable[tuple[int, int]]) -> Intervals:
    found: list[tuple[int, int]] = []
    for first, last in sorted(intervals):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def _without(intervals: Intervals, other: Intervals) -> Intervals:
    left: list[tuple[int, int]] = []
    for first, last in intervals:
        begin = first
        for cut_first, cut_last in other:
            if cut_last < begin or cut_first > last:
                continue
            if cut_first > begin:
                left.append((begin, cut_first - 1))
            begin = cut_last + 1
        if begin <= last:
            left.append((begin, last))
    return tuple(left)
