"""What an installation itself knows of a mark of deletion, whatever the mark says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Sighting:
    """``since``: when this installation put the mark, or first saw somebody else's, by its own clock. ``ours``: its own
    rules, or a person here, want the backup gone; ``confirmed``: a person here does, so no brake holds it."""

    since: datetime
    ours: bool = False
    confirmed: bool = False
