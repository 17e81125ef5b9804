"""The pin of a restore: the backups that somebody reads are not swept away meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from backupd.model.errors import BackupdError, NotFoundError, RefusedError
from backupd.model.text import Clock
from backupd.transfer.guards.lease import HEARTBEAT, Holder, Lease, exists, leases, utc_now
from backupd.transfer.guards.marks import is_marked
from storage.contract import layout
from storage.contract.destination import Destination


class Pin(Holder):
    """``with Pin(destination, restore_id, [(server, backup_id), ...]): ...``

    Entering raises NotFoundError when a backup is not at ``destination`` and RefusedError when it is marked deleted:
    a sweep reads the marks first and the pins after, so whoever pins first and then finds no mark is safe. ``some``: it
    is enough that one of them is there; ``absent`` then tells why each other one is not.
    """

    def __init__(
        self,
        destination: Destination,
        restore_id: str,
        backups: Sequence[tuple[str, str]],
        *,
        clock: Clock = utc_now,
        interval: float = HEARTBEAT,
        some: bool = False,
    ) -> None:
        super().__init__([destination], layout.pin_key(restore_id), backups, clock=clock, interval=interval)
        self._destination = destination
        self._some = some
        self.absent: dict[tuple[str, str], BackupdError] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            for server, backup_id in self.lease.backups:
                try:
                    self._require(server, backup_id)
                except (NotFoundError, RefusedError) as error:
                    self.absent[server, backup_id] = error
                    if not self._some or len(self.absent) == len(self.lease.backups):
                        raise
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _require(self, server: str, backup_id: str) -> None:
        name = self._destination.name
        if is_marked(self._destination, server, backup_id):
            raise RefusedError(
                f"backup {backup_id} of {server} at destination {name} is marked deleted",
                hint=f"backupd backups undelete {backup_id} takes the mark away, while there is time",
            )
        if not exists(self._destination, layout.manifest_key(server, backup_id)):
            raise NotFoundError(f"destination {name} has no backup {backup_id} of {server}")


def pins(destination: Destination) -> list[Lease]:
    """Every pin at ``destination``, living or dead."""
    return leases(destination, layout.PINS)
