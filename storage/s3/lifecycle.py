"""What a bucket of S3 does with objects after they are stored: archive classes, earlier versions, object locks.

An object in GLACIER or DEEP_ARCHIVE keeps its class while a thawed copy of it is there, so the class alone says
nothing: the header ``x-amz-restore`` does. INTELLIGENT_TIERING has archive tiers of its own, whose objects come back
for good.

A plain deletion puts a marker on top of the versions of a key; credentials that may not delete versions, or find them
locked, can do no more than that. So what is brought back is uncovered, by taking the markers away, or stored once more.

An object lock says until when what is stored may not be deleted. Nothing here ever makes that earlier.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from botocore.exceptions import ClientError

from backupd.model.errors import ArchivedError, DestinationError, ForbiddenError, ObjectMissingError, RefusedError
from backupd.model.text import format_time
from storage import layout
from storage.config import S3Config
from storage.destination import Coldness, ColdState, Tier, Version
from storage.s3.client import Bucket, code_of, status_of
from storage.s3.stream import open_download

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import HeadObjectOutputTypeDef


ARCHIVE_CLASSES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
TIERING = "INTELLIGENT_TIERING"
_TIERS = {Tier.BULK: "Bulk", Tier.STANDARD: "Standard", Tier.EXPEDITED: "Expedited"}
_ONGOING = re.compile(r'ongoing-request="(true|false)"')
_EXPIRY = re.compile(r'expiry-date="([^"]+)"')
_UNDER_WAY = "RestoreAlreadyInProgress"
_NO_CAPACITY = "GlacierExpeditedRetrievalNotAvailable"
_NOT_ARCHIVED = "InvalidObjectState"


def coldness_of(key: str, head: Mapping[str, Any], now: datetime) -> Coldness:
    """What the answer to a HEAD says. A thawed copy whose time is over counts as gone, even where the destination is
    late in removing it."""
    storage_class = head.get("StorageClass") or "STANDARD"
    header = head.get("Restore") or ""
    size = int(head["ContentLength"])
    found = _ONGOING.search(header)
    if found is not None and found[1] == "true":
        return Coldness(key, size, storage_class, ColdState.THAWING)
    if storage_class == TIERING:
        cold = bool(head.get("ArchiveStatus"))
        return Coldness(key, size, storage_class, ColdState.ARCHIVED if cold else ColdState.WARM)
    if storage_class not in ARCHIVE_CLASSES:
        return Coldness(key, size, storage_class, ColdState.WARM)
    until = _expiry(header)
    if found is None or (until is not None and until <= now):
        return Coldness(key, size, storage_class, ColdState.ARCHIVED)
    return Coldness(key, size, storage_class, ColdState.THAWED, until)


def coldness(client: S3Client, bucket: Bucket, key: str, now: datetime) -> Coldness:
    """The state of an object. What the destination refuses leaves as botocore's error, which the driver explains as it
    does for all of its calls."""
    return coldness_of(key, client.head_object(**bucket.where(key)), now)


def thaw(client: S3Client, bucket: Bucket, key: str, tier: Tier, days: int, now: datetime) -> Coldness:
    """Ask for an object, or for a thawed copy to stay; its state afterwards. See ``ArchiveDestination.thaw``."""
    before = coldness(client, bucket, key, now)
    if before.state is ColdState.WARM:
        return before
    if before.storage_class == "DEEP_ARCHIVE" and tier is Tier.EXPEDITED:
        raise RefusedError(
            f"{key} at destination {bucket.name} is in DEEP_ARCHIVE, which has no expedited tier",
            hint="choose standard (12 hours) or bulk (48 hours)",
        )
    asked: dict[str, Any] = {"GlacierJobParameters": {"Tier": _TIERS[tier]}}
    if before.storage_class != TIERING:
        asked["Days"] = days
    try:
        client.restore_object(**bucket.where(key), RestoreRequest=asked)  # type: ignore[arg-type]  # built in steps
    except ClientError as error:
        code = code_of(error)
        if code == _UNDER_WAY:
            stands = before if before.state is ColdState.THAWING else coldness(client, bucket, key, now)
            return replace(stands, refused=True)
        if code == _NO_CAPACITY:
            raise DestinationError(
                f"destination {bucket.name} has no capacity for expedited thaws right now",
                detail=str(error),
                hint="try again later, or choose standard",
            ) from error
        if code != _NOT_ARCHIVED:  # else it was made readable meanwhile: by a rule of the bucket, or by a copy
            raise
    return coldness(client, bucket, key, now)


def _expiry(header: str) -> datetime | None:
    found = _EXPIRY.search(header)
    if found is None:
        return None
    try:
        moment = parsedate_to_datetime(found[1])
    except ValueError:
        return None
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


_NONE = "null"
"""What a bucket that keeps no versions calls the only one."""

Result = TypeVar("Result")
SPARE = timedelta(days=1)
"""By so much more a lock is lengthened, so that what every backup counts on is asked for once a day, not each time."""
_ROUNDING = timedelta(seconds=1)


def versions(bucket: Bucket, prefix: str, is_ours: Callable[[str], bool]) -> Iterator[Version]:
    """See ``VersionedDestination.versions``; only of keys of which ``is_ours`` says so."""
    doing = f"listing the versions of {prefix or 'everything'}"
    fields: dict[str, Any] = {"Bucket": bucket.config.bucket, "Prefix": bucket.full(prefix)}
    while True:
        page = ask(bucket, "s3:ListBucketVersions", doing, lambda client: client.list_object_versions(**fields))
        found = [_version(bucket, item, item["Size"]) for item in page.get("Versions", ())]
        found += [_version(bucket, item, None) for item in page.get("DeleteMarkers", ())]
        # Sorting is stable: versions of the same second stay in the order in which the destination listed them.
        found.sort(key=lambda one: (one.modified_at, one.size is None), reverse=True)
        found.sort(key=lambda one: (one.key, not one.newest))
        yield from (one for one in found if is_ours(one.key))
        behind = {"KeyMarker": page.get("NextKeyMarker"), "VersionIdMarker": page.get("NextVersionIdMarker")}
        if not page.get("IsTruncated") or not behind["KeyMarker"]:
            return
        behind = {name: value for name, value in behind.items() if value}
        if behind.items() <= fields.items():
            hint = "this server does not list versions by pages; use its own tools"
            raise bucket.words.failed(doing, f"it continues with {behind} repeatedly", hint)
        fields.update(behind)


def bring_back(bucket: Bucket, version: Version, above: Sequence[Version], headers: Mapping[str, Any]) -> None:
    """See ``VersionedDestination.bring_back``. ``headers``: what a put of the key would ask for."""
    doing = f"bringing back {version.key}"
    where = bucket.where(version.key)
    if above and bucket.config.delete:
        for marker in above:
            ask(bucket, "s3:DeleteObjectVersion", doing, partial(_uncover, {**where, "VersionId": marker.id}))
        return
    fields = {**where, **headers, "CopySource": {**where, "VersionId": version.id}}
    lock = " and s3:PutObjectRetention" if "ObjectLockMode" in headers else ""
    rights = f"s3:GetObjectVersion and s3:PutObject{lock}"
    ask(bucket, rights, doing, lambda client: client.copy_object(**fields), key=version.key)


def opened(bucket: Bucket, version: Version) -> BinaryIO:
    """See ``VersionedDestination.open_version``."""
    try:
        return open_download(bucket, version.key, 0, None, version=version.id or _NONE)
    except (ArchivedError, ObjectMissingError):
        raise
    except DestinationError:
        _head(bucket, version)  # where a right is missing, this names it
        raise


def checksum(bucket: Bucket, version: Version) -> str | None:
    """See ``VersionedDestination.version_checksum``. Of what came in parts there is none that the destination computed,
    and what was recorded beside it may be whoever's who stored it."""
    checksum = _head(bucket, version).get("ChecksumSHA256", "")
    return b64decode(checksum).hex() if checksum and "-" not in checksum else None


