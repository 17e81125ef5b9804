"""Looks at nodes: the window of IST by what the service saw, an alert while it is too short, metrics, and what came of
forecasts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.restores import donors
from backupd.app.views import clusters
from backupd.app.views.clusters import ClusterWatch, cluster, window
from backupd.app.views.metrics import measure
from backupd.model.errors import ServerError
from backupd.model.server_facts import NodeFacts
from backupd.recovery.ist import NodeSample, Rejoin, donor_of
from tests.support.catalog.samples import backup
from tests.support.service.desk import NOW, Desk, desk_of
from tests.support.service.house import GOLD

UUID = "5c3a1f2e-c0de-11f0-8000-0242ac110002"
MIB = 2**20


@dataclass
class Played:
    """A cluster of one node, ``db1``, on which 100 transactions and 1 MiB are written a second."""

    desk: Desk
    gcache: int = 5000 * MIB
    is_up: bool = True

    def look(self, _wiring: object, server: str, now: object) -> NodeSample | None:
        if not self.is_up:
            raise ServerError("cannot connect")
        seconds = int((self.desk.wiring.clock() - NOW).total_seconds()) + 7200
        return NodeSample(
            server=server,
            at=self.desk.wiring.clock(),
            uuid=UUID,
            name="lab",
            node="node1",
            status="Primary",
            state="Synced",
            size=1,
            last=100 * seconds,
            downto=1,
            written_bytes=MIB * seconds,
            gcache_bytes=self.gcache,
        )


@pytest.fixture
def played(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    with desk_of(short_tmp, GOLD) as desk:
        found = Played(desk)
        monkeypatch.setattr(donors, "look", found.look)
        monkeypatch.setattr(clusters, "look", found.look)
        node = NodeFacts("lab", "node1", UUID, 100 * 7200, "lock", gtid_mode=True, gtid_domain=10)
        record = backup(server="db1")
        stats = replace(record.stats, bytes_source=100 * 10**6)
        desk.catalog.backups.add(replace(record, stats=stats, node=node, started_at=NOW, finished_at=NOW))
        yield found


def at(desk: Desk, after: timedelta) -> Desk:
    desk.wiring = replace(desk.wiring, clock=lambda: NOW + after)
    return desk


def test_a_record_keeps_its_place_in_the_cluster(played: Played) -> None:
    (record,) = played.desk.catalog.backups.list("db1")
    assert record.node is not None
    assert str(record.node.position) == f"{UUID}:720000"
    assert record.as_json()["galera"]["seqno"] == 720000


def test_the_alert_comes_while_there_is_time_and_goes_with_a_larger_cache(played: Played) -> None:
    watch, desk = ClusterWatch(), played.desk
    for minutes in (0, 1):
        watch.step(at(desk, timedelta(minutes=minutes)).wiring, NOW + timedelta(minutes=minutes))
    found = window(desk.wiring, "db1", desk.wiring.clock())
    assert found is not None
    assert found.left == timedelta(seconds=5000 - 60)
    assert found.verdict.is_ist
    values = {gauge.name: values for gauge, values in measure(desk.wiring, desk.wiring.clock())}
    assert values["backupd_server_ist_window_seconds"] == {("db1",): 4940.0}
    assert [event.kind for event in desk.catalog.events.list(kind="ist-window")] == []
    late = timedelta(seconds=4990)
    for moment in (late - timedelta(minutes=1), late):
        watch.step(at(desk, moment).wiring, NOW + moment)
    (event,) = desk.catalog.events.list(kind="ist-window")
    assert "IST is possible for 10.0s more" in event.message
    assert "take increments every 1h" in event.hint
    played.gcache *= 2
    watch.step(at(desk, late + timedelta(minutes=1)).wiring, NOW + late + timedelta(minutes=1))
    assert len(desk.catalog.events.list(kind="ist-window-kept")) == 1


def test_the_cache_of_the_node_that_is_lost_is_not_counted(played: Played) -> None:
    """db1 alone keeps enough; when it is restored, that is gone."""
    desk = at(played.desk, timedelta(minutes=1))
    sample = played.look(desk.wiring, "db1", NOW)
    assert sample is not None
    other = replace(sample, server="db2", downto=sample.last)
    desk.catalog.nodes.add(sample)
    desk.catalog.nodes.add(other)
    found = window(desk.wiring, "db1", desk.wiring.clock())
    assert found is not None
    assert not found.verdict.is_ist
    assert found.left == timedelta(0)
    db1, db2 = donor_of([sample]), donor_of([other])
    assert donors.besides("db1", (db1, db2)) == (db2,)
    assert donors.besides("db1", (db1,)) == (db1,)


def test_the_cluster_is_asked_now_and_shows_what_came_of_forecasts(played: Played) -> None:
    desk = at(played.desk, timedelta(minutes=1))
    shown = cluster(desk.wiring, "db1")
    assert (shown.name, shown.uuid, shown.size) == ("lab", UUID, 1)
    (one,) = shown.backups
    assert one.words.startswith("IST from db1: 6000 transactions behind")
    began = Rejoin.of("20261128T220000Z-00000001", "lab", "db3", one.forecast, desk.wiring.clock())
    desk.catalog.rejoins.put(began)
    ended = replace(began, came="sst", ended_at=began.began_at + timedelta(seconds=90))
    desk.catalog.rejoins.put(ended)
    assert desk.catalog.rejoins.find(began.id) == ended
    assert cluster(desk.wiring, "db1").rejoins == (ended,)
    assert ended.is_as_predicted is False


def test_a_server_that_was_never_seen_to_be_a_node_is_no_trouble_of_this_watch(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    played.is_up = False
    ClusterWatch().step(played.desk.wiring, NOW)
    assert "cannot connect" not in caplog.text
    played.is_up = True
    watch = ClusterWatch()
    watch.step(played.desk.wiring, NOW)
    played.is_up = False
    watch.step(played.desk.wiring, NOW)
    assert "db1: cannot connect" in caplog.text


def test_nodes_that_do_not_answer_are_named_and_old_looks_say_nothing(played: Played) -> None:
    watch, desk = ClusterWatch(), played.desk
    watch.step(desk.wiring, NOW)
    played.is_up = False
    watch.step(at(desk, timedelta(minutes=11)).wiring, NOW + timedelta(minutes=11))
    assert window(desk.wiring, "db1", desk.wiring.clock()) is None
    assert donors.donors(desk.wiring, "db1").troubles == ("db1 does not answer: cannot connect",)
