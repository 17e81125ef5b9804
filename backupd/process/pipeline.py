"""Programs joined by pipes, whose end of file is a promise, and one program run to its end.

A tool that dies halfway closes its stdout, and a reader who takes that for the end commits a truncated object. Here the
end is reported only after every program has exited with 0; otherwise reading raises.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Self

from backupd.model.errors import CancelledError, ToolError
from backupd.process.command import Child, Command, spawn, stop
from backupd.process.output import StderrReader

PIPE_SIZE = 1024 * 1024
"""Bytes that the kernel holds in one pipe: the most an unprivileged process may ask for."""
LINGER_SECONDS = 60.0
"""How long a program may live on after the end of the output."""
_TICK_MS = 200
_SETTLE_SECONDS = 1.0
"""How long the neighbours of a failed program have to fail on their own before they are ended."""
_TAIL_LINES = 20
_NO_THREAD = "can't start new thread"
"""The message of Python's RuntimeError: only by it is this error known."""

Feed = Callable[[BinaryIO], None]


class Pipeline:
    """Run ``commands`` so that each reads what the one before it writes; read the last one's output here.

    Use as a context manager: programs start on entering; leaving, at any moment and for any reason, leaves no
    process. ``read`` and ``readinto`` belong to one thread, ``kill`` and ``stderr_tail`` to any.

    ``feed``, if given, runs in another thread and writes the first program's input; its return is the
    input's end. What it raises is raised by reading (BrokenPipeError excepted: then the program that stopped
    reading is to blame). Without ``feed`` the first program reads nothing. ``log``: file (0600, appended) for
    all stderr, redacted. ``on_stderr`` is called with each line as it was printed, from a thread; it may hold
    secrets. ``cancel``: when set, reading raises CancelledError. ``timeout``: seconds from the start, then
    ToolError. ``pass_fds``: descriptors that the programs inherit.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        *,
        log: Path | None = None,
        on_stderr: Callable[[str], None] | None = None,
        feed: Feed | None = None,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        if not commands:
            raise ValueError("a pipeline needs at least one command")
        self._commands = tuple(commands)
        self._log, self._on_stderr, self._feed, self._cancel = log, on_stderr, feed, cancel
        self._timeout, self._pass_fds = timeout, tuple(pass_fds)
        self._killed = threading.Event()
        self._children: list[Child] = []
        self._stderr: StderrReader | None = None
        self._output: io.FileIO | None = None
        self._poll = select.poll()
        self._feeder: threading.Thread | None = None
        self._feed_error: BaseException | None = None
        self._feed_cut = False
        self.exited = False
        """Reading came to the end and every program had exited without being killed here, with any exit code."""
        self._finished = False
        self._error: BaseException | None = None
        self._started = 0.0

    def __enter__(self) -> Pipeline:
        """Start everything. Raises ToolMissingError before anything runs, ToolError if a program cannot be
        started."""
        for command in self._commands:
            command.located()
        try:
            self._start()
        except BaseException as error:
            self._end()
            if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
                raise ToolError(
                    f"{self._names} cannot be started: the system refused a new thread",
                    hint="too little memory or too many threads are allowed: see `ulimit -v`, `ulimit -u` "
                    "and MemoryMax= and TasksMax= of the unit",
                ) from error
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end()

    # -- reading

    def readinto(self, buffer: bytearray | memoryview) -> int:
        """Fill the front of ``buffer``; the number of bytes read, 0 at the end that is a promise.

        Raises ToolError naming the program to blame with its last lines, CancelledError, or what ``feed`` or
        ``on_stderr`` raised. After an error every further call raises it again.
        """
        if self._output is None:
            raise ValueError("the pipeline is not running")
        if len(buffer) == 0:
            raise ValueError("nothing can be read into an empty buffer")
        if self._error is not None:
            raise self._error
        if self._finished:
            return 0
        try:
            self._await_output()
            count = self._output.readinto(buffer)
            if count:
                return count
            self._finish()
        except BaseException as failure:
            self._error = failure
            raise
        self._finished = True
        return 0

    def read(self, size: int) -> bytes:
        """At least one and at most ``size`` bytes, ``b""`` at the end; see ``readinto``."""
        buffer = bytearray(size)
        count = self.readinto(buffer)
        return bytes(memoryview(buffer)[:count])

    def chunks(self, size: int = PIPE_SIZE) -> Iterator[memoryview]:
        """All that is left, in views of one reused buffer: each is valid until the next is asked for."""
        buffer = memoryview(bytearray(size))
        while count := self.readinto(buffer):
            yield buffer[:count]

    def drain(self) -> None:
        """Read to the end and drop it: for programs that are run for their effect. Raises as ``readinto``
        does."""
        for _ in self.chunks():
            pass

    # -- from any thread

    def kill(self) -> None:
        """End all programs; whoever reads gets CancelledError."""
        self._killed.set()
        for child in list(self._children):
            child.send(signal.SIGINT)  # the reader follows up with SIGKILL, see stop()

    def stderr_tail(self, program: str, lines: int = _TAIL_LINES) -> str:
        """The last lines that ``program`` (the name in its Command) printed, redacted; empty if it said
        nothing."""
        for index, command in enumerate(self._commands):
            if command.program == program and self._stderr is not None:
                return self._stderr.tail(index, lines)
        return ""

    @property
    def returncodes(self) -> tuple[int | None, ...]:
        """Exit code of each program (negative: signal), None while it runs."""
        return tuple(child.poll() for child in self._children)

    # -- inside

    def _start(self) -> None:
        self._started = time.monotonic()
        # Every end that is still in here is closed in the end, so that it lives in exactly one program: else
        # a reader that died would not be noticed by its writer, which then waits for ever on a full pipe.
        ours: set[int] = set()

        def pipe() -> tuple[int, int]:
            ends = os.pipe2(os.O_CLOEXEC)
            ours.update(ends)
            with contextlib.suppress(OSError):  # over the user's limit: slower, not wrong
                fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            return ends

        try:
            voices = [pipe() for _ in self._commands]
            reader = StderrReader(
                [command.program for command in self._commands],
                [ear for ear, _ in voices],
                log=self._log,
                on_line=self._on_stderr,
            )
            # Known only once it runs: a thread that never began cannot be joined, and closes no descriptor.
            reader.start()
            self._stderr = reader
            ours.difference_update(ear for ear, _ in voices)
            if self._feed is not None:
                source, inlet = pipe()
            else:
                source = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                ours.add(source)
            for command, (_, mouth) in zip(self._commands, voices, strict=True):
                output, target = pipe()
                self._children.append(
                    spawn(command, stdin=source, stdout=target, stderr=mouth, pass_fds=self._pass_fds)
                )
                source = output
            self._output = io.FileIO(source, "rb")
            ours.discard(source)
            self._poll.register(source, select.POLLIN)
            if self._feed is not None:
                ours.discard(inlet)
        finally:
            for descriptor in ours:
                os.close(descriptor)
        if self._feed is not None:
            feeder = threading.Thread(target=self._write, args=(self._feed, inlet), name="feed", daemon=True)
            try:
                feeder.start()
            except RuntimeError:
                os.close(inlet)
                raise
            self._feeder = feeder

    def _write(self, feed: Feed, inlet: int) -> None:
        sink = io.BufferedWriter(io.FileIO(inlet, "wb"), 64 * 1024)
        try:
            feed(sink)
            sink.flush()
        except BrokenPipeError:
            self._feed_cut = True  # mostly the program's exit code says why
        except BaseException as error:  # noqa: BLE001  not hidden: reading raises it
            self._feed_error = error
            # The end of the input must not look like a good one to the program: end it first.
            self._stop_children()
        finally:
            with contextlib.suppress(BrokenPipeError):
                sink.close()

    def _await_output(self) -> None:
        """Return when there is output or its end; raise when asked to stop, or when it will never come."""
        while True:
            self._check_stop()
            if self._poll.poll(_TICK_MS):
                return
            if any(child.poll() not in (0, None) for child in self._children):
                # A neighbour that sits idle would never notice: its reader is gone, and it writes nothing.
                if not self._poll.poll(int(_SETTLE_SECONDS * 1000)):
                    self._finish()
                return

    def _check_stop(self) -> None:
        if self._killed.is_set() or (self._cancel is not None and self._cancel.is_set()):
            self._stop_children()
            raise CancelledError(f"{self._names} was stopped on request")
        if self._feed_error is not None:
            raise self._feed_error
        if self._stderr is not None and self._stderr.failure is not None:
            self._stop_children()
            raise self._stderr.failure
        if self._timeout is not None and time.monotonic() - self._started > self._timeout:
            codes = self.returncodes
            self._stop_children()
            raise ToolError(
                f"{self._names} did not finish within {self._timeout:g} s and was stopped",
                detail=self._evidence(codes),
                hint="check what it waits for (locks, disk, network), then try again",
            )

    def _finish(self) -> None:
        """The output has ended: wait for every program, and raise unless all is well."""
        deadline = time.monotonic() + LINGER_SECONDS
        failed_at: float | None = None
        while True:
            codes = self.returncodes
            if None not in codes:
                break
            self._check_stop()
            now = time.monotonic()
            if failed_at is None and any(code not in (0, None) for code in codes):
                failed_at = now
            if now > deadline or (failed_at is not None and now > failed_at + _SETTLE_SECONDS):
                break
            running = next(child for child, code in zip(self._children, codes, strict=True) if code is None)
            running.wait(0.05)
        self._stop_children()
        if self._stderr is not None:
            self._stderr.finish()
        if self._feeder is not None:
            while self._feeder.is_alive() and not any(codes) and None not in codes:
                self._feeder.join(0.2)
                self._check_stop()
        self._check_stop()
        self.exited = None not in codes
        if any(code != 0 for code in codes):
            raise self._blame(codes)
        if self._feed_cut:
            raise ToolError(
                f"{self._commands[0].program} stopped reading its input before the end",
                detail=self._evidence(codes, first=0),
            )

    def _blame(self, codes: Sequence[int | None]) -> ToolError:
        """The error that names the culprit: the first that failed on its own.

        A program that failed because its reader went away says so, by its signal or its words. Of the others
        the one furthest upstream is the cause: those below it only met the early end of their input.
        """
        failed = [index for index, code in enumerate(codes) if code not in (0, None)]
        if not failed:
            slow = self._commands[codes.index(None)].program
            return ToolError(
                f"{slow} closed its output but did not exit within {LINGER_SECONDS:g} s, and was stopped",
                detail=self._evidence(codes),
            )
        culprit = next((index for index in failed if not self._was_cut_off(index, codes)), failed[0])
        code = codes[culprit] or 0
        name = self._commands[culprit].program
        hint = ""
        if code == -signal.SIGKILL:
            hint = "it was killed, possibly by the kernel for lack of memory: check dmesg and the journal"
        elif code == -signal.SIGPIPE:
            hint = "the program after it stopped reading early"
        return ToolError(f"{name} {describe_exit(code)}", detail=self._evidence(codes, first=culprit), hint=hint)

    def _was_cut_off(self, index: int, codes: Sequence[int | None]) -> bool:
        last = self._stderr.tail(index, 5) if self._stderr is not None else ""
        return index < len(codes) - 1 and (
            codes[index] == -signal.SIGPIPE or "broken pipe" in last.lower() or "EPIPE" in last
        )

    def _evidence(self, codes: Sequence[int | None], *, first: int | None = None) -> str:
        """Last lines of the culprit, then of every other program that did not end well."""
        order = [first] if first is not None else []
        order += [index for index, code in enumerate(codes) if code != 0 and index != first]
        parts = []
        for index in order:
            said = self._stderr.tail(index, _TAIL_LINES) if self._stderr is not None else ""
            code = codes[index]
            if index == first:
                parts.append(said or f"{self._commands[index].program} printed nothing")
            elif said:
                ending = describe_exit(code) if code is not None else "was still running"
                parts.append(f"{self._commands[index].program} {ending}:\n{said}")
        return "\n".join(parts)

    @property
    def _names(self) -> str:
        return " | ".join(command.program for command in self._commands)

    def _stop_children(self) -> None:
        stop(self._children)

    def _end(self) -> None:
        """Whatever happened: no process, no descriptor, no thread of ours is left."""
        self._stop_children()
        if self._output is not None:
            self._output.close()
        if self._stderr is not None:
            self._stderr.finish(1.0 if self._children else 0.0)
        if self._feeder is not None:
            # Its writes fail now; only a feed that waits for something else takes longer, and then it is on
            # its own.
            self._feeder.join(LINGER_SECONDS)


class Heard:
    """One program, all of whose output is taken as words, by ``voice``. It runs while the block lasts; ``log`` and
    ``on_line`` are those of StderrReader."""

    child: Child
    voice: StderrReader

    def __init__(
        self, command: Command, *, log: Path | None = None, on_line: Callable[[str], None] | None = None
    ) -> None:
        self._command, self._log, self._on_line = command, log, on_line

    def __enter__(self) -> Self:
        ear, mouth = os.pipe2(os.O_CLOEXEC)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        heard = False
        try:
            self.voice = StderrReader([self._command.program], [ear], log=self._log, on_line=self._on_line)
            self.voice.start()
            heard = True
            self.child = spawn(self._command, stdin=nothing, stdout=mouth, stderr=mouth)
        finally:
            os.close(nothing)
            os.close(mouth)
            if not heard:
                os.close(ear)
        return self

    def __exit__(self, *_error: object) -> None:
        stop([self.child])
        self.voice.finish(1.0)

    def last_words(self, lines: int) -> str:
        """What it said at last, redacted."""
        return self.voice.tail(0, lines)


def describe_exit(code: int) -> str:
    """``exited with 2`` or ``was killed by SIGKILL``."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


