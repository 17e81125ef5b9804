"""Will the server remove a file before it is archived everywhere?

It removes a file when it was last written to longer ago than its setting says, or when all its files together are
larger than another setting allows. It looks when it begins a new file and when it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.engine.server.binary_logs import Expiry, SourceState

_EARLY = timedelta(hours=1)
_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class PurgeAlarm:
    """``file``: the oldest one that is not archived everywhere. ``at``: when the server may remove it; None: it is
    about to, by size; ``gone``: it has."""

    file: str
    message: str
    at: datetime | None = None
    gone: bool = False


def purge_alarm(number: int, written_until: datetime | None, state: SourceState, expiry: Expiry) -> PurgeAlarm | None:
    """``number``: of the oldest file that is not archived everywhere. ``written_until``: when the server wrote the last
    event of it, as far as known, by its own clock; None while it is still written to."""
    name = f"{state.basename}.{number:06d}"
    listed = {log.number: log for log in state.logs}
    if number not in listed:
        if number < state.logs[0].number:
            return PurgeAlarm(
                name,
                f"the server purged {name} before it was archived at every destination; the only copy may be in "
                "the spool",
                gone=True,
            )
        return None
    if number == state.logs[-1].number:
        return None  # never removed while the server writes to it
    if expiry.age is not None and written_until is not None:
        at = written_until + expiry.age
        if at - state.server_time <= max(_EARLY, expiry.age * _SHARE):
            return PurgeAlarm(
                name,
                f"the server will remove {name} from {at:%Y-%m-%d %H:%M} UTC on, and it is not archived everywhere yet",
                at,
            )
    if expiry.total_bytes is not None:
        size = sum(log.size for log in state.logs if log.number >= number)
        if size >= expiry.total_bytes * (1 - _SHARE):
            return PurgeAlarm(
                name,
                f"the server will soon remove {name} because its binary logs may take"
                f" {expiry.total_bytes} bytes, and it is not archived everywhere yet",
            )
    return None
