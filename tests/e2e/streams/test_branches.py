"""Servers whose history forked: by a restore, a reset, a failover, a crash that lost its tail. What the source itself
held while nobody wrote says what is right, and no restore may hold what only another branch has."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.e2e.forked import Source, begun, diary, noted, refused
from tests.support.e2e.house import SERVER
from tests.support.keys import Keys
from tests.support.servers.replica import catch_up, part, replica_of
from tests.support.servers.stacks import MARIADB, MYSQL_CLONE, STACKS, Stack, stacks

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


ONLY_MARIADB = pytest.mark.parametrize("stack", stacks(MARIADB), indirect=True)
"""MySQL's gtid_purged tells more: tests/e2e/streams/test_branches_mysql.py."""


@pytest.fixture(params=stacks(*STACKS))
def stack(request: pytest.FixtureRequest) -> Stack:
    chosen: Stack = request.param
    return chosen


@pytest.fixture
def source(stack: Stack, short_tmp: Path, keys: Keys) -> Iterator[Source]:
    with begun(stack, short_tmp, keys) as found:
        yield found


@ONLY_MARIADB
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
    source.write("in the backup")
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


@ONLY_MARIADB
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
    assert source.plan(f"{before.place}@{old['id']}")["until"]["gtid"] == before.executed

    source.write("in the backup")
    house.backup()
    later = source.write("later")
    source.stream()
    source.is_restored("latest", "later")
    source.is_restored(f"gtid:{before.gtid}@{old['id']}", "before")
    assert source.plan(before.time)["until"]["branch"] == old["id"]
    assert source.plan(later.time)["until"]["branch"] == now["id"]
    assert now["id"] in source.is_refused(f"gtid:{after.gtid}")


@pytest.mark.parametrize("stack", stacks(*STACKS, soak=(MYSQL_CLONE,)), indirect=True)
def test_after_a_failover_the_lost_transactions_and_both_sides_of_the_fork_are_reached(
    stack: Stack, source: Source
) -> None:
    house, server = source.house, source.server
    if refused(stack, house):
        return
    with replica_of(server) as replica:
        house.backup()
        source.write("early")
        catch_up(server, replica)
        for one in (server, replica):
            one.execute("FLUSH BINARY LOGS")
        shared = source.write("shared")
        catch_up(server, replica)
        part(replica)
        lost = source.write("lost")
        source.stream()

        server.kill()
        replica.execute("SET GLOBAL read_only = 0")
        house.server = replica
        house.write()
        new = source.write("new")
        source.stream()
        old, now = source.branches()
        assert (old["reason"], now["reason"], now["parent"]) == ("first", "failover", old["id"])
        assert now["fork"]["gtid"] == shared.executed
        source.is_restored(f"gtid:{shared.gtid}", "shared")
        source.is_restored(f"gtid:{lost.gtid}@{old['id']}", "lost")
        across = source.is_restored(new.time, "new")
        assert across["position"]["gtid"] == new.executed
        assert source.plan(lost.time)["until"]["branch"] == old["id"]
        assert old["id"] in source.is_refused(f"gtid:{lost.gtid}")
        assert now["id"] in source.is_refused(f"gtid:{new.gtid}@{old['id']}")

        replica.execute("FLUSH BINARY LOGS")
        source.write("newer")
        source.stream()
        assert len(house.backups()) == 1
        source.is_restored("latest", "newer")


def test_a_failover_to_a_replica_that_never_rotated_is_followed_and_a_dead_branch_is_no_latest(
    stack: Stack, source: Source
) -> None:
    """All rows of both servers are the latest. After a RESET nothing of the present history can be restored: what can
    be is refused before a byte moves, and never proved."""
    house, server = source.house, source.server
    if refused(stack, house):
        return
    with replica_of(server) as replica:
        house.backup()
        _rows(source, 20)
        source.stream()
        catch_up(server, replica)
        part(replica)
        server.kill()
        replica.execute("SET GLOBAL read_only = 0")
        house.server = replica
        house.write()
        _rows(source, 30)
        source.moments["live"] = noted(replica)
        source.stream()
        _old, now = source.branches()
        assert (now["reason"], now["fork"] is not None, len(replica.query("SHOW BINARY LOGS"))) == ("failover", True, 1)
        timeline = house.ok("timeline", SERVER)
        assert timeline["windows"][-1]["branch"] == now["id"]
        assert "nothing can be restored yet" not in str(timeline["warnings"])
        assert source.is_restored("latest", "live")["position"]["gtid"] == source.moments["live"].executed
        assert not house.ok("test-restore", SERVER)["older"]

        replica.execute(replica.words.reset)
        _rows(source, 32)
        source.stream()
        said = source.is_refused("latest")
        assert "later transactions are known to exist, up to 20" in said
        assert "hint: take a full backup now: backupd backup shop-db1 --kind full; to restore up to 20" in said
        assert "--accept-older" in house.fails("plan", SERVER, "--to", "latest").all
        planned = house.ok("plan", SERVER, "--to", "latest", "--accept-older")
        assert planned["older"]["certain"]
        assert planned["older"]["ends"] < planned["older"]["known"]
        datadir = house.base / "older"
        accepted = house.ok("restore", SERVER, "--to", "latest", "--accept-older", "--datadir", str(datadir))
        assert accepted["warnings"][0].startswith("not the newest data: the restore ends at ")
        house.remove_datadir(datadir)

        done = house.fails("test-restore", SERVER, "--json")
        proof = json.loads(done.out)
        assert (proof["outcome"], proof["older"]) == ("restored", True)
        assert proof["warnings"][0].startswith("not the newest data: the restore ends at ")
        assert house.ok("timeline", SERVER)["last_proof"]["older"]


def _rows(source: Source, count: int) -> None:
    source.server.execute(
        *(f"INSERT INTO shop.diary (what, at) VALUES ('{number} of {count}', NOW(6))" for number in range(count))
    )


def test_after_a_crash_that_lost_its_tail_the_tail_and_what_came_instead_are_reached(
    stack: Stack, source: Source
) -> None:
    if refused(stack, source.house):
        return
    source.house.backup()
    kept, lost, new = source.crash_behind_the_tail()
    assert new.gtid == lost.gtid
    source.stream()
    old, now = source.branches()
    assert (old["reason"], now["reason"], now["parent"]) == ("first", "lost-tail", old["id"])
    assert f"{now['fork']['file']}:{now['fork']['pos']}" == kept.place
    source.is_restored(f"gtid:{lost.gtid}@{old['id']}", "lost")
    source.is_restored(f"gtid:{new.gtid}", "new")
    source.is_restored(kept.place, "kept")
    assert len(source.plan(new.time)["replay"]["legs"]) == 1
    assert source.plan(lost.time)["until"]["branch"] == old["id"]
    assert old["id"] in source.is_refused(lost.place)
    assert now["id"] in source.is_refused(f"{new.place}@{old['id']}")
