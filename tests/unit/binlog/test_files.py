"""The spool: what is in it after whatever ended the stream."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.binlog.continuity import Comparison, Seen, ending_of, fingerprint_of, head_of
from backupd.binlog.spool_files import Spool, Spooled
from backupd.model.binlog import Branch, BranchReason, Ending, Gap
from backupd.model.errors import BusyError, DamagedError, RefusedError
from backupd.model.server_facts import Position

NOW = datetime(2026, 11, 21, 4, 0, tzinfo=UTC)
ONE = Branch("db1", "20261121T040000Z-00000001", NOW, BranchReason.FIRST, "uuid", "mariadb", "binlog", 7)
TWO = Branch(
    "db1",
    "20261121T050000Z-00000002",
    NOW + timedelta(hours=1),
    BranchReason.LOST_TAIL,
    "uuid",
    "mariadb",
    "binlog",
    8,
    NOW,
    ONE.id,
    Position("binlog.000008", 50, "0-1-2"),
    names_go_on=True,
    note="a lost tail",
)


def event(kind: int, at: int, body: bytes = b"", *, moment: int = 1_780_000_000) -> bytes:
    size = 19 + len(body) + 4
    return struct.pack("<IBIIIH", moment, kind, 1, size, at + size, 0) + body + b"sumx"


def log(name: str, *, ending: int | None = None, filler: int = 100, flags: bytes = b"\0\0") -> bytes:
    content = b"\xfebin" + event(15, 4, b"format") + event(163, 33, struct.pack("<I", 1) + struct.pack("<IIQ", 0, 1, 9))
    content = content[:21] + flags + content[23:]
    content += event(2, len(content), b"q" * filler)
    if ending == 3:
        content += event(3, len(content))
    if ending == 4:
        following = f"binlog.{int(name[-6:]) + 1:06d}".encode()
        content += event(4, len(content), struct.pack("<Q", 4) + following)
    return content


def taken(spool: Spool, branch: Branch, number: int, content: bytes) -> Spooled:
    name = branch.file(number)
    (spool.incoming / name).write_bytes(content)
    return spool.take(branch, number, name)


def test_files_come_in_log_order_and_grow_until_they_end(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    with spool.locked():
        assert (spool.branches(), spool.files(), spool.newest()) == ((), (), None)
        spool.begin(ONE)
        first = taken(spool, ONE, 7, log("binlog.000007", ending=4))
        with first.path.open("ab") as more:
            more.write(b"more")
        assert spool.files()[0].size == first.size + 4
        ended = spool.end(first, Ending.ROTATED)
        second = taken(spool, ONE, 8, b"abc")
        assert spool.files() == (ended, second)
        assert spool.newest() == second
        assert spool.sync(second) == 3
        assert spool.bytes() >= ended.size + 3
        assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("binlog.*")} == {0o600}
    again = Spool(tmp_path / "spool")
    assert again.files() == (ended, second)
    assert again.branches() == (ONE,)


def test_one_stream_at_a_time(tmp_path: Path) -> None:
    with Spool(tmp_path).locked(), pytest.raises(BusyError, match="another stream"), Spool(tmp_path).locked():
        pass
    with Spool(tmp_path).locked():
        pass


@pytest.mark.parametrize("fate", ["lock removed", "lock replaced", "folder removed", "folder moved, another begun"])
def test_a_stream_whose_spool_is_another_one_by_now_writes_nothing_more(tmp_path: Path, fate: str) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder)
    with ExitStack() as stack:
        stack.enter_context(spool.locked())
        spool.begin(ONE)
        spool.check_lock()
        if fate.startswith("lock"):
            (folder / "lock").unlink()
        elif fate == "folder removed":
            shutil.rmtree(folder)
        else:
            folder.rename(tmp_path / "aside")
        if fate in ("lock replaced", "folder moved, another begun"):
            stack.enter_context(Spool(folder).locked())
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        with pytest.raises(RefusedError, match="was replaced" if fate.endswith(("replaced", "begun")) else "moved"):
            spool.check_lock()
        with pytest.raises(RefusedError, match="while a stream wrote to it"):
            spool.note(Seen(NOW, "uuid", 1, 4096, "", "0-1-9"))
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_spool_that_cannot_be_asked_for_its_lock_is_not_taken_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    with spool.locked(), monkeypatch.context() as patched:

        def hangs(_path: Path) -> os.stat_result:
            raise OSError(errno.ESTALE, "stale")

        patched.setattr(Path, "lstat", hangs)
        spool.check_lock()


def test_a_removed_file_is_gone_but_the_newest_stays_to_be_compared_with(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with spool.locked():
        spool.begin(ONE)
        first = taken(spool, ONE, 7, log("binlog.000007"))
        with pytest.raises(RefusedError, match="still being written"):
            spool.remove(first)
        first = spool.end(first, Ending.ROTATED)
        spool.remove(first)
        assert spool.files() == ()
        assert first.path.exists()
        assert spool.newest() == first
        taken(spool, ONE, 8, log("binlog.000008"))
        assert not first.path.exists()
        assert [file.number for file in spool.files()] == [8]
        (mark,) = spool.fingerprints()
        assert (mark.number, mark.size) == (7, first.size)
        spool.remove(first)  # once more


def test_a_file_that_was_removed_and_grows_after_all_is_to_be_archived_again(tmp_path: Path) -> None:
    """Its server could not read it to its end before."""
    spool = Spool(tmp_path / "spool")
    with spool.locked():
        spool.begin(ONE)
        file = spool.end(taken(spool, ONE, 7, log("binlog.000007")), Ending.CUT)
        spool.remove(file)
        assert spool.files() == ()
        newest = spool.newest()
        assert newest is not None
        again = spool.cut(newest, newest.size)
        with again.path.open("ab") as more:
            more.write(b"more")
        (found,) = spool.files()
        assert (found.size, found.ended) == (file.size + 4, None)
    assert Spool(tmp_path / "spool").files() == (found,)


def test_only_the_last_removed_files_are_remembered(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with spool.locked():
        spool.begin(ONE)
        for number in range(7, 27):
            spool.remove(spool.end(taken(spool, ONE, number, log(ONE.file(number))), Ending.ROTATED))
        assert len(spool.fingerprints()) <= 10
        assert spool.fingerprints()[-1].number == 26


def test_that_the_server_writes_no_log_is_on_the_disk_until_a_branch_begins(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with spool.locked():
        spool.begin(ONE)
        spool.note_unlogged(NOW)
        spool.note_unlogged(NOW + timedelta(hours=1))
    again = Spool(tmp_path)
    assert again.unlogged() == NOW, "the first time counts"
    with again.locked():
        taken(again, ONE, 8, log("binlog.000008"))
        again.note(Seen(NOW, "uuid", 1, 5, "", "0-1-2"))
        assert again.unlogged() == NOW, "only a branch ends it"
        again.begin(TWO)
    assert Spool(tmp_path).unlogged() is None


def test_a_state_of_before_it_was_noted_whether_a_log_is_written_is_read(tmp_path: Path) -> None:
    with (spool := Spool(tmp_path)).locked():
        spool.begin(ONE)
    state = json.loads((tmp_path / "state.json").read_text())
    del state["unlogged"]
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert Spool(tmp_path).unlogged() is None
    assert Spool(tmp_path).branches() == (ONE,)


def test_a_new_branch_ends_the_file_of_the_one_before(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with spool.locked():
        spool.begin(ONE)
        taken(spool, ONE, 8, log("binlog.000008"))
        spool.note(Seen(NOW, "uuid", 1, 5, "", "0-1-2"))
        spool.begin(TWO)
        assert spool.seen() is None
        assert spool.newest() is None
        assert spool.fingerprints() == ()
        taken(spool, TWO, 8, log("binlog.000008", filler=5))
    assert [(file.branch, file.ended) for file in Spool(tmp_path).files()] == [(ONE.id, Ending.CUT), (TWO.id, None)]
    assert Spool(tmp_path).branches() == (ONE, TWO)


@pytest.mark.parametrize(("ending", "expected"), [(4, Ending.ROTATED), (3, Ending.STOPPED), (None, Ending.CUT)])
def test_after_a_kill_between_two_steps_the_spool_knows_what_lies_in_it(
    tmp_path: Path, ending: int | None, expected: Ending
) -> None:
    spool = Spool(tmp_path)
    with spool.locked():
        spool.begin(ONE)
        file = taken(spool, ONE, 7, log("binlog.000007", ending=ending))
        # What a kill leaves right after the next file was renamed: nothing of it is written down.
        (file.path.parent / "binlog.000008").write_bytes(log("binlog.000008"))
        (file.path.parent / "strange").write_bytes(b"?")
    after = Spool(tmp_path)
    with after.locked():
        assert [(found.number, found.ended) for found in after.files()] == [(7, expected), (8, None)]
        assert after.fingerprints()[0].number == 7


def test_a_gap_is_written_down_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    gap = Gap(
        "db1",
        ONE.id,
        "",
        Position("binlog.000007", 50, "0-1-2"),
        Position("binlog.000009", 4, "0-1-5"),
        NOW,
        None,
        "purged",
        NOW,
    )
    with spool.locked():
        spool.begin(ONE)
        spool.add_gap(gap)
        spool.add_gap(replace(gap, noticed_at=NOW + timedelta(days=1)))
    assert Spool(tmp_path).gaps() == (gap,)


def test_a_file_that_somebody_took_away_is_missed_by_name(tmp_path: Path) -> None:
    with (spool := Spool(tmp_path)).locked():
        spool.begin(ONE)
        taken(spool, ONE, 7, log("binlog.000007")).path.unlink()
    with pytest.raises(DamagedError, match="is missing") as missed, Spool(tmp_path).locked():
        pass
    assert "binlog.000007" in missed.value.detail


def test_a_state_that_cannot_be_read_is_said_and_not_overwritten(tmp_path: Path) -> None:
    with Spool(tmp_path).locked():
        pass
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DamagedError, match=r"state\.json"):
        Spool(tmp_path).files()
    with pytest.raises(DamagedError), Spool(tmp_path).locked():
        pass
    (tmp_path / "state.json").write_text(json.dumps({"format": "backupd-spool/9"}))
    with pytest.raises(DamagedError, match=r"state\.json") as refused:
        Spool(tmp_path).branches()
    assert "this version reads" in refused.value.detail


def test_a_file_of_another_log_is_not_taken_for_one_of_this() -> None:
    assert ONE.number("binlog.000042") == 42
    assert ONE.number("binlog.1000000") == 1_000_000
    assert [ONE.number(name) for name in ("binlog.index", "relay.000042", "binlog", "binlog.~rec~")] == [0] * 4


def test_the_end_of_a_file_is_told_by_its_last_event(tmp_path: Path) -> None:
    path = tmp_path / "binlog.000007"
    for ending, expected in ((4, Ending.ROTATED), (3, Ending.STOPPED), (None, Ending.CUT)):
        path.write_bytes(log(path.name, ending=ending))
        assert ending_of(path, path.stat().st_size) is expected
        assert ending_of(path, path.stat().st_size - 1) is Ending.CUT
    path.write_bytes(b"\xfeb")
    assert ending_of(path, 3) is Ending.CUT


def test_the_beginning_of_a_file_is_known_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "binlog.000007"
    content = log(path.name)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        head = head_of(path)
        assert (head is None) is (size < 33 + 43), size
    assert head is not None
    assert (head.size, head.gtids) == (33 + 43, ("0-1-9",))


def test_the_flag_of_a_file_in_use_makes_no_difference(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(log("binlog.000007", flags=b"\1\0"))
    other.write_bytes(log("binlog.000007"))
    size = one.stat().st_size
    assert fingerprint_of(one, "b", 7, size) == fingerprint_of(other, "b", 7, size)
    with one.open("rb") as kept, other.open("rb") as fresh:
        comparison = Comparison(kept, fresh)
        assert comparison.go_on() == size
        assert not comparison.differs


def test_a_comparison_goes_on_as_the_file_grows_and_finds_the_first_byte_that_differs(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    content = log("binlog.000007", filler=5000)
    one.write_bytes(content)
    with other.open("wb") as writer, one.open("rb") as kept, other.open("rb") as fresh:
        comparison = Comparison(kept, fresh)
        for end in (10, 21, 22, 500, 3000):
            writer.write(content[comparison.equal if end > 22 else writer.tell() : end])
            writer.flush()
            comparison.go_on()
            assert not comparison.differs
        assert comparison.equal == 3000
        writer.write(content[3000:3100] + b"!" + content[3101:4000])
        writer.flush()
        assert comparison.go_on() == 3100
        assert comparison.differs


def test_a_stream_begins_on_a_full_disk_because_archiving_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "spool")

    def full(_descriptor: int, _content: bytes, _at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with spool.locked("who"):
            assert spool.files() == ()
    with spool.locked("a longer note"):
        assert Spool(spool.folder).holder() == "a longer note"
    with spool.locked("who"):
        assert Spool(spool.folder).holder() == "who"
    assert Spool(spool.folder).holder() is None
    assert (spool.folder / "lock").stat().st_size > 0, "a block for the next note"
