"""An installation with several real destinations, of which some are caught up later, and backups nobody had to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Wiring
from backupd.app.copies.replication import Replicated, bring_up_to_date
from backupd.app.retention import retention
from backupd.app.retention.retention import Applied
from backupd.app.service.dispatch import perform
from backupd.model.job import JobKind, JobRecord, JobState
from storage import layout
from storage.destination import Destination
from tests.support.catalog.installation import SERVER, Installation

JOB = "20261121T040000Z-00000000"


def apply(wiring: Wiring, server: str, run: JobRun, *, really: bool = False) -> Applied:
    """The rules, and the sweeps that follow from them, however they ended."""
    held: list[str] = []
    try:
        applied = retention.apply(wiring, server, run, really=really)
    finally:
        for name in wiring.catalog.backups.destinations_of(server):
            sweep = replace(run.job, kind=JobKind.SWEEP, server="", arguments={"destination": name})
            held += perform(wiring, replace(run, job=sweep)).outcome
    return replace(applied, held=(*applied.held, *held))


@dataclass
class Shop(Installation):
    """``destinations`` are the required ones, ``others`` the rest; ``policy``: more of it."""

    others: Sequence[str] = ("offsite",)
    policy: str = ""
    off_site: Sequence[str] = ("offsite",)
    swapped: dict[str, Destination] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.write(self.rules)
        for name in self.destinations:
            self.at(name).initialise(self.clock())

    def write(self, rules: str, *, servers: Sequence[str] = (SERVER,)) -> None:
        folder = self.base / "policies"
        folder.mkdir(exist_ok=True)
        (folder / "gold.yaml").write_text(
            f'physical: {{full: "0 2 * * *"}}\nbinlog: {{stream: true}}\ndestinations: {{required: '
            f"[{', '.join(self.destinations)}], others: [{', '.join(self.others)}]}}\n"
            + (f"retention: {rules}\n" if rules else "")
            + self.policy
        )
        roots = "".join(
            f"  {name}: {{type: filesystem, path: {self.roots.get(name, self.base / name)}, off_site: "
            f"{str(name in self.off_site).lower()}}}\n"
            for name in (*self.destinations, *self.others)
        )
        listed = "".join(f"  {name}: {{policy: gold, socket: /run/none.sock}}\n" for name in servers)
        file = self.base / "backupd.yaml"
        file.write_text(
            f"spool: {self.base}/spool\npolicies: {folder}\nservers:\n{listed}destinations:\n{roots}"
            f"encryption: {{gnupg_home: {self.base}, recipients: [ops@example.com]}}\n"
        )
        self.wiring = Wiring(load_settings(file), self.catalog, self.clock)

    def swap(self, destination: Destination) -> None:
        """Use ``destination`` where the configuration names one of its name."""
        self.wiring._opened[destination.name] = destination

    def job(self) -> JobRun:
        return JobRun(JobRecord(JOB, JobKind.REPLICATE, SERVER, JobState.RUNNING, self.clock()))

    def replicate(self, destination: str = "offsite", run: JobRun | None = None) -> Replicated:
        return bring_up_to_date(self.wiring, SERVER, destination, run or self.job(), pauses=())

    def whole(self, destination: str = "offsite") -> dict[str, bytes]:
        """Everything under objects and servers there, but trees."""
        found = {}
        for prefix in (layout.OBJECTS, layout.SERVERS):
            for info in self.at(destination).list(prefix):
                with self.at(destination).get(info.key) as stream:
                    found[info.key] = stream.read()
        return found

    def verified(self, name: str) -> set[str]:
        return {copy.destination for copy in self.catalog.backups.get(name).copies if copy.verified_at is not None}
