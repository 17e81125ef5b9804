"""Option files as MySQL and MariaDB client programs read them.

Rules from the manuals' pages on using option files and from mysys/my_default.c: groups in brackets; ``name
= value`` or a bare ``name``; ``#`` and ``;`` start a comment line, ``#`` outside quotes ends a line; one
pair of quotes around a value is dropped; the escapes ``\\b \\t \\n \\r \\\\ \\s`` and escaped quotes are
decoded, any other backslash stays; dashes and underscores in names are the same; a later line wins,
whichever of the wanted groups it stands in; ``!include`` and ``!includedir`` (only ``*.cnf``, sorted by
name) are followed. A file that everybody may write is ignored by the clients, so here it is a problem.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import Problem
from backupd.process.folders import acting_uid, closed_words, read_plain, user_words

CLIENT_GROUPS = ("client", "client-server", "client-mariadb", "mysqldump", "mariadb-dump", "backupd")
"""The groups that say how a client reaches its server, and ours."""

_LARGEST = 8 * 1024**2
_DEEPEST = 10
"""The clients' own limit of nested includes."""

_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "r": "\r", "\\": "\\", "s": " ", '"': '"', "'": "'"}


@dataclass(frozen=True, slots=True)
class Option:
    """One line: ``name`` with dashes, ``value`` None for a bare flag, and where it stands (1-based line)."""

    file: Path
    line: int
    group: str
    name: str
    value: str | None


@dataclass(frozen=True, slots=True)
class OptionFile:
    """What was read: the options in order, every file that was opened, everything wrong with them, and what to do about
    files that cannot be read."""

    options: tuple[Option, ...]
    files: tuple[Path, ...]
    problems: tuple[Problem, ...]
    hints: tuple[str, ...] = ()

    def get(self, *names: str) -> Option | None:
        """The last line that sets any of ``names`` (written with dashes)."""
        return next((option for option in reversed(self.options) if option.name in names), None)

    def value(self, *names: str) -> str:
        """The value of the last such line, or an empty string."""
        option = self.get(*names)
        return (option.value or "") if option else ""


def read_option_file(path: Path, groups: Collection[str] = CLIENT_GROUPS, *, alone: bool = False) -> OptionFile:
    """Read ``path`` and what it includes, or that file ``alone``; only ``groups`` are kept. Problems are in the
    answer, never raised.
    """
    reader = _Reader(frozenset(groups), alone=alone)
    reader.read(path, 0)
    return OptionFile(tuple(reader.options), tuple(reader.files), tuple(reader.problems), tuple(reader.hints))


def unreadable(path: Path, error: OSError) -> tuple[str, str]:
    """What kept us from reading ``path``, and what to do about it."""
    words = f"cannot be read: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        return words, f"write {path}, or name another file in the configuration"
    if not isinstance(error, PermissionError):
        return words, ""
    closed = next((folder for folder in reversed(path.absolute().parents) if not _is_open(folder)), path)
    who = user_words(acting_uid())
    hint = (
        f"let {who} pass through that folder (chmod o+x {closed})"
        if closed != path
        else f"give the file to {who} (chown, and chmod 600 {path})"
    )
    return (f"{words} (tried as {who}; {closed_words(closed)})", f"{hint}; or call backupd as a user who may read it")


def _is_open(folder: Path) -> bool:
    return os.access(folder, os.X_OK, effective_ids=True)


class _Reader:
    def __init__(self, groups: frozenset[str], *, alone: bool) -> None:
        self.alone = alone
        self.groups = groups
        self.options: list[Option] = []
        self.files: list[Path] = []
        self.problems: list[Problem] = []
        self.hints: list[str] = []

    def read(self, path: Path, depth: int) -> None:
        try:
            if path.stat().st_mode & stat.S_IWOTH and path.is_file():
                self._problem(path, None, "everybody may write it, so database clients ignore it: chmod o-w")
                return
            text = read_plain(path, _LARGEST, follow=True).decode("utf-8", "surrogateescape")
        except OSError as error:
            words, hint = unreadable(path, error)
            self._problem(path, None, words)
            self.hints.append(hint)
            return
        self.files.append(path)
        group = ""
        for number, raw in enumerate(text.splitlines(), start=1):
            line = raw.strip()
            if not line or line[0] in "#;":
                continue
            if line.startswith("!") and self.alone:
                self._problem(path, number, f"{line!r} is not followed")
            elif line.startswith("!"):
                self._include(path, number, line, depth)
            elif line.startswith("["):
                group, closed, _ = line[1:].partition("]")
                group = group.strip()
                if not closed:
                    self._problem(path, number, f"the group [{group} has no closing bracket")
                    return
            elif not group:
                self._problem(path, number, "an option before the first [group]")
                return
            elif group in self.groups:
                name, value = _split(line)
                if any("\udc80" <= letter <= "\udcff" for letter in value or ""):
                    self._problem(path, number, f"the value of {name} is not UTF-8")
                    continue
                self.options.append(Option(path, number, group, name, value))

    def _include(self, path: Path, number: int, line: str, depth: int) -> None:
        word, _, argument = line.partition(" ")
        # A client resolves a relative name against its current folder, which says nothing in a service.
        target = path.parent / argument.strip()
        if depth >= _DEEPEST:
            self._problem(path, number, f"more than {_DEEPEST} includes inside each other")
        elif not argument.strip() or word not in ("!include", "!includedir"):
            self._problem(path, number, f"{line!r} is neither !include FILE nor !includedir FOLDER")
        elif word == "!include":
            self.read(target, depth + 1)
        else:
            try:
                names = sorted(entry for entry in target.iterdir() if entry.suffix == ".cnf")
            except OSError as error:
                self._problem(path, number, f"{target} cannot be listed: {error.strerror}")
                return
            for name in names:
                self.read(name, depth + 1)

    def _problem(self, path: Path, line: int | None, message: str) -> None:
        self.problems.append(Problem(str(path), line, "", message))


def _split(line: str) -> tuple[str, str | None]:
    line = line[: _end_of_content(line)].rstrip()
    name, equals, value = line.partition("=")
    name = name.strip().replace("_", "-").removeprefix("loose-")
    return name, _unquote(value.strip()) if equals else None


def _end_of_content(line: str) -> int:
    """Where a comment begins: the first ``#`` outside quotes."""
    quote, escaped = "", False
    for index, letter in enumerate(line):
        if letter in "'\"" and not escaped:
            quote = "" if quote == letter else quote or letter
        elif letter == "#" and not quote:
            return index
        escaped = bool(quote) and letter == "\\" and not escaped
    return len(line)


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    letters: Iterator[str] = iter(value)
    decoded: list[str] = []
    for letter in letters:
        if letter != "\\":
            decoded.append(letter)
            continue
        following = next(letters, "")
        decoded.append(_ESCAPES.get(following, letter + following))
    return "".join(decoded)
