"""Channels other than mail, and how a message fared by any of them.

Chats and webhooks are reached by the library Apprise, from a file with one of its URLs a line. The URLs are secrets: a
channel is called by its kind and a digest of its URL, and no error names it otherwise.

A sign of life for an external watcher, which notifies somebody when it stops.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from backupd.model.errors import BackupdError

if TYPE_CHECKING:
    import apprise


FIRST_PAUSE = timedelta(minutes=1)
LONGEST_PAUSE = timedelta(hours=1)
GIVEN_UP = timedelta(days=3)
TRIES = 75
"""A message that is as old as this, was tried so often (with the pauses between them that takes as long), and still
cannot be delivered, never will be. Age alone says nothing: the clock may be wrong for a minute."""


class DeliveryError(BackupdError):
    """A message reached nobody. ``permanent``: it would not the next time either."""

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, detail: str = "", hint: str = "", permanent: bool = False) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.permanent = permanent


@dataclass(frozen=True, slots=True)
class Delivered:
    """It was taken, for some at least. ``again``: recipients to try once more; ``refused``: those that it will never be
    taken for, and what was said about each; ``problem``: what was said about both."""

    again: tuple[str, ...] = ()
    problem: str = ""
    refused: tuple[tuple[str, str], ...] = ()


def pause_after(attempts: int) -> timedelta:
    """How long to wait after so many tries in vain."""
    return min(FIRST_PAUSE * (1 << min(attempts - 1, 10)), LONGEST_PAUSE)


def is_over(attempts: int, age: timedelta) -> bool:
    """Is a message given up after so many tries? A negative ``age`` is one of a clock that was ahead."""
    return attempts >= TRIES and not timedelta(0) <= age < GIVEN_UP


@dataclass
class Deadline:
    """Cuts a connection when all takes too long: whoever sends a byte now and then never runs into the time for one
    answer. ``with Deadline(seconds) as deadline`` begins it."""

    seconds: float
    _found: list[Callable[[], socket.socket | None]] = field(default_factory=list, init=False)
    _over: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _timer: threading.Timer | None = field(default=None, init=False)

    def __enter__(self) -> Deadline:
        self._timer = threading.Timer(self.seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()
        return self

    def watch(self, find: Callable[[], socket.socket | None]) -> None:
        """``find`` gives the connection's socket as soon as there is one."""
        with self._lock:
            self._found.append(find)
            if self._over:
                _shut(find())

    def _cut(self) -> None:
        with self._lock:
            self._over = True
            for find in self._found:
                _shut(find())

    def __exit__(self, *_reason: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _shut(sock: socket.socket | None) -> None:
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


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
                f"{file} is refused: it holds secrets, and users other than its owner can read it",
                hint=f"chmod 600 {file}",
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
            raise DeliveryError(f"entry {number} of {file} is not a URL", hint="see https://appriseit.com for its URLs")
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
            hint="correct it in alerts.channels_file; see https://appriseit.com",
        )
    return found


def notify(name: str, url: str, title: str, body: str) -> Delivered:
    """Send it over the channel. Raises DeliveryError."""
    if not courier(name, url).notify(title=title, body=body, body_format="text"):
        raise DeliveryError(
            f"delivery to channel {name} failed",
            hint="check the token and the room of its URL, then run `backupd alerts test`",
        )
    return Delivered()


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
                f"the heartbeat URL returned HTTP status {error.code}",
                hint="check that the URL in alerts.heartbeat.url_file is still valid",
            ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DeliveryError(
            "the heartbeat URL does not answer",
            detail=str(reason) if isinstance(reason, OSError) else type(error).__name__,
            hint="check that this host can reach it; alerts by mail are not affected",
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
