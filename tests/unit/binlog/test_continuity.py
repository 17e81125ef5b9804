"""What a server's files mean for what is here: every case as values."""

from __future__ import annotations

import struct
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backupd.binlog import spool_repair
from backupd.binlog.connection_start import Approach
from backupd.binlog.continuity import (
    Compared,
    Fork,
    GoOn,
    Resume,
    Seen,
    Tail,
    after_restore,
    after_silence,
    another,
    first_covered,
    is_whole,
    looked_back,
    restored,
    resume_at,
    with_file,
    without_file,
)
from backupd.binlog.gtid_position import before_all
from backupd.binlog.spool_files import Spool, Spooled
from backupd.binlog.spool_repair import last_of, read
from backupd.engine.server.binary_logs import BinlogSource, ListedLog, SourceState
from backupd.model.binlog import Branch, BranchReason, Ending, Transaction
from backupd.model.server_facts import Flavour, Position, Version
from backupd.recovery.runs import holder_of_each
from tests.support.logs.node_logs import Happened, Written, write

NOW = datetime(2026, 11, 21, 4, 0, tzinfo=UTC)
SEEN = Seen(NOW, "uuid-1", 1, 100_000, "", "0-1-50")
TAIL = Tail("binlog.000005", 5, 4000, "0-1-40", "0-1-50", None)
UUID = "256cdffa-e59c-11f1-8b9d-02fc00000001"
BRANCH = Branch("shop", "b1", NOW, BranchReason.FIRST, "uuid-1", "mariadb", "binlog", 5)


def source(*numbers: int, gtid: str = "0-1-60", flavour: Flavour = Flavour.MARIADB, **more: object) -> SourceState:
    logs = tuple(ListedLog(f"binlog.{number:06d}", number, 5000) for number in numbers)
    state = SourceState(
        NOW,
        "uuid-1",
        1,
        flavour,
        Version(10, 11, 19),
        "binlog",
        logs,
        Position(logs[-1].name, 5000, gtid),
        200_000,
        200_000,
        gtid,
    )
    return replace(state, **more)  # type: ignore[arg-type]  # fields by name


def no_question(_name: str) -> str | None:
    raise AssertionError("nobody needs to know")


def test_a_purge_without_a_loss_goes_on() -> None:
    # The file after ours, and ours ended with a Rotate event.
    ended = replace(TAIL, ended=Ending.ROTATED)
    assert without_file(ended, SEEN, source(6, 7), lambda _name: None) == GoOn(6)
    # Ours was cut, but the GTIDs say that nothing followed in it.
    assert without_file(TAIL, SEEN, source(6, 7), lambda _name: "0-1-50") == GoOn(6)


@pytest.mark.parametrize(
    ("tail", "numbers", "before", "word"),
    [
        (TAIL, (6, 7), "0-1-52", "too early"),
        (TAIL, (8,), "0-1-55", "too early"),
        (TAIL, (8,), "0-1-50", "no transaction is missing"),
        (replace(TAIL, ended=Ending.ROTATED), (8,), "0-1-55", "too early"),
    ],
)
def test_a_purge_that_lost_something_is_a_gap_of_the_same_branch(
    tail: Tail, numbers: tuple[int, ...], before: str, word: str
) -> None:
    found = without_file(tail, SEEN, source(*numbers), lambda _name: before)
    assert isinstance(found, GoOn)
    assert found.number == numbers[0]
    assert word in found.gap


def test_files_whose_gtids_lack_what_is_archived_are_another_history() -> None:
    found = without_file(TAIL, SEEN, source(8), lambda _name: "0-1-30")
    assert isinstance(found, Fork)
    assert (found.reason, found.fork, found.number) == (BranchReason.UNKNOWN, None, 8)


def test_without_gtids_the_log_sequence_number_is_asked_for() -> None:
    tail = replace(TAIL, before="", after="")
    found = without_file(tail, SEEN, source(8, gtid="", flavour=Flavour.MYSQL), lambda _name: "")
    assert isinstance(found, GoOn)
    assert found.gap
    silent = without_file(tail, replace(SEEN, lsn=None), source(8, gtid="", flavour=Flavour.MYSQL), lambda _name: "")
    assert isinstance(silent, Fork)
    assert silent.reason is BranchReason.UNKNOWN


