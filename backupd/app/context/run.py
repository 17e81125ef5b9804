"""One run of a job, as the code that does the work sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backupd.model.errors import BackupdError, CancelledError
from backupd.model.job import JobRecord, Report, silent
from backupd.model.proof import Phase


def _ours() -> None:
    """Nobody else could have taken the job."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """``report`` takes progress; ``cancel`` is set when the work should stop (pass it to pipelines, poll it in loops);
    ``fence`` raises RefusedError when the job is no longer this process's: call it right before anything is committed.
    ``log``: where tools may write what they print, redacted; None without a file. ``watched``: somebody waits in this
    process and sees how it ends. ``restore``: what a command was asked for that no row holds (options, whom to ask);
    None for a restore whose row says it all.
    """

    job: JobRecord
    report: Report = silent
    cancel: threading.Event = field(default_factory=threading.Event)
    fence: Callable[[], None] = _ours
    log: Path | None = None
    watched: bool = False
    restore: Callable[[JobRun], Any] | None = None

    def check(self) -> None:
        """Raises CancelledError when somebody asked to stop."""
        if self.cancel.is_set():
            raise CancelledError(f"job {self.job.id} was cancelled")


@dataclass(frozen=True, slots=True)
class Result:
    """What a job came to. ``id`` of what it made; ``bytes`` of plaintext moved; ``phases`` for later estimates.

    ``problem``: the work was done to its end and found something bad (a backup that does not restore): the job failed,
    though nothing was raised. ``partial``: what it made is there and can be used, and the problem is what is missing
    in it; ``accepted``: the policy takes that for good enough, otherwise it is tried again. ``outcome``: what the work
    gave, for whoever waits for it in this process; nothing of it is recorded.
    """

    id: str = ""
    bytes: int = 0
    phases: tuple[Phase, ...] = ()
    problem: BackupdError | None = None
    partial: bool = False
    accepted: bool = False
    outcome: Any = None
