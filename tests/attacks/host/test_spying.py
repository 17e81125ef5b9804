"""A process of the database's user looks at every program of backupd's while a backup is proved, and gets nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from backupd.engine.server.sandbox import WORKER, worker
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import runs_as_root

pytestmark = [
    pytest.mark.skipif(not runs_as_root(), reason="only root can be another user than the database's"),
    pytest.mark.skipif(
        runs_as_root() and worker() != WORKER,
        reason=f"there is no user {WORKER} here: programs that work on copies are the database's user",
    ),
]

SPY = r"""
import ctypes, json, os, sys
root, ready = int(sys.argv[1]), sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
SEIZE = 0x4206

def stat(pid):
    with open(f"/proc/{pid}/stat") as file:
        name, _, rest = file.read().partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    return name, int(parent), state

def lives(pid):
    try:
        return stat(pid)[2] != "Z"
    except OSError:
        return False

def below(pid):
    while pid > 1:
        if pid == root:
            return True
        pid = stat(pid)[1]
    return False

def mem(pid):
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            begin = int(line.partition("-")[0], 16)
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
                file.seek(begin)
                file.read(16)
            return
    raise OSError("it has ended")

def seize(pid):
    child = os.fork()  # whose end lets it go again
    if not child:
        os._exit(1 if libc.ptrace(SEIZE, pid, None, None) else 0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError("ptrace")

WAYS = {
    "mem": mem, "environ": lambda pid: open(f"/proc/{pid}/environ", "rb").read() or 1 / 0,
    "fd": lambda pid: os.listdir(f"/proc/{pid}/fd"), "root": lambda pid: os.readlink(f"/proc/{pid}/root"),
    "cwd": lambda pid: os.readlink(f"/proc/{pid}/cwd"), "signal": lambda pid: os.kill(pid, 0), "ptrace": seize,
}
seen, got = {}, set()
open(ready, "w").close()
while lives(root):
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        try:
            if not below(pid):
                continue
            name = stat(pid)[0]
            seen[name] = seen.get(name, 0) + 1
        except (OSError, ValueError):
            continue
        for way, attempt in WAYS.items():
            try:
                attempt(pid)
            except (OSError, ZeroDivisionError):
                continue
            got.add((name, way))
print(json.dumps({"seen": seen, "got": sorted(got)}))
"""


def _spied(house: House, place: Path, *args: str) -> tuple[set[str], set[tuple[str, str]]]:
    """Names of the programs of one command that were seen, and what could be had of which."""
    ready = place / "ready"
    with house.popen(*args) as command:
        with subprocess.Popen(
            ["/usr/bin/python3", "-c", SPY, str(command.pid), str(ready)],
            user="mysql",
            group="mysql",
            extra_groups=[],
            cwd="/",
            stdout=subprocess.PIPE,
            text=True,
        ) as spy:
            out, err = command.communicate()
            told = json.loads(spy.communicate()[0])
    assert command.returncode == 0, out + err
    assert ready.exists()
    return set(told["seen"]), {(name, way) for name, way in told["got"]}


def test_the_spy_sees_what_its_own_user_runs(short_tmp: Path) -> None:
    with subprocess.Popen(["sleep", "3"], user="mysql", group="mysql", extra_groups=[], cwd="/") as victim:
        done = subprocess.run(
            ["/usr/bin/python3", "-c", SPY, str(victim.pid), str(short_tmp / "ready")],
            user="mysql",
            group="mysql",
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
        )
    told = json.loads(done.stdout)
    assert {way for name, way in told["got"] if name == "sleep"} >= {
        "environ",
        "fd",
        "root",
        "cwd",
        "signal",
        "mem",
        "ptrace",
    }


def test_nothing_is_had_of_a_proof(short_tmp: Path, shared_server: PrivateServer, keys: Keys) -> None:
    house = House(short_tmp, shared_server, keys)
    seen, got = _spied(house, short_tmp, "backup", SERVER, "--kind", "full")
    # What reads the living data runs as the user whose data it is: that one learns what is his.
    assert {name for name, _way in got} <= {"mariadb-backup", "bwrap", "setpriv"}
    assert "mariadb-backup" in seen
    seen, got = _spied(house, short_tmp, "test-restore", SERVER)
    assert got == set()
    assert {"mariadbd", "mariadb-backup", "gpg"} <= seen
