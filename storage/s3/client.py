"""The connection to a bucket: one client for all threads, repeated requests, one deadline for each; and what goes wrong
there, in words: from the errors of the client library to ours, and which of them pass.

Requests are repeated here and not by the library, because nothing may take longer than a minute: the library counts
attempts, this counts seconds.
"""

from __future__ import annotations

import functools
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config
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
from botocore.handlers import add_expect_header
from botocore.loaders import Loader
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
from storage.config import S3Config

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


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
    "bytes were changed in transit: check the network and proxies on the way to the server; backupd retries later"
)
_NEEDS_LOCKS = (
    "object_lock needs a bucket that was made with object lock: create one, or remove object_lock and lock_days from "
    "destination {name}"
)
_NO_LOCKS = re.compile(r"object lock|objectlock", re.IGNORECASE)
_EXPECTED_REGION = re.compile(r"expecting '([a-z0-9-]+)'")
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
    """The destination's word for it; an answer without a body has only its number."""
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
    """May the credentials be to blame? A destination may say so of credentials that it does not know (any more) as well
    as of those that may not do this; an answer without a body has only its number."""
    if isinstance(error, ClientError):
        return code_of(error) in _WRONG_CREDENTIALS | _NOT_ALLOWED | {"401", "403", "Unauthorized"}
    return isinstance(error, _NO_IDENTITY)


def is_missing(error: ClientError) -> bool:
    """No such key; and, as far as an answer without a body shows, perhaps no such bucket."""
    return code_of(error) in {"NoSuchKey", "404", "NotFound", "NoSuchVersion"}


@dataclass(frozen=True, slots=True)
class Explainer:
    """``name``: what we call the destination."""

    name: str
    config: S3Config

    @property
    def label(self) -> str:
        """The destination as messages name it."""
        bucket = f"s3://{self.config.bucket}" + (f"/{self.config.prefix}" if self.config.prefix else "")
        return f"destination {self.name} ({bucket})"

    def missing(self, key: str) -> ObjectMissingError:
        """The error for a key that is not there."""
        return ObjectMissingError(f"{self.label} has no {key}")

    def locked(self, key: str, detail: str, hint: str) -> LockedError:
        """The error for a key that may not be deleted yet."""
        return LockedError(f"{self.label}: {key} may not be deleted yet", detail=detail, hint=hint)

    def explain(self, error: Exception, doing: str, key: str | None) -> BackupdError:
        """``error`` of the client library, met while ``doing`` something (``writing objects/...``) with ``key``."""
        if isinstance(error, ClientError):
            return self._answered(error, doing, key)
        if isinstance(error, _NO_IDENTITY):
            return self.failed(doing, _error_text(error), self._identity_hint())
        if isinstance(error, SSLError):
            return self.failed(
                doing,
                _error_text(error),
                "the server's certificate is not trusted here: give the certificate of its authority "
                "as ca_file, or check that endpoint_url names the right server",
            )
        if isinstance(error, (*_UNREACHABLE, OSError)):
            endpoint = self.config.endpoint_url or "Amazon S3"
            failed = self.failed(
                doing,
                _error_text(error),
                f"unexpected response from {endpoint}: check endpoint_url, the network and the server; backupd retries "
                "later",
            )
            if isinstance(error, _SILENT):
                return UnreachableError(failed.message, detail=failed.detail, hint=failed.hint)
            return failed
        if isinstance(error, BotoCoreError):
            return self.failed(doing, _error_text(error), f"check the settings of destination {self.name}")
        raise error

    def _answered(self, error: ClientError, doing: str, key: str | None) -> BackupdError:
        code, status = code_of(error), status_of(error)
        detail = f"{code} ({status}): {error.response.get('Error', {}).get('Message', '')}".strip(" :")
        if code == "NoSuchBucket":
            return self.failed(
                doing,
                f"the bucket {self.config.bucket} does not exist ({detail})",
                f"create the bucket, or correct bucket, region or endpoint_url of destination "
                f"{self.name}; backupd never creates a bucket that was in use again",
            )
        if key is not None and is_missing(error):
            return self.missing(key)
        if code in _LOCKED:
            return self.locked(key or self.config.bucket, detail, "an object lock keeps it; backupd retries later")
        if code == "InvalidObjectState":
            return ArchivedError(
                f"{self.label}: {key} is in an archive class",
                detail=detail,
                hint="thaw it: backupd thaw; if a rule of the bucket moved it there, set that class as storage_class "
                f"or binlog_storage_class of destination {self.name}",
            )
        if code in _NO_ROOM or status == 507:
            return DestinationFullError(
                f"{self.label} is full: {doing} failed",
                detail=detail,
                destination=self.name,
                hint="free space, raise the quota or run retention; nothing of this file was stored",
            )
        return self.failed(doing, detail, self._hint(error, code, status, detail))

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
            (code in _ANSWERS_LATER or status >= 500, "the server is busy or in trouble; backupd retries later"),
            (code in _DAMAGED_ON_THE_WAY, _CHANGED),
        ):
            if test:
                return hint
        return f"check the settings of destination {name} and the server's log"

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

    def failed(self, doing: str, detail: str, hint: str) -> DestinationError:
        return DestinationError(f"{self.label}: {doing} failed", detail=detail, hint=hint)

    def _identity_hint(self) -> str:
        config = self.config
        if config.credentials_file is not None:
            profile = f" [{config.profile}]" if config.profile else ""
            return f"check the credentials{profile} in {config.credentials_file}"
        return (
            f"give destination {self.name} a credentials_file, or use a default source (environment, "
            f"~/.aws of the user that runs backupd, the role of the machine)"
        )

    def _region_hint(self, error: ClientError) -> str:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        answered = _EXPECTED_REGION.search(str(error))
        region = (
            error.response.get("Error", {}).get("Region")
            or headers.get("x-amz-bucket-region")
            or (answered[1] if answered else "")
        )
        right = f": region: {region}" if region and _NAME.fullmatch(str(region)) else ""
        return f"the bucket {self.config.bucket} is in another region: correct region of destination {self.name}{right}"


