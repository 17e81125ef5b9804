"""What lies at every destination for the day on which nothing else is left: sealed copies of the catalog and of the
configuration, proofs, and ``RECOVER.md``, which needs no key to be read.

Two installations may share a destination: each keeps the newest of its own copies and touches no others. A catalog that
was made after the loss of another keeps that one's copies: what only they know is wanted yet.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from backupd.app.configcopy import configuration_tar
from backupd.app.copycheck import Rotten, Turn, of_server, tell
from backupd.app.copynote import CopyNote
from backupd.app.incidents import Incidents, Pair
from backupd.app.logs import say
from backupd.app.proofkeeping import keep_proofs
from backupd.app.recover import recover_text
from backupd.app.trust import signed_servers, signing
from backupd.app.wiring import Wiring
from backupd.model.errors import (
    BackupdError,
    BusyError,
    DestinationError,
    KeyUnusableError,
    LockedError,
    ObjectMissingError,
    RefusedError,
)
from backupd.model.event import Event, Severity
from backupd.model.ids import new_id
from backupd.process.folders import locked_folder, remove_dead
from backupd.transfer.inventory import backup_ids
from backupd.transfer.manifestio import get_bytes, put_bytes
from backupd.transfer.remove import marks
from backupd.transfer.scrub import Damage
from backupd.transfer.seal import Sealer
from backupd.transfer.signed import SignedDestination
from storage import layout
from storage.destination import Destination, ObjectInfo

KEPT = 24
"""Copies of the catalog, and of the configuration, that each installation keeps at each destination."""
KEPT_OF_EARLIER = 3
"""Copies of each earlier catalog of the installation that are kept once the present one has ``KEPT`` of its own."""
PAUSE = timedelta(hours=1)
"""The least time between two copies of the catalog at one destination."""
SECOND = timedelta(days=1)
"""So long after the first copy of the configuration a second one is put beside it, though nothing has changed."""
COPIES = Pair("copies-failed", "copies-stored")
_FOLDER = "copies-"
_NOTE = "copies.json"


@dataclass(frozen=True, slots=True)
class Copied:
    """What was put at one destination: keys, "" where what is there is still good. ``proofs``: how many; ``problem``:
    why not all of it was; ``damages``: what was read again and found damaged; None where nothing was read."""

    destination: str
    catalog: str = ""
    configuration: str = ""
    recover: bool = False
    proofs: int = 0
    problem: str = ""
    damages: tuple[Damage, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        return {"destination": self.destination, "catalog": self.catalog, "configuration": self.configuration,
                "recover": self.recover, "proofs": self.proofs, "problem": self.problem}


def after_job(wiring: Wiring, *, turn: Turn | None = None) -> None:
    """After a backup or a test restore: what is missing at the destinations is put. Never raises for their sake: what
    fails is an event, and is tried again after the next job. ``turn``: what is read again, too."""
    try:
        told = write_copies(wiring, turn=turn)
    except BusyError:
        return  # another job of this moment is at it
    except BackupdError as error:
        say("copies-failed", str(error), level=logging.WARNING)
        return
    incidents = Incidents(wiring.catalog)
    for one in told:
        now = wiring.clock()
        if one.damages is not None:
            tell(wiring, one.destination, one.damages)
        if one.problem:
            say("copies-failed", f"{one.destination}: {one.problem}", level=logging.WARNING)
            incidents.broken(COPIES, Event(
                now, COPIES.broken, Severity.WARNING, "the catalog and the configuration could not be copied to "
                f"destination {one.destination}", subject=one.destination, detail=one.problem,
                hint="backups are not concerned; after the next job it is tried again, or now: backupd catalog copy"))
        else:
            incidents.mended(COPIES, Event(
                now, COPIES.mended, Severity.INFO, "the catalog and the configuration are copied to destination "
                f"{one.destination} again", subject=one.destination))


def read_copies(wiring: Wiring, server: str | None) -> tuple[Damage, ...]:
    """Read again all that was put at the destinations (of proofs those of ``server``); what is damaged is replaced, and
    told. Nothing is read while another process makes copies, or where none could be made."""
    try:
        told = write_copies(wiring, turn=of_server(server), put=False)
    except BackupdError as error:
        say("copies-failed", str(error), level=logging.WARNING)
        return ()
    for one in told:
        if one.damages is not None:
            tell(wiring, one.destination, one.damages)
        if one.problem:
            say("copies-failed", f"{one.destination}: {one.problem}", level=logging.WARNING)
    return tuple(damage for one in told for damage in one.damages or ())


def write_copies(wiring: Wiring, *, now: bool = False, turn: Turn | None = None, put: bool = True,
                 ) -> tuple[Copied, ...]:
    """Bring every destination that can be reached up to date; ``now``: also where the last copy is younger than
    ``PAUSE``. ``turn``: what is read again first, and replaced where it is damaged; with ``put`` False nothing else is.

    A destination that fails is told in the answer. Raises KeyUnusableError, CatalogError, RefusedError for the spool,
    BusyError when another process is at it.
    """
    with wiring.locked("copies", "another process is just copying the catalog to the destinations"):
        usable = wiring.usable_destinations()
        away = [Copied(name, problem=error.message) for name, error in sorted(wiring.unreachable().items())]
        spool = wiring.settings.spool
        try:
            remove_dead(spool, _FOLDER)
            with locked_folder(spool / f"{_FOLDER}{new_id(wiring.clock())}", mode=0o700) as folder:
                writer = _Writer(wiring, folder, now=now, turn=turn, sources=usable)
                return (*(writer.write(destination, put=put) for destination in usable), *away)
        except OSError as error:
            raise RefusedError(f"the spool {spool} cannot be used: {error.strerror or error}",
                               hint="make room there; copies of the catalog are made in it") from error


class _Writer:
    """Seals each thing once, when the first destination wants it."""

    def __init__(self, wiring: Wiring, folder: Path, *, now: bool, turn: Turn | None,
                 sources: Sequence[Destination]) -> None:
        self._wiring, self._folder, self._now = wiring, folder, now
        self._turn, self._sources = turn, sources
        self._at = wiring.clock()
        self._installation = hashlib.sha256(wiring.identity_key()).hexdigest()[:12]
        self._maker = f"{self._installation}-{wiring.catalog.identity()}"
        _keys, self._recipients = wiring.recipients()
        encryption = wiring.settings.encryption
        self._sealer = Sealer(self._recipients, encryption.gnupg_home, level=encryption.compression_level)
        self._signed = signed_servers(wiring.settings)
        self._signing = signing(wiring.settings) if self._signed else None
        self._note = CopyNote(wiring.settings.spool / _NOTE)
        self._made: dict[str, tuple[Path, str]] = {}

    def write(self, destination: Destination, *, put: bool) -> Copied:
        catalog = configuration = ""
        recover = False
        proofs: frozenset[str] = frozenset()
        damages: tuple[Damage, ...] | None = None
        try:
            found = Rotten(self._wiring, destination, self._note)
            if self._turn is not None:
                found.find(self._turn, self._sources, self._folder)
                damages = found.damages
            if put or found.keys:
                proofs = keep_proofs(self._wiring, destination, self._sealer, found.keys)
                configuration = self._put(destination, layout.CONFIGURATIONS, self._installation,
                                          layout.configuration_key(self._at, self._installation), found.keys)
                catalog = self._put(destination, layout.CATALOGS, self._maker,
                                    layout.catalog_key(self._at, self._maker), found.keys)
                if catalog or configuration or self._now or self._turn is not None:
                    recover = self._put_text(destination)
                found.settle(proofs)
            damages = found.damages if self._turn is not None else None
        except (DestinationError, KeyUnusableError) as error:
            return Copied(destination.name, catalog, configuration, recover, len(proofs), str(error), damages)
        return Copied(destination.name, catalog, configuration, recover, len(proofs), "", damages)

    def _put(self, destination: Destination, folder: str, maker: str, key: str, rotten: Collection[str]) -> str:
        stored = self._note.stored(destination.name)
        there = own_copies(destination, folder, maker)
        # Anybody can put something under such a name; what is not known here neither counts nor pushes anything out.
        ours = [info for info in there if info.key in stored and info.key not in rotten]
        last = layout.copy_of(ours[-1].key) if ours else None
        if folder == layout.CATALOGS and last and not self._now and timedelta() <= self._at - last[0] < PAUSE:
            return ""
        plain, digest = self._plain(folder)
        alone = folder == layout.CONFIGURATIONS and len(ours) == 1
        if (last and self._note.get(destination.name, folder) == digest
                and not _lacks_signature(destination, ours[-1]) and not (alone and self._at - last[0] >= SECOND)):
            return ""
        sealed = self._sealed(plain)
        with sealed.open("rb") as stream:
            destination.put(key, stream)
        with sealed.open("rb") as content:
            self._note.set(destination.name, key, hashlib.file_digest(content, "sha256").hexdigest())
        self._note.set(destination.name, folder, digest)
        self._prune(destination, ours, KEPT - 1)
        self._prune(destination, [info for info in there if info.key not in stored and info.key != key],
                    KEPT_OF_EARLIER if len(ours) + 1 >= KEPT else KEPT - 1)
        if folder == layout.CATALOGS and len(ours) + 1 >= KEPT:
            self._prune_earlier(destination)
        return key

    def _plain(self, folder: str) -> tuple[Path, str]:
        """What is to be copied there, and its digest."""
        if folder not in self._made:
            file = self._folder / folder.strip("/")
            if folder == layout.CATALOGS:
                self._wiring.catalog.write_snapshot(file)
            else:
                file.write_bytes(configuration_tar(self._wiring.settings, self._recipients))
            with file.open("rb") as content:
                self._made[folder] = (file, hashlib.file_digest(content, "sha256").hexdigest())
        return self._made[folder]

    def _sealed(self, plain: Path) -> Path:
        sealed = plain.with_suffix(layout.SEALED)
        if not sealed.exists():
            self._sealer.seal_file(plain, sealed)
        return sealed

    def _prune_earlier(self, destination: Destination) -> None:
        infos = own_copies(destination, layout.CATALOGS)
        makers = {copy[1] for info in infos if (copy := layout.copy_of(info.key)) is not None}
        for maker in sorted(makers - {self._maker}):
            if maker.startswith(self._installation):
                self._prune(destination, own_copies(destination, layout.CATALOGS, maker), KEPT_OF_EARLIER)

    def _prune(self, destination: Destination, copies: Sequence[ObjectInfo], keep: int) -> None:
        for info in copies[:max(0, len(copies) - keep)]:
            try:
                destination.delete(info.key)
            except LockedError:
                return  # a rule of the place keeps it for now; a later copy tries again
            self._note.forget(destination.name, info.key)

    def _put_text(self, destination: Destination) -> bool:
        text = recover_text(destination.name, self._wiring.settings.destination(destination.name), newest(destination),
                            recipients=self._recipients, signing=self._signing, signed=self._signed).encode()
        try:
            if get_bytes(destination, layout.RECOVER) == text:
                return False
        except ObjectMissingError:
            pass
        put_bytes(destination, layout.RECOVER, text)
        return True


def own_copies(destination: Destination, folder: str, maker: str | None = None) -> list[ObjectInfo]:
    """Copies below ``folder`` (of one ``maker``, see ``layout.copy_of``), oldest first."""
    found = [(copy, info) for info in destination.list(folder) if (copy := layout.copy_of(info.key)) is not None]
    return [info for copy, info in sorted(found, key=lambda item: item[0])
            if maker is None or copy[1] == maker]


def _lacks_signature(destination: Destination, info: ObjectInfo) -> bool:
    return isinstance(destination, SignedDestination) and destination.unsigned(info.key)


def newest(destination: Destination) -> dict[str, str]:
    """Of each server that has backups there, the newest that is not marked deleted."""
    dying = marks(destination)
    return {server: backup_id for server, backup_id in backup_ids(destination) if (server, backup_id) not in dying}
