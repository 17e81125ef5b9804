"""An installation whose second destination is a real bucket behind a way that fails: everything is real but the
database server, instead of which files are made up, and the clock.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from backupd.app.backup_records import behind
from backupd.app.backups.physical import take_backup
from backupd.app.context.settings import ServerSettings, load_settings
from backupd.app.context.wiring import JobRun, Wiring
from backupd.backup.commit import Documents
from backupd.backup.physical import Parent, PhysicalSpec
from backupd.catalog.session import Catalog
from backupd.engine.physical.capture import CaptureRequest, Data, End, FileEvent, LeftOut, PrepareStep, nothing
from backupd.engine.physical.capture import Stock as TableStock
from backupd.engine.sql.client import Connection
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.binlog import Branch, BranchReason, Ending, Segment, SegmentKey
from backupd.model.errors import DamagedError
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.manifest import Header, StoredObject
from backupd.model.server_facts import Position, Receipts, Tool, Version
from backupd.model.text import new_id
from backupd.transfer import log_segments
from backupd.transfer.log_segments import drop_pieces, replaced_pieces
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.manifests import read
from backupd.transfer.records.segment_documents import Sealed, Sealing
from storage import layout
from storage.destination import Destination
from storage.filesystem import FilesystemDestination
from storage.s3.destination import S3Destination
from tests.support.keys import Keys
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.s3_server import S3Server
from tests.support.stores.stock import FakeClock, Stock, facts

SERVER = "shop"
LOCAL, OFFSITE = "local", "offsite"
BUCKET = "faults"
RULES = f"{{{LOCAL}: {{keep_fulls: 2}}, {OFFSITE}: {{keep_fulls: 3}}}}"
BRANCH = Branch(
    SERVER,
    "20261121T040000Z-0000000a",
    datetime(2026, 11, 21, 4, tzinfo=UTC),
    BranchReason.FIRST,
    "u",
    "mariadb",
    "binlog",
    1,
)
_TOOL = Tool("mariadb-backup", "/usr/bin/mariadb-backup", Version(10, 11, 6), "10.11.6")
_INFO = facts("", Stock(MemoryDestination("nowhere")).header(1, ())).server


@dataclass(frozen=True)
class MadeUp:
    """A physical tool that copies what it is given, and the capture that it begins."""

    files: dict[str, bytes]
    from_lsn: int
    to_lsn: int
    tool: Tool = _TOOL
    takes_increments: bool = False
    leftovers: tuple[str, ...] = ()
    log_tail: str = ""

    def capture(self, _request: CaptureRequest) -> Self:
        return self

    def events(self) -> Iterator[FileEvent]:
        for path, content in self.files.items():
            if content:
                yield Data(path, 0, memoryview(content))
            yield End(path)

    def receipts(self) -> Receipts:
        kind = "incremental" if self.from_lsn else "full-backuped"
        return Receipts(
            kind, self.from_lsn, self.to_lsn, self.to_lsn, Position("binlog.000001", 4), "10.11.6", "10.11.6"
        )

    def stock(self) -> TableStock:
        return TableStock(inventory=())

    def prepare(self, base: Path, increments: Sequence[Path] = (), *, memory: int) -> tuple[PrepareStep, ...]:
        raise NotImplementedError("nothing that is made up is started")

    def verify_prepared(
        self,
        base: Path,
        receipts: Receipts,
        logs: Sequence[str],
        *,
        left_out: LeftOut = nothing,
    ) -> None:
        raise NotImplementedError("nothing that is made up is started")

    def redo_bytes(self, base: Path) -> int:
        raise NotImplementedError("nothing that is made up is started")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is no process."""


def log_of(folder: Path, keys: Keys, number: int, start: int, end: int, *, final: bool) -> Sealed:
    """Bytes ``[start, end)`` of binary log ``number``, sealed: nobody replays it, so any bytes will do."""
    content = random.Random(number).randbytes(end)[start:]
    sealing = Sealing(
        folder / f"{number}-{start}-{end}.new", Sealer([keys.fingerprint], keys.public_home), piece=not final
    )
    digest = sealing.plain(io.BytesIO(content), start, end)
    begun = BRANCH.noticed_at + timedelta(hours=number)
    return sealing.finish(
        Segment(
            SERVER,
            BRANCH.id,
            BRANCH.file(number),
            number,
            start,
            end,
            Ending.ROTATED if final else Ending.OPEN,
            "",
            "",
            1,
            begun,
            begun,
            True,
            (1,),
            "mariadb",
            "10.11.6",
            digest,
        ),
        folder / f"{number}-{start}-{end}",
    )


