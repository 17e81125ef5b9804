"""Ransomware with the right to delete and to put: a bucket with versions has all of it yet, and gives it back."""

from __future__ import annotations

import contextlib
import hashlib
import io
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import BinaryIO

import pytest

from backupd.model.binlog import Branch, BranchReason, Ending, Segment, SegmentKey
from backupd.model.errors import BusyError, ForbiddenError, LockedError, RefusedError, TamperedError
from backupd.model.job import silent
from backupd.model.manifest import StoredObject
from backupd.transfer import log_segments
from backupd.transfer.deletion import is_whole, mark, marks
from backupd.transfer.fsck import examine
from backupd.transfer.holds_and_locks import is_marked
from backupd.transfer.leases import sweeping
from backupd.transfer.records.manifests import backup_ids
from backupd.transfer.records.segment_documents import SealedPart, SegmentHeader, encode_segment
from backupd.transfer.recover_versions import MANIFEST, OBJECT, Found, bring_back, find
from backupd.transfer.scrub_and_repair import put_right
from storage import layout, objects
from storage.config import S3Config
from storage.destination import Capability, Destination, ObjectInfo, Version
from storage.s3.destination import S3Destination
from tests.support.stores.buckets import config, opened
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.s3_server import S3Server
from tests.support.stores.stock import START, FakeClock, Stock, backup_id, everything, named, put, sealed

_buckets = count(1)
BRANCH = Branch("shop", "20261121T040000Z-0000000a", START, BranchReason.FIRST, "u", "mariadb", "binlog", 1)


def now() -> datetime:
    return datetime.now(UTC)


def next_second() -> datetime:
    """Places tell whole seconds: what comes after this is of a later one than what came before."""
    moment = now().replace(microsecond=0) + timedelta(seconds=1)
    while now() < moment:
        time.sleep(0.01)
    return moment


def a_while_ago() -> datetime:
    return now() - timedelta(minutes=1)


class Versions(MemoryDestination):
    """Tells of each version when it was put: not every server of S3 does, once it was overwritten. ``locked``: nothing
    may be deleted."""

    capabilities = Capability.VERSIONS

    def __init__(self, clock: FakeClock, *, locked: bool = False) -> None:
        super().__init__("vault", tree=False, clock=clock)
        self._now, self._locked = clock, locked
        self._states: dict[str, list[tuple[datetime, bytes | None]]] = {}

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        raw = stream.read()
        self._states.setdefault(key, []).append((self._now(), raw))
        return super().put(key, io.BytesIO(raw))

    def delete(self, key: str) -> None:
        if self._locked:
            raise LockedError(f"{key} is locked")
        self.hide(key)

    def hide(self, key: str) -> None:
        super().delete(key)
        self._states[key].append((self._now(), None))

    def versions(self, prefix: str) -> Iterator[Version]:
        for key in sorted(key for key in self._states if key.startswith(prefix)):
            states = list(enumerate(self._states[key]))
            for number, (at, raw) in reversed(states):
                yield Version(key, str(number), at, number == len(states) - 1, None if raw is None else len(raw))

    def open_version(self, version: Version) -> BinaryIO:
        assert version.id is not None
        raw = self._states[version.key][int(version.id)][1]
        assert raw is not None
        return io.BytesIO(raw)

    def version_checksum(self, version: Version) -> str | None:
        return None

    def bring_back(self, version: Version, above: Sequence[Version]) -> None:
        self.put(version.key, self.open_version(version))


@contextlib.contextmanager
def bucket(server: S3Server, **fields: object) -> Iterator[S3Destination]:
    name = f"versions{next(_buckets)}"
    server.bucket(name, versioning=True, lock="object_lock" in fields)
    with opened(config(server, name, **fields)) as place:
        yield place


def hide_everything(server: S3Server, where: S3Config) -> int:
    with contextlib.closing(server.client()) as client:
        keys = [item["Key"] for item in client.list_objects_v2(Bucket=where.bucket).get("Contents", [])]
        for key in keys:
            client.delete_object(Bucket=where.bucket, Key=key)
    return len(keys)


def bring(place: S3Destination, since: datetime) -> Found:
    found = find(place, since)
    done = bring_back(place, found, clock=now, report=silent)
    assert done.failed == {}
    assert set(done.keys) == {one.key for one in found.returns}
    return found


