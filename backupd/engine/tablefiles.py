"""Which table a file of a data directory, or of a backup of one, belongs to: by its path alone.

A schema is a folder; a table's files bear its name, a suffix of its engine, and ``#P#...`` for a partition of it. What
belongs to no single table (``db.opt``, general tablespaces, undo, redo, the server's own schemas) has no owner. The
tables behind a full-text index are files of their own, ``FTS_<id of the table, in hex>_...``, and only a server's
dictionary tells whose they are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

from backupd.engine.filenames import decode_file_name
from backupd.engine.tables import SYSTEM_SCHEMAS
from backupd.model.table import TableName

_KEPT = 100_000
"""Answers that are remembered: every file of a backup is asked about several times."""
_FULLTEXT = re.compile(r"fts_([0-9a-f]{16})_", re.IGNORECASE)
_SHARED = ("db.opt",)
_SMALL = (".TRN", ".sdi")
"""Suffixes of tiny files that are named after something else: a trigger, a table and a number. All are taken."""
_END = re.compile(r"\.|#[A-Za-z]+#")
_IN_SCHEMA = re.compile(r"(?P<schema>[^/#]+)/(?P<file>[^/]+)")


@functools.lru_cache(maxsize=_KEPT)
def stem_of(path: str) -> str:
    """``shop/orders`` of ``shop/orders#P#old.ibd.delta``; "" for what belongs to no single table. A table's stem is the
    same in every backup of a server, and no two tables have the same one."""
    match = _IN_SCHEMA.fullmatch(path)
    if match is None or match["schema"] in SYSTEM_SCHEMAS:
        return ""
    file = match["file"]
    if file in _SHARED or file.endswith(_SMALL) or _FULLTEXT.match(file):
        return ""
    end = _END.search(file, 1)  # a leading # is that of #sql..., which is none of the names below
    return f"{match['schema']}/{file[:end.start()] if end else file}"


@functools.lru_cache(maxsize=_KEPT)
def table_of(stem: str) -> TableName:
    """The table of a ``stem_of``."""
    schema, _, table = stem.partition("/")
    return TableName(decode_file_name(schema), decode_file_name(table))


def owner_of(path: str) -> TableName | None:
    """The table that ``path`` (relative to the data directory, with forward slashes) belongs to."""
    stem = stem_of(path)
    return table_of(stem) if stem and "/#" not in stem else None


def left_behind(paths: Iterable[str]) -> dict[str, str]:
    """Stems of tablespaces with a DATA DIRECTORY whose table was renamed into another schema, and the stem that it has
    now: MariaDB moves the definition only (see ``datafiles``)."""
    listed = [path for path in paths if stem_of(path)]
    defined = {stem_of(path) for path in listed if path.endswith(".frm")}
    links = {stem_of(path) for path in listed if path.endswith(".isl")} - defined
    if not links:
        return {}
    bare = defined - {stem_of(path) for path in listed if not path.endswith(".frm")}
    found: dict[str, str] = {}
    for link in links:
        able = [stem for stem in bare if stem.partition("/")[2] == link.partition("/")[2]]
        if len(able) == 1:
            found[link] = able[0]
    return found


def fulltext_id(path: str) -> int | None:
    """The number of the table whose full-text index ``path`` is part of, as InnoDB numbers tables; None for others."""
    match = _FULLTEXT.match(path.rpartition("/")[2])
    return int(match[1], 16) if match else None


def space_id(head: bytes) -> int:
    """Of a tablespace whose file begins with ``head`` (64 bytes are enough): the number that follows it through every
    RENAME, and is new after TRUNCATE and rebuilds."""
    return int.from_bytes(head[34:38])


def space_id_of_meta(text: str) -> int | None:
    """The same, from the ``.meta`` beside an increment's pages."""
    match = re.search(r"^space_id = (\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


_DICTIONARY_PAGE, _OF_SYSTEM, _HIGHEST = 7, 6, 38 + 24
"""FIL_PAGE_TYPE_SYS, and DICT_HDR_MAX_SPACE_ID of the page with the dictionary's header (dict0boot.h)."""


def highest_space_id(system: Path, page_size: int) -> int | None:
    """The highest number given to a tablespace when this page of ``system`` (the first file of the system tablespace,
    not encrypted) was last written; None where it does not look like that page."""
    try:
        with system.open("rb") as file:
            file.seek(_DICTIONARY_PAGE * page_size)
            page = file.read(_HIGHEST + 4)
    except OSError:
        return None
    if int.from_bytes(page[4:8]) != _DICTIONARY_PAGE or int.from_bytes(page[24:26]) != _OF_SYSTEM:
        return None
    return int.from_bytes(page[_HIGHEST:])
