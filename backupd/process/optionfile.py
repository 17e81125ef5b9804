"""Option files: how a password reaches a database tool without being seen in its argv.

Format: https://mariadb.com/kb/en/configuring-mariadb-with-option-files/ and the parser in mysys/my_default.c.
mydumper reads another format (GLib key files); nothing here is for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from backupd.process.runtime import runtime_directory

__all__ = ["option_file", "render_options", "runtime_directory"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b"})
_LINE_LIMIT = 4000
"""Bytes: the parser reads lines into 4096 and refuses what is longer."""


@contextlib.contextmanager
def option_file(
    groups: Mapping[str, Mapping[str, str | None]],
    *,
    directory: Path | None = None,
) -> Iterator[Path]:
    """A 0600 option file that is gone when the context is left.

    ``groups`` maps a group (``client``) to options; an option without value (None) is a switch.
    ``directory``: a private one, by default ``runtime_directory()``. Raises ValueError for a name or value
    that no option file can hold. Pass it as ``--defaults-file=...`` (or ``--defaults-extra-file=...``), as
    the tool's first argument.
    """
    text = render_options(groups)
    path = (directory if directory is not None else runtime_directory()) / f"o{secrets.token_hex(6)}.cnf"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
        yield path
    finally:
        path.unlink(missing_ok=True)


def render_options(groups: Mapping[str, Mapping[str, str | None]]) -> str:
    """The text of an option file: every value in double quotes, escaped, so that it is read back
    unchanged."""
    lines: list[str] = []
    for group, options in groups.items():
        lines.append(f"[{_checked(group)}]")
        for name, value in options.items():
            line = _checked(name) if value is None else f'{_checked(name)}="{_escaped(name, value)}"'
            if len(line.encode()) > _LINE_LIMIT:
                raise ValueError(f"the value of {name} is too long for an option file")
            lines.append(line)
    return "\n".join(lines) + "\n"


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of an option or of a group")
    return name


def _escaped(name: str, value: str) -> str:
    if "\0" in value:
        raise ValueError(f"the value of {name} holds a NUL byte")
    return value.translate(_ESCAPES)
