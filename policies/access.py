"""What the configuration says about the REST interface and the web page."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from policies.fields import Duration, LocalPath, Section, Words

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"({_LABEL}\.)*(?!([0-9]+|0[xX][0-9A-Fa-f]*)\Z){_LABEL}")
"""A host's. What ends in a number is an address or nothing: ``0`` and ``0x7f.1`` are addresses for the system only."""


def _listen(text: str) -> str:
    host, found, port = text.rpartition(":")
    if not found or not _is_host(host) or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
        raise ValueError("must be ADDRESS:PORT, as in 127.0.0.1:8642 or [::1]:8642")
    return text


def _is_host(host: str) -> bool:
    try:
        if host.startswith("[") and host.endswith("]"):
            return bool(ipaddress.IPv6Address(host[1:-1]))
        return _NAME.fullmatch(host) is not None or bool(ipaddress.IPv4Address(host))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Can only this host connect there?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_everywhere(host: str) -> bool:
    """Does it stand for every address of this host, so that nobody can go there?"""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


class Tls(Section):
    """The certificate of the REST interface and the web page."""

    certificate: LocalPath = Field(
        description="The certificate, with what is between it and its root, as PEM.", examples=["/etc/backupd/tls.pem"]
    )
    key: LocalPath = Field(
        description="Its private key, as PEM, without a passphrase.", examples=["/etc/backupd/tls.key"]
    )


class Api(Section):
    """The REST interface and the web page."""

    enabled: bool = Field(True, description="Whether the service offers them.", examples=[False])
    listen: Annotated[str, AfterValidator(_listen)] = Field(
        "127.0.0.1:8642", description="Address and port to listen on.", examples=["127.0.0.1:8642"]
    )
    tls: Tls | None = Field(
        None,
        description="Without it connections are in the clear, which `check` warns of where "
        "others than this host can connect.",
    )
    url: Words | None = Field(
        None,
        description="The address that people reach it at, for the links in mails; by "
        "default made of listen, with this host's name where that is every "
        "address. With https:// the page's cookies are of TLS "
        "alone.",
        examples=["https://backup.example.com"],
    )
    metrics: Literal["auto", "open", "token"] = Field(
        "auto",
        examples=["token"],
        description="Who may read /metrics: anybody who can connect, or holders of a token; `auto` asks for a token "
        "where others than this host can connect, by listen or by way of url.",
    )
    session: Duration = Field(
        "12h", validate_default=True, examples=["12h"], description="How long somebody stays logged in to the web page."
    )

    @property
    def host(self) -> str:
        """That of ``listen``."""
        return self.listen.rpartition(":")[0].strip("[]").lower()

    @property
    def is_private(self) -> bool:
        """Does nobody but this host reach it, as far as this says?"""
        named = urlsplit(self.url).hostname if self.url else None
        return is_loopback(self.host) and (named is None or is_loopback(named.lower()))
