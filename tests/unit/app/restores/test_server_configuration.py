"""Archives that an enemy has sealed for our key: its public half is all that it takes."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from backupd.app.restores.server_configuration import _members, extract
from backupd.model.errors import DamagedError, RefusedError
from tests.support.dice import rounds, thrown

FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
OTHERS = {
    HARD: "hard link",
    tarfile.FIFOTYPE: "pipe",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
    tarfile.GNUTYPE_SPARSE: "sparse file",
    b"Q": "member of unknown type",
}
Given = tuple[str, bytes, str]


def _tar(*given: Given) -> bytes:
    """Of members with their type, and what a link leads to or a file contains."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind, text in given:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o4777
            content = text.encode() if kind == FILE else b""
            info.size, info.linkname = len(content), "" if kind == FILE else text
            tar.addfile(info, io.BytesIO(content))
    return output.getvalue()


def _extract(base: Path, *given: Given) -> tuple[list[str], tuple[str, ...]]:
    """What was written, and what was left out, into a new folder beside a victim; nothing else may change."""
    (base / "victim").mkdir()
    (base / "victim/crontab").write_text("untouched")
    out = base / "a/out"
    written, left_out = extract(_members(_tar(*given), "id"), out)
    assert sorted(path.name for path in base.iterdir()) == ["a", "victim"]
    assert [path.name for path in (base / "a").iterdir()] == ["out"]
    assert [(path.name, path.read_text()) for path in (base / "victim").iterdir()] == [("crontab", "untouched")]
    for path in out.rglob("*"):
        assert path.resolve().is_relative_to(out.resolve()), path
        assert path.is_symlink() or path.stat().st_mode & 0o7077 == 0
    return [path.relative_to(out).as_posix() for path in written], left_out


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(
            [
                ("../../victim", FOLDER, ""),
                ("d", LINK, "../../victim"),
                ("d/evil", LINK, "../files/payload"),
                ("files/payload", FILE, "x"),
            ],
            id="through a link to a folder that was left out",
        ),
        pytest.param(
            [("../../victim/crontab", FILE, ""), ("e", LINK, "../../victim/crontab")], id="to a file left out"
        ),
        pytest.param(
            [("d", LINK, "../../victim"), ("d/crontab", FILE, "evil"), ("d/sub/x", FILE, "evil")], id="below a link"
        ),
        pytest.param(
            [("s", FOLDER, ""), ("d", LINK, "s"), ("d/evil", LINK, "s/../../../victim"), ("d/f", FILE, "x")],
            id="below a link that is good",
        ),
        pytest.param(
            [("d", FOLDER, ""), ("d", LINK, "../../victim"), ("d/crontab", FILE, "evil")], id="folder and link"
        ),
        pytest.param(
            [("l", LINK, "/../../../../victim"), ("m", LINK, "/etc/passwd"), ("n", LINK, "."), ("o", LINK, "..")],
            id="absolute",
        ),
        pytest.param(
            [("/etc/x", FILE, ""), ("..", FOLDER, ""), (".", FOLDER, ""), ("a/../../b", FILE, "")], id="names"
        ),
        pytest.param([("a", LINK, "b"), ("b", LINK, "a"), ("c", LINK, "c"), ("c/x", LINK, "a")], id="circles"),
        pytest.param(
            [("f", FILE, "1"), ("f", FILE, "2"), ("f/x", FILE, "3"), ("f", FOLDER, ""), ("f", LINK, "f")], id="twice"
        ),
        pytest.param([("n" * 256, FILE, "long"), ("f" * 256 + "/x", LINK, "y")], id="long names"),
    ],
)
def test_nothing_of_a_hostile_archive_is_written_outside_the_folder(given: list[Given], tmp_path: Path) -> None:
    written, left_out = _extract(tmp_path, *given)
    folders = [
        name
        for name, kind, _ in given
        if kind == FOLDER and (tmp_path / "a/out" / name).is_dir() and ".." not in name and name != "."
    ]
    assert len(written) + len(folders) + len(left_out) == len(given)


@pytest.mark.parametrize(("kind", "word"), OTHERS.items(), ids=lambda value: str(value).replace(" ", "-"))
def test_members_that_we_never_make_are_left_out_with_a_word(kind: bytes, word: str, tmp_path: Path) -> None:
    written, left_out = _extract(tmp_path, ("files/a", FILE, "x"), ("files/b", kind, "files/a"), ("files/c", LINK, "b"))
    assert written == ["files/a"]
    assert left_out == (
        f"files/b is not written: it is a {word}",
        "files/c is not written: it is a link to b, which was not written",
    )


def test_links_to_what_was_written_are_made_and_absolute_ones_stay_inside(tmp_path: Path) -> None:
    written, left_out = _extract(
        tmp_path,
        ("host/files/etc/mysql/my.cnf", LINK, "/etc/alternatives/my.cnf"),
        ("host/files/etc/alternatives/my.cnf", LINK, "../mysql/mariadb.cnf"),
        ("host/files/etc/mysql/mariadb.cnf", FILE, "[mysqld]"),
        ("host/files/etc/mysql", FOLDER, ""),
        ("host/files/conf.d", LINK, "/etc/mysql"),
    )
    assert sorted(written) == [
        "host/files/conf.d",
        "host/files/etc/alternatives/my.cnf",
        "host/files/etc/mysql/mariadb.cnf",
        "host/files/etc/mysql/my.cnf",
    ]
    assert left_out == ()
    assert (tmp_path / "a/out/host/files/etc/mysql/my.cnf").read_text() == "[mysqld]"
    assert (tmp_path / "a/out/host/files/conf.d/mariadb.cnf").read_text() == "[mysqld]"


def test_a_folder_with_something_in_it_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(RefusedError, match="not empty"):
        extract(_members(_tar(("f", FILE, "x")), "id"), tmp_path)
    assert os.listdir(tmp_path) == ["mine"]


def test_bytes_that_are_no_archive_are_damage_and_are_read_in_bounded_time() -> None:
    whole = _tar(("a", FOLDER, ""), ("a/f", FILE, "x" * 700), ("a/" + "n" * 120, FILE, "y"), ("l", LINK, "a/f"))
    negative = bytearray(whole)
    negative[512 + 124 : 512 + 136] = b"\xff" * 10 + b"\xfc\x00"  # a size of -1024: the member before comes again
    negative[512 + 148 : 512 + 156] = b"%06o\0 " % sum(negative[512:660] + b" " * 8 + negative[668:1024])
    nested = tarfile.TarInfo("././@LongLink")
    nested.type = tarfile.GNUTYPE_LONGNAME
    for raw in (b"", b"x" * 2048, bytes(negative), nested.tobuf(tarfile.GNU_FORMAT) * 2000):
        with pytest.raises(DamagedError, match="cannot be read"):
            _members(raw, "id")
    random = thrown("bytes that are no archive")
    for _ in range(rounds(200)):
        altered = bytearray(whole)
        for _ in range(random.randint(1, 6)):
            altered[random.randrange(len(altered))] = random.randrange(256)
        with contextlib.suppress(DamagedError):
            _members(bytes(altered), "id")
