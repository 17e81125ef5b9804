"""What a logged statement is, by the words at its beginning."""

from __future__ import annotations

import pytest

from backupd.engine.binlog.walk import changes_data, may_concern_events


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("INSERT INTO t VALUES (1)", True),
        ("/* who */ update t set a = 1", True),
        ("-- x\nDELETE FROM t", True),
        ("#x\n/*!40000 REPLACE INTO t VALUES (1) */", True),
        ("WITH a AS (SELECT 1) DELETE FROM t", True),
        ("(SELECT f())", True),
        ("CALL p()", True),
        ("SET STATEMENT sql_mode='' FOR INSERT INTO t VALUES (1)", True),
        ("LOAD DATA INFILE 'x' INTO TABLE t", True),
        ("@nonsense", True),
        ("RESET QUERY CACHE", True),
        ("PURGE BINARY LOGS TO 'a'", True),
        ("SHUTDOWN", True),
        ("", False),
        ("BEGIN", False),
        ("COMMIT", False),
        ("ROLLBACK TO `a`", False),
        ("SAVEPOINT `insert`", False),
        ("XA START X'01',X'',1", False),
        ("CREATE TABLE t (a INT)", False),
        ("/*!50100 ALTER TABLE t ADD b INT */", False),
        ("/* INSERT */ DROP TABLE t", False),
        ("TRUNCATE t", False),
        ("SET PASSWORD FOR a = 'x'", False),
        ("GRANT INSERT ON *.* TO a", False),
        ("--\nDROP TABLE t", False),
    ],
)
def test_what_is_no_ddl_and_no_control_of_a_transaction_changes_data(text: str, data: bool) -> None:
    assert changes_data(text) is data


@pytest.mark.parametrize(
    "front",
    [
        "",
        "-- off\n",
        "--\n",
        "# off\n",
        "/* off */ ",
        "/*!50100 ",
        "/*M!100100 ",
        "/*M! ",
        "( ",
        "\n\t/**/ -- a\n #b\n",
        "SET STATEMENT sql_mode='FOR' FOR ",
    ],
)
@pytest.mark.parametrize(
    "text", ["ALTER EVENT d.e DISABLE", "create event e on schedule every 1 day do select 1", "DROP /* x */ SCHEMA d"]
)
def test_a_statement_about_events_is_found_behind_comments_of_any_sort(front: str, text: str) -> None:
    assert may_concern_events(front + text)


def test_a_statement_that_only_speaks_of_events_is_none_about_them() -> None:
    for text in ("INSERT INTO t VALUES ('ALTER EVENT e DISABLE')", "/* ALTER EVENT e */ UPDATE t SET a = 1", ""):
        assert not may_concern_events(text)
