"""Labels of a restored data directory where SELinux is played: there is none here, so its file and its programs are
scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from restore.datadir import selinux
from restore.datadir.selinux import Labels, look, relabel


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the only ones that are found, of a host that enforces SELinux."""
    enforce = tmp_path / "enforce"
    enforce.write_text("1")
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setattr(selinux, "ENFORCE", enforce)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return programs


def script(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_selinux_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selinux, "ENFORCE", tmp_path / "none")
    labels = look(tmp_path / "data")
    assert labels.enforcing is None
    assert relabel(tmp_path, (tmp_path,), labels) == ()


def test_with_a_played_selinux_the_labels_are_restored(played: Path, tmp_path: Path) -> None:
    script(played, "restorecon", f'echo "$@" > {tmp_path}/asked')
    script(played, "matchpathcon", "echo system_u:object_r:mysqld_db_t:s0")
    labels = look(tmp_path / "data" / "mysql")
    assert (labels.enforcing, labels.wanted) == (True, "system_u:object_r:mysqld_db_t:s0")
    (tmp_path / "data").mkdir()
    assert relabel(tmp_path / "data", (tmp_path / "data", tmp_path / "data.external"), labels) == ()
    assert (tmp_path / "asked").read_text().split() == ["-R", str(tmp_path / "data")]


def test_with_a_played_selinux_a_path_that_no_database_may_read_is_named(played: Path, tmp_path: Path) -> None:
    script(played, "restorecon", "true")
    script(played, "matchpathcon", "echo system_u:object_r:var_t:s0")
    (line,) = relabel(tmp_path, (tmp_path,), look(tmp_path))
    assert "var_t" in line
    assert f"semanage fcontext -a -t mysqld_db_t '{tmp_path}(/.*)?'" in line


def test_with_a_played_selinux_what_could_not_be_done_is_said(
    played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(played, "restorecon", "echo 'not permitted' >&2; exit 1")
    (line,) = relabel(tmp_path, (tmp_path,), Labels(True))
    assert "the labels could not be set" in line
    assert "not permitted" in line
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = relabel(tmp_path, (tmp_path,), Labels(True))
    assert "restorecon is not installed" in line
