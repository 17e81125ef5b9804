from __future__ import annotations

import hashlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backupd.model.manifest import Entry, Part
from restore.fetch.objects import Assembly, lay_out

PART = 8192


def entry_of(content: bytes, *, sparse: bool = False) -> Entry:
    slices = [content[at : at + PART] for at in range(0, len(content), PART)]
    parts = tuple(Part(f"o{n}", len(piece), hashlib.sha256(piece).hexdigest()) for n, piece in enumerate(slices))
    return Entry("t", len(content), hashlib.sha256(content).hexdigest(), parts=parts, sparse=sparse)


@pytest.mark.parametrize("seed", range(20))
def test_slices_in_any_order_from_many_threads_are_judged_once_and_right(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    dice = random.Random(seed)
    content = bytes(PART) + dice.randbytes(20 * PART + 100) + bytes(3 * PART)
    entry = entry_of(content, sparse=seed % 2 == 0)
    assembly = Assembly(entry, tmp_path / "t", fresh=True)
    order = list(range(len(entry.parts)))
    dice.shuffle(order)
    verdicts: list[bool | None] = []
    start = threading.Barrier(4)

    def work(share: list[int]) -> None:
        start.wait()
        for index in share:
            assembly.write(index, content[index * PART : (index + 1) * PART])
            verdicts.append(assembly.judge())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [order[number::4] for number in range(4)]))
    assert [verdict for verdict in verdicts if verdict is not None] == [True]
    assert (tmp_path / "t").read_bytes() == content


@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_on_disk_is_taken_only_where_its_hash_is_right(tmp_path: Path, sparse: bool) -> None:
    content = bytes(2 * PART) + b"x" * PART + bytes(PART)
    entry = entry_of(content, sparse=sparse)
    spoilt = bytearray(content)
    spoilt[2 * PART + 7] = 0
    (tmp_path / "t").write_bytes(spoilt)
    (assembly,) = lay_out([entry], tmp_path)
    assert [assembly.intact(index) for index in range(4)] == [True, True, False, True]
    assert assembly.judge() is None
    assembly.write(2, b"x" * PART)
    assert assembly.judge() is True
    assert (tmp_path / "t").read_bytes() == content


def test_a_hole_where_the_source_had_data_counts_as_not_yet_written(tmp_path: Path) -> None:
    entry = entry_of(bytes(2 * PART))
    with (tmp_path / "t").open("wb") as file:
        file.truncate(2 * PART)
    (assembly,) = lay_out([entry], tmp_path)
    assert [assembly.intact(index) for index in range(2)] == [False, False]
