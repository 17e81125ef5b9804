"""A node's start in its cluster, watched: it comes back by IST, by SST, not at all, or hangs.

No line of its log says so alone. "SST received", "IST received" and "Prepared IST receiver" are written in both cases.
An IST is a position from storage that is ours, write sets that begin right behind it, and a synced node; an SST is a
position that is the donor's, or a script that says that it received everything. What could not be sent, a history that
would go backwards, and a node that contradicts its cluster are failures after which the server may live on without end:
it is ended by its own process, and the grastate.dat that it left (seqno -1) is written anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from backupd.engine.server.launch import log_tail
from backupd.engine.server.wsrep import probe_wsrep
from backupd.engine.sql.client import Connection
from backupd.model.document import Document, json_key
from backupd.model.errors import CancelledError, ServerError, ToolError
from backupd.model.job import Progress
from backupd.model.server_facts import SYNCED, ClusterPosition
from backupd.process.folders import open_plain
from backupd.process.run_context import RunContext
from restore.galera.comparison import Compared
from restore.galera.node import Node, started_by

STILL_SECONDS = 180.0
"""So long nothing may happen before a node counts as one that hangs; in an SST, which may copy silently, never."""
_SILENT_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_PIECE = 1024 * 1024
_KEPT = 64 * 1024

_STORED = re.compile(r"Recovered position from storage: ([0-9a-f-]{36}):(-?\d+)")
_RECEIVING = re.compile(r"Receiving IST: (\d+) writesets, seqnos (\d+)-(\d+)")
_SST = re.compile(r"Proceeding with SST|\bSST completed on joiner")
INCONSISTENT = "Inconsistency detected"
"""Of a node whose rows are not those that a write set of its cluster was made for."""
_FAILED = re.compile(
    rf"Receiving IST failed, node restart required|Reversing history|{INCONSISTENT}"
    r"|Could not open state file for writing|Failed to load provider|Unsupported WS version"
)
_SYNCED = "Synchronized with group"


class Ending(StrEnum):
    """How a join came out."""

    IST = "ist"
    SST = "sst"
    FAILED = "failed"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Joined(Document):
    """``position``: what the node began from; ``first``, ``last``: seqnos that it received by IST, 0 for none;
    ``donors``: members that could send them; ``pid``: of its server, 0 where it was ended; ``reason``: of a bad
    ending."""

    ending: Ending = field(metadata=json_key("outcome"))
    position: ClusterPosition
    first: int
    last: int
    seconds: float = field(metadata=json_key(digits=3))
    donors: tuple[str, ...]
    pid: int = 0
    reason: str = ""
    compared: Compared | None = None

    @property
    def words(self) -> str:
        """In a sentence."""
        if self.ending is Ending.IST:
            received = f"write sets {self.first} to {self.last} by IST" if self.first else "and lacked nothing"
            return f"the node is back from {self.position}: {received}, in {self.seconds:.1f} s"
        if self.ending is Ending.SST:
            return (
                f"the node took a full copy of a donor (SST) instead of what follows {self.position.seqno}: the "
                "restored files and the node's binary logs are gone"
            )
        return f"the node did not come back: {self.reason}"


@dataclass(slots=True)
class Markers:
    """What a log has said since the start. ``take`` reads more of it."""

    stored: ClusterPosition | None = None
    writesets: int = -1
    first: int = 0
    last: int = 0
    sst: bool = False
    failed: str = ""
    synced: bool = False
    _rest: str = ""

    def take(self, text: str) -> None:
        """``text`` follows what was taken before; a line that is not whole waits for its end."""
        *lines, self._rest = (self._rest + text).split("\n")
        self._rest = self._rest[-_KEPT:]
        for line in lines:
            if found := _STORED.search(line):
                self.stored = ClusterPosition(found[1], int(found[2]))
            if found := _RECEIVING.search(line):
                self.writesets, self.first, self.last = (int(number) for number in found.groups())
            self.sst = self.sst or _SST.search(line) is not None
            if not self.failed and _FAILED.search(line):
                self.failed = line.strip()[-500:]
            self.synced = self.synced or _SYNCED in line

    def ending(self, position: ClusterPosition) -> Ending | None:
        """How a synced node that began from ``position`` came back; None where it is not synced yet."""
        if self.failed:
            return Ending.FAILED
        if not self.synced:
            return None
        ours = self.stored in (None, position)
        behind = self.writesets < 0 or self.first == position.seqno + 1
        return Ending.IST if ours and behind and not self.sst else Ending.SST


def watch(
    node: Node,
    position: ClusterPosition,
    connection: Connection,
    offset: int,
    context: RunContext,
    *,
    still: float = STILL_SECONDS,
) -> tuple[Ending, Markers, str]:
    """Wait until the server of ``node``, whose log is read from ``offset`` on, has come back to its cluster or will
    not. Gives the ending, what its log said, and the reason of a bad one. It still runs then, if it does."""
    markers, moved = Markers(), time.monotonic()
    seen: object = None
    while True:
        text, offset = _more(node.log, offset)
        markers.take(text)
        if started_by(node.restore_id) is None:
            more, offset = _more(node.log, offset)
            markers.take(more + "\n")
            tail = log_tail(node.log) or log_tail(node.output)
            return Ending.FAILED, markers, markers.failed or f"its server ended\n{tail}"
        state = _state(connection)
        if markers.failed:
            return Ending.FAILED, markers, markers.failed
        ending = markers.ending(position)
        if ending is not None and state is not None and _is_back(state, position):
            return ending, markers, ""
        if ending is not None and state is None and time.monotonic() - moved > _SILENT_SECONDS:
            return ending, markers, f"by its log it is synced, but {connection.address} does not answer"
        if text or state != seen:
            moved, seen = time.monotonic(), state
        if time.monotonic() - moved > still and ending is None and state is not None and _is_back(state, position):
            raise ToolError(
                f"the node is Synced in its cluster at {state[1].seqno}, but its log does not say how it came back",
                detail=f"{node.log} was read; without its lines an IST and an SST look alike",
                hint="its server goes on. See where it logs (SHOW VARIABLES LIKE 'log_error'), give the whole path to "
                "log_error in its option file, and compare the node with a member",
            )
        if time.monotonic() - moved > still and not markers.sst:
            return Ending.HUNG, markers, f"nothing has happened for {still:.0f} s; its state is {_shown(state)}"
        if context.is_cancelled():
            raise CancelledError("stopped watching the node, whose server goes on; the same command watches it again")
        context.report(Progress("join", note=_note(markers, state)))
        time.sleep(_LOOK_SECONDS)


def _is_back(state: tuple[str, ClusterPosition], position: ClusterPosition) -> bool:
    return state[0] == SYNCED and state[1].uuid == position.uuid


def _note(markers: Markers, state: tuple[str, ClusterPosition] | None) -> str:
    what = f"IST {markers.first}-{markers.last}" if markers.writesets >= 0 else "SST" if markers.sst else ""
    return " ".join(filter(None, (what, _shown(state))))


def _shown(state: tuple[str, ClusterPosition] | None) -> str:
    return f"{state[0]} at {state[1].seqno}" if state is not None else "not answering"


def _state(connection: Connection) -> tuple[str, ClusterPosition] | None:
    """State and position, None of a server that does not answer yet."""
    with contextlib.suppress(ServerError), connection.connect() as session:
        found = probe_wsrep(session)
        return (found.state, found.position) if found is not None else None
    return None


def _more(path: Path, offset: int) -> tuple[str, int]:
    """What was added to a log, and its new end. Of one that begins anew everything."""
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return "", offset
    with os.fdopen(descriptor, "rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(offset if offset <= size else 0)
        raw = log.read(_PIECE)
        return raw.decode("utf-8", "replace"), log.tell()


def log_size(path: Path) -> int:
    """Its bytes now."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
