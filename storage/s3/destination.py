"""A destination in a bucket of Amazon S3, or of any server that speaks like it.

What takes how much memory says ``storage.s3.stream``; a stream that is read takes 2 MiB. Reading does not check
digests: who reads has the one that was stored, and compares.
"""

from __future__ import annotations

import io
import time
from base64 import b64decode
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, BinaryIO

from botocore.exceptions import ClientError

from backupd.model.errors import ArchivedError, DestinationError, MissingRightsError, ObjectMissingError
from backupd.model.text import Clock, format_time
from backupd.process.run_context import utc_now
from storage import layout
from storage.config import S3Config
from storage.destination import Capability, Coldness, ObjectInfo, Space, Tier, Version, new_marker, not_empty, sha256_of
from storage.s3 import lifecycle as s3archive
from storage.s3 import lifecycle as s3versions
from storage.s3.client import BEGIN_SECONDS, READ_SECONDS, Bucket, code_of, is_missing, status_of
from storage.s3.stream import SHA256, TOKEN, Upload, abort, open_download

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import HeadObjectOutputTypeDef

_TRUSTED_SECONDS = 30.0
"""How long the marker, once seen, is not looked for again when a key is missing."""
ABANDONED = timedelta(days=1)
"""Nobody can tell from here whether another machine's unfinished upload goes on: one so old does not."""
_BARREN = 1000
"""Pages of a listing, each of up to a thousand keys, in which there may be nothing of ours, one after the other."""
_NEVER_REPLACED = frozenset({layout.MANIFEST})


