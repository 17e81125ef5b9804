"""Small documents that somebody made unreadable: each is one unreadable document, and nothing else stops for it.

Manifests that are out of sight, as on something that is not mounted: nothing that may be theirs is collected.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from backupd.model.document import NOTE_LIMIT, parsed
from backupd.model.errors import DamagedError
from backupd.model.manifest import Header
from backupd.transfer import log_segments
from backupd.transfer.collection import Missing, collect, expecting
from backupd.transfer.deletion import is_whole, mark, marks, sweep
from backupd.transfer.deletion_limit import DeletionLimit
from backupd.transfer.fsck import Invariant, examine, repair
from backupd.transfer.holds_and_locks import kept_at
from backupd.transfer.leases import FRESH, Intent, Lease, Owner, Pin, await_sweeps, is_alive, leases, sweeping
from backupd.transfer.records.manifests import read
from storage import layout
from tests.support.logs.log_store import BRANCH
from tests.support.stores.cold import Cooled
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import START, FakeClock, Stock, backup_id, believed, named, pool, put
from tests.support.stores.strict import UndeletableDestination

SERVER = "shop"
DEEP = b"[" * 200_000
HUGE = b'{"at": "' + b"x" * NOTE_LIMIT + b'"}'
ENDLESS = (
    b'{"at": "0001-01-01T00:00:00+14:00", "pid": 1e999, "backups": [], "host": "", "boot": "", "namespace": "", '
    b'"ticks": 0, "started_at": "", "heartbeat_at": ""}'
)


@pytest.mark.parametrize(
    "raw",
    [DEEP, HUGE, b'{"a": 1e999}', b"NaN", b"9" * 5000, b"\xff", b""],
    ids=["deep", "huge", "without an end", "no number", "long number", "no text", "nothing"],
)
def test_what_cannot_be_parsed_is_a_wrong_value_and_nothing_worse(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parsed(raw, limit=NOTE_LIMIT)


@pytest.mark.parametrize("raw", [DEEP, HUGE, ENDLESS], ids=["deep", "huge", "without an end"])
@pytest.mark.parametrize(
    "key",
    [
        layout.hold_key(SERVER),
        layout.hold_key("*"),
        layout.keep_key(SERVER, backup_id(1)),
        layout.mark_key(SERVER, backup_id(1)),
        layout.intent_key(backup_id(7)),
        layout.pin_key(backup_id(7)),
        layout.sweep_key(backup_id(7)),
        layout.tombstone_key(named(b"a").name),
    ],
    ids=lambda key: key.replace("/", " "),
)
def test_a_note_that_cannot_be_parsed_counts_as_unreadable_and_stops_nobody(key: str, raw: bytes) -> None:
    clock = FakeClock()
    place = MemoryDestination("offsite", clock=clock)
    Stock(place).add(1, {"a": b"a"})
    Stock(place).add(2, {"a": b"b"})
    put(place, key, raw)
    clock.move(days=3)
    examine(place, None, clock=clock)
    collect(place, clock=clock)
    sweep(place, clock=clock, grace=timedelta(days=30), sightings=believed)
    assert is_whole(place, SERVER, backup_id(1))
    assert is_whole(place, SERVER, backup_id(2))


def test_a_manifest_that_is_nested_too_deeply_is_damaged() -> None:
    place = MemoryDestination("offsite")
    put(place, layout.manifest_key(SERVER, backup_id(1)), DEEP)
    found = read(place, SERVER, backup_id(1))
    assert found is not None
    assert isinstance(found.header, DamagedError)


def test_a_manifest_in_an_archive_class_is_one_that_cannot_be_read_and_no_object_goes() -> None:
    clock = FakeClock()
    place = Cooled(lambda key: backup_id(1) in key, clock)
    Stock(place).add(1, {"a": b"a"})
    Stock(place).add(2, {"b": b"b"})
    before = pool(place)
    clock.move(days=3)
    (said,) = [found for found in examine(place, None, clock=clock) if found.invariant is Invariant.MANIFEST_INTACT]
    assert said.subject == backup_id(1)
    assert "archive class" in said.message
    assert "limit the rule" in said.message
    for _turn in range(2):
        collect(place, clock=clock)
        sweep(place, clock=clock, grace=timedelta(days=1), sightings=believed)
        clock.move(days=3)
    assert pool(place) == before
    found = read(place, SERVER, backup_id(2))
    assert found is not None
    assert isinstance(found.header, Header)


def test_descriptions_of_logs_in_an_archive_class_are_named_and_the_others_read() -> None:
    place = Cooled(lambda key: key.endswith(layout.BRANCH), FakeClock())
    log_segments.put_branch(place, BRANCH)
    (found,) = log_segments.branches(place)
    assert isinstance(found, DamagedError)
    assert "archive class" in found.detail


def test_notes_and_bodies_in_an_archive_class_count_as_there() -> None:
    clock = FakeClock()
    place = Cooled(lambda key: not key.endswith(layout.MANIFEST), clock)
    Stock(place).add(1, {"a": b"a"})
    put(place, layout.hold_key(SERVER), b"{}")
    put(place, layout.mark_key(SERVER, backup_id(1)), b"{}")
    put(place, layout.intent_key(backup_id(7)), b"{}")
    assert is_whole(place, SERVER, backup_id(1)), "it can be thawed, so it is not to be given up"
    assert set(kept_at(place).holds) == {SERVER}
    assert marks(place) == {(SERVER, backup_id(1)): START}
    assert [lease.owner for lease in leases(place, layout.INTENTS)] == [None]


FIRST, SECOND = ("shop", backup_id(1)), ("shop", backup_id(2))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def place(clock: FakeClock) -> MemoryDestination:
    found = MemoryDestination("a", clock=clock)
    Stock(found).add(1, {"t": b"1"})
    Stock(found).add(2, {"t": b"2"})
    return found


def hide(place: MemoryDestination, prefix: str = layout.SERVERS) -> None:
    for info in list(place.list(prefix)):
        place.delete(info.key)


def test_while_an_expected_manifest_is_missing_no_object_is_collected_however_often_and_late(
    place: MemoryDestination, clock: FakeClock
) -> None:
    hide(place, layout.backup_folder(*FIRST))
    for _day in range(3):
        clock.move(days=1, minutes=1)
        done = collect(place, clock=clock, limit=DeletionLimit(1.0), expected=expecting({FIRST, SECOND}))
        assert (set(done.missing.backups), done.objects, done.tombstoned) == ({FIRST}, 0, 0)
        assert any(FIRST[1] in line and "mounted" in line for line in done.held)
    assert len(pool(place)) == 2
    done = collect(place, clock=clock, expected=expecting({SECOND}))
    assert (done.missing, done.objects) == (Missing(), 1), "settled: the catalog has forgotten it"


def test_side_files_of_an_expected_backup_stay_and_those_of_a_removed_one_go(
    place: MemoryDestination, clock: FakeClock
) -> None:
    place.delete(layout.manifest_key(*FIRST))
    assert collect(place, clock=clock, expected=expecting({FIRST, SECOND})).side_files == []
    put(place, layout.mark_key(*FIRST), b"{}")
    assert collect(place, clock=clock, expected=expecting({FIRST, SECOND})).missing.backups == {FIRST}, (
        "whose mark is that?"
    )
    done = collect(place, clock=clock, expected=expecting({FIRST, SECOND}), dying=[FIRST])
    assert (done.missing, done.objects) == (Missing(), 1), "it was being removed: its mark goes last"


def test_what_a_missing_backup_may_build_on_is_not_removed(place: MemoryDestination, clock: FakeClock) -> None:
    Stock(place).add(3, {"t": b"3"}, parent=1)
    hide(place, layout.backup_folder("shop", backup_id(3)))
    mark(place, *FIRST, clock())
    clock.move(days=2)
    done = sweep(
        place,
        clock=clock,
        grace=timedelta(days=1),
        sightings=believed,
        expected=expecting({SECOND, ("shop", backup_id(3))}),
    )
    assert (done.backups, set(done.missing.backups)) == ([], {("shop", backup_id(3))})
    done = sweep(place, clock=clock, grace=timedelta(days=1), sightings=believed, expected=expecting({SECOND}))
    assert done.backups == [FIRST[1]]


@pytest.mark.parametrize("trace", [layout.branch_key("shop", backup_id(1)), layout.runbook_key(*FIRST)])
def test_without_a_catalog_objects_stay_where_there_is_no_manifest_and_yet_a_trace_of_backups(
    place: MemoryDestination, clock: FakeClock, trace: str
) -> None:
    hide(place)
    put(place, trace, b"{}")
    for _day in range(3):
        clock.move(days=1, minutes=1)
        done = collect(place, clock=clock, limit=DeletionLimit(1.0))
        assert done.objects == 0
        assert done.side_files == []
        assert any("it has no manifest" in line for line in done.over_limit)
    assert len(pool(place)) == 2


def test_a_repair_collects_nothing_while_the_catalog_misses_something(
    place: MemoryDestination, clock: FakeClock
) -> None:
    hide(place)
    views = [FIRST, SECOND]
    assert not any(one.repairable for one in examine(place, views, clock=clock))
    left = repair(place, views, clock=clock).left
    assert {one.subject for one in left if one.invariant is Invariant.BACKUP_HAS_MANIFEST} == {FIRST[1], SECOND[1]}
    assert len(pool(place)) == 2


# Where nothing may be deleted


def test_leases_that_may_not_be_removed_fail_no_job_and_hold_nothing_up(clock: FakeClock) -> None:
    place = UndeletableDestination("a", clock=clock)
    Stock(place).add(1, {"t": b"1"})
    with Intent([place], "shop", backup_id(2), parents=(backup_id(1),), clock=clock) as intent:
        intent.assert_held()
    with Pin(place, backup_id(5), [FIRST], clock=clock) as pin:
        pin.assert_held()
    with sweeping(place, clock=clock) as sweep_lease:
        sweep_lease.assert_held()
    assert [len(one.unremoved) for one in (intent, pin, sweep_lease)] == [1, 1, 1]
    assert not any(is_alive(one.lease, clock()) for one in (intent, pin, sweep_lease)), "dead, though it lies there"


def test_a_dead_sweep_that_may_not_be_removed_is_told_as_locked_and_nobody_waits_for_it(clock: FakeClock) -> None:
    place = UndeletableDestination("a", clock=clock)
    key = layout.sweep_key(backup_id(7))
    put(place, key, Lease(key, (), Owner("another-host", "boot", "ns", 4711, 1), clock(), clock()).encode())
    clock.move(seconds=FRESH.total_seconds() + 1)
    await_sweeps(place, clock=clock, patience=0.0)
    assert (done := collect(place, clock=clock)).locked == 1
    assert "delete: false" in done.lock