def _error_text(error: Exception) -> str:
    """One line of the library's words; they name the endpoint, never credentials."""
    return " ".join(str(error).split())[:500] or type(error).__name__


CONNECT_SECONDS = 5.0
READ_SECONDS = 20.0
BEGIN_SECONDS = 22.0
"""No attempt begins later than this after the first: with the two above, an answer or an error within a minute, even
where the first attempt hung."""
PATIENT_SECONDS = 600.0
"""For the one request that a server may answer late: to put the parts of a large object together."""
ATTEMPTS = 6
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0
CONNECTIONS = 32
_USUAL_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
RENEW_SECONDS = 60.0
"""Credentials that are refused are read again at once where their files have changed, and else no more often."""
_ANY_REGION = "us-east-1"
"""What servers that are not Amazon's, and know no regions, take for one."""

Result = TypeVar("Result")


class Bucket:
    """``config``'s bucket. Nothing is asked, and the library's client is not made, before the first ``call``."""

    def __init__(
        self, name: str, config: S3Config, *, read_seconds: float = READ_SECONDS, begin_seconds: float = BEGIN_SECONDS
    ) -> None:
        self.config = config
        self.knows_conditions = True
        self.words = Explainer(name, config)
        self._read_seconds = read_seconds
        self._begin_seconds = begin_seconds
        self._lock = threading.Lock()
        self._clients: dict[bool, S3Client] = {}
        self._read_at = 0.0
        self._read_from: tuple[_Stamp, ...] = ()

    @property
    def name(self) -> str:
        """What the configuration calls the destination."""
        return self.words.name

    @property
    def prefix(self) -> str:
        """What every key in the bucket begins with."""
        return f"{self.config.prefix}/" if self.config.prefix else ""

    def full(self, key: str) -> str:
        """``key`` as the bucket knows it."""
        return self.prefix + key

    def where(self, key: str) -> dict[str, Any]:
        """The parameters of a request about ``key``."""
        return {"Bucket": self.config.bucket, "Key": self.full(key)}

    def call(
        self,
        doing: str,
        ask: Callable[[S3Client], Result],
        *,
        key: str | None = None,
        expect: Callable[[ClientError], bool] | None = None,
        begun: float | None = None,
        patient: bool = False,
    ) -> Result:
        """What ``ask`` gives, asked again while that may help. ``ask`` must be safe to repeat.

        Raises our error for what ``doing`` (with ``key``) failed; a ClientError as it is where ``expect`` says so.
        ``begun`` (monotonic): since when this has been tried already. ``patient``: a server may take minutes to answer.
        """
        begun = time.monotonic() if begun is None else begun
        renewed = False
        for attempt in range(1, ATTEMPTS + 1):
            client: S3Client | None = None
            try:
                client = self._made(patient=patient)
                return ask(client)
            except (BotoCoreError, ClientError, HTTPError, OSError) as error:
                if not renewed and attempt < ATTEMPTS and is_about_identity(error) and self._renew(client):
                    renewed = True
                    continue
                if isinstance(error, ClientError) and expect is not None and expect(error):
                    raise
                pause = pause_after(attempt)
                late = time.monotonic() + pause - begun > self._begin_seconds
                if late or attempt == ATTEMPTS or not may_pass(error):
                    raise self.words.explain(error, doing, key) from error
                time.sleep(pause)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Give the connections back. The next call makes new ones."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    def _made(self, *, patient: bool) -> S3Client:
        with self._lock:
            if not self._clients:
                self._read_at, self._read_from = time.monotonic(), _stamps(self.config)
            if patient not in self._clients:
                self._clients[patient] = _client(self.config, PATIENT_SECONDS if patient else self._read_seconds)
            return self._clients[patient]

    def _renew(self, refused: S3Client | None) -> bool:
        """The credentials of ``refused`` are not taken: may there be others by now? Then the next client reads them."""
        gone: dict[bool, S3Client] = {}
        with self._lock:
            if refused in self._clients.values():
                if self._read_from == _stamps(self.config) and time.monotonic() < self._read_at + RENEW_SECONDS:
                    return False
                gone, self._clients = self._clients, {}
        for client in gone.values():
            client.close()
        return refused is not None


