"""Archived binary logs go on to the others in log order; pieces go when the whole file is there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from backupd.alerts.rules import DESTINATION
from backupd.app.binlogs.log_follower import LogFollower
from backupd.app.copies.log_copies import LogCopies, LogsCopied
from backupd.app.views.timeline import timeline
from backupd.model.binlog import Ending, SegmentKey
from backupd.model.server_facts import Position
from backupd.transfer import log_segments
from backupd.transfer.leases import Pin
from backupd.transfer.records.authenticity import RecordedDestination
from storage import layout
from storage.destination import Destination
from tests.support.catalog.installation import SERVER
from tests.support.dice import with_another_end
from tests.support.keys import Keys
from tests.support.logs.log_store import BRANCH, key_of, store
from tests.support.logs.real_logs import RealLog, real_logs
from tests.support.service.shop import Shop
from tests.support.stores.stock import put

Make = Callable[..., Shop]


@pytest.fixture(scope="module")
def logs() -> tuple[RealLog, ...]:
    return real_logs()


def everything(destination: Destination) -> dict[str, bytes]:
    found = {}
    for info in destination.list(layout.BINLOGS):
        with destination.get(info.key) as stream:
            found[info.key] = stream.read()
    return found


def copies(one: Shop, *, pieces: bool = True) -> LogCopies:
    one.at("offsite").initialise(one.clock())
    return LogCopies(one.catalog, one.clock, SERVER, one.at("offsite"), pieces, pauses=())


def step(one: Shop, *, pieces: bool = True, first: dict[str, int] | None = None) -> LogsCopied:
    return copies(one, pieces=pieces).step([one.at()], first or {})


def there(one: Shop) -> list[SegmentKey]:
    return [key for _server, key in log_segments.keys(one.at("offsite"))]


def known(one: Shop) -> list[SegmentKey]:
    return [
        record.key for record in one.catalog.binlogs.segments(SERVER, BRANCH.id) if "offsite" in record.destinations
    ]


def test_everything_arrives_byte_for_byte_and_the_catalog_knows(
    shop: Make, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    one = shop()
    store(one.wiring, keys, logs, destinations=("local",))
    done = step(one)
    assert (done.segments, done.lacking, done.failure) == (len(logs), 0, None)
    assert everything(one.at("offsite")) == everything(one.at())
    assert known(one) == there(one) == [key_of(log) for log in logs]
    (run,) = one.catalog.binlogs.runs(SERVER, "offsite")
    assert (run.first_number, run.last_number, run.last_pos) == (logs[0].number, logs[-1].number, logs[-1].size)
    assert step(one).segments == 0


def test_pieces_follow_while_a_file_grows_and_go_when_the_whole_of_it_is_there(
    shop: Make, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    one = shop()
    cut = logs[0].cuts[2]
    store(one.wiring, keys, logs[:1], destinations=("local",), end=cut)
    assert step(one).segments == 1
    assert there(one) == [SegmentKey(BRANCH.id, logs[0].number, 0, cut)]
    log_segments.remove(one.at(), SERVER, there(one)[0])
    store(one.wiring, keys, logs[:1], destinations=("local",))
    done = step(one)
    assert (done.segments, done.dropped) == (1, 1)
    assert there(one) == known(one) == [key_of(logs[0])]


def test_pieces_stay_while_a_restore_reads_logs_there(shop: Make, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    one = shop()
    name = one.add(1, days=1, destinations=("local",))
    one.replicate()
    store(one.wiring, keys, logs[:1], destinations=("local",), end=logs[0].cuts[2])
    step(one)
    store(one.wiring, keys, logs[:1], destinations=("local",))
    with Pin(one.at("offsite"), "20261121T050000Z-00000001", [(SERVER, name)], clock=one.clock):
        assert step(one).dropped == 0
        assert len(there(one)) == 2
    assert step(one).dropped == 1


def test_no_piece_goes_to_a_place_where_each_object_is_paid_for_months(
    shop: Make, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    one = shop()
    store(one.wiring, keys, logs[:1], destinations=("local",))
    store(one.wiring, keys, logs[1:2], destinations=("local",), end=logs[1].cuts[2])
    assert step(one, pieces=False).segments == 1
    assert there(one) == [key_of(logs[0])]


def test_a_piece_that_turns_out_to_be_all_of_its_file_is_told_as_that_at_the_copy_too(
    shop: Make, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    one = shop()
    store(one.wiring, keys, logs[:1], destinations=("local",))
    header = log_segments.load_header(one.at(), SERVER, key_of(logs[0]))
    piece = replace(header, segment=replace(header.segment, ending=Ending.OPEN))
    log_segments._commit(one.at(), piece)
    one.catalog.binlogs.drop_segments(SERVER, [key_of(logs[0])], "local")
    one.catalog.binlogs.add_segment(piece.segment, "local", piece.stored_bytes, one.clock())
    work = copies(one)
    work.step([one.at()], {})
    one.clock.move(seconds=9)
    log_segments._commit(one.at(), header)
    one.catalog.binlogs.add_segment(header.segment, "local", header.stored_bytes, one.clock())
    assert work.step([one.at()], {}).segments == 1
    assert everything(one.at("offsite")) == everything(one.at())
    one.clock.move(seconds=9)
    assert work.step([one.at()], {}).segments == 0


def test_damage_at_the_only_source_is_told_and_what_comes_after_it_goes_on(
    shop: Make, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    one = shop()
    store(one.wiring, keys, logs, destinations=("local",))
    key = layout.segment_folder(SERVER, key_of(logs[1])) + layout.part_name(0)
    with one.at().get(key) as stream:
        data = stream.read()
    put(one.at(), key, with_another_end(data))
    done = step(one)
    assert (done.segments, done.lacking) == (len(logs) - 1, 1)
    assert "SHA-256" in done.troubles[0]
    assert there(one) == [key_of(log) for log in logs if log is not logs[1]]
    put(one.at(), key, data)
    assert step(one).segments == 1
    assert len(one.catalog.binlogs.runs(SERVER, "offsite")) == 1


def test_what_is_there_already_and_means_something_else_is_never_overwritten(
    shop: Make, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    one = shop()
    store(one.wiring, keys, logs[:1], destinations=("local",))
    one.at("offsite").initialise(one.clock())
    header = log_segments.load_header(one.at(), SERVER, key_of(logs[0]))
    offsite = one.at("offsite")
    assert isinstance(offsite, RecordedDestination)
    log_segments._commit(offsite._inner, replace(header, segment=replace(header.segment, sha256="0" * 64)))
    before = everything(offsite._inner)
    done = step(one)
    assert "was not written by backupd" in done.troubles[0]
    assert {key: value for key, value in everything(offsite._inner).items() if key in before} == before


def test_logs_that_no_backup_at_the_target_needs_are_not_copied(
    shop: Make, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    one = shop("{offsite: {keep_fulls: 1}}")
    store(one.wiring, keys, logs, destinations=("local",))
    name = one.add(1, days=0.1, destinations=("local",))
    record = one.catalog.backups.get(name)
    one.catalog.backups.add(
        replace(record, position=Position(logs[2].name, logs[2].cuts[0], ""), server_uuid=BRANCH.server_uuid),
        replace=True,
    )
    done = one.replicate()
    assert done.ok, done.trouble
    assert there(one) == [key_of(log) for log in logs[2:]]
    assert one.replicate().logs.segments == 0


def test_how_far_a_copy_reaches_is_confirmed_and_the_timeline_tells_it(
    shop: Make, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    one = shop()
    store(one.wiring, keys, logs, destinations=("local",))
    at = one.clock()
    one.catalog.binlogs.confirm(SERVER, "local", BRANCH.id, (logs[-1].number, logs[-1].size), at)
    reach = {found.name: found for found in timeline(one.wiring, SERVER).destinations}
    assert (reach["offsite"].latest, reach["offsite"].rpo) == (None, None), "it is told of though it holds nothing"
    step(one)
    (run,) = one.catalog.binlogs.runs(SERVER, "offsite")
    assert run.confirmed_at == at
    one.clock.move(seconds=40)
    later = one.clock()
    one.catalog.binlogs.confirm(SERVER, "local", BRANCH.id, (logs[-1].number, logs[-1].size), later)
    one.clock.move(seconds=2)
    step(one)
    assert one.catalog.binlogs.runs(SERVER, "offsite")[0].confirmed_at == later
    assert one.catalog.lags.worst(SERVER, at)["offsite"] == 42.0


def test_a_follower_copies_what_is_stored_tells_once_that_it_cannot_and_catches_up(
    shop: Make, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    one = shop()
    one.at("offsite").initialise(one.clock())
    follower = LogFollower(one.wiring, one.wiring.settings.server(SERVER), "offsite", threading.Event())
    store(one.wiring, keys, logs[:2], destinations=("local",))
    follower.step(one.wiring)
    assert there(one) == [key_of(log) for log in logs[:2]]
    assert follower.standing() == {"behind_since": None, "error": ""}
    marker = one.base / "offsite" / "repository.json"
    marker.rename(one.base / "marker")
    store(one.wiring, keys, logs[2:], destinations=("local",))
    for _ in range(3):
        one.clock.move(minutes=11)
        follower.step(one.wiring)
    assert follower.standing()["error"]
    (event,) = one.events(DESTINATION.broken)
    assert "offsite lacks binary logs" in event.message
    (one.base / "marker").rename(marker)
    one.clock.move(minutes=11)
    follower.step(one.wiring)
    assert there(one) == [key_of(log) for log in logs]
    assert len(one.events(DESTINATION.mended)) == 1


def test_the_folder_of_a_killed_copy_is_taken_up_again(shop: Make, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    one = shop()
    store(one.wiring, keys, logs[:1], destinations=("local",))
    work = copies(one)
    key = layout.segment_folder(SERVER, key_of(logs[0])) + layout.part_name(0)
    put(one.at("offsite"), key, b"half")
    assert work.step([one.at()], {}).segments == 1
    assert everything(one.at("offsite")) == everything(one.at())
