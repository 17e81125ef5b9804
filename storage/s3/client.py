"""The connection to a bucket: one client for all threads, repeated requests, one deadline for each.

Requests are repeated here and not by the library, because nothing may take longer than a minute: the library counts
attempts, this counts seconds.
"""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, ProfileNotFound, SSLError
from botocore.handlers import add_expect_header
from botocore.loaders import Loader
from urllib3.exceptions import HTTPError

from backupd.model.errors import BackupdError
from storage.contract.config import S3Config
from storage.s3.errors import Explainer, is_about_identity, may_pass

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

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

    def explain(self, error: Exception, doing: str, key: str | None = None) -> BackupdError:
        """``error`` of the client library as one of ours: see ``Explainer.explain``."""
        return self.words.explain(error, doing, key)

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
    return tuple(
        _stamp(path)
        for path in (
            [config.credentials_file]
            if config.credentials_file is not None
            else [Path(os.environ.get(name) or usual).expanduser() for name, usual in _USUAL_FILES.items()]
        )
    )


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
