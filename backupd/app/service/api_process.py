"""The service's part of the REST interface and the web page: the socket, and a process that answers on it.

The socket is ours, so that a process which replaces another one loses nobody's connection: with new settings the next
one is started on the same socket, and the one before ends when the next one answers. A process that lives and does not
answer is replaced, too. Nothing here keeps backups from being made.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import API
from backupd.app.context.logging_setup import log_folder, say
from backupd.app.context.settings import Settings
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.child_process import ChildProcess, ProcessWatch, open_log, start
from backupd.model.errors import BackupdError
from backupd.model.event import Severity
from backupd.process.command import kill_family
from backupd.process.pipeline import describe_exit

_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_BEGINNING = b"HTTP/1.1 "


class Probe:
    """One question, asked by its own thread: who wants the answer need not wait for it. ``heard`` is None until it
    is known."""

    def __init__(self, address: tuple[str, int], *, tls: bool, seconds: float) -> None:
        self.heard: bool | None = None
        threading.Thread(target=self._ask, args=(address, tls, seconds), name="api-probe", daemon=True).start()

    def _ask(self, address: tuple[str, int], tls: bool, seconds: float) -> None:
        self.heard = answers(address, tls=tls, seconds=seconds)


def answers(address: tuple[str, int], *, tls: bool, seconds: float) -> bool:
    """Whatever it says: one that refuses lives as well. ``seconds``: for each step of it."""
    try:
        with (
            socket.create_connection(address, timeout=seconds) as plain,
            _context().wrap_socket(plain) if tls else plain as connection,
        ):
            connection.sendall(_REQUEST)
            return connection.recv(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def _context() -> ssl.SSLContext:
    """Nothing secret is sent, so it does not matter whose certificate it is."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


TICK = 0.5
"""Seconds between two looks."""
BACKLOG = 512
"""Connections that may wait for somebody to take them."""
GRACE = 12.0
"""Seconds that a process has to end before it is killed."""
STARTING = 60.0
"""Seconds for a process to answer."""
LONGEST_PAUSE = 60.0
"""Seconds between two tries at the most."""
REPEATED = 3
"""So many failures in a row are an incident."""
HEALTHY = 10.0
"""Seconds of answering after which a process counts as well."""
ASKED_EVERY = 15.0
"""Seconds after which one that answered is asked again whether it does."""
HEARING = 10.0
"""Seconds for each answer."""
UNHEARD = 3
"""Unanswered questions in a row after which it is killed: it hangs."""


@dataclass(slots=True)
class _Server:
    """One process. ``basis``: the settings that it goes by; ``ear``: what is written to once it answers, -1 after that.
    It answers at ``address``, with ``tls`` or without; ``unheard``: questions in a row that it did not answer; ``ask``:
    when to ask the next one. Times are monotonic."""

    process: ChildProcess
    basis: Mapping[str, Any]
    ear: int
    began: float
    address: tuple[str, int]
    tls: bool
    answers: float | None = None
    probe: Probe | None = None
    unheard: int = 0
    ask: float = 0.0

    def look(self, now: float) -> None:
        """Does it answer by now?"""
        if self.ear >= 0:
            try:
                ready = os.read(self.ear, 1)
            except BlockingIOError:
                return
            self.forget()
            self.answers = now if ready else None

    def hangs(self, now: float) -> bool:
        """Did it leave the last questions without an answer? Asks the next one when it is time."""
        if self.probe is None:
            if now >= self.ask:
                self.probe = Probe(self.address, tls=self.tls, seconds=HEARING)
        elif self.probe.heard is not None:
            self.unheard = 0 if self.probe.heard else self.unheard + 1
            self.ask = now + (ASKED_EVERY if self.probe.heard else 0.0)
            self.probe = None
        return self.unheard >= UNHEARD

    def forget(self) -> None:
        if self.ear >= 0:
            os.close(self.ear)
            self.ear = -1


@dataclass(slots=True)
class _State:
    """``listener`` is bound to ``address``; ``current`` answers, ``next`` is to take over, ``retired`` are ending."""

    listener: socket.socket | None = None
    address: str = ""
    current: _Server | None = None
    next: _Server | None = None
    retired: list[_Server] = field(default_factory=list)
    failures: int = 0
    next_start: float = 0.0
    well: bool = False

    def all(self) -> list[_Server]:
        return [one for one in (self.current, self.next, *self.retired) if one is not None]


