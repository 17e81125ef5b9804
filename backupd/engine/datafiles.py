"""What must lie in a prepared backup, by the file list of the last backup that was applied to it.

The tools say "completed OK!" over missing tables, and a table that was dropped between two increments must not come
back. Suffixes while a backup is not prepared yet, as measured with mariadb-backup 10.11.19 and as xtrabackup's manual
has them:

* ``t.ibd.delta`` with ``t.ibd.meta``: the pages of ``t.ibd`` that changed since the backup before
* ``t.new`` (``t.new.delta``): ``t.ibd``, made or rebuilt after the last checkpoint
* ``t.del``, ``t.ren``: ``t`` was dropped, or renamed to the name that stands in it, while the tool ran; newer
  xtrabackup writes the tablespace's number instead of its name
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from backupd.model.errors import DamagedError

_DATA = ".ibd"
_DELTA, _META, _NEW, _DROPPED, _RENAMED = ".delta", ".meta", ".new", ".del", ".ren"
_TEMPORARY = "#sql"
_DEFINITION = ".frm"
"""Files by which a server before MySQL 8 knows a table."""


def expected_files(paths: Iterable[str]) -> frozenset[str]:
    """Files that a prepared backup has, when ``paths`` are those of the last one applied. Only what is certain: data of
    tables, what lies beside it in the folders of schemas, and the system tablespace."""
    listed = list(paths)
    unsure = {path.removesuffix(suffix) + _DATA for path in listed for suffix in (_DROPPED, _RENAMED)
              if path.endswith(suffix)}
    numbered = any(path.rpartition("/")[2].removesuffix(_DATA).isdecimal() for path in unsure)
    found = {final for path in listed for final in [_final(path)] if final and _TEMPORARY not in final}
    return frozenset(path for path in found
                     if path not in unsure and not (numbered and path.endswith(_DATA)))


def _final(path: str) -> str:
    """The name of ``path`` after prepare, "" when it is nothing that has to be there then (``#innodb_redo/...``)."""
    if path.startswith("#") or path.endswith((_META, _DROPPED, _RENAMED)):
        return ""
    name = path.removesuffix(_DELTA)
    if name.endswith(_NEW):
        name = name.removesuffix(_NEW) + _DATA
    return name if "/" in name or name.endswith(_DATA) or name.startswith("ibdata") else ""


def verify_tables(base: Path, last: Sequence[str]) -> None:
    """Does the prepared ``base`` hold the tables of the last backup applied (file list ``last``), and no dropped one?

    Raises DamagedError naming every table that is wrong.
    """
    expected = expected_files(last)
    there = {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()}
    wrong = [f"{path} is missing" for path in sorted(expected - there)]
    wrong += [f"{path} is there, though its table was dropped before the backup" for path in sorted(there - expected)
              if path.endswith(_DEFINITION) and "/" in path and _TEMPORARY not in path]
    if wrong:
        raise DamagedError(f"{len(wrong)} files of the prepared {base} are not those of the backup", wrong,
                           hint="fetch the backup again, from another destination if there is one")
