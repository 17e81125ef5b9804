"""What every destination holds for the day on which nothing else is left: sealed copies of the catalog and of the
configuration, proofs and witnesses, and ``RECOVER.md``, which needs no key to be read.

Two installations may share a destination: each keeps the newest of its own copies and touches no others. A catalog
that was made after the loss of another keeps the copies of that one: it may need what only they know. Proofs and
witnesses are stored beside the backups that they are about and outlive the catalog. Whatever is missing is put, so it
does not matter when this was last done. What a catalog does not know may be what it has lost: only what is stored
counts.
"""

from __future__ import annotations

import hashlib
import io
import logging
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from backupd.alerts.conditions import Key
from backupd.alerts.rules import COPIES
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import Settings, spool_unusable
from backupd.app.context.trust import signed_servers
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies.copy_check import COPY_NOTE, HERE, CopyNote, DamagedCopies, Turn, of_server, report
from backupd.app.metacopies.recover_document import Kind, text_of, text_problem
from backupd.app.metacopies.signed_heads import renew_or_log
from backupd.model.document import HIDDEN, Document
from backupd.model.errors import (
    BackupdError,
    BusyError,
    DamagedError,
    DestinationError,
    KeyUnusableError,
    LockedError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
)
from backupd.model.event import Severity
from backupd.model.text import new_id
from backupd.process.folders import locked_folder, remove_dead
from backupd.transfer.records import proofs as proofdoc
from backupd.transfer.records.authenticity import SignedDestination
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.keyring import public_keys
from backupd.transfer.records.manifests import backup_ids, get_bytes, put_bytes
from backupd.transfer.records.proofs import Kept, KeptWitness
from backupd.transfer.scrub_and_repair import Damage
from policies.fields import SUFFIX
from storage import layout
from storage.destination import Destination, ObjectInfo, marker_problem

CONFIGURATION = "backupd.yaml"
SERVERS = "servers.d/"
POLICIES = "policies/"
KEYS = "public-keys.asc"
KEPT = 24
"""Copies of the catalog, and of the configuration, that each installation keeps at each destination."""
KEPT_OF_EARLIER = 3
"""Copies of each earlier catalog of the installation that are kept once the present one has ``KEPT`` copies."""
PAUSE = timedelta(hours=1)
"""The least time between two copies of the catalog at one destination."""
WAIT = 60.0
"""Seconds that a job waits for another one that is just copying, so that RECOVER.md covers both."""
SECOND = timedelta(days=1)
"""So long after the first copy of the configuration a second one is put beside it, though nothing has changed."""
PROOFS_KEPT = timedelta(days=400)
"""For so long, at least, a proof outlives its backup at a destination."""
_FOLDER = "copies-"


@dataclass(frozen=True, slots=True)
class Copied(Document):
    """What was put at one destination: keys, "" where what is there is still good. ``proofs``: how many; ``problem``:
    why not all of it was; ``damages``: what was read again and found damaged; None where nothing was read."""

    destination: str
    catalog: str = ""
    configuration: str = ""
    recover: bool = False
    proofs: int = 0
    problem: str = ""
    damages: tuple[Damage, ...] | None = field(default=None, metadata=HIDDEN)


def after_job(wiring: Wiring, *, turn: Turn | None = None) -> None:
    """After a backup or a test restore: what is missing at the destinations is put. Never raises for their sake: what
    fails is an event, and is tried again after the next job. ``turn``: what is read again, too."""
    renew_or_log(wiring)
    try:
        copied = write_copies(wiring, turn=turn, wait=WAIT)
    except BusyError:
        say(
            "copies-failed",
            "catalog copy skipped after this job: another process has held the copy lock for 1 minute. The next job "
            "copies the catalog",
            level=logging.WARNING,
        )
        return
    except BackupdError as error:
        say("copies-failed", str(error), level=logging.WARNING)
        return
    _report(wiring, copied)
    for one in copied:
        key = Key(COPIES, subject=one.destination)
        if one.problem:
            wiring.alert(
                key,
                Severity.WARNING,
                f"the catalog and the configuration could not be copied to destination {one.destination}",
                detail=one.problem,
                hint="backups are not affected; backupd retries after the next job; to retry now: backupd catalog copy",
            )
        else:
            well = f"the catalog and the configuration are copied to destination {one.destination} again"
            wiring.settle(looked={key: well})


