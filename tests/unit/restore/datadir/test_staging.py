from __future__ import annotations

from pathlib import Path

import pytest

from backupd.model.errors import RefusedError
from restore.datadir.occupancy import refuse_nested
from restore.datadir.staging import Site, State, choose_site, refuse_foreign_staging, unfinished, write_state
from restore.scratch_server import remove_dead


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/", "the root directory"),
        ("/tmp/" + "n" * 300, "File name too long"),
        ("/tmp/" + "n" * 250, "too long"),
        ("/tmp/a\0b", "null byte"),
        ("/etc/passwd/mysql", "is not a directory"),
    ],
)
def test_a_path_that_can_be_no_data_directory_is_refused_with_the_reason(path: str, says: str) -> None:
    with pytest.raises(RefusedError, match=says) as refused:
        choose_site(Path(path))
    assert refused.value.hint
    assert unfinished(Path(path)) is None


@pytest.mark.parametrize("name", ["ibdata1", "mysql.ibd", "aria_log_control", "repository.json"])
def test_a_place_inside_a_data_directory_or_a_repository_is_refused(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "a/b/mysql"
    refuse_nested(inside)
    (tmp_path / name).touch()
    with pytest.raises(RefusedError, match=r"inside the data directory|in a repository") as refused:
        refuse_nested(inside)
    assert str(tmp_path / name) in refused.value.detail


def test_what_only_bears_the_name_of_the_staging_folder_is_never_removed(tmp_path: Path) -> None:
    site = choose_site(tmp_path / "mysql")
    assert site == Site(tmp_path / "mysql", tmp_path / "mysql.restoring", inside=False)
    refuse_foreign_staging(site)
    site.folder.mkdir()
    refuse_foreign_staging(site)
    (site.folder / "precious").touch()
    with pytest.raises(RefusedError, match="not created by backupd") as refused:
        refuse_foreign_staging(site)
    assert refused.value.detail == "precious"
    write_state(site, State("r", "shop", "latest", ("b",)))
    refuse_foreign_staging(site)


def test_a_scratch_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(RefusedError, match="cannot make scratch copies") as refused:
            remove_dead(path)
        assert "restore.scratch.path" in refused.value.hint
