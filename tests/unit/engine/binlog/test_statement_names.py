"""What logged statements tie together, told from their texts."""

from __future__ import annotations

import pytest

from backupd.engine.binlog.statements import (
    Routine,
    created_trigger,
    has_named_all,
    hides_names,
    is_trigger,
    is_view,
    masked,
    read_by,
    renamed,
    routine_of,
    statements,
)
from backupd.engine.sql.dialect import tokens_of


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("INSERT INTO a SELECT x, y FROM b, s.c JOIN `d` USING (id) WHERE z IN (SELECT q FROM e)", "b s.c d e"),
        ("INSERT INTO a (x) VALUES ('SELECT 1 FROM b')", ""),
        ("INSERT INTO a VALUES ((SELECT MAX(id) FROM b))", "b"),
        ("INSERT INTO a SELECT 1 FROM b LEFT JOIN (c CROSS JOIN d ON 1) ON b.x = c.y, e", "b c d e"),
        ("INSERT INTO a SELECT 1 FROM (SELECT p, q FROM z WHERE 1 ORDER BY p, q) AS d, e WHERE f, g", "z e"),
        ("INSERT INTO a TABLE b", "b"),
        ("CREATE TABLE a LIKE s.b", "s.b"),
        ("CREATE TABLE a (LIKE b)", "b"),
        ("CREATE TABLE a (id INT, CHECK (n LIKE 'x%'), FOREIGN KEY (id) REFERENCES `my.s`.p (id))", "my.s.p"),
        ("CREATE TABLE a ENGINE=MERGE UNION=(b, c)", "b c"),
        ("CREATE TABLE a AS SELECT * FROM b FOR UPDATE", "b"),
        ("ALTER TABLE a EXCHANGE PARTITION p WITH TABLE b", "b"),
        ("DELETE x FROM x USING x, y WHERE x.i = y.i AND x.t = 'JOIN z'", "x y"),
        ("REPLACE INTO a SELECT 1 /* FROM b */ FROM c -- FROM d\n", "c"),
        ("DROP TABLE a, b", ""),
    ],
)
def test_what_a_statement_reads_stands_behind_certain_words(text: str, names: str) -> None:
    found = read_by(list(tokens_of(text)))
    assert [".".join(filter(None, name)) for name in found] == names.split()


def test_new_names_are_told_in_their_order() -> None:
    def pairs(text: str) -> list[str]:
        return [f"{'.'.join(old)}>{'.'.join(new)}" for old, new in renamed(list(tokens_of(text)))]

    assert pairs("RENAME TABLE IF EXISTS s.a WAIT 5 TO s.b, `s`.`c;d` TO `t`.`a`") == ["s.a>s.b", "s.c;d>t.a"]
    assert pairs("ALTER TABLE s.a ADD COLUMN n INT, RENAME COLUMN x TO y, RENAME AS s.b") == ["s.a>s.b"]
    assert pairs("ALTER TABLE a RENAME INDEX x TO y") == pairs("RENAME USER a TO b") == pairs("RENAME TABLE a") == []


def test_definitions_are_one_statement_and_others_end_with_a_semicolon() -> None:
    def count(text: str) -> int:
        return len(list(statements(text)))

    assert count("INSERT INTO a VALUES (';'); DELETE FROM b; UPDATE `c;` SET x = 1") == 3
    assert count("CREATE TRIGGER t AFTER INSERT ON a FOR EACH ROW BEGIN DELETE FROM b; SELECT 1; END") == 1
    assert count("") == count(";") == 0


def test_routines_and_the_like_are_told_with_their_schemas() -> None:
    assert routine_of("CREATE DEFINER=`root`@`localhost` PROCEDURE `s`.`p`()\nSELECT 1", "now") == Routine(
        "PROCEDURE", "s"
    )
    assert routine_of("/* x */ DROP EVENT IF EXISTS e", "now") == Routine("EVENT", "now")
    assert routine_of("CREATE OR REPLACE DEFINER = CURRENT_USER() FUNCTION f() RETURNS INT RETURN 1", "now") == Routine(
        "FUNCTION", "now"
    )
    assert routine_of("CREATE AGGREGATE FUNCTION f RETURNS INT SONAME 'x.so'", "") == Routine(
        "FUNCTION", "", loaded=True
    )
    assert routine_of("CREATE PACKAGE BODY s.p AS x", "now") == Routine("PACKAGE", "s")
    assert routine_of("DROP SERVER other", "now") == Routine("SERVER", "now")
    for text in ("CREATE TABLE event (i INT)", "DROP VIEW function", "INSERT INTO a VALUES ('DROP EVENT e')", ""):
        assert routine_of(text, "now") is None


def test_triggers_and_views_are_told_from_other_definitions() -> None:
    body = "BEFORE INSERT ON s.a FOR EACH ROW SET @x = 1"
    assert created_trigger(list(tokens_of(f"CREATE DEFINER=`a`@`%` TRIGGER t {body}"))) == ("s", "a")
    assert created_trigger(list(tokens_of(f"CREATE TABLE trigger_ (x INT) -- {body}"))) is None
    view = "CREATE ALGORITHM=UNDEFINED DEFINER=`a`@`%` SQL SECURITY DEFINER VIEW v AS SELECT 1"
    assert is_view(list(tokens_of(view)))
    assert is_view(list(tokens_of(view.replace("CREATE", "ALTER"))))
    assert is_trigger(list(tokens_of(f"CREATE DEFINER=`a`@`%` TRIGGER t {body}")))
    assert not is_view(list(tokens_of("CREATE TABLE view_ (x INT)")))


@pytest.mark.parametrize(
    ("beginning", "named"),
    [
        ("CREATE TABLE t (i INT, x VARCHAR(2", False),
        ("CREATE TABLE t (i INT) PARTITION BY RANGE (i) (PARTITION p0", True),
        ("ALTER TABLE t ADD PARTITION (PARTITION p9 VALUES", True),
        ("ALTER TABLE t ADD COLUMN `PARTITION", False),
        ("CREATE UNIQUE INDEX i ON t (a", True),
        ("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW BEGIN", False),
        ("RENAME TABLE a TO b, c", False),
        ("CREATE", False),
        ("", False),
    ],
)
def test_behind_partitions_and_columns_of_an_index_no_table_is_named(beginning: str, named: bool) -> None:
    assert has_named_all(list(tokens_of(beginning))) is named


def test_a_name_that_was_masked_is_noticed() -> None:
    for text in ("""CREATE TABLE t ("password" INT REFERENCES "p" (i))""", """CREATE TABLE "tokens" LIKE "p" """):
        assert hides_names(list(tokens_of(masked(text))))
    for text in ("CREATE TABLE t (password TEXT CHECK (i > 0 AND 1 AND password LIKE 'x'))", "CREATE TABLE t LIKE `p`"):
        assert not hides_names(list(tokens_of(masked(text))))
