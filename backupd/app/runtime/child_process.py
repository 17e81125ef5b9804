"""Writing into the catalog without ever waiting long for it.

A stream must not stop because the catalog does. One thread asks the catalog; who wants something from it waits a
moment, and hears after that moment, or at once while the thread still hangs, that the catalog does not answer.

Child processes of the service: each with the settings in force, and watched to its end by a thread.

They die with the service (parent-death signal), and what they start dies with them. One that ``outlives`` the service
writes what it says into its log itself, and is known to the next service by what its files say (see
``other_process``).
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from backupd.alerts.conditions import NOTHING, Condition, Key
from backupd.app.context.incidents import Incidents
from backupd.app.context.logging_setup import redacted, say
from backupd.app.context.settings import Settings
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.periodic import GuardedLoop
from backupd.catalog.database import Database
from backupd.catalog.session import Catalog, upgrade
from backupd.model.errors import CatalogError
from backupd.process.command import Child, Command, kill_family, spawn, stop
from backupd.process.output import StderrReader
from backupd.process.runtime import runtime_directory

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds that somebody waits for the catalog."""
PAUSE = 5.0
"""Seconds for which nobody asks it again after it failed."""


class CatalogWriter:
    """A context manager; the catalog is opened when it is first asked. Threads may share it."""

    def __init__(self, url: str, *, make: bool = True) -> None:
        """``make``: the file, where there is none. Raises CatalogError for an address that is none, or a folder that
        cannot be made."""
        self.catalog = Catalog(Database(url, make=make))
        self._url = url
        self._ready = False
        self._requests: queue.SimpleQueue[tuple[Callable[[Catalog], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: Future[Any] | None = None
        self._failed_at: float | None = None
        self._trouble = ""
        self._thread = threading.Thread(target=self._serve, name="scribe", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._requests.put(None)
        self._thread.join(PATIENCE)
        if not self._thread.is_alive():
            self.catalog.close()

    @property
    def trouble(self) -> str:
        """Why the catalog took nothing the last time; empty when it did."""
        return self._trouble

    def ask(self, work: Callable[[Catalog], T], *, patience: float | None = None) -> T:
        """What ``work`` gives. Raises what it raises, and CatalogError when there is no answer in time; then it may
        still be done later, so ``work`` must be such that doing it twice is right. ``patience``: seconds, of somebody
        who cannot go on without the answer."""
        seconds = PATIENCE if patience is None else patience
        with self._lock:
            if self._pending is not None and not self._pending.done():
                raise self._said(
                    CatalogError(
                        "the catalog does not answer",
                        hint="check for a long transaction on it, and that its server is up",
                    )
                )
            if patience is None and self._failed_at is not None and time.monotonic() - self._failed_at < PAUSE:
                raise CatalogError(f"the catalog failed a moment ago: {self._trouble}")
            future: Future[Any] = Future()
            self._pending = future
            self._requests.put((work, future))
        try:
            answer: T = future.result(seconds)
        except TimeoutError:
            raise self._said(CatalogError(f"the catalog has not answered within {seconds:g} s")) from None
        except CatalogError as error:
            raise self._said(error) from error
        if self._trouble:
            say("catalog-back", "the catalog answers again")
        self._failed_at, self._trouble = None, ""
        return answer

    def _said(self, error: CatalogError) -> CatalogError:
        """Log it once, until it is over."""
        self._failed_at = time.monotonic()
        if not self._trouble:
            say("catalog-trouble", str(error), level=logging.WARNING)
        self._trouble = error.message
        return error

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            work, future = request
            try:
                if not self._ready:
                    upgrade(self._url, make=False)
                    self._ready = True
                future.set_result(work(self.catalog))
            except BaseException as error:  # noqa: BLE001  not hidden: whoever waits for the answer raises it
                future.set_exception(error)
            del request, work, future


LOG_SIZE = 4 * 1024 * 1024
"""Bytes after which a new process begins a new log; one older log is kept."""
_TAIL_LINES = 30
_TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class LogEnd:
    """What a process has written into ``log`` itself, from ``start`` on."""

    log: Path
    start: int

    def finish(self) -> None:
        """There is nothing to wait for."""

    def tail(self, _index: int, lines: int) -> str:
        """The last ``lines`` lines, redacted."""
        try:
            with self.log.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = self.start if self.start <= size else 0  # another log has begun since
                file.seek(max(begin, size - _TAIL_BYTES))
                said = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return redacted("\n".join(said.splitlines()[-lines:]))


@dataclass(slots=True)
class ChildProcess:
    """One process. ``settings``: the file it goes by; None for one that needs no settings."""

    child: Child
    settings: Path | None
    _stderr: StderrReader | LogEnd
    asked: float | None = None
    """When it was asked to end; monotonic."""

    def ended(self) -> int | None:
        """Its exit code, once it has ended and all that it said was read."""
        code = self.child.poll()
        if code is not None:
            self._stderr.finish()
        return code

    def end(self, now: float, grace: float) -> None:
        """Ask it to end; one that was asked ``grace`` seconds ago is killed with all that it has started."""
        if self.asked is None:
            self.asked = now
            self.child.send(signal.SIGTERM)
        elif now - self.asked > grace:
            kill_family(self.child.pid)

    def last_words(self) -> str:
        """The end of what it said on stderr, redacted."""
        return self._stderr.tail(0, _TAIL_LINES)


def python(module: str, *arguments: str) -> Command:
    """``python -m MODULE ARGUMENTS`` with our modules and our environment."""
    here = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    return Command((sys.executable, "-P", "-m", module, *arguments), env=here)


def command_of(settings: Settings, held: Path, *arguments: str) -> Command:
    """`backupd ARGUMENTS` with the settings in the file ``held``."""
    return python("backupd", *arguments, "--config", str(settings.file), "--settings", str(held))


def start(
    settings: Settings,
    held: Path,
    *arguments: str,
    log: Path | None = None,
    pass_fds: Sequence[int] = (),
    outlives: bool = False,
) -> ChildProcess:
    """`backupd ARGUMENTS` with the settings in the file ``held``. ``log``: a file that gets its stderr, too;
    ``pass_fds``: descriptors that it has under the same numbers; ``outlives``: it goes on when this process ends.
    Raises ToolError, OSError."""
    command = command_of(settings, held, *arguments)
    return begin(
        lambda stderr: run(command, stderr, pass_fds=pass_fds, outlives=outlives), held, log, outlives=outlives
    )


def begin(make: Callable[[int], Child], held: Path, log: Path | None, *, outlives: bool) -> ChildProcess:
    """The process that ``make`` starts with the stderr that it is given; the rest as of ``start``."""
    if not outlives:
        return watched(make, held, log)
    path = log or Path(os.devnull)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        end = LogEnd(path, os.fstat(descriptor).st_size)
        return ChildProcess(make(descriptor), held, end)
    finally:
        os.close(descriptor)


def run(command: Command, stderr: int, *, pass_fds: Sequence[int] = (), outlives: bool = False) -> Child:
    """Start it with nothing to read, and nobody who reads what it prints but ``stderr``. Raises ToolError, OSError."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        return spawn(command, stdin=nothing, stdout=nothing, stderr=stderr, pass_fds=pass_fds, outlives=outlives)
    finally:
        os.close(nothing)


def watched(make: Callable[[int], Child], held: Path | None, log: Path | None) -> ChildProcess:
    """The process that ``make`` starts with the stderr that it is given; the rest as of ``start``."""
    with ExitStack() as both, ExitStack() as ours:
        ear, mouth = os.pipe2(os.O_CLOEXEC)
        both.callback(os.close, mouth)
        ours.callback(os.close, ear)
        child = make(mouth)
        ours.callback(stop, [child], polite_seconds=0.0)
        stderr = StderrReader(["backupd"], [ear], log=log)
        stderr.start()
        ours.pop_all()  # the reader closes the ear
        return ChildProcess(child, held, stderr)


def open_log(path: Path) -> Path | None:
    """Make a log that a process may complain into before it has its own, once a long one was put aside; None
    where that cannot be."""
    with suppress(OSError):  # there is none yet, or it grows on
        if path.stat().st_size > LOG_SIZE:
            path.replace(path.with_suffix(".log.1"))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError:
        return None  # its process finds the same, and says so
    return path


def renew_log(path: Path, descriptor: int = 2) -> None:
    """Of a process that writes into ``path`` itself, as ``descriptor``, and may do so for months: begin a new one where
    it has become long, and go on with the new one where somebody else has begun it. Where that cannot be, it grows
    on."""
    with suppress(OSError):
        written = os.fstat(descriptor)
        if not stat.S_ISREG(written.st_mode):
            return
        aside = path.with_suffix(".log.1")
        is_there, is_aside = (one.exists() and os.path.samestat(written, one.lstat()) for one in (path, aside))
        if not (is_there or is_aside) or (is_there and written.st_size <= LOG_SIZE) or open_log(path) is None:
            return
        fresh = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        os.dup2(fresh, descriptor)
        os.close(fresh)


class Starter(Protocol):
    """What starts processes as ``start`` does."""

    def __call__(
        self, settings: Settings, held: Path, *arguments: str, log: Path | None = None, outlives: bool = False
    ) -> ChildProcess: ...


class HeldSettings:
    """Files with the settings in force: a process goes by what was valid, not by what its files say by now."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._files: set[Path] = set()

    def file(self, settings: Settings) -> Path:
        """That of ``settings``, which are in force until ``changed``. Raises OSError, RefusedError."""
        if self._file is None or not self._file.exists():
            self._file = settings.hold(runtime_directory())
            self._files.add(self._file)
        return self._file

    def changed(self) -> None:
        """Others are in force from now on."""
        self._file = None

    def let_go(self, used: Iterable[Path | None]) -> None:
        """Remove those that are not in force any more and that nobody uses."""
        needed = {self._file, *used}
        for file in [file for file in self._files if file not in needed]:
            file.unlink(missing_ok=True)
            self._files.remove(file)


class ProcessWatch(ABC):
    """At work from entering the block until leaving it, or ``stop``. ``name``: the thread's; trouble in looking is
    logged as ``NAME-trouble``. ``grace``: seconds that a process has to end before it is killed."""

    def __init__(self, name: str, wiring: Wiring, *, grace: float) -> None:
        self._wiring, self._grace = wiring, grace
        self._held = HeldSettings()
        self._scribe = CatalogWriter(wiring.settings.catalog)
        self._incidents = Incidents(self._scribe.catalog)
        self._awake, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._guarded = GuardedLoop(f"{name}-trouble")

    def settle(self, *holds: Condition, looked: Mapping[Key, str] = NOTHING) -> None:
        """Record what a look found (see ``alerts.conditions``)."""
        at = self._wiring.clock()
        self._scribe.ask(lambda _catalog: self._incidents.settle(at, *holds, looked=looked))

    def __enter__(self) -> Self:
        self._scribe.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def reload(self, wiring: Wiring) -> None:
        """Go by these settings; processes for which nothing has changed go on undisturbed."""
        self._wiring = wiring
        self._held.changed()
        self._awake.set()

    def stop(self) -> None:
        """End all processes; returns when none is left."""
        self._ending.set()
        self._awake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
            self._scribe.__exit__(None, None, None)

    @abstractmethod
    def step(self) -> None:
        """One look. Raises CatalogError where the catalog could not be read or written."""

    @abstractmethod
    def _pause(self) -> float:
        """Seconds until the next look."""

    @abstractmethod
    def _wind_down(self) -> bool:
        """A look while the service ends, which guards itself: ends processes, and says whether some are left."""

    def _loop(self) -> None:
        while not self._ending.is_set():
            self._guarded(self.step)
            self._awake.wait(self._pause())
            self._awake.clear()
        while self._wind_down():
            time.sleep(0.05)
        self._held.changed()
        self._held.let_go(())