@dataclass
class Depot:
    """``server``: the real one; ``proxy`` stands before it. ``said``: what was in each backup that was said to be
    complete. ``spoiled``: (place, key) of what the test itself damaged."""

    base: Path
    catalog: Catalog
    keys: Keys
    server: S3Server
    proxy: FaultProxy
    prefix: str
    clock: FakeClock = field(default_factory=lambda: FakeClock(datetime.now(UTC)))
    said: dict[str, dict[str, bytes]] = field(default_factory=dict)
    spoiled: set[tuple[str, str]] = field(default_factory=set)
    wiring: Wiring = field(init=False)
    _runs: ExitStack = field(default_factory=ExitStack, init=False)
    _followed: object = None

    def __post_init__(self) -> None:
        self.follow([LOCAL], [OFFSITE])

    def follow(self, required: Sequence[str], others: Sequence[str], *, patient: bool = False) -> None:
        """From now on that policy. ``patient``: as in production, and not by way of the proxy; else the bucket is given
        up after a second."""
        if self._followed == (tuple(required), tuple(others), patient):
            return
        self._followed = (tuple(required), tuple(others), patient)
        folder = self.base / "policies"
        folder.mkdir(exist_ok=True)
        (folder / "gold.yaml").write_text(
            f'physical: {{full: "0 2 * * *"}}\nbinlog: {{stream: true}}\nwitness: {{enabled: false}}\n'
            f"destinations: {{required: [{', '.join(required)}], others: [{', '.join(others)}]}}\nretention: {RULES}\n"
        )
        place = {
            **self.server.bucket(BUCKET),
            "prefix": self.prefix,
            "endpoint_url": self.server.endpoint if patient else self.proxy.endpoint,
        }
        written = ", ".join(f"{name}: {value}" for name, value in place.items())
        file = self.base / "backupd.yaml"
        file.write_text(
            f"catalog: sqlite:///{self.base}/catalog.db\nspool: {self.base}/spool\n"
            f"policies: {folder}\nservers:\n  {SERVER}: {{policy: gold, socket: /none.sock}}\n"
            f"destinations:\n  {LOCAL}: {{type: filesystem, path: {self.base}/{LOCAL}}}\n"
            f"  {OFFSITE}: {{{written}, off_site: true}}\n"
            f"encryption: {{gnupg_home: {self.keys.public_home}, recipients: [{self.keys.user_id}]}}\n"
            f"restore: {{gnupg_home: {self.keys.secret_home}, scratch: {{path: {self.base}/scratch}}}}\n"
        )
        self.close()
        self.wiring = self.wired(self.catalog, patient=patient)

    def wired(self, catalog: Catalog, *, patient: bool = False) -> Wiring:
        """The same installation with another catalog."""
        wiring = Wiring(load_settings(self.base / "backupd.yaml"), catalog, self.clock)
        config = wiring.settings.destination(OFFSITE)
        how: dict[str, Any] = {} if patient else {"read_seconds": 0.7, "begin_seconds": 1.0}
        bucket = S3Destination(OFFSITE, config, clock=self.clock, **how)  # type: ignore[arg-type]  # it is that of S3
        self._runs.callback(bucket.close)
        wiring._opened[OFFSITE] = bucket
        return wiring

    def close(self) -> None:
        self._runs.close()

    def run(self, kind: JobKind = JobKind.REPLICATE) -> JobRun:
        return JobRun(JobRecord(new_id(self.clock()), kind, SERVER, JobState.RUNNING, self.clock()))

    # -- what is done

    def back_up(self, files: dict[str, bytes], parents: Sequence[str] = ()) -> str:
        """As `backupd backup` does it, of ``files``; its id."""
        self._next = (files, tuple(parents))
        run = self.run(JobKind.FULL)
        kind = BackupKind.PHYSICAL_INCREMENTAL if parents else BackupKind.PHYSICAL_FULL
        made = take_backup(self.wiring, SERVER, kind, run)
        self.said[made.record.id] = files
        return made.record.id

    def resolve(
        self,
        wiring: Wiring,
        server: ServerSettings,
        _kind: BackupKind,
        run: JobRun,
        destinations: tuple[Destination, ...],
        workdir: Path,
        *,
        because: str = "",
    ) -> tuple[PhysicalSpec, None]:
        """What the database server, its tools and the chain would have decided, of a server that is the usual one."""
        assert not because, "nothing here makes a backup be taken again"
        files, parents = self._next
        _keys, fingerprints = wiring.recipients()
        late = behind(wiring, server.name)
        begin = next(record.to_lsn for record in self.records() if record.id == parents[-1]) if parents else 0
        return PhysicalSpec(
            backup_id=run.job.id,
            server=server.name,
            connection=Connection(socket="/none.sock"),
            info=_INFO,
            tool=MadeUp(files, begin, begin + 10),
            destinations=destinations,
            recipients=fingerprints,
            gnupg_home=wiring.settings.encryption.gnupg_home,
            identity_key=wiring.identity_key(),
            workdir=workdir,
            started_at=wiring.clock() + late,
            behind=late,
            documents=lambda _body, _header: Documents(b"runbook", b"unpack"),
            parent=Parent(parents, begin) if parents else None,
        ), None

    def archive(self, sealed: Sealed, place: str) -> None:
        """As the stream does it at one place."""
        destination = self.wiring.destination(place)
        self.catalog.binlogs.add_branch(BRANCH)
        log_segments.put_branch(destination, BRANCH)
        header = log_segments.put(destination, sealed, now=self.clock())
        self.catalog.binlogs.add_segment(header.segment, place, header.stored_bytes, self.clock())
        key = header.segment.key
        pieces = replaced_pieces(destination, SERVER, key) if header.segment.is_final else ()
        if pieces and drop_pieces(destination, SERVER, pieces, now=self.clock()):
            self.catalog.binlogs.drop_segments(SERVER, pieces, place)

    # -- looking behind the proxy

    def root(self, place: str) -> Path:
        return self.base / LOCAL if place == LOCAL else self.server.folder / BUCKET / self.prefix

    def behind(self, place: str) -> Destination:
        """What really lies there, read from the server's own disk."""
        return FilesystemDestination(place, self.root(place))

    def records(self) -> tuple[BackupRecord, ...]:
        return self.catalog.backups.list(SERVER)

    def is_whole(self, place: str, backup_id: str) -> bool:
        return not self.faults(place, backup_id)

    def faults(self, place: str, backup_id: str) -> dict[str, str]:
        """Key and what is wrong with it, by the bytes that lie there; the test's own damage, too."""
        key = layout.manifest_key(SERVER, backup_id)
        if not (self.root(place) / key).is_file():
            return {key: "is missing"}
        found = read(self.behind(place), SERVER, backup_id)
        if found is None or not isinstance(found.header, Header):
            return {key: "cannot be read"}
        header = found.header
        items = {layout.backup_folder(SERVER, backup_id) + item.name: item for item in header.side_files}
        items |= {layout.object_key(item.name): item for item in header.objects}
        return {key: problem for key, item in items.items() if (problem := self._problem(place, key, item))}

    def _problem(self, place: str, key: str, item: StoredObject) -> str:
        try:
            content = (self.root(place) / key).read_bytes()
        except FileNotFoundError:
            return "is missing"
        return "" if hashlib.sha256(content).hexdigest() == item.sha256 else "holds other bytes than were stored"

    def lies(self, catalog: Catalog | None = None, *, forgive: bool = True) -> list[str]:
        """Claims of the catalog that what lies there does not bear out. ``forgive``: not what the test damaged."""
        catalog = catalog or self.catalog
        told = []
        for record in catalog.backups.list(SERVER):
            for copy in record.copies:
                if copy.state != "complete":
                    continue
                wrong = {
                    key: problem
                    for key, problem in self.faults(copy.destination, record.id).items()
                    if not (forgive and (copy.destination, key) in self.spoiled)
                }
                verified = "verified" if copy.verified_at is not None else "complete"
                told += [
                    f"{record.id} is {verified} at {copy.destination}, but {key} {problem}"
                    for key, problem in wrong.items()
                ]
        for place in (LOCAL, OFFSITE):
            rows = [
                one
                for one in catalog.binlogs.each_segment(SERVER, BRANCH.id)
                if (state := one.destinations.get(place)) is not None and state.is_complete
            ]
            faults = {one.key: self.log_faults(place, one.key) for one in rows}
            whole = {one.key.number for one in rows if one.segment.is_final and not faults[one.key]}
            for one in rows:
                if one.key.number in whole and not one.segment.is_final:
                    continue  # a piece that is about to go: its bytes are there
                told += [
                    f"binary log {one.key} is complete at {place}, but {key} {problem}"
                    for key, problem in faults[one.key].items()
                    if not (forgive and (place, key) in self.spoiled)
                ]
        return told

    def log_faults(self, place: str, key: SegmentKey) -> dict[str, str]:
        where = layout.segment_key(SERVER, key)
        if not (self.root(place) / where).is_file():
            return {where: "is missing"}
        try:
            header = log_segments.load_header(self.behind(place), SERVER, key)
        except DamagedError:
            return {where: "cannot be read"}
        return {
            header.folder + item.name: problem
            for item in header.sealed
            if (problem := self._problem(place, header.folder + item.name, item))
        }

    # -- damage

    def stored_keys(self, place: str) -> list[str]:
        """Everything of backups and binary logs there."""
        root = self.root(place)
        return sorted(
            str(path.relative_to(root))
            for top in ("objects", "servers", "binlogs")
            for path in (root / top).rglob("*")
            if path.is_file() and "/files/" not in str(path)
        )

    def rot(self, place: str, key: str, dice: random.Random) -> None:
        path = self.root(place) / key
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 0x10
        path.chmod(0o600)
        path.write_bytes(data)
        self.spoiled.add((place, key))

    def lose(self, place: str, key: str) -> None:
        (self.root(place) / key).unlink()
        self.spoiled.add((place, key))


@contextmanager
def depot(
    base: Path,
    catalog: Catalog,
    keys: Keys,
    server: S3Server,
    proxy: FaultProxy,
    prefix: str,
) -> Iterator[Depot]:
    one = Depot(base, catalog, keys, server, proxy, prefix)
    try:
        yield one
    finally:
        one.close()


def chain_above(records: Sequence[BackupRecord], backup_id: str) -> tuple[str, ...]:
    """Ids from the full backup to this one."""
    by_id = {record.id: record for record in records}
    chain = [backup_id]
    while (parent := by_id[chain[-1]].parent) is not None and parent in by_id:
        chain.append(parent)
    return tuple(reversed(chain))
