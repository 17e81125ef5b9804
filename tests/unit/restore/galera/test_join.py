"""What a joiner's log says together; the lines are MariaDB 10.11.19's with Galera 26.4.23."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from backupd.engine.sql.client import Connection
from backupd.model.errors import ToolError
from backupd.model.server_facts import ClusterPosition
from backupd.process.run_context import RunContext
from restore.datadir.occupancy import find_account
from restore.galera import join
from restore.galera import node as node_module
from restore.galera.join import Ending, Markers
from restore.galera.node import Node

UUID = "0b9cbe35-cd8b-11f0-bb2f-6e4ab2a3b9c1"
OURS = ClusterPosition(UUID, 8203)
BOTH = """
WSREP: Prepared IST receiver for 8204-34888, listening at: tcp://127.0.0.1:6568
WSREP_SST: [INFO] mariabackup SST started on joiner
WSREP: SST received: {stored}
WSREP: Recovered position from storage: {stored}
"""
IST = BOTH.format(stored=f"{UUID}:8203") + (
    "WSREP_SST: [INFO] 'xtrabackup_ist' received from donor: Running IST\n"
    "WSREP: Receiving IST: 26685 writesets, seqnos 8204-34888\n"
    "WSREP: IST received: {uuid}:34888\n"
)
SST = (
    "WSREP_SST: [INFO] Proceeding with SST.........\n"
    + BOTH.format(stored=f"{UUID}:34880")
    + "WSREP_SST: [INFO] mariabackup SST completed on joiner\nWSREP: Receiving IST... 100.0% (1/1 events) complete.\n"
)
SYNCED = "WSREP: Synchronized with group, ready for connections\n"


def ended(text: str) -> Ending | None:
    markers = Markers()
    for piece in (text[at : at + 7] for at in range(0, len(text), 7)):  # whatever the reads cut
        markers.take(piece)
    return markers.ending(OURS)


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        (IST + SYNCED, Ending.IST),
        (SST + SYNCED, Ending.SST),
        (IST, None),
        (SST, None),
        (SYNCED, Ending.IST),
        (BOTH.format(stored=f"{UUID}:34880") + SYNCED, Ending.SST),
        (
            BOTH.format(stored=f"{UUID}:8203") + "WSREP: Receiving IST: 9 writesets, seqnos 9000-9008\n" + SYNCED,
            Ending.SST,
        ),
        (IST + "[ERROR] WSREP: Receiving IST failed, node restart required: (22)\n", Ending.FAILED),
        (IST + SYNCED + "WSREP: Inconsistency detected: Failed on preordered\n", Ending.FAILED),
        ("gcs_group.cpp:453: Reversing history: 99999999 -> 60805, this member\n", Ending.FAILED),
    ],
)
def test_an_ending_is_told_by_all_markers_together(text: str, ending: Ending | None) -> None:
    assert ended(text) is ending


def test_what_was_received_is_kept() -> None:
    markers = Markers()
    markers.take(IST)
    assert (markers.writesets, markers.first, markers.last, markers.stored) == (26685, 8204, 34888, OURS)


def test_a_node_that_is_back_is_not_ended_because_its_log_is_silent(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is somewhere else than its option file says."""
    node = Node("r", "mariadbd", None, short_tmp / "mysql", find_account("root"))
    monkeypatch.setattr(join, "started_by", lambda _id: 7)
    monkeypatch.setattr(join, "_state", lambda _connection: ("Synced", ClusterPosition(UUID, 9000)))
    with pytest.raises(ToolError, match="does not say how it came back"):
        join.watch(node, OURS, Connection(socket="/nowhere/s.sock", user="x"), 0, RunContext(), still=0.1)
    monkeypatch.setattr(join, "_state", lambda _connection: ("Joining", ClusterPosition(UUID, 9000)))
    found = join.watch(node, OURS, Connection(socket="/nowhere/s.sock", user="x"), 0, RunContext(), still=0.1)
    assert found[0] is Ending.HUNG


@pytest.mark.parametrize(
    ("value", "log"),
    [
        ("/var/log/mysql/error", "/var/log/mysql/error.err"),
        ("/var/log/mysql/error.log", "/var/log/mysql/error.log"),
        ("node", "/srv/mysql/node.err"),
        ("", "/srv/mysql.start.log"),
    ],
)
def test_a_log_without_a_suffix_has_the_servers(value: str, log: str, short_tmp: Path) -> None:
    options = short_tmp / "my.cnf"
    options.write_text("[mariadbd]\n" + (f"log_error={value}\n" if value else ""))
    assert Node("r", "mariadbd", options, Path("/srv/mysql"), find_account("root")).log == Path(log)


def test_a_process_that_took_over_the_number_is_not_ended(monkeypatch: pytest.MonkeyPatch, short_tmp: Path) -> None:
    stranger = subprocess.Popen(("sleep", "60"))
    found = [[stranger.pid]]
    try:
        monkeypatch.setattr(node_module, "_processes", lambda _id, **_any: found.pop() if found else [])
        Node("r", "mariadbd", None, short_tmp, find_account("root")).end()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_what_a_nodes_server_started_is_ended_with_it(short_tmp: Path) -> None:
    """The scripts of an SST, which outlive it; others that were started for another restore do not."""
    script, other = (
        subprocess.Popen(("sleep", "60"), env={"BACKUPD_RESTORE": restore}) for restore in ("rv-mine", "rv-other")
    )
    try:
        assert node_module.started_by("rv-mine") is None
        Node("rv-mine", "mariadbd", None, short_tmp, find_account("root")).end()
        assert script.wait(300) < 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
