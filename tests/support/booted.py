"""A real systemd as the first process of its own namespaces, over this machine's files or those of another root: what
it starts is confined as on a host, and what it writes is gone with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")
_UNIFIED = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
_TARGET = """\
[Unit]
Description=As little as a service needs
Requires=dbus.socket
After=dbus.socket
"""
_BOOT = """\
set -e
mount --make-rprivate /
mount -t tmpfs -o size=4g,mode=755 tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 cgroup sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mkdir -p etc/systemd/system
for unit in systemd-udevd systemd-timesyncd systemd-networkd systemd-resolved systemd-logind systemd-update-utmp \\
    systemd-binfmt systemd-sysctl systemd-modules-load systemd-random-seed systemd-firstboot; do
    ln -sf /dev/null "etc/systemd/system/$unit.service"
done
printf '%s' "$3" >etc/systemd/system/small.target
: >etc/machine-id
hostname booted
shift 3
mkdir -p old
pivot_root . old
cd /
umount -l /old
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \\
    "$@"
"""
_OPTIONS = ("--system", "--unit=small.target", "--log-target=console", "--show-status=no")


@dataclass(frozen=True)
class Booted:
    """``pid``: of the systemd, as this machine's kernel knows it."""

    pid: int
    log: Path

    def run(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a program in there, as root."""
        return subprocess.run(
            ["nsenter", f"--target={self.pid}", "--all", "--root", "--wd=/", "--", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "SYSTEMD_COLORS": "0"},
        )

    def ok(self, *words: str, timeout: float = 300) -> str:
        done = self.run(*words, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.log.read_text()[-4000:]}"
        return done.stdout

    def property(self, unit: str, name: str) -> str:
        """What ``systemctl show`` says."""
        return self.ok("systemctl", "show", "--value", f"--property={name}", unit).strip()


def why_not() -> str:
    """Why no systemd can be booted here; empty where one can."""
    if os.geteuid() != 0:
        return "only root can boot a systemd of its own"
    if not SYSTEMD.exists():
        return "no systemd on this machine"
    hierarchy = _hierarchy()
    if hierarchy is None:
        return "no systemd can be booted here: there is no cgroup v2 that can be written"
    with tempfile.TemporaryDirectory(prefix="boot-") as folder:
        done = subprocess.run(_words(Path(folder), Path("/"), "/bin/true"), capture_output=True, text=True, check=False)
    return f"no systemd can be booted here: {done.stderr.strip()[-200:]}" if done.returncode else ""


def _words(mount: Path, lower: Path, *program: str) -> list[str]:
    """A program as the first process of its own namespaces."""
    return [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--net", "--cgroup", "--"),
        *("sh", "-c", _BOOT, "sh", str(mount), str(lower), _TARGET, *program),
    ]


def _hierarchy() -> Path | None:
    return next((path for path in _UNIFIED if os.access(path / "cgroup.procs", os.W_OK)), None)


@contextmanager
def booted(lower: Path = Path("/")) -> Iterator[Booted]:
    """``lower``: the root whose files are seen, and not changed."""
    hierarchy = _hierarchy()
    assert hierarchy is not None
    base = Path(tempfile.mkdtemp(prefix="boot-"))
    group = hierarchy / base.name
    group.mkdir()
    log = base / "log"
    mount = base / "mount"
    mount.mkdir()
    words = _words(mount, lower, str(SYSTEMD), *_OPTIONS)
    entered = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs"; exec "$@"', "sh", *words]
    try:
        with (
            log.open("wb") as out,
            subprocess.Popen(
                entered, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            ) as process,
        ):
            try:
                yield _ready(Booted(_first(process), log), process)
            finally:
                process.send_signal(signal.SIGKILL)
    finally:
        _remove(group)
        shutil.rmtree(base, ignore_errors=True)


def _first(process: subprocess.Popen[bytes]) -> int:
    """The only child of ``unshare``."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "systemd":
            return int(children[0])
        time.sleep(0.02)
    raise AssertionError("systemd was not started")


def _ready(system: Booted, process: subprocess.Popen[bytes]) -> Booted:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        done = system.run("systemctl", "is-active", "small.target")
        if done.stdout.strip() == "active":
            return system
        time.sleep(0.1)
    raise AssertionError(f"systemd does not answer: {system.log.read_text()[-4000:]}")


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 10
    for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
        _rmdir(folder, deadline)
    _rmdir(group, deadline)


def _rmdir(folder: Path, deadline: float) -> None:
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
