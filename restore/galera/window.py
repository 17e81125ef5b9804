"""For how long a node that is being restored will still find what it lacks in the gcache of a member.

A replay of binary logs may take longer than the members keep what was committed meanwhile. So they are asked while it
runs, and what they write and how far back they reach is compared with what is left of the replay: whoever restores is
told while there is time to do something else, not when the join is refused.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

from backupd.model.errors import BackupdError
from backupd.model.job import Progress
from backupd.model.server_facts import ClusterPosition
from backupd.process.run_context import RunContext
from backupd.recovery.ist import Donor, Forecast, NodeSample, Outcome, advice, donor_of, forecast
from restore.galera.cluster import Cluster

EVERY = 10.0
"""Seconds between two looks."""
_KEPT = 60
"""Looks at a member, the newest, over which it is measured what is written."""
_SURE_SECONDS = 3.0
"""A replay that has run for less says nothing of what is left of it."""
AFTERWARDS = timedelta(seconds=15)
"""From the end of the replay until the node asks for what it lacks: its position is moved, it is put in place and
started."""

Told = Callable[[str, str], None]
"""Called with what will happen, and with what to do about it."""


class Window:
    """``position``: what the copy will be at; ``look``: asks the members. ``told`` is called once for each way in which
    IST is missed; it must not raise. Progress is given on with what was found as long as that holds."""

    def __init__(
        self,
        position: ClusterPosition,
        look: Callable[[], Cluster],
        context: RunContext,
        told: Told,
        *,
        every: float = EVERY,
    ) -> None:
        self._position, self._look, self._context, self._told, self._every = position, look, context, told, every
        self._samples: defaultdict[str, deque[NodeSample]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._begun: float | None = None
        self._last: Progress | None = None
        self._missed = ""
        self._outcomes: set[Outcome] = set()
        self._end = threading.Event()
        self.warnings: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look now, and again and again until the block ends."""
        thread = threading.Thread(target=self._run, name="ist-window", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def report(self, progress: Progress) -> None:
        """Take progress of the replay, and give it on."""
        if self._begun is None:
            self._begun = time.monotonic()
        self._last = progress
        if self._missed:
            progress = replace(progress, note="; ".join(filter(None, (self._missed, progress.note))))
        self._context.report(progress)

    def rest(self) -> timedelta | None:
        """How long it takes until the node joins, by what was replayed so far; None where that says nothing yet."""
        last, begun = self._last, self._begun
        if last is None or begun is None or not last.bytes_done or not last.bytes_total:
            return None
        took = time.monotonic() - begun
        if took < _SURE_SECONDS:
            return None
        return timedelta(seconds=took * (last.bytes_total - last.bytes_done) / last.bytes_done) + AFTERWARDS

    def step(self) -> Forecast | None:
        """One look. None where no member answers."""
        try:
            members = self._look().members
        except BackupdError:
            return None  # the join asks again, and says so
        now = self._context.clock()
        for name, state in members.items():
            self._samples[name].append(NodeSample.of(name, now, state))
        donors = [donor_of(tuple(self._samples[name])) for name in members]
        rest = self.rest()
        found = forecast(self._position, donors, now=now, predicted=rest)
        if found.outcome not in (Outcome.LATE, Outcome.SST):
            self._missed = ""
            return found
        self._missed = found.words
        if found.outcome not in self._outcomes:
            self._outcomes.add(found.outcome)
            what = "will miss IST" if found.outcome is Outcome.LATE else "has missed IST"
            text = f"the node that is being restored to seqno {self._position.seqno} {what}: {found.reason}"
            self.warnings.append(text)
            self._told(text, self._advice(donors, rest))
        return found

    def _advice(self, donors: list[Donor], rest: timedelta | None) -> str:
        hint = (
            "cancel this restore, take a backup of another node now and restore from that, or accept a full copy of a "
            "donor (--allow-sst)"
        )
        best = max(donors, key=lambda one: one.window or timedelta(0), default=None)
        if best is None or not best.seqnos:
            return hint
        behind = timedelta(seconds=max(0, best.sample.last - self._position.seqno) / best.seqnos)
        words = advice(best, (rest or timedelta(0)) + AFTERWARDS, behind)
        return hint if words is None else f"{hint}; so that the next one ends in time, {words.words}"

    def _run(self) -> None:
        while True:
            self.step()
            if self._end.wait(self._every):
                return
