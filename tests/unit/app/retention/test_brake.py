"""Too much at once, what may not go yet, and a second installation: with real destinations and catalogs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.backup_records import adopt
from backupd.app.retention.deletion import delete, sweep_destination, unconfirmed, undelete
from backupd.app.retention.retention import make_room, relieve
from backupd.catalog.session import open_catalog
from backupd.model.errors import DestinationFullError, RefusedError
from backupd.transfer.leases import Lease, Owner
from backupd.transfer.records.manifests import backup_ids
from storage import layout
from tests.support.catalog.installation import SERVER, Installation
from tests.support.service.shop import apply
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import backup_id, put
from tests.support.stores.strict import LockingDestination

Make = Callable[..., Installation]


def test_what_all_servers_rules_let_go_in_a_day_is_braked_until_somebody_says_really(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 7}}")
    for server, first in ((SERVER, 0), ("zoo", 20), ("shut", 40)):
        for number in range(12):
            one.add(first + number, days=20 - number, server=server)
    one.write("{local: {keep_fulls: 7}}", servers=(SERVER, "zoo", "shut"))
    for server in (SERVER, "zoo", "shut"):
        assert len(apply(one.wiring, server, one.run()).marked["local"]) == 5, "five of twelve, fifteen of thirty-six"
    one.write("{local: {keep_fulls: 5}}", servers=(SERVER, "zoo", "shut"))
    assert len(apply(one.wiring, SERVER, one.run()).marked["local"]) == 2
    with pytest.raises(RefusedError, match="or more than the daily limit") as caught:
        apply(one.wiring, "zoo", one.run())
    assert "19 of 36 backups; the limit is 18" in caught.value.detail
    assert one.events("retention-refused")[0].server == "zoo"
    assert len(apply(one.wiring, "zoo", one.run(), really=True).marked["local"]) == 2
    assert {owner[0] for owner in unconfirmed(one.wiring, one.at())} == {SERVER, "shut"}, "with those of before"
    one.clock.move(days=1)
    for server in (SERVER, "zoo", "shut"):
        apply(one.wiring, server, one.run(), really=server == "shut")
    one.clock.move(days=1)
    apply(one.wiring, SERVER, one.run())
    assert [len(one.present(server=server)) for server in (SERVER, "zoo", "shut")] == [5, 5, 5]


def test_a_lock_is_told_once_and_waited_for(installation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = installation("{local: {keep_fulls: 3}}")
    place = LockingDestination("local", one.clock() + timedelta(days=9), one.clock)
    monkeypatch.setitem(one.wiring._opened, "local", place)
    ids = one.daily(4)
    apply(one.wiring, SERVER, one.run())
    for _day in range(3):
        one.clock.move(days=1, minutes=1)
        held = apply(one.wiring, SERVER, one.run()).held
    assert any("locked until" in line for line in held)
    assert (len(one.events("removal-locked")), one.present()) == (1, set(ids))
    one.clock.move(days=9)
    apply(one.wiring, SERVER, one.run())
    assert (len(one.events("removal-unlocked")), one.present()) == (1, set(ids[:3]))


def test_where_nobody_knows_how_much_room_there_is_nothing_goes_before_its_time(
    installation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = installation("{local: {keep_fulls: 3}}")
    monkeypatch.setitem(one.wiring._opened, "local", MemoryDestination("local", tree=False, clock=one.clock))
    ids = one.daily(4)
    apply(one.wiring, SERVER, one.run())
    assert not make_room(one.wiring, "local", 100, one.run())
    with pytest.raises(DestinationFullError, match="reports no free space"):
        relieve(one.wiring, DestinationFullError("quota", destination="local"), one.run())
    assert one.present() == set(ids)
    one.clock.move(days=2)
    assert make_room(one.wiring, "local", 0, one.run()), "what is due anyway went"
    assert one.present() == set(ids[:3])


# Two installations, one destination


@pytest.fixture
def pair(installation: Make, tmp_path: Path) -> Iterator[Callable[[str, str], tuple[Installation, Installation]]]:
    """Two of them with catalogs and spools of their own; backups of the first are adopted by the second."""
    catalogs = []

    def make(rules: str, others: str) -> tuple[Installation, Installation]:
        one = installation(rules)
        base = tmp_path / "second"
        base.mkdir()
        catalog = open_catalog(f"sqlite:///{base}/catalog.db")
        catalogs.append(catalog)
        two = Installation(base, catalog, others, roots={"local": tmp_path / "local"}, clock=one.clock)
        return one, two

    yield make
    for catalog in catalogs:
        catalog.close()


def test_two_installations_with_rules_of_their_own_leave_what_neither_lets_go(
    pair: Callable[[str, str], tuple[Installation, Installation]],
) -> None:
    one, two = pair("{local: {keep_fulls: 4}}", "{local: {keep_fulls: 5}}")
    ids = one.daily(6)
    assert apply(two.wiring, SERVER, two.run()).marked["local"] == (), "nothing of somebody else's is for its rules"
    assert len(adopt(two.wiring, [SERVER])) == 6
    # The second one takes them in with the times of their manifests, all alike; the ids decide.
    assert apply(two.wiring, SERVER, two.run()).marked["local"] == (ids[5],)
    assert apply(one.wiring, SERVER, one.run()).marked["local"] == (ids[4],)
    assert one.copies(ids[5]) == {"local": "deleted"}, "the mark of the other one is seen"
    assert undelete(two.wiring, ids[5]) == [ids[5]]
    one.clock.move(days=2)
    apply(two.wiring, SERVER, two.run())
    apply(one.wiring, SERVER, one.run())
    assert one.present() <= {*ids[:4], ids[5]}
    assert one.agrees()
    apply(two.wiring, SERVER, two.run())
    assert two.agrees(), "it forgot what the other one removed"


def test_while_the_other_installation_removes_a_deletion_says_so(
    pair: Callable[[str, str], tuple[Installation, Installation]],
) -> None:
    one, _two = pair("", "")
    ids = one.daily(3)
    key = layout.sweep_key(backup_id(99))
    lease = Lease(key, (), Owner("db2", "b", "n", 1, 1), one.clock(), one.clock())
    put(one.at(), key, lease.encode())
    told = delete(one.wiring, ids[2], now=True)
    assert "on db2 holds the clean-up lease" in told.held[0]
    assert sweep_destination(one.wiring, one.at())
    put(one.at(), key, replace(lease, heartbeat_at=one.clock() - timedelta(hours=1)).encode())
    assert delete(one.wiring, ids[2], now=True).held == ()
    assert backup_ids(one.at()) == [(SERVER, name) for name in sorted(ids[:2])]
