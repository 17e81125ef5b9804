"""The key that signs what is stored: making the first one, replacing one that was stolen or
lost, and signing what is stored already (vouching).

Signatures do not show when they were made, for whoever has a key dates them as he likes. So a former key counts for
nothing any more, however old a document says that it is: all that this installation knows as its own is signed anew.
That is done twice. Before the configuration is changed the new signatures are put beside the former ones, so that the
running service and its restores believe all of it throughout; after it, what was signed with the former key meanwhile,
and then a head that says up to which counter that key counted.

What proves a manifest is its digest in the catalog, which the run that made the backup wrote there. A row that was made
from what a destination holds (a rebuild, an adoption) proves nothing about that destination, and of binary logs and
branches the catalog holds no digest: those are signed only for somebody who says so, or where the former key vouches
for them, and only where they agree with all that the catalog knows and with what is stored there.
"""

from __future__ import annotations

import hashlib
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar

from backupd.app.context.settings import Settings
from backupd.app.context.trust import prove_signing, signing, undecided, wanting
from backupd.app.context.wiring import Wiring, is_bare
from backupd.app.metacopies import signed_heads as heads
from backupd.app.metacopies.catalog_copies import write_copies
from backupd.app.metacopies.copy_check import COPY_NOTE, CopyNote
from backupd.model.backup_record import EVERY_SERVER, BackupRecord
from backupd.model.binlog import Branch, SegmentKey
from backupd.model.document import Document, computed, json_key
from backupd.model.errors import (
    BackupdError,
    DestinationError,
    ObjectMissingError,
    RefusedError,
    TamperedError,
    UsageError,
)
from backupd.model.event import Severity
from backupd.model.manifest import Header, decode_header
from backupd.model.text import Clock, format_time
from backupd.transfer import log_segments
from backupd.transfer.dedup import Presence
from backupd.transfer.holds_and_locks import each
from backupd.transfer.records.authenticity import Retired, SignedDestination, Signing, make_key, problem_of
from backupd.transfer.records.encryption import Unsealer
from backupd.transfer.records.manifests import backup_ids, load_body
from backupd.transfer.records.segment_documents import decode_branch, decode_segment
from storage import layout, objects

ROTATED = "signing-key-rotated"
_PRINT = "print a new recovery page and destroy the old one, which names the retired key: backupd keys page"
_RELOAD = "on the host of the service: systemctl reload backupd"
_STOP = (
    "on the host of the service: systemctl stop backupd (from the next step on, backupd rejects stored documents "
    "until they are signed)"
)
_START = "start the service again: systemctl start backupd"
_LOGS = (
    "the catalog holds no digests of archived binary logs. If you are certain that nobody else could write to the "
    "destination, sign them with --unproven; otherwise they stay unusable and backupd does not copy later logs to "
    "other destinations"
)
_FINGERPRINT = re.compile(r"[0-9A-F]{40}|[0-9A-F]{64}")
_BATCH = 256
_IN_BOTH = (
    "server",
    "parent",
    "started_at",
    "finished_at",
    "stats",
    "from_lsn",
    "to_lsn",
    "server_uuid",
    "reason",
    "table_set",
    "tables_missing",
)
"""What a manifest says of its backup, and its row in the catalog, too."""
_OTHERWISE = "it matches the catalog, but the catalog holds no digest of it; to sign it anyway, add --unproven"
_FOUND = (
    "the catalog imported it from a destination, where a holder of the former key could have stored it; to sign it "
    "anyway, add --unproven"
)


@dataclass(frozen=True, slots=True)
class Made(Document):
    """A new key in ``home``; ``steps``: what makes it count, in words."""

    key: str = field(metadata=json_key("signing_key"))
    home: Path = field(metadata=json_key("gnupg_home"))
    steps: tuple[str, ...] = field(metadata=json_key("next"))


