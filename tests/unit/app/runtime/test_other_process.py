"""Processes that are known by what they have called themselves."""

from __future__ import annotations

import pytest

from backupd.app.context.wiring import owner
from backupd.app.runtime.other_process import OtherProcess

HOST, BOOT, NAMESPACE, PID, TICKS = owner().split(" ")


@pytest.mark.parametrize("host", [HOST, "as-it-was-called-before"], ids=["same", "renamed"])
def test_a_process_is_found_also_after_its_host_got_another_name(host: str) -> None:
    found = OtherProcess.of(f"{host} {BOOT} {NAMESPACE} {PID} {TICKS}")
    assert found is not None
    assert found.pid == int(PID)
    found.close()


@pytest.mark.parametrize(
    "words",
    [
        f"{HOST} {BOOT} {NAMESPACE} {PID} 1",
        f"elsewhere {BOOT} {NAMESPACE} {PID} 1",
        f"elsewhere another-boot {NAMESPACE} {PID} {TICKS}",
        f"elsewhere {BOOT} pid:[1] {PID} {TICKS}",
        f"elsewhere {BOOT} {PID} {TICKS}",
        "x",
        "",
    ],
    ids=[
        "began earlier",
        "began earlier, renamed",
        "another boot",
        "another namespace",
        "too short",
        "a word",
        "empty",
    ],
)
def test_nobody_else_is_taken_for_it(words: str) -> None:
    assert OtherProcess.of(words) is None
