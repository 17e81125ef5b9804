"""Understanding definitions as the servers print them; pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backupd.engine.server.definition_text import (
    makes_elsewhere,
    parse_table,
    without_directories,
    without_foreign_keys,
)
from backupd.engine.server.definitions import (
    Stored,
    made_trigger,
    read_definition,
    script,
    statements,
    understand,
    write_definition,
)
from backupd.engine.sql.tables import ForeignKey
from backupd.model.table import TableName

ORDERS = TableName("shop", "orders")
MARIADB = """\
CREATE TABLE `orders` (
  `id` int(10) unsigned zerofill NOT NULL AUTO_INCREMENT,
  `a``b,(` float INVISIBLE DEFAULT 3,
  `j` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_bin DEFAULT NULL CHECK (json_valid(`j`)),
  `ts` timestamp /* mariadb-5.3 */ NULL DEFAULT '2020-01-01 00:00:00',
  `c` varchar(9) CHARACTER SET latin1 NOT NULL COMMENT 'a, (b) '' `x`, CONSTRAINT `f` FOREIGN KEY (`p`)',
  `v` int(11) GENERATED ALWAYS AS (`a` + 1) VIRTUAL,
  `w` int(11) GENERATED ALWAYS AS (`a` * (2 + 1)) STORED,
  `e` enum('a,b',')','it''s') DEFAULT NULL,
  `s` timestamp(6) GENERATED ALWAYS AS ROW START INVISIBLE,
  `e2` timestamp(6) GENERATED ALWAYS AS ROW END,
  `p` int(11) DEFAULT NULL,
  PRIMARY KEY (`id`,`e2`),
  UNIQUE KEY `uq` (`c`(3)),
  UNIQUE KEY `maybe` (`p`),
  KEY `p` (`p`),
  CONSTRAINT `f1` FOREIGN KEY (`p`, `id`) REFERENCES `other`.`p,q` (`u`, `i``d`) ON DELETE CASCADE ON UPDATE SET NULL,
  CONSTRAINT `f2` FOREIGN KEY (`p`) REFERENCES `parents` (`id`) ON DELETE NO ACTION,
  CONSTRAINT `CONSTRAINT_1` CHECK (`a` > 3),
  PERIOD FOR SYSTEM_TIME (`s`, `e2`)
) ENGINE=InnoDB AUTO_INCREMENT=7 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci WITH SYSTEM VERSIONING
 PARTITION BY SYSTEM_TIME LIMIT 100