def test_a_list_that_ends_earlier_needs_a_look_at_earlier_files() -> None:
    state = source(1, 2)
    assert without_file(TAIL, SEEN, state, no_question) is None
    reset = looked_back(TAIL, state, None)
    assert (reset.reason, reset.number, reset.fork) == (BranchReason.RESET, 1, None)
    unchanged = Position("binlog.000004", 777, "0-1-40")
    lost = looked_back(TAIL, source(3, 4, 5), unchanged)
    assert (lost.reason, lost.number, lost.fork, lost.names_go_on) == (BranchReason.LOST_TAIL, 5, unchanged, True)
    other = looked_back(TAIL, source(3, 4, 5), None)
    assert (other.reason, other.number, other.fork) == (BranchReason.UNKNOWN, 3, None)


def test_a_file_that_lost_transactions_forks_at_their_beginning() -> None:
    common = Position("binlog.000005", 3000, "0-1-47")
    found = with_file(TAIL, Compared(common, 7, lost=True), SEEN, source(5, 6), no_question)
    assert isinstance(found, Fork)
    assert (found.reason, found.fork, found.number, found.names_go_on) == (BranchReason.LOST_TAIL, common, 5, True)


def test_half_a_transaction_that_the_server_never_finished_is_no_loss() -> None:
    assert with_file(TAIL, Compared(TAIL.position, 10, lost=False), SEEN, source(5, 6), no_question) == GoOn(5)


def test_the_first_file_begun_anew_within_the_same_second_is_a_reset_and_no_lost_tail() -> None:
    tail = replace(TAIL, name="binlog.000001", number=1)
    common = Compared(Position("binlog.000001", 325, ""), 0, lost=True)
    assert with_file(tail, common, SEEN, source(1, gtid="0-1-2"), no_question) is None
    assert looked_back(tail, source(1, gtid="0-1-2"), None).reason is BranchReason.RESET


def test_data_from_earlier_is_a_restore_and_its_fork_is_not_guessed() -> None:
    state = source(5, 6, lsn=50_000)
    assert "log sequence number" in restored(SEEN, state)
    assert restored(SEEN, source(5, 6, lsn=99_000)) == ""  # a crash may take back that much
    assert restored(None, state) == ""
    assert "of restore r1" in restored(SEEN, source(5, marker="r1"))
    assert restored(replace(SEEN, marker="r1"), source(5, marker="r1")) == ""
    common = Position("binlog.000005", 3000, "0-1-47")
    found = with_file(TAIL, Compared(common, 7, lost=True), SEEN, state, no_question)
    assert isinstance(found, Fork)
    assert (found.reason, found.fork, found.names_go_on) == (BranchReason.RESTORE, None, False)
    later = after_restore(TAIL, "because")
    assert (later.reason, later.number, later.fork) == (BranchReason.RESTORE, 6, None)


def test_a_restored_mysql_tells_by_its_gtids_where_it_forked() -> None:
    tail = replace(TAIL, before=f"{UUID}:1-40", after=f"{UUID}:1-50")
    state = source(1, gtid=f"{UUID}:1-30", flavour=Flavour.MYSQL, lsn=5)
    found = without_file(tail, SEEN, state, lambda _name: f"{UUID}:1-20")
    assert isinstance(found, Fork)
    assert found.reason is BranchReason.RESTORE
    assert found.fork == Position("", 0, f"{UUID}:1-20")
    ahead = without_file(tail, SEEN, state, lambda _name: f"{UUID}:1-70")
    assert isinstance(ahead, Fork)
    assert ahead.fork is None


def test_another_server_is_a_failover_whatever_its_files_are_called() -> None:
    other = source(4, 5, 6, server_id=2, server_uuid="uuid-2")
    assert another(SEEN, other)
    for found in (
        without_file(TAIL, SEEN, other, no_question),
        with_file(TAIL, Compared(None, 0, lost=True), SEEN, other, no_question),
    ):
        assert isinstance(found, Fork)
        assert found.reason is BranchReason.FAILOVER


