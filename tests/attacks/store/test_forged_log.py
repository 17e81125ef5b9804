"""Archived binary logs that somebody forged: what the statements in them reach when they are replayed, and whether
people who restore by hand replay them at all."""

from __future__ import annotations

import contextlib
import shutil
import zlib
from pathlib import Path

import pytest

from backupd.engine.binlog.events import CRC_SIZE, HEADER, QUERY
from backupd.model.binlog import MAGIC, Ending, ReplayMethod
from backupd.model.errors import BackupdError
from backupd.transfer.records.authenticity import Signing, sign
from restore.runbook.shared_steps import signature_check
from tests.support.keys import Keys
from tests.support.restores.rolling import MARIADB, asking, empty_copy, first, here, logs, roll, running_copy
from tests.support.restores.stored_segments import transaction
from tests.support.stores.folders import runs_as_root
from tests.unit.restore.runbook.test_logs import Hand

_TEXT = "INSERT INTO d.leak VALUES ('" + "x" * 300 + "')"


def _forge(log: Path, before: str, after: str) -> int:
    """Put ``after`` into the place of a statement, with right checksums. Gives how often."""
    data = bytearray(log.read_bytes())
    at, found = len(MAGIC), 0
    while at < len(data):
        _when, kind, _id, length, _end, _flags = HEADER.unpack(data[at : at + HEADER.size])
        begin = data.find(before.encode(), at, at + length)
        if kind == QUERY and begin >= 0:
            data[begin : begin + len(before)] = after.encode().ljust(len(before))
            body = data[at : at + length - CRC_SIZE]
            data[at + length - CRC_SIZE : at + length] = zlib.crc32(body).to_bytes(CRC_SIZE, "little")
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
        with (
            running_copy(MARIADB, source, empty_copy(MARIADB, short_tmp / "c")) as (server, info),
            asking(server) as ask,
        ):
            with contextlib.suppress(BackupdError):
                roll(server, info, what, method=ReplayMethod.PIPE)
            assert [row[0] for row in ask("SELECT * FROM d.leak") if "SECRET" in row[0]] == []


def test_by_hand_nothing_is_replayed_that_signer_has_not_signed_for_that_very_place(keys: Keys, tmp_path: Path) -> None:
    """Who has the public key seals other logs, with a description in which everything fits together; or takes true ones
    from elsewhere."""
    hand = Hand(keys, tmp_path, signed=True)
    hand.script = f"{signature_check()}{hand.script}"
    signer = Signing(keys.secret_home, keys.fingerprint, (keys.fingerprint,))
    hand.branch()
    first = hand.store_segment(1, 0, 1000, Ending.ROTATED, transaction(1, 200, 300, -60), before="0-1-0", after="0-1-1")
    second = hand.store_segment(2, 0, 400, Ending.OPEN, transaction(3, 256, 400, 20), before="0-1-1", after="0-1-3")
    descriptions = sorted(tmp_path.glob("repository/binlogs/**/*.json"))
    assert len(descriptions) == 3
    for one in descriptions:
        one.with_name(f"{one.name}.sig").write_bytes(sign(signer, one.read_bytes()))
    asked = {"SIGNER": keys.fingerprint}
    assert hand.chosen("latest", **asked) == "1 2 from 300 to"

    (second / "segment.json").unlink()
    hand.store_segment(2, 0, 400, Ending.OPEN, transaction(9, 256, 400, 20), before="0-1-1", after="0-1-9")
    assert f"STOP: {second}/segment.json is not signed, or it was altered" in hand.refused("latest", **asked)
    (second / "segment.json.sig").unlink()
    assert f"STOP: {second}/segment.json is not signed" in hand.refused("latest", **asked)
    for name in ("segment.json", "segment.json.sig"):
        shutil.copy(first / name, second / name)
    assert f"STOP: {second}/segment.json is that of other logs" in hand.refused("latest", **asked)
    branch = next(one for one in descriptions if one.name == "branch.json")
    branch.write_bytes(branch.read_bytes().replace(b'"first"', b'"reset"'))
    assert f"STOP: {branch} is not signed, or it was altered" in hand.refused("latest", **asked)
