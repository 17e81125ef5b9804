"""The keys by which hosts are known, as ssh keeps them in a file (sshd(8), SSH_KNOWN_HOSTS)."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

_HASHED = "|1|"
_REVOKED = "@revoked"


@dataclass(frozen=True, slots=True)
class HostKey:
    """``kind`` as the file names it (``ssh-ed25519``); ``blob``: the public key itself."""

    kind: str
    blob: bytes

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint}"

    @property
    def fingerprint(self) -> str:
        """As ssh shows it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class KnownHost:
    """What a file says of one host."""

    keys: tuple[HostKey, ...]
    revoked: tuple[HostKey, ...]


def host_name(host: str, port: int) -> str:
    """How the file spells it."""
    return host if port == 22 else f"[{host}]:{port}"


def known_host(file: Path, host: str, port: int) -> KnownHost:
    """Lines that ssh would not understand are passed over, certificate authorities too. Raises OSError."""
    keys: list[HostKey] = []
    revoked: list[HostKey] = []
    for line in file.read_text(errors="replace").splitlines():
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#") or marker not in ("", _REVOKED):
            continue
        try:
            key = HostKey(fields[1], base64.b64decode(fields[2], validate=True))
        except binascii.Error:
            continue
        if _is_meant(fields[0], host_name(host, port).lower()):
            (revoked if marker else keys).append(key)
    return KnownHost(tuple(keys), tuple(revoked))


def _is_meant(patterns: str, name: str) -> bool:
    if patterns.startswith(_HASHED):
        salt, _, digest = patterns.removeprefix(_HASHED).partition("|")
        try:
            made = hmac.new(base64.b64decode(salt), name.encode(), "sha1").digest()
            return hmac.compare_digest(made, base64.b64decode(digest))
        except binascii.Error:
            return False
    listed = patterns.lower().split(",")
    if any(_fits(pattern[1:], name) for pattern in listed if pattern.startswith("!")):
        return False
    return any(_fits(pattern, name) for pattern in listed)


def _fits(pattern: str, name: str) -> bool:
    """``*`` and ``?`` alone mean more than themselves: brackets stand around hosts with ports."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))