def make_signing(wiring: Wiring) -> Made:
    """Raises RefusedError where one is named already, KeyUnusableError, ToolError."""
    settings = wiring.settings
    if (named := settings.encryption.signing_key) is not None:
        raise RefusedError(
            f"{settings.file} names a signing key already: {named}",
            hint="`backupd keys rotate-signing` replaces it",
        )
    key = _new(settings, wiring.clock)
    stored = list(wiring.catalog.backups.destinations_of())
    off = sorted(
        {
            server.policy_name
            for name in settings.servers
            if (server := settings.server(name)).usable and server.policy.signed is False
        }
    )
    return Made(
        key,
        settings.encryption.gnupg_home,
        (
            *([_STOP] if stored else []),
            f"in {settings.file} add the line `signing_key: {key}` under `encryption:`",
            *(f"take `signed: false` out of policy {name}, if its servers are meant, too" for name in off),
            *(f"sign what is stored already: backupd catalog sign {name} ({_LOGS})" for name in stored),
            _START if stored else _RELOAD,
            "print the page that is kept away from the backups: backupd keys page",
        ),
    )


def _new(settings: Settings, clock: Clock) -> str:
    key = make_key(
        settings.encryption.gnupg_home, f"backupd signing {socket.gethostname()} {clock():%Y-%m-%dT%H:%M:%SZ}"
    )
    prove_signing(replace(signing(settings), key=key, trusted=(key,)))
    return key


@dataclass(frozen=True, slots=True)
class Rotation(Document):
    """``former`` gives way to ``key``. ``finished``: the configuration names ``key`` already; then ``retired`` says up
    to which counter of each server's head the former one counted. ``destinations``: what was signed anew at each;
    ``silent``: destinations that did not answer, with why; ``steps``: what is to be done now."""

    former: str
    key: str = field(metadata=json_key("signing_key"))
    finished: bool
    destinations: dict[str, Vouched] = field(metadata=json_key("places"))
    silent: dict[str, str]
    retired: dict[str, Retired]
    steps: tuple[str, ...] = field(metadata=json_key("next"))

    @property
    @computed(after="")
    def ok(self) -> bool:
        """Did every destination answer, and was everything signed there?"""
        return not self.silent and not any(one.left for one in self.destinations.values())


def rotate_signing(
    wiring: Wiring, *, to: str | None = None, former: str | None = None, unproven: bool = False
) -> Rotation:
    """Without ``former``: make a key, or take ``to``, and put its signatures beside those of the configured one. With
    it: the configuration names the new key, and ``former`` counts for nothing from now on.

    ``unproven``: also what the catalog has from a destination, and the former key vouches for. A destination that does
    not answer keeps nobody from the others. Raises RefusedError, UsageError, KeyUnusableError, CatalogError.
    """
    settings = wiring.settings
    named = settings.encryption.signing_key
    if named is None:
        raise RefusedError(
            "no signing key is named, so none can be replaced", hint="`backupd keys make-signing` makes the first one"
        )
    if not wanting(settings):
        raise RefusedError(
            "no policy is `signed`, so nothing was signed with it",
            hint=f"change encryption.signing_key in {settings.file}, or take `signed: false` out of the policies",
        )
    if is_bare(wiring.catalog):
        raise RefusedError(
            f"the catalog {wiring.catalog.name} holds no backups: backupd cannot distinguish its own documents from "
            "forged ones",
            hint="rebuild it first, while the configuration still names the former key: backupd catalog rebuild "
            "--from DESTINATION",
        )
    if former is not None:
        return _finish(wiring, _fingerprint(former), unproven)
    key = _fingerprint(to) if to is not None else _new(settings, wiring.clock)
    if key == named:
        raise RefusedError(
            f"{key} signs already",
            hint="name the key that it replaced: backupd keys rotate-signing --from FINGERPRINT",
        )
    prove_signing(replace(signing(settings), key=key, trusted=(key,)))
    signed, silent = _sign_anew(_by(wiring, key, without=named), named, unproven)
    trusted = ", and take that out of `trusted_signers`" if named in settings.encryption.trusted_signers else ""
    return Rotation(
        named,
        key,
        False,
        signed,
        silent,
        {},
        (
            f"in {settings.file} write `signing_key: {key}` instead of {named}{trusted}",
            _RELOAD,
            f"then finish it, so that the former key is no longer trusted: backupd keys rotate-signing --from {named}",
        ),
    )


