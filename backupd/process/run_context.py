"""What every step of one run is given: clock, progress, cancelling, timed phases, and the means of this host.

Whoever begins a piece of work builds it once (for a job ``JobRun.context`` does), and every function passes it on
unchanged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TypeVar

from backupd.model.job import Report, silent
from backupd.model.proof import Phase
from backupd.model.text import Clock

DEFAULT_MEMORY = 8 * 1024**3
"""Bytes."""
T = TypeVar("T")


def utc_now() -> datetime:
    """The clock outside of tests."""
    return datetime.now(UTC)


class Stopwatch:
    """Times phases. ``phases``: those that ended well; each is reported to ``on_phase`` when it ends. ``waited``:
    seconds that belong to none."""

    def __init__(self, on_phase: Callable[[Phase], None] = lambda _phase: None) -> None:
        self._on_phase = on_phase
        self.phases: list[Phase] = []
        self.waited = 0.0

    def add(self, phase: Phase) -> None:
        """Note a phase that was timed elsewhere."""
        self.phases.append(phase)
        self._on_phase(phase)

    @contextlib.contextmanager
    def phase(self, name: str, size: int = 0) -> Iterator[None]:
        """Times the block as phase ``name`` that worked on ``size`` bytes; nothing is noted where it raises."""
        begun, waited = time.monotonic(), self.waited
        yield
        self.add(Phase(name, time.monotonic() - begun - (self.waited - waited), size))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time that belongs to no phase: it says nothing about how fast this machine is."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.waited += time.monotonic() - begun

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The same items. Waiting for each is ``waiting``, what is done with it is not."""
        iterator = iter(items)
        while True:
            with self.waiting():
                found = list(islice(iterator, 1))
            if not found:
                return
            yield found[0]


@dataclass(frozen=True, slots=True)
class RunContext:
    """``report`` takes progress. ``cancel`` is set when the work should stop. ``fence`` raises RefusedError when
    another process has taken over the job: it is called right before anything is committed. ``watch`` times the phases.

    ``log``: the file where tools may write what they print, redacted; None without one. ``programs``: paths of programs
    that are not searched for. ``workers``: 0 for as many as this machine can use. ``memory``: most bytes for tools and
    private servers. ``key_files``: those that the configuration allows a private server. ``templates``: the folder
    where empty systems are kept for the next replay, None to make a new one each time.
    """

    clock: Clock = utc_now
    report: Report = silent
    cancel: Event = field(default_factory=Event)
    fence: Callable[[], None] = lambda: None
    watch: Stopwatch = field(default_factory=Stopwatch)
    log: Path | None = None
    programs: Mapping[str, str] = field(default_factory=dict)
    workers: int = 0
    memory: int = DEFAULT_MEMORY
    key_files: Sequence[Path] = ()
    templates: Path | None = None

    def is_cancelled(self) -> bool:
        """Should the work stop?"""
        return self.cancel.is_set()

    def with_own_phases(self) -> RunContext:
        """The same run with a separate list of phases; each is added to those of this one, too."""
        return replace(self, watch=Stopwatch(self.watch.add))
