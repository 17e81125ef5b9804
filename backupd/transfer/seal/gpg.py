"""How gpg is called, for sealing and unsealing alike."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from backupd.process.command import Command
from backupd.process.pipeline import Pipeline
from backupd.transfer.seal.key_home import usable_home

_HARDENED = (
    "--batch",
    "--no-tty",
    # Nobody's gpg.conf adds recipients (encrypt-to), signs, or turns off integrity protection.
    "--no-options",
    # Keys are pinned by fingerprint: no web of trust, and never a look-up in the network or a trustdb to
    # write.
    "--trust-model",
    "always",
    "--no-auto-key-locate",
    "--disable-dirmngr",
    "--no-auto-check-trustdb",
    # Several of us run at once, perhaps on a read-only home: the seed file would only be a lock to wait for.
    "--no-random-seed-file",
)
_READ = 64 * 1024


def gpg(home: Path, status: Status, *arguments: str) -> Command:
    """``gpg --batch --homedir HOME ... ARGUMENTS`` with its status lines going to ``status``.

    Raises KeyUnusableError if the home does not exist, or cannot be read.
    """
    return Command(
        ("gpg", *_HARDENED, "--homedir", str(usable_home(home)), "--status-fd", str(status.descriptor), *arguments)
    )


def through(command: Command, status: Status, content: bytes, *descriptors: int) -> bytes:
    """Run ``command``, which reports to ``status``, with ``content`` as its input; everything that it prints.
    ``descriptors``: what it inherits besides. Raises ToolError."""

    def write(sink: BinaryIO) -> None:
        sink.write(content)

    output = io.BytesIO()
    with Pipeline([command], feed=write, pass_fds=(status.descriptor, *descriptors)) as pipeline:
        for chunk in pipeline.chunks(_READ):
            output.write(chunk)
    return output.getvalue()


class Status:
    """Collects what gpg reports with ``--status-fd``: pass ``descriptor`` on to it, read ``lines`` after its
    end.

    It is a file in memory and not a pipe, so nobody has to read it meanwhile.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("gpg-status", os.MFD_CLOEXEC)

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def lines(self) -> list[StatusLine]:
        raw = os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)
        found = []
        for line in raw.decode("utf-8", "replace").splitlines():
            prefix, _, rest = line.partition(" ")
            if prefix == "[GNUPG:]":
                keyword, _, text = rest.partition(" ")
                found.append(StatusLine(keyword, text))
        return found


@dataclass(frozen=True, slots=True)
class StatusLine:
    """``[GNUPG:] KEYWORD TEXT``; the words are explained in doc/DETAILS of GnuPG."""

    keyword: str
    text: str
