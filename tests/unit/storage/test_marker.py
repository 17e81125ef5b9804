"""A place has one id, whatever it is called and by whichever way one gets there."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from backupd.process.throttle import TokenBucket
from storage.destination import repository_id
from storage.filesystem import FilesystemDestination
from storage.throttle_and_breaker import throttled
from tests.support.stores.memory import MemoryDestination

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def test_one_folder_has_one_id_under_every_name_and_another_folder_another(tmp_path: Path) -> None:
    one, other = FilesystemDestination("one", tmp_path / "a"), FilesystemDestination("other", tmp_path / "b")
    one.initialise(NOW)
    other.initialise(NOW)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    linked = throttled(FilesystemDestination("linked", tmp_path / "link"), put=TokenBucket(1 << 20))
    assert repository_id(one) == repository_id(linked) is not None
    assert repository_id(one) != repository_id(other)


def test_a_marker_that_nobody_can_read_tells_no_id(tmp_path: Path) -> None:
    one = FilesystemDestination("one", tmp_path)
    for text in (b"broken", b"[1]", b'{"id": 3}', b"\xff"):
        (tmp_path / "repository.json").write_bytes(text)
        assert repository_id(one) is None
    assert repository_id(MemoryDestination("memory")) is None