def ask(
    bucket: Bucket, rights: str, doing: str, what: Callable[[S3Client], Result], *, key: str | None = None
) -> Result:
    """As ``Bucket.call``. Raises ForbiddenError naming ``rights`` where the credentials lack them, RefusedError where
    the server knows nothing of versions."""
    try:
        return bucket.call(doing, what, key=key, expect=lambda error: _is_denied(error) or status_of(error) == 501)
    except ClientError as error:
        text = " ".join(str(error.response.get("Error", {}).get("Message", "")).split())
        detail = f"{code_of(error)} ({status_of(error)}): {text}".strip(" :")
        if status_of(error) == 501:
            raise RefusedError(
                f"{bucket.words.label} keeps no versions: its server does not know them", detail=detail
            ) from error
        raise ForbiddenError(
            f"{bucket.words.label}: {doing} is not allowed",
            detail=detail,
            hint=f"these credentials need the right {rights} on {bucket.config.bucket}: give it to them for as long as "
            "this takes, or use others (credentials_file, profile)",
        ) from error


def _uncover(named: Mapping[str, Any], client: S3Client) -> None:
    client.delete_object(**named)


def _head(bucket: Bucket, version: Version) -> HeadObjectOutputTypeDef:
    where = bucket.where(version.key) | {"VersionId": version.id or _NONE, "ChecksumMode": "ENABLED"}
    doing = f"looking at a version of {version.key}"
    return ask(bucket, "s3:GetObjectVersion", doing, lambda client: client.head_object(**where), key=version.key)


