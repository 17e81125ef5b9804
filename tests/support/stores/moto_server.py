"""moto's server: an imitation of Amazon's S3 that plays the states of archive classes. In a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tests.support.service.serving import ServiceDiedError, end_service, free_port, start_service
from tests.support.stores.s3_server import ACCESS_KEY, REGION, SECRET_KEY, make_bucket, plain_client, write_credentials

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class MotoServer:
    """Use as a context manager. Everything in it is gone when it stops."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="bt-moto-", dir=os.environ.get("BACKUPD_TEST_TMP", "/tmp")))
        self.credentials_file = self.base / "credentials"
        self.log = self.base / "log"
        self.port = free_port()
        write_credentials(self.credentials_file, ACCESS_KEY, SECRET_KEY)
        self._made: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        if self._process is not None:
            return self
        for attempt in range(5):
            argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            try:
                self._process = start_service(argv, self.log, self.port)
            except ServiceDiedError as error:
                if attempt == 4 or "in use" not in str(error):
                    raise
                self.port = free_port()
            else:
                return self
        raise AssertionError("unreachable")

    def stop(self) -> None:
        process, self._process = self._process, None
        self._made.clear()
        if process is not None:
            end_service(process, signal.SIGKILL)  # nothing in it is worth a clean end

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.base, ignore_errors=True)

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

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> S3Client:
        """A client of boto3's own, to look behind the driver; the caller closes it."""
        return plain_client(self.endpoint, ACCESS_KEY, SECRET_KEY)

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

    def reset(self) -> None:
        """Forget every bucket and every transition."""
        self._made.clear()
        self._post("/moto-api/reset", {})

    def set_restoring(self, looks: int) -> None:
        """A thaw stays under way for ``looks`` looks at its object; 0: it is over at once."""
        transition: Mapping[str, Any] = (
            {"progression": "manual", "times": looks} if looks else {"progression": "immediate"}
        )
        self._post("/moto-api/state-manager/set-transition", {"model_name": "s3::keyrestore", "transition": transition})

    def _post(self, path: str, document: Mapping[str, Any]) -> None:
        request = urllib.request.Request(
            self.endpoint + path, json.dumps(document).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
