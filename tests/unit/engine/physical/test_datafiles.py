from __future__ import annotations

from pathlib import Path

import pytest

from backupd.engine.physical.datafiles import (
    expected_files,
    of_others,
    put_aside,
    rejoin_renamed,
    remove_dropped_schemas,
    swapped,
    verify_fulltext,
    verify_tables,
    without_earlier_names,
)
from backupd.model.errors import DamagedError, UnrestorableError
from backupd.model.table import BaseTable, TableName

INCREMENT = [
    "ibdata1.delta", "ibdata1.meta", "ib_logfile0", "xtrabackup_info", "backup-my.cnf", "undo001.delta", "undo001.meta",
    "shop/db.opt", "shop/orders.frm", "shop/orders.ibd.delta", "shop/orders.ibd.meta", "shop/fresh.frm",
    "shop/fresh.new", "shop/late.new.delta", "shop/late.new.meta", "shop/notes.MYD", "shop/#sql-alter-1.new",
    "#innodb_redo/#ib_redo7", "#innodb_temp/temp_1.ibt",
    "mysql.ibd.delta",
]  # fmt: skip


def test_deltas_and_new_files_become_tables_and_receipts_become_nothing() -> None:
    assert expected_files(INCREMENT) == {
        "ibdata1", "mysql.ibd", "shop/db.opt", "shop/orders.frm", "shop/orders.ibd", "shop/fresh.frm", "shop/fresh.ibd",
        "shop/late.ibd", "shop/notes.MYD",
    }  # fmt: skip


def test_what_was_dropped_or_renamed_while_the_tool_ran_is_not_counted_on() -> None:
    listed = ["d/a.ibd", "d/a.del", "d/b.ibd", "d/b.ren", "d/c.ibd"]
    assert expected_files(listed) == {"d/c.ibd"}
    assert expected_files(["d/a.ibd", "d/a.MYD", "17.ren"]) == {"d/a.MYD"}


