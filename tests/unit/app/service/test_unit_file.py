"""deploy/backupd.service says what the service relies on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backupd.app.service.daemon import GRACE
from backupd.app.service.worker import GRACE as CLEANING_UP
from backupd.engine.server.sandbox import confine, is_available, worker
from backupd.process.command import Command
from tests.support.service.systemd_unit import UNIT, confined, entries, service

FLAG = re.compile(r"--unshare-(\w+)")


def test_every_key_stands_once_in_a_section_that_systemd_knows() -> None:
    keys = [(section, key) for section, key, _value in entries()]
    assert len(keys) == len(set(keys))
    assert {section for section, _key in keys} == {"Unit", "Service", "Install"}


def test_stopping_leaves_time_for_the_grace_and_for_cleaning_up() -> None:
    unit = service()
    assert float(unit["TimeoutStopSec"]) >= GRACE + CLEANING_UP + 10
    assert (unit["Type"], unit["NotifyAccess"], unit["KillMode"]) == ("notify", "main", "process")
    assert (unit["KillSignal"], unit["RestartKillSignal"]) == ("SIGINT", "SIGTERM"), "a restart leaves the streams"
    assert unit["ExecReload"] == "/bin/kill -HUP $MAINPID"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_accepts_it(tmp_path: Path) -> None:
    backupd = Path(sys.executable).with_name("backupd")
    copy = tmp_path / "backupd.service"
    copy.write_text(UNIT.read_text().replace("/usr/bin/backupd", str(backupd)))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "backupd.service" in line]
    assert complaints == []


@pytest.mark.skipif(not is_available(), reason="bubblewrap cannot be used on this machine")
def test_programs_are_confined_with_the_powers_that_the_unit_leaves(tmp_path: Path) -> None:
    words = confine(Command(("id", "-un"), user=worker()), writable=()).argv
    asked = (
        "from backupd.engine.server.sandbox import *; from backupd.process.pipeline import run; "
        "print(*ways(), run(confine(Command(('id', '-un'), user=worker()), writable=())).stdout.decode())"
    )
    done = subprocess.run(
        [*confined(tmp_path), sys.executable, "-c", asked], capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["user", worker()], "")
    assert set(FLAG.findall(" ".join(words))) | {"mnt", "user"} == set(service()["RestrictNamespaces"].split())
    assert not {"CAP_SYS_ADMIN", "CAP_NET_ADMIN"} & set(service()["CapabilityBoundingSet"].split())
