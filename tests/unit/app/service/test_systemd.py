"""What systemd hears, over sockets as it makes them."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backupd.app.runtime.service_manager import SystemdNotifier


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(address)
        ear.settimeout(5)
        yield ear


def heard(ear: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in ear.recv(4096).decode().split("\n"))


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_hears_each_state(short_tmp: Path, abstract: bool) -> None:
    name = f"backupd-{secrets.token_hex(6)}"
    bound, named = ("\0" + name, "@" + name) if abstract else (str(short_tmp / "n"), str(short_tmp / "n"))
    with listening(bound) as ear:
        notifier = SystemdNotifier({"NOTIFY_SOCKET": named})
        notifier.ready("3 servers")
        assert heard(ear) == {"READY": "1", "STATUS": "3 servers"}
        before = time.monotonic_ns() // 1000
        notifier.reloading()
        message = heard(ear)
        assert message["RELOADING"] == "1"
        assert before <= int(message["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        notifier.status("two\nlines")
        assert heard(ear) == {"STATUS": "two lines"}
        notifier.stopping("bye")
        assert heard(ear) == {"STOPPING": "1", "STATUS": "bye"}
        notifier.alive()
        assert heard(ear) == {"WATCHDOG": "1"}


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "/nonexistent/socket"}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_without_anybody_listening_nothing_happens(environ: dict[str, str]) -> None:
    SystemdNotifier(environ).ready("on my own")


def test_the_watchdog_is_ours_only_if_it_names_this_process() -> None:
    assert SystemdNotifier({"WATCHDOG_USEC": "180000000"}).watchdog_seconds == 180
    assert SystemdNotifier({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": str(os.getpid())}).watchdog_seconds == 180
    assert SystemdNotifier({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": "1"}).watchdog_seconds is None
    assert SystemdNotifier({"WATCHDOG_USEC": "soon"}).watchdog_seconds is None
    assert SystemdNotifier({}).watchdog_seconds is None
