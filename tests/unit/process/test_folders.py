from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.process.folders import make_passable
from backupd.process.runtime import runtime_directory


@pytest.fixture
def strict() -> Iterator[None]:
    """The umask of the unit."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_others_pass_through_whatever_the_umask_is(strict: None, tmp_path: Path) -> None:
    make_passable(tmp_path / "new")
    assert _mode(tmp_path / "new") == 0o711
    (tmp_path / "old").mkdir(mode=0o700)
    make_passable(tmp_path / "old")
    assert _mode(tmp_path / "old") == 0o711
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    make_passable(tmp_path / "open")
    assert _mode(tmp_path / "open") == 0o755


def test_what_is_handed_to_other_users_can_be_reached_whatever_the_umask_is(
    strict: None, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    assert _mode(runtime_directory()) == 0o700
    assert _mode(short_tmp / "run") == 0o711
