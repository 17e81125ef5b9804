"""Archiving a server's own binary log files as they lie on its disk, without a stream: what a test restores from, and
damages."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.catalog.session import open_catalog
from backupd.engine.binlog.scan import scan
from backupd.engine.binlog.transactions import ScanContext
from backupd.model.binlog import Branch, BranchReason, Ending, Segment, Transaction
from backupd.model.text import new_id
from backupd.transfer import log_segments
from backupd.transfer.records import segment_documents
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.segment_documents import Sealed, Sealing
from tests.support.e2e.house import SERVER, House
from tests.support.servers.server import Server

PART_SIZE = 256 * 1024
"""So small that replays begin in the middle of files of many parts."""


@contextmanager
def wired(house: House) -> Iterator[Wiring]:
    settings = load_settings(house.config)
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


@dataclass
class Archive:
    """Of one server. ``destinations``: names. ``remarked`` False: without remarks, as an earlier version archived."""

    house: House
    server: Server
    destinations: Sequence[str] = ("local",)
    remarked: bool = True
    branch: Branch | None = None
    transactions: list[tuple[str, Transaction]] = field(default_factory=list)
    """(file, transaction) of everything that was archived, in log order."""
    _done: dict[str, ScanContext | None] = field(default_factory=dict)

    def take(self) -> None:
        """Archive everything that the server has written and that is not archived yet: ended files whole, the growing
        one as a piece."""
        names = [str(row[0]) for row in self.server.query("SHOW BINARY LOGS")]
        confirmed = datetime.now(UTC)
        with wired(self.house) as wiring:
            self._begin(wiring, names[0])
            for name in names:
                if name in self._done and self._done[name] is None:
                    continue
                self._file(wiring, name, is_last=name == names[-1])
            assert self.branch is not None
            last = self.transactions[-1]
            number = int(names[-1].rpartition(".")[2])
            size = self._done[names[-1]]
            place = (number, size.end if size is not None else last[1].end)
            for destination in self.destinations:
                wiring.catalog.binlogs.confirm(SERVER, destination, self.branch.id, place, confirmed)

    def _begin(self, wiring: Wiring, first: str) -> None:
        if self.branch is not None:
            return
        record = wiring.catalog.backups.list(SERVER)[0]
        self.branch = Branch(
            server=SERVER,
            id=new_id(record.started_at),
            noticed_at=record.started_at.replace(year=2020),
            reason=BranchReason.FIRST,
            server_uuid=record.server_uuid,
            flavour="mariadb" if record.flavour == "mariadb" else "mysql",
            basename=first.rpartition(".")[0],
            first_number=int(first.rpartition(".")[2]),
        )
        wiring.catalog.binlogs.add_branch(self.branch)
        for name in self.destinations:
            log_segments.put_branch(wiring.destination(name), self.branch)

    def _file(self, wiring: Wiring, name: str, *, is_last: bool) -> None:
        assert self.branch is not None
        path = self.server.datadir / name
        context = self._done.get(name)
        found: list[Transaction] = []
        start = 0 if not is_last or context is None else context.end
        with path.open("rb") as stream:
            stream.seek(start)
            scanned = scan(stream, start=start, context=context if start else None, on_transaction=found.append)
        if scanned.end == start:
            return
        draft = Segment(
            server=SERVER,
            branch=self.branch.id,
            file=name,
            number=int(name.rpartition(".")[2]),
            start=start,
            end=scanned.end,
            ending=Ending.OPEN if is_last else scanned.ending,
            gtids_before=scanned.gtids_before,
            gtids_after=scanned.gtids_after,
            transactions=scanned.transactions,
            first_at=scanned.first_at,
            last_at=scanned.last_at,
            precise=scanned.precise,
            server_ids=scanned.server_ids,
            flavour=scanned.context.flavour,
            server_version=scanned.context.server_version,
            sha256="",
            remarks=scanned.remarks if self.remarked else (),
        )
        known = {(file, one.start) for file, one in self.transactions}
        self.transactions += [(name, one) for one in found if (name, one.start) not in known]
        store(wiring, self.destinations, self.house, draft, path, found)
        self._done[name] = scanned.context if is_last else None


def store(
    wiring: Wiring,
    destinations: Sequence[str],
    house: House,
    draft: Segment,
    path: Path,
    transactions: Sequence[Transaction],
) -> Segment:
    """Seal the segment's bytes of ``path`` and put it everywhere."""
    sealer = Sealer((house.keys.fingerprint,), house.keys.public_home)
    sealing = Sealing(house.base / "sealing", sealer)
    for one in transactions:
        sealing.transaction(one)
    with path.open("rb") as stream, mock.patch.object(segment_documents, "PART_SIZE", PART_SIZE):
        stream.seek(draft.start)
        digest = sealing.plain(stream, draft.start, draft.end)
    segment = replace(draft, sha256=digest)
    sealed = sealing.finish(segment, house.base / "sealed")
    now = datetime.now(UTC)
    for name in destinations:
        stored = log_segments.put(wiring.destination(name), sealed, now=now)
        wiring.catalog.binlogs.add_segment(segment, name, stored.stored_bytes, now)
    Sealed.remove(sealed.folder)
    return segment


# -- damage at the destination


@contextmanager
def as_it_was(house: House) -> Iterator[None]:
    """Whatever happens to the binary logs at the destination and to the catalog is undone."""
    logs, saved, catalog = house.repository / "binlogs", house.base / "saved", house.base / "catalog.db"
    shutil.copytree(logs, saved)
    with closing(sqlite3.connect(catalog)) as live, closing(sqlite3.connect(house.base / "saved.db")) as kept:
        live.backup(kept)
    try:
        yield
    finally:
        shutil.rmtree(logs)
        saved.rename(logs)
        with closing(sqlite3.connect(catalog)) as live, closing(sqlite3.connect(house.base / "saved.db")) as kept:
            kept.backup(live)


def flip(part: Path) -> None:
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