def test_the_same_server_with_another_number_is_no_failover() -> None:
    renumbered = source(1, 2, server_id=9)
    assert another(SEEN, renumbered)  # its files have to show that they go on
    assert without_file(TAIL, SEEN, renumbered, no_question) is None
    assert looked_back(TAIL, renumbered, None).reason is BranchReason.RESET
    ended = replace(TAIL, ended=Ending.ROTATED)
    later = without_file(ended, SEEN, source(6, 7, server_id=9), no_question)
    assert isinstance(later, Fork)
    assert (later.reason, later.number, later.fork) == (BranchReason.UNKNOWN, 6, None)
    nameless = without_file(TAIL, replace(SEEN, server_uuid=""), source(6, server_id=9, server_uuid=""), no_question)
    assert isinstance(nameless, Fork)
    assert nameless.reason is BranchReason.FAILOVER


def test_after_a_time_without_a_log_only_the_newest_file_is_certainly_of_afterwards() -> None:
    off, now = NOW + timedelta(minutes=3), NOW + timedelta(minutes=9)
    found = after_silence(SEEN, off, source(5, 6, 7), now)
    assert (found.reason, found.number, found.fork, found.names_go_on) == (BranchReason.UNKNOWN, 7, None, False)
    assert "wrote no binary log between 2026-11-21T04:00:00Z and 2026-11-21T04:09:00Z" in found.note
    assert "04:03:00Z" in after_silence(None, off, source(5, 6, 7), now).note


def test_a_file_is_whole_when_it_is_listed_with_its_size_beside_the_next_one() -> None:
    assert is_whole(source(5, 6), 5, 5000)
    assert not is_whole(source(5, 6), 5, 4999)
    assert not is_whole(source(5, 6), 6, 5000)
    assert not is_whole(source(5, 7), 5, 5000)
    assert not is_whole(source(6, 7), 5, 5000)


def test_a_crash_behind_a_whole_file_leaves_no_gap_when_that_is_purged() -> None:
    tail = replace(TAIL, before="", after="", ended=Ending.CRASHED)
    assert without_file(tail, SEEN, source(6, gtid=""), lambda _name: "") == GoOn(6)
    cut = without_file(replace(tail, ended=Ending.CUT), SEEN, source(6, gtid=""), lambda _name: "")
    assert isinstance(cut, GoOn)
    assert cut.gap


def test_a_copy_with_the_servers_own_number_shares_nothing_that_could_be_told() -> None:
    # It goes on where the backup was, and gives the GTIDs of what was lost to what it writes instead.
    copy = source(1, server_uuid="uuid-9", gtid="0-1-60")
    found = without_file(TAIL, SEEN, copy, lambda _name: "")
    assert isinstance(found, Fork)
    assert (found.reason, found.fork, found.number) == (BranchReason.RESTORE, None, 1)
    assert "server_id 1" in found.note


def test_the_newest_file_that_begins_within_the_archive_is_found() -> None:
    begins = {4: "0-1-30,0-2-10", 5: "0-1-45", 6: "0-1-45,0-2-48"}
    asked: list[int] = []

    def previous(name: str) -> str | None:
        asked.append(int(name[-6:]))
        return begins.get(int(name[-6:]))

    assert first_covered(source(3, 4, 5, 6), "0-1-50", previous) == 5
    assert asked == [6, 5]
    assert first_covered(source(4, 6), "0-1-50", previous) is None


def test_what_a_history_holds() -> None:
    mariadb = holder_of_each("0-1-50,0-2-48,1-1-7", mariadb=True)
    assert [mariadb(gtid) for gtid in ("0-1-50", "0-2-49", "0-3-1", "1-1-7", "")] == [True, False, False, True, False]
    mysql = holder_of_each(f"{UUID}:1-5:8", mariadb=False)
    assert [mysql(gtid) for gtid in (f"{UUID}:5", f"{UUID}:6", f"{UUID}:8", "")] == [True, False, True, False]


