r"""Option files as MySQL and MariaDB client programs read them, and what they and ``tls:`` of the configuration mean
for the encryption of our own connections.

Rules from the manuals' pages on using option files and from mysys/my_default.c: groups in brackets; ``name
= value`` or a bare ``name``; ``#`` and ``;`` start a comment line, ``#`` outside quotes ends a line; one
pair of quotes around a value is dropped; the escapes ``\b \t \n \r \\ \s`` and escaped quotes are
decoded, any other backslash stays; dashes and underscores in names are the same; a later line wins,
whichever of the wanted groups it is in; ``!include`` and ``!includedir`` (only ``*.cnf``, sorted by
name) are followed. A file that everybody may write is ignored by the clients, so here it is a problem.

Without any setting a connection is encrypted where the server offers that, and nobody's certificate is looked at. What
an option file demands counts where the configuration has no ``tls:``.
External programs get the same in their own words (``Connection.option_groups``, ``client.ssl_mode``).
"""

from __future__ import annotations

import functools
import ipaddress
import os
import ssl
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pymysql

from backupd.model.errors import Problem
from backupd.process.folders import acting_uid, closed_words, read_plain, user_words

CLIENT_GROUPS = ("client", "client-server", "client-mariadb", "mysqldump", "mariadb-dump", "backupd")
"""The groups that say how a client reaches its server, and ours."""

_LARGEST = 8 * 1024**2
_DEEPEST = 10
"""The clients' own limit of nested includes."""

_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "r": "\r", "\\": "\\", "s": " ", '"': '"', "'": "'"}


@dataclass(frozen=True, slots=True)
class Option:
    """One line of ``file``: ``name`` with dashes, ``value`` None for a bare flag."""

    file: Path
    name: str
    value: str | None


@dataclass(frozen=True, slots=True)
class OptionFile:
    """What was read: the options in order, every file that was opened, everything wrong with them, and what to do about
    files that cannot be read."""

    options: tuple[Option, ...]
    files: tuple[Path, ...]
    problems: tuple[Problem, ...]
    hints: tuple[str, ...] = ()

    def get(self, *names: str) -> Option | None:
        """The last line that sets any of ``names`` (written with dashes)."""
        return next((option for option in reversed(self.options) if option.name in names), None)

    def value(self, *names: str) -> str:
        """The value of the last such line, or an empty string."""
        option = self.get(*names)
        return (option.value or "") if option else ""


def read_option_file(path: Path, groups: Collection[str] = CLIENT_GROUPS, *, alone: bool = False) -> OptionFile:
    """Read ``path`` and what it includes, or that file ``alone``; only ``groups`` are kept. Problems are in the
    answer, never raised.
    """
    reader = _Reader(frozenset(groups), alone=alone)
    reader.read(path, 0)
    return OptionFile(tuple(reader.options), tuple(reader.files), tuple(reader.problems), tuple(reader.hints))


def unreadable(path: Path, error: OSError) -> tuple[str, str]:
    """What kept us from reading ``path``, and what to do about it."""
    words = f"cannot be read: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        return words, f"write {path}, or name another file in the configuration"
    if not isinstance(error, PermissionError):
        return words, ""
    closed = next((folder for folder in reversed(path.absolute().parents) if not _is_open(folder)), path)
    who = user_words(acting_uid())
    hint = (
        f"let {who} pass through that folder (chmod o+x {closed})"
        if closed != path
        else f"give the file to {who} (chown, and chmod 600 {path})"
    )
    return (f"{words} (tried as {who}; {closed_words(closed)})", f"{hint}; or call backupd as a user who may read it")


def _is_open(folder: Path) -> bool:
    return os.access(folder, os.X_OK, effective_ids=True)


