"""Archive classes: what the answers of a place mean, and the whole way of an object on a server that plays them."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from backupd.model.errors import ArchivedError, DestinationError, ObjectMissingError, RefusedError
from storage import layout
from storage.config import S3Config
from storage.destination import ColdState, Tier, as_archive
from storage.s3 import lifecycle as s3archive
from storage.s3.client import Bucket
from storage.s3.destination import S3Destination
from storage.s3.lifecycle import coldness_of
from tests.support.stores.moto_server import MotoServer

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
BUCKET = Bucket("vault", S3Config.model_validate({"type": "s3", "bucket": "bucket", "prefix": "prefix"}))
KEY = "objects/aa/x"
OBJECT = layout.object_key("a" * 64 + "-" + "b" * 16)


@pytest.mark.parametrize(
    ("head", "state"),
    [
        ({}, ColdState.WARM),
        ({"StorageClass": "GLACIER_IR"}, ColdState.WARM),
        ({"StorageClass": "GLACIER"}, ColdState.ARCHIVED),
        ({"StorageClass": "DEEP_ARCHIVE"}, ColdState.ARCHIVED),
        ({"StorageClass": "DEEP_ARCHIVE", "Restore": 'ongoing-request="true"'}, ColdState.THAWING),
        (
            {
                "StorageClass": "GLACIER",
                "Restore": 'ongoing-request="false", expiry-date="Sun, 22 Nov 2026 00:00:00 GMT"',
            },
            ColdState.THAWED,
        ),
        (
            {
                "StorageClass": "GLACIER",
                "Restore": 'ongoing-request="false", expiry-date="Sat, 21 Nov 2026 00:00:00 GMT"',
            },
            ColdState.ARCHIVED,
        ),
        ({"StorageClass": "INTELLIGENT_TIERING"}, ColdState.WARM),
        ({"StorageClass": "INTELLIGENT_TIERING", "ArchiveStatus": "DEEP_ARCHIVE_ACCESS"}, ColdState.ARCHIVED),
        (
            {
                "StorageClass": "INTELLIGENT_TIERING",
                "ArchiveStatus": "ARCHIVE_ACCESS",
                "Restore": 'ongoing-request="true"',
            },
            ColdState.THAWING,
        ),
    ],
)
def test_what_an_answer_means(head: dict[str, Any], state: ColdState) -> None:
    found = coldness_of(KEY, {"ContentLength": 7, **head}, NOW)
    assert (found.state, found.size, found.key) == (state, 7, "objects/aa/x")
    assert found.storage_class == head.get("StorageClass", "STANDARD")
    assert found.until == (datetime(2026, 11, 22, tzinfo=UTC) if state is ColdState.THAWED else None)


class Answers:
    """A client that answers what it is told, and keeps what it was asked."""

    def __init__(self, *heads: dict[str, Any], refusal: str = "") -> None:
        self.heads, self.refusal = list(heads), refusal
        self.asked: list[dict[str, Any]] = []

    def head_object(self, **_where: Any) -> dict[str, Any]:
        head = self.heads.pop(0) if len(self.heads) > 1 else self.heads[0]
        return {"ContentLength": 1, **head}

    def restore_object(self, **fields: Any) -> dict[str, Any]:
        self.asked.append(fields["RestoreRequest"])
        if self.refusal:
            raise ClientError({"Error": {"Code": self.refusal, "Message": "no"}}, "RestoreObject")
        return {}


def thaw(client: Any, tier: Tier = Tier.STANDARD) -> ColdState:
    return s3archive.thaw(client, BUCKET, KEY, tier, 3, NOW).state


COLD, THAWING = {"StorageClass": "GLACIER"}, {"StorageClass": "GLACIER", "Restore": 'ongoing-request="true"'}


def test_the_request_says_how_fast_and_for_how_long() -> None:
    client = Answers(COLD, THAWING)
    assert thaw(client, Tier.EXPEDITED) is ColdState.THAWING
    assert client.asked == [{"Days": 3, "GlacierJobParameters": {"Tier": "Expedited"}}]
    tiering = Answers({"StorageClass": "INTELLIGENT_TIERING", "ArchiveStatus": "ARCHIVE_ACCESS"})
    thaw(tiering)
    assert tiering.asked == [{"GlacierJobParameters": {"Tier": "Standard"}}]  # it comes back for good


def test_asking_again_for_what_is_under_way_is_harmless_and_says_that_it_was_not_taken() -> None:
    found = s3archive.thaw(Answers(THAWING, refusal="RestoreAlreadyInProgress"), BUCKET, KEY, Tier.STANDARD, 3, NOW)  # type: ignore[arg-type]  # answers what is asked
    assert (found.state, found.refused) == (ColdState.THAWING, True)
    taken = s3archive.thaw(Answers(THAWING), BUCKET, KEY, Tier.EXPEDITED, 3, NOW)  # type: ignore[arg-type]  # answers what is asked
    assert (taken.state, taken.refused) == (ColdState.THAWING, False)


def test_what_was_made_readable_meanwhile_is_told_so() -> None:
    assert thaw(Answers(COLD, {}, refusal="InvalidObjectState")) is ColdState.WARM
    warm = Answers({})
    assert thaw(warm) is ColdState.WARM
    assert warm.asked == []


def test_what_cannot_be_had_is_said_in_words() -> None:
    with pytest.raises(RefusedError, match="no expedited tier"):
        thaw(Answers({"StorageClass": "DEEP_ARCHIVE"}), Tier.EXPEDITED)
    with pytest.raises(DestinationError, match="no capacity for expedited thaws"):
        thaw(Answers(COLD, refusal="GlacierExpeditedRetrievalNotAvailable"), Tier.EXPEDITED)
    with pytest.raises(ClientError) as missing:
        thaw(Answers(COLD, refusal="NoSuchKey"))
    assert isinstance(BUCKET.words.explain(missing.value, "thawing", KEY), ObjectMissingError)
    with pytest.raises(ClientError):  # the driver explains it
        thaw(Answers(COLD, refusal="AccessDenied"))


def test_an_object_goes_cold_is_thawed_read_and_goes_cold_again(moto_server: MotoServer) -> None:
    config = S3Config(**moto_server.bucket("thaws"), storage_class="DEEP_ARCHIVE", prefix="prod")
    destination = S3Destination("vault", config)
    destination.initialise(NOW)
    archive = as_archive(destination)
    assert archive is not None
    destination.put(OBJECT, io.BytesIO(b"sealed"))
    destination.put(layout.MARKS + "shop/x.json", io.BytesIO(b"{}"))
    assert archive.coldness(layout.MARKS + "shop/x.json").state is ColdState.WARM
    assert archive.coldness(OBJECT).state is ColdState.ARCHIVED
    with pytest.raises(ArchivedError):
        destination.get(OBJECT).close()
    moto_server.set_restoring(3)
    try:
        assert archive.thaw(OBJECT, Tier.BULK, 2).state in (ColdState.THAWING, ColdState.THAWED)
        for _ in range(10):
            found = archive.coldness(OBJECT)
            if found.state is ColdState.THAWED:
                break
    finally:
        moto_server.set_restoring(0)
    assert found.state is ColdState.THAWED
    assert found.until is not None
    assert timedelta(days=1) < found.until - datetime.now(UTC) < timedelta(days=3)
    with destination.get(OBJECT) as stream:
        assert stream.read() == b"sealed"
    late = S3Destination("vault", config, clock=lambda: datetime.now(UTC) + timedelta(days=4))
    assert late.coldness(OBJECT).state is ColdState.ARCHIVED
    with pytest.raises(ObjectMissingError):
        archive.coldness(layout.object_key("c" * 64 + "-" + "d" * 16))
    destination.close()
    late.close()