class ApiWatch(ProcessWatch):
    """One process that answers, and for moments the one that replaces it."""

    def __init__(self, wiring: Wiring, *, grace: float = GRACE) -> None:
        super().__init__("api", wiring, grace=grace)
        self._state = _State()

    def running(self) -> int | None:
        """The id of the process that answers."""
        current = self._state.current
        return current.process.child.pid if current is not None and current.answers is not None else None

    def reload(self, wiring: Wiring) -> None:
        """Where these settings differ, another process takes over."""
        self._state.next_start = 0.0  # what failed may be mended by them
        super().reload(wiring)

    def step(self) -> None:
        """One look. Raises CatalogError where an event could not be recorded."""
        state, settings, now = self._state, self._wiring.settings, time.monotonic()
        self._look_at_retired(now)
        if not settings.api.enabled:
            self._retire_all(now)
            return
        basis = settings.document  # the same object from look to look: to compare it costs nothing
        self._look_at_current(basis, now)
        self._look_at_next(now)
        if state.next is None and now >= state.next_start and (state.current is None or state.current.basis != basis):
            self._begin(basis, now)
        self._held.let_go(one.process.settings for one in state.all())

    # -- the processes

    def _begin(self, basis: Mapping[str, Any], now: float) -> None:
        state, settings = self._state, self._wiring.settings
        ear = mouth = -1
        try:
            listener = self._listening(settings.api.listen)
            ear, mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            process = start(
                settings,
                self._held.file(settings),
                "run-api",
                "--fd",
                str(listener.fileno()),
                "--ready",
                str(mouth),
                log=open_log(_log(settings)),
                pass_fds=(listener.fileno(), mouth),
            )
        except (BackupdError, OSError, RuntimeError) as error:
            if ear >= 0:
                os.close(ear)
            self._failed(str(error), "", now)
            return
        finally:
            if mouth >= 0:
                os.close(mouth)
        host, port = listener.getsockname()[:2]
        state.next = _Server(process, basis, ear, now, (host, port), settings.api.tls is not None)

    def _listening(self, address: str) -> socket.socket:
        """The socket at ``address``: the one there is, or another one. Raises OSError."""
        state = self._state
        if state.listener is None or state.address != address:
            made = listen(address)
            if state.listener is not None:
                state.listener.close()  # its processes have it still
            state.listener, state.address = made, address
        return state.listener

    def _look_at_next(self, now: float) -> None:
        state, one = self._state, self._state.next
        if one is None:
            return
        one.look(now)
        code = one.process.ended()
        if code is not None:
            one.forget()
            state.next = None
            self._failed(f"its process {describe_exit(code)}", one.process.last_words(), now)
        elif one.answers is not None:
            state.next, state.well = None, False
            if state.current is not None:
                self._retire(state.current, now)
            state.current = one
            say("api-process", f"process {one.process.child.pid} answers at {state.address}")
        elif now - one.began > STARTING:
            state.next = None
            self._retire(one, now)
            self._failed(f"its process did not answer within {STARTING:g} seconds", one.process.last_words(), now)

    def _look_at_current(self, basis: Mapping[str, Any], now: float) -> None:
        state, one = self._state, self._state.current
        if one is None:
            return
        code = one.process.ended()
        if code is not None:
            state.current = None
            self._failed(f"its process {describe_exit(code)}", one.process.last_words(), now)
        elif one.hangs(now):
            state.current = None
            kill_family(one.process.child.pid)
            state.retired.append(one)
            self._failed(
                f"its process lives and did not answer {UNHEARD} times, {HEARING:g} seconds each; it was killed",
                one.process.last_words(),
                now,
                report=True,
            )
        elif not state.well and one.basis == basis and one.answers is not None and now - one.answers >= HEALTHY:
            self._recovered()

    def _retire(self, one: _Server, now: float) -> None:
        one.forget()
        one.process.end(now, self._grace)
        self._state.retired.append(one)

    def _look_at_retired(self, now: float) -> None:
        for one in list(self._state.retired):
            if one.process.ended() is None:
                one.process.end(now, self._grace)
            else:
                self._state.retired.remove(one)

    def _retire_all(self, now: float) -> None:
        state = self._state
        for one in (state.current, state.next):
            if one is not None:
                self._retire(one, now)
        state.current = state.next = None
        if state.listener is not None:
            state.listener.close()
            state.listener = None
        self._held.let_go(one.process.settings for one in state.retired)

    # -- what is reported

    def _failed(self, how: str, words: str, now: float, *, report: bool = False) -> None:
        """``report``: even when it is the first time."""
        state, settings = self._state, self._wiring.settings
        state.failures, state.well = state.failures + 1, False
        pause = min(LONGEST_PAUSE, 2.0 ** (state.failures - 1))
        state.next_start = now + pause
        say("api-ended", f"{how}; the next try is in {pause:g} s\n{words}", level=logging.WARNING)
        if report or state.failures >= REPEATED:
            before = "; the process with the previous settings continues" if state.current is not None else ""
            self.settle(
                Condition(
                    Key(API, subject="api"),
                    Severity.ERROR,
                    detail=words,
                    message=f"the REST interface and the web page cannot be served at {settings.api.listen}: {how}, "
                    f"the {state.failures}. time in a row{before}",
                    hint=f"backups continue; its log is {_log(settings)}. backupd retries every minute; if another "
                    f"program has the port, stop it or change api.listen",
                )
            )

    def _recovered(self) -> None:
        state = self._state
        state.failures = 0
        served = f"the REST interface and the web page are served at {state.address} again"
        self.settle(looked={Key(API, subject="api"): served})
        state.well = True

    # -- the thread

    def _pause(self) -> float:
        return TICK if self._state.next is None else 0.05

    def _wind_down(self) -> bool:
        now = time.monotonic()
        self._guarded(partial(self._retire_all, now))
        self._look_at_retired(now)
        return bool(self._state.retired)


def listen(endpoint: str) -> socket.socket:
    """A socket that listens at ``ADDRESS:PORT``; at ``[::]`` also for IPv4. Raises OSError."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    family, _kind, _protocol, _name, address = socket.getaddrinfo(
        host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=host == "::")
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at {endpoint}: {error.strerror or error}") from error


def _log(settings: Settings) -> Path:
    """Where the processes say what happens to them."""
    return log_folder(settings).with_name("api.log")
