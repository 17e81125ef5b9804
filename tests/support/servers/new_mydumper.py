"""A stand-in for mydumper of the lines 0.16 to 1.0, which no package of these tests' system has: it writes rows, log
and metadata of a real server in their format, each table in one go. It is no proof of how the real one behaves.

``make`` writes a program into a folder; that program runs this module as a script, with the folder's name first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pymysql
from pymysql.constants import FIELD_TYPE
from pymysql.converters import conversions

_KNOBS = "knobs.json"
_SYSTEMS = "/usr/bin/python3"
_HEAD = (
    b"/*!40101 SET NAMES binary*/;\n/*!40014 SET FOREIGN_KEY_CHECKS=0*/;\n"
    b"/*!40101 SET SQL_MODE='NO_AUTO_VALUE_ON_ZERO,'*/;\n/*!40103 SET TIME_ZONE='+00:00' */;\n"
)
_NUMBERS = frozenset(
    {
        FIELD_TYPE.DECIMAL,
        FIELD_TYPE.NEWDECIMAL,
        FIELD_TYPE.TINY,
        FIELD_TYPE.SHORT,
        FIELD_TYPE.INT24,
        FIELD_TYPE.LONG,
        FIELD_TYPE.LONGLONG,
        FIELD_TYPE.FLOAT,
        FIELD_TYPE.DOUBLE,
        FIELD_TYPE.YEAR,
    }
)
_ESCAPES = {0: b"\\0", 10: b"\\n", 13: b"\\r", 26: b"\\Z", 34: b'\\"', 39: b"\\'", 92: b"\\\\"}
_SPECIAL = re.compile(rb"[\x00\n\r\x1a\"'\\]")
_SYSTEM = ("information_schema", "performance_schema", "mysql", "sys")


@dataclass(frozen=True)
class Knobs:
    """``loses``: the table in the middle of whose rows its connection is lost."""

    version: str = "0.19.3-3"
    loses: str = ""


def make(folder: Path, knobs: Knobs | None = None) -> Path:
    """The program."""
    folder.mkdir()
    folder.chmod(0o755)  # what dumps is not root
    for part in (Path(__file__), Path(pymysql.__file__).parent):
        (shutil.copytree if part.is_dir() else shutil.copy)(part, folder / part.name)
    python = _SYSTEMS if os.access(_SYSTEMS, os.X_OK) else sys.executable  # which others may run, too
    (folder / _KNOBS).write_text(json.dumps(asdict(knobs or Knobs())))
    program = folder / "mydumper"
    program.write_text(f'#!/bin/sh\nexec {python} {folder / Path(__file__).name} {folder} "$@"\n')
    program.chmod(0o755)
    return program


def _say(text: str, level: str = "Message") -> None:
    begin = "** Message: " if level == "Message" else f"\n** (mydumper:1): {level} **: "
    print(f"{begin}21:37:37.929: {text}", flush=True)


class _Dump:
    def __init__(self, knobs: Knobs, options: Mapping[str, str]) -> None:
        self._knobs = knobs
        self._client = _client_group(Path(options["defaults-file"]).read_text())
        self._out = Path(options["outputdir"])
        self._omitted = frozenset(Path(options["omit-from-file"]).read_text().splitlines())
        self._schemas = [options["database"]] if "database" in options else []
        self._statement = int(options["statement-size"])
        self._chunk = int(options["chunk-filesize"]) * 1024 * 1024
        self._errors = 0

    def run(self) -> int:
        self._out.mkdir(parents=True, exist_ok=True)
        partial = self._out / "metadata.partial"
        with ExitStack() as stack:
            metadata = stack.enter_context(partial.open("w"))
            metadata.write(
                "# Started dump at: 2026-11-22 00:00:00\n[config]\nquote-character = BACKTICK\n"
                "\n[myloader_session_variables]\nSQL_MODE='NO_AUTO_VALUE_ON_ZERO,' /*!40101\n\n"
            )
            session = stack.enter_context(self._connect())
            _run(session, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            _run(session, "START TRANSACTION /*!40108 WITH CONSISTENT SNAPSHOT */")
            _say("Thread 1: connected using MySQL connection ID 31")
            _say("Transactions started, unlocking tables")
            for schema, table in list(self._tables(session)):
                if self._knobs.loses == f"{schema}.{table}":
                    rows = self._half(session, schema, table)
                    session = stack.enter_context(self._connect())
                else:
                    rows = self._write(session, schema, table, self._read(session, schema, table))
                metadata.write(f"\n[`{schema}`.`{table}`]\nreal_table_name={table}\nrows = {rows}\n")
            metadata.write("# Finished dump at: 2026-11-22 00:00:01\n")
        partial.rename(self._out / "metadata")
        _say("Finished dump at: 2026-11-22 00:00:01")
        return 1 if self._errors else 0

    def _connect(self) -> pymysql.Connection[Any]:
        client = self._client
        made = pymysql.connect(
            unix_socket=client.get("socket"),
            host=client.get("host"),
            port=int(client.get("port", "3306")),
            user=client["user"],
            password=client["password"],
            init_command=client["init-command"],
            use_unicode=False,
            conv={kind: convert for kind, convert in conversions.items() if isinstance(kind, type)},
        )  # no decoders
        _run(made, "SET NAMES binary")
        _run(made, "SET TIME_ZONE='+00:00'")
        return made

    def _tables(self, session: pymysql.Connection[Any]) -> Iterator[tuple[str, str]]:
        schemas = self._schemas or [name for (name,) in _texts(session, "SHOW DATABASES") if name not in _SYSTEM]
        for schema in schemas:
            for name, kind in _texts(session, f"SHOW FULL TABLES FROM `{schema}`"):
                if kind == "BASE TABLE" and f"{schema}.{name}" not in self._omitted:
                    yield schema, name

    def _read(self, session: pymysql.Connection[Any], schema: str, table: str) -> list[bytes]:
        with session.cursor() as cursor:
            cursor.execute(f"SELECT /*!40001 SQL_NO_CACHE */ * FROM `{schema}`.`{table}`")
            kinds = [column[1] for column in cursor.description]
            return [_row(kinds, values) for values in cursor.fetchall()]

    def _half(self, session: pymysql.Connection[Any], schema: str, table: str) -> int:
        """What comes of a table whose connection is lost, and what is said of it."""
        rows = self._read(session, schema, table)
        written = self._write(session, schema, table, rows[: len(rows) // 2])
        _say(
            f"Thread 1: Could not read data from {schema}.{table} to write on {self._out}/{schema}.{table}.00000.sql "
            "at byte 4711: Lost connection to server during query",
            "CRITICAL",
        )
        self._errors += 1
        _say("Thread 1: Reconnecting due errors", "WARNING")
        return written

    def _write(self, session: pymysql.Connection[Any], schema: str, table: str, rows: Sequence[bytes]) -> int:
        part = 0
        _say(
            f"Thread 1: dumping data from `{schema}`.`{table}` into {self._out}/{schema}.{table}.00000.sql "
            "| Completed: 0% | Remaining tables: 1 / 1"
        )
        with ExitStack() as stack:
            file: BinaryIO | None = None
            for statement in self._statements(b"INSERT INTO `" + table.encode() + b"` VALUES", rows):
                if file is not None and file.tell() > self._chunk:
                    file.close()
                    file, part = None, part + 1
                if file is None:
                    name = f"{schema}.{table}.00000" + (f".{part:05d}" if part else "") + ".sql"
                    file = stack.enter_context((self._out / name).open("wb"))
                    file.write(_HEAD)
                file.write(statement)
        return len(rows)

    def _statements(self, insert: bytes, rows: Sequence[bytes]) -> Iterator[bytes]:
        statement, count = insert, 0
        for row in rows:
            if len(statement) + len(row) + 1 > self._statement:
                yield statement + (b"" if count else row) + b";\n"
                if not count:  # it has one of its own
                    continue
                statement, count = insert, 0
            statement += (b"," if count else b"") + row
            count += 1
        if count:
            yield statement + b";\n"


def _row(kinds: Sequence[int], values: Sequence[bytes | None]) -> bytes:
    return b"(" + b",".join(map(_value, kinds, values)) + b")\n"


def _value(kind: int, value: bytes | None) -> bytes:
    if value is None:
        return b"NULL"
    if kind in _NUMBERS:
        return value
    quoted = b'"' + _SPECIAL.sub(lambda found: _ESCAPES[found[0][0]], value) + b'"'
    return b"CONVERT(" + quoted + b" USING UTF8MB4)" if kind == FIELD_TYPE.JSON else quoted


def _run(session: pymysql.Connection[Any], statement: str) -> None:
    with session.cursor() as cursor:
        cursor.execute(statement)


def _texts(session: pymysql.Connection[Any], statement: str) -> list[tuple[str, ...]]:
    with session.cursor() as cursor:
        cursor.execute(statement)
        return [tuple(value.decode() for value in row) for row in cursor.fetchall()]


def _client_group(text: str) -> dict[str, str]:
    lines = text.split("[client]\n", 1)[1].split("\n[", 1)[0].splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name: value.strip('"').replace("\\\\", "\\") for name, _, value in pairs}


def main(arguments: Sequence[str]) -> int:
    folder, words = Path(arguments[0]), arguments[1:]
    knobs = Knobs(**json.loads((folder / _KNOBS).read_text()))
    if "--version" in words:
        print(f"mydumper v{knobs.version}, built against MySQL 8.0.41 with SSL support")
        return 0
    return _Dump(
        knobs, {name.removeprefix("--"): value for name, _, value in (word.partition("=") for word in words)}
    ).run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
