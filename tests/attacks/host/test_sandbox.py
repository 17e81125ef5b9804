"""A program that took over its sandbox looks for a way out, and at what runs beside it as the same user."""

from __future__ import annotations

import json
import os
import pwd
import socket
from pathlib import Path

import pytest

from backupd.engine.server.sandbox import Way, _made, obstacle, ways, worker
from backupd.process.command import Command, spawn, stop
from backupd.process.pipeline import run
from tests.support.stores.folders import runs_as_root

pytestmark = pytest.mark.skipif(not runs_as_root(), reason="only root can be another user than the database's")

INSIDE = r"""
import ctypes, fcntl, glob, json, os, resource, signal, socket, sys, termios
victim, folder, abstract = sys.argv[1:]
libc, got = ctypes.CDLL(None, use_errno=True), []

def attempt(name, action):
    try:
        if action() is not False:
            got.append(name)
    except (OSError, ValueError):
        pass

def called(number, *args):
    if libc.syscall(number, *args) < 0:
        raise OSError(ctypes.get_errno(), "")

def connects():
    with socket.socket(socket.AF_UNIX) as one:
        one.connect("\0" + abstract)

others = [pid for pid in os.listdir("/proc") if pid.isdigit()
          and open(f"/proc/{pid}/comm").read().strip() not in ("bwrap", "python3", "setpriv")]
attempt("sees", lambda: bool(others))
attempt("trace", lambda: called(101, 0x4206, int(victim), 0, 0))
attempt("memory", lambda: bool(open(f"/proc/{victim}/mem", "rb")))
attempt("folder", lambda: os.listdir(folder))
attempt("abstract", connects)
attempt("terminal", lambda: fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), termios.TIOCSTI, b"x"))
attempt("mounts", lambda: called(165, b"none", b"/tmp", b"tmpfs", 0, 0))
attempt("remounts", lambda: called(165, b"none", b"/usr", None, 32 | 4096, None))
attempt("device", lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(8, 0)))
attempt("sets uid", lambda: os.setuid(0))
attempt("is root by su", lambda: os.system("su -c true </dev/null >/dev/null 2>&1") == 0)
attempt("writes /proc", lambda: open("/proc/sys/kernel/core_pattern", "w"))
attempt("cgroup", lambda: os.listdir("/sys/fs/cgroup"))
attempt("runtime", lambda: bool(os.listdir("/run")))
attempt("dumps core", lambda: resource.getrlimit(resource.RLIMIT_CORE)[1] > 0)
attempt("kills", lambda: os.kill(-1, signal.SIGTERM) and False)
print(json.dumps({"got": got, "fds": sorted(map(int, os.listdir("/proc/self/fd")))[:-1], "env": sorted(os.environ)}))
"""


@pytest.fixture
def places(short_tmp: Path) -> tuple[Path, Path]:
    account = pwd.getpwnam(worker() or "")
    for name in ("mine", "theirs"):
        (short_tmp / name).mkdir(mode=0o700)
        os.chown(short_tmp / name, account.pw_uid, account.pw_gid)
    return short_tmp / "mine", short_tmp / "theirs"


@pytest.mark.parametrize("way", list(Way))
def test_nothing_outside_is_reached(way: Way, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    if way not in ways():
        assert obstacle(way, worker())
        return
    mine, theirs = places
    for name in ("LD_PRELOAD", "LD_AUDIT", "MYSQL_PWD", "MYSQL_HOME", "GNUPGHOME", "PYTHONPATH", "BASH_ENV"):
        monkeypatch.setenv(name, "/nonexistent")
    (mine / "inside.py").write_text(INSIDE)
    (mine / "inside.py").chmod(0o644)
    with (
        socket.socket(socket.AF_UNIX) as listener,
        (mine / "inside.py").open() as left_open,
        Path(os.devnull).open("r+b") as nothing,
    ):
        listener.bind("\0backupd-attack")
        listener.listen()
        os.set_inheritable(left_open.fileno(), True)
        beside = spawn(
            _made(Command(("sleep", "30"), user=worker()), way, [theirs], [], network=False),
            stdin=nothing.fileno(),
            stdout=nothing.fileno(),
            stderr=nothing.fileno(),
        )
        try:
            command = Command(
                ("/usr/bin/python3", str(mine / "inside.py"), str(beside.pid), str(theirs), "backupd-attack"),
                user=worker(),
            )
            done = run(_made(command, way, [mine], [], network=False), timeout=20)
            assert beside.poll() is None
        finally:
            stop([beside], polite_seconds=0)
    told = json.loads(done.stdout)
    assert told["got"] == []
    assert told["fds"] == [0, 1, 2]
    assert not set(told["env"]) - {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "TZ",
        "TMPDIR",
        "PWD",
        "LC_ALL",
        "LC_CTYPE",
    }