def _finish(wiring: Wiring, former: str, unproven: bool) -> Rotation:
    settings = wiring.settings
    ours = signing(settings)
    key = ours.key or ""
    if former == key:
        raise RefusedError(
            f"{former} is still the key that signs",
            hint=f"name the new one as encryption.signing_key in {settings.file} first; "
            "`backupd keys rotate-signing` makes one",
        )
    if former in ours.trusted:
        raise RefusedError(
            f"{former} is still trusted: encryption.trusted_signers names it",
            hint=f"remove it there, in {settings.file}, then reload the service: systemctl reload backupd",
        )
    prove_signing(replace(signing(settings), key=key, trusted=(key,)))
    signed, silent = _sign_anew(wiring, former, unproven)
    retired = heads.retire(wiring, former)
    if all(event.detail != former for event in wiring.catalog.events.list(kind=ROTATED)):
        signs = f"{key} signs now; documents signed only with {former} are no longer trusted"
        wiring.note(ROTATED, Severity.WARNING, signs, subject=key, detail=former, hint=_PRINT)
    for one in write_copies(wiring, now=True):
        if one.problem:
            silent.setdefault(one.destination, one.problem)
    done = Rotation(former, key, True, signed, silent, retired, (_PRINT,))
    again = f"after the problems above are resolved: backupd keys rotate-signing --from {former}"
    return done if done.ok else replace(done, steps=(again, *done.steps))


def _by(wiring: Wiring, key: str, *, without: str) -> Wiring:
    """The same installation as one whose configuration names ``key`` instead of ``without``."""
    settings = wiring.settings
    encryption = settings.encryption.model_copy(
        update={
            "signing_key": key,
            "trusted_signers": tuple(one for one in settings.encryption.trusted_signers if one != without),
        }
    )
    configuration = settings.configuration.model_copy(update={"encryption": encryption})
    return Wiring(replace(settings, configuration=configuration), wiring.catalog, wiring.clock)


def _sign_anew(wiring: Wiring, former: str, unproven: bool) -> tuple[dict[str, Vouched], dict[str, str]]:
    """At every destination: what was signed, and which do not answer."""
    ours = signing(wiring.settings)
    believing = Signing(ours.home, None, (former,))
    silent = {name: error.message for name, error in wiring.unreachable().items()}
    usable = wiring.usable_destinations()
    for name in set(wiring.settings.destinations) - {destination.name for destination in usable}:
        if wiring.holds_backups(name):
            silent.setdefault(name, "its folder is empty or no repository: is its file system mounted?")
    signed = {}
    for destination in usable:
        try:
            signed[destination.name] = vouch(wiring, destination.name, unproven=unproven, former=believing)
            if isinstance(destination, SignedDestination):
                heads.countersign(wiring, destination)
        except DestinationError as error:
            silent[destination.name] = error.message
    return signed, silent


def _fingerprint(text: str) -> str:
    found = text.replace(" ", "").upper().removeprefix("0X")
    if not _FINGERPRINT.fullmatch(found):
        raise UsageError(f"{text} is not the fingerprint of a key", hint="it has 40 or 64 hex digits: gpg --list-keys")
    return found


def replaced(wiring: Wiring) -> tuple[str, ...]:
    """Lines of the recovery page about keys that count for nothing any more."""
    return tuple(
        f"{event.detail} until {format_time(event.at)}"
        for event in wiring.catalog.events.list(kind=ROTATED)
        if event.subject == wiring.settings.encryption.signing_key
    )


# -- vouching


@dataclass(frozen=True, slots=True)
class Vouched(Document):
    """``signed``: how many documents were; ``left``: those that were not, each with why."""

    signed: int
    left: tuple[str, ...]


