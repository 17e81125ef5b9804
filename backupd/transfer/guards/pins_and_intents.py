"""Who uses backups at a destination: the pin of a restore, and the intent of a backup that is being written.

While a pin lives, no sweep removes the backups that the restore reads.

The intent comes before the first object and goes after the commit. While it lives, nothing that the backup stored or
reused is collected. So: write the intent, *then* read what is known (``backupd.transfer.dedup``); in the other order a
sweep in between could take away what the backup counts on.

The same holds for the backups that an increment builds on. A deletion puts its mark first, and a sweep reads the marks
before the intents and removes no backup of a server that is being backed up. So a backup that has written its intent
and *then* finds the parents unmarked keeps them until it ends, and from its commit on the manifest does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from backupd.model.errors import BackupdError, NotFoundError, RefusedError
from backupd.model.text import Clock
from backupd.transfer.holds_and_locks import is_marked
from backupd.transfer.leases import HEARTBEAT, Holder, Lease, exists, leases, utc_now
from storage import layout
from storage.destination import Destination


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


class Intent(Holder):
    """``with Intent(destinations, server, backup_id) as intent: ...``

    ``parents``: ids of everything that the backup builds on. Entering and ``assert_held`` raise RefusedError unless
    all of them are at every destination, and not marked deleted.
    """

    def __init__(
        self,
        destinations: Sequence[Destination],
        server: str,
        backup_id: str,
        *,
        parents: Sequence[str] = (),
        clock: Clock = utc_now,
        interval: float = HEARTBEAT,
    ) -> None:
        super().__init__(
            destinations,
            layout.intent_key(backup_id),
            [(server, backup_id)],
            parents=parents,
            clock=clock,
            interval=interval,
        )
        self._server = server
        self._places = tuple(destinations)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._assert_parents()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def assert_held(self) -> None:
        """Raises what ``Holder.assert_held`` does, and RefusedError when something that the backup builds on is gone or
        marked."""
        super().assert_held()
        self._assert_parents()

    def _assert_parents(self) -> None:
        gone = [
            f"{name} at destination {destination.name} {trouble}"
            for destination in self._places
            for name in self.lease.parents
            if (trouble := _trouble(destination, self._server, name))
        ]
        if gone:
            raise RefusedError(
                "a backup that this one builds on was deleted meanwhile",
                detail="\n".join(gone),
                hint="run the backup again: it will be a full one",
            )


def _trouble(destination: Destination, server: str, backup_id: str) -> str:
    if is_marked(destination, server, backup_id):
        return "is marked deleted"
    return "" if exists(destination, layout.manifest_key(server, backup_id)) else "has no manifest"


def intents(destination: Destination) -> list[Lease]:
    """Every intent at ``destination``, living or dead."""
    return leases(destination, layout.INTENTS)
