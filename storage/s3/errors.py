"""What goes wrong at a bucket, in words: from the errors of the client library to ours, and which of them pass."""

from __future__ import annotations

import re
from dataclasses import dataclass

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
    TokenRetrievalError,
)
from urllib3.exceptions import HTTPError

from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    DestinationError,
    DestinationFullError,
    LockedError,
    ObjectMissingError,
    UnreachableError,
)
from storage.contract.config import S3Config

_ANSWERS_LATER = frozenset(
    {
        "InternalError",
        "ServiceUnavailable",
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "RequestTimeout",
        "RequestTimeoutException",
        "OperationAborted",
        "ConditionalRequestConflict",
        "TooManyRequests",
        "BandwidthLimitExceeded",
        "XMinioServerNotInitialized",
    }
)
_DAMAGED_ON_THE_WAY = frozenset(
    {"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "InvalidDigest", "IncompleteBody"}
)
_WRONG_CREDENTIALS = frozenset(
    {
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "InvalidToken",
        "ExpiredToken",
        "TokenRefreshRequired",
        "InvalidSecurity",
        "NotSignedUp",
        "UnrecognizedClientException",
        "XAdminNoSuchUser",
    }
)
_NOT_ALLOWED = frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem", "UnauthorizedAccess", "Forbidden"})
_WRONG_REGION = frozenset(
    {
        "PermanentRedirect",
        "TemporaryRedirect",
        "Redirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "IncorrectEndpoint",
    }
)
_NO_ROOM = frozenset(
    {
        "InsufficientStorage",
        "XMinioStorageFull",
        "QuotaExceeded",
        "XMinioAdminBucketQuotaExceeded",
        "EntityTooLargeForQuota",
        "StorageFull",
        "InsufficientCapacity",
    }
)
_LOCKED = frozenset({"ObjectLocked", "InvalidRetentionPeriod", "ObjectUnderRetention"})
_SKEWED = (
    "the clock of this machine and the server's differ by more than a quarter of an hour: set this machine's "
    "clock (timedatectl, chrony)"
)
_CHANGED = (
    "bytes were changed in transit: look at the network, and at proxies between here and the server; "
    "it is tried again later"
)
_NEEDS_LOCKS = (
    "object_lock needs a bucket that was made with object lock: make one, or take object_lock and "
    "lock_days from destination {name}"
)
_NO_LOCKS = re.compile(r"object lock|objectlock", re.IGNORECASE)
_REGION_TOLD = re.compile(r"expecting '([a-z0-9-]+)'")
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,200}")

_UNREACHABLE = (
    EndpointConnectionError,
    ConnectTimeoutError,
    ReadTimeoutError,
    ConnectionClosedError,
    ProxyConnectionError,
    SSLError,
    HTTPClientError,
    ResponseStreamingError,
    IncompleteReadError,
    HTTPError,
)  # the library reads the text of a refusal without translating what breaks it
_SILENT = (EndpointConnectionError, ConnectTimeoutError, ReadTimeoutError, ProxyConnectionError)
_NO_IDENTITY = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    ProfileNotFound,
    TokenRetrievalError,
)
_SSL = re.compile(r"certificate|SSL", re.IGNORECASE)


def code_of(error: ClientError) -> str:
    """The place's word for it; an answer without a body has only its number."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """The HTTP status of the answer, 0 where there is none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def may_pass(error: Exception) -> bool:
    """Is the same request worth another try at once?"""
    if isinstance(error, ClientError):
        return (
            code_of(error) in _ANSWERS_LATER | _DAMAGED_ON_THE_WAY or status_of(error) in {429, 500, 502, 503, 504}
        ) and code_of(error) not in _NO_ROOM
    if isinstance(error, SSLError):
        return not _SSL.search(str(error)) or "EOF" in str(error)
    return isinstance(error, (*_UNREACHABLE, OSError))


def is_about_identity(error: Exception) -> bool:
    """May the credentials be to blame? A place may say so of credentials that it does not know (any more) as well as of
    those that may not do this; an answer without a body has only its number."""
    if isinstance(error, ClientError):
        return code_of(error) in _WRONG_CREDENTIALS | _NOT_ALLOWED | {"401", "403", "Unauthorized"}
    return isinstance(error, _NO_IDENTITY)


def is_missing(error: ClientError) -> bool:
    """No such key; and, as far as an answer without a body tells, perhaps no such bucket."""
    return code_of(error) in {"NoSuchKey", "404", "NotFound", "NoSuchVersion"}


def is_unreachable(error: BaseException) -> bool:
    """Did our ``error`` come from a place that does not answer at all?"""
    return isinstance(error, UnreachableError)