def vouch(wiring: Wiring, name: str, *, unproven: bool = False, former: Signing | None = None) -> Vouched:
    """Sign what is unsigned at destination ``name`` and is, byte by byte, what the runs of this catalog stored; for
    backups that are older than `signed: true`. ``unproven``: also what merely agrees with all that the catalog
    knows.

    ``former`` believes the key that signed until now. With it all is signed that the signing key of ``wiring`` does not
    vouch for, with copies and proofs. Signatures that are there stay beside the new ones, so that whoever still goes by
    that key believes all of it, too.

    Raises RefusedError where no policy wants anything signed, KeyUnusableError, DestinationError.
    """
    allowed = _Allowed(unproven, former)
    destination = wiring.destination(name)
    if not isinstance(destination, SignedDestination):
        raise RefusedError(
            "no policy sets `signed: true`, so nothing needs a signature",
            hint="set it in the policy of a server first, or name a signing key: backupd keys make-signing",
        )
    left = [
        f"{name}: nothing of {server} is signed: its policy cannot be used; correct it first"
        for server in sorted(undecided(wiring.settings))
    ]

    def look(found: tuple[str, _Judge]) -> str | None:
        return _look(destination, *found, keeps=allowed.former is not None)

    count = 0
    documents = _documents(wiring, destination, allowed)
    while batch := list(islice(documents, _BATCH)):
        answers = each(look, batch)
        count += answers.count("")
        left += [f"{name}: {key}: {why}" for (key, _judge), why in zip(batch, answers, strict=True) if why]
    return Vouched(count, tuple(left))


@dataclass(frozen=True, slots=True)
class _Allowed:
    """What may be signed that the catalog has no digest of: see ``vouch``."""

    unproven: bool
    former: Signing | None = None

    def why_not(self, document: bytes, signature: bytes | None, *, found: bool = False) -> str:
        """Of what agrees with the catalog. ``found``: because the catalog has it from a destination."""
        if self.former is not None and signature is not None:
            if problem := problem_of(self.former, document, signature):
                return f"{problem}, and the catalog holds no digest of it"
            return _FOUND if found and not self.unproven else ""
        if signature is not None:
            return "it has an untrusted signature, and the catalog holds no digest of it"
        return "" if self.unproven else _OTHERWISE


def _look(destination: SignedDestination, key: str, judge: _Judge, *, keeps: bool) -> str | None:
    """Sign the object ``key`` where that may be; why it may not be, "" where it was, None where nothing is to do.
    ``keeps``: existing signatures stay."""
    try:
        document = destination.as_it_lies(key)
        doubt = destination.doubt(key, document)
    except ObjectMissingError:
        return None  # removed while we look
    except TamperedError as error:
        return f"it differs from what the backup run stored, or from what was imported: {error.detail}"
    if not doubt:
        return None
    signature = destination.signature(key)
    try:
        why = judge.why_not(document, signature)
    except BackupdError as error:
        return str(error.detail or error.message)
    if not why:
        destination.sign(key, document, beside=signature if keeps else None)
    return why


def _documents(wiring: Wiring, destination: SignedDestination, allowed: _Allowed) -> Iterator[tuple[str, _Judge]]:
    servers = sorted(wanting(wiring.settings))
    for server in servers:
        yield from _of_server(wiring, destination, server, allowed)
    if allowed.former is not None:  # else what lacks a signature is put anew
        stored = {
            **CopyNote(wiring.settings.spool / COPY_NOTE).stored(destination.name),
            **wiring.catalog.deposits.at(destination.name),
        }
        for key, digest in sorted(stored.items()):
            if layout.signed_of(key) in (EVERY_SERVER, *servers):
                yield key, _Stored(destination, allowed, digest)


def _of_server(
    wiring: Wiring, destination: SignedDestination, server: str, allowed: _Allowed
) -> Iterator[tuple[str, _Judge]]:
    """The documents of record of one server, each with what judges it."""
    unsealer = wiring.unsealer() if wiring.settings.restore is not None else None
    presence: Presence | None = None
    for _server, backup_id in backup_ids(destination, server):
        presence = presence or Presence(destination)
        judge = _Backup(destination, allowed, wiring.catalog.backups.find(backup_id), presence, unsealer)
        yield layout.manifest_key(server, backup_id), judge
    branches = {branch.id: branch for branch in wiring.catalog.binlogs.branches(server)}
    for info in list(destination.list(layout.binlogs_folder(server))):
        owner = layout.branch_of(info.key)
        if owner is not None:
            yield info.key, _Branch(destination, allowed, info.key, branches.get(owner[1]))
    for _server, key in log_segments.keys(destination, server):
        yield layout.segment_key(server, key), _Segment(destination, allowed, wiring, server, key)


