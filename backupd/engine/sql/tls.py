"""Who stands between us and a server: what `tls:` of the configuration means, for our own connections.

Without a word of it a connection is encrypted where the server offers that, and nobody's certificate is looked at.
External programs are told in their own words (``Connection.option_groups``, ``clientoptions``).
"""

from __future__ import annotations

import functools
import ipaddress
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import pymysql

from backupd.engine.sql.option_files import Option

_NAMES = ("ca", "capath", "cert", "key", "cipher", "verify-server-cert")
_OFF = ("0", "off", "false", "disabled")
_VERIFYING = ("ca", "capath", "verify-server-cert")
_WRONG_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_NO_TLS = 2026
_ONLY_TLS = 3159
_DENIED = 1045


class Tls(StrEnum):
    """What is asked of a connection over TCP."""

    VERIFY_FULL = "verify-full"
    """A certificate of a CA that we know, for the name that we asked for."""
    VERIFY_CA = "verify-ca"
    """One of a CA that we know."""
    REQUIRED = "required"
    """Any: nobody reads along, but anybody may answer."""
    OFF = "off"


def from_options(options: Iterable[Option]) -> dict[str, str]:
    """What an option file says of TLS, as ``Connection.ssl``."""
    wanted = {f"ssl-{name}": name for name in _NAMES}
    return {wanted[option.name]: option.value or "" for option in options if option.name in wanted}


def settled(tls: Tls | None, said: Mapping[str, str], ca: str) -> dict[str, str]:
    """``said`` by an option file, with what ``tls`` makes of it. ``ca``: of the configuration, "" for none; where
    nobody names one it is the system's."""
    named = {**said, "ca": ca} if ca else dict(said)
    if tls is None:
        return named
    if tls is Tls.OFF:
        return {}
    kept = {name: value for name, value in named.items() if name not in _VERIFYING}
    if tls is Tls.REQUIRED:
        return kept
    kept |= {name: named[name] for name in ("ca", "capath") if named.get(name)}
    if not {"ca", "capath"} & set(kept):
        usual = ssl.get_default_verify_paths()
        kept["ca"] = usual.cafile or usual.openssl_cafile
    return {**kept, "verify-server-cert": ""} if tls is Tls.VERIFY_FULL else kept


def verifies(options: Mapping[str, str]) -> bool:
    """Do these (``Connection.ssl``) ask for a certificate with the server's name?"""
    value = options.get("verify-server-cert")
    return value is not None and value.lower() not in _OFF


def is_this_host(host: str) -> bool:
    """Does what is sent to ``host`` never leave this one? By the name alone: what a name resolves to may be forged."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost" or host.lower().rstrip(".").endswith(".localhost")


def arguments(tls: Tls | None, options: Mapping[str, str]) -> dict[str, Any]:
    """Of PyMySQL, for a connection over TCP. Raises OSError for files that cannot be read."""
    if tls is Tls.OFF:
        return {"ssl_disabled": True}
    if tls is not None:
        return {"ssl": _context(tls, options)}
    if not options:
        return {"ssl_disabled": True}  # see ``opportunistic``
    found: dict[str, Any] = {f"ssl_{name}": options[name] for name in ("ca", "cert", "key") if options.get(name)}
    return {**found, "ssl_verify_cert": True, "ssl_verify_identity": True} if verifies(options) else found


@functools.cache
def opportunistic() -> ssl.SSLContext:
    """For a server that offers encryption, where nothing was said of certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(tls: Tls, said: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = tls is Tls.VERIFY_FULL
    if tls is Tls.REQUIRED:
        context.verify_mode = ssl.CERT_NONE
    else:
        with _naming(said.get("ca"), said.get("capath")):
            context.load_verify_locations(cafile=said.get("ca") or None, capath=said.get("capath") or None)
    if said.get("cert"):
        with _naming(said["cert"], said.get("key")):
            context.load_cert_chain(said["cert"], said.get("key") or None)
    if said.get("cipher"):
        context.set_ciphers(said["cipher"])
    return context


@contextmanager
def _naming(*files: str | None) -> Iterator[None]:
    """OpenSSL's errors do not say which file they are about."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{' and '.join(filter(None, files))}: {error.strerror or error}") from error


def hint(error: BaseException, tls: Tls | None) -> str:
    """What to do when a connection failed because of TLS; "" where that was not the reason."""
    code = error.args[0] if isinstance(error, pymysql.err.Error) and error.args else 0
    cause = getattr(error, "original_exception", None) or error
    setting = f"`tls: {tls}`" if tls is not None else "`ssl-verify-server-cert` of the option file"
    if code == _ONLY_TLS:
        return (
            "the server takes encrypted connections only"
            + (", and the configuration says `tls: off`" if tls is Tls.OFF else "")
            + ": set `tls: verify-full` for it, and `tls_ca`"
        )
    if code == _DENIED and tls is Tls.OFF:
        return (
            "wrong user or password; or, as the configuration says `tls: off`: this server takes encrypted "
            "connections only (require_secure_transport, or an account with REQUIRE SSL), and MariaDB's answer to "
            "others is the same. Then set `tls: verify-full`"
        )
    if code == _NO_TLS and not isinstance(cause, ssl.SSLError):
        return (
            f"{setting} asks for encryption, and the server (or whoever answers in its place) offers none: set "
            "ssl_cert and ssl_key there; or say `tls: off`, where nobody can stand between"
        )
    return _of_handshake(cause, setting) if isinstance(cause, ssl.SSLError) else ""


def _of_handshake(error: ssl.SSLError, setting: str) -> str:
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"{setting}: both ends agree on no way to encrypt; the server's error log says more"
    if error.verify_code in _WRONG_NAME:
        return (
            f"{setting} wants a certificate for the name that is given as `host`, and this one is for another: "
            "is it the right server? Name it by a name of its certificate, give it a certificate for this "
            "name, or say `tls: verify-ca`, which takes every certificate of that CA"
        )
    return (
        f"{setting} wants a certificate of the CA in `tls_ca` (or ssl-ca of the option file, or of the "
        "system): give there the CA that signed the server's. One that the server made itself is ca.pem in "
        "its data directory"
    )
