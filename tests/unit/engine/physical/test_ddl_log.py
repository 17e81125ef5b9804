"""Where mariadb-backup stops reading the server's log of changed definitions."""

from pathlib import Path

from backupd.engine.physical.inventory import unread_changes
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
