"""A real sshd on a port of 127.0.0.1, with a host key and an account's key of its own: nothing of this machine's.

Whoever runs the tests logs in, with SFTP only. ``sessions`` are the processes that serve connections: they can be
stopped and killed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from storage.config import SftpConfig
from tests.support.service.serving import end_service, free_port, start_service
from tests.support.stores.folders import make_short_directory

_SSHD = "/usr/sbin/sshd"
_PRIVILEGE_FOLDER = Path("/run/sshd")
"""Compiled into sshd, which wants it (empty) when root starts it."""


def why_not() -> str:
    """Why there is no SSH server for tests; empty when there is one."""
    return "" if os.access(_SSHD, os.X_OK) else f"{_SSHD} is not there: scripts/setup --test installs it"


class SshServer:
    """Use as a context manager. ``options``: further lines of sshd_config."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self.base = make_short_directory("bt-ssh-")
        self.port = free_port()
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self.host_key = self.base / "host_key"
        self.key_file = self.base / "key"
        self.known_hosts = self.base / "known_hosts"
        self.options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None
        os.chown(self.base, os.geteuid(), os.getegid())
        make_key(self.host_key)
        make_key(self.key_file)
        shutil.copy(self.key_file.with_suffix(".pub"), self.base / "authorized_keys")
        self.write_known_hosts(self.host_key)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.base, ignore_errors=True)

    def start(self) -> None:
        if os.geteuid() == 0:
            _PRIVILEGE_FOLDER.mkdir(mode=0o755, exist_ok=True)
        lines = {
            "Port": str(self.port),
            "ListenAddress": "127.0.0.1",
            "HostKey": str(self.host_key),
            "PidFile": "none",
            "AuthorizedKeysFile": str(self.base / "authorized_keys"),
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "MaxStartups": "100",
            "PrintMotd": "no",
            "UseDNS": "no",
            "Subsystem": "sftp internal-sftp",
            **self.options,
        }
        config = self.base / "sshd_config"
        config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        self._process = start_service([_SSHD, "-D", "-e", "-f", str(config)], self.base / "log", self.port)

    def stop(self) -> None:
        """The server and every connection to it."""
        self.cut()
        if self._process is not None:
            end_service(self._process)
            self._process = None

    def sessions(self) -> list[int]:
        """The processes behind the connections that there are."""
        return [] if self._process is None else _below(self._process.pid)

    def cut(self) -> None:
        """Every connection that there is ends at once; new ones can be made."""
        sessions = self.sessions()
        signal_all(sessions, signal.SIGKILL)
        deadline = time.monotonic() + 300
        while set(sessions) & set(self.sessions()) and time.monotonic() < deadline:
            time.sleep(0.01)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing answers in the block, and no connection ends: as when the host hangs."""
        assert self._process is not None
        processes = [self._process.pid, *self.sessions()]
        signal_all(processes, signal.SIGSTOP)
        try:
            yield
        finally:
            signal_all(processes, signal.SIGCONT)

    def write_known_hosts(self, host_key: Path) -> None:
        """As if ``host_key`` were the one that this host is known by."""
        kind, key = host_key.with_suffix(".pub").read_text().split()[:2]
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")

    def config(self, folder: Path | str, **more: object) -> SftpConfig:
        """``folder`` on this server as a destination."""
        return SftpConfig.model_validate(
            {
                "type": "sftp",
                "host": "127.0.0.1",
                "port": self.port,
                "user": self.user,
                "path": str(folder),
                "key_file": self.key_file,
                "known_hosts": self.known_hosts,
                **more,
            }
        )


@pytest.fixture(scope="session")
def ssh_server() -> Iterator[SshServer]:
    """Shared by the session: who stops or cuts it takes one of its own."""
    if why := why_not():
        pytest.skip(why)
    with SshServer() as server:
        yield server


def make_key(path: Path, passphrase: str = "", kind: str = "ed25519") -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", str(path)], check=True)


def signal_all(processes: list[int], how: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, how)


def _below(process: int) -> list[int]:
    """Every process that descends from ``process``."""
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{process}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [one for child in children for one in (child, *_below(child))]