def _is_denied(error: ClientError) -> bool:
    return status_of(error) == 403 and code_of(error) in {"AccessDenied", "403", "Forbidden", "MethodNotAllowed"}


def _version(bucket: Bucket, item: Mapping[str, Any], size: int | None) -> Version:
    version_id = item.get("VersionId") or _NONE
    key, kept = str(item["Key"]).removeprefix(bucket.prefix), None if version_id == _NONE else str(version_id)
    return Version(key, kept, item["LastModified"].astimezone(UTC), bool(item.get("IsLatest")), size)


def locked_until(config: S3Config, key: str, since: datetime) -> datetime | None:
    """Until when ``key``, stored at ``since``, is to be locked; None where it is not."""
    if config.object_lock is None or config.lock_days is None or layout.comes_and_goes(key):
        return None
    return since + timedelta(days=config.lock_days)


def lock_headers(config: S3Config, key: str, now: datetime) -> dict[str, Any]:
    """What a put of ``key`` asks for."""
    until = locked_until(config, key, now)
    if until is None or config.object_lock is None:
        return {}
    return {"ObjectLockMode": config.object_lock.upper(), "ObjectLockRetainUntilDate": until}


def is_locked(head: Mapping[str, Any], until: datetime) -> bool:
    """By the answer to a HEAD: does the lock last until then?"""
    locked_until = head.get("ObjectLockRetainUntilDate")
    return locked_until is not None and locked_until >= until - _ROUNDING


def lengthen(bucket: Bucket, key: str, head: Mapping[str, Any], until: datetime) -> bool:
    """Keep ``key``, whose HEAD answer is ``head``, locked until then at the least; False when it is already. A lock of
    the other mode stays in its mode."""
    if is_locked(head, until):
        return False
    mode = head.get("ObjectLockMode") or str(bucket.config.object_lock).upper()
    fields = bucket.where(key) | {"Retention": {"Mode": mode, "RetainUntilDate": until + SPARE}}
    if version := head.get("VersionId"):
        fields["VersionId"] = version
    bucket.call(f"locking {key} for longer", lambda client: client.put_object_retention(**fields), key=key)
    return True


def not_locked(bucket: Bucket, key: str, until: datetime) -> DestinationError:
    """What was stored is not locked as it was asked for."""
    return DestinationError(
        f"{bucket.words.label} accepted {key}, but does not lock it until {format_time(until)}",
        hint="the bucket must be created with object lock, and the credentials need s3:PutObjectRetention, and "
        "s3:GetObjectRetention to see what is locked",
    )
