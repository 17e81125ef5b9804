from __future__ import annotations

from pathlib import Path

import pytest

from backupd.engine.datafiles import expected_files, verify_tables
from backupd.model.errors import DamagedError

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
    assert [text.split(",")[0] for text in wrong.value.damages] == ["d/b.ibd is missing", "d/gone.frm is there"]
