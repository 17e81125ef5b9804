"""Archived binary logs that somebody forged: what the statements in them reach when they are replayed."""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

import pytest

from backupd.engine.binlogevents import CRC_SIZE, HEADER, QUERY
from backupd.model.binlog import MAGIC, ReplayMethod
from backupd.model.errors import BackupdError
from tests.restore.rolling import MARIADB, asking, empty_copy, first, here, logs, roll, running_copy
from tests.support.places import runs_as_root

_TEXT = "INSERT INTO d.leak VALUES ('" + "x" * 300 + "')"


def _forge(log: Path, before: str, after: str) -> int:
    """Put ``after`` into the place of a statement, with right checksums. Gives how often."""
    data = bytearray(log.read_bytes())
    at, found = len(MAGIC), 0
    while at < len(data):
        _when, kind, _id, length, _end, _flags = HEADER.unpack(data[at:at + HEADER.size])
        begin = data.find(before.encode(), at, at + length)
        if kind == QUERY and begin >= 0:
            data[begin:begin + len(before)] = after.encode().ljust(len(before))
            body = data[at:at + length - CRC_SIZE]
            data[at + length - CRC_SIZE:at + length] = zlib.crc32(body).to_bytes(CRC_SIZE, "little")
            found += 1
        at += length
    log.write_bytes(data)
    return found


@pytest.mark.skipif(not runs_as_root(), reason="only root can have files that others cannot read")
def test_a_statement_of_the_log_has_no_file_of_roots_sent_by_the_client(short_tmp: Path) -> None:
    """The client sends what LOAD DATA LOCAL names, and was root."""
    secret = short_tmp / "secret"
    secret.write_text("TOP-SECRET\n")
    secret.chmod(0o600)
    with MARIADB.make(options={"binlog_format": "STATEMENT"}) as source:
        source.execute("CREATE DATABASE d", "CREATE TABLE d.leak (t TEXT)", _TEXT)
        end = here(MARIADB, source)
        what = logs(source, short_tmp / "logs", first(MARIADB), end)
        statement = f"LOAD DATA LOCAL INFILE '{secret}' INTO TABLE d.leak"
        assert sum(_forge(path, _TEXT, statement) for path in what.files) == 1
        with running_copy(MARIADB, source, empty_copy(MARIADB, short_tmp / "c")) as (server, info), \
                asking(server) as ask:
            with contextlib.suppress(BackupdError):
                roll(server, info, what, method=ReplayMethod.PIPE)
            assert [row[0] for row in ask("SELECT * FROM d.leak") if "SECRET" in row[0]] == []
