"""Servers whose history forked: by a restore, a reset, a failover, a crash that lost its tail. What the source itself
held while nobody wrote says what is right, and no restore may hold what only another branch has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.forked import POLICY_EXTRA, Source, diary, frozen, noted
from tests.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.mariadb import PrivateServer
from tests.support.replica import catch_up, replica_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


@pytest.fixture
def source(short_tmp: Path, keys: Keys) -> Iterator[Source]:
    with PrivateServer(tcp=True) as server:
        found = Source(House(short_tmp, server, keys, policy_extra=POLICY_EXTRA))
        found.begin()
        yield found


def test_after_a_restore_in_place_both_histories_are_there_though_their_gtids_are_the_same(source: Source) -> None:
    house, server = source.house, source.server
    house.backup()
    shared = source.write("shared")
    lost = source.write("lost")
    source.stream()

    server.stop()
    house.remove_datadir(server.datadir)
    house.restore(server.datadir, to=f"gtid:{shared.gtid}")
    server.start()
    with server.connect() as connection:
        assert diary(connection) == shared.rows
    new = source.write("new")
    assert new.gtid == lost.gtid
    source.stream()
    house.backup()
    newer = source.write("newer")
    source.stream()

    old, now = source.branches()
    assert (old["reason"], now["reason"], now["parent"]) == ("first", "restore", old["id"])
    source.is_restored(f"gtid:{lost.gtid}@{old['id']}", "lost")
    source.is_restored(shared.time, "shared")
    source.is_restored("latest", "newer")
    assert source.plan(lost.time)["until"]["branch"] == old["id"]
    assert source.plan(f"gtid:{newer.gtid}")["until"]["branch"] == now["id"]
    # Before the backup that was taken on it, the new branch cannot be reached: where MariaDB forked is not known.
    assert now["id"] in source.is_refused(f"gtid:{new.gtid}")
    assert now["id"] in source.is_refused(new.time)
    assert old["id"] in source.is_refused(f"gtid:{shared.gtid}")


def test_after_a_reset_each_history_has_its_own_backups_and_between_them_nothing_is_made_up(source: Source) -> None:
    house = source.house
    house.backup()
    before = source.write("before")
    source.stream()
    unseen = source.write("never copied")
    source.server.execute("RESET MASTER")
    after = source.write("after")
    source.stream()
    old, now = source.branches()
    assert (old["reason"], now["reason"], now["parent"]) == ("first", "reset", old["id"])
    for target in (after.time, f"gtid:{after.gtid}@{now['id']}", f"{after.place}@{now['id']}"):
        assert now["id"] in source.is_refused(target)
    assert old["id"] in source.is_refused(unseen.time)
    # A place of the same name lies on either branch.
    assert source.plan(f"{before.place}@{old['id']}")["until"]["gtids"] == before.executed

    house.backup()
    later = source.write("later")
    source.stream()
    source.is_restored("latest", "later")
    source.is_restored(f"gtid:{before.gtid}@{old['id']}", "before")
    assert source.plan(before.time)["until"]["branch"] == old["id"]
    assert source.plan(later.time)["until"]["branch"] == now["id"]
    assert now["id"] in source.is_refused(f"gtid:{after.gtid}")
