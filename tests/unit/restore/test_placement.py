from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.model.errors import BackupdError, RefusedError
from backupd.model.proof import Phase
from restore.datadir import staging
from restore.datadir.occupancy import Account, find_account
from restore.datadir.staging import (
    INSIDE,
    MARKER,
    Site,
    State,
    choose_site,
    exclusive,
    read_marker,
    read_state,
    unfinished,
    write_state,
)
from restore.datadir.start import clear, place
from tests.support.restores.builder import files_below

STATE = State(
    "20261121T030000Z-00000001", "shop", "latest", ("20261121T020000Z-7f3a9c01",), stage="prepared", mode=0o700
)
FILES = {
    "ibdata1": b"system",
    "ib_logfile0": b"redo",
    "shop/t.ibd": b"table",
    "xtrabackup_info/t.frm": b"a schema",
    "xtrabackup_checkpoints": b"receipt",
    "mysql/db.MAD": b"users",
}
LEFTOVERS = ("xtrabackup_*", "backup-my.cnf")
KEPT = {path: content for path, content in FILES.items() if path != "xtrabackup_checkpoints"}
root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and giving files away need root")


@pytest.fixture
def account() -> Account:
    return find_account("mysql" if os.geteuid() == 0 else os.environ["USER"])


def staged(datadir: Path) -> Site:
    site = choose_site(datadir)
    for path, content in FILES.items():
        (site.data / path).parent.mkdir(parents=True, exist_ok=True)
        (site.data / path).write_bytes(content)
    write_state(site, STATE)
    return site


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A data directory that is a file system of its own, with a lost+found."""
    datadir = tmp_path / "mnt"
    datadir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(datadir)], check=True)
    (datadir / "lost+found").mkdir()
    yield datadir
    subprocess.run(["umount", str(datadir)], check=True)


def restored(datadir: Path) -> dict[str, bytes]:
    found = files_below(datadir)
    assert found.pop(MARKER)
    return found


@pytest.mark.parametrize("exists", [True, False])
def test_a_rename_puts_everything_in_place_at_once(tmp_path: Path, account: Account, exists: bool) -> None:
    datadir = tmp_path / "mysql"
    if exists:
        datadir.mkdir()
    site = staged(datadir)
    assert (site.folder, site.inside) == (tmp_path / "mysql.restoring", False)
    placed = place(site, STATE, account, LEFTOVERS)
    clear(site)
    assert restored(datadir) == KEPT
    assert read_marker(datadir) == placed
    assert placed.stage == "placed"
    assert not site.folder.exists()


@root
def test_a_mount_point_is_filled_by_moves_and_lost_and_found_stays(mounted: Path, account: Account) -> None:
    site = staged(mounted)
    assert site.inside
    place(site, STATE, account, LEFTOVERS)
    clear(site)
    assert restored(mounted) == KEPT
    assert (mounted / "lost+found").is_dir()
    assert not (mounted / INSIDE).exists()


@root
def test_everything_belongs_to_the_servers_user_with_the_servers_modes(tmp_path: Path, account: Account) -> None:
    site = staged(tmp_path / "mysql")
    place(site, replace(STATE, mode=0o755), account, LEFTOVERS)
    for path in [tmp_path / "mysql", *(tmp_path / "mysql").rglob("*")]:
        found = path.stat()
        assert (found.st_uid, found.st_gid) == (account.uid, account.gid)
    assert stat.S_IMODE((tmp_path / "mysql").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "mysql/shop").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "mysql/ibdata1").stat().st_mode) == 0o660


class PowerCutError(BaseException):
    pass


@root
@pytest.mark.parametrize("mount", [True, False])
def test_a_kill_between_any_two_moves_leaves_something_that_cannot_start_and_can_be_continued(
    tmp_path: Path, account: Account, mount: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename
    survived = 0
    for moment in range(20):
        datadir = tmp_path / f"mysql{moment}"
        datadir.mkdir()
        if mount:
            (datadir / "lost+found").mkdir()
        site = staged(datadir)
        assert site.inside == mount
        left = moment

        def dying(self: Path, target: Path) -> Path:
            nonlocal left
            if left == 0:
                raise PowerCutError
            left -= 1
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", dying)
        try:
            place(site, STATE, account, LEFTOVERS)
            survived += 1
        except PowerCutError:
            assert not (datadir / MARKER).exists()
            if mount and (datadir / "ibdata1").exists():
                assert (datadir / "ib_logfile0").exists()
            if mount and not all((datadir / name).exists() for name in ("ib_logfile0", "mysql", "shop", "ibdata1")):
                assert datadir.stat().st_uid == 0
                assert stat.S_IMODE(datadir.stat().st_mode) == 0o700
            pending = unfinished(datadir)
            assert pending is not None
            assert pending.same_work(STATE)
        monkeypatch.setattr(Path, "rename", rename)
        if not (datadir / MARKER).exists():
            state = read_state(site)
            assert state is not None
            place(site, state, account, LEFTOVERS)
        clear(site)
        assert restored(datadir) == KEPT
        assert datadir.stat().st_uid == account.uid
    assert survived > 5


@root
def test_what_appears_in_the_data_directory_meanwhile_is_never_overwritten(
    mounted: Path, tmp_path: Path, account: Account
) -> None:
    for datadir, name in ((mounted, "ibdata1"), (tmp_path / "mysql", "ibdata1"), (mounted, "mine.txt")):
        site = staged(datadir)
        datadir.mkdir(exist_ok=True)
        (datadir / name).write_bytes(b"precious")
        with pytest.raises((RefusedError, BackupdError)):
            place(site, STATE, account, LEFTOVERS)
        assert (datadir / name).read_bytes() == b"precious"
        (datadir / name).unlink()
        clear(site)


def test_a_symlinked_data_directory_is_restored_where_it_points_to(tmp_path: Path, account: Account) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "mysql").symlink_to("big")
    site = staged(tmp_path / "mysql")
    place(site, STATE, account, LEFTOVERS)
    assert (tmp_path / "mysql").is_symlink()
    assert restored(tmp_path / "big") == KEPT


@root
def test_a_bind_mount_of_the_same_file_system_is_a_mount_point_too(tmp_path: Path) -> None:
    for name in ("real", "with space"):
        (tmp_path / name).mkdir()
    subprocess.run(["mount", "--bind", str(tmp_path / "real"), str(tmp_path / "with space")], check=True)
    try:
        assert choose_site(tmp_path / "with space").inside
        assert not choose_site(tmp_path / "real").inside
    finally:
        subprocess.run(["umount", str(tmp_path / "with space")], check=True)


def test_a_second_restore_into_the_same_place_is_refused_also_after_the_rename(tmp_path: Path) -> None:
    (tmp_path / "mysql.restoring").mkdir()
    with exclusive(tmp_path / "mysql", tmp_path / "mysql.restoring"):
        with pytest.raises(RefusedError, match="another restore"), exclusive(tmp_path / "mysql.restoring"):
            pass
        (tmp_path / "mysql.restoring").rename(tmp_path / "mysql")
        with pytest.raises(RefusedError, match="another restore"), exclusive(tmp_path / "mysql"):
            pass
    with exclusive(tmp_path / "mysql"):
        pass


def test_the_state_survives_being_written_and_adds_up_the_time_of_all_attempts(tmp_path: Path) -> None:
    site = choose_site(tmp_path / "mysql")
    site.folder.mkdir()
    assert read_state(site) is None
    state = STATE.with_phase(Phase("fetched", 2.0, 10)).with_phase(Phase("fetched", 3.0, 10))
    write_state(site, state)
    assert read_state(site) == state
    assert state.phases == (Phase("fetched", 5.0, 10),)
    (site.folder / "restore.json").write_text("{}")
    with pytest.raises(RefusedError, match=r"restore\.json"):
        read_state(site)


def test_a_user_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RefusedError, match="no user 'nobody-knows'"):
        find_account("nobody-knows")


def test_the_staging_folder_of_an_earlier_attempt_decides_where_the_next_one_works(tmp_path: Path) -> None:
    (tmp_path / "mysql" / INSIDE).mkdir(parents=True)
    assert choose_site(tmp_path / "mysql").inside
    assert staging.BESIDE == ".restoring"
