"""Where exactly some GTIDs are executed, in random logs of both families; the oracle counts transactions one by one."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from backupd.binlog.gtid_position import position_of
from backupd.binlog.spool_files import Spool
from backupd.model.binlog import FIRST_EVENT, Branch, BranchReason, Ending
from backupd.model.server_facts import Position
from tests.support.dice import rounds, thrown
from tests.support.logs.gtid_logs import MariadbGroup, MysqlGroup, Written, mariadb_log, mysql_log

UUIDS = tuple(f"{letter * 8}-1111-2222-3333-{letter * 12}" for letter in "abc")
NEWEST = 4
"""The files that are looked at."""
BRANCH = Branch(
    "shop", "20261121T040000Z-0000000a", datetime(2026, 11, 21, tzinfo=UTC), BranchReason.FIRST, "u", "", "binlog", 1
)
State = Hashable
Executed = frozenset[MysqlGroup]
Last = frozenset[MariadbGroup]


@dataclass(frozen=True)
class Place:
    """A place of the log, and what is executed there."""

    file: str
    pos: int
    state: State


class Logged:
    """A spool with one file for each of ``files``, and every place of theirs."""

    def __init__(self, folder: Path, branch: Branch, files: Sequence[tuple[Written, Sequence[State]]]) -> None:
        """``files``: with what is executed at the beginning and behind each transaction."""
        self.spool, self.places = Spool(folder), list[list[Place]]()
        with self.spool.locked():
            self.spool.begin(branch)
            for number, (written, states) in enumerate(files, 1):
                name = branch.file(number)
                (self.spool.incoming / name).write_bytes(written.data)
                file = self.spool.take(branch, number, name)
                if number < len(files):
                    self.spool.end(file, Ending.ROTATED)
                at = [FIRST_EVENT, *written.ends]
                self.places.append([Place(name, pos, state) for pos, state in zip(at, states, strict=True)])

    def expected(self, state: State) -> tuple[str, int] | None:
        """By looking at each place of the newest files."""
        for places in reversed(self.places[-NEWEST:]):
            for place in places:
                if place.state == state:
                    return place.file, place.pos
        return None

    def found(self, gtids: str) -> tuple[str, int] | None:
        position = position_of(self.spool, gtids)
        if position is None:
            return None
        assert position == Position(position.file, position.pos, gtids)
        return position.file, position.pos


def cut(dice: random.Random, groups: Sequence[Hashable]) -> list[int]:
    """Where files end: some are empty."""
    return [0, *sorted(dice.randint(0, len(groups)) for _ in range(dice.randint(0, 6))), len(groups)]


# -- MySQL


def text_of(executed: Executed) -> str:
    """Number by number, as nobody writes it; in any order."""
    return ",".join(f"{uuid}:{number}" for uuid, number in executed)


def of_mysql(dice: random.Random, folder: Path) -> tuple[Logged, list[Executed]]:
    purged = frozenset((UUIDS[2], number) for number in range(1, dice.choice([1, 4])))
    groups = [(uuid, number) for uuid in UUIDS[:2] for number in range(1, dice.randint(2, 12))]
    # Workers of a replica commit a little out of order.
    groups.sort(key=lambda one: one[1] + dice.uniform(0, 3))
    ends, files, executed, all_states = cut(dice, groups), [], set[MysqlGroup](), list[Executed]()
    for begin, end in pairwise(ends):
        logged: dict[str, list[int]] = {}
        for uuid, number in executed:
            logged.setdefault(uuid, []).append(number)
        states = [frozenset(executed) | purged]
        for group in groups[begin:end]:
            executed.add(group)
            states.append(frozenset(executed) | purged)
        files.append((mysql_log(logged, groups[begin:end]), states))
        all_states += states
    branch = replace(BRANCH, flavour="mysql", baseline=text_of(purged))
    return Logged(folder, branch, files), all_states


def other_sets(dice: random.Random, state: Executed) -> Iterable[Executed]:
    """That were hardly ever executed: one more, one fewer, one of somebody else."""
    yield state | {(UUIDS[0], 99)}
    yield state | {("d" * 8 + UUIDS[0][8:], 1)}
    if state:
        yield state - {dice.choice(sorted(state))}


def test_of_mysql_it_is_where_exactly_this_set_is_executed(tmp_path: Path) -> None:
    dice = thrown("position_of-mysql")
    for number in range(rounds(6)):
        logged, states = of_mysql(dice, tmp_path / str(number))
        for state in states:
            for wanted in (state, *other_sets(dice, state)):
                if wanted:
                    assert logged.found(text_of(wanted)) == logged.expected(wanted), (number, text_of(wanted))


# -- MariaDB


def gtids_of(last: Iterable[MariadbGroup]) -> str:
    return ",".join("-".join(map(str, one)) for one in last)


def of_mariadb(dice: random.Random, folder: Path) -> tuple[Logged, list[Last]]:
    numbers = dict.fromkeys(range(dice.randint(1, 3)), 0)
    groups: list[MariadbGroup] = []
    for _ in range(dice.randint(1, 25)):
        domain = dice.choice(list(numbers))
        numbers[domain] += dice.choice([1, 1, 5])
        groups.append((domain, dice.choice([1, 1, 2]), numbers[domain]))
    ends, files, all_states = cut(dice, groups), [], list[Last]()
    last: dict[int, MariadbGroup] = {}
    every: dict[tuple[int, int], MariadbGroup] = {}
    for begin, end in pairwise(ends):
        # A file lists the last transaction of each server, that of the domain behind the others.
        listed = sorted(every.values(), key=lambda one: (one[0], one == last[one[0]]))
        states = [frozenset(last.values())]
        for group in groups[begin:end]:
            last[group[0]] = every[group[0], group[1]] = group
            states.append(frozenset(last.values()))
        files.append((mariadb_log(listed, groups[begin:end]), states))
        all_states += states
    return Logged(folder, replace(BRANCH, flavour="mariadb"), files), all_states


def other_ends(dice: random.Random, state: Last) -> Iterable[Last]:
    changed: Mapping[int, MariadbGroup] = {one[0]: one for one in state}
    for domain, (_domain, server, number) in changed.items():
        yield frozenset({**changed, domain: (domain, server, number + dice.choice([1, 100]))}.values())
        yield frozenset({**changed, domain: (domain, server + 7, number)}.values())
    yield state | {(9, 1, 1)}


def test_of_mariadb_it_is_where_every_domain_is_there(tmp_path: Path) -> None:
    dice = thrown("position_of-mariadb")
    for number in range(rounds(6)):
        logged, states = of_mariadb(dice, tmp_path / str(number))
        for state in states:
            for wanted in (state, *other_ends(dice, state)):
                if wanted:
                    assert logged.found(gtids_of(wanted)) == logged.expected(wanted), (number, gtids_of(wanted))


# -- nothing to look at


def test_without_gtids_or_a_branch_there_is_none(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "empty")
    assert position_of(spool, "0-1-1") is None
    logged, _states = of_mariadb(random.Random(1), tmp_path / "one")
    assert position_of(logged.spool, "") is None


def test_what_is_behind_damage_is_not_found(tmp_path: Path) -> None:
    written = mariadb_log([], [(0, 1, 1), (0, 1, 2), (0, 1, 3)])
    states = [frozenset({(0, 1, number)}) for number in range(4)]
    logged = Logged(tmp_path, replace(BRANCH, flavour="mariadb"), [(written, states)])
    path = logged.spool.files()[0].path
    data = bytearray(path.read_bytes())
    data[written.ends[1] + 30] ^= 1
    path.write_bytes(data)
    assert logged.found("0-1-2") == (BRANCH.file(1), written.ends[1])
    assert logged.found("0-1-3") is None


def test_only_the_newest_branch_counts(tmp_path: Path) -> None:
    mysql, sets = of_mysql(random.Random(7), tmp_path / "mysql")
    mariadb, lasts = of_mariadb(random.Random(7), tmp_path / "mariadb")
    for logged, gtids in ((mysql, text_of(sets[-1])), (mariadb, gtids_of(lasts[-1]))):
        assert logged.found(gtids) is not None
        with logged.spool.locked():
            logged.spool.begin(replace(logged.spool.branches()[-1], id="20261122T040000Z-0000000b"))
        assert logged.found(gtids) is None
