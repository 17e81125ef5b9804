from __future__ import annotations

from pathlib import Path

import pytest

from backupd.model.errors import RefusedError
from backupd.transfer.dedup import KEY_SIZE, identity_key


def test_a_key_is_made_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "spool" / "identity.key"
    key = identity_key(path)
    assert len(key) == KEY_SIZE
    assert identity_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_empty_key_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.touch()
    with pytest.raises(RefusedError, match="0 bytes where 32") as caught:
        identity_key(path)
    assert "move it away" in caught.value.hint


def test_a_folder_in_its_place_is_refused_with_path_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.mkdir()
    with pytest.raises(RefusedError, match="Is a directory") as caught:
        identity_key(path)
    assert str(path) in caught.value.message
    assert "move it away" in caught.value.hint


def test_a_file_where_its_folder_belongs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spool").touch()
    with pytest.raises(RefusedError, match=r"File exists|Not a directory"):
        identity_key(tmp_path / "spool" / "identity.key")


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("backupd.transfer.dedup.os.fsync", full)
    with pytest.raises(RefusedError, match="No space left") as caught:
        identity_key(tmp_path / "identity.key")
    assert "free space" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
