"""What long work tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One report. ``phase`` names the step (``copy``, ``fetch``, ``prepare`` ...); totals are None while unknown.

    ``waits``: for something that takes its time, and at which whoever reports goes on looking. Then a report is a sign
    of life even where it says the same as the one before.
    """

    phase: str
    bytes_done: int = 0
    bytes_total: int | None = None
    files_done: int = 0
    files_total: int | None = None
    note: str = ""
    waits: bool = False


Report = Callable[[Progress], None]
"""Called from any thread, often; must be cheap and must not raise."""


def silent(_progress: Progress) -> None:
    """A Report that drops everything."""