@dataclass(frozen=True, slots=True)
class Completed:
    """How a program ended. ``returncode`` is negative for a signal; ``stderr`` its last 400 lines,
    redacted."""

    returncode: int
    stdout: bytes
    stderr: str


def run(
    command: Command,
    *,
    timeout: float | None = None,
    check: bool = True,
    log: Path | None = None,
    on_stderr: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Completed:
    """Run ``command``, with ``input`` on its stdin, and wait for its end; its whole output is held in memory.

    Raises ToolMissingError if it is not installed; ToolError naming the program, its exit code or signal and
    its last lines if ``check`` and it did not exit with 0, and always if it took longer than ``timeout``
    seconds (it is ended then); CancelledError once ``cancel`` is set. ``log`` and ``on_stderr`` as for
    Pipeline.
    """

    stdout = BytesIO()
    with Pipeline([command], log=log, on_stderr=on_stderr, cancel=cancel, timeout=timeout) as pipeline:
        try:
            for chunk in pipeline.chunks(64 * 1024):
                stdout.write(chunk)
        except ToolError:
            if check or not pipeline.exited:
                raise
        code = pipeline.returncodes[0]
        stderr = pipeline.stderr_tail(command.program, 400)
    return Completed(code if code is not None else 0, stdout.getvalue(), stderr)