def test_a_dump_goes_on_a_little_before_the_end_of_what_is_here(tmp_path: Path) -> None:
    path = tmp_path / "binlog.000001"
    events = [4]
    content = b"\xfebin"
    for size in (100, 15_000, 1_000, 700, 40_000, 300):
        content += struct.pack("<IBIIIH", 1, 2, 1, size, len(content) + size, 0) + bytes(size - 19)
        events.append(len(content))
        path.write_bytes(content)
        resume = resume_at(path)
        assert resume is not None
        assert (resume.end, resume.is_damaged) == (len(content), False)
        # All events of the last 16 KiB are seen again, and at least one.
        within = [start for start in events[:-1] if start >= len(content) - 16 * 1024]
        assert resume.start == min(within, default=events[-2])
        path.write_bytes(content + content[4:50])
        half = resume_at(path)
        assert half is not None
        assert (half.end, half.is_damaged) == (len(content), True)  # what follows is of another position
    path.write_bytes(content[:-1])
    assert resume_at(path) == Resume(events[-3], events[-2], is_damaged=False)
    for no_log in (b"", b"\xfeb", b"\0" * 500):
        path.write_bytes(no_log)
        assert resume_at(path) is None


CLUSTER = "5c3a1f2e-c0de-11f0-8000-0242ac110002"
NODE = replace(SEEN, cluster=CLUSTER)


@pytest.mark.parametrize("server_id", [1, 2])
def test_another_node_of_the_cluster_is_never_a_restore_whatever_its_server_id(server_id: int) -> None:
    state = source(1, 2, server_uuid="uuid-2", server_id=server_id, lsn=5, cluster=CLUSTER)
    found = without_file(TAIL, NODE, state, no_question)
    assert isinstance(found, Fork)
    assert found.reason is BranchReason.NODE_CHANGED
    assert f"another node of the cluster {CLUSTER} answers" in found.note
    same_name = with_file(TAIL, Compared(None, 0, lost=True), NODE, state, no_question)
    assert isinstance(same_name, Fork)
    assert same_name.reason is BranchReason.NODE_CHANGED
    same_head = with_file(TAIL, Compared(Position(TAIL.name, 256, ""), 0, lost=True), NODE, state, no_question)
    assert isinstance(same_head, Fork)
    assert same_head.reason is BranchReason.NODE_CHANGED


def test_a_node_with_the_data_of_a_donor_is_none_either_but_one_that_was_restored_is() -> None:
    found = without_file(TAIL, NODE, source(1, 2, lsn=5, cluster=CLUSTER), no_question)
    assert isinstance(found, Fork)
    assert found.reason is BranchReason.NODE_CHANGED
    assert "has the data of another one" in found.note
    restored_node = source(1, 2, lsn=5, cluster=CLUSTER, marker="20261121T030000Z-00000001")
    found = without_file(TAIL, NODE, restored_node, lambda _name: "")
    assert isinstance(found, Fork)
    assert found.reason is BranchReason.RESTORE, "GTIDs of its own show nothing"
    for gtid, reason in (("0-1-49", BranchReason.RESTORE), ("0-1-50", BranchReason.NODE_CHANGED)):
        state = replace(restored_node, cluster_gtids=True, position=Position("binlog.000002", 5000, gtid))
        found = without_file(TAIL, NODE, state, lambda _name: "")
        assert isinstance(found, Fork)
        assert found.reason is reason


def test_a_node_of_another_cluster_and_a_server_that_left_it_are_judged_as_any_other() -> None:
    for cluster in ("", "11111111-c0de-11f0-8000-0242ac110002"):
        found = without_file(TAIL, NODE, source(1, 2, server_uuid="uuid-2", lsn=5, cluster=cluster), lambda _name: "")
        assert isinstance(found, Fork)
        assert found.reason is BranchReason.RESTORE
    assert without_file(replace(TAIL, ended=Ending.ROTATED), NODE, source(6, 7, cluster=CLUSTER), no_gtids) == GoOn(6)


def no_gtids(_name: str) -> str | None:
    return None