(PARTITION `p0` HISTORY DATA DIRECTORY = '/mnt/x' ENGINE = InnoDB,
 PARTITION `pn` CURRENT ENGINE = InnoDB)"""
MYSQL = """\
CREATE TABLE `orders` (
  `id` int NOT NULL /*!80023 INVISIBLE */,
  `a` int NOT NULL,
  `s` geometry NOT NULL /*!80003 SRID 4326 */,
  UNIQUE KEY `computed` (((`a` + 1))),
  UNIQUE KEY `a` (`a` DESC,`id`),
  CONSTRAINT `n_chk_1` CHECK ((`a` > 3)) /*!80016 NOT ENFORCED */,
  CONSTRAINT `f` FOREIGN KEY (`a`) REFERENCES `p` (`u`) ON DELETE RESTRICT
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 DATA DIRECTORY='/mnt/it''s/' INDEX DIRECTORY='/mnt/b/'
/*!50100 PARTITION BY HASH (`id`)
PARTITIONS 3 */"""


def test_columns_are_read_with_all_that_matters_to_whoever_writes_them() -> None:
    columns = parse_table(ORDERS, MARIADB).columns
    assert {column.name: column.type for column in columns.all} == {
        "id": "int(10) unsigned zerofill",
        "a`b,(": "float",
        "j": "longtext",
        "ts": "timestamp",
        "c": "varchar(9)",
        "v": "int(11)",
        "w": "int(11)",
        "e": "enum('a,b',')','it''s')",
        "s": "timestamp(6)",
        "e2": "timestamp(6)",
        "p": "int(11)",
    }
    assert tuple(column.name for column in columns.all if column.generated) == ("v", "w", "s", "e2")
    assert tuple(column.name for column in columns.all if column.invisible) == ("a`b,(", "s")
    assert columns.written == ("id", "a`b,(", "j", "ts", "c", "e", "p")
    assert (columns["v"].stored, columns["w"].stored, columns["s"].stored) == (False, True, False)
    assert (columns["s"].period, columns["e2"].period, columns["v"].period) == ("START", "END", "")
    assert (columns["id"].auto_increment, columns["id"].nullable, columns["p"].nullable) == (True, False, True)
    assert [column.kind for column in columns.all[:5]] == ["int", "float", "longtext", "timestamp", "varchar"]
    assert columns.primary_key == ("id", "e2")
    assert columns.versioned


def test_what_mysql_writes_into_versioned_comments_is_read() -> None:
    text = parse_table(ORDERS, MYSQL)
    assert [column.name for column in text.columns.all if column.invisible] == ["id"]
    assert text.columns["id"].rest == "NOT NULL /*!80023 INVISIBLE */"
    assert text.columns.primary_key == ()
    assert text.partitioned
    assert text.engine == "InnoDB"


def test_foreign_keys_are_read_with_schemas_and_rules() -> None:
    assert parse_table(ORDERS, MARIADB).foreign_keys == (
        ForeignKey("f1", ORDERS, ("p", "id"), TableName("other", "p,q"), ("u", "i`d"), "CASCADE", "SET NULL"),
        ForeignKey("f2", ORDERS, ("p",), TableName("shop", "parents"), ("id",)),
    )
    assert parse_table(ORDERS, MYSQL).foreign_keys[0].on_delete == "RESTRICT"


def test_foreign_keys_and_folders_are_taken_out_and_nothing_else() -> None:
    assert without_foreign_keys(ORDERS, MARIADB) == "\n".join(
        line for line in MARIADB.splitlines() if "REFERENCES" not in line
    )
    bare = without_foreign_keys(ORDERS, MYSQL)
    assert bare == MYSQL.replace(",\n  CONSTRAINT `f` FOREIGN KEY (`a`) REFERENCES `p` (`u`) ON DELETE RESTRICT", "")
    assert "DIRECTORY" not in without_directories(MARIADB) + without_directories(MYSQL)
    assert without_directories(MYSQL).endswith("utf8mb4  \n/*!50100 PARTITION BY HASH (`id`)\nPARTITIONS 3 */")


def test_a_sequence_has_no_columns_and_nonsense_is_refused() -> None:
    text = parse_table(ORDERS, "CREATE SEQUENCE `s` start with 1 minvalue 1 cache 1000 nocycle ENGINE=Aria")
    assert (text.columns.all, text.engine) == ((), "Aria")
    for nonsense in ("", "CREATE TABLE `x`", "CREATE TABLE `x` (", "CREATE TABLE `x` () ENGINE=InnoDB"):
        with pytest.raises(ValueError, match="no columns"):
            parse_table(ORDERS, nonsense)


def test_a_constraint_can_be_written_again_for_another_parent() -> None:
    first, second = parse_table(ORDERS, MARIADB).foreign_keys
    assert first.clause == (
        "CONSTRAINT `f1` FOREIGN KEY (`p`, `id`) REFERENCES `other`.`p,q` (`u`, `i``d`) "
        "ON DELETE CASCADE ON UPDATE SET NULL"
    )
    assert replace(second, parent=TableName("x", "y"), name="new").clause == (
        "CONSTRAINT `new` FOREIGN KEY (`p`) REFERENCES `x`.`y` (`id`)"
    )
    assert (first.acts, second.acts) == (True, False)


@pytest.mark.parametrize(
    ("made", "rewritten"),
    [
        (
            "CREATE TRIGGER t BEFORE INSERT ON orders FOR EACH ROW SET NEW.a = 1",
            "CREATE TRIGGER `t` BEFORE INSERT ON `orders` FOR EACH ROW SET NEW.a = 1",
        ),
        (
            (
                "CREATE DEFINER=`ro``ot`@`%` TRIGGER shop.`t r` /* hi */ after update ON `shop` . orders for each row\n"
                "begin /* FOR EACH ROW */ set @a = 'x'; end -- done"
            ),
            (
                "CREATE DEFINER=`ro``ot`@`%` TRIGGER `t r` after update ON `orders` FOR EACH ROW "
                "begin /* FOR EACH ROW */ set @a = 'x'; end -- done"
            ),
        ),
        (
            (
                "CREATE OR REPLACE DEFINER=x@y TRIGGER IF NOT EXISTS `t` BEFORE DELETE ON shop.`or``der` FOR "
                "EACH ROW FOLLOWS "
                "shop.`u` SET @x = 1"
            ),
            "CREATE DEFINER=x@y TRIGGER `t` BEFORE DELETE ON `or``der` FOR EACH ROW SET @x = 1",
        ),
        (
            'CREATE DEFINER=`a`@`b` TRIGGER "T" BEFORE INSERT ON "Or""ders" FOR EACH ROW SET @x = "y"',
            'CREATE DEFINER=`a`@`b` TRIGGER `T` BEFORE INSERT ON `Or"ders` FOR EACH ROW SET @x = "y"',
        ),
    ],
)
def test_a_trigger_loses_its_schema_and_nothing_else(made: str, rewritten: str) -> None:
    assert made_trigger(made) == rewritten


def test_a_trigger_can_be_moved_to_another_table() -> None:
    made = "CREATE DEFINER=`a`@`b` TRIGGER `t` BEFORE INSERT ON `x` FOR EACH ROW SET @x = 1"
    assert made_trigger(made, table="y`z") == (
        "CREATE DEFINER=`a`@`b` TRIGGER `t` BEFORE INSERT ON `y``z` FOR EACH ROW SET @x = 1"
    )
    with pytest.raises(ValueError, match="not a trigger"):
        made_trigger("CREATE VIEW v AS SELECT 1")


def test_a_script_of_triggers_that_was_cut_or_altered_anywhere_is_damaged_and_nothing_else() -> None:
    name = TableName("shop", "orders")
    made = made_trigger("CREATE DEFINER=`a`@`b` TRIGGER `t` BEFORE INSERT ON `o` FOR EACH ROW FOLLOWS `u` SET @x = 1")
    stored = Stored(made, "", "utf8mb4", "utf8mb4_bin", "utf8mb4_bin", "+00:00")
    whole = script([stored], collation="utf8mb4_bin").encode()
    definition = write_definition(understand(name, "CREATE TABLE `orders` (`a` int)", ""))
    read_definition(name, definition, whole)
    damaged = 0
    at = whole.index(b"CREATE DEFINER")
    for place in range(at, len(whole)):
        for bad in (whole[:place], whole[:place] + b"`" + whole[place + 1 :], whole[:place] + whole[place + 40 :]):
            try:
                read_definition(name, definition, bad)
            except ValueError:
                damaged += 1
    assert damaged > 100


def test_a_script_comes_apart_into_the_very_statements_it_was_made_of() -> None:
    bodies = [
        "CREATE TRIGGER t ... SET @a = ';'\n;\n//",
        "CREATE VIEW `//1//` AS\nselect '//'",
        "x\n//\n//1//\ny",
        "ő;",
    ]
    text = script(
        [
            Stored(body, "NO_BACKSLASH_ESCAPES,ANSI", "latin1", "latin1_german1_ci", "latin1_swedish_ci", "+02:00")
            for body in bodies
        ],
        collation="utf8mb4_general_ci",
    )
    found = list(statements(text))
    assert [one for one in found if one in bodies] == bodies
    assert found[0] == "SET NAMES utf8mb4"
    assert found[1] == (
        "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI', SESSION character_set_client = latin1, "
        "SESSION collation_connection = latin1_german1_ci, SESSION time_zone = '+02:00'"
    )
    assert found[2] == "ALTER DATABASE CHARACTER SET latin1 COLLATE latin1_swedish_ci"
    assert found[4] == "ALTER DATABASE CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
    # What is not ASCII would have other bytes in its old character set, which is not what the file is written in.
    assert [one for one in found if "character_set_client = utf8mb4" in one] == found[-4:-3]
    assert script([], collation="x") == ""


def test_no_setting_breaks_out_of_a_script() -> None:
    with pytest.raises(ValueError, match="not a valid value of the server"):
        script([Stored("x", sql_mode="'; DROP TABLE x; --")], collation="y")


@pytest.mark.parametrize(
    ("statement", "so"),
    [
        ("CREATE TABLE a.t (n INT) DATA DIRECTORY='/srv/fast'", True),
        ("ALTER TABLE a.t PARTITION BY HASH (n) (PARTITION p INDEX DIRECTORY = '/srv/fast')", True),
        ("create tablespace s add datafile '/srv/fast/s.ibd'", True),
        ("CREATE TABLESPACE s ADD DATAFILE '../fast/s.ibd'", True),
        ("CREATE TABLESPACE s ADD DATAFILE 's.ibd'", False),
        ("CREATE TABLE a.t (`data directory` INT COMMENT 'DATA DIRECTORY=''/srv''') -- DATA DIRECTORY='/srv'", False),
        ("INSERT INTO a.t VALUES ('CREATE TABLE x (n INT) DATA DIRECTORY=''/srv''')", False),
        ("CREATE TABLE a.t (n INT)", False),
    ],
)
def test_what_makes_files_beside_the_data_directory(statement: str, so: bool) -> None:
    assert makes_elsewhere(statement) is so
