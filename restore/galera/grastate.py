"""grastate.dat: which seqno a node's server tells its cluster at its start.

Measured with MariaDB 10.11.19 and Galera 26.4.23:

* ``seqno: -1`` without a start position, and no file at all, mean an SST. A wrong uuid means one, too, silently.
* A seqno above the cluster's aborts the server. One that is above InnoDB's position ends in a join that hangs.
* A file that the server may not write (another owner) keeps it from starting.
* A join that failed leaves -1 behind: the file is written anew before each attempt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import RefusedError
from backupd.model.server_facts import UNKNOWN_SEQNO, ClusterPosition
from backupd.process.folders import read_plain, sync_folder, write_anew
from restore.datadir.occupancy import FILE_MODE, Account

GRASTATE = "grastate.dat"
CACHES = ("galera.cache", "gvwstate.dat")
"""Of another life of the node: with the write sets of another history in its cache a join fails."""
NOBODY = "00000000-0000-0000-0000-000000000000"
_LARGEST = 64 * 1024
_LINE = re.compile(r"^(uuid|seqno|safe_to_bootstrap):[ \t]*(\S+)[ \t]*$", re.MULTILINE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Grastate:
    """``position``: seqno -1 where the server did not end cleanly. ``bootstrap``: may it make a new cluster?"""

    position: ClusterPosition
    bootstrap: bool = False

    @property
    def is_explicit(self) -> bool:
        """Does it name a seqno?"""
        return self.position.uuid != NOBODY and self.position.seqno >= 0

    def encode(self) -> bytes:
        """As a server writes it."""
        return (
            "# GALERA saved state\nversion: 2.1\n"
            f"uuid:    {self.position.uuid}\nseqno:   {self.position.seqno}\n"
            f"safe_to_bootstrap: {int(self.bootstrap)}\n"
        ).encode("ascii")

    @classmethod
    def decode(cls, raw: bytes) -> Grastate:
        """Raises ValueError for what no server writes."""
        found = dict(_LINE.findall(raw.decode("ascii")))
        uuid, seqno = found.get("uuid", ""), found.get("seqno", "")
        if not _UUID.fullmatch(uuid) or not re.fullmatch(r"-?\d{1,19}", seqno):
            raise ValueError("it names no uuid and seqno")
        return cls(
            ClusterPosition(uuid.lower(), max(int(seqno), UNKNOWN_SEQNO)), found.get("safe_to_bootstrap", "0") == "1"
        )


def read(datadir: Path) -> Grastate | None:
    """None where there is none. Raises RefusedError for a file that cannot be read."""
    path = datadir / GRASTATE
    try:
        return Grastate.decode(read_plain(path, _LARGEST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"{path} cannot be read: {error}", hint="see what it holds; move it away if it is broken"
        ) from (error)


def write(datadir: Path, position: ClusterPosition, account: Account | None = None, *, bootstrap: bool = False) -> None:
    """Replace it, durably, by one that names ``position``; it belongs to ``account``, as the server needs it."""
    owner = (account.uid, account.gid) if account is not None else None
    state = Grastate(position, bootstrap)
    write_anew(datadir / GRASTATE, state.encode(), owner=owner, mode=FILE_MODE)
    sync_folder(datadir)


def remove(datadir: Path) -> None:
    """Without it no server takes the files for a node's."""
    for name in (GRASTATE, *CACHES):
        (datadir / name).unlink(missing_ok=True)
    sync_folder(datadir)
