"""A sign of life for a watcher elsewhere, which tells somebody when it stops."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from backupd.alerts.delivery import DeliveryError

TIMEOUT = 10.0
"""Seconds that the watcher may take to answer."""


def read_url(file: Path) -> str:
    """The first line of ``file``. Raises DeliveryError; what it says does not name the URL, which is a secret."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DeliveryError(f"the heartbeat's URL in {file} cannot be read: {reason}",
                            hint="alerts.heartbeat.url_file names it; the service must be able to read it") from None
    url = lines[0].strip() if lines else ""
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 80) > 0
    except ValueError:
        good = False
    if not good or any(char.isspace() for char in url):
        raise DeliveryError(f"the first line of {file} is no http or https URL")
    return url


def ping(url: str, timeout: float = TIMEOUT) -> None:
    """Ask for ``url``. Raises DeliveryError that does not name it."""
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "backupd"})  # noqa: S310  http or https: read_url
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310  as above
            answer.read(4096)
    except urllib.error.HTTPError as error:
        with error:
            raise DeliveryError(f"the heartbeat's watcher answers with {error.code}",
                                hint="is the URL in alerts.heartbeat.url_file still valid there?") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DeliveryError("the heartbeat's watcher does not answer",
                            detail=str(reason) if isinstance(reason, OSError) else type(error).__name__,
                            hint="can this host reach it? Mail is not concerned") from None
