"""The row of a backup that another process took in between its manifest and its row."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backupd.app.backup_records import add_row, adopt_unknown
from backupd.app.context.wiring import Wiring
from backupd.backup.commit import BackupSpec
from backupd.cli.main import main
from backupd.model.backup_record import BackupRecord
from backupd.model.errors import RefusedError
from backupd.model.manifest import encode_header
from storage import layout
from tests.support.e2e import house as houses
from tests.support.e2e.house import House
from tests.support.keys import Keys
from tests.support.logs.log_store import SERVER, wired
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.stock import Stock, backup_id


@pytest.fixture
def wiring(tmp_path: Path, keys: Keys) -> Iterator[Wiring]:
    with wired(tmp_path, keys) as found:
        yield found


def test_a_row_that_was_taken_in_gives_way_to_that_of_the_run_where_the_manifest_is_the_very_one(
    wiring: Wiring,
) -> None:
    there = wiring.destination("local")
    Stock(there, server=SERVER).add(1, {"a": b"a"})
    key = layout.manifest_key(SERVER, backup_id(1))
    with there.get(key) as stream:
        raw = stream.read()
    assert adopt_unknown(wiring, there) == [backup_id(1)]
    taken_in = wiring.catalog.backups.get(backup_id(1))
    assert (taken_in.manifest, taken_in.foreign) == ("", True)
    spec: Any = SimpleNamespace(destinations=(there,))
    mine = replace(
        taken_in, manifest=hashlib.sha256(raw).hexdigest(), found="", foreign=False, warnings=("what the run knows",)
    )
    add_row(wiring, cast("BackupSpec", spec), mine)
    assert wiring.catalog.backups.get(backup_id(1)) == mine
    wiring.catalog.backups.remove(backup_id(1))
    assert adopt_unknown(wiring, there) == [backup_id(1)]
    assert not wiring.catalog.backups.get(backup_id(1)).foreign, "it is known that it was committed here"
    there.put(key, io.BytesIO(raw + b" "))
    with pytest.raises(RefusedError, match="differs from the one just stored"):
        add_row(wiring, cast("BackupSpec", spec), mine)


@pytest.mark.parametrize(("kind", "module"), [("full", "physical"), ("logical", "logical")])
def test_a_backup_that_a_parallel_process_adopts_succeeds_with_the_row_of_its_run(
    short_tmp: Path,
    shared_server: PrivateServer,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    module: str,
) -> None:
    house = House(short_tmp, shared_server, keys)
    for name, value in house.environment().items():
        monkeypatch.setenv(name, value)
    adopted = []

    def late(wiring: Wiring, spec: BackupSpec, record: BackupRecord) -> None:
        house.run("fsck", "--repair")  # a process of its own
        adopted.append(wiring.catalog.backups.get(record.id))
        add_row(wiring, spec, record)

    monkeypatch.setattr(f"backupd.app.backups.{module}.add_row", late)
    code = main(["backup", houses.SERVER, "--kind", kind, "--json"])
    told = capsys.readouterr()
    assert code == 0, told.err
    (before,) = adopted
    assert before.manifest == "", "it was taken in by the other process, which knows less"
    (listed,) = house.backups()
    assert listed["id"] == before.id == json.loads(told.out)["id"]
    assert listed["state"] == "complete"
    assert house.fsck() == []
    assert house.run("verify", houses.SERVER).code == 0


def test_a_run_that_died_before_it_wrote_its_row_is_known_by_what_it_announced(wiring: Wiring) -> None:
    there = wiring.destination("local")
    header = Stock(there, server=SERVER).add(1, {"a": b"a"})
    wiring.catalog.backups.announce(header.backup_id, hashlib.sha256(encode_header(header)).hexdigest())
    other = Stock(there, server=SERVER).add(2, {"b": b"b"})
    wiring.catalog.backups.announce(other.backup_id, "0" * 64)  # its run died, and somebody put another manifest there
    assert adopt_unknown(wiring, there) == [header.backup_id, other.backup_id]
    assert [record.id for record in wiring.catalog.backups.list(SERVER)] == [header.backup_id]
    assert wiring.catalog.backups.get(other.backup_id).foreign
