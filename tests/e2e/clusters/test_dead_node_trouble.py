"""A dead node that cannot come back by IST, one that has what its cluster lacks, and backupd killed on the way back: a
data directory is never behind its grastate.dat."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from restore.datadir.staging import MARKER
from restore.galera import grastate
from tests.support.dice import SOAK
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER
from tests.support.e2e.lab import Lab, burst, die, forget_cache, laboratory, writing
from tests.support.keys import Keys
from tests.support.servers.galera import state_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


def command(lab: Lab, to: str) -> tuple[str, ...]:
    datadir = str(lab.node.datadir)
    return ("restore", SERVER, "--to", to, "--datadir", datadir, "--mode", "galera", "--cluster", "lab", "--start")


def own_servers(lab: Lab) -> set[int]:
    """Processes of database servers that work in the node's data directory, or in what is staged beside it."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                name, words = (process / "comm").read_text().strip(), (process / "cmdline").read_bytes()
            except OSError:
                continue
            ours = f"{lab.base}/run/server-" in os.fsdecode(words)
            if name == "mariadbd" and (ours or f"--datadir={lab.node.datadir}".encode() in words):
                found.add(int(process.name))
    return found


def assert_true_to_its_file(lab: Lab) -> None:
    """What no server could be started on, or a seqno that is not above InnoDB's position."""
    datadir = lab.node.datadir
    if own_servers(lab) or not (datadir / grastate.GRASTATE).exists():
        return
    state = grastate.read(datadir)
    assert state is not None
    assert (datadir / MARKER).exists()
    if state.is_explicit:
        uuid, rest = lab.node.recovered()
        assert (state.position.uuid, state.position.seqno) <= (uuid, int(re.split(r"\D", rest)[0]))


@SOAK
def test_backupd_is_killed_in_every_phase_and_the_same_command_ends_right(keys: Keys) -> None:
    with laboratory(keys, gtid_mode=True) as lab:
        node, second, third = lab.cluster.nodes
        full = lab.backup()["id"]
        staging = node.datadir.with_name(f"{node.datadir.name}.restoring")
        moments: dict[str, Callable[[], bool]] = {
            "fetch": lambda: any(staging.glob("data/**/*.ibd")),
            "prepare": (staging / "logs/prepare-1.log").exists,
            "recover": lambda: b"wsrep" in options_of_private_servers(),
            "place": node.datadir.exists,
            "join": lambda: bool(own_servers(lab)) and node.datadir.exists() and "Receiving IST" in node.log_text(),
        }
        with writing(second, third):
            die(node)
            for name, ready in moments.items():
                node.error_log.write_bytes(b"")
                lab.kill_when(ready, *command(lab, f"backup:{full}"))
                until_quiet(lab, name)
                assert_true_to_its_file(lab)
            outcome = lab.rejoin("--to", f"backup:{full}")
        assert outcome["join"]["outcome"] == "ist", outcome
        lab.cluster.settle()
        assert state_of(node, "shop") == state_of(second, "shop") == state_of(third, "shop")


@SOAK
def test_backupd_is_killed_while_logs_are_replayed_and_the_position_is_moved(keys: Keys) -> None:
    with laboratory(keys, gtid_mode=True) as lab:
        node, second, third = lab.cluster.nodes
        lab.backup()
        burst(node, 3000)
        Archive(lab, node).take()
        for other in (second, third):
            forget_cache(other)
        staging = node.datadir.with_name(f"{node.datadir.name}.restoring")
        bootstrap = staging / "data" / grastate.GRASTATE
        moments: dict[str, Callable[[], bool]] = {
            "replay": (staging / "replay").exists,
            "isolated bootstrap": lambda: bootstrap.exists() and b"safe_to_bootstrap: 1" in bootstrap.read_bytes(),
            "join": lambda: bool(own_servers(lab)) and node.datadir.exists() and "Receiving IST" in node.log_text(),
        }
        with writing(second, third):
            die(node)
            for name, ready in moments.items():
                node.error_log.write_bytes(b"")
                lab.kill_when(ready, *command(lab, "latest"))
                until_quiet(lab, name)
                assert_true_to_its_file(lab)
            outcome = lab.rejoin("--to", "latest")
        assert outcome["join"]["outcome"] == "ist", outcome
        lab.cluster.settle()
        assert state_of(node, "shop") == state_of(second, "shop") == state_of(third, "shop")


