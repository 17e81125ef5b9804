from __future__ import annotations

import errno
import io
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from backupd.model.errors import DestinationError, DestinationFullError, ObjectMissingError, RefusedError
from storage import layout
from storage.destination import Capability
from storage.filesystem import FilesystemDestination
from tests.contract.destination import KEY, OTHER, PART, SLOW_SOURCE, TREE, TreeContract, get, keys, put

NOW = datetime(2026, 11, 21, 4, 25, 12, tzinfo=UTC)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount or to become somebody else")


def opened(root: Path) -> FilesystemDestination:
    destination = FilesystemDestination("local", root)
    destination.initialise(NOW)
    return destination


@pytest.fixture
def local(tmp_path: Path) -> FilesystemDestination:
    return opened(tmp_path / "backups")


class TestFilesystem(TreeContract):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> FilesystemDestination:
        return opened(tmp_path / "backups")

    @pytest.fixture
    def bare(self, tmp_path: Path) -> FilesystemDestination:
        return FilesystemDestination("local", tmp_path / "backups")


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# What it looks like on disk


def test_files_and_folders_have_their_modes_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        local = opened(tmp_path / "backups")
        put(local, KEY, b"x")
        local.link(KEY, TREE, "shop/a")
        local.publish(TREE)
    finally:
        os.umask(before)
    for path in (tmp_path / "backups").rglob("*"):
        expected = 0o750 if path.is_dir() else 0o640
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_listing_skips_what_is_not_ours(local: FilesystemDestination) -> None:
    put(local, KEY, b"x")
    (local.root / ".hidden").write_text("x")
    (local.root / "objects" / ".nfs0001").write_text("x")
    assert keys(local, "") == [KEY, layout.REPOSITORY]