@dataclass(frozen=True, slots=True)
class _Judge(ABC):
    """May a document be signed? ``altered``: what is said of one that is not what its digest says."""

    altered: ClassVar[str] = "it differs from what was stored"
    from_destination: ClassVar[bool] = False

    destination: SignedDestination
    allowed: _Allowed

    def why_not(self, document: bytes, signature: bytes | None) -> str:
        """ "" where it may. ``signature``: one that is not believed. Raises DamagedError."""
        digest = self.digest()
        if digest:
            same = hashlib.sha256(document).hexdigest() == digest
            return "" if same else self.altered
        problem = self.disagreement(document)
        return problem or self.allowed.why_not(document, signature, found=self.from_destination)

    def digest(self) -> str:
        """SHA-256 of the true document, "" where it is not known."""
        return ""

    @abstractmethod
    def disagreement(self, document: bytes) -> str:
        """What it says otherwise than the catalog, or than what is stored; "" where nothing."""


@dataclass(frozen=True, slots=True)
class _Backup(_Judge):
    altered: ClassVar[str] = "it differs from what the backup run stored"
    from_destination: ClassVar[bool] = True

    record: BackupRecord | None
    presence: Presence
    unsealer: Unsealer | None

    def digest(self) -> str:
        return self.record.manifest if self.record is not None else ""

    def disagreement(self, document: bytes) -> str:
        header = decode_header(document)
        record = self.record
        if record is None:
            return "the catalog knows no such backup"
        if not _agree(header, record):
            return "its sizes, times or positions differ from the catalog"
        missing = [item.name for item in header.objects if not self.presence.holds(item)]
        if missing:
            return f"{len(missing)} of its {len(header.objects)} objects are missing, damaged, or of another size"
        folder = layout.backup_folder(header.server, header.backup_id)
        for item in header.side_files:
            problem = objects.problem(self.destination, folder + item.name, item)
            if problem:
                return f"its {item.name} {problem}"
        if self.unsealer is None:
            return "the catalog holds no digest of it, and no private key is available to read its body"
        facts = load_body(self.destination, header, self.unsealer).facts
        same = (
            facts.parent,
            facts.position,
            str(facts.server.flavour),
            str(facts.server.version),
            str(facts.tool.version),
        ) == (record.parent, record.position, record.flavour, record.server_version, record.tool_version)
        return "" if same else "its body has another parent, position or version than the catalog"


def _agree(header: Header, record: BackupRecord) -> bool:
    """Does a manifest say the same as the row of its backup?"""
    return (header.backup_id, header.kind) == (record.id, str(record.kind)) and all(
        getattr(header, name) == getattr(record, name) for name in _IN_BOTH
    )


@dataclass(frozen=True, slots=True)
class _Stored(_Judge):
    """A copy or a proof, of which it was noted what was put."""

    noted: str

    def digest(self) -> str:
        return self.noted

    def disagreement(self, document: bytes) -> str:  # noqa: ARG002  its digest alone judges it
        return "no record exists of what was stored there"


@dataclass(frozen=True, slots=True)
class _Branch(_Judge):
    key: str
    known: Branch | None

    def disagreement(self, document: bytes) -> str:
        found = decode_branch(document, where=self.key)
        return "" if found == self.known else "it is not the branch that the catalog knows"


@dataclass(frozen=True, slots=True)
class _Segment(_Judge):
    wiring: Wiring
    server: str
    key: SegmentKey

    def disagreement(self, document: bytes) -> str:
        key = self.key
        found = decode_segment(document, where=layout.segment_key(self.server, key))
        known = [
            record.segment
            for record in self.wiring.catalog.binlogs.segments(
                self.server, key.branch, from_position=(key.number, key.start), to_position=(key.number, key.end)
            )
            if record.key == key
        ]
        if [found.segment] != known:
            return "it differs from the catalog"
        wrong = log_segments.problems(self.destination, found)
        return "; ".join(f"{name} {problem}" for name, problem in wrong.items())
