"""Where mariadb-backup stops reading the server's log of changed definitions, and Aria tables that it does not name."""

from pathlib import Path
from typing import cast

from backupd.engine.physical.inventory import Stocktaking, aria_begun, unread_changes
from backupd.engine.sql.client import Connection
from backupd.model.table import TableName


def test_tables_behind_an_exchange_are_named_unless_innodb_knows_them(tmp_path: Path) -> None:
    assert unread_changes(tmp_path) == (), "a server that keeps no such log"
    exchange = "2026-01-01 00:00:00\tEXCHANGE_PARTITION\tInnoDB\t1\tm\tp\tid\tInnoDB\t0\tm\tt\tid"
    before = "2026-01-01 00:00:00\tDROP\tAria\t0\tm\tbefore\tid\t\t0\t\t\t"
    log = tmp_path / "ddl.log"
    log.write_text(f"{before}\n{exchange}\n")
    assert unread_changes(tmp_path) == ()
    log.write_text(
        "\n".join(
            (
                before,
                exchange,
                "2026-01-01 00:00:00\tCREATE\tVIEW\t0\tm\tv\t\t\t0\t\t\t",
                "2026-01-01 00:00:00\tALTER\tInnoDB\t0\tm\tc\tid\tMyISAM\t0\tm\tgr@1i@1je\tid",
                "2026-01-01 00:00:00\tDROP\tAria\t0\tm\tx\tid\t\t0\t\t\t",
                "2026-01-01 00:00:00\tDR",
            )
        )
    )
    assert unread_changes(tmp_path) == (TableName("m", "größe"), TableName("m", "x"))


HEAD = bytes.fromhex("fefe09030c00018a00d7008700d70000000000000000030300000199010000be510600010000bb530600")


def test_where_an_aria_tables_content_begins_is_read_from_its_head() -> None:
    head = bytes.fromhex("fefe09030c00018a00d7008700d70000000000000000030300000199010000be510600010000bb530600")
    assert aria_begun(head) == (1, 0x651BE)  # what aria_chk said of this table
    assert aria_begun(head[:34]) is None
    assert aria_begun(b"\xfe\xfe\x07" + head[3:]) is None  # MyISAM


def test_copies_of_aria_tables_from_before_their_content_began_are_named() -> None:
    stock = Stocktaking(cast(Connection, None), None)
    stock.copied = {"a/same.MAI": (1, 7), "a/other.MAI": (1, 7), "a/untouched.MAI": (1, 7)}
    stock._begun = {"a/same.MAI": (1, 7), "a/other.MAI": (2, 3), "a/not_copied.MAI": (2, 4)}
    assert stock.begun_again == {"a/other.MAI"}


def test_files_are_young_since_the_backup_began_though_the_clock_was_set_back(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "t.MAI").write_bytes(HEAD)
    stock = Stocktaking(cast(Connection, None), None)
    stock._datadir = tmp_path
    stock._began += 3600  # an hour ago by a clock that was an hour ahead
    stock._hold()
    assert stock._begun == {"a/t.MAI": (1, 0x651BE)}
    assert list(stock._held) == [TableName("a", "t")]
    stock._let_go()


def test_a_data_directory_that_cannot_be_read_is_not_taken_for_one_without_changes(tmp_path: Path) -> None:
    stock = Stocktaking(cast(Connection, None), None)
    stock._datadir = tmp_path / "absent"
    stock._hold()
    assert "No such file" in stock._unseen
