"""The main job on every kind of server and tool: one suite, the stacks of tests/support/stacks.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.house import LONGEST, SERVER, House
from tests.support import sample
from tests.support.keys import Keys
from tests.support.load import Writers, bank_total
from tests.support.places import short_directory
from tests.support.sample import ACCOUNT_BALANCE, ACCOUNTS, checksum_everything, describe_everything
from tests.support.server import Server, connect
from tests.support.stacks import STACKS, Stack, binlogs


@pytest.fixture(scope="module", params=STACKS, ids=str)
def stack(request: pytest.FixtureRequest) -> Stack:
    chosen: Stack = request.param
    why = chosen.why_not()
    if why:
        pytest.skip(f"stack {chosen}: {why}")
    return chosen


@pytest.fixture(scope="module")
def source(stack: Stack) -> Iterator[Server]:
    with stack.make() as server:
        server.create_backup_users()
        sample.create(server)
        yield server


@pytest.fixture(scope="module")
def stacked(stack: Stack, source: Server, keys: Keys) -> Iterator[House]:
    """One house per stack: its tests leave what they need for themselves only."""
    with short_directory() as base:
        yield House(base, source, keys, programs=stack.programs())


def everything(server: Server) -> tuple[dict[str, int], dict[str, list[str]]]:
    with server.connect() as connection:
        return checksum_everything(connection), describe_everything(connection)


def test_check_finds_the_tool_and_every_privilege(stack: Stack, stacked: House) -> None:
    done = stacked.run("check", SERVER)
    assert done.code == 0, done.all
    assert f"{stack.tool} " in done.all
    assert "has every privilege" in done.all


def test_a_backup_under_load_and_the_binary_log_from_its_position_make_the_source(
    stack: Stack, stacked: House, source: Server
) -> None:
    with Writers(source, 3) as writers:
        record = stacked.backup()
        assert writers.transactions > 0
    target = stacked.base / "restored"
    outcome = stacked.ok("restore", SERVER, "--to", f"backup:{record['id']}", "--datadir", str(target), "--start")
    started = outcome["started"]
    try:
        with connect(started["socket"]) as connection:
            assert bank_total(connection) == ACCOUNTS * ACCOUNT_BALANCE
        _replay(stack, source, record["position"], started["socket"])
        with connect(started["socket"]) as connection:
            assert (checksum_everything(connection), describe_everything(connection)) == everything(source)
    finally:
        os.kill(started["pid"], signal.SIGKILL)


def _replay(stack: Stack, source: Server, position: dict[str, Any], socket: str) -> None:
    printer, client = stack.replay()
    files = [str(path) for path in binlogs(source, position["file"])]
    printed = subprocess.run(
        [printer, "--no-defaults", *stack.skip_gtids, f"--start-position={position['pos']}", *files],
        check=True, capture_output=True)
    # What the writers did after the backup: without it, the comparison would say less.
    assert len(printed.stdout) > 1000
    subprocess.run([client, "--no-defaults", "--binary-mode", f"--socket={socket}", "-uroot"], input=printed.stdout,
                   check=True, capture_output=True)


def test_a_test_restore_proves_the_backup_against_its_witness(stacked: House) -> None:
    record = stacked.backup()
    proof = stacked.ok("test-restore", SERVER)
    assert proof["backup"] == record["id"]
    assert proof["outcome"] == "proved", json.dumps(proof, indent=1)
    assert proof["tables_compared"] >= 10
    assert not list((stacked.base / "scratch").glob("*/"))


@pytest.mark.skipif(os.geteuid() != 0, reason="the runbook is for root")
def test_the_runbook_followed_word_for_word_gives_the_same_data(stack: Stack, stacked: House, source: Server) -> None:
    record = stacked.backup()
    runbook = stacked.manifest(record["id"]).with_name("RUNBOOK.md").read_text()
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```$", runbook, re.MULTILINE | re.DOTALL))
    folders = [str(Path(path).parent) for path in (*stack.programs().values(), *stack.replay())]
    datadir = stacked.base / "by-hand"
    environment = {
        "PATH": ":".join([*dict.fromkeys(folders), "/usr/sbin:/usr/bin:/sbin:/bin"]), "LC_ALL": "C.UTF-8",
        "HOME": "/nonexistent", "REPOSITORY": str(stacked.repository), "DATADIR": str(datadir),
        "GNUPGHOME": str(stacked.keys.secret_home)}
    done = subprocess.run(["sh", "-c", script], env=environment, cwd="/", text=True, check=False, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with stack.make(datadir=datadir) as restored:
        assert everything(restored) == everything(source)


def test_a_damaged_object_is_found_and_never_restored(stacked: House) -> None:
    record = stacked.backup()
    named = stacked.manifest(record["id"]).read_text()
    victim = max((path for path in stacked.objects() if path.name in named), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    try:
        found = stacked.fails("verify")
        assert victim.name in found.all
        target = stacked.base / "never"
        refused = stacked.fails("restore", SERVER, "--to", f"backup:{record['id']}", "--datadir", str(target))
        assert victim.name in refused.all
        assert not target.exists() or not (target / "ibdata1").exists()
    finally:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    assert stacked.run("verify").code == 0


def _intents(house: House) -> set[str]:
    return {path.name for path in (house.repository / "intents").glob("*")}


@contextlib.contextmanager
def _fresh(stacked: House, keys: Keys) -> Iterator[House]:
    """Another repository for the same server."""
    with short_directory() as base:
        yield House(base, stacked.server, keys, programs=stacked.programs)


def test_a_killed_service_and_a_killed_server_leave_nothing_that_looks_like_a_backup(
    stacked: House, source: Server, keys: Keys
) -> None:
    with _fresh(stacked, keys) as house:
        house.kill_when(lambda: bool(_intents(house)), "backup", SERVER, "--kind", "full")
        dead = _intents(house)
        with house.popen("backup", SERVER, "--kind", "full") as process:
            deadline = time.monotonic() + LONGEST
            while not _intents(house) - dead:
                assert process.poll() is None, "it ended before the server could be killed"
                assert time.monotonic() < deadline
                time.sleep(0.002)
            source.kill()
            out, err = process.communicate(timeout=LONGEST)
        try:
            assert process.returncode == 1, out + err
            assert "Traceback" not in err
            assert not list(house.repository.glob("servers/*/*/manifest.json"))
            assert not house.backups()
        finally:
            source.start()
        house.backup()
        assert not house.fsck()
        assert not list((house.base / "spool" / "clone").glob("*"))


def test_what_is_not_the_servers_own_is_refused(stack: Stack, stacked: House, short_tmp: Path) -> None:
    stacked.backup()
    full = short_tmp / "full"
    full.mkdir()
    (full / "mine").write_text("precious")
    assert "not empty" in stacked.fails("restore", SERVER, "--to", "latest", "--datadir", str(full)).all
    other = short_tmp / "mysqld"
    other.write_text("#!/bin/sh\necho 'mysqld  Ver 4.1.22 for Linux on x86_64 (MySQL Community Server)'\n")
    other.chmod(0o755)
    stacked.programs = {**stack.programs(), "mysqld": str(other), "mariadbd": str(other)}
    stacked.write()
    try:
        done = stacked.run("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "x"))
        assert done.code != 0
        assert "must not be started on files of" in done.all
        assert not (short_tmp / "x").exists()
    finally:
        stacked.programs = stack.programs()
        stacked.write()
