"""Object lock: until when what is stored may not be deleted, and making that later. Nothing here ever makes it
earlier."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from backupd.model.errors import DestinationError
from backupd.model.text import format_time
from storage.contract import layout
from storage.contract.config import S3Config
from storage.s3.client import Bucket

SPARE = timedelta(days=1)
"""By so much more a lock is lengthened, so that what every backup counts on is asked for once a day, not each time."""
_ROUNDING = timedelta(seconds=1)


def locked_until(config: S3Config, key: str, since: datetime) -> datetime | None:
    """Until when ``key``, stored at ``since``, is to be locked; None where it is not."""
    if config.object_lock is None or config.lock_days is None or layout.comes_and_goes(key):
        return None
    return since + timedelta(days=config.lock_days)


def lock_headers(config: S3Config, key: str, now: datetime) -> dict[str, Any]:
    """What a put of ``key`` asks for."""
    until = locked_until(config, key, now)
    return (
        {}
        if until is None or config.object_lock is None
        else {"ObjectLockMode": config.object_lock.upper(), "ObjectLockRetainUntilDate": until}
    )


def is_locked(head: Mapping[str, Any], until: datetime) -> bool:
    """By the answer to a HEAD: does the lock last until then?"""
    told = head.get("ObjectLockRetainUntilDate")
    return told is not None and told >= until - _ROUNDING


def lengthen(bucket: Bucket, key: str, head: Mapping[str, Any], until: datetime) -> bool:
    """Keep ``key``, of which ``head`` tells, locked until then at the least; False when it is already. A lock of the
    other mode stays in its mode."""
    if is_locked(head, until):
        return False
    mode = head.get("ObjectLockMode") or str(bucket.config.object_lock).upper()
    fields: dict[str, Any] = {
        "Bucket": bucket.config.bucket,
        "Key": bucket.full(key),
        "Retention": {"Mode": mode, "RetainUntilDate": until + SPARE},
    }
    if version := head.get("VersionId"):
        fields["VersionId"] = version
    bucket.call(f"locking {key} for longer", lambda client: client.put_object_retention(**fields), key=key)
    return True


def not_locked(bucket: Bucket, key: str, until: datetime) -> DestinationError:
    """What was stored is not locked as it was asked for."""
    return DestinationError(
        f"{bucket.words.place} took {key} and does not lock it until {format_time(until)}",
        hint="the bucket has to be made with object lock, and the credentials need s3:PutObjectRetention, and "
        "s3:GetObjectRetention to see what is locked",
    )
