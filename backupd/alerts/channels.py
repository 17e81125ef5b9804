"""Other ways than mail: chats and webhooks, by the library Apprise, from a file with one of its URLs a line.

The URLs are secrets: a channel is called by its kind and a digest of its URL, and no error names it otherwise.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from backupd.alerts.delivery import Delivered, DeliveryError

if TYPE_CHECKING:
    import apprise

_LONGEST_FILE = 256 * 1024


def channel_name(url: str) -> str:
    """``slack-1f0c9a2b``"""
    kind = urlsplit(url).scheme.lower()
    return f"{kind}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def read_channels(file: Path) -> Mapping[str, str]:
    """The URLs in ``file`` by the names of their channels. Raises DeliveryError; what it says names no URL."""
    try:
        if file.stat().st_mode & 0o077:
            raise DeliveryError(
                f"{file} is not read: others than its owner can read it, and it holds secrets", hint=f"chmod 600 {file}"
            )
        lines = file.read_text(encoding="utf-8")[:_LONGEST_FILE].splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DeliveryError(
            f"the channels in {file} cannot be read: {reason}",
            hint="alerts.channels_file names it; the service must be able to read it",
        ) from None
    urls = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    for number, url in enumerate(urls, start=1):
        if not _is_url(url):
            raise DeliveryError(f"entry {number} of {file} is no URL", hint="see https://appriseit.com for its URLs")
    return {channel_name(url): url for url in urls}


def _is_url(text: str) -> bool:
    try:
        return bool(urlsplit(text).scheme)
    except ValueError:
        return False


def courier(name: str, url: str) -> apprise.Apprise:
    """What sends over the channel. Raises DeliveryError without the library, and for a URL that it does not know."""
    try:
        import apprise  # takes its time to load, and hardly anybody needs it
    except ModuleNotFoundError:
        raise DeliveryError(
            "other channels than mail need the library Apprise", hint="pip install 'backupd[channels]'"
        ) from None
    # What it logs holds parts of URLs.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    found = apprise.Apprise()
    if not found.add(url):
        raise DeliveryError(
            f"Apprise does not know the URL of channel {name}",
            permanent=True,
            hint="look at it in alerts.channels_file; see https://appriseit.com",
        )
    return found


def notify(name: str, url: str, title: str, body: str) -> Delivered:
    """Send it over the channel. Raises DeliveryError."""
    if not courier(name, url).notify(title=title, body=body, body_format="text"):
        raise DeliveryError(
            f"channel {name} did not take it",
            hint="is what it needs (token, room) still valid there? `backupd alerts test` tries it",
        )
    return Delivered()
