"""Reading the log and the metadata of all versions that are called, and the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from backupd.engine.dump.insert_files import inspect
from backupd.engine.dump.mydumper_run import DumpLog, read_metadata
from backupd.model.table import TableName

A, B, C = (TableName("shop", name) for name in ("a", "b$x", "c"))
OLD = """
** (mydumper:24376): WARNING **: 14:31:30.122: Using trx_consistency_only, binlog coordinates will not be accurate
** Message: 14:31:30.126: Started dump at: 2026-11-21 14:31:30
** Message: 14:31:30.127: Thread 1 connected using MySQL connection ID 8
** Message: 14:31:30.131: Transactions started, unlocking tables
** Message: 14:31:30.131: Thread 1 dumping db information for `shop`
** Message: 14:31:30.133: Thread 2 dumping data for `shop`.`a`
** Message: 14:31:30.134: Thread 1 dumping data for `shop`.`b$x`
** Message: 14:31:30.135: Thread 1 dumping data for `other`.`z`
** Message: 14:31:30.136: Thread 1 dumping data for `shop`.`c`
"""
NEW = """
** Message: 21:37:37.929: Thread 1: connected using MySQL connection ID 31
** Message: 21:37:37.935: Transactions started, unlocking tables
** Message: 21:37:37.972: Thread 1: dumping data from `shop`.`a` WHERE 1 <= `id` into x/shop.a.00000.sql | Completed: 0%
** Message: 21:37:37.973: Thread 2: `shop`.`b$x` [ 50% ] | Tables: 1/3
** Message: 21:37:37.974: Thread 1: dumping data from `shop`.`c` into x/shop.c.00000.sql | Completed: 0% | Remaining
** Message: 21:37:38.974: Finished dump at: 2026-11-21 21:37:38
"""


def _heard(text: str, *more: str, whole: bool = True) -> DumpLog:
    log = DumpLog((A, B, C), whole=whole)
    for line in (*text.splitlines(), *more):
        log.heard(line)
    return log


def test_a_table_is_complete_when_its_thread_went_on_to_something_else() -> None:
    log = _heard(OLD)
    assert log.ready.is_set()
    assert log.begun == {A, B, C}
    assert log.ended == {B}
    assert not log.finished
    assert _heard(OLD, "** Message: 14:31:30.198: Thread 2 shutting down").ended == {A, B}


def test_with_several_threads_on_a_table_nothing_is_known_before_the_end() -> None:
    log = _heard(NEW, whole=False)
    assert log.ready.is_set()
    assert log.finished
    assert log.begun == {A, B, C}
    assert not log.ended
    assert not log.errors


@pytest.mark.parametrize(
    "line",
    [
        "Error dumping table (shop.b$x) data: Table 'shop.b$x' doesn't exist ",
        "Could not read data from shop.b$x: Lost connection to MySQL server during query",
        "Could not write out data for shop.b$x",
        "Could not write out closing newline for shop.b$x, now this is sad!",
        "Error: DB: shop TABLE: b$x Could not create output file out/shop.b$x.sql (2)",
        "Thread 3: Error dumping table (shop.b$x) data: Lock wait timeout exceeded",
        (
            "Thread 3: Could not read data from shop.b$x to write on /x/shop.b$x.00000.00001.sql at byte 12345: Lost "
            "contact"
        ),
        "Fail to write on /spool/rows.1/out/shop.b$x.00000.00001.sql",
    ],
)
def test_errors_blame_the_table_that_they_name(line: str) -> None:
    log = _heard(OLD, f"** (mydumper:1): CRITICAL **: 14:31:31.000: {line}")
    assert log.failed == {B: line.strip()}
    assert log.errors == 1
    assert not log.trouble


CRITICAL, WARNING = (f"** (mydumper:1): {level} **: 14:31:31.000: " for level in ("CRITICAL", "WARNING"))


def test_a_name_that_holds_what_stands_behind_names_is_found_with_each_that_may_be_meant() -> None:
    names = [TableName("shop", name) for name in ("a", "a: b", "c) data")]
    log = DumpLog(names, whole=True)
    log.heard(f"{CRITICAL}Could not read data from shop.a: b: Lost connection")
    log.heard(f"{CRITICAL}Error dumping table (shop.c) data) data: denied")
    assert set(log.failed) == set(names)


def test_a_connection_that_was_made_anew_is_outside_the_snapshot() -> None:
    lost = f"{CRITICAL}Thread 2: Could not read data from shop.a to write on x/shop.a.00000.sql at byte 9: gone away"
    log = _heard(NEW, lost, f"{WARNING}Thread 2: Reconnecting due errors", whole=False)
    assert set(log.failed) == {A}
    assert log.trouble == ["Thread 2: Reconnecting due errors: the rows that it read after that are of a later moment"]


def test_a_query_that_is_tried_again_speaks_for_a_lost_connection_unless_the_table_is_to_blame() -> None:
    def tried_again(why: str, thread: int = 2) -> DumpLog:
        return _heard(
            NEW,
            f"{WARNING}Failed to execute query - ERROR 1: {why}",
            f"{WARNING}Thread 2: Error dumping table (shop.a) data: {why}",
            "Query: SELECT * FROM `shop`.`a`",
            f"{WARNING}Thread {thread}: Retrying last failed executed statement",
            whole=False,
        )

    for why in ("Table 'shop.a' doesn't exist", "Table definition has changed, please retry transaction"):
        log = tried_again(why)
        assert (set(log.failed), log.trouble, log.errors) == ({A}, [], 1)
        assert tried_again(why, thread=3).trouble, "of a thread of which nothing was said"
        log.heard(f"{WARNING}Thread 2: Retrying last failed executed statement")
        assert log.trouble, "the next time it is another reason"
    log = tried_again("Server has gone away")
    assert set(log.failed) == {A}
    assert "of a later moment" in log.trouble[0]


@pytest.mark.parametrize(
    "line",
    [
        "Could not read data from `shop`.`a` in chunk 3: Lost connection",
        "Could not read data from shop.a while thinking about it: Lost connection",
        "Thread 2: Could not read data from the table: Lost connection",
        "Something new: went wrong",
    ],
)
def test_an_error_in_words_that_are_not_known_is_trouble_of_the_run(line: str) -> None:
    log = _heard(NEW, CRITICAL + line, whole=False)
    assert not log.failed
    assert log.trouble == [line]


def test_why_a_file_could_not_be_written_stands_in_the_line_before() -> None:
    begin = "** (mydumper:1): CRITICAL **: 14:31:31.000: "
    log = _heard(
        OLD,
        f"{begin}Couldn't write data to a file: No space left on device",
        f"{begin}Could not write out data for shop.a",
    )
    assert "No space left on device" in log.failed[A]
    assert not log.trouble


def test_a_schema_that_cannot_be_listed_fails_its_tables_and_a_broken_table_itself() -> None:
    log = _heard(
        "",
        "** (mydumper:1): CRITICAL **: 1:1: Error: DB: shop - Could not execute query: gone away",
        "** (mydumper:1): WARNING **: 14:31:31.000: Broken table detected, please review: shop.c",
    )
    assert set(log.failed) == {A, B, C}
    assert not log.trouble


def test_what_concerns_others_is_no_trouble_and_what_names_nobody_is() -> None:
    log = _heard(
        OLD,
        "** (mydumper:1): CRITICAL **: 14:31:31.000: Error dumping table (other.z) data: denied",
        "** (mydumper:1): WARNING **: 14:31:31.000: Row bigger than statement_size for shop.a",
        "option parsing failed: nonsense",
    )
    assert not log.failed
    assert not log.trouble
    log.heard("** (mydumper:1): CRITICAL **: 14:31:31.000: Failed to set time zone: Unknown")
    assert log.trouble == ["Failed to set time zone: Unknown"]


def test_the_old_metadata_tells_the_end() -> None:
    text = (
        "Started dump at: 2026-11-21 14:31:30\nSHOW MASTER STATUS:\n\tLog: binlog.000001\n\tPos: 2703361\n"
        "\tGTID:0-523000-16\n\n"
    )
    assert not read_metadata(text).finished
    assert read_metadata(text + "Finished dump at: 2026-11-21 14:31:30\n").finished
    bare = read_metadata("Started dump at: 2026-11-21 14:31:59\nFinished dump at: 2026-11-21 14:31:59\n")
    assert bare.finished


@pytest.mark.parametrize(
    "source",
    [
        "[source]\n# Channel_Name = ''\n#SOURCE_LOG_FILE = \"bin.000003\"\n#SOURCE_LOG_POS = 66379458\n",
        "[master]\nFile = bin.000003\nPosition = 66379458\nExecuted_Gtid_Set = 0-1-5\n",
    ],
)
def test_the_new_metadata_is_a_key_file_with_the_rows_of_each_table(source: str) -> None:
    text = (
        "# Started dump at: 2026-08-31 21:44:48\n[config]\nquote-character = BACKTICK\n\n"
        f"[myloader_session_variables]\nSQL_MODE='NO_AUTO_VALUE_ON_ZERO' /*!40101\n\n{source}\n[`shop`.`a`]\n"
        "real_table_name=a\nrows = 9\n\n[`shop`.`b$x`]\nreal_table_name=b$x\nrows = 0\n"
        "data_checksum = 3187537694\n"
    )
    metadata = read_metadata(text)
    assert metadata.rows == {A: 9, B: 0}
    assert not metadata.finished
    assert read_metadata(text + "# Finished dump at: 2026-08-31 21:44:48\n").finished


HEAD = b"/*!40101 SET NAMES binary*/;\n/*!40014 SET FOREIGN_KEY_CHECKS=0*/;\n/*!40103 SET TIME_ZONE='+00:00' */;\n"
OLD_ROWS = b'INSERT INTO `a` VALUES\n(1,"(2,\\n(3"),\n(2,NULL),\n(3,"x;");\n'
NEW_ROWS = b'INSERT INTO `a` VALUES(1,"(2,\\n(3")\n,(2,NULL)\n,(3,"x;")\n;\n'


@pytest.mark.parametrize("rows", [OLD_ROWS, NEW_ROWS])
@pytest.mark.parametrize("times", [1, 2, 30000])
def test_rows_are_counted_in_both_formats(tmp_path: Path, rows: bytes, times: int) -> None:
    path = tmp_path / "a.sql"
    path.write_bytes(HEAD + rows * times)
    found = inspect(path)
    assert (found.rows, found.fault) == (3 * times, "")


def test_what_stands_before_the_rows_is_told_with_its_character_set(tmp_path: Path) -> None:
    path = tmp_path / "a.sql"
    for text, head, charset in (
        (HEAD + OLD_ROWS * 50_000, len(HEAD), "binary"),
        (HEAD, 0, ""),
        (b"/*!40101 SET NAMES 'utf8mb4'*/;\n" + NEW_ROWS, 32, "utf8mb4"),
    ):
        path.write_bytes(text)
        found = inspect(path)
        assert (found.head, found.charset, found.fault) == (head, charset, "")
    path.write_bytes(OLD_ROWS)
    assert "the character set" in inspect(path).fault


@pytest.mark.parametrize("size", range(1024 * 1024 - 40, 1024 * 1024 + 40, 1))
def test_a_line_may_begin_at_any_place_of_a_block(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.sql"
    path.write_bytes(HEAD + b'INSERT INTO `a` VALUES\n("' + b"x" * (size - len(HEAD) - 30) + b'");\n' + OLD_ROWS)
    assert inspect(path).rows == 4


def test_what_mydumper_writes_after_a_short_write_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.sql"
    for text in (HEAD + OLD_ROWS[:-1], HEAD + OLD_ROWS[:-9], b"", HEAD + OLD_ROWS + b"\0\0"):
        path.write_bytes(text)
        assert "does not end with a whole statement" in inspect(path).fault
    path.write_bytes(HEAD + OLD_ROWS + b"\0garbage of its memory" + OLD_ROWS + OLD_ROWS)
    assert inspect(path).fault == "1 of its lines are not part of an INSERT statement"
