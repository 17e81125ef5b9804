"""Is a document at a destination the one that was written? Signatures, and digests that the catalog has recorded.

``SignedDestination``: manifests, descriptions of segments and of branches are what everything else is known by: they
hold the digests of all the rest. Proofs, and copies of catalog and configuration, are sealed, which anybody can do who
has a public key. The signature is beside its document and is put before it, so that no document is ever seen without
one. Where a document replaces another one, both signatures are there for the moment in between.

``RecordedDestination``: every reader of manifests and of descriptions of binary logs goes through here, so none can
forget to ask. It costs no request: a document is read whole anyway.

The head of a server's history: a small signed document that says how far it had come, and when.

Signatures show that a document is ours, not that it is the newest: whoever can write to a destination can bring back
all of an older state. So each destination holds a head with a counter that only rises, put anew with each backup and
every quarter of an hour. One head names the one before it by its digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from backupd.model.binlog import SegmentKey
from backupd.model.document import DOCUMENT_LIMIT, NOTE_LIMIT, Document, json_key, parsed
from backupd.model.errors import (
    DamagedError,
    KeyUnusableError,
    ObjectMissingError,
    TamperedError,
    ToolError,
    ToolMissingError,
)
from storage import layout
from storage.destination import Destination, ObjectInfo, read_whole
from storage.throttle_and_breaker import ForwardingDestination

if TYPE_CHECKING:
    from backupd.transfer.records.gpg import StatusLine

_BLOCK = re.compile(rb"-----BEGIN PGP SIGNATURE-----.*?-----END PGP SIGNATURE-----\r?\n?", re.DOTALL)
SIGNATURE_LIMIT = 64 * 1024
"""Bytes that a signature may have; ours have a few hundred."""
_NO_AGENT = str(4 << 24 | 77)
"""GPG_ERR_NO_AGENT, as gpg itself reports it (libgpg-error: source and code)."""
_REMEMBERED = 50_000
"""Digests of documents whose signature was found good: about 8 MB."""
_COPY_LIMIT = 4 * 1024**3
"""Most bytes of a sealed copy of the catalog or of the configuration."""
_UNSIGNED = "it has no signature"
_NOT_OURS = (
    "the document was replaced: find out who writes to the destination, then run `backupd verify`, which restores it "
    "from another destination"
)


@dataclass(frozen=True, slots=True)
class Signing:
    """``key``: the full fingerprint of the key that signs here, None where nothing is signed. ``trusted``: full
    fingerprints of those whose signatures count. ``home``: GnuPG's home with the public keys of all of them."""

    home: Path
    key: str | None
    trusted: tuple[str, ...]
    passphrase_file: Path | None = None


def sign(signing: Signing, document: bytes) -> bytes:
    """A detached, armored signature. Raises KeyUnusableError where there is no key that signs, or gpg cannot use it."""
    if signing.key is None:
        raise KeyUnusableError(
            "cannot sign: encryption.signing_key is not set",
            hint="set encryption.signing_key, or remove `signed` from the policy",
        )
    from backupd.transfer.records.encryption import passphrase_options
    from backupd.transfer.records.gpg import Status, answer, gpg

    with Status() as status:
        secret = passphrase_options(signing.passphrase_file)
        how = ("--armor", "--digest-algo", "SHA512", "--local-user", signing.key)
        command = gpg(signing.home, status, *secret, *how, "--detach-sign", "--output", "-")
        try:
            made = answer(command, status, document)
        except ToolError as error:
            raise KeyUnusableError(
                f"the key {signing.key} cannot sign: {_why_not(status.lines())}",
                detail=error.detail,
                hint=f"its secret key must be in {signing.home}, and its passphrase, if it has one, in "
                "encryption.signing_passphrase_file; if it is lost: `backupd keys rotate-signing`",
            ) from error
        if not any(line.keyword == "SIG_CREATED" for line in status.lines()):
            raise ToolError("gpg exited with 0, but did not confirm that it signed")
    return made


_SIGNS = ("ed25519", "sign", "never")
_OPENS = ("default", "default", "never")


def make_key(home: Path, user_id: str, *, opens: bool = False) -> str:
    """A new key that only signs or, where it ``opens``, that backups are sealed for, without a passphrase and without
    an end; its fingerprint. Raises KeyUnusableError, ToolError."""
    from backupd.process.command import Command
    from backupd.transfer.records.gpg import Status, answer, writable_home

    with Status() as status, writable_home(home) as gpg_home:
        program = ("gpg", "--batch", "--no-tty", "--no-options", "--homedir", str(gpg_home))
        talk = ("--status-fd", str(status.descriptor), "--pinentry-mode", "loopback", "--passphrase-fd", "0", "--yes")
        make = ("--quick-generate-key", user_id, *(_OPENS if opens else _SIGNS))
        answer(Command((*program, *talk, *make)), status, b"\n")
        made = [line.text.split()[-1] for line in status.lines() if line.keyword == "KEY_CREATED"]
    if len(made) != 1:
        raise ToolError("gpg exited with 0, but did not confirm that it made a key")
    return made[0]


