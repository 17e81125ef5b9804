"""From where a copy can follow a source, and when it cannot."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from backupd.model.binlog import Branch, BranchReason
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Flavour, Position, Version
from backupd.recovery.runs import Histories
from restore.replica.source import (
    ReplicaStart,
    Restored,
    SourceFacts,
    choose_server_id,
    choose_start,
    refuse_later_file,
    refuse_other_branch,
    refuse_other_source,
)

ONE, OTHER = "0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a", "0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"
MYSQL = SourceFacts(
    "db1:3306",
    Flavour.MYSQL,
    Version(9, 7),
    ONE,
    7,
    "db1",
    3306,
    log_bin=True,
    gtid_mode="on",
    executed=f"{ONE}:1-900",
    purged=f"{ONE}:1-100",
    oldest="bin.000004",
)
MARIADB = replace(MYSQL, flavour=Flavour.MARIADB, version=Version(10, 11), executed="0-7-900", purged="")
COPY = Restored("backup B", Flavour.MYSQL, Position("bin.000009", 120, f"{ONE}:1-500"), is_own=True)
OLD = Restored("backup B", Flavour.MARIADB, Position("bin.000009", 120), is_own=True)


def refused(copy: Restored, source: SourceFacts, words: str) -> RefusedError:
    with pytest.raises(RefusedError, match=words) as caught:
        choose_start(copy, source)
    return caught.value


def test_a_copy_begins_by_gtid_where_there_are_some() -> None:
    start = choose_start(COPY, MYSQL)
    assert (start.by_gtid, str(start)) == (True, f"{ONE}:1-500")
    copy = replace(OLD, position=Position("bin.000009", 120, "0-7-500"))
    assert str(choose_start(copy, MARIADB)) == "0-7-500"


def test_without_gtids_it_begins_by_file_and_position_of_the_source() -> None:
    start = choose_start(OLD, MARIADB)
    assert (start.by_gtid, str(start)) == (False, "bin.000009:120")
    upstream = replace(OLD, is_own=False, upstream=Position("source.000002", 33))
    assert str(choose_start(upstream, MARIADB)) == "source.000002:33", "of its source, not its own"
    refused(replace(OLD, is_own=False), MARIADB, "holds no position in the binary log of db1:3306")


def test_the_file_of_one_server_is_no_place_in_the_log_of_another_one() -> None:
    copy = replace(OLD, is_own=False, upstream=Position("bin.000002", 157))
    for kind, there in ((replace(MYSQL, gtid_mode="off"), "0000-u"), (MARIADB, "7")):
        source = replace(kind, uuid="0000-u", server_id=7)
        start = ReplicaStart(Position("bin.000002", 157), False, "")
        refuse_other_source(copy, start, source, (there,))
        refuse_other_source(copy, start, source, ())
        with pytest.raises(RefusedError, match="is not the server that the backed-up one followed") as caught:
            refuse_other_source(copy, start, source, ("8",))
        assert "bin.000002:157" in caught.value.message
        refuse_other_source(replace(copy, is_own=True), start, source, ("8",))
        refuse_other_source(copy, replace(start, by_gtid=True), source, ("8",))


def test_what_the_source_has_purged_is_refused_with_the_place() -> None:
    error = refused(COPY, replace(MYSQL, purged=f"{ONE}:1-600"), "has purged binary logs that the copy needs")
    assert f"{ONE}:501-600" in error.detail
    assert "bin.000004" in error.detail


def test_another_branch_is_refused() -> None:
    copy = replace(COPY, position=Position("bin.000009", 120, f"{ONE}:1-500,{OTHER}:1-3"))
    error = refused(copy, MYSQL, "of another branch")
    assert error.detail == f"{OTHER}:1-3"


@pytest.mark.parametrize(
    ("mode", "gtids", "words"),
    [("on", "", "has no GTIDs"), ("off", f"{ONE}:1-500", "has GTIDs")],
)
def test_another_gtid_mode_is_refused(mode: str, gtids: str, words: str) -> None:
    copy = replace(COPY, position=Position("bin.000009", 120, gtids))
    refused(copy, replace(MYSQL, gtid_mode=mode), words)


def test_a_source_of_another_kind_or_without_logs_is_refused() -> None:
    refused(COPY, MARIADB, "runs mariadb")
    refused(COPY, replace(MYSQL, log_bin=False), "writes no binary log")


def test_the_server_id_is_free_and_always_the_same_for_a_folder() -> None:
    first = choose_server_id(0, {7}, "/srv/a", "host")
    assert first == choose_server_id(0, {7, 8}, "/srv/a", "host")
    assert first != choose_server_id(0, {7}, "/srv/b", "host")
    assert choose_server_id(0, {first}, "/srv/a", "host") not in (first, 0)
    assert choose_server_id(12, {7}, "/srv/a", "host") == 12
    with pytest.raises(RefusedError, match="server_id 7 is taken"):
        choose_server_id(7, {7}, "/srv/a", "host")


NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
AT = ReplicaStart(Position("bin.000009", 120), False, "")


def test_a_file_that_was_begun_later_is_of_another_history() -> None:
    begun = int(NOW.timestamp())
    refuse_later_file(AT, MARIADB, begun, NOW)
    refuse_later_file(AT, MARIADB, begun, NOW - timedelta(seconds=2))
    with pytest.raises(RefusedError, match=r"bin\.000009:120 is of another history than db1:3306 has now") as caught:
        refuse_later_file(AT, MARIADB, begun, NOW - timedelta(seconds=3))
    assert "was begun at 2026-11-21T12:00:00" in caught.value.message
    ahead = replace(MARIADB, clock_ahead=3600.0)
    refuse_later_file(AT, ahead, begun + 3600, NOW)
    with pytest.raises(RefusedError):
        refuse_later_file(AT, ahead, begun + 3610, NOW)


FIRST = Branch(
    "shop", "20261101T000000Z-00000001", NOW - timedelta(days=20), BranchReason.FIRST, ONE, "mariadb", "bin", 1
)
TAIL = replace(
    FIRST,
    id="20261110T000000Z-00000002",
    noticed_at=NOW - timedelta(days=11),
    reason=BranchReason.LOST_TAIL,
    parent=FIRST.id,
    fork=Position("bin.000009", 500, "0-7-500"),
    names_go_on=True,
)


def branched(start: ReplicaStart, *branches: Branch, of: Branch | None = FIRST, copy: Restored = OLD) -> str:
    """Why it is refused."""
    try:
        refuse_other_branch(Histories(branches, ()), of, copy, start, MARIADB)
    except RefusedError as error:
        return error.message
    return ""


def test_the_present_history_is_followed_from_before_the_fork_only() -> None:
    assert branched(AT, FIRST) == ""
    assert branched(AT, FIRST, TAIL) == ""
    assert branched(replace(AT, position=Position("bin.000009", 501)), FIRST, TAIL).startswith("backup B is of another")
    assert "(lost-tail)" in branched(replace(AT, position=Position("bin.000010", 4)), FIRST, TAIL)
    by_gtid = ReplicaStart(Position("bin.000009", 120, "0-7-500"), True, "")
    assert branched(by_gtid, FIRST, TAIL) == ""
    assert branched(replace(by_gtid, position=Position("bin.000009", 120, "0-7-501")), FIRST, TAIL)


def test_files_of_the_same_names_do_not_lead_into_a_reset_log() -> None:
    reset = replace(TAIL, reason=BranchReason.RESET, names_go_on=False)
    assert branched(AT, FIRST, reset)
    assert branched(ReplicaStart(Position("bin.000009", 120, "0-7-400"), True, ""), FIRST, reset) == ""
    unknown = replace(TAIL, fork=None)
    assert branched(AT, FIRST, unknown)
    assert branched(ReplicaStart(Position(gtid="0-7-400"), True, ""), FIRST, unknown)
    assert branched(AT, FIRST, TAIL, of=TAIL) == ""


def test_what_is_not_known_or_another_member_s_is_no_reason() -> None:
    reset = replace(TAIL, reason=BranchReason.RESET, names_go_on=False)
    assert branched(AT) == ""
    assert branched(AT, FIRST, reset, of=None) == ""
    assert branched(AT, FIRST, replace(reset, server_uuid=OTHER)) == ""
    assert branched(AT, FIRST, reset, copy=replace(OLD, is_own=False)) == ""
    mysql = ReplicaStart(Position(gtid=f"{ONE}:1-5"), True, "")
    refuse_other_branch(Histories([FIRST, reset], ()), FIRST, COPY, mysql, MYSQL)
