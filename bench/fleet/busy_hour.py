"""The work of an hour of a large installation by the real service: hourly backups of 1,000 servers, a copy of each at
a second destination, retention and sweeps, on a catalog in which each server has 100 backups.

``python -m bench.fleet.busy_hour``. All servers are due in the same minute, which begins soon after the service;
the hour is over when each of them has a new backup and its copy, however long that takes on this machine. All names
lead to one small MariaDB server; backups and copies are real.
``--servers 20 --backups 48`` is done in two minutes. ``--memory``: the most that a process of a job may take. ``--in``:
the folder for all of it; one in memory (``/dev/shm``) where others keep the disk busy.

The service's memory grows while it begins: all servers are looked at for the first time, and every connection to the
catalog and every thread meets its largest work. The medians of the first and the last quarter are compared even so; the
course is told beside them. A service that is ended before, or has no time left, is told as far as it came.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import delete, text, update

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.catalog.alerts import incidents
from backupd.catalog.database import Database
from backupd.catalog.proofs import proofs, witnesses
from backupd.catalog.restores import restores
from backupd.catalog.session import open_catalog
from backupd.catalog.tables.backups import identities
from backupd.catalog.tables.binlogs import (
    binlog_branches,
    binlog_confirmed,
    binlog_copies,
    binlog_runs,
    binlog_segments,
    binlog_streams,
)
from backupd.model.job import JobState
from backupd.model.text import format_duration, format_size, parse_size
from bench.house import BACKUPD
from bench.measure import peak_of
from tests.support.catalog.bulk import fill, lay
from tests.support.catalog.fleet import Fleet
from tests.support.keys import operator_keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import short_directory

POLICY = """\
physical: {{full: "{minute} * * * *"}}
destinations: {{required: [local], others: [offsite]}}
retention: {{local: {{recovery_window: {days}d}}, offsite: {{recovery_window: {days}d}}}}
"""
KINDS = ("physical-full", "replicate")
"""Of these each server is given one at least."""
LOGS = (binlog_copies, binlog_runs, binlog_confirmed, binlog_segments, binlog_streams, binlog_branches)
BEGINNING = timedelta(minutes=2)
"""Until all servers are due: the service has started by then."""
SAMPLE = 1.0
"""Seconds between looks at the processes."""
PARTS = 12
"""Of the hour, of each of which the memory is told."""


def write(base: Path, server: PrivateServer, fleet: Fleet, homes: tuple[Path, Path, str]) -> Path:
    """The configuration of ``fleet`` in ``base``; ``homes``: GnuPG's public and secret home, and the recipient."""
    (base / "policies").mkdir()
    minute = (datetime.now(UTC) + BEGINNING).minute
    (base / "policies" / "hourly.yaml").write_text(POLICY.format(days=fleet.backups // 24 + 3, minute=minute))
    file = server.client_file()
    servers = "".join(
        f"  {name}: {{socket: {server.socket}, defaults_file: {file}, policy: hourly}}\n" for name in fleet.names
    )
    config = base / "backupd.yaml"
    config.write_text(
        f"catalog: sqlite:///{base}/catalog.db\nspool: {base}/spool\npolicies: {base}/policies\nservers:\n{servers}"
        f"destinations:\n  local: {{type: filesystem, path: {base}/local}}\n"
        f"  offsite: {{type: filesystem, path: {base}/offsite, off_site: true}}\n"
        f"encryption: {{gnupg_home: {homes[0]}, recipients: [{homes[2]}]}}\n"
        f"restore: {{gnupg_home: {homes[1]}, scratch: {{path: {base}/scratch}}}}\napi: {{enabled: false}}\n"
    )
    return config


def family(root: int) -> Iterator[int]:
    """The processes that ``root`` has started, and what these have started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    waiting = [root]
    while waiting:
        above = waiting.pop()
        found = [pid for pid, parent in parents.items() if parent == above]
        yield from found
        waiting += found


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_ours(pid: int) -> bool:
    """Whether it runs our code: programs such as mariadb-backup and gpg do not."""
    with suppress(OSError):
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    return False


class Hour:
    """One run of the service over ``config``."""

    def __init__(self, base: Path, config: Path, fleet: Fleet, patience: float) -> None:
        self._base, self._config, self._fleet, self._patience = base, config, fleet, patience
        self._database = Database(f"sqlite:///{base}/catalog.db")
        self.begun = datetime.now(UTC)
        self.service: list[int] = []
        self.largest = 0
        self.seconds = 0.0
        self.cpu = 0.0
        self.ended: Counter[tuple[str, str]] = Counter()
        self.served: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self) -> None:
        """Raises RuntimeError when the service ends by itself, and TimeoutError."""
        before, started = os.times(), time.monotonic()
        with (
            (self._base / "log").open("wb") as log,
            subprocess.Popen(
                [str(BACKUPD), "--config", str(self._config), "serve"],
                stderr=log,
                env={**os.environ, "BACKUPD_RUNTIME": str(self._base / "run")},
            ) as service,
        ):
            try:
                while not self._is_over():
                    if service.poll() is not None:
                        raise RuntimeError(f"the service ended: {(self._base / 'log').read_text()[-2000:]}")
                    if time.monotonic() - started > self._patience:
                        raise TimeoutError(f"after {self._patience:.0f} s: {self.served}, {self.ended}")
                    self._sample(service.pid)
                    time.sleep(SAMPLE)
            finally:
                self.seconds = time.monotonic() - started
                service.terminate()
                service.wait(60)
                after = os.times()
                self.cpu = after.children_user + after.children_system - before.children_user - before.children_system

    def _sample(self, service: int) -> None:
        self.service.append(resident(service))
        self.largest = max([self.largest, *(peak_of(pid) for pid in family(service) if is_ours(pid))])

    def _is_over(self) -> bool:
        rows = text(
            "SELECT kind, state, count(*), count(DISTINCT server) FROM jobs WHERE queued_at >= :begun "
            "AND state NOT IN ('queued', 'running', 'waiting') GROUP BY kind, state"
        )
        failed = text(
            "SELECT kind, max(server), message, max(hint) FROM jobs WHERE queued_at >= :begun AND state = 'failed' "
            "GROUP BY kind, replace(message, server, '') LIMIT 9"
        )
        begun = self.begun.replace(tzinfo=None)
        with self._database.read() as connection:
            found = connection.execute(rows, {"begun": begun}).all()
            self.failures = [" ".join(map(str, row)) for row in connection.execute(failed, {"begun": begun})]
        self.ended = Counter({(kind, state): count for kind, state, count, _servers in found})
        self.served = Counter({kind: servers for kind, state, _count, servers in found if state == JobState.SUCCEEDED})
        return all(self.served[kind] >= self._fleet.servers for kind in KINDS)

    def report(self, limit: int) -> str:
        quarter = max(1, len(self.service) // 4)
        first, last = (statistics.median(part) for part in (self.service[:quarter], self.service[-quarter:]))
        size = max(1, -(-len(self.service) // PARTS))
        course = (statistics.median(self.service[at : at + size]) for at in range(0, len(self.service), size))
        done = ", ".join(f"{count:,} {kind} {state}" for (kind, state), count in sorted(self.ended.items()))
        fleet = self._fleet
        memory = f"{format_size(int(first))}, {format_size(int(last))}"
        return "\n".join(
            [
                f"| {fleet.servers:,} servers, {fleet.servers * fleet.backups:,} backups before | measured | goal |",
                "|---|---|---|",
                f"| at work for | {format_duration(self.seconds)}, CPU {self.cpu:,.0f} s | |",
                f"| jobs | {done} | none failed |",
                f"| the service's memory, first and last quarter | {memory} | flat (≤ 1.1): {last / first:.2f} |",
                f"| its course, MiB | {', '.join(f'{one / (1 << 20):.0f}' for one in course)} | |",
                f"| its most | {format_size(max(self.service))} | |",
                f"| largest process of a job | {format_size(self.largest)} | ≤ {format_size(limit)} |",
                *(f"\nfailed: {one}" for one in self.failures),
            ]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--backups", type=int, default=100)
    parser.add_argument("--patience", type=float, default=7200.0, help="seconds")
    parser.add_argument("--memory", type=parse_size, default=parse_size("200MiB"))
    parser.add_argument("--in", dest="base", default="", metavar="DIR")
    options = parser.parse_args()
    with short_directory(base=options.base) as base, operator_keys() as keys, PrivateServer(binlog=False) as server:
        base.chmod(0o755)
        server.create_backup_users()
        fleet = Fleet(datetime.now(UTC), options.servers, options.backups, options.backups, whole=True)
        url = f"sqlite:///{base}/catalog.db"
        fill(url, fleet)
        database = Database(url)
        with database.write() as connection:
            (uuid,) = next(iter(server.query("SELECT @@server_uid")))
            connection.execute(update(identities).values(uuid=uuid, address=str(server.socket)))  # it answers for all
            for table in (*LOGS, proofs, witnesses, restores, incidents):
                connection.execute(delete(table))  # nothing of them lies at a destination
        database.close()
        config = write(base, server, fleet, (keys.public_home, keys.secret_home, keys.user_id))
        settings = load_settings(config)
        with open_catalog(url) as catalog:
            wiring = Wiring(settings, catalog)
            for name in settings.destinations:
                wiring.destination(name).initialise(fleet.now)
            lay(fleet, wiring.destination("local"))
        for folder in ("servers", "objects"):
            subprocess.run(["cp", "-al", "-t", base / "offsite", base / "local" / folder], check=True)
        hour = Hour(base, config, fleet, options.patience)
        try:
            hour.run()
        finally:
            print(hour.report(options.memory), flush=True)


if __name__ == "__main__":
    main()
