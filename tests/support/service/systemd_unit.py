"""deploy/backupd.service as values, and programs that run with no more than it leaves to the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNIT = Path(__file__).parents[3] / "deploy" / "backupd.service"


def entries() -> Iterator[tuple[str, str, str]]:
    """(section, key, value) of each line."""
    section = ""
    for number, line in enumerate(UNIT.read_text().splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            continue
        key, found, value = line.partition("=")
        assert found, f"line {number}: {line}"
        yield section, key, value


def service() -> dict[str, str]:
    return {key: value for section, key, value in entries() if section == "Service"}


def writable() -> tuple[str, ...]:
    """The only folders, as absolute paths, that the unit leaves writable on the disk."""
    unit = service()
    assert (unit["ProtectSystem"], "PrivateTmp" in unit) == ("strict", False)
    named = [path.lstrip("-+") for path in unit["ReadWritePaths"].split()]
    return (*named, f"/var/lib/{unit['StateDirectory']}", f"/run/{unit['RuntimeDirectory']}")


def powers() -> list[str]:
    """The words of setpriv that leave a program what the unit leaves the service."""
    kept = ",".join("+" + word.removeprefix("CAP_").lower() for word in service()["CapabilityBoundingSet"].split())
    return ["setpriv", "--bounding-set", f"-all,{kept}", "--no-new-privs"]


def confined(base: Path) -> list[str]:
    """The words before a program that make it see a read-only tree in which ``base`` stands for the root of the unit's
    writable folders, all of which are made: what it calls /srv/backups is BASE/srv/backups."""
    binds = []
    for path in writable():
        here = base / path.lstrip("/")
        here.mkdir(mode=0o711, parents=True, exist_ok=True)
        binds += ["--bind", str(here), str(here)]
    umask = f'umask {service()["UMask"]} && exec "$@"'
    tunables = ["--ro-bind", "/proc/sys", "/proc/sys"] if service()["ProtectKernelTunables"] == "yes" else []
    return [
        "sh",
        "-c",
        umask,
        "sh",
        "bwrap",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        *tunables,
        *binds,
        "--chdir",
        "/",
        "--",
        *powers(),
    ]
