"""GnuPG homes for the tests of sealing, made once per session."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.keys import gpg, make_home, make_key

NewHome = Callable[[str], Path]
"""The fixture ``new_home``: makes an empty GnuPG home of that name."""


@dataclass(frozen=True)
class Homes:
    """``both``: secret keys of one@ (cv25519) and two@ (RSA). ``stranger``: a secret key of its own only."""

    both: Path
    stranger: Path
    one: str
    two: str
    other: str


def build(base: Path) -> Homes:
    both, stranger = make_home(base / "b"), make_home(base / "s")
    one = make_key(both, "one@example.com")
    gpg(
        both,
        "--generate-key",
        stdin=(
            b"%no-protection\nKey-Type: RSA\nKey-Length: 3072\nKey-Usage: sign\nSubkey-Type: RSA\nSubkey-Length: 3072\n"
            b"Subkey-Usage: encrypt\nName-Email: two@example.com\nExpire-Date: 0\n%commit\n"
        ),
    )
    two = gpg(both, "--with-colons", "--list-keys", "two@example.com").decode().split("fpr:::::::::")[1].split(":")[0]
    return Homes(both, stranger, one, two, make_key(stranger, "stranger@example.com"))


def with_passphrase(home: Path, user_id: str, passphrase: str) -> str:
    """Make a key that needs ``passphrase`` and forget it in the agent; returns the fingerprint."""
    gpg(
        home,
        "--generate-key",
        stdin=(
            f"Key-Type: eddsa\nKey-Curve: ed25519\nKey-Usage: sign\nSubkey-Type: ecdh\nSubkey-Curve: cv25519\n"
            f"Subkey-Usage: encrypt\nName-Email: {user_id}\nExpire-Date: 0\nPassphrase: {passphrase}\n%commit\n"
        ).encode(),
    )
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True)
    return gpg(home, "--with-colons", "--list-keys", user_id).decode().split("fpr:::::::::")[1].split(":")[0]
