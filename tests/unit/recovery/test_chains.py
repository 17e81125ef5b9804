from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, Stats
from backupd.model.errors import DamagedError, NotFoundError
from backupd.model.server_facts import Position
from backupd.recovery.chains import chain_of, dependants, restorable
from backupd.recovery.restorable import Obstacle, Restorability, Restorable, Why, members_of
from tests.support.dice import rounds, thrown


def backup(number: int, parent: int | None = None, server: str = "shop") -> BackupRecord:
    finished = datetime(2026, 11, 1, tzinfo=UTC) + timedelta(hours=number)
    return BackupRecord(
        id=name(number),
        server=server,
        kind=BackupKind.PHYSICAL_FULL if parent is None else BackupKind.PHYSICAL_INCREMENTAL,
        state=BackupState.COMPLETE,
        parent=None if parent is None else name(parent),
        started_at=finished - timedelta(minutes=5),
        finished_at=finished,
        stats=Stats(1, 1, 1, 1, 0),
        position=Position(),
        flavour="mariadb",
        server_version="10.11.19",
        tool_version="10.11.19",
    )


def name(number: int) -> str:
    return f"20261101T000000Z-{number:08x}"


def ids(backups: Iterable[BackupRecord]) -> list[int]:
    return [int(b.id[-8:], 16) for b in backups]


def at(b: BackupRecord, *places: str, state: str = "complete") -> BackupRecord:
    return replace(b, copies=tuple(Copy(place, state, b.finished_at) for place in places))


def whole(stock: Iterable[BackupRecord]) -> Restorability[BackupRecord]:
    """As if every copy counted."""
    return Restorability({b.id: b for b in stock}.get, lambda _: frozenset({"local"}))


def orphans(stock: Iterable[BackupRecord]) -> list[BackupRecord]:
    walk = whole(stock)
    return [b for b in stock if walk.of(b).obstacle is not None]


def lines(stock: Sequence[BackupRecord]) -> list[list[int]]:
    """From each full backup to each increment that nothing builds on."""
    by_id, parents, lost = {b.id: b for b in stock}, {b.parent for b in stock}, orphans(stock)
    return sorted(ids(members_of(b, by_id)) for b in stock if b.id not in parents and b not in lost)


STOCK = [backup(1), backup(2, 1), backup(3, 2), backup(4), backup(5, 4), backup(6, 3)]


def test_a_chain_goes_from_the_full_backup_to_the_one_asked_for_by_parent_ids_alone() -> None:
    assert ids(chain_of(name(6), reversed(STOCK))) == [1, 2, 3, 6]
    assert ids(chain_of(name(4), STOCK)) == [4]
    late = [replace(b, finished_at=datetime(2026, 12, 1, tzinfo=UTC)) if b.parent is None else b for b in STOCK]
    assert ids(chain_of(name(3), late)) == [1, 2, 3]


def test_a_missing_parent_is_named() -> None:
    with pytest.raises(NotFoundError, match=f"{name(3)} builds on {name(2)}, which is missing"):
        chain_of(name(6), [b for b in STOCK if b.id != name(2)])
    with pytest.raises(NotFoundError, match=name(9)):
        chain_of(name(9), STOCK)
    with pytest.raises(NotFoundError, match="not named"):
        chain_of(name(2), [replace(STOCK[1], parent=None)])


def test_parents_in_a_circle_or_of_another_sort_are_refused() -> None:
    with pytest.raises(DamagedError, match="builds on it"):
        chain_of(name(8), [backup(7, 8), backup(8, 7)])
    with pytest.raises(DamagedError, match="which is of bank"):
        chain_of(name(2), [backup(1, server="bank"), backup(2, 1)])
    with pytest.raises(DamagedError, match="logical"):
        chain_of(name(2), [replace(STOCK[0], kind=BackupKind.LOGICAL), STOCK[1]])


def test_chains_begin_at_full_backups_and_fork_where_two_increments_have_one_parent() -> None:
    assert lines(STOCK) == [[1, 2, 3, 6], [4, 5]]
    assert lines([*STOCK, backup(7, 2)]) == [[1, 2, 3, 6], [1, 2, 7], [4, 5]]
    assert lines([]) == []


def test_increments_without_a_line_back_to_a_full_backup_are_orphans_and_in_no_chain() -> None:
    torn = [b for b in STOCK if b.id != name(2)]
    assert ids(orphans(torn)) == [3, 6]
    assert orphans(STOCK) == []
    assert ids(orphans([backup(7, 8), backup(8, 7)])) == [7, 8]
    assert lines(torn) == [[1], [4, 5]]


