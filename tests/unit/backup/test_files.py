from __future__ import annotations

import io
import os
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest

from backupd.backup import host_configuration as hostfiles
from backupd.backup.host_configuration import HostFiles


def members(files: HostFiles) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(files.tar()), encoding="utf-8", errors="surrogateescape") as tar:
        return {member.name: member for member in tar}


def content(files: HostFiles, path: Path) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(files.tar()), encoding="utf-8", errors="surrogateescape") as tar:
        found = tar.extractfile(f"host/files{path}")
        assert found is not None
        return found.read()


def test_option_files_are_followed_through_includes_links_and_circles(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/b.cnf").write_text("[mysqld]\nserver_id=1\n")
    (tmp_path / "conf.d/a.cnf").symlink_to("../elsewhere.cnf")
    (tmp_path / "conf.d/ignored.txt").write_text("x")
    (tmp_path / "elsewhere.cnf").write_text(f"!include {tmp_path}/main.cnf\n")
    (tmp_path / "open.cnf").write_text("[mysqld]\n")
    (tmp_path / "open.cnf").chmod(0o666)
    (tmp_path / "main.cnf").write_text(
        f"!includedir {tmp_path}/conf.d\n!include {tmp_path}/missing.cnf\n!include {tmp_path}/open.cnf\n"
        f"!include {tmp_path}/conf.d\n"
    )
    (tmp_path / "my.cnf").symlink_to("main.cnf")
    files = HostFiles()
    files.option_file(tmp_path / "my.cnf")
    found = members(files)
    names = {name.removeprefix(f"host/files{tmp_path}/") for name in found}
    assert names >= {"my.cnf", "main.cnf", "conf.d/a.cnf", "conf.d/b.cnf", "elsewhere.cnf", "open.cnf"}
    assert "conf.d/ignored.txt" not in names or any("conf.d" in warning for warning in files.warnings)
    assert found[f"host/files{tmp_path}/my.cnf"].linkname == "main.cnf"
    told = "\n".join(files.warnings)
    for word in ("missing.cnf", "open.cnf", "everybody may write it", "more than 10 includes"):
        assert word in told, told
    assert content(files, tmp_path / "conf.d/b.cnf") == b"[mysqld]\nserver_id=1\n"


def test_folders_are_taken_whole_and_what_is_no_file_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "scripts"
    deepest = folder / "/".join(["d"] * 700)
    deepest.mkdir(parents=True)
    (deepest / "end").write_text("end")
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/\xff \n'name"))
    odd.write_bytes(b"odd")
    (folder / ("n" * 255)).write_text("long")
    (folder / "empty").mkdir()
    (folder / "rotate.sh").write_text("#!/bin/sh\n")
    (folder / "rotate.sh").chmod(0o751)
    os.utime(folder / "rotate.sh", (1, 1_700_000_000))
    os.mkfifo(folder / "pipe")
    (folder / "root").symlink_to("/")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "round").symlink_to("round")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(folder)
        listener.bind("sock")
        files = HostFiles()
        files.add(folder)
    found = members(files)
    prefix = f"host/files{folder}"
    assert found[f"{prefix}/rotate.sh"].mode == 0o751
    assert found[f"{prefix}/rotate.sh"].mtime == 1_700_000_000
    assert found[f"{prefix}/rotate.sh"].uname == "root" or os.geteuid() != 0
    assert found[f"{prefix}/empty"].isdir()
    assert found[f"{prefix}/root"].issym()
    assert found[f"{prefix}/round"].issym()
    assert content(files, odd) == b"odd"
    assert content(files, deepest / "end") == b"end"
    assert not any("/etc/" in name for name in found)
    notes = "\n".join(files.notes)
    for word in ("pipe is not kept: it is a pipe", "sock is not kept: it is a socket", "root is kept as a link"):
        assert word in notes
    assert [warning for warning in files.warnings if "nowhere" in warning]
    assert len(files.warnings) == 1


def test_equal_files_give_equal_bytes_that_tar_reads(tmp_path: Path) -> None:
    for name in ("b", "a", "ü"):
        (tmp_path / name).write_text(name)
    packed = []
    for order in ("baü", "üab"):
        files = HostFiles()
        for name in order:
            files.add(tmp_path / name)
        files.text("NOTES.txt", "nothing")
        packed.append(files.tar())
    assert packed[0] == packed[1]
    listed = subprocess.run(["tar", "-t"], input=packed[0], capture_output=True, check=True).stdout.splitlines()
    assert listed[0] == b"NOTES.txt"
    assert len(listed) == 4


def test_too_much_is_left_out_with_a_warning_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfiles, "LARGEST_FILE", 100)
    monkeypatch.setattr(hostfiles, "LARGEST_SUM", 250)
    monkeypatch.setattr(hostfiles, "MOST_MEMBERS", 5)
    (tmp_path / "0big").write_bytes(b"x" * 101)
    for name in ("1", "2", "3"):
        (tmp_path / name).write_bytes(b"x" * 90)
    for number in range(4, 10):
        (tmp_path / str(number)).write_bytes(b"")
    files = HostFiles()
    files.add(tmp_path)
    names = {name.rpartition("/")[2] for name in members(files)}
    assert {"1", "2"} <= names
    assert not {"0big", "3", "9"} & names
    named = [warning.split(" ")[0].rpartition("/")[2] for warning in files.warnings]
    assert named == ["0big", "3", "6"]
    assert "101 B exceeds the limit of 100 B per file" in files.warnings[0]
    assert "with its 90 B the total would exceed 250 B" in files.warnings[1]


def test_a_folder_of_data_that_is_named_by_mistake_gives_few_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostfiles, "LARGEST_FILE", 1)
    for number in range(100):
        (tmp_path / f"{number:03}.ibd").write_bytes(b"xx")
    files = HostFiles()
    files.add(tmp_path)
    assert len(files.warnings) == hostfiles.NAMED + 1
    assert files.warnings[-1].startswith("80 more files are not kept, for the same reasons")
