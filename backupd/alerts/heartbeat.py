"""A sign of life for a watcher elsewhere, which tells somebody when it stops."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from backupd.alerts.channels import Deadline, DeliveryError

TIMEOUT = 10.0
"""Seconds that the watcher may take for a part of its answer."""
LONGEST = 20.0
"""Seconds that it may take for all of it."""


def read_url(file: Path) -> str:
    """The first line of ``file``. Raises DeliveryError; what it says does not name the URL, which is a secret."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DeliveryError(
            f"the heartbeat's URL in {file} cannot be read: {reason}",
            hint="alerts.heartbeat.url_file names it; the service must be able to read it",
        ) from None
    url = lines[0].strip() if lines else ""
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 80) > 0
    except ValueError:
        good = False
    if not good or any(char.isspace() for char in url):
        raise DeliveryError(f"the first line of {file} is no http or https URL")
    return url


def ping(url: str, timeout: float = TIMEOUT, longest: float = LONGEST) -> None:
    """Ask for ``url``; what it answers, after saying that it is well, is not waited for. Raises DeliveryError that does
    not name it."""
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "backupd"})  # noqa: S310  http or https: read_url
        with Deadline(longest) as deadline, _opener(deadline).open(request, timeout=timeout):
            pass
    except urllib.error.HTTPError as error:
        with error:
            raise DeliveryError(
                f"the heartbeat's watcher answers with {error.code}",
                hint="is the URL in alerts.heartbeat.url_file still valid there?",
            ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DeliveryError(
            "the heartbeat's watcher does not answer",
            detail=str(reason) if isinstance(reason, OSError) else type(error).__name__,
            hint="can this host reach it? Mail is not concerned",
        ) from None


def _opener(deadline: Deadline) -> urllib.request.OpenerDirector:
    """The usual one, whose connections ``deadline`` cuts."""

    class Plain(http.client.HTTPConnection):
        def connect(self) -> None:
            deadline.watch(lambda: self.sock)
            super().connect()

    class Secure(http.client.HTTPSConnection, Plain):
        pass

    class PlainHandler(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Plain, req)

    class SecureHandler(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Secure, req)

    return urllib.request.build_opener(PlainHandler, SecureHandler)
