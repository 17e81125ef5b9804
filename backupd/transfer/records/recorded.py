"""A destination whose documents are compared with what is recorded of them, before anybody believes a word.

Every reader of manifests and of descriptions of binary logs goes through here, so none can forget to ask. It costs no
request: a document is read whole anyway.
"""

from __future__ import annotations

import hashlib
import io
import json
from typing import BinaryIO, Protocol

from backupd.model.binlog import SegmentKey
from backupd.model.document import DOCUMENT_LIMIT
from backupd.model.errors import DamagedError, TamperedError
from backupd.model.manifest import decode_header
from storage.contract import layout
from storage.contract.destination import Destination
from storage.wrap.forwarding import ForwardingDestination

_NOT_OURS = (
    "somebody put another one there: find out who writes there, then `backupd verify` puts back what another "
    "destination has"
)


class Records(Protocol):
    """What is known of the documents by somebody who need not ask the destination."""

    def manifest(self, backup_id: str) -> str:
        """SHA-256 of the manifest, "" where nobody knows it."""
        ...

    def segment(self, server: str, key: SegmentKey) -> str:
        """SHA-256 of the plain bytes of a binary log, "" where nobody knows it."""
        ...

    def differs(self, destination: str, server: str, backup_id: str, error: TamperedError) -> None:
        """Hears of what is not as recorded. ``backup_id``: "" for a binary log."""
        ...


class RecordedDestination(ForwardingDestination):
    """``inner``. Reading a document that reads well and is not what ``records`` know raises TamperedError; of one that
    is merely damaged its reader tells."""

    def __init__(self, inner: Destination, records: Records) -> None:
        super().__init__(inner)
        self._records = records

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        backup, segment = _manifest_of(key), layout.segment_of(key)
        if backup is not None and (wanted := self._records.manifest(backup[1])):
            document = self._whole(key)
            found = hashlib.sha256(document).hexdigest()
            if found != wanted and _reads_well(document):
                self._differs(
                    key, *backup, f"its SHA-256 is {found}, and that of the manifest that belongs there is {wanted}"
                )
        elif (
            segment is not None
            and segment[2] == layout.SEGMENT
            and (wanted := self._records.segment(segment[0], segment[1]))
        ):
            document = self._whole(key)
            if (found := _told(document)) not in (wanted, ""):
                self._differs(
                    key,
                    segment[0],
                    "",
                    f"it tells of a binary log with the SHA-256 {found[:64]}, and that "
                    f"which belongs there has {wanted}",
                )
        else:
            return self._inner.get(key, offset=offset, length=length)
        return io.BytesIO(document[offset : None if length is None else offset + length])

    def _whole(self, key: str) -> bytes:
        with self._inner.get(key) as stream:
            return stream.read(DOCUMENT_LIMIT + 1)

    def _differs(self, key: str, server: str, backup_id: str, problem: str) -> None:
        error = TamperedError(
            f"{self.name}: {key} is not what was stored",
            [f"{self.name}: {key}: it is not what was stored: {problem}"],
            hint=_NOT_OURS,
        )
        self._records.differs(self.name, server, backup_id, error)
        raise error


def _manifest_of(key: str) -> tuple[str, str] | None:
    """(server, backup id) whose manifest lies under ``key``."""
    return layout.backup_of(key) if key.startswith(layout.SERVERS) and key.endswith(f"/{layout.MANIFEST}") else None


def _reads_well(manifest: bytes) -> bool:
    try:
        decode_header(manifest)
    except DamagedError:
        return False
    return True


def _told(document: bytes) -> str:
    """The SHA-256 of a binary log, by its description; "" where that cannot be read: then its reader says why."""
    try:
        return str(json.loads(document)["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
