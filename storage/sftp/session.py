"""SSH connections to the host of an SFTP destination (made, checked, kept for the next caller, given up), and the files
on their way over them.

A key logs in, never a password; the host must show a key that is in the file of known hosts, which is read as ssh does
(sshd(8), SSH_KNOWN_HOSTS). One connection serves one caller at a time, so that a caller who waits delays nobody. A
caller that finds a kept connection dead gets a new one. Uploads and downloads survive a lost connection: they go on
over a new one at the byte where the old one ended.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import io
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import paramiko
from paramiko.pkey import UnknownKeyType

from backupd.model.errors import DestinationError, UnreachableError
from storage.config import SftpConfig
from storage.sftp.wire import BLOCK, END, POSIX_RENAME, WINDOW, Attributes, LostError, StatusError, Wire

_HASHED = "|1|"
_REVOKED = "@revoked"
ANSWER_SECONDS = 20.0
"""How long an answer may take."""
CONNECT_SECONDS = 15.0
"""How long a new connection may take, altogether."""
_PROBE_SECONDS = 5.0
_FRESH_SECONDS = 20.0
"""A connection that was used so lately is taken as it is, an older one is asked whether it is still there."""
_KEEPALIVE_SECONDS = 30
_KEPT = 4
"""Connections that are kept when nobody uses them."""
_AT_ONCE = 4
"""Connections that are made at once: servers turn away whoever knocks too often (MaxStartups)."""
Result = TypeVar("Result")
_HINT_REACH = (
    "check that the host is up and that this machine can reach the port. Other work continues; backupd copies the "
    "missing data later"
)


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


# Its threads log with whole tracebacks what is raised to us anyway.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


@dataclass(eq=False)
class Session:
    """A connection. ``used`` by the monotonic clock; ``fresh``: nobody has used it before."""

    transport: paramiko.Transport
    wire: Wire
    used: float
    fresh: bool = True

    def close(self) -> None:
        """End the connection."""
        _hang_up(self.transport)


class Sessions:
    """The connections of one destination, for any number of threads. ``seconds``: how long an answer may take."""

    def __init__(self, name: str, config: SftpConfig, seconds: float = ANSWER_SECONDS) -> None:
        self._name = name
        self._config = config
        self._seconds = seconds
        self._lock = threading.Lock()
        self._idle: list[Session] = []
        self._knocking = threading.Semaphore(_AT_ONCE)

    def take(self) -> Session:
        """A connection that answers; ``give`` it back or ``drop`` it. Raises DestinationError."""
        while True:
            with self._lock:
                session = self._idle.pop() if self._idle else None
            if session is None:
                return self._connect()
            if time.monotonic() - session.used < _FRESH_SECONDS and session.transport.is_active():
                return session
            if self._answers(session):
                return session
            self.drop(session)

    def give(self, session: Session) -> None:
        """Keep it for the next one. What was asked for on it and not heard is heard out first."""
        try:
            session.wire.settle()
        except LostError:
            self.drop(session)
            return
        session.used, session.fresh = time.monotonic(), False
        with self._lock:
            if len(self._idle) < _KEPT:
                self._idle.append(session)
                return
        session.close()

    def drop(self, session: Session) -> None:
        """It is of no use any more, and those that were kept hardly are: they are closed, too."""
        session.close()
        self.close()

    def close(self) -> None:
        """Close those that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def begin(self, call: Callable[[Wire], Result]) -> tuple[Session, Result]:
        """``call`` on a connection, and that connection: ``give`` it back or ``drop`` it. It is called again on another
        one when a kept one turns out to be lost, so it must bear to be repeated. Raises DestinationError, LostError,
        and what it raises."""
        while True:
            session = self.take()
            try:
                return session, call(session.wire)
            except LostError as error:
                self.drop(session)
                if session.fresh or error.hangs:
                    raise
            except Exception:
                self.give(session)
                raise
            except BaseException:  # in the middle of an answer, perhaps
                self.drop(session)
                raise

    def run(self, call: Callable[[Wire], Result]) -> Result:
        """As ``begin``, for what is over with ``call``."""
        session, result = self.begin(call)
        self.give(session)
        return result

    def _answers(self, session: Session) -> bool:
        session.wire.wait_for(_PROBE_SECONDS)
        try:
            session.wire.resolve(".")
        except LostError:
            return False
        session.wire.wait_for(self._seconds)
        return True

    # Connecting

    def _connect(self) -> Session:
        deadline = time.monotonic() + CONNECT_SECONDS
        if not self._knocking.acquire(timeout=CONNECT_SECONDS):
            raise self._failure(
                "other threads already wait for a connection, and the server does not answer", _HINT_REACH
            )
        try:
            try:
                sock = socket.create_connection((self._config.host, self._config.port), timeout=_left(deadline))
            except OSError as error:
                raise self._failure(error.strerror or str(error) or "no answer", _HINT_REACH) from error
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._seconds * 1000))
                transport = paramiko.Transport(sock)
            except BaseException:
                sock.close()
                raise
            try:
                return self._log_in(transport, deadline)
            except BaseException:
                _hang_up(transport)
                raise
        finally:
            self._knocking.release()

    def _log_in(self, transport: paramiko.Transport, deadline: float) -> Session:
        known = self._known_host()
        kinds = {key.kind for key in known.keys}
        options = transport.get_security_options()
        options.ciphers = sorted(options.ciphers, key=lambda name: "gcm" not in name)  # the ones that cost least
        options.key_types = sorted(options.key_types, key=lambda name: _family(name) not in kinds)
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = _left(deadline)
        try:
            transport.start_client(timeout=_left(deadline))
            shown = transport.get_remote_server_key()
        except (paramiko.SSHException, OSError, EOFError) as error:
            why = "no answer" if time.monotonic() >= deadline else _words(error)
            raise self._failure(f"the SSH connection failed: {why}", _HINT_REACH) from error
        self._check_host(HostKey(shown.get_name(), shown.asbytes()), known)
        key = self._own_key()
        transport.auth_timeout = _left(deadline)
        try:
            more = transport.auth_publickey(self._config.user, key)
        except paramiko.AuthenticationException as error:
            raise self._failure(
                f"user {self._config.user} may not log in with this key: {_words(error)}",
                f"put the public half of {self._config.key_file} into ~/.ssh/authorized_keys of "
                f"{self._config.user} on {self._config.host}",
            ) from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._failure(f"the login failed: {_words(error)}", _HINT_REACH) from error
        if more:
            raise self._failure(
                f"the server requires more than a key: {', '.join(more)}",
                f"let {self._config.user} log in with the key alone",
            )
        transport.set_keepalive(_KEEPALIVE_SECONDS)
        return self._begin(transport, deadline)

    def _begin(self, transport: paramiko.Transport, deadline: float) -> Session:
        try:
            channel = transport.open_session(timeout=_left(deadline))
            channel.settimeout(_left(deadline))
            channel.invoke_subsystem("sftp")
            wire = Wire(channel, _left(deadline))
            wire.begin()
            wire.wait_for(self._seconds)
        except (paramiko.SSHException, OSError, EOFError, LostError) as error:
            raise self._failure(
                f"SSH login succeeded, but the SFTP subsystem did not start: {_words(error)}",
                f"is `Subsystem sftp` in its sshd_config, and may {self._config.user} use it? Try: "
                f"sftp -P {self._config.port} {self._config.user}@{self._config.host}",
            ) from error
        if POSIX_RENAME not in wire.extensions:
            raise self._failure(
                f"its SFTP server does not offer {POSIX_RENAME}: nothing can be replaced in one step",
                "use OpenSSH's server, or another that offers it",
            )
        return Session(transport, wire, time.monotonic())

    def _own_key(self) -> paramiko.PKey:
        path = self._config.key_file
        try:
            return paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError) as error:  # the latter is what the library below raises
            raise self._failure(
                f"the key {path} has a passphrase",
                f"create a key without one: ssh-keygen -t ed25519 -N '' -f {path}",
            ) from error
        except OSError as error:
            raise self._failure(
                f"the key {path} cannot be read: {error.strerror or error}",
                "see key_file of this destination in the configuration",
            ) from error
        except (paramiko.SSHException, UnknownKeyType, ValueError) as error:
            raise self._failure(
                f"{path} holds no usable private key: {_words(error)}",
                "see key_file of this destination in the configuration",
            ) from error

    # The host's key

    def _known_host(self) -> KnownHost:
        path = self._config.known_hosts
        try:
            return known_host(path, self._config.host, self._config.port)
        except OSError as error:
            raise self._failure(
                f"the file of known hosts {path} cannot be read: {error.strerror or error}",
                f"make it with ssh-keyscan -p {self._config.port} {self._config.host}, and compare its "
                "fingerprints with those from the host's administrator",
            ) from error

    def _check_host(self, shown: HostKey, known: KnownHost) -> None:
        path, name = self._config.known_hosts, host_name(self._config.host, self._config.port)
        if shown in known.revoked:
            raise self._failure(
                f"its host key was revoked: it shows {shown}",
                f"{path} says so: ask the host's administrator for its new key",
            )
        if shown in known.keys:
            return
        if not known.keys:
            raise self._failure(
                f"its host key is not known: it shows {shown}; {path} has none for {name}",
                "compare that fingerprint with the one from the host's administrator; when "
                f"they are equal: ssh-keyscan -p {self._config.port} {self._config.host} >> {path}",
            )
        raise self._failure(
            f"its host key has changed: it shows {shown}; {path} has {', '.join(map(str, known.keys))}",
            "the connection may be intercepted: nothing was sent. Ask the host's administrator. If the host "
            f"was set up anew: ssh-keygen -f {path} -R '{name}', then add the new key",
        )

    def _failure(self, detail: str, hint: str) -> UnreachableError:
        where = f"{self._config.user}@{self._config.host}:{self._config.port}"
        return UnreachableError(f"destination {self._name} ({where}) cannot be reached", detail=detail, hint=hint)


