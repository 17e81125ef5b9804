"""Small documents that somebody made unreadable: each is one unreadable document, and nothing else stops for it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from backupd.model.document import NOTE_LIMIT, parsed
from backupd.model.errors import DamagedError
from backupd.model.manifest import Header
from backupd.transfer import log_segments
from backupd.transfer.collection import collect
from backupd.transfer.deletion import is_whole, marks, sweep
from backupd.transfer.fsck import Invariant, examine
from backupd.transfer.holds_and_locks import kept_at
from backupd.transfer.leases import leases
from backupd.transfer.records.manifests import read
from storage import layout
from storage.memory import MemoryDestination
from tests.support.logs.log_store import BRANCH
from tests.support.stores.cold import Cooled
from tests.support.stores.stock import START, FakeClock, Stock, backup_id, believed, named, pool, put

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
    assert "change the rule" in said.message
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
