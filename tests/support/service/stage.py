"""An installation as the pages show it: three servers with a month of history, good and bad, all of it made up."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from backupd.app.binlogs.search import Found
from backupd.app.context.logging_setup import log_path
from backupd.app.context.settings import Settings, load_settings
from backupd.app.context.wiring import Wiring, owner
from backupd.app.restores.request import RestoreRequest
from backupd.catalog.restores import StoredPlan
from backupd.model.access import Actor, AuditEntry, Role, Via
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, HoldKind, Stats
from backupd.model.binlog import Branch, BranchReason, Change, ChangeKind, Ending, Gap, Segment, Transaction
from backupd.model.errors import ToolError
from backupd.model.event import Event, Incident, Severity
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.proof import Check, Phase, Proof
from backupd.model.server_facts import Position
from backupd.model.text import format_time, new_id
from backupd.model.thaw import ColdObject, ThawPlan
from restore.planning.plan import Plan, Step, thaw_step

SHOP, CRM, LEGACY = "shop-db1", "crm-db2", "legacy-db3"
EVIL = """<img src=x onerror="alert('evil')"><script>alert("evil")</script>"""
"""What must never be more than text."""

_GOLD = """\
# The shop: an hour of work is worth more than a disk.
physical: {full: "0 2 * * sun", incremental: "0 2 * * mon-sat"}
logical: {schedule: "0 4 * * *", tables: {include: ["shop.*"]}}
binlog: {stream: true}
destinations: {required: [local], others: [offsite]}
retention:
  local: {recovery_window: 7d, keep_fulls: 2}
  offsite: {daily: 7, weekly: 5, monthly: 12}
