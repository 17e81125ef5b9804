"""Everything that can die, dies: no manifest, no usable row, the culprit named, nothing left after the next run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.dice import SOAK, rounds, thrown
from tests.support.e2e.house import SERVER, House
from tests.support.keys import make_home, make_key, stop_agent
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer

WRAPPER = """#!/bin/bash
# Stands before the real {program} in PATH and dies after {limit} bytes of its output.
case " $* " in *" {only} "*) ;; *) exec {real} "$@" ;; esac
exec {python} - "$@" <<'PROGRAM'
import os, signal, subprocess, sys
limit, seen = {limit}, 0
child = subprocess.Popen(["{real}", *sys.argv[1:]], stdout=subprocess.PIPE)
while piece := child.stdout.read1(65536):
    piece = piece[: limit - seen]
    seen += len(piece)
    os.write(1, piece)
    if seen >= limit:
        child.send_signal(signal.SIGKILL)
        child.wait()
        os.kill(os.getpid(), signal.SIGKILL)
sys.exit(child.wait())
PROGRAM
"""


def wrap(house: House, program: str, *, only: str, limit: int) -> None:
    """Put a program of the same name before the real one that kills itself after ``limit`` bytes."""
    folder = house.base / "bin"
    folder.mkdir(exist_ok=True)
    real = shutil.which(program)
    assert real is not None
    path = folder / program
    path.write_text(
        WRAPPER.format(
            program=program,
            only=only,
            limit=limit,
            real=real,
            python=shutil.which("python3", path="/usr/bin") or sys.executable,
        )
    )
    path.chmod(0o755)
    house.env["PATH"] = f"{folder}:{os.environ['PATH']}"


def unwrap(house: House) -> None:
    house.env.pop("PATH", None)


def stream_size(house: House) -> int:
    """Bytes that the tool itself streams for this server."""
    done = subprocess.run(
        f"mariadb-backup --defaults-file={house.server.client_file()} --backup --stream=xbstream "
        f"--target-dir={house.base}/probe 2>/dev/null | wc -c",
        shell=True,
        check=True,
        capture_output=True,
    )
    return int(done.stdout)


def assert_nothing_happened(house: House, first: dict[str, object]) -> None:
    """Only the first backup exists, whole; after one more run nothing is left of the failed one."""
    assert [record["id"] for record in house.backups()] == [first["id"]]
    assert [path.parent.name for path in house.repository.rglob("manifest.json")] == [first["id"]]
    assert house.ok("verify", SERVER)["damages"] == []
    second = house.backup()
    assert house.fsck() == []
    assert {path.parent.name for path in house.repository.rglob("manifest.json")} == {first["id"], second["id"]}
    assert not list(house.repository.rglob("*.partial"))


@pytest.mark.parametrize(
    "share", [pytest.param(0.1, marks=SOAK), 0.5, pytest.param(1.0, marks=SOAK)], ids=["10 %", "50 %", "last byte"]
)
def test_the_tool_killed_on_its_way_leaves_nothing(house: House, share: float) -> None:
    first = house.backup()
    size = stream_size(house)
    # The stream of a second run may be a little longer or shorter: the last bytes are those of an end marker.
    wrap(house, "mariadb-backup", only="--backup", limit=int(size * share) - (20 if share == 1.0 else 0))
    done = house.fails("backup", SERVER, "--kind", "full")
    assert "mariadb-backup" in done.err
    unwrap(house)
    assert_nothing_happened(house, first)


def test_gpg_killed_while_sealing_leaves_nothing(own_house: House) -> None:
    house = own_house
    first = house.backup()
    house.server.execute(
        "CREATE DATABASE IF NOT EXISTS fresh",
        "CREATE OR REPLACE TABLE fresh.noise "
        "SELECT seq, SHA2(RAND(), 512) AS a, SHA2(RAND(), 512) AS b FROM fresh.seq_1_to_20000",
    )
    wrap(house, "gpg", only="--encrypt", limit=50_000)
    done = house.fails("backup", SERVER, "--kind", "full")
    assert "gpg" in done.err
    unwrap(house)
    assert_nothing_happened(house, first)


def test_a_full_disk_is_said_with_its_place_and_leaves_nothing(house: House) -> None:
    small = house.base / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(small)], check=True)
    try:
        house.write(repository=small / "repository")
        done = house.fails("backup", SERVER, "--kind", "full")
        assert "full" in done.err or "space" in done.err
        assert "local" in done.err
        assert house.backups() == []
        assert house.fsck() == []
        subprocess.run(["mount", "-o", "remount,size=200m", str(small)], check=True)
        house.backup()
        assert house.fsck() == []
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_missing_key_is_said_before_anything_is_read(house: House) -> None:
    empty = house.base / "empty"
    empty.mkdir(mode=0o700)
    house.write(encryption_home=empty)
    done = house.fails("backup", SERVER, "--kind", "full")
    assert "ops@example.com" in done.err
    assert house.objects() == []


def test_a_restore_with_the_wrong_key_fails_cleanly_and_names_the_key(house: House, short_tmp: Path) -> None:
    house.backup()
    stranger = short_tmp / "stranger"
    make_home(stranger)
    make_key(stranger, "stranger@example.com")
    try:
        house.write(restore_home=stranger)
        done = house.fails("restore", SERVER, "--to", "latest", "--datadir", str(house.base / "restored"))
        assert "key" in done.err
        assert not (house.base / "restored").exists()
    finally:
        stop_agent(stranger)


@pytest.mark.campaign
def test_backupd_killed_at_random_moments_of_a_backup_leaves_nothing_after_the_next_run(own_house: House) -> None:
    house = own_house
    dice = thrown("kills")
    first = house.backup()
    house.server.execute("CREATE DATABASE IF NOT EXISTS fresh")
    for moment in range(rounds(3)):
        house.server.execute(
            "CREATE OR REPLACE TABLE fresh.noise SELECT seq, SHA2(RAND(), 512) AS b, "
            f"SHA2(CONCAT(seq, '{dice.random()}-{moment}'), 512) AS a FROM fresh.seq_1_to_60000"
        )
        before = len(house.objects())
        more = dice.randrange(1, 4)
        house.kill_when(
            lambda before=before, more=more: len(house.objects()) >= before + more,  # type: ignore[misc]
            "backup",
            SERVER,
            "--kind",
            "full",
        )
        assert [record["id"] for record in house.backups()] == [first["id"]]
    assert_nothing_happened(house, first)
    assert not [
        line
        for line in _command_lines()
        if str(house.base / "spool").encode() in line or str(house.base / "run").encode() in line
    ]


@pytest.mark.parametrize("phase", ["fetch", "prepare", "place"])
def test_a_restore_killed_in_any_phase_is_finished_by_the_same_command(house: House, phase: str) -> None:
    house.backup()
    target = house.base / "restored"
    staging = house.base / "restored.restoring"

    def ready() -> bool:
        if phase == "fetch":
            return len(list(staging.rglob("*.ibd"))) > 3
        if phase == "prepare":
            return any(
                str(staging).encode() in arguments and b"--prepare" in arguments for arguments in _command_lines()
            )
        return target.exists()

    try:
        house.kill_when(ready, "restore", SERVER, "--to", "latest", "--datadir", str(target))
    except AssertionError as error:
        if phase == "place" and "ended with 0" in str(error):
            shutil.rmtree(target)  # the rename was the last thing it did: nothing left to interrupt
        else:
            raise
    if phase == "place" and target.exists() and not staging.exists():
        pass  # killed after the commit: the datadir is whole, which the checksums below show
    else:
        house.restore(target)
    with PrivateServer(datadir=target) as restored, restored.connect() as connection:
        sums = checksum_everything(connection)
    with house.server.connect() as connection:
        assert sums == checksum_everything(connection)


def test_a_newer_backup_does_not_keep_an_interrupted_restore_from_being_finished(house: House) -> None:
    first = house.backup()
    target, staging = house.base / "restored", house.base / "restored.restoring"
    house.kill_when(
        lambda: len(list(staging.rglob("*.ibd"))) > 3, "restore", SERVER, "--to", "latest", "--datadir", str(target)
    )
    house.backup()
    assert house.restore(target)["backup"] == first["id"]


def _command_lines() -> list[bytes]:
    """Of every process that is there right now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((process / "cmdline").read_bytes())
    return found


def test_two_backups_of_one_server_at_once_one_is_refused(house: House) -> None:
    with house.popen("backup", SERVER, "--kind", "full") as one, house.popen("backup", SERVER, "--kind", "full") as two:
        answers = sorted(
            [(one.communicate(), one.returncode), (two.communicate(), two.returncode)], key=lambda answer: answer[1]
        )
    codes = [code for _, code in answers]
    assert codes in ([0, 1], [0, 0]), answers
    if codes == [0, 1]:
        assert "running" in answers[1][0][1]
    assert house.fsck() == []


def test_the_server_gone_in_the_middle_is_said_and_nothing_is_committed(own_house: House) -> None:
    house = own_house
    first = house.backup()
    house.server.kill()
    done = house.fails("backup", SERVER, "--kind", "full")
    assert "hint" in done.err
    house.server.start()
    assert_nothing_happened(house, first)