def _report(wiring: Wiring, copied: Iterable[Copied]) -> None:
    for one in copied:
        if one.damages is not None:
            report(wiring, one.destination, one.damages)
        if one.problem:
            say("copies-failed", f"{one.destination}: {one.problem}", level=logging.WARNING)


def read_copies(wiring: Wiring, server: str | None, *, whole: bool = True) -> tuple[Damage, ...]:
    """Read again all that was put at the destinations (of proofs those of ``server``), without ``whole`` RECOVER.md
    alone; what is damaged or stale is replaced, and reported. Nothing is read while another process makes copies, or
    where none could be made."""
    try:
        copied = write_copies(wiring, turn=of_server(server) if whole else lambda _key: False, put=False)
    except BackupdError as error:
        say("copies-failed", str(error), level=logging.WARNING)
        return ()
    _report(wiring, copied)
    return tuple(damage for one in copied for damage in one.damages or ())


def write_copies(
    wiring: Wiring, *, now: bool = False, turn: Turn | None = None, put: bool = True, wait: float = 0.0
) -> tuple[Copied, ...]:
    """Bring every destination that can be reached up to date; ``now``: also where the last copy is younger than
    ``PAUSE``. ``turn``: what is read again first, and replaced where it is damaged; with ``put`` False nothing else
    is. ``wait``: seconds for another process that makes copies.

    A destination that fails is reported in the result. Raises KeyUnusableError, CatalogError, RefusedError for the
    spool, BusyError when another process makes copies.
    """
    with wiring.locked("copies", "another process is already copying the catalog to the destinations", wait=wait):
        usable = wiring.usable_destinations()
        away = [Copied(name, problem=error.message) for name, error in sorted(wiring.unreachable().items())]
        spool = wiring.settings.spool
        try:
            remove_dead(spool, _FOLDER)
            with locked_folder(spool / f"{_FOLDER}{new_id(wiring.clock())}", mode=0o700) as folder:
                writer = _Writer(wiring, folder, now=now, turn=turn, sources=usable)
                return (*(writer.write(destination, put=put) for destination in usable), *away)
        except OSError as error:
            raise spool_unusable(spool, error, "make room there; copies of the catalog are made in it") from error


