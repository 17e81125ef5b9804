"""Folders that no restore may go to, because what lies there is somebody's, or will be removed."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from backupd.model.errors import RefusedError
from restore.datadir.occupancy import find_account, refuse_closed, refuse_nested
from restore.datadir.staging import INSIDE, MARKER, Site, State, choose_site, write_marker, write_state
from restore.datadir.start import clear, place
from restore.tables.sql_files import README, write_sql

STATE = State("20261121T030000Z-00000001", "shop", "latest", ("20261121T020000Z-7f3a9c01",), stage="prepared")


def staged(datadir: Path) -> Site:
    site = choose_site(datadir)
    site.data.mkdir(parents=True)
    (site.data / "ibdata1").write_bytes(b"system")
    write_state(site, STATE)
    return site


def dumped(folder: Path) -> Path:
    (folder / "schemas" / "shop").mkdir(parents=True)
    (folder / "schemas" / "shop" / "create.sql").write_text("CREATE DATABASE `shop`;\n")
    return folder


@pytest.mark.parametrize("name", ["one.restoring", "one.external", "one.external.new", INSIDE, ".one.partial"])
@pytest.mark.parametrize("below", ["", "inner", "data/inner"])
def test_a_name_that_restores_use_for_themselves_is_refused_before_it_is_there(
    tmp_path: Path, name: str, below: str
) -> None:
    dump = dumped(tmp_path / "dump")
    for refuse in (refuse_nested, lambda folder: write_sql(dump, folder)):
        with pytest.raises(RefusedError, match="a staging folder of restores") as told:
            refuse(tmp_path / name / below)
        assert name in told.value.detail
    assert not (tmp_path / name).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_below_a_folder_that_the_servers_user_cannot_enter_is_refused(short_tmp: Path) -> None:
    account = find_account("mysql")
    closed = short_tmp / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0o700)
    with pytest.raises(RefusedError) as told:
        refuse_closed(closed / "inner" / "new" / "db", account)
    assert told.value.message == (
        f"the server's user mysql cannot enter {closed}, so a server could not run in {closed}/inner/new/db"
    )
    assert told.value.detail == f"{closed} is of user root, with mode 0700"
    assert told.value.hint == f"let others pass through it (chmod o+x {closed}), or choose another data directory"
    closed.chmod(0o711)
    refuse_closed(closed / "inner" / "new" / "db", account)
    (closed / "inner").chmod(0o700)
    refuse_closed(closed / "inner", account)  # which it is given


def test_below_a_folder_in_which_something_is_restored_or_was_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path / "one", tmp_path / "renamed", inside=False)
    site.folder.mkdir()
    write_state(site, STATE)
    (tmp_path / "filling" / INSIDE).mkdir(parents=True)
    (tmp_path / "done").mkdir()
    write_marker(tmp_path / "done", STATE)
    for folder, sign in (("renamed", "restore.json"), ("filling", INSIDE), ("done", MARKER)):
        with pytest.raises(RefusedError) as told:
            refuse_nested(tmp_path / folder / "inner")
        assert told.value.detail == f"{tmp_path / folder / sign} is there"
    refuse_nested(tmp_path / "filling")
    refuse_nested(tmp_path / "done")
    (tmp_path / "restore.json").write_text('{"mode": "new-server"}')
    refuse_nested(tmp_path / "other")  # somebody's own file of that name


def test_what_others_put_into_a_staging_folder_outlives_the_restore_that_is_built_there(tmp_path: Path) -> None:
    site = staged(tmp_path / "one")
    (site.folder / "inner").mkdir()
    (site.folder / "inner" / "ibdata1").write_bytes(b"another server's")
    for name in ("logs", "binlogs", "increment-1"):
        (site.folder / name).mkdir()
    place(site, STATE, find_account(pwd.getpwuid(os.geteuid()).pw_name), ())
    clear(site)
    assert (site.datadir / "ibdata1").read_bytes() == b"system"
    assert [path.name for path in site.folder.iterdir()] == ["inner"]
    assert (site.folder / "inner" / "ibdata1").read_bytes() == b"another server's"


def test_a_link_that_came_on_the_way_to_the_data_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "elsewhere").mkdir()
    site = staged(tmp_path / "a" / "one")
    (tmp_path / "a").rename(tmp_path / "elsewhere" / "a")
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere" / "a")
    with pytest.raises(RefusedError, match="now resolves to a different directory"):
        place(site, STATE, find_account(pwd.getpwuid(os.geteuid()).pw_name), ())
    assert not (tmp_path / "elsewhere" / "a" / "one").exists()


@pytest.mark.parametrize("sign", ["ibdata1", MARKER, "repository.json"])
def test_sql_files_go_into_no_data_directory_and_no_repository_by_any_name(tmp_path: Path, sign: str) -> None:
    dump = dumped(tmp_path / "dump")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / sign).touch()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for folder in ("there/newschema", "there/objects/zz", "link/newschema"):
        with pytest.raises(RefusedError):
            write_sql(dump, tmp_path / folder)
    assert [path.name for path in (tmp_path / "there").iterdir()] == [sign]


def test_only_what_a_killed_call_left_of_sql_files_is_removed(tmp_path: Path) -> None:
    dump, partial = dumped(tmp_path / "dump"), tmp_path / ".sql.partial"
    dumped(partial)
    (partial / README).touch()
    write_sql(dump, tmp_path / "sql")
    assert not partial.exists()
    other = tmp_path / ".new.partial"
    other.mkdir()
    (other / "ibdata1").touch()
    with pytest.raises(RefusedError, match="not created by backupd") as told:
        write_sql(dump, tmp_path / "new")
    assert told.value.detail == "ibdata1"
    assert (other / "ibdata1").exists()
