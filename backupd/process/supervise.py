"""Starting programs so that none outlives us, and ending them and everything below them so that none is left.

Every child is wrapped in ``setpriv --pdeathsig KILL``: the kernel kills it when its parent dies, even by SIGKILL. That
"parent" is the *thread* that started it, so a child started by a worker thread would be killed when that thread ends,
in the middle of its work. Therefore one thread, which lives as long as the process, starts all of them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import ToolError
from backupd.process.command import Command, become, find_account, locate

POLITE_SECONDS = 2.0
"""How long a program has after SIGINT before SIGKILL."""


class Child:
    """A started program: leader of its own session and process group. All methods may be called from any
    thread."""

    def __init__(self, command: Command, popen: subprocess.Popen[bytes]) -> None:
        self.command = command
        self.pid = popen.pid
        self._popen = popen
        self._lock = threading.RLock()  # a signal handler may call send() while its thread is in poll()

    @property
    def program(self) -> str:
        """The program that it runs, as its command names it."""
        return self.command.program

    def poll(self) -> int | None:
        """Exit code (negative: the signal's number) once the program has exited, else None.

        On the first call after the exit, whatever it left in its process group is killed: nothing in there
        can still write into a result that we are about to trust.
        """
        with self._lock:
            if self._popen.returncode is None and self._has_exited():
                # Before reaping: until then the group's number cannot belong to somebody else.
                self._send(signal.SIGKILL)
                self._popen.wait()
            code = self._popen.returncode
            # What ended by a signal in a sandbox, that one tells of as a shell does.
            return 128 - code if self.command.wrapped and code is not None and code > 128 else code

    def wait(self, seconds: float) -> int | None:
        """Like ``poll``, waiting up to ``seconds`` for the exit."""
        deadline = time.monotonic() + seconds
        pause = 0.0002
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 2, 0.05)
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group, unless the program has already gone."""
        with self._lock:
            if self._popen.returncode is None:
                self._send(number)

    def _has_exited(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def stop(children: Sequence[Child], *, polite_seconds: float = POLITE_SECONDS) -> None:
    """End all ``children`` and their process groups, and return when they are gone.

    First SIGINT, because mariadb-backup blocks SIGTERM, SIGHUP and SIGQUIT and would run on to "completed
    OK!"; after ``polite_seconds`` SIGKILL.
    """
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.send(signal.SIGINT)
    deadline = time.monotonic() + polite_seconds
    for child in running:
        child.wait(max(0.0, deadline - time.monotonic()))
    for child in running:
        child.send(signal.SIGKILL)
    for child in running:
        while child.wait(5.0) is None:  # stuck in the kernel (dead NFS): SIGKILL takes effect when it returns
            child.send(signal.SIGKILL)


def spawn(command: Command, *, stdin: int, stdout: int, stderr: int, pass_fds: Sequence[int] = ()) -> Child:
    """Start ``command`` with these descriptors, which stay the caller's to close.

    Raises ToolMissingError, ToolError when the program cannot be started at all, ConfigurationError for an
    unknown user.
    """
    argv = ["setpriv", "--pdeathsig", "KILL"]
    if command.user is not None and find_account(command.user).pw_uid != os.geteuid():
        argv += become(command.user)
    argv[0] = locate("setpriv")
    argv += ["--", command.located(), *command.argv[1:]]
    environment = command.environment()

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            env=environment,
            cwd=command.cwd,
            start_new_session=True,
            close_fds=True,
        )

    try:
        popen = _spawner.call(start)
    except OSError as error:
        raise ToolError(
            f"{command.program} cannot be started: {error.strerror or error}", detail=command.render()
        ) from error
    return Child(command, popen)


@dataclass(frozen=True, slots=True)
class _Request:
    start: Callable[[], subprocess.Popen[bytes]]
    answer: Future[subprocess.Popen[bytes]]


class _Spawner:
    """The thread that is every child's parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[_Request] | None = None

    def call(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        request = _Request(start, Future())
        self._queue().put(request)
        try:
            return request.answer.result()
        except KeyboardInterrupt:
            request.answer.add_done_callback(_end_unwanted)
            raise

    def forget(self) -> None:
        """After a fork the child has no such thread: begin anew there."""
        self._lock = threading.Lock()
        self._requests = None

    def _queue(self) -> queue.SimpleQueue[_Request]:
        with self._lock:
            if self._requests is None:
                requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
                # A daemon thread: it has no end of its own, and must not keep the process from ending.
                threading.Thread(target=self._serve, args=(requests,), name="spawner", daemon=True).start()
                # Only now: had the system refused the thread, nobody would ever answer.
                self._requests = requests
            return self._requests

    @staticmethod
    def _serve(requests: queue.SimpleQueue[_Request]) -> None:
        while True:
            request = requests.get()
            try:
                request.answer.set_result(request.start())
            except BaseException as error:  # noqa: BLE001  not hidden: the caller's result() raises it
                request.answer.set_exception(error)
            del request


def _end_unwanted(answer: Future[subprocess.Popen[bytes]]) -> None:
    if answer.exception() is None:
        popen = answer.result()
        popen.kill()
        popen.wait()


_spawner = _Spawner()
os.register_at_fork(after_in_child=_spawner.forget)


def family(pid: int) -> list[int]:
    """``pid`` and all processes below it."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += [int(word) for word in (task / "children").read_text(encoding="ascii").split()]
    return found


def kill_family(pid: int) -> None:
    """SIGKILL for a child of ours, which nobody has reaped yet, and for all below it.

    The child is stopped first, so that it starts nothing while it is being looked at.
    """
    ends: list[int] = []
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for one in family(pid):
        with contextlib.suppress(ProcessLookupError):
            ends.append(os.pidfd_open(one))
    for end in ends:
        # By descriptor: the number may already belong to somebody else.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
        os.close(end)
