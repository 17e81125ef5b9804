"""Files of a physical backup that are not data: what the tool records of its own run (receipts), the option file, and
key files of encrypted tablespaces.

Receipts. Two families of names carry the same contents: ``xtrabackup_*`` (xtrabackup, and mariadb-backup up to 11.0)
and ``mariadb_backup_*`` (mariadb-backup from 11.1 on, MDEV-18931). Contents as written by both tools::

``xtrabackup_checkpoints``: "key = value" lines: backup_type, from_lsn, to_lsn, last_lsn. ``xtrabackup_info``: "key =
value" lines: tool_version, server_version, binlog_pos, incremental ... ``xtrabackup_binlog_info``: one record: file TAB
position [TAB GTID set]; MySQL's GTID sets may hold line ends. ``xtrabackup_slave_info``: SQL that makes another server
a replica of this one's source; on replicas only. ``backup-my.cnf``: what prepare must know: page size, layout of system
and undo tablespaces, key plugin.

The option file. Whoever can write to a store may have written it, and tools and servers take libraries to load and
paths to write to from option files. So none is ever given the backup's own: what InnoDB needs to find and read its
files is taken from it by name, never with a path, and of key plugins those that are known, from the program's own
folder (and only with key files of the configuration: ``named``).

Key files. The option file in a backup names the files of the source's key plugin, and whoever can write to a store may
have written that. So a key plugin is loaded only where the configuration names key files, no other file is ever given
to it, and what it reads is a copy: belonging to the user that the program runs as, there as long as it takes to be
read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from backupd.engine.sql.option_files import read_option_file
from backupd.model.errors import RefusedError, StreamError
from backupd.model.server_facts import Position, Receipts
from backupd.process.folders import write_anew
from backupd.process.runtime import render_options

BACKUP_CNF = "backup-my.cnf"
_SIZE_LIMIT = 1024 * 1024
"""Bytes; the largest, a GTID set, has a few kilobytes."""
_HINT = "run the backup again; if it repeats, the tool's version is not supported"


class ReceiptNames:
    """What one tool calls its files.

    ``checkpoints``: type and log sequence numbers of the backup; ``info``: versions, times and what was asked for;
    ``binlog_info``: the position in the binary log; ``slave_info``: what the server replicated from. ``all``: every
    name of the family, and that of the option file. ``required``: written last by a run that succeeded; a stream cut
    between two files lacks them and nothing else shows it.
    """

    def __init__(self, prefix: str) -> None:
        self.checkpoints = f"{prefix}_checkpoints"
        self.info = f"{prefix}_info"
        self.binlog_info = f"{prefix}_binlog_info"
        self.slave_info = f"{prefix}_slave_info"
        self.required = (self.checkpoints, self.info, BACKUP_CNF)
        self.all = frozenset({*self.required, self.binlog_info, self.slave_info})


XTRABACKUP = ReceiptNames("xtrabackup")
MARIADB_BACKUP = ReceiptNames("mariadb_backup")
FAMILIES = (XTRABACKUP, MARIADB_BACKUP)
_RECEIPTS = XTRABACKUP.all | MARIADB_BACKUP.all


class ReceiptCollector:
    """Keeps the receipts while they pass by in a stream."""

    def __init__(self) -> None:
        self._open: dict[str, bytearray] = {}
        self.files: dict[str, bytes] = {}
        """Complete receipts by name."""

    def data(self, path: str, payload: memoryview) -> None:
        """Raises StreamError when a receipt is larger than any can be."""
        if path in _RECEIPTS:
            kept = self._open.setdefault(path, bytearray())
            kept += payload
            if len(kept) > _SIZE_LIMIT:
                raise StreamError(f"{path} is larger than {_SIZE_LIMIT} bytes", hint=_HINT)

    def end(self, path: str) -> None:
        """``path`` is complete."""
        if path in _RECEIPTS:
            self.files[path] = bytes(self._open.pop(path, b""))


def read_receipts(folder: Path) -> Receipts:
    """The receipts of a backup that is in ``folder``. Raises StreamError."""
    return parse_receipts({path.name: path.read_bytes() for path in folder.iterdir() if path.name in _RECEIPTS})


def family_of(names: Collection[str]) -> ReceiptNames:
    """Which family the files of a backup belong to. Raises StreamError when it has no checkpoints file."""
    for family in FAMILIES:
        if family.checkpoints in names:
            return family
    raise StreamError(
        "the backup has no checkpoints file: the tool did not finish",
        detail=f"neither {' nor '.join(family.checkpoints for family in FAMILIES)} is there",
        hint=_HINT,
    )


def parse_receipts(files: Mapping[str, bytes]) -> Receipts:
    """``files``: name to content. Raises StreamError naming what is missing or unreadable."""
    family = family_of(files)
    missing = [name for name in family.required if name not in files]
    if missing:
        raise StreamError(f"the backup lacks {', '.join(missing)}: the tool did not finish", hint=_HINT)
    checkpoints = _pairs(files, family.checkpoints)
    info = _pairs(files, family.info)
    if not _text(files, BACKUP_CNF).strip():
        raise StreamError(f"{BACKUP_CNF} is empty", hint=_HINT)
    if info.get("binlog_pos") and family.binlog_info not in files:
        raise StreamError(f"the server writes a binary log, but the backup has no {family.binlog_info}", hint=_HINT)
    return Receipts(
        backup_type=_value(checkpoints, family.checkpoints, "backup_type"),
        from_lsn=_number(checkpoints, family.checkpoints, "from_lsn"),
        to_lsn=_number(checkpoints, family.checkpoints, "to_lsn"),
        last_lsn=_number(checkpoints, family.checkpoints, "last_lsn"),
        position=_position(files, family.binlog_info),
        tool_version=_value(info, family.info, "tool_version"),
        server_version=_value(info, family.info, "server_version"),
        replica_of=(replica_of := _text(files, family.slave_info).strip() if family.slave_info in files else ""),
        upstream=upstream_of(replica_of),
    )


_UPSTREAM = re.compile(
    r"(?:MASTER|SOURCE)_LOG_(?:FILE\s*=\s*'(?P<file>[^']+)'|POS\s*=\s*(?P<pos>[0-9]+))"
    r"|\bgtid_(?:slave_pos|purged)\s*=\s*'(?P<gtid>[^']*)'",
    re.IGNORECASE,
)


def upstream_of(replica_of: str) -> Position | None:
    """The position of a replica's source in the text of slave_info (see ``Receipts``)."""
    found: dict[str, str] = {}
    for match in _UPSTREAM.finditer(replica_of):
        for name, value in match.groupdict().items():
            if value is not None and found.setdefault(name, value) != value:
                return None  # of several sources
    if not found.get("gtid") and not (found.get("file") and found.get("pos")):
        return None
    return Position(found.get("file", ""), int(found.get("pos", "0")), found.get("gtid", "").replace("\n", ""))


