"""Tables that physical backups leave out; pure."""

from __future__ import annotations

from backupd.backup.coverage import examine_coverage
from backupd.engine.census import uncovered
from backupd.engine.tables import Table
from backupd.model.server import Flavour
from backupd.model.table import TableName
from policies.schema import Logical


def table(schema: str, name: str, engine: str) -> Table:
    return Table(TableName(schema, name), "BASE TABLE", engine, 1, None, "")


TABLES = [table("shop", "orders", "InnoDB"), table("shop", "notes", "MyISAM"), table("shop", "toku", "TokuDB"),
          table("crm", "toku", "TokuDB"), table("shop", "cache", "MEMORY"), table("shop", "far", "FEDERATED"),
          table("shop", "torn", ""), table("mysql", "user", "TokuDB")]


def findings(tool: str = "mariadb-backup", logical: dict[str, object] | None = None) -> list[tuple[str, str]]:
    leg = None if logical is None else Logical.model_validate({"schedule": "0 4 * * *", **logical})
    return [(str(one.severity), one.message) for one in examine_coverage(TABLES, Flavour.MARIADB, tool, leg)]


def test_tables_that_no_backup_covers_are_named() -> None:
    ((severity, message),) = findings()
    assert severity == "warning"
    assert message == ("of engine TokuDB, which physical backups leave out, 2 tables are in no backup at all: "
                       "shop.toku, crm.toku")


def test_a_logical_leg_that_fits_them_covers_them_whatever_their_size() -> None:
    assert findings(logical={"tables": {"include": ["*.toku"], "max_size": 1}}) == [
        ("ok", "physical backups leave out the 2 tables of engine TokuDB; all of them are in logical ones")]
    ((severity, message),) = findings(logical={"tables": {"include": ["*.*"], "exclude": ["crm.*"]}})
    assert (severity, message.rpartition(": ")[2]) == ("warning", "crm.toku")
    sets = {"a": {"schedule": "0 4 * * *", "tables": {"include": ["crm.*"]}}}
    assert findings(logical={"tables": {"include": ["shop.*"]}, "sets": sets})[0][0] == "ok"


def test_a_tool_that_copies_innodb_only_leaves_out_more() -> None:
    engines = {"InnoDB", "MyISAM", "MEMORY", "CSV", "BLACKHOLE", ""}
    assert uncovered(engines, Flavour.MYSQL, "clone") == {"MyISAM", "CSV"}
    assert uncovered({"InnoDB", "MyISAM", "ROCKSDB"}, Flavour.MYSQL, "xtrabackup") == {"ROCKSDB"}
    assert uncovered({"ROCKSDB"}, Flavour.PERCONA) == frozenset()