_Stamp = tuple[int, int, int] | None


def _stamps(config: S3Config) -> tuple[_Stamp, ...]:
    """What changes when the files that credentials are read from are written again or replaced."""
    if config.credentials_file is not None:
        return (_stamp(config.credentials_file),)
    usual = (os.environ.get(name) or path for name, path in _USUAL_FILES.items())
    return tuple(_stamp(Path(path).expanduser()) for path in usual)


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def pause_after(attempt: int) -> float:
    """Seconds until attempt ``attempt`` + 1: twice as long each time, and never the same for two who were refused
    together."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)  # noqa: S311  no secret


def _client(config: S3Config, read_seconds: float) -> S3Client:
    inner = botocore.session.Session(profile=_profile(config))
    inner.register_component("data_loader", _loader())
    if config.credentials_file is not None:
        try:
            config.credentials_file.open("rb").close()  # the library goes on without a file that it cannot read
        except OSError as error:
            raise CredentialRetrievalError(provider="the credentials file", error_msg=error.strerror) from error
        inner.set_config_variable("credentials_file", str(config.credentials_file))
    if config.ca_file is not None and not config.ca_file.is_file():
        raise SSLError(
            endpoint_url=config.endpoint_url or "Amazon S3", error=FileNotFoundError(f"{config.ca_file} is not there")
        )
    if (profile := _profile(config)) is not None and profile not in inner.available_profiles:
        raise ProfileNotFound(profile=profile)
    session = boto3.session.Session(botocore_session=inner, region_name=config.region)
    own = config.endpoint_url is not None
    signed = own and str(config.endpoint_url).startswith("http:")  # elsewhere TLS and the checksum header vouch for it
    client = session.client(
        "s3",
        endpoint_url=config.endpoint_url,
        verify=str(config.ca_file) if config.ca_file else None,
        region_name=session.region_name or (_ANY_REGION if own else None),
        config=Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=read_seconds,
            max_pool_connections=CONNECTIONS,
            retries={"mode": "standard", "total_max_attempts": 1},
            tcp_keepalive=True,
            s3={"addressing_style": config.addressing, "payload_signing_enabled": signed},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    # It would wait for a go-ahead before each body that is a file.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    return client


@functools.cache
def _loader() -> Loader:
    """Reads what the library knows about S3, once for all destinations: a tenth of a second each time."""
    return botocore.loaders.create_loader()


def _profile(config: S3Config) -> str | None:
    """A profile that is named keeps the environment's credentials out; so does a file."""
    return config.profile or (None if config.credentials_file is None else "default")
