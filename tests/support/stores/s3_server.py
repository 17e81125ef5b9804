"""A real S3 server (versitygw over a folder), of the private root that scripts/s3-server makes.

``bucket`` gives what S3Config wants. The server knows one root account, whose credentials lie in
``credentials_file`` under the profiles ``default`` and ``backupd``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from tests.support.service.serving import ServiceDiedError, end_service, free_port, start_service

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_ROOT = Path(os.environ.get("BACKUPD_TEST_S3_ROOT") or Path(__file__).parents[3] / ".cache/s3")
ACCESS_KEY = "backupd-tests"
SECRET_KEY = "S3-s3cret-7d21"
REGION: Final = "eu-central-1"


def server_program() -> Path:
    """The server, whether it is there or not."""
    return _ROOT / "bin" / "versitygw"


def why_not() -> str:
    """Why there is no S3 server for tests; empty when there is one."""
    if os.access(server_program(), os.X_OK):
        return ""
    told = _ROOT / "unavailable"
    why = told.read_text().strip() if told.is_file() else "scripts/setup --test was not run"
    return f"no private S3 server in {_ROOT}: {why}"


class S3Server:
    """Use as a context manager, or ``start`` and ``remove``. ``folder``: one folder per bucket, one file per object.

    ``encrypted``: it speaks TLS, with ``certificate``, which vouches for itself.
    """

    def __init__(self, *, encrypted: bool = False) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="bt-s3-", dir=os.environ.get("BACKUPD_TEST_TMP", "/tmp")))
        self.folder = self.base / "buckets"
        self.credentials_file = self.base / "credentials"
        self.log = self.base / "log"
        self.port = free_port()
        for name in ("buckets", "versions", "accounts"):
            (self.base / name).mkdir()
        write_credentials(self.credentials_file, ACCESS_KEY, SECRET_KEY)
        self.certificate = _certificate(self.base) if encrypted else None
        self._made: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None

    # --- life

    def start(self) -> Self:
        """Also after ``stop`` or ``kill``, with everything that was stored, at the same endpoint."""
        if self._process is not None:
            return self
        environment = {**os.environ, "ROOT_ACCESS_KEY_ID": ACCESS_KEY, "ROOT_SECRET_ACCESS_KEY": SECRET_KEY}
        for attempt in range(5):
            address = f"127.0.0.1:{self.port}"
            argv = [
                str(server_program()),
                "--port",
                address,
                "--region",
                REGION,
                "--keep-alive",
                "--quiet",
                "--iam-dir",
                str(self.base / "accounts"),
                *(
                    ["--cert", str(self.certificate), "--key", str(self.certificate.with_suffix(".key"))]
                    if self.certificate
                    else []
                ),
                "posix",
                "--versioning-dir",
                str(self.base / "versions"),
                *self._where_to_note(),
                str(self.folder),
            ]
            try:
                self._process = start_service(argv, self.log, self.port, environment=environment)
            except ServiceDiedError as error:
                if attempt == 4 or "address already in use" not in str(error):
                    raise
                self.port = free_port()
            else:
                return self
        raise AssertionError("unreachable")

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, as when the machine loses its power."""
        self._end(signal.SIGKILL)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.base, ignore_errors=True)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # --- what it holds

    @property
    def endpoint(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    def client(self, access: str = ACCESS_KEY, secret: str = SECRET_KEY) -> S3Client:
        """A client of boto3's own, to look behind the driver; the caller closes it."""
        return plain_client(self.endpoint, access, secret, self.certificate)

    def bucket(self, name: str, versioning: bool = False, lock: bool = False) -> dict[str, Any]:
        """Make a bucket (one that is there stays as it is); the fields of an S3Config for it."""
        if name not in self._made:
            with contextlib.closing(self.client()) as client:
                make_bucket(client, name, versioning=versioning, lock=lock)
            self._made.add(name)
        return {
            "type": "s3",
            "bucket": name,
            "endpoint_url": self.endpoint,
            "region": REGION,
            "addressing": "path",
            "credentials_file": self.credentials_file,
        }

    # --- how

    def _where_to_note(self) -> list[str]:
        """What it knows about objects lies in extended attributes, or beside them where the file system has none."""
        try:
            os.setxattr(self.base, "user.probe", b"1")
        except OSError:
            (self.base / "notes").mkdir(exist_ok=True)
            return ["--sidecar", str(self.base / "notes")]
        return []

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_service(process, how)


def write_credentials(path: Path, access: str, secret: str) -> None:
    """A credentials file with the profiles ``default`` and ``backupd``, 0600."""
    path.touch(0o600)
    path.write_text(
        "".join(
            f"[{profile}]\naws_access_key_id={access}\naws_secret_access_key={secret}\n"
            for profile in ("default", "backupd")
        )
    )


def make_bucket(client: S3Client, name: str, *, versioning: bool, lock: bool) -> None:
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(
            Bucket=name, ObjectLockEnabledForBucket=lock, CreateBucketConfiguration={"LocationConstraint": REGION}
        )
    if versioning:
        client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})


def _certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that vouches for itself; its key lies beside it as ``tls.key``."""
    made = folder / "tls.crt"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-subj",
            "/CN=backupd tests",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-days",
            "2",
            "-keyout",
            str(folder / "tls.key"),
            "-out",
            str(made),
        ],
        check=True,
        capture_output=True,
    )
    return made


def plain_client(endpoint: str, access: str, secret: str, certificate: Path | None = None) -> S3Client:
    import boto3  # costs half a second, which tests without S3 need not spend
    from botocore.config import Config

    session = boto3.Session(aws_access_key_id=access, aws_secret_access_key=secret, region_name=REGION)
    return session.client(
        "s3",
        endpoint_url=endpoint,
        verify=str(certificate) if certificate else None,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )
