"""Retention, removal and repair in buckets of a real S3 server: plain, with versions, with object lock, undeletable."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from backupd.model.job import silent
from backupd.transfer.deletion import is_whole, mark, marks, sweep, unmark
from backupd.transfer.fsck import examine
from backupd.transfer.records.manifests import backup_ids, read
from backupd.transfer.scrub_and_repair import put_manifest_right, put_right, scrub
from storage import layout, objects
from tests.support.stores.buckets import config, opened
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.s3_server import S3Server
from tests.support.stores.stock import Stock, backup_id, believed, everything, named, put, sealed

GRACE = timedelta(days=1)
_buckets = count(1)


def now() -> datetime:
    return datetime.now(UTC)


def later() -> datetime:
    return now() + timedelta(days=2)


def fill(place: Stock) -> None:
    place.add(1, {"t": b"old", "same": b"same"})
    place.add(2, {"t": b"new", "same": b"same"})


@pytest.mark.parametrize("versioning", [False, True], ids=["plain", "versions"])
def test_what_expired_goes_with_its_objects_and_can_be_undeleted_before(
    s3_server: S3Server, *, versioning: bool
) -> None:
    name = f"removal{next(_buckets)}"
    s3_server.bucket(name, versioning=versioning)
    with opened(config(s3_server, name)) as place:
        fill(Stock(place))
        mark(place, "shop", backup_id(1), now())
        unmark(place, "shop", backup_id(1), now=now(), grace=GRACE)
        assert marks(place) == {}
        mark(place, "shop", backup_id(1), now())
        assert sweep(place, clock=now, grace=GRACE, sightings=believed).backups == []
        done = sweep(place, clock=later, grace=GRACE, sightings=believed)
        assert (done.backups, done.objects, done.held) == ([backup_id(1)], 1, [])
        assert backup_ids(place) == [("shop", backup_id(2))]
        assert is_whole(place, "shop", backup_id(2))
        assert examine(place, None, clock=now) == []


def test_an_object_lock_is_waited_for(s3_server: S3Server) -> None:
    name = f"removal{next(_buckets)}"
    s3_server.bucket(name, versioning=True, lock=True)
    with opened(config(s3_server, name, object_lock="governance", lock_days=3)) as place:
        fill(Stock(place))
        mark(place, "shop", backup_id(1), now())
        before = everything(place)
        done = sweep(place, clock=later, grace=GRACE, sightings=believed)
        assert (done.backups, done.objects, everything(place)) == ([], 0, before), "no lease stays either"
        assert done.locked == 1
        assert "locked until" in done.lock


def test_credentials_that_may_not_delete_put_marks_only(s3_server: S3Server) -> None:
    settings = config(s3_server, "shared")
    with opened(settings.model_copy(update={"delete": False})) as place:
        fill(Stock(place))
        mark(place, "shop", backup_id(1), now())
        sweep(place, clock=later, grace=GRACE, sightings=believed)
        before = everything(place)
        done = sweep(place, clock=later, grace=GRACE, sightings=believed)
        assert (done.skipped, done.locked, everything(place)) == (True, 1, before)
        assert len(backup_ids(place)) == 2
    with opened(settings) as other:  # the second identity
        assert sweep(other, clock=later, grace=GRACE, sightings=believed).backups == [backup_id(1)]
        assert examine(other, None, clock=now) == []


def test_damage_in_a_bucket_is_found_by_reading_and_replaced(s3_server: S3Server) -> None:
    good = MemoryDestination("local", tree=False)
    fill(Stock(good))
    with opened(config(s3_server, "shared")) as place:
        fill(Stock(place))
        key = layout.object_key(named(b"same").name)
        for wrong in (key, layout.body_key("shop", backup_id(1)), layout.manifest_key("shop", backup_id(2))):
            place.delete(wrong)
            put(place, wrong, b"other bytes")
        found = [header for header in (read(place, "shop", backup_id(1)),) if header is not None]
        damages = scrub(place, [one.header for one in found], report=silent).damages  # type: ignore[misc]  # it is readable
        assert {damage.key for damage in damages} == {key, layout.body_key("shop", backup_id(1))}
        for damage in damages:
            assert damage.stored is not None
            assert put_right(place, damage.key, damage.stored, [good]) == "local"
        assert put_manifest_right(place, "shop", backup_id(2), [good], clock=now) == "local"
        assert objects.fetch(place, named(b"same")) == sealed(b"same")
        assert is_whole(place, "shop", backup_id(1))
        assert is_whole(place, "shop", backup_id(2))
