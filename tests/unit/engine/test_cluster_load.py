"""What a backup does to a node, by a played one: its queue, its desync, flow control; and when a backup pauses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backupd.engine import cluster_load
from backupd.engine.cluster_load import FlowGauge, NodeWatch, QueueGauge, node_gauges
from backupd.engine.server.wsrep import wsrep_state
from backupd.engine.server_load import Judge
from backupd.engine.sql.client import Connection
from backupd.model.errors import ServerError
from backupd.model.server_facts import WsrepState
from tests.unit.engine.test_wsrep import STATUS, VARIABLES

SYNCED = replace(wsrep_state(VARIABLES, STATUS), state="Synced", recv_queue=0, flow_paused_ns=0, flow_sent=0)


class Played:
    """A connection whose node is as the next of ``states`` says; the last one stays. None: it does not answer."""

    def __init__(self, states: Iterator[WsrepState | None]) -> None:
        self._states = states
        self._now: WsrepState | None = SYNCED

    def connect(self) -> Played:
        return self

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_error: object) -> None:
        """Nothing is held."""

    close = __exit__

    def probe(self, _session: object) -> WsrepState | None:
        self._now = next(self._states, self._now)
        return self._now


def played(monkeypatch: pytest.MonkeyPatch, *states: WsrepState | None) -> Connection:
    one = Played(iter(states))
    monkeypatch.setattr(cluster_load, "probe_wsrep", one.probe)
    return cast("Connection", one)


def test_the_load_of_a_backup_is_the_worst_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    away = replace(SYNCED, state="Donor/Desynced", recv_queue=238, flow_paused_ns=500_000_000, flow_sent=2)
    connection = played(monkeypatch, SYNCED, SYNCED, away, away, replace(away, state="Synced", recv_queue=3))
    begun = time.monotonic()
    with NodeWatch(connection, every=0.01) as watch:
        deadline = begun + 300
        while (watch.load is None or watch.load.samples < 5) and time.monotonic() < deadline:
            time.sleep(0.01)
    load = watch.load
    assert watch.first == SYNCED
    assert load is not None
    assert (load.recv_queue, load.flow_control_seconds, load.flow_control_sent) == (238, 0.5, 2)
    assert 0 < load.desynced_seconds < time.monotonic() - begun


def test_a_server_that_is_no_node_has_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with NodeWatch(played(monkeypatch, None), every=0.01) as watch:
        pass
    assert (watch.first, watch.load) == (None, None)

    def gone() -> Any:
        raise ServerError("it is down")

    with NodeWatch(cast("Connection", SimpleNamespace(connect=gone))) as watch:
        pass
    assert watch.load is None


def test_a_backup_pauses_for_a_queue_only_while_its_node_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = replace(SYNCED, recv_queue=600)
    gauge = QueueGauge(played(monkeypatch, busy, replace(busy, state="Donor/Desynced"), replace(busy, recv_queue=300)))
    judge = Judge(500, show="{:.0f}".format)
    assert judge.judge(gauge.read()) == "600 write sets wait on node2 > 500"
    assert judge.judge(gauge.read()) == ""  # its own lock: a pause would only make that longer
    assert judge.judge(gauge.read()) == ""


def test_flow_control_counts_as_a_share_of_the_time_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 2.0, 4.0))
    gauge = FlowGauge(
        played(
            monkeypatch,
            SYNCED,
            replace(SYNCED, flow_paused_ns=500_000_000),
            replace(SYNCED, flow_paused_ns=500_000_000),
        ),
        clock=lambda: next(clock),
    )
    judge = Judge(0.1, show="{:.0%}".format)
    assert judge.judge(gauge.read()) == ""  # since its start nobody knows when
    assert judge.judge(gauge.read()) == "flow control stopped lab for 25% of the time > 10%"
    assert judge.judge(gauge.read()) == ""


def test_limits_of_a_server_that_is_no_node_are_said_to_watch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = node_gauges(played(monkeypatch, None), "recv_queue", QueueGauge)
    assert found.found == ()
    assert found.warnings == ("limits.recv_queue: the server is no node of a Galera cluster: nothing is watched",)