def _hang_up(transport: paramiko.Transport) -> None:
    transport.close()
    transport.sock.close()  # which is left open where the connection had ended by itself


def _family(name: str) -> str:
    """The kind of key that a kind of signature needs."""
    return "ssh-rsa" if name.startswith("rsa-sha2-") else name


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


_FILE_MODE = 0o640
SYNC_SECONDS = 40.0
"""How long a disk may take to make a file durable."""
_IN_A_ROW = 3
"""Lost connections without a byte in between after which nobody tries again."""


class Upload:
    """A new file at ``path``. What the server has not confirmed is kept (2 MiB), to be sent again.

    Raises StatusError, LostError, DestinationError. Afterwards: ``finish`` or ``give_up``.
    """

    def __init__(self, sessions: Sessions, path: str) -> None:
        self._sessions = sessions
        self._path = path
        self._session, self._handle = sessions.begin(lambda wire: wire.create(path, _FILE_MODE))
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._under_way: deque[tuple[int, int, bytes]] = deque()
        self._size = 0
        self._lost = 0
        self._over = False

    def write(self, chunk: bytes) -> None:
        """Send ``chunk``; waits while too much is unconfirmed."""
        for start in range(0, len(chunk), BLOCK):
            piece = chunk[start : start + BLOCK]
            self._waiting.append((self._size, piece))
            self._size += len(piece)
            self._steadily(lambda wire: self._send(wire, WINDOW - 1))

    def finish(self) -> Attributes:
        """Everything has arrived and is durable."""
        found = self._steadily(self._end)
        self._over = True
        self._sessions.give(self._session)
        if found.size != self._size:
            raise StatusError(END, f"{self._size} bytes were sent, and the file has {found.size}")
        return found

    def give_up(self, *, sure: bool) -> None:
        """Let the connection go; ``sure``: what it said last was heard to its end."""
        if self._over:
            return
        self._over = True
        _part(self._sessions, self._session, self._handle, sure=sure)

    def _send(self, wire: Wire, open_ones: int) -> None:
        """Send what waits, and let no more than ``open_ones`` be unconfirmed."""
        while self._waiting:
            offset, piece = self._waiting[0]
            self._under_way.append((wire.ask_write(self._handle, offset, piece), offset, piece))
            self._waiting.popleft()
            self._confirm(wire, WINDOW)
        self._confirm(wire, open_ones)

    def _confirm(self, wire: Wire, open_ones: int) -> None:
        while len(self._under_way) > open_ones:
            wire.done(self._under_way[0][0])
            self._under_way.popleft()
            self._lost = 0

    def _end(self, wire: Wire) -> Attributes:
        self._send(wire, 0)
        return wire.finish(self._handle, seconds=SYNC_SECONDS)

    def _steadily(self, step: Callable[[Wire], Result]) -> Result:
        while True:
            try:
                return step(self._session.wire)
            except LostError as error:
                self._lost += 1
                if error.hangs or self._lost >= _IN_A_ROW:
                    raise
                self._sessions.drop(self._session)
                self._session, self._handle = self._sessions.begin(lambda wire: wire.reopen(self._path))
                self._waiting.extendleft(reversed([(offset, piece) for _number, offset, piece in self._under_way]))
                self._under_way.clear()


