"""Archived binary logs made up for tests: any bytes, any transactions, really sealed and really stored."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from backupd.model.binlog import Branch, BranchReason, Ending, Segment, Transaction
from backupd.transfer import log_segments
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.segment_documents import Sealed, Sealing
from storage.destination import Destination
from tests.support.keys import Keys

BASE = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
BRANCH = "20261121T080000Z-aaaaaaaa"
SERVER = "shop"


def branch(**values: object) -> Branch:
    one = Branch(SERVER, BRANCH, BASE - timedelta(hours=1), BranchReason.FIRST, "uid", "mariadb", "bin", 1)
    return replace(one, **values)  # type: ignore[arg-type]  # fields by name


def transaction(
    number: int, start: int, end: int, seconds: float, *, precise: bool = False, gtid: str = ""
) -> Transaction:
    return Transaction(gtid or f"0-1-{number}", start, end, BASE + timedelta(seconds=seconds), precise, 1)


def segment(
    number: int,
    start: int,
    end: int,
    ending: Ending,
    transactions: Sequence[Transaction],
    *,
    before: str,
    after: str,
    sha256: str = "",
) -> Segment:
    times = [one.at for one in transactions]
    return Segment(
        server=SERVER,
        branch=BRANCH,
        file=f"bin.{number:06d}",
        number=number,
        start=start,
        end=end,
        ending=ending,
        gtids_before=before,
        gtids_after=after,
        transactions=len(transactions),
        first_at=min(times, default=None),
        last_at=max(times, default=None),
        precise=False,
        server_ids=(1,),
        flavour="mariadb",
        server_version="10.11.19",
        sha256=sha256,
    )


def content(number: int, size: int) -> bytes:
    """What a file of that number holds; its byte 21, where servers mark a file as in use, does not."""
    return bytes((number * 7 + place * 30) % 251 & 0xFE for place in range(size))


def store_segment(
    draft: Segment, transactions: Sequence[Transaction], destinations: Sequence[Destination], keys: Keys, folder: Path
) -> Segment:
    """Seal and store it; gives it with its digest."""
    sealing = Sealing(folder / "sealing", Sealer((keys.fingerprint,), keys.public_home))
    for one in transactions:
        sealing.transaction(one)
    digest = sealing.plain(io.BytesIO(content(draft.number, draft.end)[draft.start :]), draft.start, draft.end)
    sealed = sealing.finish(replace(draft, sha256=digest), folder / "sealed")
    for destination in destinations:
        log_segments.put(destination, sealed, now=datetime.now(UTC))
    Sealed.remove(sealed.folder)
    return sealed.header.segment
