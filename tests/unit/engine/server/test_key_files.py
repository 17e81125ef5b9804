from __future__ import annotations

import os
from pathlib import Path

import pytest

from backupd.engine.server.backup_files import handed, named
from backupd.model.errors import RefusedError

PLUGIN = {"plugin_load_add": "file_key_management"}


def test_a_file_is_taken_by_its_path_or_as_the_only_one_of_its_name() -> None:
    options = {
        **PLUGIN,
        "file_key_management_filename": "/etc/mysql/keys.enc",
        "loose-file-key-management-filekey": "FILE:/etc/mysql/.key",
        "innodb_page_size": "8192",
    }
    here = (Path("/srv/keys/keys.enc"), Path("/etc/mysql/.key"), Path("/srv/keys/.key"))
    assert named(options, here) == {**options, "file_key_management_filename": "/srv/keys/keys.enc"}
    with pytest.raises(RefusedError, match=r"in /etc/mysql/keys\.enc, which"):
        named(options, (*here, Path("/srv/other/keys.enc")))
    assert named({"innodb_page_size": "8192"}, ()) == {"innodb_page_size": "8192"}
    with pytest.raises(RefusedError, match="no key files"):
        named(PLUGIN, ())
    clone = {"plugin_load_add": "mysql_clone.so"}  # with which a copy that CLONE made tells where it stands
    assert named(clone, ()) == clone


def test_the_copies_are_private_and_gone_at_the_end(tmp_path: Path) -> None:
    keys, key = tmp_path / "keys.enc", tmp_path / "key"
    keys.write_bytes(b"\0sealed")
    key.write_text("secret")
    options = {**PLUGIN, "file-key-management-filename": str(keys), "file-key-management-filekey": f"FILE:{key}"}
    folder = tmp_path / "run"
    folder.mkdir()
    owner = (os.geteuid() + 1, os.getegid() + 1) if os.geteuid() == 0 else None
    with handed(options, (keys, key), folder, owner) as given:
        first, second = sorted(folder.iterdir())
        assert given == {
            **PLUGIN,
            "file-key-management-filename": str(first),
            "file-key-management-filekey": f"FILE:{second}",
        }
        assert (first.read_bytes(), second.read_text()) == (b"\0sealed", "secret")
        for copy in (first, second):
            status = copy.stat()
            assert (status.st_mode & 0o777, (status.st_uid, status.st_gid)) == (
                0o600,
                owner or (os.geteuid(), os.getegid()),
            )
    assert list(folder.iterdir()) == []
    keys.unlink()
    with (
        pytest.raises(RefusedError, match=f"{keys} cannot be read: No such file"),
        handed(options, (keys, key), folder, None),
    ):
        pass
    assert list(folder.iterdir()) == []
