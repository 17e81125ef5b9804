"""Telling systemd how the service does, over the socket that it names in $NOTIFY_SOCKET; see sd_notify(3)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Messages to whoever started the service. Says nothing where nobody listens."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # "@" stands for the NUL byte of an abstract socket; anything else but a path is of no kind that we speak.
        self._address = "\0" + address[1:] if address.startswith("@") else address if address.startswith("/") else ""
        self._watchdog = _watchdog_seconds(environ)

    @property
    def watchdog_seconds(self) -> float | None:
        """How often ``alive`` is expected; None when nobody watches."""
        return self._watchdog

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def reloading(self) -> None:
        """A reload begins; ``ready`` ends it, whether or not it came to something."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(1.0)
                sender.sendto(message.encode(), self._address)
        except OSError:
            # Nobody to tell it to: systemd's own time limits are what notices. The work does not depend on it.
            return


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    try:
        microseconds = int(environ.get("WATCHDOG_USEC", ""))
        process = int(environ.get("WATCHDOG_PID", "") or os.getpid())
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 and process == os.getpid() else None
