"""What the service and its manager (systemd) say to each other: SIGTERM, SIGINT and SIGHUP wake a thread that waits,
and sd_notify(3) reports how the service does, over the socket that $NOTIFY_SOCKET names.

Being the one service of a spool and of a catalog, by a lock on each.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Self

from backupd.app.context.settings import spool_unusable
from backupd.app.context.wiring import Wiring, owner, owner_is_alive, owner_state
from backupd.model.errors import RefusedError
from backupd.model.text import format_time


class Waker:
    """A wait that ``wake`` ends at once. Unlike threading.Event it may be called by a signal handler that interrupts
    the very wait."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._read)
        os.close(self._write)

    def wake(self) -> None:
        """End the wait of whoever waits, or the next one."""
        try:
            os.write(self._write, b"!")
        except BlockingIOError:
            return  # it is full of calls already

    def wait(self, seconds: float) -> None:
        """Until somebody woke us, now or since the last wait, or ``seconds`` are over."""
        if select.select([self._read], [], [], max(0.0, seconds))[0]:
            os.read(self._read, 65536)


class SignalRequests:
    """What signals have asked of the service, for it to look at when it has time."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self.stops = 0
        self.ends_streams = False
        """SIGINT was among what asked to stop: nothing is to go on."""
        self._reload = False

    def handlers(self) -> Mapping[signal.Signals, Callable[[], None]]:
        """For ``Signals``: SIGTERM and SIGINT ask to stop, SIGINT the streams as well, SIGHUP to reload."""
        return {signal.SIGTERM: self._stop, signal.SIGINT: self._stop_all, signal.SIGHUP: self._ask_to_reload}

    def take_reload(self) -> bool:
        """Was a reload asked for since the last look?"""
        wanted, self._reload = self._reload, False
        return wanted

    def _stop(self) -> None:
        self.stops += 1
        self._waker.wake()

    def _stop_all(self) -> None:
        self.ends_streams = True
        self._stop()

    def _ask_to_reload(self) -> None:
        self._reload = True
        self._waker.wake()


_Before = signal.Handlers | Callable[[int, FrameType | None], object] | int | None


class Signals:
    """Within the block these signals call their handlers; afterwards what they called before. Main thread only."""

    def __init__(self, handlers: Mapping[signal.Signals, Callable[[], None]]) -> None:
        self._handlers = handlers
        self._before: dict[signal.Signals, _Before] = {}

    def __enter__(self) -> Self:
        for number in self._handlers:
            self._before[number] = signal.signal(number, self._call)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _call(self, number: int, _frame: FrameType | None) -> None:
        self._handlers[signal.Signals(number)]()


class SystemdNotifier:
    """Messages to whoever started the service. Says nothing where nobody listens."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # "@" means the NUL byte of an abstract socket; anything else but a path is of no kind that we speak.
        self._address = "\0" + address[1:] if address.startswith("@") else address if address.startswith("/") else ""
        self._watchdog = _watchdog_seconds(environ)

    @property
    def watchdog_seconds(self) -> float | None:
        """How often ``alive`` is expected; None when nobody watches."""
        return self._watchdog

    def ready(self, status: str) -> None:
        """The service has started, or a reload is over."""
        self._send("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={status}")

    def reloading(self) -> None:
        """A reload begins; ``ready`` ends it, whether or not it came to something."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        """The service is about to end."""
        self._send("STOPPING=1", f"STATUS={status}")

    def alive(self) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(1.0)
                sender.sendto(message.encode(), self._address)
        except OSError:
            # Nobody listens: systemd's own time limits are what notices. The work does not depend on it.
            return


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    try:
        microseconds = int(environ.get("WATCHDOG_USEC", ""))
        process = int(environ.get("WATCHDOG_PID", "") or os.getpid())
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 and process == os.getpid() else None


_LOCK = "locks/service"


class LeadershipLostError(Exception):
    """Another service has taken over."""


class Leader:
    """Holds the locks of the spool and of the catalog; leaving the block lets them go."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._name = f"process {os.getpid()} on {socket.gethostname()}, since {format_time(wiring.clock())}"
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._wiring.catalog.watch.leave()
        self._held.close()

    def begin(self) -> None:
        """Raises RefusedError naming the service that is at work already."""
        with ExitStack() as attempt:
            _lock_spool(self._wiring.settings.spool, self._name, attempt)
            self._take_catalog()
            self._held = attempt.pop_all()

    def stay(self) -> None:
        """Still the one service? After the connection to the catalog was cut its lock is taken again. Raises
        LeadershipLostError when another service holds it now, CatalogError when the catalog cannot be reached."""
        if self._wiring.catalog.watch.held():
            return
        try:
            self._take_catalog()
        except RefusedError as error:
            raise LeadershipLostError(
                f"the connection to the catalog was cut, and {error.message} ({error.detail})"
            ) from error

    def _take_catalog(self) -> None:
        watch = self._wiring.catalog.watch
        if not watch.take(self._name):
            raise _taken(f"the catalog {self._wiring.catalog.name}", watch.holder())


def _lock_spool(spool: Path, name: str, held: ExitStack) -> None:
    path = spool / _LOCK
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = held.enter_context(path.open("a+"))
    except OSError as error:
        raise spool_unusable(spool, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise _taken(f"the spool {spool}", file.readline().strip()) from None
    file.truncate(0)
    file.write(f"{name}\n{owner()}\n")
    file.flush()


def is_served(spool: Path) -> bool:
    """Is the service of this spool at work? Asks without getting in the way of one that begins."""
    return owner_is_alive(_holder(spool))


def service_process(spool: Path) -> int | None:
    """The process of the service of this spool; None where there is none. Raises RefusedError for one that cannot be
    reached from here."""
    holder = _holder(spool)
    state = owner_state(holder)
    if state is None:
        raise RefusedError(
            "the service runs in another container, or on another host", detail=holder, hint="call backupd there"
        )
    return int(holder.split()[-2]) if state else None


def _holder(spool: Path) -> str:
    try:
        lines = (spool / _LOCK).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return lines[1] if len(lines) > 1 else ""


def _taken(what: str, holder: str) -> RefusedError:
    return RefusedError(
        f"another backupd service is running on {what}",
        detail=holder,
        hint="only one service can use a catalog; with --standby, backupd waits and takes over when the other one "
        "exits",
    )
