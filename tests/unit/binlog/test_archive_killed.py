from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.transfer import log_segments
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.segment_documents import SegmentHeader
from storage.filesystem import FilesystemDestination
from tests.support.dice import rounds, thrown
from tests.support.keys import Keys
from tests.support.logs.archived import Books, Clock, House
from tests.support.logs.real_logs import real_logs


@pytest.mark.campaign
def test_a_process_killed_at_random_leaves_every_log_whole(short_tmp: Path, keys: Keys) -> None:
    dice = thrown("killed archive")
    clock = Clock()
    clock.now = datetime.now(UTC)
    disk = FilesystemDestination("disk", short_tmp / "d")
    disk.initialise(clock())
    house = House(
        short_tmp / "spool",
        [disk],
        clock,
        sealer=Sealer([keys.fingerprint], keys.public_home),
        books=Books(forgotten=True),
    )
    logs = real_logs()
    for turn in range(rounds(6)):
        log = logs[turn % len(logs)]
        if turn < len(logs):
            house.grow(log, dice.choice(log.cuts))
            if turn:
                house.end(logs[turn - 1])
        with subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.logs.archiving",
                str(short_tmp / "spool"),
                str(keys.public_home),
                keys.fingerprint,
                str(disk.root),
            ],
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"archiving\n"
            time.sleep(dice.uniform(0, 0.25))  # not for synchronisation: the moment of the kill is what is random
            assert process.poll() is None
            process.kill()
        house.spool = type(house.spool)(house.spool.folder)
    house.end(logs[-1])
    # Each process had a recorder of its own; the one here is told of what the last one needs only.
    with house.archiver() as archiver:
        for _ in range(10):
            assert not archiver.step(clock.move(400)).trouble
    assert not house.spool.files()
    headers = [item for item in log_segments.headers(disk) if isinstance(item, SegmentHeader)]
    assert [header.segment.key for header in headers] == [house.key(log) for log in logs]
    for header, log in zip(headers, logs, strict=True):
        target = short_tmp / log.name
        log_segments.fetch(disk, header, Unsealer(keys.secret_home), target)
        assert target.read_bytes() == log.archived
