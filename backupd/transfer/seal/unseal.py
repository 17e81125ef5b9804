"""Unsealing: OpenPGP, then zstd, and nothing is believed before gpg has agreed to all of it."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import zstandard

from backupd.model.errors import BackupdError, DamagedError, KeyUnusableError, ToolError
from backupd.process.command import Command
from backupd.process.pipeline import Pipeline
from backupd.transfer.seal.gpg import Status, StatusLine, gpg
from backupd.transfer.seal.openpgp import Outline, outline
from backupd.transfer.seal.zstd_frame import WINDOW_LIMIT, FrameDecoder

AT_ONCE = 8
"""gpg processes that may decrypt at the same time. gpg-agent 2.2 does it all within 32 KiB of locked memory:
with sixteen RSA-4096 decryptions at once it fails with "Cannot allocate memory", which gpg reports as a
missing key."""
_ATTEMPTS = 6
_SLICE = 256 * 1024
_SIP = 2 * 1024
"""Bytes that are decompressed at once where no size is told before: zstd makes up to 32,768 times more of them."""

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
        form = outline(stored)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with _slots:
                    return self._attempt(stored, form, limit)
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
                pipeline = Pipeline([self._command(status)], feed=write, pass_fds=(status.descriptor,))
                decoder = zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT).decompressobj()
                try:
                    with pipeline:
                        for chunk in pipeline.chunks(_SLICE):
                            for start in range(0, len(chunk), _SIP):
                                plain.write(decoder.decompress(chunk[start : start + _SIP]))
                                if plain.tell() > limit:
                                    raise _damaged(f"it holds more than the {limit} bytes that are expected")
                except ToolError as error:
                    keys = (line.text.split()[0] for line in status.lines() if line.keyword == "ENC_TO" and line.text)
                    told = self._explained(error, status.lines(), Outline(tuple(keys)))
                    raise (told.error if isinstance(told, _AgentBusyError) else told) from error
                except zstandard.ZstdError as error:
                    raise _damaged(f"the compressed data is damaged: {error}") from error
                if not _is_confirmed(status) or not decoder.eof or decoder.unused_data:
                    raise _damaged("it is cut off, or gpg does not confirm its integrity")
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _command(self, status: Status) -> Command:
        return gpg(self._home, status, *passphrase_options(self._passphrase_file), "--decrypt", "--output", "-")

    def _attempt(self, stored: bytes, form: Outline, limit: int) -> bytes:
        decoder = FrameDecoder(limit)

        def write(sink: BinaryIO) -> None:
            sink.write(stored)

        with Status() as status:
            pipeline = Pipeline([self._command(status)], feed=write, pass_fds=(status.descriptor,))
            try:
                with pipeline:
                    for chunk in pipeline.chunks(_SLICE):
                        decoder.feed(chunk)
            except ToolError as error:
                killed = any(code is not None and code < 0 for code in pipeline.returncodes)
                raise (
                    error if killed or not pipeline.exited else self._explained(error, status.lines(), form)
                ) from error
            confirmed = _is_confirmed(status)
        if not confirmed:
            raise _damaged("gpg does not confirm its integrity")
        return decoder.result()

    def _explained(self, error: ToolError, lines: Sequence[StatusLine], form: Outline) -> BackupdError:
        """What gpg's failure means. The order matters: after a session key, only the data can be wrong."""
        words = {line.keyword for line in lines}
        keys = ", ".join(form.key_ids)
        # NODATA (doc/DETAILS of GnuPG): no packet where one must be, or an invalid one.
        if words & {"BADMDC", "NODATA"} or ("DECRYPTION_FAILED" in words and words & _OPENED):
            return _damaged("it was altered or cut off: its integrity code does not match, or gpg finds no packet")
        missing = {line.text.split()[0] for line in lines if line.keyword == "NO_SECKEY" and line.text}
        if missing and missing.issuperset(form.key_ids) and _NO_AGENT not in error.detail:
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
            return _damaged(f"its session key for {keys} is not what it was: {error.detail}")
        if "DECRYPTION_FAILED" in words:
            return _AgentBusyError(
                ToolError(
                    f"gpg could not use the secret key for {keys}",
                    detail=error.detail,
                    hint=f"look at the agent: gpg-connect-agent --homedir {self._home} /bye",
                )
            )
        return error


def _is_confirmed(status: Status) -> bool:
    words = {line.keyword for line in status.lines()}
    return {"DECRYPTION_OKAY", "GOODMDC"} <= words and not words & {"DECRYPTION_FAILED", "BADMDC"}


def _damaged(reason: str) -> DamagedError:
    return DamagedError(
        "a sealed object is damaged", [reason], hint="restore from another destination's copy of this backup"
    )


def passphrase_options(file: Path | None) -> tuple[str, ...]:
    """How gpg is told the passphrase of a secret key, or that there is nobody to ask. Raises KeyUnusableError."""
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
