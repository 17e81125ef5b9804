"""A folder in the layout of a logical backup, made by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from backupd.engine.server.definitions import understand, write_definition
from backupd.model.table import DumpedTable, Outcome, TableName, data_path, definition_path, quote_name
from tests.support.servers.server import Server

Row = Sequence[object]
HEAD = "/*!40101 SET NAMES binary*/;\n/*!40014 SET FOREIGN_KEY_CHECKS=0*/;\n"
_ESCAPES = {0: b"\\0", 10: b"\\n", 13: b"\\r", 26: b"\\Z", 34: b'\\"', 39: b"\\'", 92: b"\\\\"}


def add_table(
    folder: Path,
    name: TableName,
    create: str,
    rows: Iterable[Row],
    *,
    files: int = 1,
    batch: int = 100,
    engine: str = "InnoDB",
    columns: Sequence[str] = (),
) -> DumpedTable:
    """Write one table, its rows dealt to ``files`` files in statements of ``batch`` rows, and what became of it."""
    everything = list(rows)
    _write(folder / definition_path(name), write_definition(understand(name, create)))
    listed = f" ({','.join(map(quote_name, columns))})" if columns else ""
    start = f"INSERT INTO {quote_name(name.table)}{listed} VALUES\n".encode()
    size = 0
    for number in range(files):
        dealt = everything[number::files]
        statements = [
            start + b",\n".join(b"(" + b",".join(map(literal, row)) + b")" for row in piece) + b";\n"
            for piece in _pieces(dealt, batch)
        ]
        size += _write(folder / data_path(name, number), HEAD.encode() + b"".join(statements))
    return DumpedTable(name, Outcome.DUMPED, engine, len(everything), size, files, "by hand")


def add_from(server: Server, folder: Path, name: TableName, *, files: int = 1, batch: int = 100) -> DumpedTable:
    """``add_table`` of a table of a server."""
    create = str(server.query(f"SHOW CREATE TABLE {name}")[0][1])
    rows = server.query(f"SELECT * FROM {name}")
    return add_table(folder, name, create, rows, files=files, batch=batch)


def literal(value: object) -> bytes:
    """As a dump writes it: quoted, with every line end escaped."""
    if value is None:
        return b"NULL"
    if isinstance(value, bytes):
        out = value
        for byte in (92, 0, 10, 13, 26, 34, 39):
            out = out.replace(bytes([byte]), _ESCAPES[byte])
        return b"'" + out + b"'"
    if isinstance(value, int | float):
        return repr(value).encode()
    return literal(str(value).encode())


def _pieces(rows: Sequence[Row], batch: int) -> Iterable[Sequence[Row]]:
    ends = itertools.chain(range(0, len(rows), batch), [len(rows)])
    return [rows[start:end] for start, end in itertools.pairwise(ends)]


def _write(path: Path, content: bytes) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return len(content)
