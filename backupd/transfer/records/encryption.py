"""Compression and encryption (sealing), and back.

Sealed is: zstd, padded, then OpenPGP for public keys; ``gpg -d | zstd -d`` opens it, too.

Unsealing returns nothing before gpg has agreed to all of it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from operator import methodcaller
from pathlib import Path
from typing import BinaryIO

import zstandard

from backupd.model.errors import BackupdError, DamagedError, KeyUnusableError, ToolError
from backupd.process.command import Command
from backupd.process.pipeline import Pipeline
from backupd.transfer.records.gpg import Status, StatusLine, gpg, through
from backupd.transfer.records.sealed_format import WINDOW_LIMIT, FrameDecoder, damaged, key_ids, padding

_FINGERPRINT = re.compile(r"[0-9A-F]{40}(?:[0-9A-F]{24})?!?")
_REASONS = {
    "1": "is not in this GnuPG home",
    "2": "is ambiguous",
    "3": "cannot encrypt",
    "4": "is revoked",
    "5": "has expired",
    "10": "is not trusted",
    "13": "is disabled",
}
_UNUSABLE = "cannot be used: it is revoked or disabled, or has no encryption key"
AT_ONCE = 8
"""gpg processes that may decrypt at the same time. gpg-agent 2.2 does it all within 32 KiB of locked memory:
with sixteen RSA-4096 decryptions at once it fails with "Cannot allocate memory", which gpg reports as a
missing key."""
_ATTEMPTS = 6
_SLICE = 256 * 1024
_SIP = 2 * 1024
"""Bytes that are decompressed at once where no size is stated before: zstd makes up to 32,768 times more of them."""
_slots = threading.BoundedSemaphore(AT_ONCE)
# Codes of libgpg-error (the low 16 bits).
_ALTERED_CODES = frozenset({4, 10, 12, 14, 18, 19, 30, 41, 65, 66, 67, 79, 89, 139})
"""The secret key works but what it opens makes no sense: wrong checksum, padding, algorithm, length ..."""
_OPENED = frozenset({"DECRYPTION_KEY", "DECRYPTION_INFO"})
"""What gpg reports once it has the session key; the second only when it can read the head of the data, too."""
_NO_AGENT = "can't connect to the agent"
"""What gpg writes where it reports every secret key as missing, because there is nobody whom it could ask for them."""
_PASSPHRASE_CODES = {
    11: "the passphrase is wrong",
    31: "the passphrase is missing",
    85: "the passphrase is missing",
    99: "the passphrase was not given",
    177: "the passphrase is missing",
}


class Sealer:
    """Seals for fixed recipients; thread-safe, each call runs a gpg of its own.

    ``recipients``: full fingerprints. Of a primary key's fingerprint gpg takes the newest valid encryption
    subkey, so a rotated subkey is used as soon as it is imported; a subkey's own fingerprint followed by
    ``!`` pins that subkey. ``gnupg_home`` needs public keys only. ``level``: zstd's.
    """

    def __init__(self, recipients: Sequence[str], gnupg_home: Path, level: int = 1) -> None:
        chosen = tuple(dict.fromkeys(name.replace(" ", "").upper() for name in recipients))
        if not chosen:
            raise KeyUnusableError(
                "no recipients are configured, so nothing can be encrypted", hint="set encryption.recipients"
            )
        for name in chosen:
            if not _FINGERPRINT.fullmatch(name):
                raise KeyUnusableError(
                    f"{name} is not a full fingerprint", hint="gpg --list-keys shows it: 40 hexadecimal digits"
                )
        self.recipients = chosen
        self._home = gnupg_home
        self._level = level
        self._local = threading.local()

    def seal(self, plain: bytes | bytearray | memoryview, *, compressed: Callable[[], None] = lambda: None) -> bytes:
        """The sealed form of ``plain``.

        It is compressed in one call, which is a quarter faster than piece by piece (390 against 310 MB/s on one
        core), so for a moment its compressed form is in memory beside it. ``compressed`` is called when ``plain`` is
        needed no longer.

        Raises KeyUnusableError if gpg refuses a recipient, ToolError if gpg fails in any other way.
        """
        with memoryview(plain) as raw, raw.cast("B") as view:
            packed = [self._compressor().compress(view)]
        compressed()
        with Status() as status:
            command = self._command(status)

            def write(sink: BinaryIO) -> None:
                frame = packed.pop()
                sink.write(padding(len(frame)))
                sink.write(frame)

            sealed = BytesIO()
            try:
                through(command, status, write, sealed.write)
            except ToolError as error:
                raise _explained(error, status.lines()) from error
            self._check(status.lines(), sealed.getbuffer())
            return sealed.getvalue()

    def seal_pieces(self, plain: Iterable[bytes | bytearray | memoryview], size: int, target: Path) -> tuple[int, str]:
        """Seal ``size`` bytes, which come in pieces, into a new file (0600) that is not synced; how many bytes it has,
        and their SHA-256. The same form as ``seal`` gives; only what is compressed of them is in memory as a whole.
        Raises as ``seal``, and OSError; then ``target`` is of no use."""
        compressing = self._compressor().compressobj(size=size)
        frame = [*map(compressing.compress, plain), compressing.flush()]

        def write(sink: BinaryIO) -> None:
            sink.write(padding(sum(map(len, frame))))
            while frame:
                sink.write(frame.pop(0))

        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w+b") as file, Status() as status:
            digest, stored = hashlib.sha256(), 0

            def take(chunk: memoryview) -> None:
                nonlocal stored
                digest.update(chunk)
                file.write(chunk)
                stored += len(chunk)

            try:
                through(self._command(status), status, write, take)
            except ToolError as error:
                raise _explained(error, status.lines()) from error
            file.flush()
            if stored:
                with mmap.mmap(descriptor, stored, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as sealed:
                    self._check(status.lines(), sealed)
            else:
                self._check(status.lines(), b"")
            return stored, digest.hexdigest()

    def seal_file(self, source: Path, target: Path) -> None:
        """The same from file to file (0600, new), for what may be larger than memory. Raises as ``seal`` does, and
        OSError; then nothing is left of ``target``."""

        def write(sink: BinaryIO) -> None:
            compressor = zstandard.ZstdCompressor(level=self._level, write_checksum=True)
            with source.open("rb") as plain:
                compressor.copy_stream(plain, sink, size=source.stat().st_size)

        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as sealed, Status() as status:
                try:
                    through(self._command(status), status, write, sealed.write)
                except ToolError as error:
                    raise _explained(error, status.lines()) from error
                _assert_ended(status.lines())
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _command(self, status: Status) -> Command:
        how = ("--no-autostart", "--cipher-algo", "AES256", "--compress-algo", "none", "--no-armor")
        recipients = (word for name in self.recipients for word in ("--recipient", name))
        return gpg(self._home, status, *how, *recipients, "--encrypt", "--output", "-")

    def _compressor(self) -> zstandard.ZstdCompressor:
        """One for each thread: its tables are megabytes, and it must not be shared."""
        found: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if found is None:
            # Size and checksum go into the frame: a plain `zstd -d` notices damage, too.
            found = self._local.compressor = zstandard.ZstdCompressor(level=self._level, write_checksum=True)
        return found

    def _check(self, lines: Sequence[StatusLine], sealed: bytes | memoryview) -> None:
        """gpg exited with 0: did it also say that it came to the end, and is the object what it should be?"""
        _assert_ended(lines)
        try:
            found = len(key_ids(sealed))
        except DamagedError as error:
            raise ToolError("gpg exited with 0, but its output is not a whole object", detail=error.detail) from error
        if found != len(self.recipients):
            raise KeyUnusableError(
                f"gpg encrypted for {found} keys where {len(self.recipients)} were named",
                hint="name each recipient once, by the fingerprint of its primary key",
            )


def _assert_ended(lines: Sequence[StatusLine]) -> None:
    if not any(line.keyword == "END_ENCRYPTION" for line in lines):
        raise ToolError(
            "gpg exited with 0, but did not confirm that it encrypted everything",
            detail="\n".join(f"{line.keyword} {line.text}" for line in lines),
        )


def _explained(error: ToolError, lines: Sequence[StatusLine]) -> BackupdError:
    refused = [line.text.split() for line in lines if line.keyword == "INV_RECP"]
    if not refused:
        return error
    expired = any(line.keyword == "KEYEXPIRED" for line in lines)
    names = []
    for reason, *rest in refused:
        why = _REASONS.get(reason, "has expired" if expired else _UNUSABLE)
        names.append(f"{' '.join(rest)} {why}")
    return KeyUnusableError(
        f"cannot encrypt: the key {', the key '.join(names)}",
        detail=error.detail,
        hint="import the key, or the extended key: gpg --homedir ... --import FILE",
    )


class Unsealer:
    """Opens sealed objects with the secret keys in ``gnupg_home``; thread-safe.

    ``passphrase_file``: its first line opens the secret key; without it the key must have none, or the home's
    agent must hold it already: nobody is ever asked. The gpg-agent that gpg starts ends with this process
    (see ``keyhome``).
    """

    def __init__(self, gnupg_home: Path, passphrase_file: Path | None = None) -> None:
        self._home = gnupg_home
        self._passphrase_file = passphrase_file

    def unseal(self, stored: bytes, *, limit: int) -> bytes:
        """The plaintext of ``stored``, at most ``limit`` bytes of it.

        Raises DamagedError if the object is not exactly what Sealer made or holds more than ``limit`` bytes;
        KeyUnusableError, naming the keys the object is encrypted for, if none of them can be used here;
        ToolError if gpg or its agent fail for reasons of their own.
        """
        keys = key_ids(stored)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with _slots:
                    return self._attempt(stored, keys, limit)
            except _AgentBusyError as busy:
                if attempt == _ATTEMPTS:
                    raise busy.error from busy
                time.sleep(random.uniform(0.02, 0.1) * 2**attempt)  # noqa: S311  spreading, not secrecy
        raise AssertionError("unreachable")

    def unseal_file(self, source: BinaryIO, target: Path, *, limit: int) -> None:
        """The same from a stream to a new file (0600), for what may be larger than memory. Raises as ``unseal`` does,
        and OSError; then nothing is left of ``target``."""

        def write(sink: BinaryIO) -> None:
            while piece := source.read(_SLICE):
                sink.write(piece)

        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as plain, _slots, Status() as status:
                decoder = zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT).decompressobj()

                def take(chunk: memoryview) -> None:
                    for start in range(0, len(chunk), _SIP):
                        plain.write(decoder.decompress(chunk[start : start + _SIP]))
                        if plain.tell() > limit:
                            raise damaged(f"it holds more than the {limit} bytes that are expected")

                try:
                    through(self._command(status), status, write, take)
                except ToolError as error:
                    keys = (line.text.split()[0] for line in status.lines() if line.keyword == "ENC_TO" and line.text)
                    explained = self._explained(error, status.lines(), tuple(keys))
                    raise (explained.error if isinstance(explained, _AgentBusyError) else explained) from error
                except zstandard.ZstdError as error:
                    raise damaged(f"the compressed data is damaged: {error}") from error
                if not _is_confirmed(status) or not decoder.eof or decoder.unused_data:
                    raise damaged("it is cut off, or gpg does not confirm its integrity")
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _command(self, status: Status) -> Command:
        return gpg(self._home, status, *passphrase_options(self._passphrase_file), "--decrypt", "--output", "-")

    def _attempt(self, stored: bytes, keys: tuple[str, ...], limit: int) -> bytes:
        decoder = FrameDecoder(limit)

        with Status() as status:
            command, feed = self._command(status), methodcaller("write", stored)
            pipeline = Pipeline([command], feed=feed, pass_fds=(status.descriptor,))
            try:
                with pipeline:
                    for chunk in pipeline.chunks(_SLICE):
                        decoder.feed(chunk)
            except ToolError as error:
                killed = any(code is not None and code < 0 for code in pipeline.returncodes)
                raise (
                    error if killed or not pipeline.exited else self._explained(error, status.lines(), keys)
                ) from error
            if not _is_confirmed(status):
                raise damaged("gpg does not confirm its integrity")
        return decoder.result()

    def _explained(self, error: ToolError, lines: Sequence[StatusLine], ids: tuple[str, ...]) -> BackupdError:
        """What gpg's failure means. The order matters: after a session key, only the data can be wrong."""
        words = {line.keyword for line in lines}
        keys = ", ".join(ids)
        # NODATA (doc/DETAILS of GnuPG): no packet where one must be, or an invalid one.
        if words & {"BADMDC", "NODATA"} or ("DECRYPTION_FAILED" in words and words & _OPENED):
            return damaged("it was altered or cut off: its integrity code does not match, or gpg finds no packet")
        missing = {line.text.split()[0] for line in lines if line.keyword == "NO_SECKEY" and line.text}
        if missing and missing.issuperset(ids) and _NO_AGENT not in error.detail:
            return KeyUnusableError(
                f"no secret key in {self._home} opens this object: it is encrypted for {keys}",
                detail=error.detail,
                hint=f"import one of these secret keys: gpg --homedir {self._home} --import FILE",
            )
        codes = [
            int(line.text.split()[-1]) & 0xFFFF
            for line in lines
            if line.keyword == "ERROR" and line.text.startswith("pkdecrypt_failed")
        ]
        for code in codes:
            if code in _PASSPHRASE_CODES:
                return KeyUnusableError(
                    f"the secret key for {keys} cannot be used: {_PASSPHRASE_CODES[code]}",
                    detail=error.detail,
                    hint="write it to a file (0600) and name that in restore.passphrase_file",
                )
        if codes and _ALTERED_CODES.issuperset(codes):
            return damaged(f"its session key for {keys} is not what it was: {error.detail}")
        if "DECRYPTION_FAILED" in words:
            hint = f"check the agent: gpg-connect-agent --homedir {self._home} /bye"
            return _AgentBusyError(
                ToolError(f"gpg could not use the secret key for {keys}", detail=error.detail, hint=hint)
            )
        return error


def _is_confirmed(status: Status) -> bool:
    words = {line.keyword for line in status.lines()}
    return {"DECRYPTION_OKAY", "GOODMDC"} <= words and not words & {"DECRYPTION_FAILED", "BADMDC"}


def passphrase_options(file: Path | None) -> tuple[str, ...]:
    """How gpg receives the passphrase of a secret key, or that there is nobody to ask. Raises KeyUnusableError."""
    if file is None:
        return ("--pinentry-mode", "error")
    if not file.is_file():
        raise KeyUnusableError(
            f"the passphrase file {file} does not exist", hint="see restore.passphrase_file in the configuration"
        )
    return ("--pinentry-mode", "loopback", "--passphrase-file", str(file.absolute()))


class _AgentBusyError(BackupdError):
    """The agent failed for want of memory, or could not be reached: worth another attempt."""

    def __init__(self, error: ToolError) -> None:
        super().__init__(error.message)
        self.error = error
