"""Definitions made fit for staging; data files cut into statements."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backupd.engine.server.definitions import TableDefinition, understand
from backupd.model.errors import StreamError
from backupd.model.table import TableName
from restore.cutover import table_load as datafile
from restore.cutover.staging_schema import staged_table
from restore.cutover.table_load import statements
from tests.support.restores.dump_folder import literal

NAME = TableName("shop", "t")
CREATE = """CREATE TABLE `t` (
  `id` int(11) NOT NULL AUTO_INCREMENT COMMENT 'KEY `x` (`id`), FOREIGN KEY',
  `a` varchar(10) DEFAULT ',)',
  `b` int(11) DEFAULT (1 + (2)),
  PRIMARY KEY (`id`,`a`),
  UNIQUE KEY `u;` (`a`),
  UNIQUE KEY `long` (`b`) USING HASH,
  KEY `counter` (`id`),
  KEY `b` (`b`,`a`(3)),
  KEY `f` ((lower(`a`))),
  FULLTEXT KEY `words` (`a`),
  CONSTRAINT `fk` FOREIGN KEY (`b`) REFERENCES `p` (`id`) ON DELETE CASCADE,
  CONSTRAINT `c` CHECK (`b` > 0)
) ENGINE=InnoDB AUTO_INCREMENT=7 DEFAULT CHARSET=utf8mb4 DATA DIRECTORY='/x/' COMMENT='INDEX DIRECTORY=''/y'''
 PARTITION BY RANGE (`id`)
(PARTITION `p0` VALUES LESS THAN (10) DATA DIRECTORY = '/x' ENGINE = InnoDB,
 PARTITION `p1` VALUES LESS THAN MAXVALUE ENGINE = InnoDB)"""


def of(create: str) -> TableDefinition:
    return understand(NAME, create)


def test_foreign_keys_and_places_are_gone_and_everything_else_stays() -> None:
    made = staged_table(of(CREATE))
    assert made.create == CREATE.replace(
        ",\n  CONSTRAINT `fk` FOREIGN KEY (`b`) REFERENCES `p` (`id`) ON DELETE CASCADE", ""
    ).replace("DATA DIRECTORY='/x/'", "").replace("DATA DIRECTORY = '/x'", "")
    assert (made.engine, made.later, made.versioned) == ("INNODB", (), False)


def test_only_keys_that_the_rows_do_not_need_are_built_later() -> None:
    made = staged_table(of(CREATE), defer=True)
    assert made.later == (
        ("u;", "ADD UNIQUE KEY `u;` (`a`)"),
        ("b", "ADD KEY `b` (`b`,`a`(3))"),
        ("f", "ADD KEY `f` ((lower(`a`)))"),
    )
    inline = staged_table(of(made.create), defer=True)
    assert inline.later == ()
    for kept in ("PRIMARY KEY", "`long`", "`counter`", "`words`", "CHECK (`b` > 0)"):
        assert kept in made.create
    for without in (
        CREATE.replace("  PRIMARY KEY (`id`,`a`),\n", ""),
        CREATE.replace("ENGINE=InnoDB", "ENGINE=MyISAM"),
        CREATE.replace(" DEFAULT CHARSET=utf8mb4", " DEFAULT CHARSET=utf8mb4 WITH SYSTEM VERSIONING"),
    ):
        assert staged_table(of(without), defer=True).later == ()


def test_a_table_that_passes_its_rows_on_is_known() -> None:
    passing = "CREATE TABLE `t` (\n  `a` int\n) ENGINE={} CONNECTION='mysql://live/shop/t'"
    assert staged_table(of(passing.format("FEDERATED"))).rows_elsewhere
    assert not staged_table(of(passing.format("InnoDB"))).rows_elsewhere


@pytest.mark.parametrize(
    "create",
    ["CREATE TABLE `other` (\n  `a` int\n) ENGINE=InnoDB", "CREATE TABLE `shop`.`t` (\n  `a` int\n) ENGINE=InnoDB"],
)
def test_a_definition_of_something_else_is_refused(create: str) -> None:
    with pytest.raises(ValueError, match="something else"):
        staged_table(of(create))


VALUES = st.one_of(st.binary(max_size=30), st.none(), st.integers())


@given(
    st.lists(st.lists(VALUES, min_size=1, max_size=3), min_size=1, max_size=5),
    st.integers(20, 70),
    st.text("a;\n`' ", min_size=1, max_size=6),
)
def test_files_are_cut_between_statements_whatever_is_in_values_and_names(
    rows: list[list[object]], piece: int, table: str
) -> None:
    insert = b"INSERT INTO `" + table.replace("`", "``").encode() + b"` (`;\n`,`(``'`) VALUES\n"
    settings = [b"/*!40101 SET NAMES binary*/", b"SET SESSION sql_mode=''"]
    inserts = [
        insert + b",\n".join(b"(" + b",".join(map(literal, row)) + b")" for row in rows[: n + 1])
        for n in range(len(rows))
    ]
    raw = b";\n".join(settings) + b";\n-- said\n\n" + b"".join(one + b";\n" for one in inserts)
    whole, datafile._PIECE = datafile._PIECE, piece
    try:
        found = [(one.is_setting, bytes(one.text), one.end) for one in statements(io.BytesIO(raw), table)]
    finally:
        datafile._PIECE = whole
    assert [text for is_setting, text, _ in found if is_setting] == settings
    assert [text for is_setting, text, _ in found if not is_setting] == inserts
    assert all(raw[:end].endswith(text + b";") for _, text, end in found)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"INSERT INTO `t` VALUES\n(1", "ends within"),
        (b"INSERT INTO `t` VALUES\n(1)\n", "ends within"),
        (b"DROP TABLE `t`;\n", "no INSERT"),
        (b"SET GLOBAL read_only=0;\n", "no INSERT"),
        (b"INSERT INTO `shop`.`t` VALUES\n(1);\n", "no INSERT"),
        (b"INSERT INTO `u` VALUES\n(1);\n", "another table"),
        (b"INSERT INTO `t` SELECT * FROM `u`;\n", "no INSERT"),
        (b"\0\0\0\0", "no INSERT"),
        (b"/*!50000 DROP TABLE `t`*/;\n", "no INSERT"),
    ],
)
def test_what_is_no_row_of_the_table_does_not_reach_the_server(raw: bytes, words: str) -> None:
    with pytest.raises(StreamError, match=words):
        list(statements(io.BytesIO(raw), "t"))


def test_what_dump_tools_say_around_the_rows_is_understood() -> None:
    raw = (
        b"/*M!999999\\- enable the sandbox mode */ \n-- Host: x\n\n/*!40101 SET @OLD=@@SQL_MODE, SQL_MODE='' */;\n"
        b"--\n\nINSERT INTO `t` (`a`) VALUES (1),\n(2)\n;\n/*!40101 SET SQL_MODE=@OLD */;\n\n-- Dump completed"
    )
    assert [one.is_setting for one in statements(io.BytesIO(raw), "t")] == [True, False, True]


def test_a_file_may_be_empty_and_its_last_line_may_have_no_end() -> None:
    assert list(statements(io.BytesIO(b""), "t")) == []
    assert [bytes(one.text) for one in statements(io.BytesIO(b"-- x\nINSERT INTO `t` VALUES(1);"), "t")] == [
        b"INSERT INTO `t` VALUES(1)"
    ]
