"""The head of a server's history: a small signed document that says how far it had come, and when.

Signatures show that a document is ours, not that it is the newest: whoever can write to a place can bring back all of
an older state. So each destination holds a head with a counter that only rises, put anew with each backup and every
quarter of an hour. One head names the one before it by its digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from backupd.model.document import NOTE_LIMIT, parsed
from backupd.model.errors import DamagedError, ObjectMissingError
from backupd.model.text import format_time, parse_time
from backupd.transfer.records.manifests import put_bytes
from storage.contract import layout
from storage.contract.destination import Destination, read_whole

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Retired:
    """A key that signed up to the head with ``counter``, until ``at``: what only it has signed counts for nothing."""

    key: str
    counter: int
    at: datetime

    def as_json(self) -> dict[str, Any]:
        """The document's form: ``key``, ``counter``, ``at``."""
        return {"key": self.key, "counter": self.counter, "at": format_time(self.at)}


@dataclass(frozen=True, slots=True)
class Reached:
    """Up to where binary logs were archived: the branch, the number of the file, and how many bytes of it."""

    branch: str
    number: int
    end: int


@dataclass(frozen=True, slots=True)
class Head:
    """``before``: SHA-256 of the head before it, "" of the first; ``newest``: the id of the newest backup, "" where
    there is none, and ``backups`` how many there are; ``audit_entries``, ``audit_digest``: of the catalog's audit;
    ``retired``: keys that signed before; ``logs``: of each destination that has binary logs, up to where."""

    server: str
    counter: int
    at: datetime
    before: str = ""
    newest: str = ""
    backups: int = 0
    audit_entries: int = 0
    audit_digest: str = ""
    retired: tuple[Retired, ...] = ()
    logs: Mapping[str, Reached] = field(default_factory=dict)


def encode(head: Head) -> bytes:
    """The document as it is signed and stored (JSON); ``decode`` reads it."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "server": head.server,
        "counter": head.counter,
        "at": format_time(head.at),
        "before": head.before,
        "newest": head.newest,
        "backups": head.backups,
        "audit": {"entries": head.audit_entries, "digest": head.audit_digest},
    }
    if head.retired:
        document["retired"] = [one.as_json() for one in head.retired]
    if head.logs:
        document["logs"] = {name: asdict(one) for name, one in head.logs.items()}
    return json.dumps(document, sort_keys=True).encode()


def decode(raw: bytes, server: str) -> Head:
    """Raises DamagedError, also for the head of another server."""
    try:
        document: dict[str, Any] = parsed(raw, limit=NOTE_LIMIT)
        if document["format"] != FORMAT or document["server"] != server:
            raise ValueError(f"it is of format {document['format']!r} and of server {document['server']!r}")
        audit = document["audit"]
        return Head(
            server,
            int(document["counter"]),
            parse_time(document["at"]),
            str(document["before"]),
            str(document["newest"]),
            int(document["backups"]),
            int(audit["entries"]),
            str(audit["digest"]),
            tuple(
                Retired(str(one["key"]), int(one["counter"]), parse_time(one["at"]))
                for one in document.get("retired", ())
            ),
            {
                str(name): Reached(str(one["branch"]), int(one["number"]), int(one["end"]))
                for name, one in document.get("logs", {}).items()
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"the head of {server} cannot be read", [f"{layout.head_key(server)}: {error}"]) from error


def read(destination: Destination, server: str) -> Head | None:
    """None where there is none. Raises DamagedError, also where it is not believed; DestinationError."""
    try:
        return decode(read_whole(destination, layout.head_key(server), limit=NOTE_LIMIT), server)
    except ObjectMissingError:
        return None


def put(destination: Destination, head: Head) -> None:
    """Raises DestinationError, KeyUnusableError."""
    put_bytes(destination, layout.head_key(head.server), encode(head))


def digest(head: Head) -> str:
    """SHA-256 (64 hex) of the document: what the next head names as the one before it."""
    return hashlib.sha256(encode(head)).hexdigest()
