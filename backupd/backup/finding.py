"""One sentence of a check: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from backupd.model.document import HIDDEN, Document
from backupd.model.errors import BackupdError, ConfigurationError


class Severity(StrEnum):
    """``error``: a backup would fail or be worthless; ``warning``: it works, but know this; ``ok``."""

    ERROR = "error"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding(Document):
    """``subject`` names the thing: ``server``, ``privileges``, ``destination local`` ...; with ``server`` before it
    where several were checked. ``server``: the one that it is about, "" for what concerns all."""

    severity: Severity
    subject: str
    message: str
    hint: str = ""
    server: str = field(default="", kw_only=True, compare=False, metadata=HIDDEN)


def error(subject: str, message: str, hint: str = "") -> Finding:
    """A finding that a backup would fail on or be worthless by."""
    return Finding(Severity.ERROR, subject, message, hint)


def warning(subject: str, message: str, hint: str = "") -> Finding:
    """A finding that no backup fails on."""
    return Finding(Severity.WARNING, subject, message, hint)


def fine(subject: str, message: str) -> Finding:
    """A finding that nothing has to be done about."""
    return Finding(Severity.OK, subject, message)


def from_error(subject: str, problem: BackupdError) -> Finding:
    """An error of ours as a finding, evidence included."""
    detail = problem.detail
    if isinstance(problem, ConfigurationError):
        return error(subject, "; ".join(str(one) for one in problem.problems), problem.hint)
    message = f"{problem.message}: {detail}" if detail else problem.message
    return error(subject, message, problem.hint)
