"""Object lock in a bucket of a real S3 server: it is lengthened, never shortened, and a put looks whether it was
given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from backupd.model.errors import DestinationError
from backupd.transfer.holds_and_locks import lengthen_all, lengthen_branch
from storage import layout
from storage.config import S3Config
from storage.destination import Capability, as_locking
from storage.s3.destination import S3Destination
from storage.s3.lifecycle import SPARE
from storage.throttle_and_breaker import throttled
from tests.contract.destination import put
from tests.support.stores.buckets import OBJECT, config, opened
from tests.support.stores.s3_server import S3Server
from tests.support.stores.stock import FakeClock, Stock, backup_id, everything, named

_buckets = count(1)
DAY = timedelta(days=1)
Until = Callable[[S3Config, str], datetime | None]
_SECOND = timedelta(seconds=2)


def bucket(server: S3Server, mode: str = "governance") -> S3Config:
    name = f"locks{next(_buckets)}"
    server.bucket(name, versioning=True, lock=True)
    return config(server, name, object_lock=mode, lock_days=3)


@pytest.fixture
def until(s3_server: S3Server) -> Iterator[Callable[[S3Config, str], datetime | None]]:
    """Until when a key is locked, by the server itself."""
    with contextlib.closing(s3_server.client()) as client:

        def told(where: S3Config, key: str) -> datetime | None:
            head = client.head_object(Bucket=where.bucket, Key=f"{where.prefix}/{key}")
            moment: datetime | None = head.get("ObjectLockRetainUntilDate")
            return None if moment is None else moment.astimezone(UTC)

        yield told


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


@pytest.mark.parametrize("mode", ["governance", "compliance"])
def test_a_lock_is_lengthened_a_day_ahead_and_never_shortened(s3_server: S3Server, until: Until, mode: str) -> None:
    where, began = bucket(s3_server, mode), now()
    with opened(where) as place:
        put(place, OBJECT, b"x")
        assert not place.extend(OBJECT, began), "what was just stored is locked long enough"
        assert place.extend(OBJECT, began + DAY)
        assert until(where, OBJECT) == began + 4 * DAY + SPARE
        assert not place.extend(OBJECT, began + DAY + SPARE), "the spare day"
        assert not place.extend(OBJECT, began - DAY)
        assert until(where, OBJECT) == began + 4 * DAY + SPARE
        lease = layout.intent_key(backup_id(1))
        put(place, lease, b"x")
        assert not place.extend(lease, began + DAY)
        assert until(where, lease) is None


def test_what_was_stored_without_a_lock_gets_one(s3_server: S3Server, until: Until) -> None:
    where = bucket(s3_server)
    with opened(where.model_copy(update={"object_lock": None, "lock_days": None})) as place:
        put(place, OBJECT, b"x")
        assert as_locking(place) is None
        assert not place.extend(OBJECT, now())
    with opened(where, initialise=False) as place:
        assert as_locking(place) is not None
        assert place.extend(OBJECT, now())
        assert until(where, OBJECT) is not None


def test_a_put_of_what_is_there_already_lengthens_its_lock(s3_server: S3Server, until: Until) -> None:
    where, clock = bucket(s3_server), FakeClock(now())
    with opened(where, clock=clock) as place:
        put(place, OBJECT, b"x")
        clock.move(days=2)
        put(place, OBJECT, b"x")
    locked = until(where, OBJECT)
    assert locked is not None
    assert locked >= clock() + 3 * DAY - _SECOND


def test_a_server_that_takes_a_put_and_does_not_lock_it_is_told(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = S3Destination._head

    def without(self: S3Destination, key: str, doing: str) -> Any:  # a server that answers like one without locks
        found = dict(head(self, key, doing))
        found.pop("ObjectLockRetainUntilDate", None)
        return found

    with opened(bucket(s3_server)) as place:
        monkeypatch.setattr(S3Destination, "_head", without)
        with pytest.raises(DestinationError, match="does not lock it until") as caught:
            put(place, OBJECT, b"x")
    assert "s3:GetObjectRetention" in caught.value.hint


def test_everything_that_a_backup_counts_on_is_locked_as_long_as_what_it_stores(
    s3_server: S3Server, until: Until
) -> None:
    where, clock = bucket(s3_server), FakeClock(now())
    with opened(where, clock=clock) as place:
        stock = Stock(place)
        stock.add(1, {"base": b"base"})
        stock.add(2, {"other": b"other"})
        copy = layout.configuration_key(clock(), "a" * 12)
        older = layout.configuration_key(clock() - DAY, "a" * 12)
        for key in (copy, older, layout.branch_key("shop", backup_id(1))):
            put(place, key, b"x")
        before = everything(place)
        clock.move(days=2)
        header = stock.add(3, {"t": b"new", "same": b"other"}, parent=1)
        new = everything(place) - before
        asked = lengthen_all(throttled(place), header, [backup_id(1)], clock(), stored=new)
        shared = layout.object_key(named(b"other").name)
        folder = layout.backup_folder("shop", backup_id(1))
        counted = {
            shared,
            layout.object_key(named(b"base").name),
            layout.REPOSITORY,
            copy,
            *(folder + name for name in (layout.MANIFEST, layout.BODY, layout.UNPACK, layout.RUNBOOK)),
        }
        short = {key for key in everything(place) if (until(where, key) or clock()) < clock() + 3 * DAY - _SECOND}
        assert asked == len(counted)
        assert not short & (counted | new)
        assert older in short, "what it does not count on is left"
        assert lengthen_branch(place, "shop", backup_id(1), clock()) == 1
        assert lengthen_all(place, header, [backup_id(1)], clock(), stored=new) == 0


def test_a_place_without_locks_is_not_asked(s3_server: S3Server) -> None:
    with opened(config(s3_server)) as place:
        assert Capability.LOCKS not in place.capabilities
        header = Stock(place).add(1, {"t": b"x"})
        assert lengthen_all(place, header, [backup_id(7)], now(), stored=()) == 0
