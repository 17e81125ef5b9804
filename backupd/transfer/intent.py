"""The intent of a backup that is being written: it comes before the first object and goes after the commit.

While it lives, nothing that the backup stored or reused is collected. So: write the intent, *then* read what is known
(``backupd.transfer.known``); in the other order a sweep in between could take away what the backup counts on.
"""

from __future__ import annotations

from collections.abc import Sequence

from backupd.model.clock import Clock
from backupd.transfer.lease import HEARTBEAT, Holder, Lease, leases, utc_now
from storage import layout
from storage.destination import Destination


class Intent(Holder):
    """``with Intent(destinations, server, backup_id) as intent: ...``"""

    def __init__(self, destinations: Sequence[Destination], server: str, backup_id: str, *, clock: Clock = utc_now,
                 interval: float = HEARTBEAT) -> None:
        super().__init__(destinations, layout.intent_key(backup_id), [(server, backup_id)], clock=clock,
                         interval=interval)


def intents(destination: Destination) -> list[Lease]:
    """Every intent at ``destination``, living or dead."""
    return leases(destination, layout.INTENTS)
