"""Archive classes of S3: which objects have to be thawed, how far that is, and asking for it.

An object in GLACIER or DEEP_ARCHIVE keeps its class while a thawed copy of it is there, so the class alone says
nothing: the header ``x-amz-restore`` does. INTELLIGENT_TIERING has archive tiers of its own, whose objects come back
for good.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from backupd.model.errors import DestinationError, ObjectMissingError, RefusedError
from storage.contract.destination import Coldness, ColdState, Tier

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

ARCHIVE_CLASSES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
TIERING = "INTELLIGENT_TIERING"
_TIERS = {Tier.BULK: "Bulk", Tier.STANDARD: "Standard", Tier.EXPEDITED: "Expedited"}
_ONGOING = re.compile(r'ongoing-request="(true|false)"')
_EXPIRY = re.compile(r'expiry-date="([^"]+)"')
_UNDER_WAY = "RestoreAlreadyInProgress"
_NO_CAPACITY = "GlacierExpeditedRetrievalNotAvailable"
_NOT_ARCHIVED = "InvalidObjectState"
_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where one object is: ``name`` is its key in the bucket, ``key`` ours, ``destination`` what we call the place."""

    bucket: str
    name: str
    key: str
    destination: str


def coldness_of(place: Place, head: Mapping[str, Any], now: datetime) -> Coldness:
    """What the answer to a HEAD says. A thawed copy whose time is over counts as gone, even where the place is late
    in removing it."""
    storage_class = head.get("StorageClass") or "STANDARD"
    header = head.get("Restore") or ""
    size = int(head["ContentLength"])
    found = _ONGOING.search(header)
    if found is not None and found[1] == "true":
        return Coldness(place.key, size, storage_class, ColdState.THAWING)
    if storage_class == TIERING:
        cold = bool(head.get("ArchiveStatus"))
        return Coldness(place.key, size, storage_class, ColdState.ARCHIVED if cold else ColdState.WARM)
    if storage_class not in ARCHIVE_CLASSES:
        return Coldness(place.key, size, storage_class, ColdState.WARM)
    until = _expiry(header)
    if found is None or (until is not None and until <= now):
        return Coldness(place.key, size, storage_class, ColdState.ARCHIVED)
    return Coldness(place.key, size, storage_class, ColdState.THAWED, until)


def coldness(client: S3Client, place: Place, now: datetime) -> Coldness:
    """How an object stands. Raises ObjectMissingError; what else the place answers leaves as botocore's error, which
    the driver explains as it does for all of its calls."""
    try:
        head = client.head_object(Bucket=place.bucket, Key=place.name)
    except ClientError as error:
        raise _missing_or(error, place) from error
    return coldness_of(place, head, now)


def thaw(client: S3Client, place: Place, tier: Tier, days: int, now: datetime) -> Coldness:
    """Ask for an object, or for a thawed copy to stay; how it stands afterwards. See ``ArchiveDestination.thaw``."""
    before = coldness(client, place, now)
    if before.state is ColdState.WARM:
        return before
    if before.storage_class == "DEEP_ARCHIVE" and tier is Tier.EXPEDITED:
        raise RefusedError(
            f"{place.key} at destination {place.destination} lies in DEEP_ARCHIVE, which has no expedited tier",
            hint="choose standard (12 hours) or bulk (48 hours)",
        )
    asked: dict[str, Any] = {"GlacierJobParameters": {"Tier": _TIERS[tier]}}
    if before.storage_class != TIERING:
        asked["Days"] = days
    try:
        client.restore_object(Bucket=place.bucket, Key=place.name, RestoreRequest=asked)  # type: ignore[arg-type]  # built in steps
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code == _UNDER_WAY:
            stands = before if before.state is ColdState.THAWING else coldness(client, place, now)
            return replace(stands, refused=True)
        if code == _NO_CAPACITY:
            raise DestinationError(
                f"destination {place.destination} has no capacity for expedited thaws right now",
                detail=str(error),
                hint="try again later, or choose standard",
            ) from error
        if code == _NOT_ARCHIVED:  # made readable meanwhile: by a rule of the bucket, or by a copy
            return coldness(client, place, now)
        raise _missing_or(error, place) from error
    return coldness(client, place, now)


def _missing_or(error: ClientError, place: Place) -> Exception:
    if error.response.get("Error", {}).get("Code", "") in _MISSING:
        return ObjectMissingError(f"destination {place.destination} has no {place.key}")
    return error


def _expiry(header: str) -> datetime | None:
    found = _EXPIRY.search(header)
    if found is None:
        return None
    try:
        moment = parsedate_to_datetime(found[1])
    except ValueError:
        return None
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