def test_restorable_needs_every_parent_complete_and_one_place_that_holds_all() -> None:
    here = [at(b, "local", "offsite") for b in STOCK]
    assert ids(restorable(reversed(here))) == [1, 2, 3, 4, 5, 6]
    for state in (BackupState.DAMAGED, BackupState.DELETED):
        assert ids(restorable([replace(b, state=state) if b.id == name(2) else b for b in here])) == [1, 4, 5]
    assert ids(restorable([at(b, "local") if b.id == name(2) else b for b in here])) == [1, 2, 3, 4, 5, 6]
    apart = [at(b, "vault") if b.id == name(3) else b for b in here]
    assert ids(restorable(apart)) == [1, 2, 4, 5]
    assert ids(restorable([at(b, "local", state="deleted") if b.id == name(4) else b for b in here])) == [1, 2, 3, 6]
    assert restorable([replace(b, kind=BackupKind.LOGICAL) for b in here]) == ()


def test_the_obstacle_is_the_nearest_one_and_names_the_member_that_it_is_of() -> None:
    by_id = {b.id: at(b, "local") for b in STOCK}
    assert whole(STOCK).of(STOCK[5]) == Restorable(frozenset({"local"}))
    torn = Restorability({k: b for k, b in by_id.items() if k != name(2)}.get, lambda b: b.whole_at)
    assert torn.of(by_id[name(6)]).obstacle == Obstacle(Why.PARENT_MISSING, name(3), name(2))
    damaged = Restorability({**by_id, name(2): STOCK[1]}.get, lambda b: b.whole_at)
    assert damaged.of(by_id[name(6)]).obstacle == Obstacle(Why.UNFIT, name(2), name(1))
    apart = Restorability({**by_id, name(3): at(STOCK[2], "vault")}.get, lambda b: b.whole_at)
    assert apart.of(by_id[name(2)]).destinations == {"local"}
    assert apart.of(by_id[name(6)]).obstacle == Obstacle(Why.SCATTERED, name(3), name(2))
    assert whole([replace(STOCK[1], parent=None)]).of(replace(STOCK[1], parent=None)).obstacle == Obstacle(
        Why.NO_PARENT, name(2)
    )
    circle = [backup(7, 8), backup(8, 7), backup(9, 8)]
    assert {found.why for b in circle if (found := whole(circle).of(b).obstacle) is not None} == {Why.CIRCLE}


def test_of_each_backup_the_walk_asks_once() -> None:
    asked: list[str] = []

    def where(b: BackupRecord) -> frozenset[str]:
        asked.append(b.id)
        return frozenset({"local"})

    walk = Restorability({b.id: b for b in STOCK}.get, where)
    for b in reversed(STOCK):
        assert walk.of(b).destinations == {"local"}
    assert sorted(asked) == [b.id for b in STOCK]


def test_dependants_are_all_that_could_not_be_restored_any_more() -> None:
    assert ids(dependants(name(1), STOCK)) == [2, 3, 6]
    assert ids(dependants(name(3), STOCK)) == [6]
    assert dependants(name(6), STOCK) == ()
    assert ids(dependants(name(7), [backup(7, 8), backup(8, 7)])) == [8]


def test_random_histories_agree_with_a_slow_and_simple_look_at_each_backup() -> None:
    random = thrown("chains")
    for _ in range(rounds(50)):
        stock: list[BackupRecord] = []
        for number in range(random.randrange(1, 30)):
            parent = random.choice([None, *range(number)]) if number else None
            stock.append(backup(number, parent))
        kept = [b for b in stock if random.random() < 0.9]
        known = {b.id for b in kept}

        def line(b: BackupRecord, known: set[str] = known, stock: list[BackupRecord] = stock) -> list[str]:
            above = [b.id]
            while b.parent is not None:
                b = stock[int(b.parent[-8:], 16)]
                above.append(b.id)
            return above if known.issuperset(above) else []

        for b in kept:
            if line(b):
                assert [m.id for m in reversed(chain_of(b.id, kept))] == line(b)
            else:
                with pytest.raises(NotFoundError):
                    chain_of(b.id, kept)
        assert {b.id for b in restorable([at(b, "local") for b in kept])} == {b.id for b in kept if line(b)}
        assert {b.id for b in orphans(kept)} == {b.id for b in kept if not line(b)}
        for b in kept:
            mine = {o.id for o in dependants(b.id, kept)}
            assert mine >= {o.id for o in kept if o.id != b.id and b.id in line(o)}


def test_long_histories_are_cut_into_their_chains() -> None:
    stock = [backup(n, None if n % 1000 == 0 else n - 1) for n in range(20_000)]
    assert len(lines(stock)) == 20
    assert len(chain_of(name(19_999), stock)) == 1000
    assert len(dependants(name(0), stock)) == 999
