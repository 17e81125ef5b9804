"""The destination contract in a bucket of a real S3 server, and of moto's; what S3 has besides."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backupd.model.binlog import SegmentKey
from backupd.model.errors import (
    ArchivedError,
    DestinationError,
    LockedError,
    ObjectMissingError,
    RefusedError,
)
from backupd.model.manifest import StoredObject
from storage import layout, objects
from storage.config import S3Config
from storage.destination import Capability, ColdState, Destination, Tier, as_archive
from storage.s3 import client as s3client
from storage.s3.destination import S3Destination
from tests.contract.destination import DestinationContract, get, keys, put
from tests.support.stores.buckets import OBJECT, config, opened
from tests.support.stores.moto_server import MotoServer
from tests.support.stores.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, write_credentials

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

LEASE = layout.intent_key("20261121T042512Z-7f3a9c01")
MANIFEST = layout.manifest_key("shop", "20261121T042512Z-7f3a9c01")
BODY = layout.body_key("shop", "20261121T042512Z-7f3a9c01")
PART_OF_LOG = "binlogs/shop/20261121T042512Z-7f3a9c01/0000000001-000000000000-000000000100/part-00000.zst.gpg"


class TestContract(DestinationContract):
    """The real server."""

    @pytest.fixture
    def bare(self, s3_server: S3Server) -> Iterator[Destination]:
        with opened(config(s3_server), initialise=False) as destination:
            yield destination

    @pytest.fixture
    def destination(self, bare: Destination) -> Destination:
        bare.initialise(datetime.now(UTC))
        return bare


class TestContractOfMoto(DestinationContract):
    @pytest.fixture
    def bare(self, moto_server: MotoServer) -> Iterator[Destination]:
        with opened(config(moto_server), initialise=False) as destination:
            yield destination

    @pytest.fixture
    def destination(self, bare: Destination) -> Destination:
        bare.initialise(datetime.now(UTC))
        return bare


# Several pages, neighbours


def test_a_list_of_several_pages_is_whole_and_in_order(s3_server: S3Server) -> None:
    where = config(s3_server)
    with opened(where) as destination:
        folder = s3_server.folder / where.bucket / where.prefix / "pins"
        folder.mkdir()
        names = [f"p{index:04d}.json" for index in range(2100)]
        for name in names:
            (folder / name).touch()
        assert keys(destination, "pins/") == [f"pins/{name}" for name in names]


def test_what_others_keep_beside_a_prefix_is_not_seen(s3_server: S3Server) -> None:
    one = config(s3_server)
    two = one.model_copy(update={"prefix": one.prefix + "-other"})
    with opened(one) as first, opened(two) as second:
        put(first, OBJECT, b"one")
        assert keys(second) == []
        put(second, OBJECT, b"two")
        assert (get(first, OBJECT), get(second, OBJECT)) == (b"one", b"two")


def test_keys_that_stand_for_folders_are_not_objects(moto_server: MotoServer) -> None:
    where = config(moto_server)
    with opened(where) as destination, contextlib.closing(moto_server.client()) as client:
        client.put_object(Bucket=where.bucket, Key=f"{where.prefix}/pins/", Body=b"")
        put(destination, "pins/a.json", b"x")
        assert keys(destination, "pins/") == ["pins/a.json"]


def test_a_whole_bucket_is_a_destination_too(s3_server: S3Server) -> None:
    with opened(config(s3_server, "whole-bucket", prefix="")) as destination:
        put(destination, OBJECT, b"x")
        assert keys(destination, "") == [OBJECT, layout.REPOSITORY]


def test_a_place_with_other_things_in_it_is_refused(s3_server: S3Server) -> None:
    where = config(s3_server)
    with contextlib.closing(s3_server.client()) as client:
        client.put_object(Bucket=where.bucket, Key=f"{where.prefix}/photos/cat.jpg", Body=b"x")
    with opened(where, initialise=False) as destination, pytest.raises(RefusedError) as caught:
        destination.initialise(datetime.now(UTC))
    assert "photos/cat.jpg" in caught.value.detail


def test_a_marker_that_vanished_is_noticed_by_a_fresh_look(s3_server: S3Server) -> None:
    where = config(s3_server)
    with opened(where) as destination, contextlib.closing(s3_server.client()) as client:
        client.delete_object(Bucket=where.bucket, Key=f"{where.prefix}/{layout.REPOSITORY}")
        assert not destination.is_initialised()
        with pytest.raises(DestinationError, match="looking at"):
            destination.stat(OBJECT)


# Keys that are written once


def test_an_object_that_is_there_already_is_not_sent_over_itself(s3_server: S3Server) -> None:
    where = config(s3_server)
    with opened(where) as destination, contextlib.closing(s3_server.client()) as client:
        put(destination, MANIFEST, b"the same")
        before = client.head_object(Bucket=where.bucket, Key=f"{where.prefix}/{MANIFEST}")["Metadata"]
        put(destination, MANIFEST, b"the same")
        assert client.head_object(Bucket=where.bucket, Key=f"{where.prefix}/{MANIFEST}")["Metadata"] == before


def test_another_manifest_of_the_same_name_is_an_error_and_the_first_one_stays(s3_server: S3Server) -> None:
    with opened(config(s3_server)) as destination:
        put(destination, MANIFEST, b"the first")
        with pytest.raises(DestinationError, match="has another"):
            put(destination, MANIFEST, b"the second")
        assert get(destination, MANIFEST) == b"the first"


def test_a_rotten_object_is_replaced_by_its_true_bytes(s3_server: S3Server) -> None:
    where = config(s3_server)
    with opened(where) as destination:
        sealed = b"true bytes" * 1000
        item = objects.named("ab" * 32, sealed)
        objects.store(destination, item, sealed)
        put(destination, MANIFEST, b"the manifest")
        for key in (layout.object_key(item.name), MANIFEST):
            file = s3_server.folder / where.bucket / where.prefix / key
            raw = bytearray(file.read_bytes())
            raw[3] ^= 1
            file.write_bytes(raw)
        assert objects.problem(destination, layout.object_key(item.name), item)
        put(destination, layout.object_key(item.name), sealed)
        assert objects.fetch(destination, item) == sealed
        put(destination, MANIFEST, b"the manifest")
        assert get(destination, MANIFEST) == b"the manifest"


# Checksums, classes, encryption


def test_only_amazon_itself_is_believed_that_a_checksum_tells_what_is_there_now() -> None:
    amazon = S3Config.model_validate({"type": "s3", "bucket": "acme-backups", "region": "eu-central-1"})
    other = amazon.model_copy(update={"endpoint_url": "https://s3.example.com"})
    audited = [Capability.AUDITED in S3Destination("away", one).capabilities for one in (amazon, other)]
    assert audited == [True, False]


def test_the_place_tells_the_digest_that_it_checked(s3_server: S3Server) -> None:
    with opened(config(s3_server)) as destination:
        assert Capability.CHECKSUMS in destination.capabilities
        put(destination, OBJECT, b"content")
        assert destination.checksum(OBJECT) == sha256(b"content").hexdigest()
        with pytest.raises(ObjectMissingError):
            destination.checksum(BODY)


def test_what_somebody_else_put_there_has_no_digest(moto_server: MotoServer) -> None:
    where = config(moto_server)
    with opened(where) as destination, contextlib.closing(moto_server.client()) as client:
        client.put_object(Bucket=where.bucket, Key=f"{where.prefix}/{OBJECT}", Body=b"x", ChecksumAlgorithm="CRC32")
        assert destination.checksum(OBJECT) is None


def test_only_sealed_parts_go_to_other_storage_classes(moto_server: MotoServer) -> None:
    where = config(
        moto_server, storage_class="DEEP_ARCHIVE", binlog_storage_class="STANDARD_IA", server_side_encryption="AES256"
    )
    segment = PART_OF_LOG.rpartition("/")[0] + "/"
    warm = [MANIFEST, BODY, LEASE, segment + layout.SEGMENT, segment + layout.index_name(0), layout.RECOVER]
    with opened(where) as destination, contextlib.closing(moto_server.client()) as client:
        for key in [OBJECT, PART_OF_LOG, *warm]:
            put(destination, key, b"x")
        heads = {
            key: client.head_object(Bucket=where.bucket, Key=f"{where.prefix}/{key}")
            for key in [OBJECT, PART_OF_LOG, layout.REPOSITORY, *warm]
        }
        assert {head.get("ServerSideEncryption") for head in heads.values()} == {"AES256"}
        classes = {key: head.get("StorageClass", "STANDARD") for key, head in heads.items()}
        assert (classes.pop(OBJECT), classes.pop(PART_OF_LOG)) == ("DEEP_ARCHIVE", "STANDARD_IA")
        assert set(classes.values()) == {"STANDARD"}


def test_an_archived_object_says_that_it_has_to_be_thawed_and_can_be(moto_server: MotoServer) -> None:
    with opened(config(moto_server, storage_class="GLACIER")) as destination:
        put(destination, OBJECT, b"cold")
        archive = as_archive(destination)
        assert archive is not None
        with pytest.raises(ArchivedError, match=OBJECT):
            get(destination, OBJECT)
        assert archive.coldness(OBJECT).state is ColdState.ARCHIVED
        moto_server.set_restoring(0)
        archive.thaw(OBJECT, Tier.STANDARD, 3)
        assert archive.coldness(OBJECT).state is ColdState.THAWED
        assert get(destination, OBJECT) == b"cold"
        put(destination, OBJECT, b"cold")  # the same is there: it need not be read to know that


def test_a_place_of_warm_classes_only_is_no_archive(s3_server: S3Server) -> None:
    with opened(config(s3_server, storage_class="STANDARD_IA"), initialise=False) as destination:
        assert as_archive(destination) is None


# Locks and rights to delete


def test_what_is_locked_cannot_be_deleted_until_its_time_and_leases_can(s3_server: S3Server) -> None:
    where = S3Config.model_validate(
        {**s3_server.bucket("locked", lock=True), "object_lock": "governance", "lock_days": 14}
    )
    now = datetime.now(UTC)
    with opened(where) as destination:
        put(destination, OBJECT, b"kept")
        put(destination, LEASE, b"lease")
        with pytest.raises(LockedError) as caught:
            destination.delete(OBJECT)
        assert f"{(now + timedelta(days=14)):%Y-%m-%d}" in caught.value.detail
        destination.delete(LEASE)
        assert (keys(destination), keys(destination, layout.INTENTS)) == ([OBJECT], [])
        begins, goes_on = (
            layout.segment_key("db1", SegmentKey("20261121T040000Z-0000000a", 7, start, 100)) for start in (0, 50)
        )
        for key in (begins, goes_on):
            put(destination, key, b"{}")
        destination.delete(goes_on)  # a piece, which is replaced soon
        with pytest.raises(LockedError):
            destination.delete(begins)
        destination.delete(BODY)  # nothing there: nothing locked
    with opened(where, clock=lambda: now + timedelta(days=15)) as later:
        later.delete(OBJECT)
        assert keys(later) == []


def test_a_bucket_without_locks_says_what_to_do_about_it(s3_server: S3Server) -> None:
    where = config(s3_server, object_lock="governance", lock_days=14)
    with opened(where, initialise=False) as destination, pytest.raises(DestinationError) as caught:
        destination.initialise(datetime.now(UTC))
    assert "made with object lock" in caught.value.hint


def test_deleting_in_a_bucket_with_versions_keeps_the_bytes_and_hides_the_key(s3_server: S3Server) -> None:
    fields = s3_server.bucket("versions", versioning=True)
    where = S3Config.model_validate({**fields, "prefix": "p"})
    with opened(where) as destination, contextlib.closing(s3_server.client()) as client:
        put(destination, OBJECT, b"first")
        destination.delete(OBJECT)
        assert keys(destination) == []
        with pytest.raises(ObjectMissingError):
            destination.stat(OBJECT)
        kept = client.list_object_versions(Bucket="versions", Prefix=f"p/{OBJECT}")
        assert len(kept["Versions"]) == len(kept["DeleteMarkers"]) == 1


def test_without_the_right_to_delete_nothing_is_deleted_and_that_is_said(s3_server: S3Server) -> None:
    with opened(config(s3_server, delete=False)) as destination:
        put(destination, OBJECT, b"x")
        with pytest.raises(LockedError):
            destination.delete(OBJECT)
        destination.delete(BODY)
        assert keys(destination) == [OBJECT]


# The way there


def test_a_server_is_trusted_by_the_certificate_that_is_named_and_else_not(s3_server: S3Server) -> None:
    del s3_server  # where there is one, there can be another
    with S3Server(encrypted=True) as server:
        with opened(config(server, ca_file=server.certificate)) as destination:
            put(destination, OBJECT, b"over TLS")
            assert get(destination, OBJECT) == b"over TLS"
            assert destination.checksum(OBJECT) == sha256(b"over TLS").hexdigest()
        for other in (None, server.base / "missing.crt"):
            with opened(config(server, ca_file=other), initialise=False) as stranger:
                with pytest.raises(DestinationError) as caught:
                    stranger.is_initialised()
            assert "ca_file" in caught.value.hint


def test_credentials_that_are_wrong_are_named_with_their_file(s3_server: S3Server, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("[backupd]\naws_access_key_id=nobody\naws_secret_access_key=nothing-secret\n")
    for fields in (
        {"credentials_file": wrong, "profile": "backupd"},
        {"credentials_file": wrong, "profile": "other"},
        {"credentials_file": wrong},
        {"credentials_file": tmp_path / "missing"},
    ):
        with opened(config(s3_server, **fields), initialise=False) as destination:
            with pytest.raises(DestinationError) as caught:
                destination.is_initialised()
        assert "credentials" in caught.value.hint
        assert str(fields["credentials_file"]) in caught.value.hint
        assert "nothing-secret" not in str(caught.value)


def test_credentials_that_were_changed_are_read_again_by_who_runs_already(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rotated"
    write_credentials(file, ACCESS_KEY, SECRET_KEY)
    made: list[object] = []
    make = s3client._client

    def counted(where: S3Config, read_seconds: float) -> S3Client:
        made.append(where)
        return make(where, read_seconds)

    monkeypatch.setattr(s3client, "_client", counted)

    def ask(_number: int = 0) -> str:
        try:
            return "there" if destination.is_initialised() else "not there"
        except DestinationError as error:
            return error.hint

    with opened(config(s3_server, credentials_file=file)) as destination, ThreadPoolExecutor(4) as threads:
        put(destination, OBJECT, b"x")
        write_credentials(file, "revoked", "S3-old")
        assert ask() == "there", "who is let in does not read them again"
        destination.close()
        assert str(file) in ask()
        before = len(made)
        assert str(file) in ask()
        assert len(made) == before, "what is refused is not read again each time"
        monkeypatch.setattr(s3client, "RENEW_SECONDS", 0.0)
        assert str(file) in ask()
        assert len(made) == before + 1, "but now and then: not all credentials are in files"
        write_credentials(file, "", "")
        monkeypatch.setattr(s3client, "RENEW_SECONDS", 600.0)
        assert str(file) in ask()
        write_credentials(file, ACCESS_KEY, SECRET_KEY)
        assert set(threads.map(ask, range(8))) == {"there"}
        assert destination.stat(OBJECT).size == 1


def test_the_environment_is_used_only_where_no_file_is_named(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    with opened(config(s3_server, profile="backupd")) as destination:
        put(destination, OBJECT, b"x")
    with opened(config(s3_server, credentials_file=None), initialise=False) as destination:
        with pytest.raises(DestinationError, match="looking for the marker"):
            destination.is_initialised()


def test_a_bucket_that_is_not_there_is_said_to_be_missing(s3_server: S3Server) -> None:
    where = config(s3_server).model_copy(update={"bucket": "nowhere"})
    with opened(where, initialise=False) as destination:
        for ask in (
            destination.is_initialised,
            lambda: destination.initialise(datetime.now(UTC)),
            lambda: put(destination, OBJECT, b"x"),
            lambda: destination.stat(OBJECT),
        ):
            with pytest.raises(DestinationError) as caught:
                ask()
            assert "the bucket nowhere does not exist" in caught.value.detail


def test_a_region_that_is_wrong_is_put_right_where_the_place_tells_the_right_one(s3_server: S3Server) -> None:
    with opened(config(s3_server, region="eu-west-3")) as destination:
        put(destination, OBJECT, b"x")
        assert get(destination, OBJECT) == b"x"


def test_a_stored_object_is_found_by_those_who_verify(s3_server: S3Server) -> None:
    with opened(config(s3_server)) as destination:
        raw = b"side file"
        destination.put(BODY, io.BytesIO(raw))
        assert objects.fetch_side(destination, BODY, StoredObject("body", len(raw), sha256(raw).hexdigest())) == raw