objectives: {rpo: 60s, rto: 2h}
test_restore: {schedule: "0 6 * * *"}
"""
_BRONZE = """\
physical: {full: "0 3 * * *"}
destinations: {required: [local], others: [offsite]}
retention: {local: {keep_fulls: 3}, offsite: {keep_fulls: 6}}
objectives: {rpo: 1d}
"""
_BROKEN = """\
physical: {full: "0 25 * * *"}
destinations: {required: [vault]}
retention: {local: {keep_fuls: 3}}
"""
_GIB = 2**30


def settings_of(base: Path) -> Settings:
    """Of three servers, which nobody can reach, in this empty folder."""
    for name in ("policies", "restores", "offsite"):
        (base / name).mkdir()
    for name, text in (("gold", _GOLD), ("bronze", _BRONZE), ("silver", _BROKEN)):
        (base / "policies" / f"{name}.yaml").write_text(text)
    servers = "".join(
        f"  {name}: {{socket: {base}/no.sock, user: nobody, policy: {policy}}}\n"
        for name, policy in ((SHOP, "gold"), (CRM, "bronze"), (LEGACY, "bronze"))
    )
    file = base / "backupd.yaml"
    file.write_text(
        f"host: backup1\ncatalog: sqlite:///{base}/catalog.db\nspool: {base}/spool\nservers:\n{servers}destinations:\n"
        f"  local: {{type: filesystem, path: {base}/repository}}\n"
        f"  offsite: {{type: filesystem, path: {base}/offsite, off_site: true}}\n"
        f"encryption: {{gnupg_home: {base}/gnupg, recipients: [ops@example.com]}}\n"
        f"restore: {{gnupg_home: {base}/secret, folders: [{base}/restores]}}\n"
    )
    return load_settings(file)


class Stage:
    """``taint``: stands in every text that somebody else may have written."""

    def __init__(self, wiring: Wiring, *, taint: str = "") -> None:
        self._wiring, self._catalog, self._taint = wiring, wiring.catalog, taint
        self.now = wiring.clock()
        self.ids: dict[str, str] = {}

    def set(self) -> Stage:
        """Write all of it into the catalog. The destinations are left as they are: bare."""
        for days in range(24, -1, -1):
            self._night(days)
        self._legacy()
        self._binlogs()
        self._proofs()
        self._jobs()
        self._troubles()
        self._people()
        self._plans()
        return self

    def found(self) -> tuple[Found, ...]:
        """What a search of the binary logs would find, if they lay anywhere."""
        (branch,) = self._catalog.binlogs.branches(SHOP)
        last = self._catalog.binlogs.segments(SHOP, branch.id)[-1].segment
        rows = (
            ("0-1-399981", 41, Change("shop", "orders", ChangeKind.DELETE, 184_213), "DELETE FROM shop.orders"),
            ("0-1-399997", 2, Change("shop", "orders", ChangeKind.DELETE, 3), ""),
        )
        return tuple(
            Found(
                Transaction(gtid, 812_331_007, 840_114_522, self._ago(minutes=minutes), True, 1, (change,), text),
                last.file,
                last.branch,
                last,
                (change,),
                f"before-gtid:{gtid}",
            )
            for gtid, minutes, change, text in rows
        )

    def mount(self) -> Stage:
        """Let the destinations look as if they held something."""
        for name in self._wiring.settings.destinations:
            self._wiring.destination(name).initialise(self.now)
        return self

    def _ago(self, **span: float) -> datetime:
        return self.now - timedelta(**span)

    def _text(self, words: str) -> str:
        return f"{words} {self._taint}".rstrip()

    # -- backups

    def _night(self, days: int) -> None:
        moment = self._ago(days=days, hours=5)
        full = days % 6 == 0
        kind = BackupKind.PHYSICAL_FULL if full else BackupKind.PHYSICAL_INCREMENTAL
        record = self._backup(
            SHOP,
            moment,
            kind,
            212 * _GIB if full else 9 * _GIB + days * 2**28,
            parent=None if full else self.ids.get("shop"),
            days=days,
        )
        self.ids["shop"] = record.id
        if days % 2 == 0:
            self.ids["crm"] = self._backup(
                CRM, moment - timedelta(hours=2), BackupKind.PHYSICAL_FULL, 31 * _GIB, days=days
            ).id
        if days < 6:
            self._backup(SHOP, moment + timedelta(hours=2), BackupKind.LOGICAL, 40 * _GIB, days=days)

    def _legacy(self) -> None:
        self.ids["legacy"] = self._backup(LEGACY, self._ago(days=9), BackupKind.PHYSICAL_FULL, 4 * _GIB, days=9).id

    def _backup(
        self, server: str, moment: datetime, kind: BackupKind, size: int, *, days: int, parent: str | None = None
    ) -> BackupRecord:
        end = moment + timedelta(seconds=size / 150e6)
        copies = [Copy("local", "complete", end, end + timedelta(hours=1))]
        if server != LEGACY and days > 0:
            copies.append(Copy("offsite", "complete", end + timedelta(minutes=40), end + timedelta(hours=2)))
        record = BackupRecord(
            id=new_id(moment),
            server=server,
            kind=kind,
            state=BackupState.COMPLETE,
            parent=parent,
            started_at=moment,
            finished_at=end,
            stats=Stats(size, size // 3, size // 3 if parent is None else size // 20, 1840, 1702),
            position=Position(f"mysql-bin.{400 - days:06d}", 4 + days, f"0-1-{(400 - days) * 1000}"),
            flavour="mariadb",
            server_version="10.11.6-MariaDB-log",
            tool_version="10.11.6",
            copies=tuple(copies),
            from_lsn=0 if parent is None else (400 - days - 1) * 10,
            to_lsn=(400 - days) * 10,
            server_uuid=server,
            pinned=days == 12,
            table_set="all" if kind is BackupKind.LOGICAL else "",
            warnings=(self._text("a MyISAM table `shop`.`search` was locked while it was copied"),)
            if days == 0
            else (),
        )
        self._catalog.backups.add(record)
        return record

    # -- binary logs

    def _binlogs(self) -> None:
        branch = Branch(
            SHOP, new_id(self._ago(days=25)), self._ago(days=25), BranchReason.FIRST, SHOP, "mariadb", "mysql-bin", 375
        )
        self._catalog.binlogs.add_branch(branch)
        for days in range(25, -1, -1):
            if days in (14, 15):
                continue
            number = 400 - days
            begin, end = self._ago(days=days, hours=5), min(self._ago(days=days - 1, hours=5), self._ago(seconds=8))
            segment = Segment(
                SHOP,
                branch.id,
                branch.file(number),
                number,
                0,
                900_000_000,
                Ending.ROTATED,
                f"0-1-{number * 1000}",
                f"0-1-{number * 1000 + 1000}",
                1000,
                begin,
                end,
                True,
                (1,),
                "mariadb",
                "10.11.6",
                f"{number:064x}",
            )
            self._catalog.binlogs.add_segment(segment, "local", 300_000_000, end)
            if days > 0:
                self._catalog.binlogs.add_segment(segment, "offsite", 300_000_000, end)
        self._catalog.binlogs.confirm(SHOP, "local", branch.id, (400, 900_000_000), self._ago(seconds=8))
        self._catalog.binlogs.add_gap(
            Gap(
                SHOP,
                branch.id,
                "",
                Position("mysql-bin.000384", 900_000_000, ""),
                Position("mysql-bin.000387", 4, ""),
                self._ago(days=15, hours=5),
                self._ago(days=13, hours=5),
                self._text("the server had purged mysql-bin.000385 before it was copied"),
                self._ago(days=13),
            )
        )
        place = {"error": "", "behind_since": None}
        self._catalog.binlogs.set_stream_state(
            SHOP,
            {
                "state": "streaming",
                "since": format_time(self._ago(days=13)),
                "error": "",
                "trouble": "",
                "destinations": {"local": place, "offsite": place},
                "owner": owner(),
            },
            self.now,
        )

    # -- proofs and jobs

    def _proofs(self) -> None:
        backups = {record.server: record for record in reversed(tuple(self._catalog.backups.every()))}
        for days in range(12, -1, -1):
            at = self._ago(days=days, hours=2)
            bad = days == 7
            self._proof(SHOP, self.ids["shop"] if days == 0 else backups[SHOP].id, at, "failed" if bad else "proved")
        self._proof(CRM, self.ids["crm"], self._ago(days=1), "failed")

    def _proof(self, server: str, backup: str, at: datetime, outcome: str) -> None:
        checks = (
            Check("CHECK TABLE", "passed"),
            Check(
                self._text("`shop`.`orders`"),
                "passed" if outcome == "proved" else "failed",
                "" if outcome == "proved" else self._text("checksum 81233 where 99121 was"),
            ),
        )
        self.ids["proof"] = new_id(at)
        self._catalog.proofs.add(
            Proof(
                id=self.ids["proof"],
                server=server,
                backup_id=backup,
                target=format_time(at - timedelta(minutes=3)),
                outcome=outcome,
                started_at=at - timedelta(minutes=42),
                finished_at=at,
                phases=(
                    Phase("fetched", 900.0, 70 * _GIB),
                    Phase("prepared", 300.0, 212 * _GIB),
                    Phase("rolled_forward", 120.0, 2 * _GIB),
                    Phase("verified", 600.0, 212 * _GIB),
                ),
                checks=checks,
                tables_compared=412,
                error="" if outcome == "proved" else self._text("tables differ"),
            )
        )

    def _jobs(self) -> None:
        for number, (server, kind, state) in enumerate(
            (
                (SHOP, JobKind.FULL, JobState.SUCCEEDED),
                (SHOP, JobKind.LOGICAL, JobState.PARTIAL),
                (CRM, JobKind.TEST_RESTORE, JobState.FAILED),
                (LEGACY, JobKind.FULL, JobState.FAILED),
                (SHOP, JobKind.VERIFY, JobState.CANCELLED),
            )
        ):
            at = self._ago(hours=20 - number)
            self._job(
                str(state),
                JobRecord(
                    id=new_id(at),
                    kind=kind,
                    server=server,
                    state=JobState.RUNNING,
                    queued_at=at,
                    due_at=at,
                    leg="full",
                    started_at=at,
                    owner=owner(),
                    token=1,
                ),
            )
            bad = (
                ToolError(
                    self._text("mariadb-backup exited with status 1"),
                    detail=self._text("[00] FATAL ERROR: failed to open ./crm/leads.ibd"),
                    hint=self._text("run `backupd check` and look whether the disk is well"),
                )
                if state in (JobState.FAILED, JobState.PARTIAL)
                else None
            )
            self._catalog.jobs.finish(
                self.ids[str(state)],
                state,
                at + timedelta(minutes=31),
                token=1,
                error=bad,
                bytes=70 * _GIB,
                phases=(Phase("copied", 1500.0, 70 * _GIB), Phase("committed", 30.0, 0)),
            )
        at = self._ago(hours=15)
        self._job(
            "missed",
            JobRecord(
                id=new_id(at),
                kind=JobKind.FULL,
                server=LEGACY,
                state=JobState.MISSED,
                queued_at=at,
                due_at=at,
                leg="full",
            ),
        )
        at = self._ago(minutes=12)
        self._job(
            "running",
            JobRecord(
                id=new_id(at),
                kind=JobKind.INCREMENTAL,
                server=SHOP,
                state=JobState.RUNNING,
                queued_at=at,
                started_at=at,
                owner=owner(),
                token=1,
                heartbeat_at=self.now,
                requested_by=self._text("anna"),
                progress={
                    "phase": "copied",
                    "bytes": 61 * _GIB,
                    "bytes_total": 88 * _GIB,
                    "files": 920,
                    "files_total": 1840,
                    "note": self._text("shop/orders.ibd"),
                    "seconds_left": 310.0,
                },
            ),
        )
        at = self._ago(minutes=3)
        self._job(
            "queued",
            JobRecord(
                id=new_id(at),
                kind=JobKind.FULL,
                server=CRM,
                state=JobState.QUEUED,
                queued_at=at,
                message=self._text("waits: another job writes to local"),
            ),
        )

    def _job(self, name: str, record: JobRecord) -> None:
        self._catalog.jobs.add(record)
        self.ids[name] = record.id
        log = log_path(self._wiring.settings, record.id)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(self._text(f"{format_time(record.queued_at)} job-started {record.kind}, attempt 1") + "\n")

    # -- what is wrong, and people

    def _troubles(self) -> None:
        for server, kind, severity, words in (
            (LEGACY, "job-failed", Severity.ERROR, f"the full backup of {LEGACY} failed three times"),
            (CRM, "proof-failed", Severity.ERROR, f"a test restore of {CRM} found bad data"),
        ):
            at = self._ago(hours=6)
            self._catalog.events.add(
                Event(
                    at=at,
                    kind=kind,
                    severity=severity,
                    message=self._text(words),
                    server=server,
                    subject=self._text("full"),
                    detail=self._text("exit 1"),
                    hint=self._text("look at the job's log"),
                )
            )
            incident = Incident(
                id=new_id(at),
                kind=kind,
                server=server,
                subject=self._text("full"),
                severity=severity,
                message=self._text(words),
                detail=self._text("mariadb-backup: exit status 1"),
                hint=self._text(f"backupd check {server}"),
                opened_at=at,
                last_at=self._ago(hours=1),
                count=3,
                job_id=self.ids["failed"],
                reminders=1,
                next_reminder=self.now + timedelta(hours=2),
            )
            self._catalog.incidents.record([incident], [], {})
            self.ids["incident"] = incident.id
        closed = replace(
            incident,
            id=new_id(self._ago(days=3)),
            opened_at=self._ago(days=3),
            last_at=self._ago(days=3),
            closed_at=self._ago(days=2),
            message=self._text("offsite was full"),
        )
        self._catalog.incidents.record([closed], [], {})

    def _people(self) -> None:
        self._catalog.holds.set(
            LEGACY, HoldKind.HOLD, self._text("audit until March"), self._text("anna"), self._ago(days=2)
        )
        anna = Actor(self._text("anna"), Role.ADMIN, Via.PAGE, address="10.0.0.7")
        for action, subject, outcome in (
            ("hold-set", "", "done"),
            ("restore-requested", "20261120T", "done"),
            ("backup-deleted", "20261101T", "refused"),
        ):
            self._catalog.audit.add(
                AuditEntry(
                    self.now,
                    anna.name,
                    str(anna.role),
                    str(anna.via),
                    action,
                    server=SHOP,
                    subject=self._text(subject),
                    outcome=outcome,
                    detail=self._text("asked for by telephone"),
                    address=anna.address,
                )
            )

    # -- plans

    def _plans(self) -> None:
        """Of a restore out of an archive."""
        backup = self._catalog.backups.get(self.ids["shop"])
        cold = tuple(
            ColdObject(
                "vault",
                f"objects/{number:02x}/{number:064x}",
                24 * _GIB,
                "DEEP_ARCHIVE",
                backup.id,
                thawing=number == 2,
            )
            for number in range(3)
        )
        thaw = ThawPlan(cold, 7, "standard", self._wiring.settings.configuration.archive.prices.as_prices)
        found = Plan(
            SHOP,
            "latest",
            (backup.id,),
            ("vault",),
            Position("mysql-bin.000400", 4, "0-1-400000"),
            "the newest backup",
            72 * _GIB,
            212 * _GIB,
            (thaw_step(thaw), Step("fetched", "fetch 72.0 GiB from vault", 72 * _GIB, 900.0, "a guess")),
            warnings=(self._text("the copy at local is damaged"),),
            thaw=thaw,
            rto=7200.0,
        )
        request = RestoreRequest(SHOP, "latest", datadir=f"/srv/restored/{SHOP}")
        self.ids["archived"] = self._plan(request, found)
        self.ids["nowhere"] = self._plan(replace(request, datadir=""), replace(found, thaw=None, warnings=()))

    def _plan(self, request: RestoreRequest, found: Plan) -> str:
        stored = StoredPlan(
            new_id(self.now), SHOP, self.now, "anna", self.now + timedelta(hours=1), request.as_json(), found.as_json()
        )
        self._catalog.plans.add(stored, self.now)
        return stored.id