@pytest.mark.parametrize(
    "fields", [{"object_lock": "governance", "lock_days": 1}, {"delete": False}], ids=["lock", "may not delete"]
)
def test_what_plain_deletions_hid_is_all_there_again(s3_server: S3Server, fields: dict[str, object]) -> None:
    with bucket(s3_server, **fields) as place:
        stock = Stock(place)
        stock.add(1, {"t": b"old", "same": b"same"})
        stock.add(2, {"t": b"new", "same": b"same"}, parent=1)
        put(place, layout.RECOVER, b"text")
        before = everything(place)
        since = a_while_ago()
        assert hide_everything(s3_server, place._config) == len(before)
        with opened(place._config, initialise=False) as bare:
            assert not bare.is_initialised()
            found = find(bare, since)
            assert {one.key for one in found.returns} == before
            assert (found.lost, found.left) == ({}, {})
            assert all(one.hidden and one.since >= since for one in found.returns)
            assert found.returns[0].key == layout.REPOSITORY
            assert [one.kind for one in found.returns[-2:]] == [MANIFEST, MANIFEST], "the commit points are last"
            assert found.backups() == [("shop", backup_id(1)), ("shop", backup_id(2))]
            assert not bare.is_initialised(), "looking changes nothing"
            bring(bare, since)
            assert {key for key in everything(bare) if not key.startswith(layout.SWEEPS)} == before
            assert all(is_whole(bare, "shop", backup_id(number)) for number in (1, 2))
            assert {one.subject for one in examine(bare, None, clock=now)} == {
                layout.name_in(key) for key in everything(bare) - before
            }, "a lease that may not be removed"
            assert find(bare, since).returns == (), "nothing is left to be done"


def test_what_was_overwritten_comes_back_by_its_digest(s3_server: S3Server) -> None:
    with bucket(s3_server) as place, contextlib.closing(s3_server.client()) as client:
        stock = Stock(place)
        stock.add(1, {"t": b"first", "u": b"second"})
        where = place._config
        key, twice = (layout.object_key(named(content).name) for content in (b"first", b"second"))
        manifest = layout.manifest_key("shop", backup_id(1))
        since = a_while_ago()
        wrong = b"x" * len(sealed(b"first"))
        client.put_object(Bucket=where.bucket, Key=f"{where.prefix}/{key}", Body=wrong)
        client.put_object(Bucket=where.bucket, Key=f"{where.prefix}/{twice}", Body=b"other")
        client.delete_object(Bucket=where.bucket, Key=f"{where.prefix}/{twice}")
        client.put_object(Bucket=where.bucket, Key=f"{where.prefix}/{manifest}", Body=b"pay")
        found = bring(place, since)
        assert {(one.key, one.hidden) for one in found.returns} == {(key, False), (twice, True), (manifest, False)}
        assert objects.fetch(place, named(b"first")) == sealed(b"first")
        assert objects.fetch(place, named(b"second")) == sealed(b"second")
        assert is_whole(place, "shop", backup_id(1))


def test_what_retention_removed_rightly_stays_away(s3_server: S3Server) -> None:
    with bucket(s3_server) as place:
        stock = Stock(place)
        stock.add(1, {"t": b"expired", "same": b"same"})
        stock.add(2, {"t": b"living", "same": b"same"})
        living = layout.backup_folder("shop", backup_id(2))
        for key in everything(place) - {layout.REPOSITORY}:
            if not key.startswith(living) and key not in {
                layout.object_key(named(content).name) for content in (b"living", b"same")
            }:
                place.delete(key)
        assert backup_ids(place) == [("shop", backup_id(2))]
        since = next_second()
        hide_everything(s3_server, place._config)
        place._seen = None
        found = bring(place, since)
        assert found.backups() == [("shop", backup_id(2))]
        assert found.before > 0
        assert backup_ids(place) == [("shop", backup_id(2))]
        assert {layout.name_in(one.key) for one in found.returns if one.kind == OBJECT} == {
            named(b"living").name,
            named(b"same").name,
        }


def test_what_had_been_marked_deleted_by_then_stays_away_and_what_was_marked_later_does_not(
    s3_server: S3Server,
) -> None:
    with bucket(s3_server) as place, contextlib.closing(s3_server.client()) as client:
        where = place._config
        stock = Stock(place)
        stock.add(1, {"t": b"one"})
        stock.add(2, {"t": b"two"})
        mark(place, "shop", backup_id(1), now())
        since = next_second()
        mark(place, "shop", backup_id(2), now() - timedelta(days=9))  # whoever may put can backdate
        for number in (1, 2):
            key = f"{where.prefix}/{layout.manifest_key('shop', backup_id(number))}"
            client.delete_object(Bucket=where.bucket, Key=key)
        found = find(place, since)
        assert found.backups() == [("shop", backup_id(2))]
        assert "marked deleted" in found.left[layout.manifest_key("shop", backup_id(1))]