class S3Destination:
    """Nothing is touched before the first call. ``read_seconds``: how long an answer may take, ``begin_seconds``: until
    when a request is tried again."""

    def __init__(
        self,
        name: str,
        config: S3Config,
        *,
        clock: Clock = utc_now,
        read_seconds: float = READ_SECONDS,
        begin_seconds: float = BEGIN_SECONDS,
    ) -> None:
        self._bucket = Bucket(name, config, read_seconds=read_seconds, begin_seconds=begin_seconds)
        self._config = config
        self._clock = clock
        self._seen: float | None = None
        self._running: set[str] = set()

    @property
    def name(self) -> str:
        """See ``Destination``."""
        return self._bucket.name

    @property
    def capabilities(self) -> Capability:
        """By the configuration alone: CHECKSUMS, VERSIONS and COPIES always, AUDITED at Amazon's own S3, LOCKS with an
        object lock, ARCHIVE where a class has to be thawed, else RULES."""
        classes = {self._config.storage_class, self._config.binlog_storage_class}
        cold = classes & {*s3archive.ARCHIVE_CLASSES, s3archive.TIERING}
        # Other servers keep the checksum of an upload beside the bytes, and return it whatever became of these.
        audited = Capability.AUDITED if self._config.endpoint_url is None else Capability.NONE
        locks = Capability.LOCKS if self._config.object_lock is not None else Capability.NONE
        archive = Capability.ARCHIVE if cold else Capability.RULES
        return Capability.CHECKSUMS | Capability.VERSIONS | Capability.COPIES | audited | locks | archive

    def close(self) -> None:
        """Give the connections back; the next call makes new ones."""
        self._bucket.close()

    # Objects

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        """See ``Destination.put``. Objects and manifests are stored only where nothing is under the key, as far as the
        server knows such conditions; the size is compared afterwards, and the lock is checked."""
        layout.check_key(key)
        self._require(f"writing {key}")
        immutable = key.startswith(layout.OBJECTS) or key.rpartition("/")[2] in _NEVER_REPLACED
        taken = (lambda sha256, token: self._is_same(key, sha256, token)) if immutable else None
        headers = self._headers(key)
        done = Upload(self._bucket, key, headers, taken).store(stream, self._running)
        try:
            head = self._head(key, f"looking at {key} after it was written")
        except ObjectMissingError as error:
            raise DestinationError(
                f"{self._bucket.words.label} accepted {key}, but no longer has it",
                hint="check the lifecycle rules of the bucket, and who else deletes in it; backupd retries later",
            ) from error
        if head["ETag"] == done.etag and head["ContentLength"] != done.size:
            raise DestinationError(
                f"{self._bucket.words.label} keeps {head['ContentLength']} of the {done.size} bytes of {key}",
                hint="check the server's log; backupd retries later",
            )
        self._check_lock(key, head, headers, done.etag)
        return ObjectInfo(key, done.size, _second(head["LastModified"]))

    def _check_lock(self, key: str, head: HeadObjectOutputTypeDef, headers: dict[str, Any], etag: str) -> None:
        """``headers``: what was asked for with the bytes that the server calls ``etag``."""
        until = headers.get("ObjectLockRetainUntilDate")
        if until is not None and not s3versions.is_locked(head, until):
            if head["ETag"] == etag:  # else it was there already, or somebody has put something else since
                raise s3versions.not_locked(self._bucket, key, until)
            s3versions.lengthen(self._bucket, key, head, until)

    def duplicate(self, source: str, target: str) -> bool:
        """See ``CopyingDestination.duplicate``: CopyObject, with class, encryption and lock as a put of ``target`` has
        them; False for a server that does not know it."""
        layout.check_key(source)
        layout.check_key(target)
        doing = f"copying {source} to {target}"
        self._require(doing)
        headers = self._headers(target)
        fields: dict[str, Any] = {
            **self._bucket.where(target),
            **headers,
            "CopySource": self._bucket.where(source),
            "ChecksumAlgorithm": "SHA256",
        }
        try:
            answer = self._bucket.call(
                doing, lambda client: client.copy_object(**fields), key=source, expect=_knows_no_copies
            )
        except ClientError:
            return False
        head = self._head(target, f"looking at {target} after it was copied")
        self._check_lock(target, head, headers, answer.get("CopyObjectResult", {}).get("ETag", ""))
        return True

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        """See ``Destination.get``. The stream goes on by itself after a broken connection."""
        layout.check_key(key)
        self._require(f"reading {key}")
        try:
            return open_download(self._bucket, key, offset, length)
        except ObjectMissingError:
            self._require_again(f"reading {key}")
            raise

    def stat(self, key: str) -> ObjectInfo:
        """See ``Destination.stat``: a HEAD request; times in whole seconds."""
        layout.check_key(key)
        head = self._head(key, f"looking at {key}")
        return ObjectInfo(key, head["ContentLength"], _second(head["LastModified"]))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ``Destination.list``: a page of a thousand keys at a time. Raises DestinationError for a server that does
        not list in the order of keys."""
        doing = f"listing {prefix}"
        self._require(doing)
        layout.check_prefix(prefix)
        return self._list(prefix, doing)

    def _list(self, prefix: str, doing: str) -> Iterator[ObjectInfo]:
        fields: dict[str, Any] = {"Bucket": self._config.bucket, "Prefix": self._bucket.full(prefix)}
        last = ""
        barren = 0
        while True:
            page = self._bucket.call(doing, lambda client: client.list_objects_v2(**fields))
            before = last
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._bucket.prefix)
                if not _is_ours(key):
                    continue
                if key <= last:
                    hint = "this server does not list in the order of keys; use one that does"
                    raise self._bucket.words.failed(doing, f"it names {key} after {last}", hint)
                last = key
                yield ObjectInfo(key, item["Size"], _second(item["LastModified"]))
            if not page.get("IsTruncated") or not page.get("NextContinuationToken"):
                return
            barren = barren + 1 if last == before else 0
            if barren > _BARREN or page["NextContinuationToken"] == fields.get("ContinuationToken"):
                raise self._endless(doing, f"{barren} pages without a key of ours, and it says that there are more")
            fields["ContinuationToken"] = page["NextContinuationToken"]

    def _endless(self, doing: str, detail: str) -> DestinationError:
        hint = "this server never completes a listing; check its log, or use another one"
        return self._bucket.words.failed(doing, detail, hint)

    def delete(self, key: str) -> None:
        """See ``Destination.delete``. Raises LockedError while an object lock or a legal hold keeps the key, and where
        the configuration says ``delete: false``."""
        layout.check_key(key)
        doing = f"deleting {key}"
        self._require(doing)
        where = self._bucket.where(key)
        try:
            if not self._config.delete:
                self._head(key, doing)
                raise self._bucket.words.locked(
                    key, "delete: false", "another installation, or a rule of the bucket, removes what is marked here"
                )
            if self._config.object_lock is not None and not layout.comes_and_goes(key):
                self._refuse_locked(key, doing)
        except ObjectMissingError:
            return
        try:
            self._bucket.call(doing, lambda client: client.delete_object(**where), expect=_is_forbidden)
        except ClientError as error:
            try:
                self._refuse_locked(key, doing)
            except ObjectMissingError:
                return
            explained = self._bucket.words.explain(error, doing, None)
            refused = self._bucket.words.locked(key, explained.detail, explained.hint)
            raise MissingRightsError(refused.message, detail=explained.detail, hint=explained.hint) from error

    def space(self) -> Space | None:
        """A bucket does not say."""
        return None

    # Archive classes and checksums

    def coldness(self, key: str) -> Coldness:
        """See ``ArchiveDestination.coldness``: a HEAD request."""
        layout.check_key(key)
        doing = f"looking at {key}"
        self._require(doing)
        return self._bucket.call(
            doing, lambda client: s3archive.coldness(client, self._bucket, key, self._clock()), key=key
        )

    def thaw(self, key: str, tier: Tier, days: int) -> Coldness:
        """See ``ArchiveDestination.thaw``: RestoreObject between two HEAD requests."""
        layout.check_key(key)
        doing = f"thawing {key}"
        self._require(doing)
        return self._bucket.call(
            doing, lambda client: s3archive.thaw(client, self._bucket, key, tier, days, self._clock()), key=key
        )

    def checksum(self, key: str) -> str | None:
        """What the destination computed when it took the object; of one that came in parts, which it has checked one by
        one, what was recorded with it, where its length was known before it was sent."""
        layout.check_key(key)
        head = self._head(key, f"looking at {key}")
        answered = head.get("ChecksumSHA256", "")
        if not answered:
            return None
        if "-" not in answered:
            return b64decode(answered).hex()
        return head["Metadata"].get(SHA256)

    # Versions and object lock

    def versions(self, prefix: str) -> Iterator[Version]:
        """See ``VersionedDestination.versions``. Raises ForbiddenError naming the right that is missing."""
        return s3versions.versions(self._bucket, prefix, _is_ours)

    def open_version(self, version: Version) -> BinaryIO:
        """See ``VersionedDestination.open_version``."""
        return s3versions.opened(self._bucket, version)

    def version_checksum(self, version: Version) -> str | None:
        """See ``VersionedDestination.version_checksum``; None for what was uploaded in parts."""
        return s3versions.checksum(self._bucket, version)

    def bring_back(self, version: Version, above: Sequence[Version]) -> None:
        """See ``VersionedDestination.bring_back``; locked afterwards as if it were stored now."""
        s3versions.bring_back(self._bucket, version, above, self._headers(version.key))
        self._seen = None if version.key == layout.REPOSITORY else self._seen
        self.extend(version.key, self._clock())

    def extend(self, key: str, since: datetime) -> bool:
        """See ``LockingDestination.extend``; False where nothing is locked."""
        layout.check_key(key)
        until = s3versions.locked_until(self._config, key, since)
        if until is None:
            return False
        return s3versions.lengthen(self._bucket, key, self._head(key, f"looking at {key}"), until)

    # The marker

    def is_initialised(self) -> bool:
        """Is the marker in the bucket? False also for a bucket that does not exist."""
        where = self._bucket.where(layout.REPOSITORY)
        try:
            # Only an answer with a body distinguishes a missing bucket from a missing key.
            self._bucket.call(
                "looking for the marker", lambda client: client.get_object(**where)["Body"].close(), expect=is_missing
            )
        except ClientError:
            self._seen = None
            return False
        self._seen = time.monotonic()
        return True

    def initialise(self, now: datetime) -> None:
        """See ``Destination.initialise``. Does not make the bucket."""
        if self.is_initialised():
            return
        fields: dict[str, Any] = {"Bucket": self._config.bucket, "Prefix": self._bucket.prefix, "MaxKeys": 6}
        page = self._bucket.call("initialising", lambda client: client.list_objects_v2(**fields))
        ours = {self._bucket.prefix, self._bucket.full(layout.REPOSITORY)}
        strangers = [item["Key"] for item in page.get("Contents", ()) if item["Key"] not in ours]
        if strangers:
            raise not_empty(
                self._bucket.words.label, strangers, f"give destination {self.name} its own bucket or prefix"
            )
        # Of two first users one wins, where the destination knows conditions.
        Upload(self._bucket, layout.REPOSITORY, self._headers(layout.REPOSITORY), lambda _sha256, _token: True).store(
            io.BytesIO(new_marker(now, links=False)), self._running
        )
        if not self.is_initialised():
            raise DestinationError(
                f"{self._bucket.words.label} accepted {layout.REPOSITORY}, but does not have it",
                hint="check the rules of the bucket and the server's log",
            )

    # What was not finished

    def leftovers(self) -> Iterator[str]:
        """Uploads in parts that were begun more than a day ago, and not by this process."""
        self._require("looking for leftovers")
        for key, upload in self._abandoned():
            yield f"{key} (upload {upload})"

    def clear_leftovers(self) -> int:
        """Abort the uploads that ``leftovers`` names; how many went."""
        self._require("clearing leftovers")
        doing = "clearing leftovers"
        return sum(abort(self._bucket, doing, key, upload) for key, upload in list(self._abandoned()))

    def _abandoned(self) -> Iterator[tuple[str, str]]:
        doing = "looking for leftovers"
        since = self._clock() - ABANDONED
        fields: dict[str, Any] = {"Bucket": self._config.bucket, "Prefix": self._bucket.prefix}
        while True:
            page = self._bucket.call(doing, lambda client: client.list_multipart_uploads(**fields))
            for item in page.get("Uploads", ()):
                key = item["Key"].removeprefix(self._bucket.prefix)
                if _is_ours(key) and item["UploadId"] not in self._running and item["Initiated"] < since:
                    yield key, item["UploadId"]
            if not page.get("IsTruncated"):
                return
            behind = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
            if None in behind.values() or behind.items() <= fields.items():
                raise self._endless(doing, "it reports more entries, but repeats the same position")
            fields.update(behind)

    # How

    def _require(self, doing: str) -> None:
        """Raises DestinationError unless the marker is, or was, there."""
        if self._seen is None and not self.is_initialised():
            hint = "check bucket, prefix and endpoint_url. backupd never re-initializes a destination that was in use"
            raise self._bucket.words.failed(doing, f"{layout.REPOSITORY} is not there", hint)

    def _require_again(self, doing: str) -> None:
        """A key is missing: is that all?"""
        if self._seen is not None and time.monotonic() - self._seen > _TRUSTED_SECONDS:
            self._seen = None
        self._require(doing)

    def _head(self, key: str, doing: str) -> HeadObjectOutputTypeDef:
        self._require(doing)
        where = self._bucket.where(key)
        try:
            return self._bucket.call(doing, lambda client: client.head_object(**where, ChecksumMode="ENABLED"), key=key)
        except ObjectMissingError:
            self._require_again(doing)
            raise

    def _headers(self, key: str) -> dict[str, Any]:
        """What a put of ``key`` asks for besides."""
        config = self._config
        headers: dict[str, Any] = {}
        kind = layout.cold_kind(key)
        storage_class = {"object": config.storage_class, "log": config.binlog_storage_class}.get(kind or "", "STANDARD")
        if storage_class != "STANDARD":
            headers["StorageClass"] = storage_class
        if config.server_side_encryption is not None:
            headers["ServerSideEncryption"] = config.server_side_encryption
        if config.kms_key is not None:
            headers["SSEKMSKeyId"] = config.kms_key
        return headers | s3versions.lock_headers(config, key, self._clock())

    def _refuse_locked(self, key: str, doing: str) -> None:
        """Raises LockedError while an object lock keeps ``key``; ObjectMissingError."""
        head = self._head(key, doing)
        until = head.get("ObjectLockRetainUntilDate")
        held = head.get("ObjectLockLegalHoldStatus") == "ON"
        if held or (until is not None and until > self._clock()):
            reason = "a legal hold keeps it"
            if until is not None and not held:
                mode = head.get("ObjectLockMode", "lock").lower()
                reason = f"locked until {format_time(until.astimezone(UTC))} ({mode})"
            raise self._bucket.words.locked(key, reason, "backupd retries later")

    def _is_same(self, key: str, sha256: str, token: str) -> bool:
        """Is what is under ``key``, which is never to be replaced, what is being stored? False for bytes that are not
        what they should be. Raises DestinationError for others that are whole."""
        try:
            head = self._head(key, f"looking at {key}")
        except ObjectMissingError:
            return False
        if head["Metadata"].get(TOKEN) == token:
            return True
        recorded = head["Metadata"].get(SHA256)
        try:
            stored = self._digest(key)
        except ArchivedError:
            return recorded == sha256
        if stored == sha256:
            return True
        name = layout.name_in(key)
        whole = name.endswith(stored[:16]) if layout.is_object_name(name) else stored == recorded
        if whole:
            raise DestinationError(
                f"{self._bucket.words.label} has another {key} already",
                detail=f"its SHA-256 is {stored}, that of what was to be stored {sha256}",
                hint="two backups never share a name: check whether two installations use the same identity key",
            )
        return False

    def _digest(self, key: str) -> str:
        with open_download(self._bucket, key, 0, None) as stream:
            return sha256_of(stream)


def _second(moment: datetime) -> datetime:
    """Listings know parts of a second, other answers do not."""
    return moment.astimezone(UTC).replace(microsecond=0)


def _is_ours(key: str) -> bool:
    """Consoles put keys that stand for folders beside ours."""
    try:
        layout.check_key(key)
    except DestinationError:
        return False
    return True


def _knows_no_copies(error: ClientError) -> bool:
    return status_of(error) in {405, 501}


def _is_forbidden(error: ClientError) -> bool:
    return status_of(error) == 403 and code_of(error) in {"AccessDenied", "403", "ObjectLocked", "InvalidRequest"}
