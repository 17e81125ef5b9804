"""Where the REST interface and the web page are reached, and what is wrong with that."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from backupd.app.context.settings import Settings
from backupd.backup.finding import Finding, error, fine, warning
from backupd.model.text import format_time
from policies.configuration import Api, is_everywhere, is_loopback

_SUBJECT = "api"
_WARN = timedelta(days=14)
"""Certificates that are renewed by themselves are so long before."""


def address(api: Api) -> str:
    """The URL that messages name."""
    if api.url:
        return api.url
    port = api.listen.rpartition(":")[2]
    where = f"{socket.gethostname()}:{port}" if is_everywhere(api.host) else api.listen
    return f"{'https' if api.tls is not None else 'http'}://{where}"


def findings(settings: Settings, now: datetime) -> list[Finding]:
    """What `backupd check` says about it."""
    api = settings.api
    if not api.enabled:
        return []
    return [*_in_the_clear(api), *_open_metrics(api), *_guessed(api, settings), *_certificate(api, now)]


def _open_metrics(api: Api) -> Iterator[Finding]:
    if api.metrics == "auto" and api.is_private:
        yield fine(
            _SUBJECT,
            f"every local user can read at {address(api)}/metrics, without a token: names of servers, "
            "destinations and policies, sizes, times and states (`api.metrics: token` asks for one)",
        )


def _in_the_clear(api: Api) -> Iterator[Finding]:
    if not is_loopback(api.host) and api.tls is None and not (api.url or "").lower().startswith("https://"):
        yield warning(
            _SUBJECT,
            f"tokens travel in the clear: other hosts can connect to {api.listen}, without TLS",
            "set api.tls, or listen on 127.0.0.1 behind a proxy with a certificate and set api.url to its address",
        )


def _guessed(api: Api, settings: Settings) -> Iterator[Finding]:
    sends = settings.alerts.email is not None or settings.alerts.channels_file is not None
    if sends and api.url is None and is_everywhere(api.host):
        yield warning(
            _SUBJECT,
            f"links in mails lead to {address(api)}, the host name of this machine",
            "set api.url to the address that people use",
        )


def _certificate(api: Api, now: datetime) -> Iterator[Finding]:
    if api.tls is None:
        return
    file = api.tls.certificate
    try:
        end = expiry(file)
    except (OSError, ValueError) as problem:
        yield error(
            _SUBJECT,
            f"the certificate {file} cannot be read: {problem}",
            "it must be a PEM file that begins with this host's own certificate",
        )
        return
    renew = f"replace {file} with the new one, then `systemctl reload backupd`"
    if end <= now:
        yield error(_SUBJECT, f"the certificate {file} has expired on {format_time(end)}", renew)
    elif end - now < _WARN:
        yield warning(_SUBJECT, f"the certificate {file} expires on {format_time(end)}", renew)


def expiry(file: Path) -> datetime:
    """The end of the first certificate in a PEM file. Raises OSError, ValueError."""
    _, begin, rest = file.read_text(encoding="utf-8", errors="replace").partition("-----BEGIN CERTIFICATE-----")
    body, end, _ = rest.partition("-----END CERTIFICATE-----")
    if not begin or not end:
        raise ValueError("there is no certificate in it")
    try:
        (_, whole), *_ = _parts(ssl.PEM_cert_to_DER_cert(begin + body + end))
        (_, to_be_signed), *_ = _parts(whole)
        # RFC 5280: [0] version (may be left out), serial number, algorithm, issuer, validity (from, to) ...
        _serial, _algorithm, _issuer, validity, *_ = [text for tag, text in _parts(to_be_signed) if tag != _VERSION]
        _from, (tag, text) = _parts(validity)
        words = text.decode("ascii")
        if tag == _UTC_TIME:
            words = ("20" if words < "50" else "19") + words
        return datetime.strptime(words, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
    except (ValueError, IndexError) as problem:
        raise ValueError("the certificate in it is damaged") from problem


_VERSION, _UTC_TIME = 0xA0, 0x17


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element of ``der``, the content of a sequence. Raises ValueError, IndexError."""
    found, at = [], 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(der[at : at + count], "big"), at + count
        if at + size > len(der):
            raise ValueError("an element is longer than what it is in")
        found.append((tag, der[at : at + size]))
        at += size
    return found
