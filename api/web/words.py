"""What values of the application are called on a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from backupd.model.errors import BackupdError, ConfigurationError, Problem
from backupd.model.text import format_duration, progress_text

_KINDS = {
    "physical-full": "full backup",
    "physical-incremental": "increment",
    "logical": "logical backup",
    "test-restore": "test restore",
    "verify": "verification",
    "challenge": "key challenge",
    "replicate": "copy",
}

GOOD, WARNING, BAD, BUSY, QUIET = "good", "warning", "bad", "busy", "quiet"
"""The five tones of a badge: CSS class ``badge-TONE``, each with a mark of its own."""

_TONES = {
    GOOD: ("good", "succeeded", "complete", "proved", "passed", "sent", "ok", "kept", "closed", "reachable", "active"),
    WARNING: (
        "warning",
        "partial",
        "restored",
        "undecided",
        "inexact",
        "withdrawn",
        "missed",
        "skipped",
        "abandoned",
        "waiting",
        "acknowledged",
        "paused",
        "held",
        "degraded",
    ),
    BAD: ("bad", "error", "failed", "damaged", "broken", "gap", "unreachable", "revoked", "expired", "refused"),
    BUSY: ("running", "queued", "open", "thawing"),
}
_TONE_OF = {word: tone for tone, words in _TONES.items() for word in words}

MARKS: Mapping[str, str] = {GOOD: "✓", WARNING: "!", BAD: "✗", BUSY: "▸", QUIET: "·"}


@dataclass(frozen=True, slots=True)
class Shown:
    """An error on a page. ``problems``: of files, with lines, where it has any."""

    message: str
    detail: str = ""
    hint: str = ""
    problems: tuple[Problem, ...] = ()


def problem_of(error: BackupdError) -> Shown:
    if isinstance(error, ConfigurationError):
        return Shown(error.message, "", error.hint, error.problems)
    return Shown(error.message, error.detail, error.hint)


def tone_of(word: str) -> str:
    """``good``, ``warning``, ``bad``, ``busy`` or ``quiet``: how a state is drawn."""
    return _TONE_OF.get(str(word), QUIET)


def kind_word(kind: str) -> str:
    """Of a job or backup: ``increment`` of ``physical-incremental``."""
    return _KINDS.get(str(kind), str(kind))


def state_word(state: str) -> str:
    return str(state).replace("_", " ").replace("-", " ")


def moment_text(moment: datetime | None) -> str:
    """``2026-11-21 09:41:03Z``; "" of None."""
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def span_text(seconds: float) -> str:
    """As short as one wants to read it: ``4.2s``, ``3m 20s``, ``2h 5m``, ``3d 4h``."""
    if seconds < 59.95:
        return format_duration(max(seconds, 0.0))
    step = 1 if seconds < 3600 else 60 if seconds < 86400 else 3600
    return " ".join(format_duration(round(seconds / step) * step).split()[:2])


def ago(moment: datetime, now: datetime) -> str:
    """``3m 20s ago``, ``in 2h 5m``, ``now``."""
    seconds = (now - moment).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"{span_text(seconds)} ago" if seconds > 0 else f"in {span_text(-seconds)}"


def progress_words(progress: Mapping[str, Any] | None) -> str:
    """A job's progress: ``copy: 1.2 GiB of 2.3 GiB, 120 files, 5.0s left``."""
    return progress_text(progress, span_text)
