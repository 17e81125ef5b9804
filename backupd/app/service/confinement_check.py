"""What `backupd check` says about the programs that work on backups: as whom they run here, confined how, with which
keys."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from pathlib import Path

from backupd.app.context.settings import Settings
from backupd.backup.checks.finding import Finding, error, fine, from_error, warning
from backupd.engine.instance.backup_files import SETTING
from backupd.engine.instance.sandbox import MAKE_WORKER, WORKER, Way, obstacle, ways, worker
from backupd.model.errors import RefusedError

_GUIDE = 'docs/installing.md, "What works where"'
_SWITCHES = (
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "an AppArmor profile with `userns,` for bwrap"),
)
"""What forbids user namespaces, where it has this value, and what to do."""


def findings(settings: Settings, *, kernel: Path = Path("/proc/sys")) -> Iterator[Finding]:
    """``kernel``: where its settings are."""
    try:
        user = worker()
    except RefusedError as problem:
        yield from_error("sandbox", problem)
        return
    name = user or getpass.getuser()
    if user is None:
        yield fine("sandbox", f"programs that work on backups run as {name}, as backupd itself")
    elif user == WORKER:
        yield fine("sandbox", f"programs that work on backups run as {name}, not as root")
    else:
        yield warning(
            "sandbox",
            f"there is no user {WORKER}: programs that work on backups run as {name}, and a "
            "running server of that user could read and change what they work on",
            MAKE_WORKER,
        )
    yield _confinement(name, ways(user), obstacle(Way.USER, user), kernel)
    yield from _key_files(settings)


def _confinement(name: str, found: tuple[Way, ...], why: str, kernel: Path) -> Finding:
    if Way.USER in found:
        return fine(
            "confinement",
            f"a user namespace confines programs that work on backups: no power, no network, "
            f"their own folders only, as {name}",
        )
    if found:
        return fine(
            "confinement",
            f"programs that work on backups are confined by root, who drops every power before "
            f"they begin (no user namespaces for {name}: {why})",
        )
    switched = [remedy for path, value, remedy in _SWITCHES if _reads(kernel / path) == value]
    hint = (
        "apt-get install bubblewrap"
        if "bwrap" in why and "missing" in why
        else switched[0]
        if switched
        else ("let this container or service make user namespaces, where that is wanted")
    )
    return warning(
        "confinement",
        f"nothing confines programs that work on backups: they run as {name} and reach what "
        f"that user reaches, the network included, and each other ({why})",
        f"{hint}; {_GUIDE}",
    )


def _reads(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _key_files(settings: Settings) -> Iterator[Finding]:
    for path in settings.restore.key_files if settings.restore else ():
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as problem:
            yield error(
                "key files",
                f"{path} cannot be read: {problem.strerror}: restores and proofs of encrypted tables fail",
                f"put it there, or correct {SETTING}",
            )
        else:
            yield fine("key files", f"{path} can be read: key plugins of prepared copies get a copy of it")
