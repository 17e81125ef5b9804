"""An attempt at the same tables that died, before another one that comes to be done in another way. Where it died
cannot be provoked without a hand-over of its own, so the questions to the server are answered here."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.sql.client import Connection
from backupd.model.errors import RefusedError
from backupd.model.table import TableName
from backupd.process.run_context import RunContext
from restore.cutover.plan import CutOverResult
from restore.cutover.staging_schema import Staging
from restore.planning.table_plan import Source, goals
from restore.tables import restore as tablerestore
from restore.tables.outcome import TablesSpec

ORDERS, OTHER = TableName("shop", "orders"), TableName("shop", "other")
LEFT = Staging("20261121t042512z-7f3a9c01", ("backupd_restore_20261121t042512z-7f3a9c01_1",), 1, 1, None, False)


def settling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, placed: TableName, *, replace: bool = True, compare: bool = False
) -> tuple[Callable[[], None], list[str], list[str]]:
    """What a new attempt does first; the warnings it gathers, and the schemas it drops."""
    spec = TablesSpec(
        restore_id="20261121T052512Z-00000001",
        server="s",
        target="latest",
        way=Source.LOGICAL,
        chain=("B1",),
        replay=None,
        statements=(),
        goals=goals([ORDERS], None),
        into="s",
        folder=tmp_path,
        replace=replace,
        compare=compare,
    )
    dropped: list[str] = []

    def drop(_into: Connection, names: Sequence[str]) -> None:
        dropped.extend(names)

    def settle(*_args: Any, **_more: Any) -> CutOverResult:
        return CutOverResult(((placed, None),))

    monkeypatch.setattr(tablerestore, "stagings", lambda _into: (LEFT,))
    monkeypatch.setattr(tablerestore, "settle", settle)
    monkeypatch.setattr(tablerestore, "drop_staging", drop)
    nothing: Any = None
    work = tablerestore._Work(spec, nothing, RunContext(), nothing)
    return lambda: work._settle_others(Connection(), {}), work._warnings, dropped


def test_tables_that_are_in_their_places_are_not_replaced_once_more_before_somebody_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settle, _warnings, dropped = settling(monkeypatch, tmp_path, ORDERS)
    with pytest.raises(RefusedError, match="nothing else was done") as refused:
        settle()
    assert refused.value.detail == "shop.orders"
    assert "repeat the command" in refused.value.hint
    assert dropped == list(LEFT.schemas)  # so that the next call finds nothing any more


@pytest.mark.parametrize(
    ("placed", "replace", "compare"), [(OTHER, True, False), (ORDERS, False, False), (ORDERS, True, True)]
)
def test_others_and_what_replaces_nothing_go_on_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, placed: TableName, replace: bool, compare: bool
) -> None:
    settle, warnings, _dropped = settling(monkeypatch, tmp_path, placed, replace=replace, compare=compare)
    settle()
    assert len(warnings) == 1
    assert "that was finished" in warnings[0]


def test_a_discarded_restore_takes_its_own_folder_alone(tmp_path: Path) -> None:
    gone, other = "20261121T042512Z-7f3a9c01", "20261121T042512Z-7f3a9c011"
    names = {f"tables-{one}{end}" for one in (gone, other) for end in ("", ".over")} | {f"{gone}", f"tables-{gone}x"}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.sql").touch()
    tablerestore.discard(tmp_path, gone)
    left = names - {f"tables-{gone}", f"tables-{gone}.over"}
    assert {folder.name for folder in tmp_path.iterdir()} == left
    held = os.open(tmp_path / f"tables-{other}", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        tablerestore.discard(tmp_path, other)  # somebody is at it
        assert {folder.name for folder in tmp_path.iterdir()} == left - {f"tables-{other}.over"}
    finally:
        os.close(held)
    tablerestore.discard(tmp_path / "nowhere", gone)
