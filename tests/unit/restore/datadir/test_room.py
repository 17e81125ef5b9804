from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from backupd.model.errors import RefusedError
from backupd.model.manifest import Entry, Part, StoredObject
from restore.datadir.occupancy import RESERVE, measure, refuse_too_small

MIB = 1024 * 1024


def entry(path: str, size: int, *, sparse: bool = False) -> Entry:
    return Entry(path, size, "", parts=(Part("o", size, ""),), sparse=sparse)


def test_the_need_counts_files_growth_redo_and_reserve() -> None:
    need = measure(
        [([entry("a", 10 * MIB), entry("b", 1)], {"o": StoredObject("o", MIB, "")})],
        redo_applied=3 * MIB,
        redo_log=96 * MIB,
    )
    assert need.bytes == 10 * MIB + 4096 + 3 * MIB + 96 * MIB + RESERVE
    assert need.inodes == 2
    assert "100,663,296 bytes for the server's own redo log" in need.describe()


def test_increments_count_twice_where_they_are_copied_over_what_is_there() -> None:
    stored = {"o": StoredObject("o", MIB, "")}
    need = measure(
        [
            ([entry("s/a.ibd", 10 * MIB), entry("s/n.MYD", 4 * MIB)], stored),
            ([entry("s/a.ibd.delta", 2 * MIB), entry("s/n.MYD", 5 * MIB), entry("s/b.new", MIB)], stored),
            ([entry("s/a.ibd.delta", 2 * MIB), entry("s/n.MYD", 5 * MIB), entry("s/b.ibd.delta", MIB)], stored),
        ],
        redo_applied=MIB,
        redo_log=0,
    )
    # deltas each time, the part by which the MyISAM file grew, and the new table
    assert need.growth == MIB + (2 + 1 + 1) * MIB + (2 + 1) * MIB
    assert need.files == (14 + 8 + 8) * MIB
    assert need.inodes == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_too_little_room_is_said_in_bytes_before_anything_is_written(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m,nr_inodes=20", "none", str(small)], check=True)
    try:
        stored = {"o": StoredObject("o", MIB, "")}
        with pytest.raises(RefusedError, match="not enough space") as refused:
            refuse_too_small(measure([([entry("a", 50 * MIB)], stored)], redo_applied=0, redo_log=0), small)
        assert f"{50 * MIB:,} bytes of files" in refused.value.detail
        assert f"missing: {50 * MIB + RESERVE - 100 * MIB:,} bytes" in refused.value.detail
        assert refuse_too_small(measure([([entry("a", 20 * MIB)], stored)], redo_applied=0, redo_log=0), small) == ()
        sparse = measure([([entry("a", 500 * MIB, sparse=True)], stored)], redo_applied=0, redo_log=0)
        assert "stay sparse" in refuse_too_small(sparse, small)[0]
        many = [entry(f"t{number}", 10) for number in range(30)]
        with pytest.raises(RefusedError, match="inodes"):
            refuse_too_small(measure([(many, stored)], redo_applied=0, redo_log=0), small)
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
