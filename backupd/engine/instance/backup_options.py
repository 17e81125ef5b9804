"""The option file in a backup, of which little is believed: whoever can write to a store may have written it.

Tools and servers take libraries to load and places to write from option files. So none is ever given the backup's own:
what InnoDB needs to find and read its files is taken from it by name, never with a path, and of key plugins those that
are known, from the program's own folder (and only with key files of the configuration: ``keyfiles``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from backupd.engine.instance.receipts import BACKUP_CNF
from backupd.engine.sql.option_files import read_option_file
from backupd.process.folders import write_anew
from backupd.process.runtime import render_options

KNOWN = (
    "innodb-page-size",
    "innodb-data-file-path",
    "innodb-undo-tablespaces",
    "innodb-checksum-algorithm",
    "innodb-log-checksum-algorithm",
    "innodb-log-checksums",
    "innodb-log-file-size",
    "innodb-log-files-in-group",
    "innodb-log-block-size",
    "innodb-fast-checksum",
    "innodb-compression-level",
    "redo-log-version",
    "server-uuid",
    "master-key-id",
    "innodb-encrypt-log",
    "innodb-encrypt-tables",
)
"""Without these a tool does not find or read the files of InnoDB, or writes in plain what was encrypted. Its folders
are places of the source; the files themselves lie at the top of the backup."""
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
