"""MySQL's histories that forked: by a reset, and by a restore in place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.forked import POLICY_EXTRA, Source, diary
from tests.e2e.house import House
from tests.support.dice import SOAK
from tests.support.keys import Keys
from tests.support.places import give_to_database
from tests.support.stacks import MYSQL_CLONE

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user"),
    pytest.mark.skipif(bool(MYSQL_CLONE.why_not()), reason=MYSQL_CLONE.why_not() or "it can run"),
]


@pytest.fixture
def source(short_tmp: Path, keys: Keys) -> Iterator[Source]:
    with MYSQL_CLONE.make() as server:
        programs = {**MYSQL_CLONE.programs(), "mysqlbinlog": MYSQL_CLONE.replay()[0]}
        found = Source(House(short_tmp, server, keys, policy_extra=POLICY_EXTRA, programs=programs))
        found.begin()
        yield found


@SOAK
def test_after_a_reset_the_same_gtids_are_on_two_branches_and_each_is_reached_by_its_own_backup(
        source: Source) -> None:
    house = source.house
    house.backup()
    before = source.write("before")
    source.stream()
    source.server.execute("RESET BINARY LOGS AND GTIDS")
    after = source.write("after")
    source.stream()
    old, now = source.branches()
    assert (old["reason"], now["reason"], now["parent"]) == ("first", "reset", old["id"])
    assert now["id"] in source.is_refused(after.time)
    assert now["id"] in source.is_refused(f"gtid:{after.gtid}")
    house.backup()
    source.write("later")
    source.stream()
    source.is_restored("latest", "later")
    source.is_restored(f"gtid:{before.executed}@{old['id']}", "before")


@SOAK
def test_a_server_that_was_restored_under_its_own_name_gives_the_same_gtids_and_nothing_is_mixed(
        source: Source) -> None:
    house, server = source.house, source.server
    house.backup()
    shared = source.write("shared")
    lost = source.write("lost")
    source.stream()
    server.stop()
    name = (server.datadir / "auto.cnf").read_text()
    house.remove_datadir(server.datadir)
    house.restore(server.datadir, to=f"gtid:{shared.executed}")
    (server.datadir / "auto.cnf").write_text(name)
    give_to_database(server.datadir / "auto.cnf")
    server.start()
    with server.connect() as connection:
        assert diary(connection) == shared.rows
    new = source.write("new")
    assert new.gtid == lost.gtid
    source.stream()
    old, now = source.branches()
    assert (old["reason"], now["reason"], now["parent"]) == ("first", "restore", old["id"])
    # What came with the data is in no file of the new branch, but in its gtid_purged: so the fork is known.
    assert now["fork"]["gtid"] == shared.executed
    source.is_restored("latest", "new")
    house.backup()
    source.write("newer")
    source.stream()
    source.is_restored("latest", "newer")
    source.is_restored(f"gtid:{new.executed}", "new")
    source.is_restored(f"gtid:{lost.executed}@{old['id']}", "lost")
