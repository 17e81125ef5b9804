"""An installation with real destinations and a real catalog, and backups that nobody had to take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Wiring
from backupd.app.retention.deletion import reconcile
from backupd.catalog.session import Catalog
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, Stats
from backupd.model.event import Event
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.proof import Proof
from backupd.model.server_facts import Position
from backupd.transfer.deletion import marks
from backupd.transfer.records.manifests import backup_ids
from storage.destination import Destination
from tests.support.stores.stock import START, FakeClock, Stock, backup_id

SERVER = "shop"


@dataclass
class Installation:
    """``rules``: what the policy says under ``retention``. Servers ``shop`` and ``zoo`` follow it."""

    base: Path
    catalog: Catalog
    rules: str = ""
    destinations: Sequence[str] = ("local",)
    roots: dict[str, Path] = field(default_factory=dict)
    clock: FakeClock = field(default_factory=lambda: FakeClock(START + timedelta(days=400)))
    wiring: Wiring = field(init=False)

    def __post_init__(self) -> None:
        self.write(self.rules)
        for name in self.destinations:
            self.at(name).initialise(self.clock())

    def write(self, rules: str, *, servers: Sequence[str] = (SERVER, "zoo")) -> None:
        """(Re)write the configuration, and read it."""
        folder = self.base / "policies"
        folder.mkdir(exist_ok=True)
        policy = f'physical: {{full: "0 2 * * *"}}\ndestinations: {{required: [{", ".join(self.destinations)}]}}\n' + (
            f"retention: {rules}\n" if rules else ""
        )
        (folder / "gold.yaml").write_text(policy)
        roots = "".join(
            f"  {name}: {{type: filesystem, path: {self.roots.get(name, self.base / name)}}}\n"
            for name in self.destinations
        )
        listed = "".join(f"  {name}: {{policy: gold, socket: /run/none.sock}}\n" for name in servers)
        self.file.write_text(
            f"spool: {self.base}/spool\npolicies: {folder}\nservers:\n{listed}destinations:\n{roots}"
            f"encryption: {{gnupg_home: {self.base}, recipients: [ops@example.com]}}\n"
        )
        self.reread()

    @property
    def file(self) -> Path:
        return self.base / "backupd.yaml"

    def reread(self) -> None:
        """Read what is written now."""
        self.wiring = Wiring(load_settings(self.file), self.catalog, self.clock)

    def at(self, destination: str = "local") -> Destination:
        return self.wiring.destination(destination)

    def add(
        self,
        number: int,
        *,
        days: float,
        parent: int | None = None,
        destinations: Sequence[str] | None = None,
        server: str = SERVER,
        content: bytes = b"",
        known: bool = True,
        dump: str | None = None,
        missing: int = 0,
    ) -> str:
        """A backup that ended so many ``days`` ago, at every destination (or those named); a logical one of the set
        ``dump``."""
        full = BackupKind.PHYSICAL_FULL if dump is None else BackupKind.LOGICAL
        where = self.destinations if destinations is None else destinations
        for destination in where:
            stock = Stock(self.at(destination), server, str(full))
            stock.add(number, {"t": content or b"%d of %s" % (number, server.encode())}, parent=parent)
        ended = self.clock() - timedelta(days=days)
        if known:
            kind = full if parent is None else BackupKind.PHYSICAL_INCREMENTAL
            self.catalog.backups.add(
                BackupRecord(
                    id=backup_id(number),
                    server=server,
                    kind=kind,
                    state=BackupState.COMPLETE,
                    parent=None if parent is None else backup_id(parent),
                    started_at=ended - timedelta(minutes=9),
                    finished_at=ended,
                    stats=Stats(10, 10, 10, 1, 0),
                    position=Position(),
                    flavour="mariadb",
                    server_version="10.11.6",
                    tool_version="10.11.6",
                    copies=tuple(Copy(destination, "complete", ended) for destination in where),
                    table_set=dump or "",
                    tables_missing=missing,
                )
            )
        return backup_id(number)

    def daily(self, count: int, *, destinations: Sequence[str] | None = None) -> list[str]:
        """Full backups, newest first: the first ended an hour ago."""
        return [self.add(count - number, days=number + 0.04, destinations=destinations) for number in range(count)]

    def prove(self, name: str, outcome: str = "proved") -> None:
        at = self.clock() - timedelta(hours=1)
        self.catalog.proofs.add(Proof(f"{name}-{outcome}", SERVER, name, "latest", outcome, at, at, (), (), 1))

    def run(self, *, cancel: threading.Event | None = None, fence: Callable[[], None] = lambda: None) -> JobRun:
        job = JobRecord("20261121T040000Z-00000000", JobKind.RETENTION, SERVER, JobState.RUNNING, self.clock())
        return JobRun(job, cancel=cancel or threading.Event(), fence=fence)

    # -- looking

    def present(self, destination: str = "local", server: str = SERVER) -> set[str]:
        return {name for owner, name in backup_ids(self.at(destination)) if owner == server}

    def marked(self, destination: str = "local") -> set[str]:
        return {name for _server, name in marks(self.at(destination))}

    def state(self, name: str) -> BackupState:
        return self.catalog.backups.get(name).state

    def copies(self, name: str) -> dict[str, str]:
        return {copy.destination: copy.state for copy in self.catalog.backups.get(name).copies}

    def events(self, kind: str) -> tuple[Event, ...]:
        return self.catalog.events.list(kind=kind)

    def agrees(self) -> bool:
        """Do catalog and marks say the same?"""
        return all(reconcile(self.wiring, self.at(destination)) == [] for destination in self.destinations)