def test_every_put_is_synced_before_it_is_renamed_and_the_folder_after(
    local: FilesystemDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(local, OTHER, b"makes the folders")
    steps: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        steps.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        real_sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    put(local, OTHER, b"again")
    assert steps == ["sync file", "rename", "sync folder"]


def test_publish_syncs_every_folder_of_the_tree_before_the_rename(
    local: FilesystemDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(local, KEY, b"x")
    local.link(KEY, TREE, "a/b/c")
    steps: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        steps.append(str(Path(f"/proc/self/fd/{descriptor}").readlink().name))
        real_sync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        steps.append(f"rename {self.name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    local.publish(TREE)
    name = TREE.rpartition("/")[2]
    moved = steps.index(f"rename {name}.partial")
    assert set(steps[:moved]) >= {"a", "b", f"{name}.partial"}
    assert steps[moved + 1] == name


# Killed, full, forbidden, gone

WRITER = f"""
{SLOW_SOURCE}
from pathlib import Path
from storage.filesystem import FilesystemDestination

FilesystemDestination("local", Path(sys.argv[1])).put(sys.argv[2], Slow())
"""


def start_writer(root: Path) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), KEY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(layout.__file__).parents[1],
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "midway\n"
    return writer


def test_a_kill_midway_leaves_no_object_and_the_next_run_clears_the_rest(local: FilesystemDestination) -> None:
    with start_writer(local.root) as writer:
        assert list(local.leftovers()) == [], "the file of a living writer is no leftover"
        assert local.clear_leftovers() == 0
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert keys(local) == []
    with pytest.raises(ObjectMissingError):
        local.stat(KEY)
    assert len(list(local.leftovers())) == 1
    assert local.clear_leftovers() == 1
    assert list(local.leftovers()) == []
    assert files(local.root) == [layout.REPOSITORY]


def test_a_half_removed_tree_is_a_leftover(local: FilesystemDestination, monkeypatch: pytest.MonkeyPatch) -> None:
    put(local, KEY, b"x")
    for path in "abc":
        local.link(KEY, TREE, f"shop/{path}")
    local.publish(TREE)

    def power_cut(_path: Path, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("storage.folder.shutil.rmtree", power_cut)
        with pytest.raises(KeyboardInterrupt):
            local.remove_tree(TREE)
    assert list(local.trees()) == []
    assert len(list(local.leftovers())) == 1
    assert local.clear_leftovers() == 1
    assert files(local.root) == [KEY, layout.REPOSITORY]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB and 60 inodes of its own."""
    point = tmp_path / "disk"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=60", "tmpfs", str(point)], check=True)
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


@as_root
def test_a_full_disk_is_told_with_its_free_bytes_and_leaves_nothing(mounted: Path) -> None:
    local = opened(mounted)
    put(local, OTHER, b"y" * PART)
    with pytest.raises(DestinationFullError) as caught:
        put(local, KEY, b"x" * (8 * PART))
    found = re.search(r"(\d+) bytes free", caught.value.detail)
    assert found is not None
    assert 3 * PART - 64 * 1024 <= int(found.group(1)) <= 3 * PART
    assert str(mounted) in caught.value.message
    assert keys(local) == [OTHER]
    assert files(mounted) == sorted([OTHER, layout.REPOSITORY])
    space = local.space()
    assert space is not None
    assert space.free >= 3 * PART - 64 * 1024
    put(local, KEY, b"x" * PART)
    assert keys(local) == [KEY, OTHER]


@as_root
def test_running_out_of_inodes_is_a_full_disk_too(mounted: Path) -> None:
    local = opened(mounted)
    put(local, OTHER, b"y")

    def fill() -> None:
        for index in range(100):
            put(local, f"pins/p{index}.json", b"x")

    with pytest.raises(DestinationFullError, match="inodes"):
        fill()
    assert list(local.leftovers()) == []
    assert get(local, OTHER) == b"y"


@as_root
def test_an_unmounted_disk_is_noticed_by_every_call(mounted: Path) -> None:
    local = opened(mounted)
    put(local, KEY, b"x")
    assert get(local, KEY) == b"x"
    subprocess.run(["umount", str(mounted)], check=True)
    try:
        assert not local.is_initialised()
        for ask in (
            lambda: put(local, OTHER, b"x"),
            lambda: get(local, KEY),
            lambda: local.stat(KEY),
            lambda: keys(local),
            lambda: local.delete(KEY),
            lambda: local.link(KEY, TREE, "a"),
            lambda: list(local.trees()),
        ):
            with pytest.raises(DestinationError) as caught:
                ask()
            assert not isinstance(caught.value, ObjectMissingError)
            assert "mounted" in caught.value.hint
        assert list(mounted.iterdir()) == [], "nothing may be written below a mount point"
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(mounted)], check=True)


@as_root
def test_a_read_only_disk_is_told_with_a_hint(mounted: Path) -> None:
    local = opened(mounted)
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    with pytest.raises(DestinationError) as caught:
        put(local, KEY, b"x")
    assert "Read-only" in caught.value.detail
    assert "writable" in caught.value.hint


def test_a_folder_that_vanished_is_told_as_that(local: FilesystemDestination) -> None:
    put(local, KEY, b"x")
    local.root.rename(local.root.with_name("elsewhere"))
    for ask in (lambda: put(local, KEY, b"x"), lambda: get(local, KEY), lambda: keys(local)):
        with pytest.raises(DestinationError) as caught:
            ask()
        assert not isinstance(caught.value, ObjectMissingError)
        assert str(local.root) in caught.value.message
    assert not local.root.exists()


@as_root
def test_a_folder_that_may_not_be_written_to_is_told_with_a_hint(short_tmp: Path) -> None:
    local = opened(short_tmp / "backups")
    local.root.chmod(0o755)
    script = (
        "import io, os, sys; from pathlib import Path\n"
        "from storage.filesystem import FilesystemDestination\n"
        "from backupd.model.errors import DestinationError\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    FilesystemDestination('local', Path(sys.argv[1])).put(sys.argv[2], io.BytesIO(b'x'))\n"
        "except DestinationError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(local.root), KEY],
        check=True,
        text=True,
        capture_output=True,
        cwd=Path(layout.__file__).parents[1],
    )
    assert "Permission denied" in done.stdout
    assert "65534" in done.stdout
    assert keys(local) == []


# Initialising


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_text("x")
    with pytest.raises(RefusedError, match="not empty"):
        FilesystemDestination("local", tmp_path).initialise(NOW)
    assert files(tmp_path) == ["holiday.jpg"]


def test_the_root_of_a_fresh_file_system_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    local = opened(tmp_path)
    assert local.is_initialised()
    assert keys(local, "") == [layout.REPOSITORY]


def test_the_parent_of_the_folder_is_not_made(tmp_path: Path) -> None:
    local = FilesystemDestination("local", tmp_path / "srv" / "backups")
    with pytest.raises(DestinationError) as caught:
        local.initialise(NOW)
    assert str(tmp_path / "srv") in caught.value.hint
    assert not (tmp_path / "srv").exists()


def test_of_two_who_initialise_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (FilesystemDestination(name, tmp_path) for name in ("first", "second"))
    real = os.link

    def link(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "link", real)
        second.initialise(NOW)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    first.initialise(NOW)
    assert first.is_initialised()
    assert files(tmp_path) == [layout.REPOSITORY]


def test_a_file_system_without_hard_links_has_no_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(_source: Any, _target: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        local = opened(tmp_path)
    assert local.capabilities == Capability.SPACE
    linked = Capability.TREE | Capability.COPIES
    assert opened(tmp_path.parent / "other").capabilities == Capability.SPACE | linked
    put(local, KEY, b"x")
    assert get(local, KEY) == b"x"


# Links


def test_when_links_run_out_new_ones_use_a_fresh_copy(
    local: FilesystemDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ext4 does at 65,000 links, here at 3."""
    real = os.link

    def link(source: Path, target: Path) -> None:
        if source.stat().st_nlink >= 3:
            raise OSError(errno.EMLINK, "Too many links")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    put(local, KEY, b"content")
    for index in range(5):
        local.link(KEY, TREE, f"t{index}")
    local.publish(TREE)
    inodes = [inode for _path, inode in local.tree_files(TREE)]
    assert inodes[0] == inodes[1] != inodes[2]
    assert inodes[2] == inodes[3] != inodes[4]
    assert inodes[4] == local.identity(KEY)
    for index in range(5):
        with local.open_tree_file(TREE, f"t{index}") as stream:
            assert stream.read() == b"content"
    assert list(local.leftovers()) == []


def test_the_real_limit_of_links_is_survived(local: FilesystemDestination) -> None:
    limit = os.pathconf(local.root, "PC_LINK_MAX")
    if not 0 < limit <= 65_000:
        pytest.skip(f"this file system allows {limit} links")
    put(local, KEY, b"content")
    many = local.root.parent / "many"
    many.mkdir()

    def use_up() -> None:
        for index in range(limit):
            os.link(local.root / KEY, many / str(index))

    with pytest.raises(OSError, match="Too many links"):
        use_up()
    old = local.identity(KEY)
    local.link(KEY, TREE, "a")
    local.publish(TREE)
    assert dict(local.tree_files(TREE))["a"] == local.identity(KEY) != old
    with local.open_tree_file(TREE, "a") as stream:
        assert stream.read() == b"content"


def test_a_put_survives_that_its_empty_folder_is_removed_meanwhile(
    local: FilesystemDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = layout.manifest_key("shop", "20261121T042512Z-7f3a9c01")
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", real)
        (local.root / key).parent.rmdir()
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    put(local, key, b"x")
    assert get(local, key) == b"x"


def test_a_disk_error_while_reading_is_a_destination_error(local: FilesystemDestination) -> None:
    (local.root / "pins" / "p.json").mkdir(parents=True)
    with pytest.raises(DestinationError) as caught:
        get(local, "pins/p.json")
    assert caught.value.detail == "Is a directory"


def test_reading_takes_no_more_memory_than_was_asked_for(local: FilesystemDestination) -> None:
    put(local, KEY, b"x" * 100)
    with local.get(KEY, length=5) as stream:
        assert isinstance(stream, io.BufferedReader)
        assert stream.read(1000) == b"xxxxx"
        assert stream.read(1000) == b""


@pytest.mark.parametrize("link", ["pins", "pins/shop", "pins/shop/a.json"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_below_the_root_is_refused_by_name_and_never_listed_as_nothing(
    local: FilesystemDestination, tmp_path: Path, link: str, *, dangling: bool
) -> None:
    put(local, "pins/shop/a.json", b"x")
    (local.root / link).rename(tmp_path / "elsewhere")
    (local.root / link).symlink_to(tmp_path / ("nowhere" if dangling else "elsewhere"))
    for prefix in ("", "pins/", "pins/shop/"):
        with pytest.raises(DestinationError) as caught:
            list(local.list(prefix))
        assert f"{local.root / link} is a symbolic link" in caught.value.detail
    assert list(local.list("intents/")) == []
