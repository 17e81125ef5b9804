"""A phrase for the holder of one key: sealed so that plain ``gpg -d`` shows it, and opened again."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from backupd.model.errors import KeyUnusableError, ToolError
from backupd.transfer.seal.gpg import Status, gpg, through
from backupd.transfer.seal.unseal import passphrase_options

_GROUPS = 8


def new_phrase() -> str:
    """128 random bits in groups that can be read out and typed: ``3fa1-09bc-...``."""
    return "-".join(secrets.token_hex(2) for _ in range(_GROUPS))


def digest_of(phrase: str) -> str:
    """What is remembered of a phrase (64 hex). Blanks, dashes and capitals do not matter."""
    return hashlib.sha256("".join(c for c in phrase.lower() if c.isalnum()).encode()).hexdigest()


def matches(phrase: str, digest: str) -> bool:
    return hmac.compare_digest(digest_of(phrase), digest)


def seal_phrase(phrase: str, fingerprint: str, home: Path) -> str:
    """``phrase`` as an armored message for that key alone. Raises KeyUnusableError when gpg cannot encrypt for it."""
    with Status() as status:
        command = gpg(
            home, status, "--no-autostart", "--armor", "--recipient", fingerprint, "--encrypt", "--output", "-"
        )
        try:
            return through(command, status, f"{phrase}\n".encode()).decode("ascii")
        except ToolError as error:
            raise KeyUnusableError(
                f"nothing can be sealed for the key {fingerprint}",
                detail=error.detail,
                hint="`backupd check` shows the state of every key",
            ) from error


def open_phrase(armored: str, home: Path, passphrase_file: Path | None) -> str:
    """The phrase, with the secret keys in ``home``. Raises KeyUnusableError when none of them opens it."""
    with Status() as status:
        command = gpg(home, status, *passphrase_options(passphrase_file), "--decrypt", "--output", "-")
        try:
            opened = through(command, status, armored.encode("ascii"))
        except ToolError as error:
            raise KeyUnusableError(f"no secret key in {home} opens the challenge", detail=error.detail) from error
        if "DECRYPTION_OKAY" not in {line.keyword for line in status.lines()}:
            raise KeyUnusableError(f"gpg does not confirm that it opened the challenge with a key in {home}")
    return opened.decode("ascii", "replace").strip()
