"""A catalog that is older than the archive, or new: brought into line by a stream that begins, or by fsck."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.binlogs.log_records import CatalogBackfill
from backupd.app.context.wiring import Wiring
from backupd.app.verify.verification import fsck, verify
from backupd.binlog.spool_files import Spool
from backupd.model.binlog import Gap, SegmentKey
from backupd.model.job import silent
from backupd.model.server_facts import Position
from backupd.transfer import log_segments
from tests.support.keys import Keys
from tests.support.logs.log_store import BRANCH, DESTINATIONS, SERVER, key_of, store, wired
from tests.support.logs.real_logs import RealLog, real_logs
from tests.support.stores.gate import until


@pytest.fixture
def wiring(tmp_path: Path, keys: Keys) -> Iterator[Wiring]:
    with wired(tmp_path, keys) as found:
        yield found


@pytest.fixture(scope="module")
def logs() -> tuple[RealLog, ...]:
    return real_logs()


def older_catalog(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> SegmentKey:
    """The archive holds three whole files. The catalog is of the time when the second one was growing: it knows a piece
    that its file has replaced. Gives that piece."""
    store(wiring, keys, logs[:1])
    cut = logs[1].transactions[2].end
    store(wiring, keys, logs[1:2], end=cut)
    piece = SegmentKey(BRANCH.id, logs[1].number, 0, cut)
    for destination in DESTINATIONS:
        log_segments.remove(wiring.destination(destination), SERVER, piece)
    store(wiring, keys, logs[1:3], known=False)
    return piece


def runs(wiring: Wiring) -> list[tuple[str, int, int, int, int]]:
    return [
        (run.destination, run.first_number, run.last_number, run.last_pos, run.segments)
        for run in wiring.catalog.binlogs.runs(SERVER)
    ]


def recollect(wiring: Wiring) -> None:
    """As at the beginning of a stream."""
    stop = threading.Event()
    found = CatalogBackfill(
        SERVER,
        wiring.settings.catalog,
        {name: wiring.destination(name) for name in DESTINATIONS},
        Spool(wiring.settings.spool / "binlogs" / SERVER),
        stop,
        wiring.clock,
    )
    found.start()
    until(lambda: found.was_tried)
    stop.set()
    found.join(240)


def test_a_stream_that_begins_brings_an_older_catalog_up_to_date(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    piece = older_catalog(wiring, keys, logs)
    recollect(wiring)
    assert runs(wiring) == [(destination, 1, 3, logs[2].size, 3) for destination in DESTINATIONS]
    assert piece not in [record.key for record in wiring.catalog.binlogs.segments(SERVER, BRANCH.id)]
    assert wiring.catalog.binlogs.gaps(SERVER) == ()
    assert wiring.catalog.events.list() == (), "nothing was lost"


def test_a_stream_that_begins_fills_a_new_catalog(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    store(wiring, keys, logs[:3], known=False)
    recollect(wiring)
    assert wiring.catalog.binlogs.branches(SERVER) == (BRANCH,)
    assert runs(wiring) == [(destination, 1, 3, logs[2].size, 3) for destination in DESTINATIONS]


def test_a_stream_that_begins_forgets_what_is_gone_but_not_what_lies_at_a_place_that_is_not_mounted(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:3])
    log_segments.remove(wiring.destination("local"), SERVER, key_of(logs[1]))
    folder = wiring.settings.spool.parent / "offsite"
    folder.rename(folder.with_name("unplugged"))
    folder.mkdir()
    recollect(wiring)
    both = [(destination, 1, 3, logs[2].size, 3) for destination in DESTINATIONS]
    assert runs(wiring) == both, "its row is so young that somebody may be moving it"
    later = wiring.clock() + timedelta(minutes=6)
    recollect(replace(wiring, clock=lambda: later))
    assert runs(wiring) == [("local", 1, 1, logs[0].size, 1), ("local", 3, 3, logs[2].size, 1), both[1]]
    (gap,) = wiring.catalog.binlogs.gaps(SERVER)
    assert (gap.destination, gap.after.pos) == ("local", logs[0].size)
    assert [(event.kind, event.subject) for event in wiring.catalog.events.list()] == [("binlog-missing", "local")]


def test_fsck_brings_an_older_catalog_up_to_date_also_while_a_stream_is_at_work(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    older_catalog(wiring, keys, logs)
    wiring.catalog.binlogs.set_stream_state(SERVER, {"state": "streaming"}, wiring.clock())
    found = [finding.message for _place, finding in fsck(wiring, mend=False).findings]
    assert len(found) == 2, "whether the whole files are on their way is not known yet"
    assert all("a larger piece has replaced it" in message for message in found)
    assert fsck(wiring, mend=True).ok
    assert runs(wiring) == [(destination, 1, 3, logs[2].size, 3) for destination in DESTINATIONS]
    assert wiring.catalog.binlogs.gaps(SERVER) == ()


def test_verify_does_not_miss_a_piece_that_its_file_has_replaced(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    piece = older_catalog(wiring, keys, logs)
    done = verify(wiring, SERVER, None, silent)
    assert (done.ok, done.damages) == (True, ())
    for destination in DESTINATIONS:
        assert piece not in [key for _server, key in log_segments.keys(wiring.destination(destination))], (
            "nor is it fetched back"
        )
    assert piece not in [record.key for record in wiring.catalog.binlogs.segments(SERVER, BRANCH.id)]


def test_fsck_fills_a_new_catalog_and_tells_the_gaps_that_the_spool_remembers(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:3], known=False)
    spool = Spool(wiring.settings.spool / "binlogs" / SERVER)
    gap = Gap(
        SERVER,
        BRANCH.id,
        "",
        Position(logs[0].name, logs[0].size),
        Position(logs[1].name, 4),
        None,
        None,
        "the server had removed them",
        BRANCH.noticed_at,
    )
    with spool.locked():
        spool.begin(BRANCH)
        spool.add_gap(gap)
    assert fsck(wiring, mend=True).ok
    assert wiring.catalog.binlogs.gaps(SERVER) == (gap,)


def test_fsck_says_what_it_left_because_it_is_too_young_and_finishes_it_later(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:2])
    log_segments.remove(wiring.destination("local"), SERVER, key_of(logs[1]))
    wiring.catalog.binlogs.set_stream_state(SERVER, {"state": "streaming"}, wiring.clock())
    ((_place, left),) = fsck(wiring, mend=True).findings
    assert "less than 5 minutes ago" in left.message
    assert "again after that time" in left.message
    assert runs(wiring)[0] == ("local", 1, 2, logs[1].size, 2)
    later = wiring.clock() + timedelta(minutes=6)
    assert fsck(replace(wiring, clock=lambda: later), mend=True).ok
    assert runs(wiring)[0] == ("local", 1, 1, logs[0].size, 1)
