"""MySQL's histories that forked: by a reset, and by a restore in place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.forked import POLICY_EXTRA, Source, diary
from tests.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.places import give_to_database
from tests.support.stacks import MYSQL, Stack, stacks

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


@pytest.fixture(params=stacks(*MYSQL))
def stack(request: pytest.FixtureRequest) -> Stack:
    chosen: Stack = request.param
    return chosen


@pytest.fixture
def source(stack: Stack, short_tmp: Path, keys: Keys) -> Iterator[Source]:
    with stack.make() as server:
        found = Source(House(short_tmp, server, keys, policy_extra=POLICY_EXTRA, programs=stack.all_programs()))
        found.begin()
        yield found


def refused(stack: Stack, house: House) -> bool:
    """Its binary log cannot be streamed, and the check says so by the release's name."""
    if release := stack.refused():
        house.refuses(release, "check", SERVER)
    return bool(release)


def test_after_a_reset_the_same_gtids_are_on_two_branches_and_each_is_reached_by_its_own_backup(
        stack: Stack, source: Source) -> None:
    house = source.house
    if refused(stack, house):
        return
    house.backup()
    before = source.write("before")
    source.stream()
    source.server.execute(stack.words().reset)
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
        stack: Stack, source: Source) -> None:
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
