"""The keys of a GnuPG home: which can be encrypted for, which can decrypt here, and whether somebody holds one.

The last is asked with a phrase that is sealed so that plain ``gpg -d`` shows it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import gnupg

from backupd.model.errors import KeyUnusableError, ToolError
from backupd.process.command import Command, locate
from backupd.transfer.records.encryption import passphrase_options
from backupd.transfer.records.gpg import Status, answer, gpg, usable_home, writable_home

WARN_DAYS = 30
_HEX = re.compile(r"(?:0X)?([0-9A-F]{8,64})!?")
_GROUPS = 8


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One recipient as it was named and as it was found.

    ``fingerprint``: of the primary key, empty if there is none or more than one. ``expires_at``: from then on
    nothing can be encrypted for it (the primary's expiry, or that of its last encryption subkey); None:
    never. ``problem``: why it cannot be used, else None. ``warning``: what will soon be a problem, else None.
    """

    name: str
    fingerprint: str
    user_ids: tuple[str, ...] = ()
    expires_at: datetime | None = None
    problem: str | None = None
    warning: str | None = None


def resolve_recipients(home: Path, names: Sequence[str], *, now: datetime, warn_days: int = WARN_DAYS) -> list[KeyInfo]:
    """Look up each name (fingerprint, long key id, e-mail address, or part of a user id) among the public
    keys.

    Never raises for a bad key: every problem is reported at once, each in its KeyInfo. Raises KeyUnusableError if
    the home does not exist, ToolError if gpg cannot list it.
    """
    keys = _list_keys(home, secret=False)
    return [_resolve(name, keys, now, warn_days) for name in names]


def secret_fingerprints(home: Path) -> frozenset[str]:
    """Fingerprints of the primary keys whose secret encryption key is in ``home``: what can be decrypted
    there."""
    return frozenset(
        key["fingerprint"]
        for key in _list_keys(home, secret=True)
        if any("e" in part["cap"] and part.get("token") != "#" for part in _parts(key))
    )


def _list_keys(home: Path, *, secret: bool) -> list[dict[str, Any]]:
    usable = usable_home(home)
    try:
        engine = gnupg.GPG(
            gpgbinary=locate("gpg"),
            gnupghome=str(usable),
            env=Command(("gpg",)).environment(),
            options=["--no-options", "--no-auto-check-trustdb", "--trust-model", "always"],
        )
        listed = engine.list_keys(secret)
    except (OSError, ValueError) as error:
        raise ToolError(f"gpg cannot list the keys in {home}", detail=str(error)) from error
    if listed.returncode:
        raise ToolError(f"gpg cannot list the keys in {home}", detail=str(listed.stderr).strip())
    return list(listed)


def _resolve(name: str, keys: Sequence[dict[str, Any]], now: datetime, warn_days: int) -> KeyInfo:
    digits = _HEX.fullmatch(name.replace(" ", "").upper())
    if digits is not None and len(digits.group(1)) < 16:
        return KeyInfo(name, "", problem=f"{name} is a short key id, which anybody can forge: give the fingerprint")
    found = [key for key in keys if _matches(key, name, digits.group(1) if digits else None)]
    if not found:
        return KeyInfo(name, "", problem=f"no public key for {name}: import it with gpg --import")
    if len(found) > 1:
        prints = ", ".join(sorted(key["fingerprint"] for key in found))
        return KeyInfo(name, "", problem=f"{name} fits {len(found)} keys: name one by its fingerprint ({prints})")
    return _judged(name, found[0], now, warn_days)


def _matches(key: Mapping[str, Any], name: str, digits: str | None) -> bool:
    if digits is not None:
        return any(digits in (part["fingerprint"], part["keyid"]) for part in _parts(key))
    wanted = name.casefold()
    if "@" in wanted and not re.search(r"[\s<>]", wanted):
        return any(wanted == uid.casefold() or f"<{wanted}>" in uid.casefold() for uid in key["uids"])
    return any(wanted in uid.casefold() for uid in key["uids"])