@dataclass(frozen=True, slots=True)
class Explainer:
    """``name``: what we call the destination."""

    name: str
    config: S3Config

    @property
    def place(self) -> str:
        """The destination as messages name it."""
        bucket = f"s3://{self.config.bucket}" + (f"/{self.config.prefix}" if self.config.prefix else "")
        return f"destination {self.name} ({bucket})"

    def missing(self, key: str) -> ObjectMissingError:
        """The error for a key that is not there."""
        return ObjectMissingError(f"{self.place} has no {key}")

    def locked(self, key: str, detail: str, hint: str) -> LockedError:
        """The error for a key that may not be deleted yet."""
        return LockedError(f"{self.place}: {key} may not be deleted yet", detail=detail, hint=hint)

    def explain(self, error: Exception, doing: str, key: str | None) -> BackupdError:
        """``error`` of the client library, met while ``doing`` something (``writing objects/...``) with ``key``."""
        if isinstance(error, ClientError):
            return self._answered(error, doing, key)
        if isinstance(error, _NO_IDENTITY):
            return self._failed(doing, _told(error), self._identity_hint())
        if isinstance(error, SSLError):
            return self._failed(
                doing,
                _told(error),
                "the server's certificate is not trusted here: give the certificate of its authority "
                "as ca_file, or look whether endpoint_url names the right server",
            )
        if isinstance(error, (*_UNREACHABLE, OSError)):
            endpoint = self.config.endpoint_url or "Amazon S3"
            failed = self._failed(
                doing,
                _told(error),
                f"{endpoint} does not answer as it should: look at the network, "
                f"the server and endpoint_url; what was not finished is done "
                f"again later",
            )
            if isinstance(error, _SILENT):
                return UnreachableError(failed.message, detail=failed.detail, hint=failed.hint)
            return failed
        if isinstance(error, BotoCoreError):
            return self._failed(doing, _told(error), f"look at the settings of destination {self.name}")
        raise error

    def _answered(self, error: ClientError, doing: str, key: str | None) -> BackupdError:
        code = code_of(error)
        detail = f"{code} ({status_of(error)}): {error.response.get('Error', {}).get('Message', '')}".strip(" :")
        if code == "NoSuchBucket":
            return self._failed(
                doing,
                f"the bucket {self.config.bucket} does not exist ({detail})",
                f"make the bucket, or correct bucket, region or endpoint_url of destination "
                f"{self.name}; a bucket that was used before is never made anew by itself",
            )
        if key is not None and is_missing(error):
            return self.missing(key)
        if code in _LOCKED:
            return self.locked(key or self.config.bucket, detail, "an object lock keeps it; it is tried again later")
        return self._stood(error, doing, key, detail)

    def _stood(self, error: ClientError, doing: str, key: str | None, detail: str) -> BackupdError:
        code, status = code_of(error), status_of(error)
        if code == "InvalidObjectState":
            return ArchivedError(
                f"{self.place}: {key} lies in an archive class",
                detail=detail,
                hint="it can be read some time after a thaw was asked for: backupd thaw; if a rule "
                "of the bucket has put it there, name the class as storage_class or "
                f"binlog_storage_class of destination {self.name}, so that it is expected",
            )
        if code in _NO_ROOM or status == 507:
            return DestinationFullError(
                f"{self.place} is full: {doing} failed",
                detail=detail,
                destination=self.name,
                hint="free some space, raise the quota or let retention run; nothing of this file was kept",
            )
        return self._failed(doing, detail, self._hint(error, code, status, detail))

    def _hint(self, error: ClientError, code: str, status: int, detail: str) -> str:
        if code in _WRONG_CREDENTIALS:
            return self._identity_hint()
        if code in _WRONG_REGION or status == 301:
            return self._region_hint(error)
        name = self.name
        for test, hint in (
            (code == "RequestTimeTooSkewed", _SKEWED),
            (code in _NOT_ALLOWED or status == 403, f"these credentials need the rights {self.rights()}"),
            (_NO_LOCKS.search(detail), _NEEDS_LOCKS.format(name=name)),
            (code in _ANSWERS_LATER or status >= 500, "the server is busy or in trouble; it is tried again later"),
            (code in _DAMAGED_ON_THE_WAY, _CHANGED),
        ):
            if test:
                return hint
        return f"look at the settings of destination {name} and the server's log"

    def rights(self) -> str:
        """What the credentials have to be allowed to do in the bucket."""
        config = self.config
        wanted = [
            "s3:ListBucket",
            "s3:ListBucketMultipartUploads",
            "s3:GetObject",
            "s3:PutObject",
            "s3:AbortMultipartUpload",
        ]
        if config.delete:
            wanted.append("s3:DeleteObject")
        if {config.storage_class, config.binlog_storage_class} & {"GLACIER", "DEEP_ARCHIVE", "INTELLIGENT_TIERING"}:
            wanted.append("s3:RestoreObject")
        if config.object_lock is not None:
            wanted += ["s3:PutObjectRetention", "s3:GetObjectRetention"]
        if config.server_side_encryption == "aws:kms":
            wanted += ["kms:GenerateDataKey", "kms:Decrypt"]
        return f"{', '.join(wanted)} on {config.bucket}"

    def _failed(self, doing: str, detail: str, hint: str) -> DestinationError:
        return DestinationError(f"{self.place}: {doing} failed", detail=detail, hint=hint)

    def _identity_hint(self) -> str:
        config = self.config
        if config.credentials_file is not None:
            profile = f" [{config.profile}]" if config.profile else ""
            return f"look at the credentials{profile} in {config.credentials_file}"
        return (
            f"give destination {self.name} a credentials_file, or put them into one of the usual sources (environment, "
            f"~/.aws of the user that runs backupd, the role of the machine)"
        )

    def _region_hint(self, error: ClientError) -> str:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        told = _REGION_TOLD.search(str(error))
        region = (
            error.response.get("Error", {}).get("Region")
            or headers.get("x-amz-bucket-region")
            or (told[1] if told else "")
        )
        right = f": region: {region}" if region and _NAME.fullmatch(str(region)) else ""
        return f"the bucket {self.config.bucket} is in another region: correct region of destination {self.name}{right}"


def _told(error: Exception) -> str:
    """One line of the library's words; they name the endpoint, never credentials."""
    return " ".join(str(error).split())[:500] or type(error).__name__