def problem_of(signing: Signing, document: bytes, signatures: bytes) -> str:
    """Why nobody whom we trust vouches for ``document``; "" where somebody does. ``signatures``: armored; one is
    enough.

    Raises ToolMissingError when there is no gpg.
    """
    blocks = _BLOCK.findall(signatures[:SIGNATURE_LIMIT])
    if not blocks:
        return "the file beside it is no OpenPGP signature"
    problems = [_problem(signing, document, block) for block in blocks]
    return "" if "" in problems else problems[0]


def _problem(signing: Signing, document: bytes, signature: bytes) -> str:
    from backupd.transfer.records.gpg import Status, answer, gpg
    from backupd.transfer.records.keyring import is_revoked

    with Status() as status, _readable(signature) as (descriptor, path):
        command = gpg(signing.home, status, "--no-autostart", "--verify", path, "-")
        try:
            answer(command, status, document, descriptor)
        except ToolMissingError:
            raise
        except ToolError:
            pass  # whatever it stumbled over, its output counts: nothing but GOODSIG with VALIDSIG is believed
        lines = status.lines()
    words = {line.keyword for line in lines}
    valid = [line.text.split() for line in lines if line.keyword == "VALIDSIG"]
    if "BADSIG" in words:
        return "its signature does not match: the document was altered after it was signed"
    # Of a key that has expired gpg does not say whether it was revoked besides.
    if "REVKEYSIG" in words or ("EXPKEYSIG" in words and valid and is_revoked(signing.home, valid[0][0])):
        return "it is signed with a key that was revoked"
    if words & {"NO_PUBKEY", "ERRSIG"}:
        return f"it is signed with a key that is not in {signing.home} (key id {_key_id(lines)})"
    if len(valid) != 1 or not words & {"GOODSIG", "EXPKEYSIG"}:
        return "its signature has expired" if "EXPSIG" in words else "its signature cannot be read"
    signers = {valid[0][0], valid[0][-1]}  # the subkey that signed, and the primary key that it belongs to
    if not signers & set(signing.trusted):
        return f"it is signed by {valid[0][-1]}, a key that is not trusted here"
    return ""


def _key_id(lines: Sequence[StatusLine]) -> str:
    return next((line.text.split()[0] for line in lines if line.keyword in ("NO_PUBKEY", "ERRSIG") and line.text), "?")


def _why_not(lines: Sequence[StatusLine]) -> str:
    words = {line.keyword for line in lines}
    if any(line.keyword == "FAILURE" and line.text.endswith(_NO_AGENT) for line in lines):
        return "gpg could not start its agent"
    if "KEYEXPIRED" in words:
        return "it has expired"
    if "INV_SGNR" in words:
        return "its secret half is not there, or it is revoked, or it is no key for signing"
    return "gpg could not use its secret half"