def options_of_private_servers() -> bytes:
    """The option files of private servers that run now."""
    found = b""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"mariadbd") and len(words) > 1 and b"-look/my.cnf" in words[1]:
                    found += Path(os.fsdecode(words[1].partition(b"=")[2])).read_bytes()
            except OSError:
                continue
    return found


def until_quiet(lab: Lab, name: str) -> None:
    """No private server outlives backupd; the node, once it was started, does."""
    deadline = time.monotonic() + 300
    while name != "join" and own_servers(lab):
        assert time.monotonic() < deadline, name
        time.sleep(0.1)


@SOAK
def test_without_ist_the_node_is_not_started_and_with_leave_it_says_that_it_was_an_sst(keys: Keys) -> None:
    with laboratory(keys, gtid_mode=False) as lab:
        node, second, third = lab.cluster.nodes
        full = lab.backup()["id"]
        burst(node, 400)
        for other in (second, third):
            forget_cache(other)
        node.stop()

        # Its old data directory is ahead of a cluster that went back in time: nothing is touched.
        state = grastate.read(node.datadir)
        assert state is not None
        ahead = type(state.position)(state.position.uuid, state.position.seqno + 10_000)
        grastate.write(node.datadir, ahead)
        before = sorted(path.name for path in node.datadir.iterdir())
        done = lab.fails(*command(lab, f"backup:{full}"))
        assert re.search(r"has \d+ transactions that the cluster lacks", done.all), done.all
        assert sorted(path.name for path in node.datadir.iterdir()) == before
        grastate.write(node.datadir, state.position)

        done = lab.fails(*command(lab, f"backup:{full}"))
        assert "can send what the node lacks by IST" in done.all
        assert not own_servers(lab)
        assert_true_to_its_file(lab)
        (aside,) = node.datadir.parent.glob(f"{node.datadir.name}.old-*")
        assert (aside / "ibdata1").exists()

        outcome = lab.rejoin("--to", f"backup:{full}", "--allow-sst", code=1)
        assert outcome["join"]["outcome"] == "sst", outcome
        lab.cluster.settle()
        assert state_of(node, "shop") == state_of(second, "shop")
        shutil.rmtree(aside)


@SOAK
def test_a_join_that_fails_leaves_no_server_and_the_same_command_tries_again(keys: Keys) -> None:
    with laboratory(keys, gtid_mode=True) as lab:
        node, second, third = lab.cluster.nodes
        full = lab.backup()["id"]
        with writing(second, third):
            die(node)
            with socket.create_server(("127.0.0.1", node.ist_port)):
                outcome = lab.rejoin("--to", f"backup:{full}", code=1)
            assert outcome["join"]["outcome"] == "failed", outcome
            assert "the same command tries again" in outcome["join"]["reason"]
            assert not own_servers(lab)
            assert_true_to_its_file(lab)
            state = grastate.read(node.datadir)
            assert state is not None
            assert state.is_explicit
            assert len(list(node.datadir.parent.glob(f"{node.datadir.name}.old-*"))) == 0
            outcome = lab.rejoin("--to", f"backup:{full}")
        assert outcome["join"]["outcome"] == "ist", outcome
        lab.cluster.settle()
        assert state_of(node, "shop") == state_of(second, "shop") == state_of(third, "shop")


def test_what_cannot_be_meant_is_refused_by_name(keys: Keys) -> None:
    with laboratory(keys, gtid_mode=False) as lab:
        full = lab.backup()["id"]
        datadir = str(lab.node.datadir)
        wrong = ("restore", SERVER, "--to", f"backup:{full}", "--datadir", datadir, "--mode", "galera")
        assert "the data directory" in lab.fails(*command(lab, f"backup:{full}")).all  # the node lives there
        assert "needs the name of the node's cluster" in lab.fails(*wrong, code=2).all
        assert "no configured server" in lab.fails(*wrong, "--cluster", "lap").all
        assert "only together with --start" in lab.fails(*wrong, "--cluster", "lab", "--allow-sst", code=2).all
        assert "only with mode galera" in lab.fails(
            "restore", SERVER, "--to", "latest", "--datadir", f"{datadir}2", "--cluster", "lab", code=2
        ).all  # fmt: skip
        assert lab.node.status("wsrep_local_state_comment") == "Synced"