def _position(files: Mapping[str, bytes], name: str) -> Position:
    record = _text(files, name).strip() if name in files else ""
    if not record:
        return Position()
    fields = record.split("\t")
    if len(fields) not in (2, 3) or not fields[1].strip().isdecimal():
        raise StreamError(f"{name} is not readable", detail=record[:500], hint=_HINT)
    gtid = "".join(fields[2].split()) if len(fields) == 3 else ""
    return Position(file=fields[0].strip(), pos=int(fields[1]), gtid=gtid)


def _pairs(files: Mapping[str, bytes], name: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for line in _text(files, name).splitlines():
        key, equals, value = line.partition("=")
        if equals:
            pairs.setdefault(key.strip(), value.strip())
    return pairs


def _text(files: Mapping[str, bytes], name: str) -> str:
    return files[name].decode("utf-8", "replace")


def _value(pairs: Mapping[str, str], name: str, key: str) -> str:
    if not pairs.get(key):
        raise StreamError(f"{name} has no {key}", hint=_HINT)
    return pairs[key]


def _number(pairs: Mapping[str, str], name: str, key: str) -> int:
    value = _value(pairs, name, key)
    if not value.isdecimal():
        raise StreamError(f"{name}: {key} is {value!r}, not a number", hint=_HINT)
    return int(value)


_KNOWN = """
innodb-page-size innodb-data-file-path innodb-undo-tablespaces innodb-checksum-algorithm innodb-log-checksum-algorithm
innodb-log-checksums innodb-log-file-size innodb-log-files-in-group innodb-log-block-size innodb-fast-checksum
innodb-compression-level redo-log-version server-uuid master-key-id innodb-encrypt-log innodb-encrypt-tables
"""
KNOWN = tuple(_KNOWN.split())
"""Without these a tool does not find or read the files of InnoDB, or writes in plain what was encrypted. Its folders
are paths of the source; the files themselves are at the top of the backup."""
KEY_OPTIONS = "file-key-management-"
KEY_PLUGIN = r"(file_key_management=)?file_key_management(\.so)?"
PLUGIN_DIR = r"/usr/[A-Za-z0-9_/-]*"
PLAIN_VALUE = r"[A-Za-z0-9_.:;, -]*"
"""Regular expressions that a shell's tools know, too: a library that may be loaded, the folder of the system where it
is (mariadb-backup does not look there by itself), and values without a path."""


def known_options(base: Path) -> dict[str, str | None]:
    """What is taken of backup-my.cnf in ``base``, where there is one: names with dashes, without "loose-"."""
    path = base / BACKUP_CNF
    found: dict[str, str | None] = {}
    read = read_option_file(path, ("mysqld", "mariadb", "mariadbd"), alone=True) if path.is_file() else None
    for option in read.options if read else ():
        if option.name in ("plugin-load", "plugin-load-add"):
            known = [name for name in re.split("[;:]", option.value or "") if re.fullmatch(KEY_PLUGIN, name)]
            found |= {"plugin-load": known[-1]} if known else {}
        elif option.name == "plugin-dir" and re.fullmatch(PLUGIN_DIR, option.value or ""):
            found[option.name] = option.value
        elif option.name in KNOWN and not re.fullmatch(PLAIN_VALUE, option.value or ""):
            continue
        elif option.name in KNOWN or option.name.startswith(KEY_OPTIONS):
            found[option.name] = option.value
    return found


def write_known(base: Path, options: Mapping[str, str | None]) -> None:
    """Put into the place of backup-my.cnf one of ours, with ``options`` (of ``known_options``). Raises OSError."""
    known = {name.replace("-", "_"): value for name, value in options.items()}
    # mariadb-backup (10.11.19) looks for these lines as it writes them itself: with dashes it passes over them without
    # a word, and quotes become part of the value (then it writes pages of encrypted tables in plain).
    literal = {name: known.pop(name) for name in ("plugin_load", "innodb_encrypt_tables") if name in known}
    text = render_options({"mysqld": known}) + "".join(f"{name}={value}\n" for name, value in literal.items())
    status = base.stat()
    write_anew(base / BACKUP_CNF, text.encode(), owner=(status.st_uid, status.st_gid) if os.geteuid() == 0 else None)


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
                hint=f"if that file is the server's, add it to the configuration: `{SETTING}: [{path}]`",
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
                    hint=f"{SETTING} names this file: copy it there, readable for backupd",
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