@pytest.mark.parametrize("locked", [False, True], ids=["deleted", "taken back"])
def test_a_mark_that_was_put_in_the_doubted_time_is_withdrawn(locked: bool) -> None:
    clock = FakeClock()
    place = Versions(clock, locked=locked)
    stock = Stock(place)
    for number in range(1, 6):
        stock.add(number, {"t": b"%d" % number})
    mark(place, "shop", backup_id(4), clock())
    put(place, layout.mark_key("shop", backup_id(5)), b'{"withdrawn": "2026-11-21T04:00:00Z"}')
    clock.move(hours=1)
    since = clock()
    for number in (1, 2, 4, 5):
        put(
            place,
            layout.mark_key("shop", backup_id(number)),
            b"junk" if number == 1 else b'{"at": "2020-01-01T00:00:00Z"}',
        )
    put(place, layout.mark_key("shop", backup_id(9)), b"of a backup that never was")
    place.hide(layout.manifest_key("shop", backup_id(1)))
    found = find(place, since)
    doubted = [("shop", backup_id(number)) for number in (1, 2, 5)]
    assert sorted(found.marks) == doubted, "what comes back, and what is there; a mark of before stands"
    assert [one["backup"] for one in found.as_json()["marks"]] == [owner[1] for owner in doubted]
    assert found.backups() == [("shop", backup_id(1))]
    assert is_marked(place, "shop", backup_id(2)), "looking changes nothing"
    done = bring_back(place, found, clock=clock, report=silent)
    assert (done.unmarked, done.failed) == (tuple(doubted), {})
    assert set(marks(place)) == {("shop", backup_id(4)), ("shop", backup_id(9))}
    assert find(place, since).is_nothing


