"""Whoever owns the folder of a destination, in which a service that runs as root reads, writes and deletes."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backupd.model.errors import DestinationError
from storage import layout
from storage.filesystem import FilesystemDestination
from tests.support.stores.stock import START, backup_id, named, put

SECRET = b"root's own"
ITEM = named(b"content")
OBJECT = layout.object_key(ITEM.name)
MANIFEST = layout.manifest_key("shop", backup_id(1))
TREE = layout.tree_name("shop", backup_id(1))


@pytest.fixture
def place(tmp_path: Path) -> FilesystemDestination:
    found = FilesystemDestination("local", tmp_path / "store")
    found.initialise(START)
    put(found, OBJECT, b"x")
    put(found, MANIFEST, b"{}")
    return found


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of root's, in which there is what a store has, too."""
    folder = tmp_path / "victim"
    (folder / "old.tree").mkdir(parents=True)
    for name in ("passwd", "old.tree/file", ITEM.name, "manifest.json"):
        (folder / name).write_bytes(SECRET)
    (folder / "files").mkdir()
    (folder / "files/a").write_bytes(SECRET)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def turned(place: FilesystemDestination, key: str, to: Path) -> None:
    """Where ``key`` was, a link leads ``to``."""
    found = place.root / key
    if found.is_dir():
        shutil.rmtree(found)
    else:
        found.unlink(missing_ok=True)
    found.symlink_to(to)


@pytest.mark.parametrize(
    "doing",
    [
        FilesystemDestination.clear_leftovers,
        lambda place: list(place.leftovers()),
        lambda place: put(place, MANIFEST, b"new"),
        lambda place: place.remove_tree(TREE),
    ],
)
def test_a_link_in_the_place_of_temporary_files_leads_nowhere(
    place: FilesystemDestination, victim: Path, doing: Callable[[FilesystemDestination], object]
) -> None:
    """Everything in it counts as left behind by somebody who died, and is deleted."""
    place.link(OBJECT, TREE, "files/a")
    place.publish(TREE)
    before = contents(victim)
    turned(place, ".tmp", victim)
    with pytest.raises(DestinationError) as failed:
        doing(place)
    assert "is a symbolic link" in failed.value.detail
    assert contents(victim) == before


@pytest.mark.parametrize(
    ("key", "way"),
    [
        (OBJECT, OBJECT.rpartition("/")[0]),
        (OBJECT, "objects"),
        (MANIFEST, MANIFEST.rpartition("/")[0]),
        (MANIFEST, "servers/shop"),
    ],
)
def test_nothing_is_written_read_or_deleted_behind_a_link(
    place: FilesystemDestination, victim: Path, key: str, way: str
) -> None:
    inner = victim / key.removeprefix(way + "/")
    inner.parent.mkdir(parents=True, exist_ok=True)
    inner.write_bytes(SECRET)
    before = contents(victim)
    turned(place, way, victim)
    for doing in (
        lambda: put(place, key, b"new"),
        lambda: place.get(key),
        lambda: place.stat(key),
        lambda: place.delete(key),
        lambda: place.identity(key),
    ):
        with pytest.raises(DestinationError) as failed:
            doing()
        assert "is a symbolic link" in failed.value.detail
    with pytest.raises(DestinationError):
        place.link(OBJECT, TREE, "files/a")
        place.publish(TREE)
        place.remove_tree(TREE)
    assert contents(victim) == before


def test_what_is_no_file_is_not_read_and_not_waited_for(place: FilesystemDestination, tmp_path: Path) -> None:
    secret = tmp_path / "shadow"
    secret.write_bytes(SECRET)
    turned(place, MANIFEST, secret)
    with pytest.raises(DestinationError) as failed:
        place.get(MANIFEST)
    assert "is a symbolic link" in failed.value.detail
    (place.root / MANIFEST).unlink()
    os.mkfifo(place.root / MANIFEST)
    with pytest.raises(DestinationError) as failed:
        place.get(MANIFEST)
    assert "it is not a file" in failed.value.detail
    for made in ("link", "pipe"):
        (place.root / ".tmp" / made).symlink_to(secret) if made == "link" else os.mkfifo(place.root / ".tmp" / made)
    assert place.clear_leftovers() == 2
    assert secret.read_bytes() == SECRET


def test_a_folder_that_becomes_a_link_in_the_middle_leads_nowhere(place: FilesystemDestination, victim: Path) -> None:
    """Between the look and the deed: the name is turned to and fro all the time."""
    folder, away = place.root / "servers/shop", place.root / "servers/aside"
    (victim / backup_id(1)).mkdir()
    (victim / backup_id(1) / "manifest.json").write_bytes(SECRET)
    before = contents(victim)
    ended = threading.Event()

    def turn() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                folder.rename(away)
                folder.symlink_to(victim)
                folder.unlink()
                away.rename(folder)

    turning = threading.Thread(target=turn)
    turning.start()
    try:
        until, tries = time.monotonic() + 1.5, 0
        while time.monotonic() < until:
            tries += 1
            for doing in (
                lambda: place.delete(MANIFEST),
                lambda: put(place, MANIFEST, b"{}"),
                lambda: place.get(MANIFEST).read(),
                lambda: place.remove_tree(TREE),
            ):
                with contextlib.suppress(DestinationError):
                    assert doing() != SECRET
            assert contents(victim) == before
    finally:
        ended.set()
        turning.join()
    assert tries > 20