class _Reader:
    def __init__(self, groups: frozenset[str], *, alone: bool) -> None:
        self.alone = alone
        self.groups = groups
        self.options: list[Option] = []
        self.files: list[Path] = []
        self.problems: list[Problem] = []
        self.hints: list[str] = []

    def read(self, path: Path, depth: int) -> None:
        try:
            if path.stat().st_mode & stat.S_IWOTH and path.is_file():
                self._problem(path, None, "everybody may write it, so database clients ignore it: chmod o-w")
                return
            text = read_plain(path, _LARGEST, follow=True).decode("utf-8", "surrogateescape")
        except OSError as error:
            words, hint = unreadable(path, error)
            self._problem(path, None, words)
            self.hints.append(hint)
            return
        self.files.append(path)
        group = ""
        for number, raw in enumerate(text.splitlines(), start=1):
            line = raw.strip()
            if not line or line[0] in "#;":
                continue
            if line.startswith("!") and self.alone:
                self._problem(path, number, f"{line!r} is not followed")
            elif line.startswith("!"):
                self._include(path, number, line, depth)
            elif line.startswith("["):
                group, closed, _ = line[1:].partition("]")
                group = group.strip()
                if not closed:
                    self._problem(path, number, f"the group [{group} has no closing bracket")
                    return
            elif not group:
                self._problem(path, number, "an option before the first [group]")
                return
            elif group in self.groups:
                name, value = _split(line)
                if any("\udc80" <= letter <= "\udcff" for letter in value or ""):
                    self._problem(path, number, f"the value of {name} is not UTF-8")
                    continue
                self.options.append(Option(path, name, value))

    def _include(self, path: Path, number: int, line: str, depth: int) -> None:
        word, _, argument = line.partition(" ")
        # A client resolves a relative name against its current folder, which says nothing in a service.
        target = path.parent / argument.strip()
        if depth >= _DEEPEST:
            self._problem(path, number, f"more than {_DEEPEST} includes inside each other")
        elif not argument.strip() or word not in ("!include", "!includedir"):
            self._problem(path, number, f"{line!r} is neither !include FILE nor !includedir FOLDER")
        elif word == "!include":
            self.read(target, depth + 1)
        else:
            try:
                names = sorted(entry for entry in target.iterdir() if entry.suffix == ".cnf")
            except OSError as error:
                self._problem(path, number, f"{target} cannot be listed: {error.strerror}")
                return
            for name in names:
                self.read(name, depth + 1)

    def _problem(self, path: Path, line: int | None, message: str) -> None:
        self.problems.append(Problem(str(path), line, "", message))


def _split(line: str) -> tuple[str, str | None]:
    line = line[: _end_of_content(line)].rstrip()
    name, equals, value = line.partition("=")
    name = name.strip().replace("_", "-").removeprefix("loose-")
    return name, _unquote(value.strip()) if equals else None


def _end_of_content(line: str) -> int:
    """Where a comment begins: the first ``#`` outside quotes."""
    quote, escaped = "", False
    for index, letter in enumerate(line):
        if letter in "'\"" and not escaped:
            quote = "" if quote == letter else quote or letter
        elif letter == "#" and not quote:
            return index
        escaped = bool(quote) and letter == "\\" and not escaped
    return len(line)


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    letters: Iterator[str] = iter(value)
    decoded: list[str] = []
    for letter in letters:
        if letter != "\\":
            decoded.append(letter)
            continue
        following = next(letters, "")
        decoded.append(_ESCAPES.get(following, letter + following))
    return "".join(decoded)


_NAMES = ("ca", "capath", "cert", "key", "cipher", "verify-server-cert")
_MODE, _BY_NAME, _TLS = "ssl-mode", "VERIFY_IDENTITY", "ssl"
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
    found = {}
    mode = ""
    for option in options:
        if option.name in wanted:
            found[wanted[option.name]] = option.value or ""
        elif option.name == _MODE:
            mode = (option.value or "").upper()
    if mode == _BY_NAME:  # MySQL's word for the same
        found["verify-server-cert"] = ""
    return found


