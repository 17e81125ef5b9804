"""Detached OpenPGP signatures of the documents of record: who vouches for one, and is it still what was signed?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import KeyUnusableError, ToolError, ToolMissingError
from backupd.process.command import Command
from backupd.transfer.seal.gpg import Status, StatusLine, gpg, through
from backupd.transfer.seal.key_home import writable_home
from backupd.transfer.seal.keyring import is_revoked
from backupd.transfer.seal.unseal import passphrase_options

_BLOCK = re.compile(rb"-----BEGIN PGP SIGNATURE-----.*?-----END PGP SIGNATURE-----\r?\n?", re.DOTALL)
SIGNATURE_LIMIT = 64 * 1024
"""Bytes that a signature may have; ours have a few hundred."""
_NO_AGENT = str(4 << 24 | 77)
"""GPG_ERR_NO_AGENT, as gpg itself reports it (libgpg-error: source and code)."""


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
            "nothing can be signed here: no key is named for it",
            hint="name one as encryption.signing_key, or take `signed` out of the policy",
        )
    with Status() as status:
        command = gpg(
            signing.home,
            status,
            *passphrase_options(signing.passphrase_file),
            "--armor",
            "--digest-algo",
            "SHA512",
            "--local-user",
            signing.key,
            "--detach-sign",
            "--output",
            "-",
        )
        try:
            made = through(command, status, document)
        except ToolError as error:
            raise KeyUnusableError(
                f"the key {signing.key} cannot sign: {_why_not(status.lines())}",
                detail=error.detail,
                hint=f"its secret half has to be in {signing.home}, and its passphrase, if it has one, in "
                "encryption.signing_passphrase_file; where it is lost: `backupd keys rotate-signing`",
            ) from error
        if not any(line.keyword == "SIG_CREATED" for line in status.lines()):
            raise ToolError("gpg ended well but does not say that it has signed")
    return made


def make_key(home: Path, user_id: str) -> str:
    """A new key that only signs, without a passphrase and without an end; its fingerprint. Raises KeyUnusableError,
    ToolError."""
    with Status() as status, writable_home(home) as place:
        through(
            Command(
                (
                    "gpg",
                    "--batch",
                    "--no-tty",
                    "--no-options",
                    "--homedir",
                    str(place),
                    "--status-fd",
                    str(status.descriptor),
                    "--pinentry-mode",
                    "loopback",
                    "--passphrase-fd",
                    "0",
                    "--yes",
                    "--quick-generate-key",
                    user_id,
                    "ed25519",
                    "sign",
                    "never",
                )
            ),
            status,
            b"\n",
        )
        made = [line.text.split()[-1] for line in status.lines() if line.keyword == "KEY_CREATED"]
    if len(made) != 1:
        raise ToolError("gpg ended well but does not say that it has made a key")
    return made[0]


def problem_of(signing: Signing, document: bytes, signatures: bytes) -> str:
    """Why nobody whom we trust vouches for ``document``; "" where somebody does. ``signatures``: armored; one is
    enough.

    Raises ToolMissingError when there is no gpg.
    """
    blocks = _BLOCK.findall(signatures[:SIGNATURE_LIMIT])
    if not blocks:
        return "what lies beside it as its signature is none"
    problems = [_problem(signing, document, block) for block in blocks]
    return "" if "" in problems else problems[0]


def _problem(signing: Signing, document: bytes, signature: bytes) -> str:
    with Status() as status, _readable(signature) as (descriptor, path):
        command = gpg(signing.home, status, "--no-autostart", "--verify", path, "-")
        try:
            through(command, status, document, descriptor)
        except ToolMissingError:
            raise
        except ToolError:
            pass  # whatever it stumbled over, its words tell: nothing but GOODSIG with VALIDSIG is believed
        lines = status.lines()
    words = {line.keyword for line in lines}
    valid = [line.text.split() for line in lines if line.keyword == "VALIDSIG"]
    if "BADSIG" in words:
        return "its signature does not fit: it was altered after it had been signed"
    # Of a key that has expired gpg does not tell whether it was revoked besides.
    if "REVKEYSIG" in words or ("EXPKEYSIG" in words and valid and is_revoked(signing.home, valid[0][0])):
        return "it is signed with a key that was revoked"
    if words & {"NO_PUBKEY", "ERRSIG"}:
        return f"it is signed with a key that is not in {signing.home} (key id {_key_id(lines)})"
    if len(valid) != 1 or not words & {"GOODSIG", "EXPKEYSIG"}:
        return "its signature has expired" if "EXPSIG" in words else "its signature cannot be read"
    signers = {valid[0][0], valid[0][-1]}  # the subkey that signed, and the primary key that it belongs to
    if not signers & set(signing.trusted):
        return f"it is signed by {valid[0][-1]}, whom nobody here trusts"
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