def test_a_mark_that_cannot_be_withdrawn_is_told(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(s3_server) as place:
        Stock(place).add(1, {"t": b"one"})
        mark(place, "shop", backup_id(1), now())
        found = find(place, a_while_ago())

        def refuse(key: str) -> None:
            raise ForbiddenError(f"{key} may not be deleted")

        with monkeypatch.context() as patched:
            patched.setattr(place, "delete", lambda key: refuse(key) if key.startswith(layout.MARKS) else None)
            done = bring_back(place, found, clock=now, report=silent)
        assert done.unmarked == ()
        assert "mark of deletion remains" in done.failed[layout.mark_key("shop", backup_id(1))]


def test_what_was_forged_in_the_doubted_time_hides_nothing_true() -> None:
    """Well-formed signatures and descriptions of logs over the true ones, and a newer copy of the catalog."""
    clock = FakeClock()
    place = Versions(clock)
    true, junk = (b"-----BEGIN PGP SIGNATURE-----\n" + word for word in (b"true", b"junk"))
    Stock(place).add(1, {"t": b"one"})
    manifest = layout.manifest_key("shop", backup_id(1))
    log_segments.put_branch(place, BRANCH)
    forged, ended = log(place, 1, 0, 500, START), log(place, 2, 0, 500, START, Ending.OPEN)
    copy, newer = (layout.catalog_key(START + timedelta(days=days), f"{'a' * 12}-{'b' * 12}") for days in (0, 1))
    signed = [layout.signature_key(key) for key in (manifest, copy, forged + layout.SEGMENT)]
    later = layout.signature_key(ended + layout.SEGMENT)
    for key in (*signed, later):
        put(place, key, true)
    put(place, copy, b"true")
    clock.move(hours=1)
    since = clock()
    put(place, later, true + b", too")
    log(place, 2, 0, 500, START)
    for key in signed:
        put(place, key, junk)
    for key in (manifest, newer):
        put(place, key, b"junk")
    for number in (1, 2):
        log(place, number, 0, 500, START, part=b"forged")
    for key in (copy, newer, layout.signature_key(copy)):
        place.hide(key)
    found = find(place, since)
    assert (found.lost, list(found.left)) == ({}, [newer])
    assert bring_back(place, found, clock=clock, report=silent).failed == {}
    assert {seen(place, key) for key in signed} == {true}
    assert (seen(place, later), seen(place, copy)) == (true + b", too", b"true")
    assert is_whole(place, "shop", backup_id(1))
    headers = {one.folder: one for one in log_segments.headers(place) if isinstance(one, SegmentHeader)}
    assert headers[ended].segment.ending is Ending.ROTATED, "its end became known, which changes nothing else"
    assert all(not log_segments.problems(place, headers[folder]) for folder in (forged, ended))
    assert find(place, since).is_nothing


class Recorded:
    """What a catalog knows: of the one backup the digest of its manifest, of the one log that of its bytes."""

    def __init__(self, manifest: bytes, log: str) -> None:
        self._manifest, self._log = hashlib.sha256(manifest).hexdigest(), log

    def manifest(self, backup_id: str) -> str:
        assert backup_id
        return self._manifest

    def segment(self, server: str, key: SegmentKey) -> str:
        assert (server, key.number) == ("shop", 1)
        return self._log

    def differs(self, destination: str, server: str, backup_id: str, error: TamperedError) -> None:
        raise AssertionError(f"versions are not what lies there: {destination} {server} {backup_id} {error}")


def test_of_well_formed_versions_the_one_that_the_catalog_knows_comes_back() -> None:
    """Put there long before anybody noticed, so that its time tells nothing."""
    clock = FakeClock()
    place = Versions(clock)
    stock = Stock(place)
    stock.add(1, {"t": b"one"})
    key = layout.manifest_key("shop", backup_id(1))
    true = seen(place, key)
    log_segments.put_branch(place, BRANCH)
    folder = log(place, 1, 0, 500, START)
    clock.move(hours=1)
    stock.add(1, {"t": b"forged"})
    log(place, 1, 0, 500, START, sha256="1" * 64, part=b"forged")
    clock.move(hours=1)
    since = clock()
    place.hide(key)
    place.hide(folder + layout.SEGMENT)
    versions = {one.key: one.version.id for one in find(place, since).returns}
    assert (versions[key], versions[folder + layout.SEGMENT]) == ("1", "1"), "it works where nobody knows better"
    found = find(place, since, Recorded(true, "0" * 64))
    bring_back(place, found, clock=clock, report=silent)
    assert seen(place, key) == true
    (header,) = log_segments.headers(place)
    assert isinstance(header, SegmentHeader)
    assert header.segment.sha256 == "0" * 64
    for one in (key, folder + layout.SEGMENT):
        place.hide(one)
    assert find(place, since, Recorded(b"another", "2" * 64)).lost.keys() == {key, folder + layout.SEGMENT}


def seen(place: Versions, key: str) -> bytes:
    with place.get(key) as stream:
        return stream.read()


def test_what_no_version_has_is_named(s3_server: S3Server) -> None:
    with bucket(s3_server) as place, contextlib.closing(s3_server.client()) as client:
        where = place._config
        Stock(place).add(1, {"t": b"one", "u": b"two"})
        key = layout.object_key(named(b"one").name)
        version = client.head_object(Bucket=where.bucket, Key=f"{where.prefix}/{key}")["VersionId"]
        since = a_while_ago()
        client.delete_object(Bucket=where.bucket, Key=f"{where.prefix}/{key}", VersionId=version)
        hide_everything(s3_server, where)
        found = find(place, since)
        assert list(found.lost) == [key]
        assert len(found.backups()) == 1


def log(
    place: Destination,
    number: int,
    start: int,
    end: int,
    last: datetime,
    ending: Ending = Ending.ROTATED,
    *,
    part: bytes = b"",
    sha256: str = "0" * 64,
) -> str:
    """A segment, unsealed as everything here; its folder."""
    part = part or b"%d %d" % (number, start)
    item = StoredObject(layout.part_name(0, piece=end < 900), len(part), hashlib.sha256(part).hexdigest())
    segment = Segment(
        server="shop",
        branch=BRANCH.id,
        file=f"binlog.{number:06d}",
        number=number,
        start=start,
        end=end,
        ending=ending,
        gtids_before="",
        gtids_after="",
        transactions=1,
        first_at=last,
        last_at=last,
        precise=True,
        server_ids=(1,),
        flavour="mariadb",
        server_version="10.11.6",
        sha256=sha256,
        remarks=(),
    )
    header = SegmentHeader(segment, ("A" * 40,), (SealedPart(item, end - start, "0" * 64),), ())
    put(place, header.folder + item.name, part)
    put(place, header.key, encode_segment(header))
    return header.folder


def test_logs_that_somebody_needs_come_back_and_what_nobody_has_a_digest_of(s3_server: S3Server) -> None:
    with bucket(s3_server) as place:
        Stock(place).add(1, {"t": b"one"})
        log_segments.put_branch(place, BRANCH)
        expired = log(place, 1, 0, 900, START - timedelta(days=1))
        piece, whole = log(place, 2, 0, 500, START), log(place, 2, 0, 900, START)
        behind = log(place, 3, 500, 800, START)
        noted = {
            layout.configuration_key(START, "a" * 12),
            layout.proof_key("shop", backup_id(1)),
            layout.hold_key("shop"),
            layout.signature_key(layout.manifest_key("shop", backup_id(1))),
        }
        superseded = layout.configuration_key(START - timedelta(days=1), "a" * 12)
        passing = {layout.mark_key("shop", backup_id(9)), layout.tombstone_key(named(b"one").name)}
        for key in noted | passing | {superseded}:
            put(place, key, b"-----BEGIN PGP SIGNATURE-----")
        before = everything(place)
        since = next_second()
        hide_everything(s3_server, place._config)
        place._seen = None
        found = bring(place, since)
        gone = {key for key in before if key.startswith((expired, piece))} | passing | {superseded}
        assert {one.key for one in found.returns} == before - gone
        assert {key for key in everything(place) if not key.startswith(layout.SWEEPS)} == before - gone
        assert {key.rpartition("/")[0] + "/" for key in found.left} == {expired, piece}
        assert all(any(key.startswith(folder) for key in everything(place)) for folder in (whole, behind))


def test_a_place_without_versions_is_refused_in_words(s3_server: S3Server) -> None:
    with opened(config(s3_server)) as place, pytest.raises(RefusedError, match="keeps no versions"):
        find(place, now())
    with pytest.raises(RefusedError, match="only buckets of S3"):
        find(MemoryDestination("nas"), now())


def test_nothing_is_brought_back_while_somebody_removes(s3_server: S3Server) -> None:
    with bucket(s3_server) as place, contextlib.closing(s3_server.client()) as client:
        where = place._config
        Stock(place).add(1, {"t": b"one"})
        since = a_while_ago()
        client.delete_object(Bucket=where.bucket, Key=f"{where.prefix}/{layout.manifest_key('shop', backup_id(1))}")
        found = find(place, since)
        with sweeping(place, clock=now), pytest.raises(BusyError):
            bring_back(place, found, clock=now, report=silent)
        assert backup_ids(place) == []


def test_an_overwritten_object_is_put_right_from_its_earlier_version(s3_server: S3Server) -> None:
    with bucket(s3_server) as place, contextlib.closing(s3_server.client()) as client:
        where = place._config
        Stock(place).add(1, {"t": b"one", "u": b"two"})
        for content, hidden in ((b"one", False), (b"two", True)):
            item = named(content)
            key = layout.object_key(item.name)
            full = f"{where.prefix}/{key}"
            client.put_object(Bucket=where.bucket, Key=full, Body=b"x" * item.size)
            if hidden:
                client.delete_object(Bucket=where.bucket, Key=full)
            objects.quarantine(place, item.name, "test", now())
            assert put_right(place, key, item, []) == "an earlier version at offsite"
            assert objects.fetch(place, item) == sealed(content)
        assert objects.quarantined(place) == frozenset()


def test_a_missing_right_is_named(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import ClientError

    denied: set[str] = set()

    def refusing(operation: str) -> None:
        if operation in denied:
            raise ClientError(
                {"Error": {"Code": "AccessDenied", "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 403}},  # type: ignore[typeddict-item]  # no more is read
                operation,
            )

    with bucket(s3_server) as place:
        Stock(place).add(1, {"t": b"one"})
        since = a_while_ago()
        hide_everything(s3_server, place._config)
        made = place._bucket._made

        def client(*, patient: bool) -> object:
            found = made(patient=patient)
            found.meta.events.register("before-call.s3", lambda model, **_: refusing(model.name), unique_id="deny")
            return found

        monkeypatch.setattr(place._bucket, "_made", client)
        for operation, right in (
            ("ListObjectVersions", "s3:ListBucketVersions"),
            ("GetObject", "s3:GetObjectVersion"),
            ("HeadObject", "s3:GetObjectVersion"),
        ):
            denied |= {operation, "HeadObject"} if operation == "GetObject" else {operation}
            with pytest.raises(ForbiddenError) as caught:
                find(place, since)
            assert right in caught.value.hint
            denied.clear()
        found = find(place, since)
        denied.add("DeleteObject")
        with pytest.raises(ForbiddenError) as caught:
            bring_back(place, found, clock=now, report=silent)
        assert "s3:DeleteObjectVersion" in caught.value.hint
