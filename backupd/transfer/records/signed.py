"""A destination whose documents of record are signed: each is put behind its signature, and believed only with one.

Manifests, descriptions of segments and of branches are what everything else is known by: they hold the digests of all
the rest. Proofs, and copies of catalog and configuration, are sealed, which anybody can do who has a public key. The
signature lies beside its document and is put before it, so that no document is ever seen without one. Where a document
replaces another one, both signatures lie there for the moment in between.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import BinaryIO

from backupd.model.document import DOCUMENT_LIMIT
from backupd.model.errors import DamagedError, ObjectMissingError
from backupd.transfer.records.signature import SIGNATURE_LIMIT, Signing, problem_of, sign
from storage.contract import layout
from storage.contract.destination import Destination, ObjectInfo, read_whole
from storage.wrap.forwarding import ForwardingDestination

_REMEMBERED = 50_000
"""Digests of documents whose signature was found good: about 8 MB."""
_COPY_LIMIT = 4 * 1024**3
"""Most bytes of a sealed copy of the catalog or of the configuration."""
_UNSIGNED = "it has no signature"


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
        place = layout.signature_key(key)
        before = self._read(place)
        if before is not None and not problem_of(self._signing, document, before):
            return self._inner.put(key, io.BytesIO(document))  # it was signed elsewhere, and copied to here
        made = sign(self._signing, document)
        replaces = before is not None and self._read(key) is not None
        self._inner.put(place, io.BytesIO(made + before if replaces and before else made))
        info = self._inner.put(key, io.BytesIO(document))
        if replaces:
            self._inner.put(place, io.BytesIO(made))
        return info

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        if not self._is_signed(key):
            return self._inner.get(key, offset=offset, length=length)
        document = self.as_it_lies(key)
        problem = self.problem(key, document)
        if problem:
            raise DamagedError(
                f"{self.name}: {key} is not believed", [f"{self.name}: {key}: {problem}"], hint=self._hint(key, problem)
            )
        end = None if length is None else offset + length
        return io.BytesIO(document[offset:end])

    def delete(self, key: str) -> None:
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
        Raises ObjectMissingError where nothing lies there any more."""
        return self.problem(key, document) if self._is_signed(key) else ""

    def signature(self, key: str) -> bytes | None:
        """What lies beside ``key``, believed or not."""
        return self._read(layout.signature_key(key))

    def sign(self, key: str, document: bytes, *, beside: bytes | None = None) -> None:
        """Vouch for ``document`` under ``key``, whoever put it there: for these bytes, which the caller has looked at,
        whatever lies there by now. ``beside``: signatures that stay. Raises KeyUnusableError."""
        self._inner.put(layout.signature_key(key), io.BytesIO(sign(self._signing, document) + (beside or b"")))

    def _is_signed(self, key: str) -> bool:
        server = layout.signed_of(key)
        return server is not None and self._wanted(server)

    def problem(self, key: str, document: bytes) -> str:
        """Why the signature beside ``key`` does not vouch for ``document``; "" where it does. Raises ObjectMissingError
        where neither lies there."""
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
        """As much as a signature may have, and a byte more; None where nothing lies there."""
        try:
            with self._inner.get(key) as stream:
                return stream.read(SIGNATURE_LIMIT + 1)
        except ObjectMissingError:
            return None

    def _hint(self, key: str, problem: str) -> str:
        if layout.is_copy(key):
            return (
                "it is passed over: somebody else put it there, or it is older than the signing key. "
                "What the catalog still knows is put anew, and signed: backupd catalog copy"
            )
        if problem == _UNSIGNED:
            # Of binary logs no catalog has a digest.
            known = "" if key.endswith(f"/{layout.MANIFEST}") else " --unproven"
            return (
                "somebody else put it there, or it is older than the signing key: if so, sign it: "
                f"backupd catalog sign {self.name}{known}. A server whose policy cannot be used counts as one "
                "whose policy says so, until the policy is mended"
            )
        return (
            "restore from another destination's copy; if the signing key was changed: backupd keys rotate-signing "
            "--from FORMER"
        )
