"""Threads that write and delete in the same folders of one file system, so that folders come and go under them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from storage.filesystem import FilesystemDestination
from storage.folder import Folder
from tests.contract.destination import get, keys, put

_KEYS = [f"servers/shop-db1/20261121T020000Z-0a1b2c3d/side-{number}.zst.gpg" for number in range(8)]


@pytest.fixture
def local(tmp_path: Path) -> FilesystemDestination:
    destination = FilesystemDestination("local", tmp_path / "backups")
    destination.initialise(datetime.now(UTC))
    return destination


def test_deletions_in_one_folder_at_once_all_succeed(local: FilesystemDestination) -> None:
    """Whoever removed a file may find its folder gone, because another found it empty and removed it."""
    with ThreadPoolExecutor(8) as pool:
        for _ in range(40):
            list(pool.map(lambda key: put(local, key, b"x"), _KEYS))
            list(pool.map(local.delete, _KEYS))
            assert keys(local, "servers/") == []


def test_a_folder_that_went_before_its_removal_was_made_durable(
    local: FilesystemDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(local, _KEYS[0], b"x")
    sync = Folder.sync

    def later(folder: Path) -> None:
        if folder.name.endswith("0a1b2c3d") and folder.is_dir():
            folder.rmdir()  # as another thread does, that also deleted the last file of it
        sync(folder)

    monkeypatch.setattr(Folder, "sync", staticmethod(later))
    local.delete(_KEYS[0])
    assert keys(local, "servers/") == []


def test_writes_go_on_while_others_empty_their_folder(local: FilesystemDestination) -> None:
    def churn(number: int) -> None:
        for turn in range(60):
            content = f"{number} {turn}".encode()
            put(local, _KEYS[number], content)
            assert get(local, _KEYS[number]) == content
            local.delete(_KEYS[number])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert keys(local, "servers/") == []