class _Writer:
    """Seals each thing once, when the first destination wants it."""

    def __init__(
        self, wiring: Wiring, folder: Path, *, now: bool, turn: Turn | None, sources: Sequence[Destination]
    ) -> None:
        self._wiring, self._folder, self._now = wiring, folder, now
        self._turn, self._sources = turn, sources
        self._at = wiring.clock()
        self._installation = hashlib.sha256(wiring.identity_key()).hexdigest()[:12]
        self._maker = f"{self._installation}-{wiring.catalog.identity()}"
        _keys, self._recipients = wiring.recipients()
        encryption = wiring.settings.encryption
        self._sealer = Sealer(self._recipients, encryption.gnupg_home, level=encryption.compression_level)
        self._note = CopyNote(wiring.settings.spool / COPY_NOTE)
        self._made: dict[str, tuple[Path, str]] = {}

    def write(self, destination: Destination, *, put: bool) -> Copied:
        catalog = configuration = failure = ""
        recover = False
        proofs: frozenset[str] = frozenset()
        damages: tuple[Damage, ...] | None = None
        texts: tuple[Damage, ...] = ()
        try:
            found = DamagedCopies(self._wiring, destination, self._note)
            if self._turn is not None:
                found.find(self._turn, self._sources, self._folder)
                damages = found.damages
                if not put:
                    texts = self._mended_text(destination)
            if put or found.keys:
                proofs = keep_proofs(self._wiring, destination, self._sealer, found.keys)
                configuration = self._put(
                    destination,
                    layout.CONFIGURATIONS,
                    self._installation,
                    layout.configuration_key(self._at, self._installation),
                    found.keys,
                )
                catalog = self._put(
                    destination, layout.CATALOGS, self._maker, layout.catalog_key(self._at, self._maker), found.keys
                )
                found.settle(proofs)
            if put:
                recover = self._put_text(destination)
                self._note_marker(destination)
            damages = (*found.damages, *texts) if self._turn is not None else None
        except (DestinationError, KeyUnusableError) as error:
            failure = str(error)
        return Copied(destination.name, catalog, configuration, recover, len(proofs), failure, damages)

    def _put(self, destination: Destination, folder: str, maker: str, key: str, damaged: Collection[str]) -> str:
        stored = self._note.stored(destination.name)
        there = own_copies(destination, folder, maker)
        # Anybody can put something under such a name; what is not known here neither counts nor pushes anything out.
        ours = [info for info in there if info.key in stored and info.key not in damaged]
        last = layout.copy_of(ours[-1].key) if ours else None
        if folder == layout.CATALOGS and last and not self._now and timedelta() <= self._at - last[0] < PAUSE:
            return ""
        plain, digest = self._plain(folder)
        alone = folder == layout.CONFIGURATIONS and len(ours) == 1
        if (
            last
            and self._note.get(destination.name, folder) == digest
            and not _lacks_signature(destination, ours[-1])
            and not (alone and self._at - last[0] >= SECOND)
        ):
            return ""
        sealed = self._sealed(plain)
        with sealed.open("rb") as stream:
            destination.put(key, stream)
        with sealed.open("rb") as content:
            self._note.set(destination.name, key, hashlib.file_digest(content, "sha256").hexdigest())
        self._note.set(destination.name, folder, digest)
        self._prune(destination, ours, KEPT - 1)
        self._prune(
            destination,
            [info for info in there if info.key not in stored and info.key != key],
            KEPT_OF_EARLIER if len(ours) + 1 >= KEPT else KEPT - 1,
        )
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
        for info in copies[: max(0, len(copies) - keep)]:
            try:
                destination.delete(info.key)
            except LockedError:
                return  # a rule of the destination keeps it for now; a later copy tries again
            self._note.forget(destination.name, info.key)

    def _put_text(self, destination: Destination) -> bool:
        text = text_of(self._wiring, destination, self._recipients)
        digest = hashlib.sha256(text).hexdigest()
        try:
            if get_bytes(destination, layout.RECOVER) == text and not _lacks_text_signature(destination, text):
                if self._note.get(destination.name, layout.RECOVER) != digest:
                    self._note.set(destination.name, layout.RECOVER, digest)
                return False
        except (ObjectMissingError, DamagedError):  # the latter of one that is longer than any text of ours
            pass
        if isinstance(destination, SignedDestination):
            destination.sign(layout.RECOVER, text)  # which nobody but a person reads, with the page in the hand
        put_bytes(destination, layout.RECOVER, text)
        self._note.set(destination.name, layout.RECOVER, digest)
        return True

    def _mended_text(self, destination: Destination) -> tuple[Damage, ...]:
        problem = text_problem(self._wiring, destination, self._note, self._recipients)
        if problem is None:
            return ()
        self._put_text(destination)
        aged = problem.kind in (Kind.STALE, Kind.UNKNOWN)
        return (Damage(destination.name, layout.RECOVER, problem.text, repaired_from=HERE, aged=aged),)

    def _note_marker(self, destination: Destination) -> None:
        """Note the marker of the destination, so that it is recognised later."""
        try:
            marker = get_bytes(destination, layout.REPOSITORY)
        except ObjectMissingError:
            return  # a destination that needs none
        before = self._note.marker(destination.name)
        if marker != before and not marker_problem(marker, before):
            self._note.set(destination.name, layout.REPOSITORY, marker.decode())


def own_copies(destination: Destination, folder: str, maker: str | None = None) -> list[ObjectInfo]:
    """Copies below ``folder`` (of one ``maker``, see ``layout.copy_of``), oldest first."""
    found = [(copy, info) for info in destination.list(folder) if (copy := layout.copy_of(info.key)) is not None]
    return [info for copy, info in sorted(found, key=lambda item: item[0]) if maker is None or copy[1] == maker]


def _lacks_text_signature(destination: Destination, text: bytes) -> bool:
    return isinstance(destination, SignedDestination) and bool(destination.problem(layout.RECOVER, text))


def _lacks_signature(destination: Destination, info: ObjectInfo) -> bool:
    return isinstance(destination, SignedDestination) and destination.unsigned(info.key)