@contextmanager
def _readable(content: bytes) -> Iterator[tuple[int, str]]:
    """``content`` as a file in memory: (descriptor to pass on, the path under which gpg opens it)."""
    descriptor = os.memfd_create("signature", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor, f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class SignedDestination(ForwardingDestination):
    """``inner`` with signatures of the documents about those servers (``*``: about all) for which
    ``wanted`` says so.

    Reading one that nobody whom we trust vouches for raises DamagedError in words; so whoever reads through it has no
    way to believe it. All else passes through unchanged.
    """

    def __init__(self, inner: Destination, signing: Signing, wanted: Callable[[str], bool]) -> None:
        super().__init__(inner)
        self._signing = signing
        self._wanted = wanted
        self._good: set[bytes] = set()

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        """Raises KeyUnusableError where it has to be signed and cannot be; then nothing was put."""
        if not self._is_signed(key):
            return self._inner.put(key, stream)
        document = stream.read()
        signature = layout.signature_key(key)
        before = self._read(signature)
        if before is not None and not problem_of(self._signing, document, before):
            return self._inner.put(key, io.BytesIO(document))  # it was signed elsewhere, and copied to here
        made = sign(self._signing, document)
        replaces = before is not None and self._read(key) is not None
        self._inner.put(signature, io.BytesIO(made + before if replaces and before else made))
        info = self._inner.put(key, io.BytesIO(document))
        if replaces:
            self._inner.put(signature, io.BytesIO(made))
        return info

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        """The bytes under ``key``. A signed document is read whole and compared first; raises DamagedError where no
        trusted signature fits."""
        if not self._is_signed(key):
            return self._inner.get(key, offset=offset, length=length)
        document = self.as_it_lies(key)
        problem = self.problem(key, document)
        if problem:
            raise DamagedError(
                f"{self.name}: {key} has no trusted signature",
                [f"{self.name}: {key}: {problem}"],
                hint=self._hint(key, problem),
            )
        end = None if length is None else offset + length
        return io.BytesIO(document[offset:end])

    def delete(self, key: str) -> None:
        """Remove ``key``, then its signature."""
        self._inner.delete(key)
        if self._is_signed(key):
            self._inner.delete(layout.signature_key(key))

    def unsigned(self, key: str) -> bool:
        """Has the document under ``key`` no signature at all? Raises ObjectMissingError where there is no such one."""
        self._inner.stat(key)
        return self._is_signed(key) and self._read(layout.signature_key(key)) is None

    def as_it_lies(self, key: str) -> bytes:
        """The document under ``key``, believed or not. Raises ObjectMissingError."""
        return read_whole(self._inner, key, limit=_COPY_LIMIT if layout.is_copy(key) else DOCUMENT_LIMIT)

    def vouches(self, server: str) -> bool:
        """Is whatever it gives of this server signed by somebody who is trusted?"""
        return self._wanted(server)

    def doubt(self, key: str, document: bytes) -> str:
        """Why nobody whom we trust vouches for ``document`` under ``key``; "" where somebody does, or nobody has to.
        Raises ObjectMissingError where nothing is there any more."""
        return self.problem(key, document) if self._is_signed(key) else ""

    def signature(self, key: str) -> bytes | None:
        """What is beside ``key``, believed or not."""
        return self._read(layout.signature_key(key))

    def sign(self, key: str, document: bytes, *, beside: bytes | None = None) -> None:
        """Vouch for ``document`` under ``key``, whoever put it there: for these bytes, which the caller has looked at,
        whatever is there by now. ``beside``: signatures that stay. Raises KeyUnusableError."""
        self._inner.put(layout.signature_key(key), io.BytesIO(sign(self._signing, document) + (beside or b"")))

    def _is_signed(self, key: str) -> bool:
        server = layout.signed_of(key)
        return server is not None and self._wanted(server)

    def problem(self, key: str, document: bytes) -> str:
        """Why the signature beside ``key`` does not vouch for ``document``; "" where it does. Raises ObjectMissingError
        where neither is there."""
        digest = hashlib.sha256(document).digest()
        if digest in self._good:
            return ""
        signatures = self._read(layout.signature_key(key))
        if signatures is None:
            self._inner.stat(key)  # being removed in this moment, it is simply not there
            return _UNSIGNED
        problem = problem_of(self._signing, document, signatures)
        if not problem:
            if len(self._good) >= _REMEMBERED:
                self._good.clear()
            self._good.add(digest)
        return problem

    def _read(self, key: str) -> bytes | None:
        """As much as a signature may have, and a byte more; None where nothing is there."""
        try:
            with self._inner.get(key) as stream:
                return stream.read(SIGNATURE_LIMIT + 1)
        except ObjectMissingError:
            return None

    def _hint(self, key: str, problem: str) -> str:
        if layout.is_copy(key):
            return (
                "it is ignored: it was written by somebody else, or before the signing key was configured. "
                "To write what the catalog still knows anew, and signed: backupd catalog copy"
            )
        if problem == _UNSIGNED:
            # Of binary logs no catalog has a digest.
            known = "" if key.endswith(f"/{layout.MANIFEST}") else " --unproven"
            return (
                "the document was written by somebody else, or before the signing key was configured. In the second "
                f"case, sign it: backupd catalog sign {self.name}{known}. A server whose policy cannot be used counts "
                "as one with `signed: true`, until the policy is corrected"
            )
        return (
            "restore from another destination's copy; if the signing key was changed: backupd keys rotate-signing "
            "--from FORMER"
        )


class Records(Protocol):
    """What is known of the documents by somebody who need not ask the destination."""

    def manifest(self, backup_id: str) -> str:
        """SHA-256 of the manifest, "" where nobody knows it."""
        ...

    def segment(self, server: str, key: SegmentKey) -> str:
        """SHA-256 of the plain bytes of a binary log, "" where nobody knows it."""
        ...

    def differs(self, destination: str, server: str, backup_id: str, error: TamperedError) -> None:
        """Hears of what is not as recorded. ``backup_id``: "" for a binary log."""
        ...


class RecordedDestination(ForwardingDestination):
    """``inner``. Reading a document that reads well and is not what ``records`` know raises TamperedError; of one that
    is merely damaged its reader finds out."""

    def __init__(self, inner: Destination, records: Records) -> None:
        super().__init__(inner)
        self._records = records

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        """The bytes under ``key``; raises TamperedError where a document is another one than was recorded."""
        backup, segment = _manifest_of(key), layout.segment_of(key)
        if backup is not None and (wanted := self._records.manifest(backup[1])):
            document = self._whole(key)
            found = hashlib.sha256(document).hexdigest()
            if found != wanted and _reads_well(document):
                self._differs(key, *backup, f"its SHA-256 is {found}, but that of the expected manifest is {wanted}")
        elif (
            segment is not None
            and segment[2] == layout.SEGMENT
            and (wanted := self._records.segment(segment[0], segment[1]))
        ):
            document = self._whole(key)
            if (found := _described(document)) not in (wanted, ""):
                described = f"it describes a binary log with the SHA-256 {found[:64]}"
                self._differs(key, segment[0], "", f"{described}, but the expected one has {wanted}")
        else:
            return self._inner.get(key, offset=offset, length=length)
        return io.BytesIO(document[offset : None if length is None else offset + length])

    def _whole(self, key: str) -> bytes:
        with self._inner.get(key) as stream:
            return stream.read(DOCUMENT_LIMIT + 1)

    def _differs(self, key: str, server: str, backup_id: str, problem: str) -> None:
        error = TamperedError(
            f"{self.name}: {key} is not what was stored",
            [f"{self.name}: {key}: it is not what was stored: {problem}"],
            hint=_NOT_OURS,
        )
        self._records.differs(self.name, server, backup_id, error)
        raise error


def _manifest_of(key: str) -> tuple[str, str] | None:
    """(server, backup id) whose manifest is under ``key``."""
    return layout.backup_of(key) if key.startswith(layout.SERVERS) and key.endswith(f"/{layout.MANIFEST}") else None


def _reads_well(manifest: bytes) -> bool:
    from backupd.model.manifest import decode_header

    try:
        decode_header(manifest)
    except DamagedError:
        return False
    return True


def _described(document: bytes) -> str:
    """The SHA-256 of a binary log, by its description; "" where that cannot be read: then its reader says why."""
    try:
        return str(json.loads(document)["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


FORMAT = 1


@dataclass(frozen=True, slots=True)
class Retired(Document):
    """A key that signed up to the head with ``counter``, until ``at``: what only it has signed counts for nothing."""

    key: str
    counter: int
    at: datetime


@dataclass(frozen=True, slots=True)
class Reached(Document):
    """Up to where binary logs were archived: the branch, the number of the file, and how many bytes of it."""

    branch: str
    number: int
    end: int


@dataclass(frozen=True, slots=True)
class Audited(Document):
    """How many entries the catalog's audit has, and the digest of the last one."""

    entries: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Head(Document):
    """``before``: SHA-256 of the head before it, "" of the first; ``newest``: the id of the newest backup, "" where
    there is none, and ``backups`` how many there are; ``audit_entries``, ``audit_digest``: of the catalog's audit;
    ``retired``: keys that signed before; ``logs``: of each destination that has binary logs, up to where."""

    server: str
    counter: int
    at: datetime
    before: str = ""
    newest: str = ""
    backups: int = 0
    audit: Audited = Audited()
    retired: tuple[Retired, ...] = field(default=(), metadata=json_key(later=True))
    logs: Mapping[str, Reached] = field(default_factory=dict, metadata=json_key(later=True))


def encode(head: Head) -> bytes:
    """The document as it is signed and stored (JSON); ``decode`` reads it."""
    document = {name: value for name, value in head.as_json().items() if value or name not in ("retired", "logs")}
    return json.dumps({"format": FORMAT, **document}, sort_keys=True).encode()


def decode(raw: bytes, server: str) -> Head:
    """Raises DamagedError, also for the head of another server."""
    try:
        document: dict[str, Any] = parsed(raw, limit=NOTE_LIMIT)
        if document["format"] != FORMAT or document["server"] != server:
            raise ValueError(f"it is of format {document['format']!r} and of server {document['server']!r}")
        return Head.from_json(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"the head of {server} cannot be read", [f"{layout.head_key(server)}: {error}"]) from error


def read(destination: Destination, server: str) -> Head | None:
    """None where there is none. Raises DamagedError, also where it is not believed; DestinationError."""
    try:
        return decode(read_whole(destination, layout.head_key(server), limit=NOTE_LIMIT), server)
    except ObjectMissingError:
        return None


def put(destination: Destination, head: Head) -> None:
    """Raises DestinationError, KeyUnusableError."""
    from backupd.transfer.records.manifests import put_bytes

    put_bytes(destination, layout.head_key(head.server), encode(head))


def digest(head: Head) -> str:
    """SHA-256 (64 hex) of the document: what the next head names as the one before it."""
    return hashlib.sha256(encode(head)).hexdigest()
