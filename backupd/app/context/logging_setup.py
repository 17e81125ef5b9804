"""What is logged, and where: text on a terminal, JSON lines elsewhere, and one file for each job.

Everything passes ``redact``: no secret and no table data reaches a log. A log that cannot be written loses lines and
never stops the work.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from backupd.app.context.settings import Settings
from backupd.catalog.database import catalog_url
from backupd.model.errors import BackupdError, NotFoundError, unknown
from backupd.model.text import format_time, is_id

LOGGER = logging.getLogger("backupd")
LOGGER.addHandler(logging.NullHandler())
LOGGER.propagate = False
LOGGER.setLevel(logging.INFO)


def say(event: str, message: str, *, level: int = logging.INFO, server: str = "", job: str = "") -> None:
    """Log one thing that happened. ``event``: a stable word, as of ``Event.kind``; ``message`` may span lines."""
    LOGGER.log(level, "%s", redacted(message), extra={"event": event, "server": server, "job": job})


def redacted(text: str) -> str:
    """``text`` without secrets and table data, whoever wrote it."""
    from backupd.process.output import Redactor  # many rules, and what only reads writes no log

    redactor = Redactor()
    return "\n".join(redactor.line(line) for line in text.splitlines())


class TextFormatter(logging.Formatter):
    """``2026-11-21 04:25:12Z WARNING job-failed shop-db1 20261121T042512Z-7f3a9c01: gpg exited with 2``"""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(record.created))
        words = [moment, record.levelname, *(word for word in _fields(record).values() if word)]
        return f"{' '.join(words)}: {record.getMessage()}"


class JsonFormatter(logging.Formatter):
    """One JSON document on each line: time, level, event, server, job, message."""

    def format(self, record: logging.LogRecord) -> str:
        moment = format_time(datetime.fromtimestamp(record.created, UTC))
        return json.dumps(
            {"time": moment, "level": record.levelname.lower(), **_fields(record), "message": record.getMessage()},
            ensure_ascii=False,
        )


def _fields(record: logging.LogRecord) -> dict[str, str]:
    return {name: str(getattr(record, name, "")) for name in ("event", "server", "job")}


class _Forgiving(logging.StreamHandler[TextIO]):
    """A handler whose reader, or whose disk, may go away."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Nobody is left to notify."""


@contextmanager
def logging_to(stream: TextIO) -> Iterator[None]:
    """Log everything to ``stream`` until the block ends: text on a terminal, JSON lines otherwise."""
    handler = _Forgiving(stream)
    handler.setFormatter(TextFormatter() if stream.isatty() else JsonFormatter())
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)


def log_folder(settings: Settings) -> Path:
    """Where the logs of jobs are: beside the catalog's file, or in the spool where the catalog is a server."""
    url = catalog_url(settings.catalog)
    base = Path(str(url.database)).parent if url.drivername == "sqlite" else settings.spool
    return base / "jobs"


def log_path(settings: Settings, job_id: str) -> Path:
    """The log of a job. Raises NotFoundError for what is no job's id: it is part of a path."""
    if not is_id(job_id):
        raise unknown("job", job_id, lists="jobs")
    return log_folder(settings) / f"{job_id}.log"


@contextmanager
def job_log(settings: Settings, job_id: str) -> Iterator[Path | None]:
    """Until the block ends, what is said of this job goes to its log too, whose path it gives for tools to append to;
    None where it cannot be written."""
    path = log_path(settings, job_id)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        say("log-unwritable", f"the log {path} cannot be written: {error.strerror}", level=logging.WARNING, job=job_id)
        yield None
        return
    stream = os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")
    handler = _Forgiving(stream)
    handler.setFormatter(TextFormatter())
    handler.addFilter(lambda record: getattr(record, "job", "") == job_id)
    LOGGER.addHandler(handler)
    try:
        yield path
    finally:
        LOGGER.removeHandler(handler)
        try:
            stream.close()
        except OSError as error:  # what was still in its buffer found no room
            say("log-unwritable", f"the log {path} is incomplete: {error.strerror}", level=logging.WARNING, job=job_id)


def read_log(settings: Settings, job_id: str) -> str:
    """The log of a job. Raises NotFoundError."""
    path = log_path(settings, job_id)
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise NotFoundError(
            f"job {job_id} has no log here", hint=f"logs are in {path.parent} on the host that ran the job"
        ) from None
    except OSError as error:
        raise BackupdError(
            f"the log {path} cannot be read: {error.strerror}", hint="run the command as the user of the service"
        ) from error


def remove_logs(settings: Settings, jobs: Iterable[str]) -> None:
    """Remove the logs of jobs that are gone from the catalog."""
    for job_id in jobs:
        try:
            log_path(settings, job_id).unlink(missing_ok=True)
        except (OSError, NotFoundError) as error:
            say("log-unwritable", f"the log of {job_id} was not removed: {error}", level=logging.WARNING, job=job_id)
