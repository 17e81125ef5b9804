"""What a backup does to a Galera node, and to the cluster around it.

A physical backup desyncs its node for as long as it blocks commits: write sets queue up there (238 in two seconds at
150 transactions a second), and flow control does not hold the others back meanwhile. Before that the node takes part:
where the copying slows it down its queue grows, and flow control stops every writer of the cluster.

While a node is desynced nothing is gained by a pause: its provider stays paused until the tool has ended.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Self

from backupd.engine.server.wsrep import probe_wsrep
from backupd.engine.server_load import Gauge, Gauges, Reading, SessionGauge
from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import BackupdError, ServerError
from backupd.model.server_facts import NodeLoad, WsrepState

_EVERY_SECONDS = 0.2
_LEAVE_SECONDS = 5.0
_NANOSECONDS = 1e9


class NodeWatch:
    """Asks a node now and then while a backup of it runs. A context manager. Nothing here raises: of a server that is
    no node, and of one that did not answer, there is no ``load``."""

    def __init__(
        self,
        connection: Connection,
        *,
        every: float = _EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self._every, self._clock = connection, every, clock
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)
        self.first: WsrepState | None = None
        """As it was at the beginning; None of a server that is no node."""
        self._last: WsrepState | None = None
        self._desynced = 0.0
        self._queue = 0
        self._samples = 0

    def __enter__(self) -> Self:
        try:
            with self._connection.connect() as session:
                self.first = self._last = probe_wsrep(session)
        except BackupdError:
            return self
        if self.first is not None:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(_LEAVE_SECONDS)

    @property
    def load(self) -> NodeLoad | None:
        """Until now."""
        first, last = self.first, self._last
        if first is None or last is None or not self._samples:
            return None
        paused = max(0, last.flow_paused_ns - first.flow_paused_ns) / _NANOSECONDS
        sent = max(0, last.flow_sent - first.flow_sent)
        return NodeLoad(self._desynced, self._queue, paused, sent, self._samples)

    def _run(self) -> None:
        at = self._clock()
        try:
            with self._connection.connect() as session:
                while not self._end.wait(self._every):
                    state, now = probe_wsrep(session), self._clock()
                    if state is not None:
                        self._take(state, now - at)
                    at = now
        except BackupdError:
            return  # what was seen until then counts

    def _take(self, state: WsrepState, seconds: float) -> None:
        if not state.is_synced:
            self._desynced += seconds
        self._queue = max(self._queue, state.recv_queue)
        self._last = state
        self._samples += 1


class _NodeGauge(SessionGauge):
    """Of a node that takes part in its cluster."""

    def _asked(self, session: Session) -> Reading:
        state = probe_wsrep(session)
        if state is None:
            raise ServerError("the server is no node of a cluster any more")
        if not state.is_synced:
            return Reading(0.0, f"{state.words}: it leaves flow control to the others")
        return self._of(state)

    @abstractmethod
    def _of(self, state: WsrepState) -> Reading:
        """Raises BackupdError."""


class QueueGauge(_NodeGauge):
    """Write sets that wait on the node."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, "the queue of write sets of the node")

    def _of(self, state: WsrepState) -> Reading:
        return Reading(float(state.recv_queue), f"{state.recv_queue} write sets wait on {state.node}")


class FlowGauge(_NodeGauge):
    """The share of the time since the reading before in which flow control stopped the cluster."""

    def __init__(self, connection: Connection, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(connection, "flow control of the cluster")
        self._clock = clock
        self._before: tuple[float, int] | None = None

    def _of(self, state: WsrepState) -> Reading:
        now, before = self._clock(), self._before
        self._before = now, state.flow_paused_ns
        if before is None or now <= before[0]:
            return Reading(0.0, f"flow control of {state.name} was not measured yet")
        share = max(0, state.flow_paused_ns - before[1]) / _NANOSECONDS / (now - before[0])
        return Reading(min(share, 1.0), f"flow control stopped {state.name} for {share:.0%} of the time")


def node_gauges(connection: Connection, setting: str, made: Callable[[Connection], Gauge]) -> Gauges:
    """What watches the node for the ``setting`` of ``limits``. Raises ServerError when it cannot be asked at all."""
    with connection.connect() as session:
        if probe_wsrep(session) is None:
            return Gauges(
                warnings=(f"limits.{setting}: the server is no node of a Galera cluster: nothing is watched",)
            )
    return Gauges((made(connection),))