_DEMANDS = {"DISABLED": None, "PREFERRED": None, "REQUIRED": Tls.REQUIRED, "VERIFY_CA": Tls.VERIFY_CA}


def demanded(options: OptionFile) -> tuple[Tls | None, str]:
    """What an option file asks of a connection, and its words for that. None: nothing, or the server's name in the
    certificate, which ``from_options`` gives. Raises ValueError for a mode that no client knows.

    As with the clients: who names CAs wants one of them, unless a mode says another thing.
    """
    mode, plain = options.get(_MODE), options.get(_TLS, f"skip-{_TLS}")
    said = (mode.value or "").upper() if mode is not None else ""
    if mode is not None and said not in (*_DEMANDS, _BY_NAME):
        raise ValueError(f"{mode.value or ''!r} is none of {', '.join((*_DEMANDS, _BY_NAME))}")
    if verifies(from_options(options.options)):
        return None, ""
    if mode is not None:
        return (demand := _DEMANDS[said]), f"`{_MODE} = {said}` of the option file" if demand else ""
    if (named := options.get(f"{_TLS}-ca", f"{_TLS}-capath")) is not None and named.value:
        checks = options.get(f"{_TLS}-verify-server-cert") is None
        return (Tls.VERIFY_CA if checks else Tls.REQUIRED), f"`{named.name}` of the option file"
    if plain is not None and plain.name == _TLS and (plain.value or "").lower() not in _OFF:
        return Tls.REQUIRED, f"`{_TLS}` of the option file"
    return None, ""


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
    if verifies(options):  # PyMySQL compares the name only where a file of CAs is named, and knows no folder of them
        return {"ssl": _context(Tls.VERIFY_FULL, settled(Tls.VERIFY_FULL, options, ""))}
    return {f"ssl_{name}": options[name] for name in ("ca", "cert", "key") if options.get(name)}


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


def hint(error: BaseException, tls: Tls | None, said: str = "") -> str:
    """What to do when a connection failed because of TLS; "" where that was not the reason. ``said``: the setting that
    asks for ``tls``, where it is not the configuration's."""
    code = error.args[0] if isinstance(error, pymysql.err.Error) and error.args else 0
    cause = getattr(error, "original_exception", None) or error
    setting = said or (f"`tls: {tls}`" if tls is not None else "`ssl-verify-server-cert` of the option file")
    if code == _ONLY_TLS:
        return (
            "the server accepts encrypted connections only"
            + (", and the configuration says `tls: off`" if tls is Tls.OFF else "")
            + ": set `tls: verify-full` for it, and `tls_ca`"
        )
    if code == _DENIED and tls is Tls.OFF:
        return (
            "wrong user or password; or the server accepts encrypted connections only (require_secure_transport, or "
            "an account with REQUIRE SSL), for which MariaDB reports the same error, while the configuration says "
            "`tls: off`: then set `tls: verify-full`"
        )
    if code == _NO_TLS and not isinstance(cause, ssl.SSLError):
        return (
            f"{setting} requires TLS, but the server does not offer it: set ssl_cert and ssl_key on the server, or "
            "`tls: off` on a trusted network"
        )
    return _of_handshake(cause, setting) if isinstance(cause, ssl.SSLError) else ""


def _of_handshake(error: ssl.SSLError, setting: str) -> str:
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"{setting}: TLS handshake failed, no common protocol or cipher; see the error log of the server"
    if error.verify_code in _WRONG_NAME:
        return (
            f"{setting} requires a certificate for the name in `host`, but this one is for another name: set `host` to "
            "a name of the certificate, give the server a certificate for this name, or set `tls: verify-ca`, which "
            "accepts every certificate of that CA"
        )
    return (
        f"{setting} requires a certificate of the CA in `tls_ca` (or ssl-ca of the option file, or of the system): set "
        "`tls_ca` to the CA that signed the certificate of the server. The CA of a server that created its "
        "certificate itself is ca.pem in its data directory"
    )
