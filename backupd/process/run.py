"""Running one program to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from backupd.model.errors import ToolError
from backupd.process.command import Command
from backupd.process.pipeline import Pipeline


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
    input: bytes | None = None,  # noqa: A002  the word that subprocess uses
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

    def feed(sink: BinaryIO) -> None:
        sink.write(input or b"")

    stdout = BytesIO()
    pipeline = Pipeline(
        [command],
        log=log,
        on_stderr=on_stderr,
        cancel=cancel,
        timeout=timeout,
        feed=feed if input is not None else None,
    )
    with pipeline:
        try:
            for chunk in pipeline.chunks(64 * 1024):
                stdout.write(chunk)
        except ToolError:
            if check or not pipeline.exited:
                raise
        code = pipeline.returncodes[0]
        stderr = pipeline.stderr_tail(command.program, 400)
    return Completed(code if code is not None else 0, stdout.getvalue(), stderr)
