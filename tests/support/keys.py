"""Throw-away OpenPGP keys without a passphrase."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.stores.folders import short_directory

OPERATOR = "ops@example.com"


@dataclass(frozen=True)
class Keys:
    """``secret_home`` can open what is sealed for ``fingerprint``; ``public_home`` can only seal."""

    secret_home: Path
    public_home: Path
    fingerprint: str
    user_id: str = OPERATOR


def gpg(home: Path, *args: str, stdin: bytes = b"") -> bytes:
    """Run gpg in ``home`` and return its stdout. Raises CalledProcessError."""
    return subprocess.run(
        ["gpg", "--homedir", str(home), "--batch", "--no-tty", "--quiet", *args],
        input=stdin,
        check=True,
        capture_output=True,
    ).stdout


def make_home(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True)
    return path


def make_key(home: Path, user_id: str = OPERATOR, *, expires: str = "0", encryption: bool = True) -> str:
    """Make an Ed25519 key with a Curve25519 encryption subkey (or none); returns its fingerprint.

    ``expires`` as gpg's Expire-Date: ``0`` never, ``3`` days, ``seconds=5``, ``20300101``.
    """
    subkey = "Subkey-Type: ecdh\nSubkey-Curve: cv25519\nSubkey-Usage: encrypt\n" if encryption else ""
    gpg(
        home,
        "--generate-key",
        stdin=(
            "%no-protection\nKey-Type: eddsa\nKey-Curve: ed25519\nKey-Usage: sign\n"
            + subkey
            + f"Name-Real: Operations\nName-Email: {user_id}\nExpire-Date: {expires}\n%commit\n"
        ).encode(),
    )
    return fingerprints(home, user_id)[-1]


def fingerprints(home: Path, user_id: str) -> list[str]:
    """Full fingerprints of the primary keys that carry ``user_id``."""
    found: list[str] = []
    primary = False
    for line in gpg(home, "--with-colons", "--list-keys", user_id).decode().splitlines():
        fields = line.split(":")
        if fields[0] == "pub":
            primary = True
        elif fields[0] == "fpr" and primary:
            found.append(fields[9])
            primary = False
    return found


def copy_public(source: Path, target: Path, user_id: str = OPERATOR) -> None:
    """Export the public key of ``user_id`` into another home."""
    gpg(target, "--import", stdin=gpg(source, "--export", user_id))


def stop_agent(home: Path) -> None:
    """End the gpg-agent that gpg left running for ``home``."""
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False, capture_output=True)
    deadline = time.monotonic() + 300
    while (home / "S.gpg-agent").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # it ends a moment later, and answers until then


@contextlib.contextmanager
def operator_keys(user_id: str = OPERATOR) -> Iterator[Keys]:
    """A key pair in one home and its public half alone in another; both vanish at the end."""
    with short_directory("bt-keys-") as base:
        base.chmod(0o755)
        secret, public = make_home(base / "secret"), make_home(base / "public")
        try:
            fingerprint = make_key(secret, user_id)
            copy_public(secret, public, user_id)
            yield Keys(secret_home=secret, public_home=public, fingerprint=fingerprint, user_id=user_id)
        finally:
            stop_agent(secret)
            stop_agent(public)