def placed(folder: Path, fork: Fork, theirs: Written, **more: Any) -> Fork:
    """Where the branch of another node begins whose only file is ``theirs``: in the spool is ROWS up to Xid 53."""
    ours = write([Happened.ROWS, Happened.DDL, Happened.NOTHING, Happened.ROWS, Happened.DDL], first=50)
    (folder / "binlog.000005").write_bytes(ours.data)
    (folder / "other.000007").write_bytes(theirs.data)
    newest = Spooled("b1", 5, "binlog.000005", folder / "binlog.000005", len(ours.data), None)
    spool = SimpleNamespace(seen=lambda: NODE, files=lambda: (newest,), branches=lambda: (BRANCH,))
    approach = Approach(
        "shop",
        cast("BinlogSource", None),
        cast("Spool", spool),
        lambda name: folder / name,
        None,
        tuple,
        lambda: NOW,
        lambda _event: None,
    )
    logs = (ListedLog("other.000007", 7, len(theirs.data)),)
    return approach._placed(fork, newest, replace(source(7), logs=logs, cluster=CLUSTER, **more))


def test_without_common_gtids_the_history_goes_on_behind_the_xid_at_which_the_other_log_ends(tmp_path: Path) -> None:
    theirs = write([Happened.DDL, Happened.NOTHING, Happened.ROWS, Happened.DDL, Happened.ROWS], first=51, gtid=701)
    changed = Fork(BranchReason.NODE_CHANGED, 7, "another node answers")
    found = placed(tmp_path, changed, theirs)
    assert found.reason is BranchReason.NODE_CHANGED
    assert found.fork is not None
    assert (found.fork.file, found.fork.gtid) == ("binlog.000005", "10-100-3"), "the definition behind it comes again"
    assert found.entry == Position("other.000007", theirs.ends[53], "10-100-702")
    assert "both have the transaction with Xid 53" in found.note
    assert placed(tmp_path, changed, theirs, logs_cluster=False).fork is None, "it logs its own writes only"
    for other in ([Happened.ROWS, Happened.NOTHING, Happened.ROWS], [Happened.DDL]):
        found = placed(tmp_path, changed, write(other, first=51))
        assert (found.reason, found.fork, found.entry) == (BranchReason.NODE_CHANGED, None, None)


def test_without_common_gtids_a_restored_node_that_caught_up_shows_it_by_xid(tmp_path: Path) -> None:
    theirs = write([Happened.ROWS, Happened.DDL, Happened.NOTHING, Happened.ROWS], first=50)
    restored_node = Fork(BranchReason.RESTORE, 7, "its data directory is of restore r1")
    found = placed(tmp_path, restored_node, theirs, marker="r1")
    assert found.reason is BranchReason.NODE_CHANGED
    assert found.entry is not None
    assert "has caught up with its cluster" in found.note
    behind = write([Happened.ROWS], first=50)
    assert placed(tmp_path, restored_node, behind, marker="r1") == restored_node


def passed(*gtids: str) -> list[Transaction]:
    return [Transaction(gtid, number, number + 1, NOW, True, 1) for number, gtid in enumerate(gtids)]


def test_what_was_executed_before_the_last_transactions_of_a_file_is_known_by_those_before_them() -> None:
    after = "0-1-50,7-1-9"
    assert before_all(after, passed("0-1-49", "0-1-50"), passed("0-1-47", "0-2-48"), mariadb=True) == "0-2-48,7-1-9"
    assert before_all(after, passed("7-1-9"), passed("0-1-50"), mariadb=True) is None, "of its domain nothing is known"
    assert before_all(after, passed(""), passed("0-1-49"), mariadb=True) is None
    mysql = before_all(f"{UUID}:1-50", passed(f"{UUID}:49", f"{UUID}:50"), [], mariadb=False)
    assert mysql == f"{UUID}:1-48"


def test_the_last_transactions_of_a_file_are_read_from_near_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node1-bin.000003"
    path.write_bytes(write([Happened.ROWS] * 6, first=50).data)
    every: list[Transaction] = []
    read(path, every.append)
    assert len(every) == 6
    ends = [one.end for one in every]
    assert last_of(path, ends) == tuple(every), "it is small"
    monkeypatch.setattr(spool_repair, "_ENOUGH", path.stat().st_size - ends[3])
    assert last_of(path, ends) == tuple(every[4:])
    monkeypatch.setattr(spool_repair, "_MOST", 1)
    assert last_of(path, ends) == (), "that would take long"
