"""MySQL's histories that forked: by a reset, and by a restore in place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.catalog.session import open_catalog
from tests.support.e2e.forked import Source, begun, copied, diary, refused
from tests.support.e2e.house import SERVER
from tests.support.e2e.oracle import NO_GTIDS
from tests.support.keys import Keys
from tests.support.servers.replica import part, replica_of
from tests.support.servers.stacks import MYSQL, MYSQL_CLONE, Stack, stacks, whole
from tests.support.stores.folders import give_to_database

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


@pytest.fixture(params=stacks(*MYSQL))
def stack(request: pytest.FixtureRequest) -> Stack:
    chosen: Stack = request.param
    return chosen


@pytest.fixture
def source(stack: Stack, short_tmp: Path, keys: Keys) -> Iterator[Source]:
    with begun(stack, short_tmp, keys) as found:
        yield found


def test_after_a_reset_the_same_gtids_are_on_two_branches_and_each_is_reached_by_its_own_backup(
    stack: Stack, source: Source
) -> None:
    house = source.house
    if refused(stack, house):
        return
    house.backup()
    before = source.write("before")
    source.stream()
    source.server.execute(source.server.words.reset)
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


def test_a_server_that_was_restored_under_its_own_name_gives_the_same_gtids_and_nothing_is_mixed(
    stack: Stack, source: Source
) -> None:
    house, server = source.house, source.server
    if refused(stack, house):
        return
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


def test_who_answers_is_compared_a_stranger_a_replica_that_took_over_and_the_server_restored(
    stack: Stack, source: Source
) -> None:
    house, server = source.house, source.server
    if refused(stack, house):
        return
    first = house.backup()
    source.write("before")
    source.stream()
    with stack.make(tcp=True) as other:
        other.create_backup_users()
        house.server = other
        house.write()
        assert "another server answers under this name" in house.fails("check", SERVER).all
        source.stream()
        assert len(source.branches()) == 1
        house.server = server
        house.write()
        source.write("after the wrong entry")
        source.stream()
        old, now = source.branches()
        assert (now["parent"], now["fork"] is not None) == (old["id"], True)
        source.is_restored("latest", "after the wrong entry")
    with replica_of(server) as replica:
        part(replica)
        house.server = replica
        house.write()
        replica.execute("SET GLOBAL read_only = 0")
        source.write("taken over")
        assert house.run("check", SERVER).code == 0
        source.stream()
        assert source.branches()[-1]["reason"] == "failover"
        assert not house.backup()["apart"]
        source.is_restored("latest", "taken over")
    house.server = server
    house.write()
    server.stop()
    house.remove_datadir(server.datadir)
    house.restore(server.datadir, to=f"backup:{first['id']}")
    server.start()
    assert house.run("check", SERVER).code == 0
    with open_catalog(house.catalog) as catalog:
        told = [
            event.kind
            for event in sorted(catalog.events.list(server=SERVER, limit=1000), key=lambda e: e.number)
            if event.kind in ("server-changed", "server-known", "server-failover")
        ]
    assert told == ["server-changed", "server-known", "server-failover"]


def test_a_copy_of_the_data_directory_that_answers_elsewhere_is_a_stranger_though_it_tells_our_uuid(
    stack: Stack, source: Source
) -> None:
    house, server = source.house, source.server
    if refused(stack, house) or not server.scalar("SELECT @@GLOBAL.gtid_mode = 'ON'"):
        return
    first = house.backup()
    source.write("before")
    source.stream()
    image = house.base / "image"
    copied(server, image)
    source.write("after the image")
    source.stream()
    line = house.ok("timeline", SERVER)
    with stack.make(tcp=True, datadir=image) as copy:
        assert copy.scalar("SELECT @@server_uuid") == server.scalar("SELECT @@server_uuid")
        copy.execute("CREATE DATABASE in_the_copy")
        house.server = copy
        house.write()
        source.stream()
        for command in (("check", SERVER), ("backup", SERVER, "--kind", "full"), ("leftovers", SERVER)):
            said = house.fails(*command).all
            assert "another server answers under this name" in said, said
            assert "a copy of its data directory" in said
        assert [one["id"] for one in house.backups()] == [first["id"]]
        told = house.ok("timeline", SERVER)
        assert (told["latest"], len(told["branches"])) == (line["latest"], 1)
        assert "--accept-older" in source.is_refused("latest")
        house.server = server
        house.write()
    house.remove_datadir(image)
    assert house.run("check", SERVER).code == 0


@pytest.mark.parametrize("stack", stacks(*whole(*MYSQL), soak=(MYSQL_CLONE,)))
def test_without_gtids_files_and_places_tell_a_lost_tail_and_a_reset(stack: Stack, short_tmp: Path, keys: Keys) -> None:
    with begun(stack, short_tmp, keys, NO_GTIDS) as source:
        house, server = source.house, source.server
        house.backup()
        kept, lost, new = source.crash_behind_the_tail()
        source.stream()
        old, now = source.branches()
        assert (old["reason"], now["reason"], now["parent"]) == ("first", "lost-tail", old["id"])
        assert f"{now['fork']['file']}:{now['fork']['pos']}" == kept.place
        source.is_restored(f"{lost.place}@{old['id']}", "lost")
        source.is_restored(new.time, "new")
        source.is_restored("latest", "new")

        server.execute(server.words.reset)
        after = source.write("after")
        source.stream()
        assert [one["reason"] for one in source.branches()] == ["first", "lost-tail", "reset"]
        assert "--accept-older" in source.is_refused("latest")
        source.is_refused(after.time)
        house.backup()
        source.write("later")
        source.stream()
        source.is_restored("latest", "later")
        source.is_restored(f"{new.place}@{now['id']}", "new")
