from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from backupd.model.manifest import Entry
from restore.runbook.shared_steps import render_unpack
from storage import layout
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys
from tests.support.restores.builder import Builder, files_below

ODD = [
    "a b",
    "quo'te",
    'dou"ble',
    "$HOME",
    "`id`",
    "$(id)",
    "-dash",
    "--help",
    "semi;colon",
    "star*",
    "back\\slash",
    "new\nline",
    "tab\t",
    "bang!",
    "#hash",
    "~tilde",
    "100%s",
    "ünï 表",
    "end\r",
    "\\\\two",
    "END_OF_THE_LIST_OF_FILES",
    "{brace}",
    "n" * 250,
    "sp ace/in/fol der",
    "-d/-f",
    "fol'der/x",
    "&amp",
    "byte\udcff\udc80",
]


def run(script: bytes, repository: Path, folder: Path, keys: Keys) -> subprocess.CompletedProcess[str]:
    path = folder.parent / "unpack.sh"
    path.write_bytes(script)
    return subprocess.run(
        ["sh", str(path), str(repository), str(folder)],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        env={"PATH": os.environ["PATH"], "GNUPGHOME": str(keys.secret_home)},
    )


def script_of(builder: Builder, entries: Sequence[Entry]) -> bytes:
    return render_unpack("20261121T020000Z-7f3a9c01", entries, builder.stored.values())


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    return path


def put(builder: Builder, repository: Path) -> None:
    for name, content in builder.sealed.items():
        if name != layout.BODY:
            (repository / layout.object_key(name)).parent.mkdir(parents=True, exist_ok=True)
            (repository / layout.object_key(name)).write_bytes(content)


def test_a_plain_shell_makes_every_file_whatever_its_name(keys: Keys, repository: Path, tmp_path: Path) -> None:
    seed = 11
    print("seed", seed)
    dice = random.Random(seed)
    builder = Builder(keys, part=4096, tiny=100)
    files = {name: dice.randbytes(dice.choice([0, 5, 99, 200, 4096, 9000])) for name in ODD}
    files["holes"] = bytes(20_000) + b"end"
    entries = builder.entries(files, sparse=["holes"])
    put(builder, repository)
    done = run(script_of(builder, entries), repository, tmp_path / "out put", keys)
    assert done.returncode == 0, done.stderr
    assert files_below(tmp_path / "out put") == files
    assert (tmp_path / "out put/holes").stat().st_blocks * 512 < 20_000
    assert f"{len(files)} files" in done.stdout


@pytest.mark.parametrize("damage", ["gone", "flipped", "other"])
def test_a_bad_object_stops_it_with_its_name(keys: Keys, repository: Path, tmp_path: Path, damage: str) -> None:
    builder = Builder(keys, part=4096, tiny=100)
    entries = builder.entries({"t.ibd": random.Random(1).randbytes(9000)})
    put(builder, repository)
    first, second = (repository / layout.object_key(name) for name in entries[0].objects[:2])
    if damage == "gone":
        first.unlink()
    elif damage == "flipped":
        content = bytearray(first.read_bytes())
        content[-30] ^= 4
        first.write_bytes(content)
    else:
        first.write_bytes(second.read_bytes())
    done = run(script_of(builder, entries), repository, tmp_path / "out", keys)
    assert done.returncode == 1
    assert entries[0].objects[0] in done.stderr
    assert ("is missing" if damage == "gone" else "is not what was stored") in done.stderr


def test_it_never_writes_into_a_folder_that_holds_something(keys: Keys, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("precious")
    (repository / "objects").mkdir()
    done = run(render_unpack("20261121T020000Z-7f3a9c01", [], ()), repository, tmp_path / "out", keys)
    assert (done.returncode, "not empty" in done.stderr) == (1, True)
    assert files_below(tmp_path / "out") == {"mine": b"precious"}


def test_the_pool_of_a_real_destination_is_laid_out_as_the_script_expects(
    keys: Keys, repository: Path, tmp_path: Path
) -> None:
    builder = Builder(keys, part=4096, tiny=100)
    header, body = builder.manifest(builder.entries({"t.ibd": b"x" * 9000, "t.frm": b"tiny"}))
    destination = FilesystemDestination("local", repository)
    destination.initialise(header.started_at)
    builder.put(destination, header)
    before = files_below(repository)
    done = run(render_unpack(header.backup_id, body.entries, header.objects), repository, tmp_path / "out", keys)
    assert done.returncode == 0, done.stderr
    assert files_below(tmp_path / "out") == {"t.ibd": b"x" * 9000, "t.frm": b"tiny"}
    assert files_below(repository) == before
