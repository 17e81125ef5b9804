"""SELinux labels of a restored data directory: looked at before anything is fetched, and set before a server starts.

Files get their label from the folder they were made in. The policy knows by the path which one they should have, and
``restorecon`` gives it to them; a path that nobody has told the policy about gets one that no database may read, and
then ``restorecon`` does not help.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import BackupdError
from backupd.process.command import Command
from backupd.process.pipeline import run

ENFORCE = Path("/sys/fs/selinux/enforce")
"""Where it is there, SELinux is active; it holds 1 where it is enforced."""
_LABEL = "security.selinux"
_DATABASE = "mysqld_db_t"
_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Labels:
    """``enforcing``: None where there is no SELinux. ``present``: the label of the data directory, or of the folder
    that it will be made in; ``wanted``: what the policy says of its path, "" where it cannot be asked."""

    enforcing: bool | None = None
    present: str = ""
    wanted: str = ""

    @property
    def problem(self) -> str:
        """Why a server may not read the data there even with the right labels; "" for no reason."""
        if self.enforcing is None or not self.wanted or _DATABASE in self.wanted.split(":"):
            return ""
        return f"the SELinux policy labels this path {self.wanted}, and database servers read {_DATABASE}"


def look(datadir: Path) -> Labels:
    """At the labels of ``datadir``, which need not exist."""
    try:
        enforcing = ENFORCE.read_text(encoding="ascii").strip() == "1"
    except OSError:
        return Labels()
    nearest = next(folder for folder in (datadir, *datadir.parents) if folder.exists())
    return Labels(enforcing, _label(nearest), _wanted(datadir))


def relabel(datadir: Path, folders: Iterable[Path], before: Labels) -> tuple[str, ...]:
    """Give what was restored (``folders``) the labels of the policy; what is to be said of it. ``before``: as ``look``
    gave them."""
    if before.enforcing is None:
        return ()
    paths = [str(path) for path in folders if path.exists()]
    if (program := shutil.which("restorecon")) is None:
        return (
            (
                f"SELinux is active, and restorecon is not installed: run restorecon -R {' '.join(paths)} before "
                "the real service starts"
            ),
        )
    try:
        run(Command((program, "-R", *paths)), timeout=_SECONDS)
    except BackupdError as error:
        why = ": ".join(filter(None, (error.message, error.detail)))
        return (f"SELinux is active, and the labels could not be set: {why}",)
    if before.problem:
        rule = f"semanage fcontext -a -t {_DATABASE} '{datadir}(/.*)?'"
        return (f"{before.problem}: run {rule}, then restorecon -R {' '.join(paths)}",)
    return ()


def _label(path: Path) -> str:
    try:
        return os.getxattr(path, _LABEL).decode("ascii", "replace").rstrip("\0")
    except OSError:
        return ""


def _wanted(path: Path) -> str:
    program = shutil.which("matchpathcon")
    if program is None:
        return ""
    try:
        said = run(Command((program, "-n", str(path))), timeout=60).stdout.decode("utf-8", "replace").strip()
    except BackupdError:
        return ""
    return "" if said.startswith("<<") else said