class Download(io.RawIOBase):
    """``length`` bytes of the file at ``path`` from ``offset`` (to its end when None); never others, never fewer.

    ``failed`` turns an error of reading into one of ours; opening raises StatusError, LostError, DestinationError.
    One piece is asked for at first, then more and more of them ahead, up to WINDOW.
    """

    def __init__(
        self,
        sessions: Sessions,
        path: str,
        offset: int,
        length: int | None,
        failed: Callable[[StatusError | LostError], DestinationError],
    ) -> None:
        super().__init__()
        self._sessions = sessions
        self._path = path
        self._failed = failed
        self._ahead: deque[tuple[int, int]] = deque()
        self._width = 1
        self._lost = 0
        self._rest = memoryview(b"")
        self._session: Session | None = None
        self._session, (self._handle, self._file) = sessions.begin(self._open)
        self._at = self._asked = offset
        self._end = self._file.size if length is None else min(self._file.size, offset + length)

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # Buffer is not in 3.11
        """The next bytes; asked for again on a new connection where the old one was lost. Raises DestinationError."""
        if not self._rest and self._at < self._end:
            try:
                self._rest = memoryview(self._piece())
            except (StatusError, LostError) as error:
                raise self._failed(error) from error
            except BaseException:  # in the middle of an answer, perhaps
                self._leave(sure=False)
                raise
        count = min(len(buffer), len(self._rest))
        memoryview(buffer)[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        """Close the file there and give the connection back."""
        if not self.closed:
            self._leave(sure=True)
        super().close()

    def _open(self, wire: Wire) -> tuple[bytes, Attributes]:
        handle = wire.open(self._path)
        return handle, wire.fstat(handle)

    def _piece(self) -> bytes:
        while True:
            if self._session is None:
                self._session, (self._handle, file) = self._sessions.begin(self._open)
                if file != self._file:
                    raise StatusError(END, "the connection was lost, and the file was replaced meanwhile")
            try:
                return self._next(self._session.wire)
            except LostError as error:
                self._leave(sure=False)
                self._lost += 1
                if error.hangs or self._lost >= _IN_A_ROW:
                    raise
            except StatusError as error:
                if error.code != END:
                    raise
                raise StatusError(END, f"it ends after {self._at} bytes, and it had {self._file.size}") from error

    def _next(self, wire: Wire) -> bytes:
        while len(self._ahead) < self._width and self._asked < self._end:
            wanted = min(BLOCK, self._end - self._asked)
            self._ahead.append((wire.ask_bytes(self._handle, self._asked, wanted), wanted))
            self._asked += wanted
        number, wanted = self._ahead.popleft()
        piece = wire.bytes_of(number)
        if not 0 < len(piece) <= wanted:
            raise LostError(f"the server sent {len(piece)} bytes where {wanted} were asked for")
        self._at += len(piece)
        if len(piece) < wanted:  # what was asked for ahead is not what comes next
            wire.settle()
            self._ahead.clear()
            self._asked = self._at
        self._width = min(WINDOW, self._width * 2)
        self._lost = 0
        return piece

    def _leave(self, *, sure: bool) -> None:
        """Give the connection back; ``sure``: what it said last was heard to its end."""
        session, self._session = self._session, None
        self._ahead.clear()
        self._asked, self._width = self._at, 1
        if session is not None:
            _part(self._sessions, session, self._handle, sure=sure)


def _part(sessions: Sessions, session: Session, handle: bytes, *, sure: bool) -> None:
    """Close a file and give its connection back; drop a connection that was not heard out for ``sure``. An open file
    keeps its room on the disk, even when it has no name any more."""
    if not sure:
        sessions.drop(session)
        return
    try:
        session.wire.close(handle)
    except LostError:
        sessions.drop(session)
    except StatusError:  # what could not be written is reported by the close, too
        sessions.give(session)
    else:
        sessions.give(session)
