"""Tables that physical backups leave out; pure."""

from __future__ import annotations

from backupd.backup.server_checks import examine_coverage, recommend
from backupd.engine.server.probe import uncovered
from backupd.engine.sql.tables import Table
from backupd.model.server_facts import Flavour
from backupd.model.table import TableName
from policies.policy import Logical


def table(schema: str, name: str, engine: str) -> Table:
    return Table(TableName(schema, name), "BASE TABLE", engine, 1, "")


TABLES = [
    table("shop", "orders", "InnoDB"),
    table("shop", "notes", "MyISAM"),
    table("shop", "toku", "TokuDB"),
    table("crm", "toku", "TokuDB"),
    table("shop", "cache", "MEMORY"),
    table("shop", "far", "FEDERATED"),
    table("shop", "torn", ""),
    table("mysql", "user", "TokuDB"),
]


def findings(tool: str = "mariadb-backup", logical: dict[str, object] | None = None) -> list[tuple[str, str]]:
    leg = None if logical is None else Logical.model_validate({"schedule": "0 4 * * *"} | logical)
    return [(str(one.severity), one.message) for one in examine_coverage(TABLES, Flavour.MARIADB, tool, leg)]


def test_tables_that_no_backup_covers_are_named() -> None:
    ((severity, message),) = findings()
    assert severity == "warning"
    assert message == (
        "2 tables of engine TokuDB are in no backup, as physical backups leave that engine out: shop.toku, crm.toku"
    )


def test_a_logical_leg_with_a_schedule_covers_them_whatever_it_includes_and_whatever_their_size() -> None:
    covered = [("ok", "physical backups leave out the 2 tables of engine TokuDB; all of them are in logical ones")]
    assert findings(logical={"tables": {"include": ["*.toku"], "max_size": 1}}) == covered
    assert findings(logical={"tables": {"include": ["web.*"]}}) == covered
    ((severity, message),) = findings(logical={"tables": {"include": ["*.*"], "exclude": ["crm.*"]}})
    assert (severity, message.rpartition(": ")[2]) == ("warning", "crm.toku")


def test_sets_cover_what_they_include_only() -> None:
    sets = {"a": {"schedule": "0 4 * * *", "tables": {"include": ["crm.*"]}}}
    ((severity, message),) = findings(logical={"schedule": None, "sets": sets})
    assert (severity, message.rpartition(": ")[2]) == ("warning", "shop.toku")
    assert findings(logical={"tables": {"exclude": ["crm.*"]}, "sets": sets})[0][0] == "ok"


def test_a_tool_that_copies_innodb_only_leaves_out_more() -> None:
    engines = {"InnoDB", "MyISAM", "MEMORY", "CSV", "BLACKHOLE", ""}
    assert uncovered(engines, Flavour.MYSQL, "clone") == {"MyISAM", "CSV"}
    assert uncovered({"InnoDB", "MyISAM", "ROCKSDB"}, Flavour.MYSQL, "xtrabackup") == {"ROCKSDB"}
    assert uncovered({"ROCKSDB"}, Flavour.PERCONA) == {"ROCKSDB"}, "of which nobody has restored a copy"


def test_tables_without_snapshots_are_counted_and_innodb_is_recommended() -> None:
    (found,) = recommend({"InnoDB": 40, "Aria": 1, "MyISAM": 3, "MEMORY": 2})
    assert str(found.severity) == "warning"
    assert "(3 of MyISAM, 1 of Aria)" in found.message
    assert "ENGINE=InnoDB" in found.hint
    assert list(recommend({"InnoDB": 40, "MEMORY": 2})) == []
