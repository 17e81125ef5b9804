"""Replays of logs whose beginning was not fetched. The oracle: the source when it is quiet."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.binlog.events import clear_flag
from backupd.engine.binlog.hole import hole_of
from backupd.model.binlog import ReplayLeg, ReplayMethod, ReplaySpec, Stop, same
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Position
from backupd.process.run_context import RunContext
from backupd.transfer import log_segments
from backupd.transfer.records import segment_documents
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.segment_documents import SegmentHeader
from restore.fetch.sources import Sources
from restore.replay.logs import fetch_logs
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys
from tests.support.logs.archived_logs import CountedDestination, seal_log
from tests.support.restores.rolling import (
    Kind,
    Logs,
    asking,
    both,
    content,
    empty_copy,
    first,
    here,
    logs,
    roll,
    running_copy,
    with_hole,
)
from tests.support.restores.stored_segments import BASE, branch
from tests.support.servers.server import Server

BOTH = both()
CHECKSUMS = pytest.mark.parametrize("checksum", ["CRC32", "NONE"])
MIB = 1 << 20
SCHEMA = (
    "CREATE DATABASE d",
    "CREATE TABLE d.t (id INT PRIMARY KEY, n INT)",
    "CREATE TABLE d.large (id INT AUTO_INCREMENT PRIMARY KEY, b LONGBLOB)",
)


def _fill(source: Server) -> None:
    """4 MiB of log in many transactions."""
    source.execute(*SCHEMA)
    if source.query("SHOW GLOBAL VARIABLES LIKE 'gtid_mode'") == [("gtid_mode", "ON")]:  # of MySQL
        source.execute("SET SESSION gtid_next = 'AUTOMATIC:tagged'", "INSERT INTO d.t VALUES (500, 0)")
    with source.connect() as session, session.cursor() as cursor:
        for number in range(60):
            cursor.execute("INSERT INTO d.t VALUES (%s, 0)", (number,))
            cursor.execute("INSERT INTO d.large (b) VALUES (%s)", (os.urandom(MIB // 15),))
        session.commit()


def _change(source: Server) -> None:
    source.execute(
        "UPDATE d.t SET n = n + id",
        "DELETE FROM d.t WHERE id % 7 = 0",
        "CREATE TRIGGER d.g AFTER INSERT ON d.t FOR EACH ROW UPDATE d.large SET b = 'seen' WHERE id = NEW.id",
        "INSERT INTO d.t VALUES (1000, 1), (7, 7)",
        "FLUSH BINARY LOGS",
        "CREATE TABLE d.late AS SELECT id, n FROM d.t",
        "UPDATE d.late SET n = 5 WHERE id = 3",
    )


def _options(kind: Kind, checksum: str, others: Mapping[str, str] = {}) -> dict[str, str]:
    return {"binlog_checksum": checksum, "max_allowed_packet": "64M", **others}


@BOTH
@CHECKSUMS
@pytest.mark.parametrize("method", list(ReplayMethod))
def test_a_replay_that_begins_behind_a_hole_gives_what_the_source_has(
    kind: Kind, checksum: str, method: ReplayMethod, short_tmp: Path
) -> None:
    with kind.make(options=_options(kind, checksum)) as source:
        _fill(source)
        middle = here(kind, source)
        _change(source)
        end, wanted = here(kind, source), content(kind, source.query)
        with running_copy(kind, source, empty_copy(kind, short_tmp / "c"), max_allowed_packet="64M") as (server, info):
            roll(server, info, logs(source, short_tmp / "all", first(kind), middle))
            whole = logs(source, short_tmp / "rest", middle.position, end)
            lazy = with_hole(whole, short_tmp / "lazy")
            hole = hole_of(lazy.files[0])
            assert hole is not None
            assert hole.size > 3 * MIB
            assert lazy.files[0].stat().st_blocks * 512 < whole.files[0].stat().st_size - hole.size + MIB // 4
            got = roll(server, info, lazy, method=method)
            with asking(server) as ask:
                assert content(kind, ask) == wanted
            assert same(got.gtids, end.gtids, mariadb=kind.mariadb)
            assert server.log_tail(400).count("ERROR") == 0


PART = 128 * 1024


def _fill_more(source: Server) -> None:
    with source.connect() as session, session.cursor() as cursor:
        for _number in range(20):
            cursor.execute("INSERT INTO d.large (b) VALUES (%s)", (os.urandom(MIB // 15),))
        session.commit()
    source.execute("FLUSH BINARY LOGS", "CREATE TABLE d.late AS SELECT id, n FROM d.t")


class Archive:
    """The logs of a source at two destinations, in parts of 128 KiB, and what is read there."""

    def __init__(self, source: Server, folder: Path, keys: Keys, *, cut: int | None = None) -> None:
        self.files = [source.datadir / str(row[0]) for row in source.query("SHOW BINARY LOGS")]
        self.branch = replace(
            branch(), basename="binlog", flavour="mariadb" if "maria" in source.program().lower() else "mysql"
        )
        self.folder, self.keys = folder, keys
        self.destinations = [
            CountedDestination(FilesystemDestination(name, folder / name)) for name in ("local", "away")
        ]
        self.headers: list[SegmentHeader] = []
        for one in self.destinations:
            one.initialise(BASE)
        for number, path in enumerate(self.files, start=1):
            data = clear_flag(path.read_bytes())
            for start, end in [(0, cut), (cut, len(data))] if cut and number == 1 else [(0, len(data))]:
                self.put(number, data, start or 0, end)

    def put(self, number: int, data: bytes, start: int, end: int | None) -> None:
        sealer = Sealer((self.keys.fingerprint,), self.keys.public_home)
        with tempfile.TemporaryDirectory() as base:
            sealed = seal_log(Path(base) / "sealed", sealer, self.branch, number, data, start=start, end=end)
            for one in self.destinations:
                self.headers.append(log_segments.put(one, sealed, now=datetime.now(UTC)))

    def fetch(self, folder: Path, start: Position, stop: Stop) -> tuple[Logs, int]:
        """The logs, and how many bytes were read for them."""
        first_number, last_number = (int(one.file.rpartition(".")[2]) for one in (start, stop))
        wanted = {
            header.segment.key: None
            for header in self.headers
            if first_number <= header.segment.number <= last_number
            and (header.segment.number, header.segment.start) < (last_number, stop.pos)
        }
        leg = ReplayLeg(tuple(wanted), start, stop)
        spec = ReplaySpec((leg,), ReplayMethod.APPLIER, "", 0, 0, (1,))
        for one in self.destinations:
            one.read.clear()
        sources = Sources((), Unsealer(self.keys.secret_home), self.destinations)
        (files,) = fetch_logs("shop", spec, sources, folder, RunContext()).legs
        return Logs(files, start, stop), sum(one.read.total() for one in self.destinations)


@BOTH
@CHECKSUMS
def test_only_the_parts_that_are_replayed_are_fetched(
    kind: Kind, checksum: str, short_tmp: Path, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_documents, "PART_SIZE", PART)
    with kind.make(options=_options(kind, checksum)) as source:
        _fill(source)
        middle = here(kind, source)
        source.execute("UPDATE d.t SET n = n + id", "DELETE FROM d.t WHERE id % 7 = 0")
        near, little = here(kind, source), content(kind, source.query)
        _fill_more(source)
        end, wanted = here(kind, source), content(kind, source.query)
        source.execute("FLUSH BINARY LOGS")
        archive = Archive(source, tmp_path, keys)
        with running_copy(kind, source, empty_copy(kind, short_tmp / "c"), max_allowed_packet="64M") as (server, info):
            _all, everything = archive.fetch(short_tmp / "all", first(kind), middle)
            assert everything > 4 * MIB
            roll(server, info, _all)
            lazy, read = archive.fetch(short_tmp / "near", middle.position, near)
            assert read < 2 * PART + near.pos - middle.pos + MIB // 16
            assert hole_of(lazy.files[0]) is not None
            assert same(roll(server, info, lazy).gtids, near.gtids, mariadb=kind.mariadb)
            with asking(server) as ask:
                assert content(kind, ask) == little
            rest, read = archive.fetch(short_tmp / "rest", near.position, end)
            assert read < 3 * PART + sum(path.stat().st_size for path in rest.files) - near.pos + MIB // 16
            assert same(roll(server, info, rest).gtids, end.gtids, mariadb=kind.mariadb)
            with asking(server) as ask:
                assert content(kind, ask) == wanted


@BOTH
def test_what_is_left_out_and_who_may_not_begin_behind_a_hole(kind: Kind, short_tmp: Path) -> None:
    """Also with transactions that have no GTID."""
    modes: dict[str, Any] = {} if kind.mariadb else {"gtid_mode": "OFF", "enforce_gtid_consistency": "OFF"}
    with kind.make(options=_options(kind, "CRC32", modes)) as source:
        _fill(source)
        source.execute("INSERT INTO d.t VALUES (2000, 0)")
        middle = here(kind, source)
        source.execute("CREATE TABLE d.other (id INT)", "INSERT INTO d.other VALUES (1)", "DELETE FROM d.other")
        source.execute("UPDATE d.t SET n = 2 WHERE id = 2000")
        end, wanted = here(kind, source), content(kind, source.query)
        copied = empty_copy(kind, short_tmp / "c")
        with running_copy(kind, source, copied, max_allowed_packet="64M", **modes) as (server, info):
            lazy = with_hole(logs(source, short_tmp / "rest", middle.position, end), short_tmp / "lazy")
            for start in (first(kind), replace(middle.position, pos=lazy.start.pos - 1)):
                with pytest.raises(RefusedError, match="was not fetched"):
                    roll(server, info, replace(lazy, start=start))
            if not kind.mariadb:
                roll(server, info, logs(source, short_tmp / "all", first(kind), middle))
                assert roll(server, info, lazy).transactions == 4
            else:
                with pytest.raises(RefusedError, match="logs begin after"):
                    roll(server, info, replace(lazy, start=Position("", 0, "")))
                roll(server, info, logs(source, short_tmp / "all", first(kind), middle))
                domain, own, number = middle.gtids.split("-")
                without = [f"{domain}-{own}-{int(number) + more}" for more in (2, 3)]
                assert roll(server, info, lazy, exclude=without).transactions == 2
            with asking(server) as ask:
                assert content(kind, ask) == wanted