def configuration_tar(settings: Settings, recipients: Sequence[str]) -> bytes:
    """The configuration as one file: what the operator wrote, the files of servers, the policies, and the public keys;
    the same bytes as long as nothing has changed. It holds no secret, since none may be in these files. Raises
    RefusedError for a file that cannot be read, ToolError."""
    encryption = settings.encryption
    signers = [*([encryption.signing_key] if encryption.signing_key else []), *encryption.trusted_signers]
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in (*_files(settings), (KEYS, public_keys(encryption.gnupg_home, [*recipients, *signers]))):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o600
            tar.addfile(member, io.BytesIO(content))
    return output.getvalue()


def _files(settings: Settings) -> Iterator[tuple[str, bytes]]:
    path = settings.file
    try:
        yield CONFIGURATION, path.read_bytes()
        path = folder = settings.configuration.servers_folder
        if settings.files or folder.exists():
            for path in sorted(folder.iterdir()):
                if path.suffix == SUFFIX and not path.name.startswith("."):
                    yield SERVERS + path.name, path.read_bytes()
        path = folder = settings.configuration.policies
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            yield POLICIES + path.name, path.read_bytes()
    except OSError as error:
        raise RefusedError(
            f"{path} cannot be copied to the destinations: {error.strerror or error}",
            hint="this user must be able to read the configuration, its files of servers and its policies",
        ) from error


# -- proofs


def keep_proofs(
    wiring: Wiring, destination: Destination, sealer: Sealer, damaged: Collection[str] = ()
) -> frozenset[str]:
    """Put what the catalog knows and ``destination`` lacks, or has without the signature that it needs, of configured
    servers, and take away what the catalog has forgotten, once it is ``PROOFS_KEPT`` old and older than every backup of
    its server there. What is ``damaged`` (keys), or of which nobody knows what was stored, is put again. Keys of what
    was put. Raises DestinationError."""
    done: set[str] = set()
    signed = signed_servers(wiring.settings)
    deposits = wiring.catalog.deposits
    recorded = deposits.at(destination.name).keys() - set(damaged)
    for server in wiring.settings.servers:
        stored = {proof_id for _server, proof_id in proofdoc.listed(destination, server)}
        proofs = {proof.id: proof for proof in wiring.catalog.proofs.list(server)}
        witnesses = wiring.catalog.witnesses.ids(server)
        known = {*proofs, *witnesses}
        good = stored - proofdoc.unsigned(destination, server) if server in signed else stored
        good = {proof_id for proof_id in good if layout.proof_key(server, proof_id) in recorded}
        for kept in _missing(wiring, proofs, witnesses, good):
            key = layout.proof_key(kept.server, kept.id)
            deposits.put(destination.name, key, proofdoc.put(destination, kept, sealer))
            done.add(key)
        if stored - known:
            _forget(wiring, destination, server, stored - known)
    return frozenset(done)


def _missing(
    wiring: Wiring, proofs: Mapping[str, Kept], witnesses: tuple[str, ...], stored: set[str]
) -> Iterator[Kept]:
    yield from (proof for proof_id, proof in proofs.items() if proof_id not in stored)
    for witness_id in witnesses:
        if witness_id in stored:
            continue
        try:
            yield KeptWitness(
                witness_id, wiring.catalog.witnesses.get(witness_id), wiring.catalog.witnesses.backup_of(witness_id)
            )
        except NotFoundError:
            continue  # forgotten meanwhile


def _forget(wiring: Wiring, destination: Destination, server: str, unknown: set[str]) -> None:
    """A proof is younger than its backup: one that is older than all that are there is of one that is not. Where there
    are none at all, something else has happened than that they became old."""
    oldest = min((backup_id for _server, backup_id in backup_ids(destination, server)), default="")
    limit = min(oldest, f"{wiring.clock() - PROOFS_KEPT:%Y%m%dT%H%M%SZ}")
    for proof_id in sorted(unknown):
        if proof_id < limit:  # ids begin with their time
            try:
                proofdoc.remove(destination, server, proof_id)
                wiring.catalog.deposits.forget(destination.name, [layout.proof_key(server, proof_id)])
            except LockedError:
                return  # a rule of the destination keeps it for now, and what is younger even longer
