"""What every use case stands on: settings, catalog, destinations, keys. Opened once, closed once."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from backupd.app.settings import ServerSettings, Settings
from backupd.catalog.session import Catalog
from backupd.model.clock import Clock
from backupd.model.errors import KeyUnusableError, RefusedError
from backupd.process.runtime import runtime_directory
from backupd.transfer.identity import identity_key
from backupd.transfer.keyring import KeyInfo, resolve_recipients
from backupd.transfer.lease import Owner
from backupd.transfer.unseal import Unsealer
from storage.config import FilesystemConfig
from storage.destination import Destination
from storage.registry import open_destination

GRACE = timedelta(days=1)
"""How long a deleted backup can be undeleted."""


def utc_now() -> datetime:
    return datetime.now(UTC)


def owner() -> str:
    """This process, as jobs name the one that runs them: ``host boot namespace pid start``."""
    here = Owner.current()
    return f"{here.host} {here.boot} {here.namespace} {here.pid} {here.ticks}"


def owner_state(text: str) -> bool | None:
    """Is the process that ``owner`` named still there? None when it cannot be seen from here: another host or
    container."""
    if not text:
        return False
    here = Owner.current()
    host, _, rest = text.partition(" ")
    boot, *fields = rest.split(" ")
    if host != here.host or len(fields) not in (2, 3):
        return None
    if boot != here.boot:
        return False
    if len(fields) == 3 and fields[0] != here.namespace:
        return None
    try:
        stat = Path(f"/proc/{int(fields[-2])}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return False
    return stat[0] not in "ZX" and stat[19] == fields[-1]


def owner_is_alive(text: str) -> bool:
    """As ``owner_state``; what cannot be seen counts as alive."""
    return owner_state(text) is not False


@dataclass(frozen=True)
class Wiring:
    settings: Settings
    catalog: Catalog
    clock: Clock = utc_now

    def destination(self, name: str) -> Destination:
        """Open a configured destination; touches nothing. Raises NotFoundError, RefusedError for another type."""
        config = self.settings.destination(name)
        if not isinstance(config, FilesystemConfig):
            raise RefusedError(f"destination {name} is of type {config.type}, which this version cannot open",
                               hint="use a destination of type filesystem")
        return open_destination(name, config)

    def usable_destinations(self) -> list[Destination]:
        """Every configured destination that can be opened and was initialised."""
        found = [self.destination(name) for name, config in self.settings.destinations.items()
                 if isinstance(config, FilesystemConfig)]
        return [destination for destination in found if destination.is_initialised()]

    def required(self, server: ServerSettings) -> tuple[Destination, ...]:
        """The destinations that must hold each backup of ``server``, initialised where this is the first one.

        Raises RefusedError when one holds backups by the catalog but its folder is bare: most likely it is not mounted.
        """
        opened = []
        for name in server.required:
            destination = self.destination(name)
            if not destination.is_initialised():
                if self.holds_backups(name):
                    raise RefusedError(
                        f"destination {name} should hold backups, but its folder is empty or not a repository",
                        hint="is the file system mounted? To begin anew there, delete the old backups first: "
                             "backupd backups delete ID")
                destination.initialise(self.clock())
            opened.append(destination)
        return tuple(opened)

    def holds_backups(self, destination: str) -> bool:
        """Does the catalog know a copy at ``destination``?"""
        return any(copy.destination == destination for record in self.catalog.backups.list() for copy in record.copies)

    def recipients(self) -> tuple[list[KeyInfo], tuple[str, ...]]:
        """The keys that backups are sealed for: (as found, full fingerprints). Raises KeyUnusableError with all
        problems at once."""
        encryption = self.settings.encryption
        found = resolve_recipients(encryption.gnupg_home, encryption.recipients, now=self.clock())
        problems = [f"{key.name}: {key.problem}" for key in found if key.problem]
        if problems:
            raise KeyUnusableError(
                f"{len(problems)} of {len(found)} encryption keys cannot be used", detail="\n".join(problems),
                hint=f"mend the keyring with gpg --homedir {encryption.gnupg_home}; "
                     "`backupd check` shows the state of every key")
        return found, tuple(key.fingerprint for key in found)

    def unsealer(self) -> Unsealer:
        """Raises ConfigurationError when this machine has no decryption key configured."""
        restore = self.settings.needs_restore()
        return Unsealer(restore.gnupg_home, restore.passphrase_file)

    def identity_key(self) -> bytes:
        return identity_key(self.settings.spool / "identity.key")

    @contextmanager
    def locked(self, what: str, refusal: str | None) -> Iterator[None]:
        """Hold the lock ``what`` of this installation. When somebody else does: RefusedError with ``refusal``, or wait
        where that is None."""
        folder = self.settings.spool / "locks"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = (folder / what).open("w")
        except OSError as error:
            raise RefusedError(f"the spool {self.settings.spool} cannot be used: {error.strerror or error}",
                               hint="make it a writable folder of this user, with room; see spool: in the "
                                    "configuration") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if refusal is None else fcntl.LOCK_NB))
            except BlockingIOError:
                raise RefusedError(refusal or what, hint="wait for it to end, then run the command again") from None
            yield

    def removing(self) -> AbstractContextManager[None]:
        """Only one process of this installation marks, unmarks or sweeps at a time; the others wait."""
        return self.locked("removal", None)

    @contextmanager
    def workdir(self, name: str) -> Iterator[Path]:
        """An empty private folder for a tool's own needs, gone afterwards."""
        path = runtime_directory() / name
        path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path)


def worker_count(limit: int = 3) -> int:
    """Threads that seal or verify: one more than cores, since each waits for gpg and for the disk now and then, but
    bounded, since each holds a sealed part in memory."""
    return min(limit, len(os.sched_getaffinity(0)) + 1)


def names(destinations: Sequence[Destination]) -> str:
    return ", ".join(destination.name for destination in destinations)
