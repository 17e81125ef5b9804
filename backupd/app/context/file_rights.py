"""Who can write the files that say what backupd does: the configuration, files of servers, policies. They name programs
that it runs (`hooks`), accounts, and what is kept.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from backupd.app.context.settings import Settings
from backupd.backup.finding import Finding, warning
from backupd.model.text import few
from policies.fields import SUFFIX

_NAMED = 3
"""Files that one finding names."""


def findings(settings: Settings) -> list[Finding]:
    """One about files and folders of other users, one about those that others can write; none where all is well."""
    strange: list[str] = []
    open_: list[str] = []
    for path in dict.fromkeys(_files(settings)):
        with suppress(OSError):  # whoever needs it is told
            found = path.stat()
            if os.statvfs(path).f_flag & os.ST_RDONLY:
                continue  # as Kubernetes mounts a ConfigMap
            if found.st_uid not in (0, os.geteuid()):
                strange.append(f"{path} (uid {found.st_uid})")
            elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
                open_.append(f"{path} (mode {stat.S_IMODE(found.st_mode):04o})")
    told = []
    for paths, what, command in (
        (strange, "belong to other users", f"chown {os.geteuid()} FILE"),
        (open_, "can be written by others", "chmod go-w FILE"),
    ):
        if paths:
            told.append(
                warning(
                    "configuration",
                    f"files of the configuration {what}, who can change what is backed up and which programs backupd "
                    f"runs: {few(paths, _NAMED)}",
                    f"{command}; then read what is in them",
                )
            )
    return told


def _files(settings: Settings) -> Iterator[Path]:
    """Each file that was read, and its folder: whoever can write there can put another file in its place."""
    configuration = settings.configuration
    yield settings.file
    yield settings.file.absolute().parent
    for folder in (configuration.servers_folder, configuration.policies):
        if folder.is_dir():
            yield folder
            yield from sorted(folder.glob(f"*{SUFFIX}"))
