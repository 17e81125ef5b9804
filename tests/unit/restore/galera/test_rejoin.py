"""What a node's restore does with what it finds on the disk: an old data directory whose server lives again, what an
earlier attempt knew of a copy that was rebuilt, and files that were moved away after they were in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from backupd.engine.server.launch import ServerConfig
from backupd.engine.sql.client import Connection
from backupd.model.errors import RefusedError
from backupd.model.server_facts import ClusterPosition
from backupd.process.run_context import RunContext
from restore.datadir import occupancy
from restore.datadir.staging import State, write_marker, write_state
from restore.fetch.sources import Loaded, Programs, Sources
from restore.galera import grastate, rejoin
from restore.galera.cluster import Cluster
from restore.galera.node import Node
from restore.galera.position import Recovered
from restore.galera.rejoin import GaleraSpec
from restore.whole_server import RestoreSpec
from tests.unit.restore.galera.test_cluster import STATE, UUID

LOADED = cast("tuple[Loaded, ...]", (SimpleNamespace(body=SimpleNamespace(facts=SimpleNamespace(node=None))),))
CHAIN = ("20261128T020000Z-7f3a9c01",)
PROGRAMS = cast("Programs", SimpleNamespace(needed_server=SimpleNamespace(path="mariadbd")))
BASE = ClusterPosition(UUID, 60750)


@dataclass
class Bench:
    """``innodb``: what a server finds in any data directory; ``members``: the cluster as it is now."""

    folder: Path
    innodb: Recovered | None = field(default_factory=lambda: Recovered(BASE))
    members: int = 60800

    @property
    def datadir(self) -> Path:
        return self.folder / "mysql"

    @property
    def staging(self) -> Path:
        return self.folder / "mysql.restoring"

    def work(self, stage: str = "fetching", **node: object) -> rejoin._Rejoin:
        spec = RestoreSpec("r", "shop", "latest", CHAIN, datetime.now(UTC), self.datadir, "root")
        galera = GaleraSpec("lab", {}, Connection(socket="/nowhere/s.sock", user="x"))
        found = rejoin._Rejoin(spec, galera, cast("Sources", None), RunContext())
        found._state = replace(found._state, stage=stage, node=node)
        return found

    def staged(self) -> None:
        """A copy whose prepare found BASE."""
        (self.staging / "data").mkdir(parents=True)
        (self.staging / "logs").mkdir()
        (self.staging / "logs/prepare-0.log").write_text(f"mariabackup: Recovered WSREP position: {BASE} domain_id: 0")
        write_state(rejoin._Rejoin(*self._arguments())._site, State("r", "shop", "latest", CHAIN))

    def _arguments(self) -> tuple[RestoreSpec, GaleraSpec, Sources, RunContext]:
        work = self.work()
        return work._spec, work._galera, cast("Sources", None), RunContext()

    def old(self, seqno: int) -> None:
        self.datadir.mkdir(exist_ok=True)
        (self.datadir / "ibdata1").write_bytes(b"old")
        grastate.write(self.datadir, ClusterPosition(UUID, seqno))


@pytest.fixture
def bench(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(short_tmp)

    @contextlib.contextmanager
    def private(_self: object, _program: str) -> Iterator[ServerConfig]:
        yield cast("ServerConfig", None)

    def look(name: str, _members: object) -> Cluster:
        return Cluster(name, {"node2": replace(STATE, position=ClusterPosition(UUID, made.members))}, {})

    monkeypatch.setattr(rejoin._Rejoin, "_private", private)
    monkeypatch.setattr(rejoin._Rejoin, "_config", lambda *_any: None)
    monkeypatch.setattr(rejoin, "recover", lambda *_any: made.innodb)
    monkeypatch.setattr(rejoin, "look", look)
    return made


def test_an_old_data_directory_is_not_moved_from_under_a_server_that_lives_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.old(60700)
    bench.staged()
    work = bench.work()
    monkeypatch.setattr(occupancy, "find_occupants", lambda _datadir: iter(["process 7 (mariadbd)"]))
    with pytest.raises(RefusedError, match="is in use"):
        work.before_place(LOADED, PROGRAMS)
    assert (bench.datadir / "ibdata1").exists()


def test_an_old_data_directory_that_went_on_meanwhile_is_compared_again(bench: Bench) -> None:
    bench.old(60700)
    bench.staged()
    work = bench.work()
    work.refuse_filled(())
    bench.old(60900)
    with pytest.raises(RefusedError, match="100 transactions that the cluster lacks"):
        work.before_place(LOADED, PROGRAMS)
    assert (bench.datadir / "ibdata1").exists()
    bench.members = 61000  # the cluster has them by now
    work.before_place(LOADED, PROGRAMS)
    assert not bench.datadir.exists()


def test_something_else_that_got_into_the_data_directory_is_not_moved(bench: Bench) -> None:
    bench.staged()
    work = bench.work()
    bench.datadir.mkdir()
    (bench.datadir / "letter.txt").touch()
    with pytest.raises(RefusedError, match="no data directory of a node"):
        work.before_place(LOADED, PROGRAMS)
    assert (bench.datadir / "letter.txt").exists()


def test_an_old_node_is_refused_at_once_where_the_copy_is_built_inside_its_folder(bench: Bench) -> None:
    bench.old(60700)
    (bench.datadir / "lost+found").mkdir()
    with pytest.raises(RefusedError, match="built inside it"):
        bench.work().refuse_filled(())


def test_what_was_known_of_an_earlier_copy_is_not_said_of_a_rebuilt_one(bench: Bench) -> None:
    bench.staged()
    work = bench.work("prepared", position=f"{UUID}:60790", gtid="10-100-5")
    work.before_place(LOADED, PROGRAMS)
    found = grastate.read(bench.staging / "data")
    assert found is not None
    assert found.position == BASE


@pytest.mark.parametrize("moved", [True, False])
def test_a_placed_copy_that_was_moved_away_is_restored_anew(bench: Bench, *, moved: bool) -> None:
    """An SST removes the marker; then the staging folder alone knows of the restore."""
    bench.staged()
    work = bench.work()
    write_state(work._site, replace(work._state, restore_id="earlier", stage="placed"))
    if not moved:
        bench.old(60750)
    assert work.resume() is not moved
    assert (work._state.stage, work._state.restore_id) == (("fetching", "r") if moved else ("placed", "earlier"))
    assert bench.staging.exists() is not moved


def test_a_node_that_contradicted_its_cluster_is_not_started_again(bench: Bench) -> None:
    bench.old(60750)
    work = bench.work("placed", position=str(BASE))
    write_marker(bench.datadir, work._state)
    said = work._settled(PROGRAMS, "[ERROR] WSREP: Inconsistency detected: Failed on preordered")
    assert "contradict" in said
    assert not (bench.datadir / grastate.GRASTATE).exists()
    again = bench.work()
    assert again.resume()
    with pytest.raises(RefusedError, match="must not join again"):
        again._begin(cast("Node", None), PROGRAMS)


def test_advice_to_start_is_of_now(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    work = bench.work()
    assert "start the node's service" in work._advice(BASE)[0]
    monkeypatch.setattr(
        rejoin, "look", lambda *_any: Cluster("lab", {"node2": replace(STATE, cached_downto=60790)}, {})
    )
    assert "do not start" in work._advice(BASE)[0]
