"""Key files of encrypted tablespaces: which of them a program of ours reads, and as what.

The option file in a backup names the files of the source's key plugin, and whoever can write to a store may have
written that. So a key plugin is loaded only where the configuration names key files, no other file is ever given to it,
and what it reads is a copy: belonging to the user that the program runs as, there as long as it takes to be read.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from backupd.engine.instance.backup_options import KEY_OPTIONS, KEY_PLUGIN
from backupd.model.errors import RefusedError
from backupd.process.folders import write_anew

SETTING = "restore.key_files"
_IN_FILE = "FILE:"
_COPY = "backupd-keys"


def named(options: Mapping[str, str | None], allowed: Sequence[Path]) -> dict[str, str | None]:
    """``options`` (of a server or tool) whose key files are those of the configuration: ``allowed`` has the very path,
    or one file of that name. Raises RefusedError for others, and for a key plugin where none is allowed."""
    found = dict(options)
    for name, path in _files(options).items():
        ours = [path] if path in allowed else [one for one in allowed if one.name == path.name]
        if len(ours) != 1:
            raise RefusedError(
                f"the backup's tables are encrypted, with keys in {path}, which the configuration does not name",
                hint=f"when that file is the server's: `{SETTING}: [{path}]` in the configuration",
            )
        prefix = _IN_FILE if (options[name] or "").startswith(_IN_FILE) else ""
        found[name] = f"{prefix}{ours[0]}"
    if not allowed and any(
        _bare(name).startswith("plugin-load") and re.fullmatch(KEY_PLUGIN, value or "")
        for name, value in options.items()
    ):
        raise RefusedError(
            "the backup names a key plugin of its server, and the configuration no key files",
            hint=f"name the server's key files in the configuration: `{SETTING}`",
        )
    return found


@contextlib.contextmanager
def handed(
    options: Mapping[str, str | None], allowed: Sequence[Path], folder: Path, owner: tuple[int, int] | None
) -> Iterator[dict[str, str | None]]:
    """``options`` with copies of their key files in ``folder``, which are ``owner``'s (user, group; None: ours) and
    are removed at the end. Raises RefusedError, also for a file that cannot be read."""
    given = named(options, allowed)
    copies: list[Path] = []
    try:
        for name, path in _files(given).items():
            copies.append(folder / f"{_COPY}-{len(copies)}")
            try:
                content = path.read_bytes()
            except OSError as error:
                raise RefusedError(
                    f"the key file {path} cannot be read: {error.strerror}",
                    hint=f"{SETTING} names it: put it there, readable for backupd",
                ) from error
            write_anew(copies[-1], content, owner=owner)
            given[name] = (given[name] or "").replace(str(path), str(copies[-1]))
        yield given
    finally:
        for copy in copies:
            copy.unlink(missing_ok=True)


def _files(options: Mapping[str, str | None]) -> dict[str, Path]:
    """The file of each option that names one."""
    found = {}
    for name, value in options.items():
        if _bare(name) == f"{KEY_OPTIONS}filename" and value:
            found[name] = Path(value)
        elif _bare(name).startswith(KEY_OPTIONS) and value and value.startswith(_IN_FILE):
            found[name] = Path(value.removeprefix(_IN_FILE))
    return found


def _bare(name: str) -> str:
    return name.replace("_", "-").removeprefix("loose-")
