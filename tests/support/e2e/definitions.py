"""Statements that change definitions, each once, and a tool that stands still at a moment of its work."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.e2e.house import Done, House
from tests.support.sample import spoken
from tests.support.servers.backups import the_tool
from tests.support.servers.server import Server

_GATE = """\
import pathlib, sys, time
folder, stops, words = pathlib.Path(sys.argv[1]), [int(stop) for stop in sys.argv[2].split()], sys.argv[3:]
waits = [word.encode() for word in words]
done, last = 0, b""
while block := sys.stdin.buffer.read1(65536):
    sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    done += len(block)
    last = last[-100:] + block
    waits = [word for word in waits if word not in last]
    while stops and done >= stops[0] and not waits:
        (folder / f"at-{stops[0]}").touch()
        while (folder / f"at-{stops[0]}").exists():
            time.sleep(0.01)
        stops.pop(0)
"""
ENGINES = ("MyISAM", "Aria", "InnoDB")


class Gate:
    """A mariadb-backup (or what ``program`` names, at ``path``) whose stream stands still after so many bytes
    (``stops``), and not before the names ``after`` went by, until it is let through."""

    def __init__(
        self, base: Path, *stops: int, after: tuple[str, ...] = (), program: str = "mariadb-backup", path: str = ""
    ) -> None:
        self._base, self._stops = base, stops
        base.mkdir()
        base.chmod(0o777)  # what waits is not root, and in no sandbox: there it could not say so
        python = shutil.which("python3", path="/usr/bin") or sys.executable
        (base / "gate.py").write_text(_GATE)
        self.tool = base / program
        real = path or the_tool().tool.path
        words = f"'{' '.join(map(str, stops))}' {' '.join(after)}"
        self.tool.write_text(
            "#!/bin/bash\nset -o pipefail\n"
            f'case "$*" in *--version*) [ -w {base} ] || exit 3;; esac\n'
            f'case "$*" in *--stream*) {real} "$@" | {python} {base}/gate.py {base} {words};;'
            f' *) exec {real} "$@";; esac\n'
        )
        self.tool.chmod(0o755)

    def run(self, house: House, *args: str, at: dict[int, Callable[[], None]]) -> Done:
        """``backupd ARGS``; when the first run of the tool has given so many bytes, call what belongs to them."""
        waiting = dict(at)
        programs = house.programs
        house.programs = {**programs, self.tool.name: str(self.tool)}
        house.write()
        with house.popen(*args) as process:
            answer: list[tuple[str, str]] = []
            reader = threading.Thread(target=lambda: answer.append(process.communicate()))
            reader.start()
            while reader.is_alive():
                for stop in self._stops:
                    mark = self._base / f"at-{stop}"
                    if mark.exists():
                        waiting.pop(stop, lambda: None)()
                        mark.unlink()
                time.sleep(0.01)
            reader.join()
        house.programs = programs
        house.write()
        return Done(process.returncode, *answer[0])


def tables(server: Server, schema: str, engine: str) -> list[str]:
    """What there is before, in the words of the server."""
    return spoken(server, *_tables(schema, engine), *(_sequences(schema, engine) if server.sequences else ()))


def changes(
    server: Server,
    schema: str,
    engine: str,
    *,
    swaps: bool = True,
    rebuilds: bool = True,
    discards: bool = True,
    exchanges: bool = True,
) -> list[str]:
    """Every statement once, but for those that this server does not know. ``swaps``: tables that take each other's
    names, too; ``rebuilds``: what rebuilds a table in place; ``discards``: leave a table without its tablespace;
    ``exchanges``: trade partitions."""
    other = {"MyISAM": "InnoDB", "Aria": "MyISAM", "InnoDB": "Aria" if server.sequences else "MyISAM"}[engine]
    found = [
        *(_swaps(schema) if swaps else ()),
        *_changes(schema, engine, other),
        *(_rebuilds(schema) if rebuilds else ()),
    ]
    if engine != "Aria":  # of which mariadb-backup fails, and is run again
        found += _partitions(schema)
    if server.sequences:
        found += [*_only_mariadb(schema, engine), *_again(schema, engine, replace=True)]
    else:
        found += _again(schema, engine, replace=False)
    if engine == "InnoDB":
        found += [*_fulltext(schema), *(_discards(schema) if discards else ())]
    if exchanges:
        found.append(f"ALTER TABLE {schema}.traded EXCHANGE PARTITION p1 WITH TABLE {schema}.trade")
    return spoken(server, *found)


def _tables(schema: str, engine: str) -> Iterator[str]:
    yield f"CREATE DATABASE {schema} CHARACTER SET utf8mb4"
    yield f"CREATE DATABASE {schema}_other"
    yield f"USE {schema}"
    for name in (
        "dropped",
        "made_again",
        "replaced",
        "swap1",
        "swap2",
        "cycle1",
        "cycle2",
        "cycle3",
        "moved",
        "emptied",
        "converted",
        "rebuilt",
        "instant",
        "indexed",
        "pattern",
        "old",
        "handed",
        "hand",
        "renamed",
        "optimised",
        "`größe 1`",
    ):
        yield f"CREATE TABLE {schema}.{name} (i INT, t VARCHAR(40)) ENGINE={engine}"
        yield f"INSERT INTO {schema}.{name} SELECT seq, '{name.strip('`')} of {engine}' FROM seq_1_to_30"
    for name in ("parted", "merged", "traded"):
        yield (
            f"CREATE TABLE {schema}.{name} (i INT, t VARCHAR(40)) ENGINE={engine} PARTITION BY RANGE (i) ("
            "PARTITION p0 VALUES LESS THAN (10), PARTITION p1 VALUES LESS THAN (20), "
            "PARTITION p2 VALUES LESS THAN MAXVALUE)"
        )
        yield f"INSERT INTO {schema}.{name} SELECT seq, '{name}' FROM seq_1_to_30"
    yield f"CREATE TABLE {schema}.trade (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}.trade VALUES (12, 'of trade')"
    yield f"CREATE VIEW {schema}.seen AS SELECT i FROM {schema}.pattern"
    yield f"CREATE DATABASE {schema}_again"
    yield f"CREATE TABLE {schema}_again.a (i INT) ENGINE={engine}"
    yield f"CREATE VIEW {schema}_again.v AS SELECT i FROM {schema}_again.a"
    yield f"CREATE TABLE {schema}_again.gone (i INT) ENGINE={engine}"
    yield f"CREATE DATABASE {schema}_gone"
    yield f"CREATE TABLE {schema}_gone.a (i INT) ENGINE={engine}"


def _sequences(schema: str, engine: str) -> Iterator[str]:
    yield f"CREATE SEQUENCE {schema}.numbers ENGINE={engine}"


def _swaps(schema: str) -> Iterator[str]:
    yield f"RENAME TABLE {schema}.swap1 TO {schema}.t, {schema}.swap2 TO {schema}.swap1, {schema}.t TO {schema}.swap2"
    yield (
        f"RENAME TABLE {schema}.cycle1 TO {schema}.t, {schema}.cycle2 TO {schema}.cycle1, "
        f"{schema}.cycle3 TO {schema}.cycle2, {schema}.t TO {schema}.cycle3"
    )


def _changes(schema: str, engine: str, other: str) -> Iterator[str]:
    row = f"VALUES (1, 'anew, {engine}')"
    yield f"DROP TABLE {schema}.dropped"
    yield f"DROP TABLE {schema}.made_again"
    yield f"CREATE TABLE {schema}.made_again (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}.made_again {row}"
    yield f"RENAME TABLE {schema}.moved TO {schema}_other.moved"
    yield f"TRUNCATE TABLE {schema}.emptied"
    yield f"INSERT INTO {schema}.emptied {row}"
    yield f"ALTER TABLE {schema}.converted ENGINE={other}"
    yield f"CREATE TABLE {schema}.alike LIKE {schema}.pattern"
    yield f"CREATE TABLE {schema}._new (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}._new {row}"
    yield f"RENAME TABLE {schema}.old TO {schema}._old, {schema}._new TO {schema}.old"
    yield f"RENAME TABLE {schema}.handed TO {schema}._handed, {schema}.hand TO {schema}.handed"
    yield f"RENAME TABLE {schema}.renamed TO {schema}.renamed_1"
    yield f"DROP TABLE {schema}._old"
    yield f"RENAME TABLE {schema}.`größe 1` TO {schema}.`größe.2`"
    yield f"ALTER TABLE {schema}.parted TRUNCATE PARTITION p0"
    yield f"CREATE OR REPLACE VIEW {schema}.seen AS SELECT t FROM {schema}.pattern"
    yield f"CREATE VIEW {schema}.also_seen AS SELECT i, t FROM {schema}.pattern"
    yield f"CREATE TRIGGER {schema}.told BEFORE INSERT ON {schema}.pattern FOR EACH ROW SET NEW.t = 'told'"
    yield f"DROP DATABASE {schema}_gone"
    yield f"DROP DATABASE {schema}_again"
    yield f"CREATE DATABASE {schema}_again"
    yield f"CREATE TABLE {schema}_again.a (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}_again.a {row}"
    yield f"CREATE VIEW {schema}_again.v AS SELECT t FROM {schema}_again.a"
    yield f"CREATE TRIGGER {schema}_again.told BEFORE INSERT ON {schema}_again.a FOR EACH ROW SET NEW.t = 'told'"
    yield f"CREATE DATABASE {schema}_new"
    yield f"CREATE TABLE {schema}_new.a (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}_new.a {row}"


def _rebuilds(schema: str) -> Iterator[str]:
    yield f"ALTER TABLE {schema}.rebuilt MODIFY t VARCHAR(60), FORCE"
    yield f"ALTER TABLE {schema}.instant ADD COLUMN z INT DEFAULT 7"
    yield f"CREATE INDEX it ON {schema}.indexed (t)"
    yield f"DROP INDEX it ON {schema}.indexed"
    yield f"ALTER TABLE {schema}.renamed_1 ADD COLUMN z INT DEFAULT 3 FIRST, FORCE"
    yield f"OPTIMIZE TABLE {schema}.optimised"


def _partitions(schema: str) -> Iterator[str]:
    yield (
        f"ALTER TABLE {schema}.parted REORGANIZE PARTITION p2 INTO"
        " (PARTITION p2 VALUES LESS THAN (25), PARTITION p3 VALUES LESS THAN MAXVALUE)"
    )
    yield f"ALTER TABLE {schema}.merged DROP PARTITION p1"


def _again(schema: str, engine: str, *, replace: bool) -> Iterator[str]:
    if not replace:
        yield f"DROP TABLE {schema}.replaced"
    yield f"CREATE {'OR REPLACE ' if replace else ''}TABLE {schema}.replaced (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}.replaced VALUES (1, 'anew, {engine}')"


def _only_mariadb(schema: str, engine: str) -> Iterator[str]:
    yield f"ALTER TABLE {schema}.instant RENAME COLUMN t TO u"
    yield f"CREATE TABLE {schema}.chosen ENGINE={engine} SELECT * FROM {schema}.pattern WHERE i < 9"
    yield f"CREATE OR REPLACE SEQUENCE {schema}.numbers START WITH 100 ENGINE={engine}"
    yield f"CREATE SEQUENCE {schema}.more_numbers ENGINE={engine}"
    yield (f"CREATE TABLE {schema}.versions (i INT) ENGINE={engine} WITH SYSTEM VERSIONING")
    yield f"INSERT INTO {schema}.versions VALUES (1), (2)"
    yield f"DELETE FROM {schema}.versions WHERE i = 1"


def _fulltext(schema: str) -> Iterator[str]:
    yield f"CREATE TABLE {schema}.words (i INT PRIMARY KEY, t TEXT, FULLTEXT (t)) ENGINE=InnoDB"
    yield f"INSERT INTO {schema}.words VALUES (1, 'full of text')"
    yield f"CREATE TABLE {schema}_again.words (i INT PRIMARY KEY, t TEXT, FULLTEXT (t)) ENGINE=InnoDB"
    yield f"INSERT INTO {schema}_again.words VALUES (1, 'full of text')"


def _discards(schema: str) -> Iterator[str]:
    yield f"CREATE TABLE {schema}.emptyspace (i INT) ENGINE=InnoDB"
    yield f"ALTER TABLE {schema}.emptyspace DISCARD TABLESPACE"
