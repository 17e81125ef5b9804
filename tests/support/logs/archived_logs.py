"""Binary logs as an archive leaves them at a destination."""

from __future__ import annotations

import io
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from backupd.engine.binlog.scan import scan
from backupd.model.binlog import Branch, Ending, Segment
from backupd.transfer import log_segments
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.segment_documents import Sealed, Sealing, SegmentHeader
from storage.destination import Destination
from storage.throttle_and_breaker import ForwardingDestination


def seal_log(
    folder: Path,
    sealer: Sealer,
    branch: Branch,
    number: int,
    data: bytes,
    *,
    start: int = 0,
    end: int | None = None,
    ending: Ending = Ending.ROTATED,
) -> Sealed:
    """Seal bytes ``[start, end)`` of a binary log into ``folder``, which must not exist. Cuts must be safe ones."""
    context = scan(io.BytesIO(data), stop=start).context if start else None
    stop = len(data) if end is None else end
    sealing = Sealing(folder.with_name(f"{folder.name}.new"), sealer)
    found = scan(io.BytesIO(data[start:]), start=start, context=context, stop=stop, on_transaction=sealing.transaction)
    sha256 = sealing.plain(io.BytesIO(data[start:]), start, stop)
    return sealing.finish(
        Segment(
            server=branch.server,
            branch=branch.id,
            file=branch.file(number),
            number=number,
            start=start,
            end=stop,
            ending=ending if stop == len(data) else Ending.OPEN,
            gtids_before=found.gtids_before,
            gtids_after=found.gtids_after,
            transactions=found.transactions,
            first_at=found.first_at,
            last_at=found.last_at,
            precise=found.precise,
            server_ids=found.server_ids,
            flavour=found.context.flavour,
            server_version=found.context.server_version,
            sha256=sha256,
            remarks=found.remarks,
        ),
        folder,
    )


def archive_log(
    destination: Destination,
    sealer: Sealer,
    branch: Branch,
    number: int,
    data: bytes,
    *,
    start: int = 0,
    end: int | None = None,
    ending: Ending = Ending.ROTATED,
) -> SegmentHeader:
    """Store bytes ``[start, end)`` of a binary log at ``destination``, as the archive does."""
    with tempfile.TemporaryDirectory() as base:
        sealed = seal_log(Path(base) / "sealed", sealer, branch, number, data, start=start, end=end, ending=ending)
        log_segments.put_branch(destination, branch)
        return log_segments.put(destination, sealed, now=datetime.now(UTC))


class CountedDestination(ForwardingDestination):
    """Keeps count of what is read from a destination. ``read``: bytes that were given, by key."""

    def __init__(self, inner: Destination) -> None:
        super().__init__(inner)
        self.read: Counter[str] = Counter()

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        with super().get(key, offset=offset, length=length) as stream:
            content = stream.read()
        self.read[key] += len(content)
        return io.BytesIO(content)
