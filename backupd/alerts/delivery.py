"""How a message fared, whichever way it went."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from backupd.model.errors import BackupdError

FIRST_PAUSE = timedelta(minutes=1)
LONGEST_PAUSE = timedelta(hours=1)
GIVEN_UP = timedelta(days=3)
"""A message that is as old as this, and still cannot be delivered, never will be."""


class DeliveryError(BackupdError):
    """A message reached nobody. ``permanent``: it would not the next time either."""

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, detail: str = "", hint: str = "", permanent: bool = False) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.permanent = permanent


@dataclass(frozen=True, slots=True)
class Delivered:
    """It was taken, for some at least. ``again``: recipients to try once more; ``problem``: what was said about those
    that it was not taken for."""

    again: tuple[str, ...] = ()
    problem: str = ""


def pause_after(attempts: int) -> timedelta:
    """How long to wait after so many tries in vain."""
    return min(FIRST_PAUSE * (1 << min(attempts - 1, 10)), LONGEST_PAUSE)