def test_missing_tables_and_dropped_ones_that_came_back_are_named(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("a.frm", "a.ibd", "gone.frm", "#sql-1.frm"):
        (tmp_path / "d" / name).touch()
    verify_tables(tmp_path, ["d/a.frm", "d/a.ibd.delta", "d/a.ibd.meta", "d/gone.frm", "d/gone.del"])
    with pytest.raises(DamagedError) as wrong:
        verify_tables(tmp_path, ["d/a.frm", "d/a.ibd.delta", "d/b.new"])
    assert [text.split(",")[0] for text in wrong.value.damages] == ["d/b.ibd is missing", "d/gone.frm exists"]


def test_a_tablespace_whose_table_is_gone_at_the_position_need_not_be_there_and_that_of_any_other_must(
    tmp_path: Path,
) -> None:
    """XtraBackup 2.4 copies it, and its prepare, following the redo log, removes or renames it."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m/left.ibd").touch()
    gone = [
        "m/dropped.ibd",
        "m/moved.ibd",
        "m/isam.ibd",
        "m/parted#P#p1.ibd",
        "m/outside.isl",
        "m/FTS_000000000000002a_CONFIG.ibd",
    ]
    tables = [
        BaseTable(TableName("n", "moved"), "InnoDB"),
        BaseTable(TableName("m", "isam"), "MyISAM"),
        BaseTable(TableName("m", "left"), "InnoDB", 7),
        BaseTable(TableName("m", "parted"), "InnoDB", 8, parts=("p0",)),
    ]
    verify_tables(tmp_path, [*gone, "m/left.ibd"], tables=tables)
    for lost, owner in (
        ("m/there.ibd", BaseTable(TableName("m", "there"), "InnoDB", 9)),
        ("m/parted#P#p0.ibd", None),
        ("n/FTS_000000000000002b_CONFIG.ibd", None),
    ):
        with pytest.raises(UnrestorableError) as wrong:
            verify_tables(tmp_path, [*gone, "m/left.ibd", lost], tables=[*tables, *([owner] if owner else [])])
        assert wrong.value.damages == (f"{lost} is missing",)


def test_folders_of_dropped_schemas_go_where_a_folder_is_a_schema_and_nowhere_else(tmp_path: Path) -> None:
    for name in ("gone", "empty", "mine", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full/left.txt").touch()
    remove_dropped_schemas(tmp_path, ["gone/a.ibd", "mine/a.ibd", "mine/b_1.sdi"])
    assert (tmp_path / "gone").is_dir(), "MySQL 8 has a dictionary"
    remove_dropped_schemas(tmp_path, ["gone/a.ibd", "mine/a.ibd", "mine/a.frm", "empty/db.opt"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "mine"]


def laid_out(base: Path, *paths: str) -> Path:
    for path in paths:
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_bytes(path.encode())
    return base


def test_a_tablespace_that_a_rename_left_in_the_old_schema_gets_its_tables_name(tmp_path: Path) -> None:
    base = laid_out(
        tmp_path,
        "a/d.isl",
        "a/d.ibd",
        "c/d.frm",
        "a/p#P#p0.isl",
        "a/p#P#p0.ibd",
        "c/p.frm",
        "c/p#P#p1.ibd",
        "a/here.isl",
        "a/here.ibd",
        "a/here.frm",
        "a/FTS_0000000000000016_CONFIG.isl",
        "a/FTS_0000000000000016_CONFIG.ibd",
        "b/d.frm",
        "b/d.MYI",
        "e/p.frm",
        "e/p#P#p0.ibd",
        "b/gone.frm",
        "a/left.isl",
        "a/left.ibd",
    )
    (base / "x").mkdir()
    (base / "x/d.frm").write_bytes(b"TYPE=VIEW\nquery=select 1")
    assert rejoin_renamed(base) == ("c/d", "c/p#P#p0")
    assert (base / "c/d.ibd").read_bytes() == b"a/d.ibd"
    assert (base / "c/p#P#p0.isl").read_bytes() == b"a/p#P#p0.isl"
    assert sorted(path.name for path in (base / "a").iterdir() if "FTS" not in path.name) == [
        "here.frm",
        "here.ibd",
        "here.isl",
        "left.ibd",
        "left.isl",
    ]
    assert rejoin_renamed(base) == ()


def test_a_tablespace_that_could_be_two_tables_is_refused_by_name_and_nothing_moves(tmp_path: Path) -> None:
    base = laid_out(tmp_path, "a/d.isl", "a/d.ibd", "b/d.frm", "c/d.frm")
    with pytest.raises(DamagedError, match="cannot be assigned") as caught:
        rejoin_renamed(base)
    assert caught.value.damages == ("a/d.ibd may belong to b/d or c/d",)
    assert (base / "a/d.ibd").exists()
    assert rejoin_renamed(laid_out(tmp_path / "other", "a/d.isl", "a/d.ibd")) == ()


def test_data_that_stayed_where_its_link_went_to_another_schema_follows_it(tmp_path: Path) -> None:
    base = laid_out(tmp_path, "c/new.frm", "a/new.ibd")
    (base / "c/new.isl").write_text("/outside/a/new.ibd")
    assert rejoin_renamed(base) == ("c/new",)
    assert (base / "c/new.ibd").read_bytes() == b"a/new.ibd"
    assert (base / "c/new.isl").read_text() == "/outside/a/new.ibd"
    assert rejoin_renamed(base) == ()


def test_of_some_tables_only_a_server_on_the_copy_tells_which_fulltext_index_must_be_there(tmp_path: Path) -> None:
    wanted, other = (f"shop/FTS_00000000000000{number}_CONFIG.ibd" for number in ("2a", "2b"))
    (tmp_path / "shop").mkdir()
    for path in ("shop/a.ibd", wanted):
        (tmp_path / path).touch()
    listed = ["shop/a.ibd", wanted, other]
    verify_tables(tmp_path, listed, partial=True)
    verify_fulltext(tmp_path, listed, {0x2A})
    with pytest.raises(DamagedError) as missing:
        verify_fulltext(tmp_path, listed, {0x2A, 0x2B})
    assert missing.value.damages == (f"{other} is missing",)
    with pytest.raises(DamagedError):
        verify_tables(tmp_path, listed)


def test_tables_that_took_each_others_names_are_seen_in_their_renames() -> None:
    assert swapped({"m/a": "m/b", "m/b": "m/a", "m/c": "m/d"}) == ("m/a", "m/b")
    assert swapped({"m/a": "m/b", "m/b": "m/c", "m/c": "m/a", "m/d": "m/a"}) == ("m/a", "m/b", "m/c")
    assert swapped({"m/a": "m/_a_old", "m/b": "m/a"}) == ()
    assert swapped({"m/a": "m/a"}) == ()


def test_a_tablespace_that_an_increment_would_remove_though_its_table_lives_on_is_put_aside(tmp_path: Path) -> None:
    base = laid_out(tmp_path / "base")
    increment = laid_out(tmp_path / "increment", "s/log.new", "s/gone.new", "s/was.del", "s/fresh.new")
    for number, stem in enumerate(("s/log", "s/gone", "s/was", "s/other"), start=7):
        laid_out(base, f"{stem}.ibd").joinpath(f"{stem}.ibd").write_bytes(bytes(34) + number.to_bytes(4) + bytes(99))
    for stem, number in (("s/log_old", 7), ("t/was", 9), ("s/other", 10)):
        laid_out(increment, f"{stem}.ibd.meta").joinpath(f"{stem}.ibd.meta").write_text(f"space_id = {number}\n")
    assert sorted(put_aside(base, increment)) == ["s/log", "s/was"]
    assert sorted(path.name for path in base.rglob("*.ibd")) == [
        "gone.ibd",
        "other.ibd",
        "xtrabackup_tmp_#7.ibd",
        "xtrabackup_tmp_#9.ibd",
    ]
    assert put_aside(base, increment) == ()


def test_a_tablespace_with_the_number_of_another_table_is_told_from_that_of_its_own(tmp_path: Path) -> None:
    tables = [
        BaseTable(TableName("s", name), engine, space, shared, parts)
        for name, engine, space, shared, parts in (
            ("own", "InnoDB", 7, False, ()),
            ("other", "InnoDB", 8, False, ()),
            ("none", "InnoDB", 9, False, ()),
            ("away", "InnoDB", 10, False, ()),
            ("common", "InnoDB", 0, True, ()),
            ("cut", "InnoDB", 11, False, ("p0",)),
            ("isam", "MyISAM", None, False, ()),
        )
    ]
    files = {"s/own.ibd": 7, "s/other.ibd": 7, "s/none.ibd": 0, "s/away.ibd": 3, "s/cut#P#p0.ibd": 3, "s/more.ibd": 3}
    laid_out(tmp_path, *files, "s/away.isl", "s/isam.MYD")
    for path, number in files.items():
        (tmp_path / path).write_bytes(bytes(34) + number.to_bytes(4) + bytes(99))
    assert of_others(tmp_path, [*files, "s/away.isl", "s/isam.MYD"], tables) == [
        TableName("s", "none"),
        TableName("s", "other"),
    ]


def test_a_prepare_of_some_tables_may_miss_others_by_the_names_that_they_had(tmp_path: Path) -> None:
    lines = [
        f"InnoDB: Tablespace {number} was not found at ./s/{table}.ibd when restoring a (partial?) backup. All"
        for number, table in ((7, "taken"), (8, "taken"), (9, "gone"), (10, "zero"))
    ]
    for table, number in (("taken", 8), ("zero", 0)):
        laid_out(tmp_path, f"s/{table}.ibd").joinpath(f"s/{table}.ibd").write_bytes(bytes(34) + number.to_bytes(4))
    assert without_earlier_names("\n".join(lines), tmp_path).splitlines() == lines[1:]