def _judged(name: str, key: Mapping[str, Any], now: datetime, warn_days: int) -> KeyInfo:
    user_ids = tuple(key["uids"])
    label = f"the key {key['fingerprint']} ({user_ids[0] if user_ids else 'without user id'})"
    able = [part for part in _parts(key) if "e" in part["cap"] and part["trust"] not in ("r", "i")]
    primary_end = _moment(key["expires"])
    able_ends = [_moment(part["expires"]) for part in able]
    last = None if None in able_ends else max((end for end in able_ends if end is not None), default=None)
    ends = min((end for end in (primary_end, last) if end is not None), default=None)

    problem = warning = None
    if key["trust"] == "r":
        problem = f"{label} is revoked"
    elif "D" in key["cap"]:
        problem = f"{label} is disabled"
    elif key["trust"] == "i":
        problem = f"{label} is invalid"
    elif not able:
        problem = f"{label} has no encryption key"
    elif key["trust"] == "e" or (ends is not None and ends <= now):
        problem = f"{label} has expired{_on(ends)}: import the extended key"
    elif ends is not None and ends - now < timedelta(days=warn_days):
        warning = f"{label} expires{_on(ends)}: extend it and import it here"
    return KeyInfo(name, str(key["fingerprint"]), user_ids, ends, problem, warning)


def _parts(key: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The primary key and its subkeys. The primary's capital letters, which sum up the whole key, never
    match."""
    return [key, *key.get("subkey_info", {}).values()]


def _moment(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), UTC) if text else None


def _on(moment: datetime | None) -> str:
    return f" on {moment:%Y-%m-%d %H:%M} UTC" if moment is not None else ""


def public_keys(home: Path, fingerprints: Sequence[str]) -> bytes:
    """These public keys in one armored block, to be imported elsewhere. Raises KeyUnusableError, ToolError."""
    with Status() as status:
        return answer(gpg(home, status, "--no-autostart", "--armor", "--export", *fingerprints), status, b"")


def is_revoked(home: Path, fingerprint: str) -> bool:
    """Was the key (or the subkey) of this fingerprint revoked, as far as ``home`` knows? Raises ToolError."""
    return any(
        part["trust"] == "r" or key["trust"] == "r"
        for key in _list_keys(home, secret=False)
        for part in _parts(key)
        if part["fingerprint"] == fingerprint
    )


def new_phrase() -> str:
    """128 random bits in groups that can be read out and typed: ``3fa1-09bc-...``."""
    return "-".join(secrets.token_hex(2) for _ in range(_GROUPS))


def digest_of(phrase: str) -> str:
    """What is remembered of a phrase (64 hex). Blanks, dashes and capitals do not matter."""
    return hashlib.sha256("".join(c for c in phrase.lower() if c.isalnum()).encode()).hexdigest()


def matches(phrase: str, digest: str) -> bool:
    """Is this the phrase of which ``digest_of`` gave ``digest``? Takes equally long for every answer."""
    return hmac.compare_digest(digest_of(phrase), digest)


def seal_phrase(phrase: str, fingerprint: str, home: Path) -> str:
    """``phrase`` as an armored message for that key alone. Raises KeyUnusableError when gpg cannot encrypt for it."""
    with Status() as status:
        command = gpg(
            home, status, "--no-autostart", "--armor", "--recipient", fingerprint, "--encrypt", "--output", "-"
        )
        try:
            return answer(command, status, f"{phrase}\n".encode()).decode("ascii")
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
            opened = answer(command, status, armored.encode("ascii"))
        except ToolError as error:
            raise KeyUnusableError(f"no secret key in {home} opens the challenge", detail=error.detail) from error
        if "DECRYPTION_OKAY" not in {line.keyword for line in status.lines()}:
            raise KeyUnusableError(f"gpg does not confirm that it opened the challenge with a key in {home}")
    return opened.decode("ascii", "replace").strip()


def import_keys(home: Path, keys: bytes) -> tuple[str, ...]:
    """Add the public keys of ``keys`` to ``home``: their fingerprints, none where it holds no key. Raises
    KeyUnusableError, ToolError."""
    with Status() as status, writable_home(home) as gpg_home:
        program = ("gpg", "--batch", "--no-tty", "--no-options", "--homedir", str(gpg_home), "--status-fd")
        with contextlib.suppress(ToolError):  # what is no key at all; what was imported counts
            answer(
                Command((*program, str(status.descriptor), "--import-options", "import-minimal", "--import")),
                status,
                keys,
            )
        return tuple(line.text.split()[-1] for line in status.lines() if line.keyword == "IMPORT_OK")
