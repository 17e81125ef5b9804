from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backupd.model.errors import ToolError
from restore.datadir.occupancy import FLOOR, available_memory, choose_memory

MIB = 1024 * 1024
GIB = 1024 * MIB


def test_more_redo_means_more_memory_until_the_cap() -> None:
    chosen = [choose_memory(redo=redo, available=64 * GIB, cap=16 * GIB) for redo in (0, GIB, 2 * GIB, 9 * GIB)]
    assert chosen == [8 * GIB, 10 * GIB, 12 * GIB, 16 * GIB]


def test_more_free_memory_means_more_memory_until_the_cap() -> None:
    chosen = [choose_memory(redo=GIB, available=free, cap=4 * GIB) for free in (GIB, 2 * GIB, 8 * GIB, 99 * GIB)]
    assert chosen == sorted(chosen)
    assert chosen[0] == GIB // 2
    assert chosen[-1] == 4 * GIB


@given(st.integers(0, 2**45), st.integers(0, 2**45), st.integers(FLOOR, 2**45), st.integers(0, 2**40))
def test_the_choice_is_monotonous_bounded_and_whole(redo: int, available: int, cap: int, more: int) -> None:
    chosen = choose_memory(redo=redo, available=available, cap=cap)
    assert FLOOR <= chosen <= cap
    assert chosen % MIB == 0
    assert chosen <= max(FLOOR, available // 2)
    assert choose_memory(redo=redo + more, available=available, cap=cap) >= chosen
    assert choose_memory(redo=redo, available=available + more, cap=cap) >= chosen


def test_free_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    assert available_memory() > 64 * MIB
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1 kB\nMemAvailable:   2048 kB\n")
    assert available_memory(meminfo) == 2 * MIB
    meminfo.write_text("MemTotal: 1 kB\n")
    with pytest.raises(ToolError):
        available_memory(meminfo)
