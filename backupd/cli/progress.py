"""Progress of long work on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TextIO, cast

from backupd.cli.output import console_for, is_live, mute, visible
from backupd.model.job import Progress, Report
from backupd.model.text import format_duration, format_size

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

PLAIN_SECONDS = 3.0
"""At most one plain line per phase in this many seconds."""
_WINDOW_SECONDS = 10.0
_SAMPLE_SECONDS = 0.25


@dataclass
class PhaseState:
    """What is known of one phase. Times are seconds of a monotonic clock."""

    started: float
    latest: Progress
    seen: float = 0.0
    shown: float = 0.0
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    over: bool = False

    def finish(self) -> None:
        """The work is done: what was moved is all that there was, whatever was expected."""
        latest = self.latest
        moved = latest.bytes_done or latest.bytes_total or 0
        self.over = True
        self.latest = replace(
            latest,
            bytes_done=moved,
            bytes_total=None if latest.bytes_total is None else moved,
            files_done=latest.files_done if latest.files_total is None else latest.files_total,
        )

    def update(self, progress: Progress, now: float) -> None:
        self.latest, self.seen = progress, now
        if not self.samples or now - self.samples[-1][0] >= _SAMPLE_SECONDS:
            self.samples.append((now, progress.bytes_done))
            while now - self.samples[0][0] > _WINDOW_SECONDS and len(self.samples) > 2:
                self.samples.popleft()

    @property
    def finished(self) -> bool:
        latest = self.latest
        return self.over or (
            (latest.bytes_total is not None or latest.files_total is not None)
            and (latest.bytes_total is None or latest.bytes_done >= latest.bytes_total)
            and (latest.files_total is None or latest.files_done >= latest.files_total)
        )

    def rate(self) -> float | None:
        """Bytes per second over the last ten seconds; the whole phase's when it is over."""
        if self.finished:
            elapsed = self.seen - self.started
            return self.latest.bytes_done / elapsed if elapsed > 0 and self.latest.bytes_done else None
        if not self.samples:
            return None
        then, bytes_then = self.samples[0]
        moved = self.latest.bytes_done - bytes_then
        return moved / (self.seen - then) if self.seen - then >= _SAMPLE_SECONDS and moved > 0 else None

    def remaining(self) -> float | None:
        """Seconds until all bytes are done at the present rate."""
        rate, total = self.rate(), self.latest.bytes_total
        return max(total - self.latest.bytes_done, 0) / rate if rate and total is not None else None

    def fraction(self) -> float | None:
        latest = self.latest
        if latest.bytes_total:
            return min(latest.bytes_done / latest.bytes_total, 1.0)
        if latest.files_total:
            return min(latest.files_done / latest.files_total, 1.0)
        return 1.0 if self.finished else None

    def amounts(self) -> list[str]:
        """Bytes, files, rate and remaining time, as far as they are known."""
        latest, words = self.latest, []
        if latest.bytes_done or latest.bytes_total:
            total = f" of {format_size(latest.bytes_total)}" if latest.bytes_total is not None else ""
            words.append(format_size(latest.bytes_done) + total)
        if latest.files_done or latest.files_total:
            total = f"/{latest.files_total}" if latest.files_total is not None else ""
            words.append(f"{latest.files_done}{total} files")
        if rate := self.rate():
            words.append(f"{format_size(rate)}/s")
        if not self.finished and (left := self.remaining()) is not None:
            words.append(f"{_rounded(left)} left")
        return words


def _rounded(seconds: float) -> str:
    whole = max(round(seconds), 1)
    return f"{whole}s" if whole < 60 else format_duration(whole)


class Phases:
    """The state of all phases, fed by reports from any thread. Also what rich draws."""

    def __init__(self) -> None:
        self.states: dict[str, PhaseState] = {}
        self.lock = threading.Lock()

    def update(self, progress: Progress, now: float) -> tuple[PhaseState, bool]:
        """Take one report; returns the phase's state and whether the phase is new. Hold the lock."""
        state = self.states.get(progress.phase)
        new = state is None
        if state is None:
            state = self.states[progress.phase] = PhaseState(started=now, latest=progress)
        state.update(progress, now)
        return state, new

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(width=16)
        grid.add_column(overflow="ellipsis", no_wrap=True)
        with self.lock:
            for name, state in self.states.items():
                fraction = state.fraction()
                bar = ProgressBar(total=1.0, completed=fraction or 0.0, width=16, pulse=fraction is None)
                words = state.amounts()
                if state.latest.note:
                    words.append(visible(state.latest.note))
                grid.add_row(Text(name), bar, Text(", ".join(words)))
        yield grid


def plain_line(name: str, state: PhaseState) -> str:
    """``copy: 52 %, 1.2 GiB of 2.3 GiB, 120 files, 250.0 MiB/s, 5s left``"""
    words = state.amounts()
    fraction = state.fraction()
    if fraction is not None and words:
        words.insert(0, f"{fraction * 100:.0f} %")
    if state.latest.note:
        words.append(visible(state.latest.note))
    return f"{name}: {', '.join(words)}" if words else name


class _Forgiving(io.TextIOBase):
    """A stream that nobody may be reading: after its first failure, writing to it does nothing.

    Progress is reported by the threads that do the work, and no backup may fail because its terminal went away.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # rich asks for it to choose its characters
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # it was closed
            return False

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def _give_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            mute(stream)


@contextmanager
def reporting(stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """A Report that shows progress on ``stream`` (stderr) until the block ends; ``clock`` gives seconds."""
    stream = cast(TextIO, _Forgiving(stream or sys.stderr))
    phases = Phases()
    if is_live(stream):
        from rich.live import Live

        def draw(progress: Progress) -> None:
            with phases.lock:
                phases.update(progress, clock())

        with Live(
            phases,
            console=console_for(stream),
            refresh_per_second=8,
            transient=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as live:
            yield draw
            live.refresh()  # how far each got, for those who look
            with phases.lock:
                for state in phases.states.values():
                    state.finish()
        return

    def write(name: str, state: PhaseState, now: float) -> None:
        state.shown = now
        stream.write(plain_line(name, state) + "\n")
        stream.flush()

    def report(progress: Progress) -> None:
        now = clock()
        with phases.lock:
            state, new = phases.update(progress, now)
            if new or now - state.shown >= PLAIN_SECONDS:
                write(progress.phase, state, now)

    try:
        yield report
    finally:
        with phases.lock:
            for name, state in phases.states.items():
                if state.seen > state.shown:
                    write(name, state, state.seen)
