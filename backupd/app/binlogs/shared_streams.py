"""A process with the streams of several servers on which hardly anything happens, each in threads of its own.

What makes a stream wait (a server or a destination that hangs) makes its threads wait alone. One on which much comes
gets a process of its own by the service, and so does one that fails: it ends here, and the others go on. Each has its
lock, its connections and its log as if it were alone.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from backupd.app.binlogs.stream_holder import log_of, log_of_shared
from backupd.app.binlogs.stream_process import DEADLINE, StreamRun, give_up
from backupd.app.context.logging_setup import LOGGER, JsonFormatter, say
from backupd.app.context.settings import Settings, held_settings, spool_folder
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.child_process import LOG_SIZE, CatalogWriter, renew_log
from backupd.app.runtime.service_manager import Signals, Waker
from backupd.binlog.spool_files import Spool
from backupd.model.errors import BackupdError

LOOKS = 10.0
"""Seconds between two looks whether any stream is left, but for those that say so."""


def run_streams(held: Path, servers: Sequence[str]) -> None:
    """Stream until a signal ends it, or until no stream is left. ``held``: the settings of the service that has started
    it. Main thread. Raises ConfigurationError."""
    settings = held_settings(held)
    with ExitStack() as stack:
        waker = stack.enter_context(Waker())
        streams = [SharedStream(settings, name, waker) for name in servers]

        def end() -> None:
            for stream in streams:
                stream.stop()
            waker.wake()
            signal.setitimer(signal.ITIMER_REAL, DEADLINE)

        stack.enter_context(
            Signals({**dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), end), signal.SIGALRM: give_up})
        )
        stack.callback(signal.setitimer, signal.ITIMER_REAL, 0.0)
        for stream in streams:
            stream.start()
        while any(stream.is_alive() for stream in streams):
            waker.wait(LOOKS)
            renew_log(log_of_shared(settings))


class SharedStream(threading.Thread):
    """The stream of one ``server``. ``over`` is woken when it has ended."""

    def __init__(self, settings: Settings, server: str, over: Waker) -> None:
        super().__init__(name=f"stream {server}", daemon=True)
        self._settings, self._server, self._over = settings, server, over
        self._waker, self._stopped = Waker(), threading.Event()

    def stop(self) -> None:
        """It ends soon."""
        self._stopped.set()
        self._waker.wake()

    def run(self) -> None:
        """Until it is asked to end, or fails; whatever it has begun is asked to end then."""
        settings, name = self._settings, self._server
        try:
            with server_log(log_of(settings, name), name):
                self._stream(settings, name)
        finally:
            self._stopped.set()  # whatever it had begun beside it ends, too
            self._over.wake()

    def _stream(self, settings: Settings, name: str) -> None:
        why = ""
        try:
            with CatalogWriter(settings.catalog, make=False) as writer:
                wiring = Wiring(settings, writer.catalog)
                StreamRun(wiring, name, writer, self._waker, self._stopped, kept=True, shared=True).run(once=False)
        except BackupdError as error:
            why = "\n".join(filter(None, (str(error), error.detail, error.hint)))
        except BaseException:  # noqa: BLE001  not hidden: the service reports it, and begins the stream again
            why = traceback.format_exc()
        if why:
            say("stream-over", why, level=logging.ERROR, server=name)
            Spool(spool_folder(settings, name)).is_over(os.getpid(), why)


class _ServerLog(RotatingFileHandler):
    """A log that begins anew when it is long, as those of ``renew_log`` do."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        raw = os.fdopen(os.open(self.baseFilename, flags, 0o600), "ab")
        return TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Nobody is left to notify."""


@contextmanager
def server_log(path: Path, server: str) -> Iterator[None]:
    """Until the block ends, what is said of ``server`` goes to the log ``path``, too, where that can be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = _ServerLog(path, maxBytes=LOG_SIZE, backupCount=1)
    except OSError as error:
        say("log-unwritable", f"the log {path} cannot be written: {error.strerror}", level=logging.WARNING)
        yield
        return
    handler.setFormatter(JsonFormatter())
    handler.addFilter(lambda record: getattr(record, "server", "") == server)
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        handler.close()
