"""From a stream of a server that eight clients write to all the time, to the moment right before a disaster: found by a
search, restored by what the search says, compared with a real replica of the source that was stopped there."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from backupd.catalog.session import Catalog
from tests.support import sample
from tests.support.dice import size
from tests.support.e2e.archived import as_it_was, flip
from tests.support.e2e.house import SERVER, Done, House
from tests.support.e2e.oracle import (
    WITH_MARIADB,
    WITH_MYSQL,
    WITH_XTRABACKUP,
    WITHOUT_GTIDS,
    XTRABACKUP_WITHOUT_GTIDS,
    Kind,
    Mark,
    find,
    oracle,
    params,
)
from tests.support.e2e.service import ONCE_A_YEAR, Serving, catalog_of, make_due, serving, until
from tests.support.keys import Keys
from tests.support.load import Writers
from tests.support.sample import checksum_everything
from tests.support.servers.server import Server
from tests.support.stores.folders import short_directory

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user"),
    pytest.mark.campaign,
]

POLICY = (
    ONCE_A_YEAR
    + """\
binlog: {stream: true, checkpoint: 1s}
witness: {schedule: "0 0 5 1 *"}
objectives: {rpo: 1h}
"""
)
# MySQL by CLONE takes a soak: test_point_in_time_mysql.py and test_branches_mysql.py always go to a moment.
KINDS = [
    param
    for kind in (WITH_MARIADB, WITH_MYSQL, WITHOUT_GTIDS, WITH_XTRABACKUP, XTRABACKUP_WITHOUT_GTIDS)
    for param in params(kind, soak=kind in (WITH_MYSQL, WITHOUT_GTIDS))
]
NOT_CLONE = pytest.mark.parametrize("story", [*params(WITH_MARIADB), *params(WITH_XTRABACKUP)], indirect=True)
"""Of what tests/e2e/restores/test_point_in_time_mysql.py always does with CLONE."""


@dataclass
class Story:
    """``marks``: of the two disasters, by the source's own list of events; ``expected``: what a replica held right
    before them. ``files``: binary logs that the source had ended since the backup, in order."""

    kind: Kind
    house: House
    server: Server
    backed_up: dict[str, Any]
    marks: dict[str, Mark] = field(default_factory=dict)
    expected: dict[str, dict[str, int]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    witnessed: str = ""

    def search(self, *args: str) -> dict[str, Any]:
        """The only transaction that is found."""
        (found,) = self.house.ok("binlog", "search", SERVER, *args)
        one: dict[str, Any] = found
        return one

    def whole(self, file: str) -> Path:
        """The folder of an ended binary log at the destination."""
        number = int(file.rpartition(".")[2])
        (folder,) = (self.house.repository / "binlogs" / SERVER).glob(f"*/{number:010d}-*")
        return folder


def confirmed(catalog: Catalog, moment: datetime) -> None:
    """Wait until the archive has everything that was committed by then."""
    until(
        lambda: any(
            run.confirmed_at is not None and run.confirmed_at >= moment for run in catalog.binlogs.runs(SERVER)
        ),
        lambda: f"{moment}: {catalog.binlogs.stream_state(SERVER)}",
    )


def more(writers: Writers, count: int = 60) -> None:
    goal = writers.transactions + count
    deadline = time.monotonic() + 300
    while writers.transactions < goal:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def flush(server: Server) -> str:
    """The name of the binary log that has ended by it."""
    server.execute("FLUSH BINARY LOGS")
    return str(server.query("SHOW BINARY LOGS")[-2][0])


def witness(service: Serving, catalog: Catalog) -> str:
    """Let the service take one now; its GTID, or its place without."""
    begun = datetime.now(UTC)
    make_due(catalog, "witness")
    service.reload()
    until(lambda: bool(catalog.witnesses.between(SERVER, begun, datetime.now(UTC))), lambda: "a witness")
    (taken,) = catalog.witnesses.between(SERVER, begun, datetime.now(UTC))
    return taken.position.gtid or f"{taken.position.file}:{taken.position.pos}"


@pytest.fixture(scope="module", params=KINDS, ids=str)
def story(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Story]:
    kind: Kind = request.param
    with short_directory() as base, kind.stack.make(tcp=True, options=kind.options) as server:
        server.create_backup_users()
        sample.create(server)
        house = House(base, server, keys, programs=kind.programs())
        (base / "policies" / "gold.yaml").write_text(POLICY)
        with oracle(kind, server) as right, catalog_of(house) as catalog:
            with serving(house) as service:
                with Writers(server, 8, pause=0.05) as writers:
                    told = Story(kind, house, server, house.backup())
                    told.files.append(flush(server))
                    more(writers)
                    told.witnessed = witness(service, catalog)
                    told.files.append(flush(server))
                    more(writers)
                    server.execute("DROP TABLE archive.pages")
                    more(writers)
                    for _ in range(3):
                        told.files.append(flush(server))
                        more(writers)
                    server.execute("DELETE FROM archive.letters")
                    more(writers)
                    told.files.append(flush(server))
                    more(writers)
                confirmed(catalog, datetime.now(UTC))
                assert service.stop() == 0
            since = told.files[0]
            told.marks = {
                "drop": find(server, "DROP TABLE", since=since),
                "delete": find(server, "(archive.letters)", since=since),
            }
            told.expected = {name: right.before(mark) for name, mark in told.marks.items()}
        yield told


def only(story: Story, *kinds: Kind) -> None:
    """What the other kinds take longer for is left to a soak."""
    if story.kind not in (*kinds, WITH_XTRABACKUP, XTRABACKUP_WITHOUT_GTIDS) and not size(0, 1):
        pytest.skip("left to a soak")


def restored(story: Story, datadir: Path, target: str) -> dict[str, int]:
    outcome = story.house.restore(datadir, to=target)
    assert outcome["replay"]["method"] == "applier"
    with story.kind.stack.make(datadir=datadir, options=story.kind.options) as copy, copy.connect() as connection:
        return checksum_everything(connection)


def test_right_before_a_table_was_dropped(story: Story, short_tmp: Path) -> None:
    only(story, WITH_MARIADB, WITHOUT_GTIDS)
    found = story.search("--table", "archive.pages", "--kind", "drop")
    assert found["restore_before"] == story.marks["drop"].target
    assert "DROP TABLE" in found["statement"]
    assert restored(story, short_tmp / "d", found["restore_before"]) == story.expected["drop"]
    assert "`archive`.`pages`" in story.expected["drop"]


def test_right_before_everything_was_deleted_from_a_table(story: Story, short_tmp: Path) -> None:
    only(story, WITH_MARIADB, WITH_MYSQL)
    found = story.search("--table", "archive.letters", "--kind", "delete")
    assert found["restore_before"] == story.marks["delete"].target
    assert [change["rows"] > 0 for change in found["changes"]] == [True]
    assert restored(story, short_tmp / "d", found["restore_before"]) == story.expected["delete"]
    assert "`archive`.`pages`" not in story.expected["delete"]


# -- proofs


def test_the_latest_moment_is_proved_and_compared_where_the_service_took_a_witness(story: Story) -> None:
    only(story, WITH_MARIADB)
    proof = story.house.ok("test-restore", SERVER)
    assert proof["outcome"] == "proved", proof
    (compared,) = (check for check in proof["checks"] if check["name"] == "table checksums equal the witness")
    assert story.witnessed in compared["detail"]
    assert proof["tables_compared"] > 10


def test_a_random_moment_is_proved(story: Story) -> None:
    only(story, WITH_MARIADB)
    proof = story.house.ok("test-restore", SERVER, "--to", "random")
    assert proof["outcome"] == "proved", proof
    assert story.house.ok("timeline", SERVER)["last_proof"]["target"] == proof["target"]


# -- damage at the destination


def remove_two(story: Story) -> None:
    for file in story.files[3:5]:
        shutil.rmtree(story.whole(file))


def flip_a_byte(story: Story) -> None:
    (part,) = story.whole(story.files[3]).glob("part-*")  # of a file that ended right after a checkpoint: a piece
    flip(part)


def swap_contents(story: Story) -> None:
    one, other = (story.whole(file) for file in story.files[3:5])
    aside = one.rename(story.house.base / "aside")
    other.rename(one)
    aside.rename(other)


def named(told: Done, *texts: str) -> None:
    for text in texts:
        assert text in told.all, told.all


@NOT_CLONE
@pytest.mark.parametrize(("damage", "follows"), [(remove_two, 5), (flip_a_byte, 4), (swap_contents, 5)])
def test_what_is_lost_or_mixed_up_at_the_destination_is_found_and_a_target_beyond_is_refused_with_both_ends(
    story: Story, damage: Callable[[Story], None], follows: int
) -> None:
    house = story.house
    beyond = story.search("--table", "archive.letters", "--kind", "delete")["restore_before"]
    folder = story.whole(story.files[3]).name
    with as_it_was(house):
        damage(story)
        named(house.fails("verify", SERVER), folder)
        (gap,) = house.ok("timeline", SERVER)["gaps"]
        assert gap["after"]["file"] == story.files[2]
        assert (gap["before"]["file"], gap["before"]["pos"]) == (story.files[follows], 0)
        ends = f"{gap['after']['file']}:{gap['after']['pos']}", f"{story.files[follows]}:0"
        for target in ("gtid:" + str(story.server.scalar(f"SELECT {story.server.words.executed}")), beyond):
            named(house.fails("restore", SERVER, "--to", target, "--datadir", str(house.base / "no")), *ends)
        assert not (house.base / "no").exists()
        if damage is not flip_a_byte:  # that takes reading it
            named(house.fails("fsck"), folder)
        house.ok("plan", SERVER, "--to", story.marks["drop"].target)


@NOT_CLONE
def test_a_flipped_byte_makes_the_proof_fail(story: Story) -> None:
    with as_it_was(story.house):
        flip_a_byte(story)
        proof = story.house.fails("test-restore", SERVER, "--json").json
        assert proof["outcome"] == "failed", proof
        assert story.house.ok("timeline", SERVER)["last_proof"]["outcome"] == "failed"
