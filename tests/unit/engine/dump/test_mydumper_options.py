"""Which mydumper is called how, and which tables it is not given: without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backupd.engine.dump.insert_files import DumpRequest, DumpTable
from backupd.engine.dump.selection import MyDumper, mydumper_tool
from backupd.engine.server.definition_text import Column, Columns
from backupd.engine.sql.client import Connection
from backupd.model.errors import ToolError, ToolMissingError
from backupd.model.server_facts import Flavour, Tool, Version
from backupd.model.table import TableName
from tests.support.servers.dumps import wanted

ID = Column("id", "int(11)")
OLD = Version(0, 10)
NEW = Version(11, 4)
LOCAL = Connection(socket="/run/x.sock", user="root", password="geheim")
REMOTE = Connection(host="db1", user="root", password="geheim", ssl={"ca": "/ca.pem", "verify-server-cert": ""})


def _tool(version: Version, flavour: Flavour = Flavour.MARIADB, server: Version = NEW) -> MyDumper:
    return MyDumper(Tool("mydumper", "/usr/bin/mydumper", version, f"mydumper {version}"), flavour, server)


def _arguments(version: Version, connection: Connection = LOCAL, *names: str) -> tuple[str, ...]:
    tables = wanted(TableName(*name.split(".")) for name in names or ("shop.a", "shop.b"))
    return _tool(version).arguments(DumpRequest(connection, tables, Path("/x"), threads=3, chunk_bytes=5_500_000))


def _refusal(column: Column, flavour: Flavour = Flavour.MARIADB, version: Version = OLD) -> str:
    table = DumpTable(TableName("shop", "orders"), "InnoDB", 0)
    return _tool(version, flavour).refuses(table, Columns((ID, column)))


@pytest.mark.parametrize(
    ("version", "locks", "verbose"),
    [
        (Version(0, 10, 0), {"--no-locks", "--trx-consistency-only"}, 3),
        (Version(0, 10, 9), {"--no-locks", "--trx-consistency-only"}, 3),
        (Version(0, 16, 0), {"--no-locks", "--trx-consistency-only"}, 4),
        (Version(0, 18, 0), {"--no-locks", "--trx-consistency-only"}, 4),
        (Version(0, 18, 1), {"--sync-thread-lock-mode=NO_LOCK", "--trx-tables"}, 4),
        (Version(0, 21, 4), {"--sync-thread-lock-mode=NO_LOCK", "--trx-tables"}, 4),
        (Version(1, 0, 0), {"--sync-thread-lock-mode=NO_LOCK", "--trx-tables"}, 4),
    ],
)
def test_each_version_gets_the_options_that_it_knows(version: Version, locks: set[str], verbose: int) -> None:
    arguments = set(_arguments(version))
    old, new = {"--no-locks", "--trx-consistency-only"}, {"--sync-thread-lock-mode=NO_LOCK", "--trx-tables"}
    assert arguments & (old | new) == locks
    assert {
        "--no-schemas",
        "--no-views",
        f"--verbose={verbose}",
        "--threads=3",
        "--chunk-filesize=5",
        "--database=shop",
    } <= arguments
    assert not any("geheim" in word for word in arguments)


@pytest.mark.parametrize("version", [Version(0, 9, 5), Version(0, 11, 3), Version(0, 15, 2), Version(2, 0)])
def test_a_version_that_is_not_known_is_refused_by_name(version: Version) -> None:
    with pytest.raises(ToolError, match=f"mydumper {version} is not supported") as caught:
        _tool(version)
    assert "0.16.0 to before" in caught.value.detail


def test_several_schemas_are_dumped_by_one_run_without_naming_any() -> None:
    assert not [word for word in _arguments(Version(0, 10), LOCAL, "a.x", "b.x") if word.startswith("--database")]


def test_encryption_is_asked_for_in_the_words_of_the_version_and_over_tcp_only() -> None:
    assert {"--ssl", "--ca=/ca.pem"} <= set(_arguments(Version(0, 10), REMOTE))
    assert {"--ssl-mode=VERIFY_IDENTITY", "--ca=/ca.pem"} <= set(_arguments(Version(1, 0), REMOTE))
    without = Connection(host="db1", ssl={"ca": "/ca.pem", "verify-server-cert": "OFF"})
    assert "--ssl-mode=REQUIRED" in _arguments(Version(1, 0), without)
    assert not [word for word in _arguments(Version(1, 0)) if "ssl" in word]


@pytest.mark.parametrize("name", ["a.b", "a/b", "a`b", "it's", 'a"b', "a\\b", "a\nb", "a\tb", "%41", "ő" * 64])
def test_names_that_it_builds_wrong_statements_or_files_from_are_refused(name: str) -> None:
    tool = _tool(Version(0, 10))
    columns = Columns((ID,))
    assert "name" in tool.refuses(DumpTable(TableName("ő" * 64, name), "InnoDB", 0), columns)
    assert not tool.refuses(DumpTable(TableName("my shop", "Or der$-2"), "InnoDB", 0), columns)
    assert "its file" in _tool(Version(1, 0)).refuses(DumpTable(TableName("shop", "Or der"), "InnoDB", 0), columns)


def test_columns_that_would_not_come_back_exactly_are_refused() -> None:
    assert "rounds" in _refusal(Column("f", "float(7,2) unsigned"))
    assert "invisible" in _refusal(Column("h", "int", invisible=True))
    assert "cannot be loaded" in _refusal(Column("a", "inet6"))
    assert "member ''" in _refusal(Column("e", "enum('a','')"))
    assert "name of one of its columns" in _refusal(Column("a`b", "int"))
    assert not _refusal(Column("d", "double"))
    assert "negative zero" in _refusal(Column("d", "double"), Flavour.MYSQL)


@pytest.mark.parametrize(
    "rest",
    [
        "NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP",
        "DEFAULT CURRENT_TIMESTAMP(6)",
        "DEFAULT (uuid())",
    ],
)
def test_a_computed_default_is_lost_on_mysql_by_the_old_version_only(rest: str) -> None:
    column = Column("at", "timestamp", rest=rest)
    assert "loses its column at" in _refusal(column, Flavour.MYSQL)
    assert "loses its column at" in _refusal(column, Flavour.PERCONA)
    assert not _refusal(column)
    assert not _refusal(column, Flavour.MYSQL, Version(0, 16, 3))
    assert not _refusal(Column("at", "timestamp", rest="NOT NULL DEFAULT '2000-01-01'"), Flavour.MYSQL)


def test_tables_that_it_leaves_out_are_refused() -> None:
    tool, name = _tool(Version(0, 10)), TableName("shop", "t")
    assert "engine MRG_MyISAM" in tool.refuses(DumpTable(name, "MRG_MyISAM", 0), Columns((ID,)))
    assert "engine unknown" in tool.refuses(DumpTable(name, "", 0), Columns((ID,)))
    assert "history" in tool.refuses(DumpTable(name, "InnoDB", 0), Columns((ID,), versioned=True))
    assert "no columns" in tool.refuses(DumpTable(name, "InnoDB", 0), Columns())


def test_the_installed_program_is_found_with_its_version_and_others_are_told(tmp_path: Path) -> None:
    found = mydumper_tool(Flavour.MARIADB).tool
    assert found.name == "mydumper"
    assert "built against" in found.version_text
    newer = tmp_path / "mydumper"
    newer.write_text("#!/bin/sh\necho 'mydumper v1.0.2-1, built against MySQL 8.0.45 with SSL support'\n")
    newer.chmod(0o755)
    assert mydumper_tool(Flavour.MYSQL, paths={"mydumper": str(newer)}).tool.version == Version(1, 0, 2)
    with pytest.raises(ToolMissingError, match="does not exist"):
        mydumper_tool(Flavour.MYSQL, paths={"mydumper": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("flavour", "server", "settable"),
    [
        (Flavour.MYSQL, Version(5, 6, 24), False),
        (Flavour.PERCONA, Version(5, 7, 7), False),
        (Flavour.MYSQL, Version(5, 7, 8), True),
        (Flavour.MYSQL, Version(8, 0, 36), True),
    ],
)
def test_a_server_is_told_of_no_setting_that_it_does_not_know(
    flavour: Flavour, server: Version, settable: bool
) -> None:
    assert ("max_execution_time" in _tool(OLD, flavour, server).settings()) is settable


@pytest.mark.parametrize(
    ("flavour", "server", "refused"),
    [
        (Flavour.MYSQL, Version(5, 7, 13), True),
        (Flavour.PERCONA, Version(5, 7, 44), True),
        (Flavour.MYSQL, Version(8, 0, 36), False),
        (Flavour.MARIADB, Version(5, 5, 68), False),
    ],
)
def test_a_json_column_of_a_server_that_takes_no_binary_json_is_refused(
    flavour: Flavour, server: Version, refused: bool
) -> None:
    table = DumpTable(TableName("shop", "orders"), "InnoDB", 0)
    reason = _tool(OLD, flavour, server).refuses(table, Columns((ID, Column("doc", "json"))))
    assert ("its column doc of type json cannot be loaded" in reason) is refused
