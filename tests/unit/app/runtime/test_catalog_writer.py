"""Asking a catalog that does not answer costs a moment, never more."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from backupd.app.runtime import child_process as module
from backupd.app.runtime.child_process import CatalogWriter
from backupd.catalog import database
from backupd.catalog.session import Catalog
from backupd.model.backup_record import HoldKind
from backupd.model.errors import CatalogError, NotFoundError
from tests.support.catalog import samples
from tests.support.stores.gate import until


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is no catalog that does not answer: those are waited for where a test says how long."""
    monkeypatch.setattr(module, "PATIENCE", 240)
    monkeypatch.setattr(module, "PAUSE", 0.2)
    monkeypatch.setattr(database, "BUSY_SECONDS", 600)


def hold(catalog: Catalog) -> None:
    catalog.holds.set("db1", HoldKind.PAUSE, "moving", "anna", samples.NOON)


def test_answers_and_errors_come_from_the_catalog(tmp_path: Path) -> None:
    with CatalogWriter(f"sqlite:///{tmp_path}/catalog.db") as scribe:
        scribe.ask(hold)  # makes the catalog first
        assert [one.server for one in scribe.ask(lambda catalog: catalog.holds.all())] == ["db1"]
        with pytest.raises(NotFoundError):
            scribe.ask(lambda catalog: catalog.jobs.get("nix"))
        assert scribe.trouble == ""


def test_a_locked_catalog_holds_nobody_up_and_takes_what_comes_when_it_is_free_again(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    with CatalogWriter(f"sqlite:///{path}") as scribe:
        scribe.ask(lambda catalog: catalog.holds.all())
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            begun = time.monotonic()
            with pytest.raises(CatalogError, match=r"has not answered within"):
                scribe.ask(hold, patience=0.3)
            with pytest.raises(CatalogError, match=r"does not answer"):  # it still hangs
                scribe.ask(hold, patience=0.3)
            assert time.monotonic() - begun < 200, "its lock would be waited for much longer"
            assert scribe.trouble
            other.execute("ROLLBACK")
        until(lambda: works(scribe))
        assert scribe.ask(lambda catalog: catalog.holds.all())


def works(scribe: CatalogWriter) -> bool:
    try:
        scribe.ask(hold)
    except CatalogError:
        return False
    return scribe.trouble == ""


def test_a_catalog_that_cannot_be_opened_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 600)
    path = tmp_path / "catalog.db"
    path.write_bytes(b"not a database, whatever its name says" * 100)
    with CatalogWriter(f"sqlite:///{path}") as scribe:
        with pytest.raises(CatalogError, match="not a SQLite file"):
            scribe.ask(hold)
        with pytest.raises(CatalogError, match="failed a moment ago"):
            scribe.ask(hold)
        path.unlink()
        path.touch()
        monkeypatch.setattr(module, "PAUSE", 0.2)
        until(lambda: works(scribe))


def test_it_ends_though_the_catalog_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.3)
    begun, hanging = threading.Event(), threading.Event()

    def hang(_catalog: Catalog) -> None:
        begun.set()
        hanging.wait(600)

    with CatalogWriter(f"sqlite:///{tmp_path}/catalog.db") as scribe:
        with pytest.raises(CatalogError):
            scribe.ask(hang, patience=0.3)
        assert begun.wait(240)
    assert scribe._thread.is_alive(), "nobody waited for it"
    hanging.set()
    scribe._thread.join()
