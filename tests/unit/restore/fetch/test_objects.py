from __future__ import annotations

import io
import os
import random
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.model.errors import (
    BackupdError,
    CancelledError,
    DamagedError,
    DestinationError,
    KeyUnusableError,
)
from backupd.model.job import Progress
from backupd.model.manifest import Body, Entry, Header
from backupd.process.run_context import RunContext
from backupd.transfer.records.encryption import Unsealer
from restore.fetch.objects import Fetched, fetch
from restore.fetch.sources import Loaded, Sources
from storage import layout
from storage.destination import Destination
from tests.support.keys import Keys
from tests.support.restores.builder import Builder, GpgOpener, files_below
from tests.support.stores.memory import MemoryDestination

PART = 64 * 1024
HOLES = bytes(3 * PART // 2) + b"x" + bytes(2 * PART)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    dice = random.Random(20261121)
    return {
        "ibdata1": dice.randbytes(5 * PART + 17),
        "shop/t.ibd": dice.randbytes(PART),
        "shop/t'\"`$ \n\\.frm": b"frm" * 40,
        "shop/empty.MYD": b"",
        "shop/sparse.ibd": HOLES,
        "shop/twin.ibd": dice.randbytes(700),
        "deep/er/path/x.frm": b"deep",
        "zeros": bytes(4 * PART),
        "n" * 255: dice.randbytes(600),
    }


@pytest.fixture(scope="module")
def made(keys: Keys, files: dict[str, bytes]) -> tuple[Builder, Header, Body]:
    builder = Builder(keys, part=PART)
    return builder, *builder.manifest(builder.entries(files, sparse=["shop/sparse.ibd"]))


@pytest.fixture
def local(made: tuple[Builder, Header, Body]) -> MemoryDestination:
    return stored(made, "local")


def stored(made: tuple[Builder, Header, Body], name: str) -> MemoryDestination:
    destination = MemoryDestination(name)
    made[0].put(destination, made[1])
    return destination


def get(
    made: tuple[Builder, Header, Body],
    keys: Keys,
    folder: Path,
    *destinations: Destination,
    opener: Unsealer | None = None,
    workers: int = 3,
) -> Fetched:
    sources = Sources(destinations, opener or GpgOpener(keys))
    return fetch(Loaded(made[1], made[2]), sources, folder, RunContext(workers=workers))


def spoil(destination: Destination, name: str, change: str) -> None:
    key = layout.object_key(name)
    with destination.get(key) as stream:
        content = bytearray(stream.read())
    if change == "flipped":
        content[len(content) // 2] ^= 1
    elif change == "cut":
        del content[-1]
    elif change == "longer":
        content += b"x"
    else:
        destination.delete(key)
        return
    destination.put(key, io.BytesIO(bytes(content)))


def object_of(made: tuple[Builder, Header, Body], path: str, index: int = 0) -> str:
    return next(entry for entry in made[2].entries if entry.path == path).objects[index]


class Counting(GpgOpener):
    """Counts what is opened; may stop working after a while."""

    def __init__(self, keys: Keys, stop_after: int | None = None) -> None:
        super().__init__(keys)
        self._stop_after = stop_after
        self._lock = threading.Lock()
        self.opened = 0

    def unseal(self, stored: bytes, *, limit: int) -> bytes:
        with self._lock:
            self.opened += 1
            if self._stop_after is not None and self.opened > self._stop_after:
                raise KeyUnusableError("the agent is gone")
        return super().unseal(stored, limit=limit)


def test_every_file_arrives_whatever_its_name_size_or_holes(
    made: tuple[Builder, Header, Body],
    keys: Keys,
    files: dict[str, bytes],
    local: MemoryDestination,
    tmp_path: Path,
) -> None:
    got = get(made, keys, tmp_path / "data", local)
    assert files_below(tmp_path / "data") == files
    assert got == Fetched(sum(map(len, files.values())), len(files), 0, ())


def test_holes_stay_holes_where_the_source_had_them(
    made: tuple[Builder, Header, Body], keys: Keys, local: MemoryDestination, tmp_path: Path
) -> None:
    get(made, keys, tmp_path, local)
    assert (tmp_path / "shop/sparse.ibd").stat().st_blocks * 512 <= 3 * 4096
    assert (tmp_path / "zeros").stat().st_blocks * 512 >= 4 * PART


def test_equal_content_is_fetched_once(keys: Keys, tmp_path: Path) -> None:
    builder = Builder(keys, part=PART)
    files = {f"t{number}.ibd": bytes(PART) + b"y" * PART for number in range(5)}
    made = (builder, *builder.manifest(builder.entries(files)))
    counting = Counting(keys)
    get(made, keys, tmp_path, stored(made, "local"), opener=counting)
    assert files_below(tmp_path) == files
    assert counting.opened == 2


@pytest.mark.parametrize("change", ["flipped", "cut", "longer", "missing"])
@pytest.mark.parametrize("path", ["ibdata1", "deep/er/path/x.frm"])
def test_a_damaged_object_is_named_with_its_files_and_nothing_is_silently_wrong(
    made: tuple[Builder, Header, Body],
    keys: Keys,
    local: MemoryDestination,
    tmp_path: Path,
    change: str,
    path: str,
) -> None:
    name = object_of(made, path)
    spoil(local, name, change)
    with pytest.raises(DamagedError) as damaged:
        get(made, keys, tmp_path, local)
    assert len(damaged.value.damages) == 1
    assert "local" in damaged.value.damages[0]
    assert layout.object_key(name) in damaged.value.damages[0]
    assert repr(path) in damaged.value.damages[0]


def test_every_damage_is_named_not_only_the_first(
    made: tuple[Builder, Header, Body], keys: Keys, local: MemoryDestination, tmp_path: Path
) -> None:
    names = {object_of(made, "ibdata1", 1), object_of(made, "ibdata1", 4), object_of(made, "shop/t.ibd")}
    for name in names:
        spoil(local, name, "flipped")
    with pytest.raises(DamagedError) as damaged:
        get(made, keys, tmp_path, local)
    assert {name for name in names if any(name in line for line in damaged.value.damages)} == names


def test_another_copy_stands_in_for_each_damaged_object(
    made: tuple[Builder, Header, Body],
    keys: Keys,
    files: dict[str, bytes],
    local: MemoryDestination,
    tmp_path: Path,
) -> None:
    offsite = stored(made, "offsite")
    spoil(local, object_of(made, "ibdata1"), "flipped")
    spoil(offsite, object_of(made, "shop/t.ibd"), "missing")
    got = get(made, keys, tmp_path, local, offsite)
    assert files_below(tmp_path) == files
    assert len(got.repaired) == 1
    assert "local" in got.repaired[0]


def test_the_same_object_damaged_everywhere_is_named_at_each_place(
    made: tuple[Builder, Header, Body], keys: Keys, local: MemoryDestination, tmp_path: Path
) -> None:
    offsite = stored(made, "offsite")
    for destination in (local, offsite):
        spoil(destination, object_of(made, "ibdata1"), "cut")
    with pytest.raises(DamagedError) as damaged:
        get(made, keys, tmp_path, local, offsite)
    assert sorted(line.split(":")[0] for line in damaged.value.damages) == ["local", "offsite"]


def test_plaintext_that_is_not_what_the_manifest_says_is_damage(
    made: tuple[Builder, Header, Body], keys: Keys, local: MemoryDestination, tmp_path: Path
) -> None:
    body = made[2]
    swapped = [
        replace(e, parts=(replace(e.parts[0], object=e.parts[1].object), *e.parts[1:])) if e.path == "ibdata1" else e
        for e in body.entries
    ]
    with pytest.raises(DamagedError, match="differs from the one backed up"):
        fetch(
            Loaded(made[1], replace(body, entries=tuple(swapped))),
            Sources([local], GpgOpener(keys)),
            tmp_path,
            RunContext(workers=2),
        )


def test_good_parts_in_the_wrong_order_are_not_the_file(
    made: tuple[Builder, Header, Body], keys: Keys, local: MemoryDestination, tmp_path: Path
) -> None:
    def turned(entry: Entry) -> Entry:
        return replace(entry, parts=(entry.parts[1], entry.parts[0], *entry.parts[2:]))

    entries = tuple(turned(e) if e.path == "ibdata1" else e for e in made[2].entries)
    with pytest.raises(DamagedError, match="do not form the original file"):
        fetch(
            Loaded(made[1], replace(made[2], entries=entries)),
            Sources([local], GpgOpener(keys)),
            tmp_path,
            RunContext(workers=2),
        )


def test_an_unreachable_destination_is_trouble_not_damage(
    made: tuple[Builder, Header, Body],
    keys: Keys,
    files: dict[str, bytes],
    local: MemoryDestination,
    tmp_path: Path,
) -> None:
    gone = MemoryDestination("gone", initialised=False)
    with pytest.raises(DestinationError, match="could not be read"):
        get(made, keys, tmp_path, gone)
    get(made, keys, tmp_path, gone, local)
    assert files_below(tmp_path) == files


def test_without_the_key_it_stops_at_once(
    made: tuple[Builder, Header, Body], keys: Keys, local: MemoryDestination, tmp_path: Path
) -> None:
    counting = Counting(keys, stop_after=0)
    with pytest.raises(KeyUnusableError):
        get(made, keys, tmp_path, local, opener=counting)
    assert counting.opened <= 3


def test_an_interrupted_fetch_continues_and_fetches_only_what_is_missing(
    made: tuple[Builder, Header, Body],
    keys: Keys,
    files: dict[str, bytes],
    local: MemoryDestination,
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyUnusableError):
        get(made, keys, tmp_path, local, opener=Counting(keys, stop_after=6), workers=1)
    counting = Counting(keys)
    got = get(made, keys, tmp_path, local, opener=counting)
    assert files_below(tmp_path) == files
    assert counting.opened == len(made[1].objects) - 6
    assert got.reused > 0


def test_what_an_earlier_attempt_left_is_believed_only_by_its_hash(
    made: tuple[Builder, Header, Body],
    keys: Keys,
    files: dict[str, bytes],
    local: MemoryDestination,
    tmp_path: Path,
) -> None:
    get(made, keys, tmp_path, local)
    with (tmp_path / "ibdata1").open("r+b") as file:
        file.seek(3 * PART + 5)
        file.write(b"!")
    (tmp_path / "shop/t.ibd").write_bytes(b"short")
    (tmp_path / "shop/sparse.ibd").write_bytes(b"\xff" * len(HOLES))
    (tmp_path / "left.over").write_bytes(b"of a prepare")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zeros").unlink()
    (tmp_path / "zeros").symlink_to("/etc/passwd")
    counting = Counting(keys)
    get(made, keys, tmp_path, local, opener=counting)
    assert files_below(tmp_path) == files
    assert not (tmp_path / "folder").exists()
    assert not (tmp_path / "zeros").is_symlink()
    assert counting.opened < len(made[1].objects)


def test_a_symlink_in_the_way_is_never_followed(
    made: tuple[Builder, Header, Body],
    keys: Keys,
    files: dict[str, bytes],
    local: MemoryDestination,
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "t.ibd").write_bytes(b"precious")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/shop").symlink_to(outside)
    get(made, keys, tmp_path / "data", local)
    assert (outside / "t.ibd").read_bytes() == b"precious"
    assert files_below(tmp_path / "data") == files


def test_progress_grows_to_the_whole(
    made: tuple[Builder, Header, Body], keys: Keys, local: MemoryDestination, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    context = RunContext(workers=1, report=seen.append)
    fetch(Loaded(made[1], made[2]), Sources([local], GpgOpener(keys)), tmp_path, context)
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    assert (seen[-1].bytes_done, seen[-1].files_done) == (seen[-1].bytes_total, seen[-1].files_total)


def test_a_cancelled_fetch_stops_and_says_that_it_can_go_on(
    made: tuple[Builder, Header, Body], keys: Keys, local: MemoryDestination, tmp_path: Path
) -> None:
    with pytest.raises(CancelledError, match="cancelled"):
        context = RunContext(workers=2)
        context.cancel.set()
        fetch(Loaded(made[1], made[2]), Sources([local], GpgOpener(keys)), tmp_path, context)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_file_system_says_so_and_the_next_run_continues(
    made: tuple[Builder, Header, Body],
    keys: Keys,
    files: dict[str, bytes],
    local: MemoryDestination,
    tmp_path: Path,
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(small)], check=True)
    try:
        with pytest.raises(BackupdError, match="No space left") as full:
            get(made, keys, small, local)
        assert "repeat the command" in full.value.hint
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        get(made, keys, small, local)
        assert files_below(small) == files
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_never_more_objects_are_in_memory_than_there_are_workers(keys: Keys, tmp_path: Path) -> None:
    builder = Builder(keys, part=1 << 20, seal=lambda _keys, plain: plain)
    content = random.Random(7).randbytes(24 << 20)
    made = (builder, *builder.manifest(builder.entries({"big": content})))
    lock = threading.Lock()
    meeting = threading.Barrier(3)
    most = current = 0

    class Plain(GpgOpener):
        def unseal(self, stored: bytes, *, limit: int) -> bytes:
            nonlocal most, current
            with lock:
                current += 1
                most = max(most, current)
            meeting.wait(120)  # 24 parts: all three workers always come together
            with lock:
                current -= 1
            return stored[:limit]

    get(made, keys, tmp_path, stored(made, "local"), opener=Plain(keys), workers=3)
    assert most == 3
    assert (tmp_path / "big").read_bytes() == content
