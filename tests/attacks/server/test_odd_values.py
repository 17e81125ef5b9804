"""Clear documents of a server that nobody signs, or that is not even known here: anybody can write one, with a right
checksum, and values in it that none of ours has. On the day of the disaster a rebuild reads them all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backupd.app.restores.catalog_rebuild import rebuild
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import BackupKind
from backupd.model.errors import DamagedError
from backupd.model.job import silent
from backupd.model.manifest import KINDS, decode_header
from backupd.transfer.records.segment_documents import decode_branch, decode_segment
from storage import layout
from tests.support.hostile.forging import edited
from tests.support.keys import Keys
from tests.support.logs.log_store import SERVER, store, wired
from tests.support.logs.real_logs import real_logs
from tests.support.stores.stock import Stock, backup_id

ODD: tuple[object, ...] = (None, 2**70, "\ud800", [])
MAY_MISS = {"parent", "since", "fork", "first_at", "last_at", "config"}


def test_kinds_are_those_of_backups() -> None:
    assert {str(kind) for kind in BackupKind} == KINDS


@pytest.fixture
def documents(tmp_path: Path, keys: Keys) -> Iterator[tuple[Any, list[Path]]]:
    with wired(tmp_path, keys) as wiring:
        place = wiring.destination("local")
        Stock(place, server="ghost").add(1, {"a": b"1"})
        Stock(place, server=SERVER).add(2, {"a": b"2"})
        store(wiring, keys, real_logs()[:1], known=False)
        root = tmp_path / "local"
        yield (
            wiring,
            [
                root / layout.manifest_key("ghost", backup_id(1)),
                *root.glob("binlogs/*/*/branch.json"),
                *root.glob("binlogs/*/*/*/segment.json"),
            ],
        )


def test_what_no_document_of_ours_holds_is_damage(documents: tuple[Any, list[Path]]) -> None:
    _wiring, files = documents
    tried = 0
    for file in files:
        before = file.read_bytes()
        for way in (name for name, value in _plain(json.loads(before)) if name != "checksum"):
            for odd in ODD:
                if way in MAY_MISS and odd is None:
                    continue
                edited(file, **_with(json.loads(before), way, odd))
                tried += 1
                try:
                    found = _decoded(file)
                except DamagedError:
                    continue
                raise AssertionError(f"{file.name}: {way} = {odd!r} is believed: {found}")
            file.write_bytes(before)
    assert tried > 150


@pytest.mark.parametrize("odd", [{"kind": "odd"}, {"from_lsn": 2**70}, {"reason": "\ud800"}, {"server_uuid": []}])
def test_a_rebuild_goes_on_behind_it(documents: tuple[Any, list[Path]], tmp_path: Path, odd: dict[str, Any]) -> None:
    wiring, (manifest, *_logs) = documents
    edited(manifest, **odd)
    with open_catalog(f"sqlite:///{tmp_path}/new.db") as catalog:
        done = rebuild(replace(wiring, catalog=catalog), "local", silent)
        assert [one.id for one in catalog.backups.every()] == [backup_id(2)]
    (said,) = (problem for problem in done.problems if "manifest.json" in problem)
    assert f"its {next(iter(odd))} is" in said or "surrogates" in said
    shutil.rmtree(tmp_path / "local")


def _decoded(file: Path) -> object:
    raw, where = file.read_bytes(), str(file)
    if file.name == layout.MANIFEST:
        return decode_header(raw, where=where)
    return (decode_branch if file.name == layout.BRANCH else decode_segment)(raw, where=where)


def _plain(document: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in document.items():
        if name == "stats":
            yield from ((f"stats.{inner}", one) for inner, one in value.items())
        elif value is None or isinstance(value, (str, int)):
            yield name, value


def _with(document: dict[str, Any], way: str, value: object) -> dict[str, Any]:
    outer, _, inner = way.partition(".")
    if inner:
        return {**document, outer: {**document[outer], inner: value}}
    return {**document, outer: value}
